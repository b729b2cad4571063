//! The world of these tests: a node whose engines are run by a mounter.

pub use s3csi_testbed::world::{BUCKET, PV, World, check_refused, device, names_in, pod, volume};
