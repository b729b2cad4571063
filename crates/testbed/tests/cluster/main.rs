//! The testbed's own Kubernetes, the image, and the driver in a real cluster as users install it.
#![forbid(unsafe_code)]

mod access;
mod control_plane;
mod ending;
mod examples;
mod failures;
mod headroom;
mod identity;
mod image;
mod life;
mod lost;
mod many;
mod network;
mod out_of_memory;
mod outliving;
mod provisioning;
mod reboot;
mod release;
mod restarts;
mod rights;
mod rotation;
mod sharing;
mod stalls;
mod strategies;
mod sub_paths;
mod warm_pods;
mod world;
