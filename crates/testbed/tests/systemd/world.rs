//! The world of these tests: a node whose engines are run by systemd.

use s3csi_testbed::systemd::units;
pub use s3csi_testbed::world::{BUCKET, World, check_refused, names_in, volume};

/// Units that serve mounts; those that unmount come and go.
pub fn mount_units() -> Vec<String> {
    units("mount-s3-*.service").into_iter().filter(|it| !it.starts_with("mount-s3-umount-")).collect()
}

/// The only unit that serves a mount.
#[track_caller]
pub fn only_unit() -> String {
    let units = mount_units();
    assert_eq!(units.len(), 1, "units: {units:?}");
    units[0].clone()
}
