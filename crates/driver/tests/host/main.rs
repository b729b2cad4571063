//! The host room on the real kernel. Needs root and a mount namespace of its own:
//! `unshare --mount --propagation private cargo test --release -p s3csi-driver --test host`.

mod files;
mod mounts;
mod server;
mod swap;
mod table;
mod world;
