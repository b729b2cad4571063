//! The testbed's own Kubernetes, the image, and the driver in a real cluster as users install it.
#![forbid(unsafe_code)]

mod control_plane;
mod daemon;
mod image;
mod life;
mod provisioning;
mod volumes;
mod world;
