//! When the mount table is read again.

use std::sync::Arc;

use rustix::mount::{MountFlags, UnmountFlags, mount_bind, mount_remount, unmount};
use s3csi_driver::host::Host as _;

use crate::world::{check, wait_until};

#[test]
fn the_table_is_read_again_after_every_change_and_only_then() {
    check(|world| {
        let (source, target) = (world.tmpfs("source"), world.directory("target"));
        for _ in 0..20 {
            mount_bind(&source, &target).unwrap();
            assert!(!world.mounted_at(&target).read_only);
            mount_remount(&target, MountFlags::BIND | MountFlags::RDONLY, "").unwrap();
            assert!(world.mounted_at(&target).read_only);
            unmount(&target, UnmountFlags::empty()).unwrap();
            assert_eq!(world.kernel.mount_table().unwrap().at(&target), None);
        }
        // Other tests of this program may mount something at any time.
        let table = || world.kernel.mount_table().unwrap();
        wait_until("the table is the same object", || Arc::ptr_eq(&table(), &table()));
        world.kernel.unmount(&source).unwrap();
    });
}
