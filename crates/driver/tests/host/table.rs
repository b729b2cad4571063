//! What the kernel says is mounted: when the table is read again, how it spells paths, and a single path without the table.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use rustix::mount::{MountFlags, UnmountFlags, mount_bind, mount_remount, unmount};
use s3csi_driver::host::{Access, Host as _, HostError};

use crate::world::{WRITABLE, check, wait_until};

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

#[test]
fn only_a_mount_point_has_something_mounted_at_it() {
    check(|world| {
        let (source, target) = (world.tmpfs("source"), world.directory("source/target"));
        std::os::unix::fs::symlink(&source, world.path("link")).unwrap();
        fs::write(world.path("file"), "").unwrap();
        for name in ["source/target", "link", "file", "missing", "missing/below", "file/below"] {
            assert_eq!(world.kernel.mounted_at(&world.path(name)).unwrap(), None, "{name}");
        }
        let below = world.device(&source);
        world.kernel.bind(&source, &target, Access::ReadWrite).unwrap();
        assert_eq!(world.device(&target), below);
        let descriptor = world.kernel.mount_fuse(&world.directory("covered"), &WRITABLE).unwrap();
        let device = world.device(&world.path("covered"));
        world.kernel.bind_over(&source, &world.path("covered"), Access::ReadWrite).unwrap();
        assert_eq!(world.device(&world.path("covered")), below);
        world.kernel.unmount(&world.path("covered")).unwrap();
        drop(descriptor);
        assert_eq!(world.device(&world.path("covered")), device, "also when it is dead");
        for path in [&world.path("covered"), &target, &source] {
            world.kernel.detach(path).unwrap();
            assert_eq!(world.kernel.mounted_at(path).unwrap(), None);
        }
    });
}

#[test]
fn the_table_spells_paths_as_resolve_does() {
    check(|world| {
        let source = world.tmpfs("real/source");
        std::os::unix::fs::symlink(world.path("real"), world.path("alias")).unwrap();
        let alias = world.path("alias/source");
        let table = world.kernel.mount_table().unwrap();
        assert_eq!(table.at(&alias), None);
        assert_eq!(world.kernel.resolve(&alias).unwrap(), source);
        assert!(table.at(&world.kernel.resolve(&alias).unwrap()).is_some());

        assert_eq!(world.kernel.resolve(&world.path("alias/missing")).unwrap(), world.path("real/missing"));
        assert!(world.kernel.resolve(&world.path("missing/below")).is_err());
        assert!(matches!(world.kernel.mount_fuse(&alias, &WRITABLE), Err(HostError::Occupied { .. })));
        world.kernel.unmount(&alias).unwrap();
    });
}

#[test]
fn a_mount_that_stays_is_in_every_table_while_others_come_and_go() {
    check(|world| {
        let stays: Vec<_> = (0..40).map(|it| world.tmpfs(&format!("stays-{it}"))).collect();
        let is_done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let comes_and_goes = world.directory("comes-and-goes");
                while !is_done.load(Ordering::SeqCst) {
                    world.kernel.bind(&stays[0], &comes_and_goes, Access::ReadWrite).unwrap();
                    world.kernel.unmount(&comes_and_goes).unwrap();
                }
            });
            for _ in 0..200 {
                let table = world.kernel.mount_table();
                let is_complete = table.is_ok_and(|table| stays.iter().all(|it| table.all_at(it).count() == 1));
                if !is_complete {
                    is_done.store(true, Ordering::SeqCst);
                }
                assert!(is_complete);
            }
            is_done.store(true, Ordering::SeqCst);
        });
        for path in stays {
            world.kernel.unmount(&path).unwrap();
        }
    });
}
