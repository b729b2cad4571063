//! A mount is replaced or covered without a moment in which its directory is bare.

use std::fs;

use rustix::mount::{MountPropagationFlags, mount_bind, mount_change};
use s3csi_driver::host::{Access, Host as _};

use crate::world::{WRITABLE, check};

const NOT_CONNECTED: i32 = 107;

#[test]
fn a_dead_mount_is_swapped_for_another_wherever_it_propagates() {
    check(|world| {
        let (source, dead) = (world.tmpfs("source"), world.directory("dead"));
        let (shared, peer) = (world.tmpfs("shared"), world.directory("peer"));
        mount_change(&shared, MountPropagationFlags::SHARED).unwrap();
        mount_bind(&shared, &peer).unwrap();
        let target = world.directory("shared/target");
        fs::write(source.join("file"), "content").unwrap();
        drop(world.kernel.mount_fuse(&dead, &WRITABLE).unwrap());
        world.kernel.bind(&dead, &target, Access::ReadWrite).unwrap();

        world.kernel.bind_beneath(&source, &target, Access::ReadOnly).unwrap();
        assert_eq!(world.errno_of_probe(&target), NOT_CONNECTED, "the dead one is still on top");
        world.kernel.detach(&target).unwrap();
        for path in [&target, &peer.join("target")] {
            assert_eq!(fs::read(path.join("file")).unwrap(), b"content");
            assert!(world.mounted_at(path).read_only);
        }
        for path in [&target, &peer, &shared, &source, &dead] {
            world.kernel.unmount(path).unwrap();
        }
    });
}

/// As in a running container, whose volume is a copy of the mount at the target.
#[test]
fn what_covers_a_dead_mount_appears_where_a_copy_of_that_mount_is() {
    check(|world| {
        let (source, dead) = (world.tmpfs("source"), world.directory("dead"));
        let (shared, volume) = (world.tmpfs("shared"), world.directory("volume"));
        mount_change(&shared, MountPropagationFlags::SHARED).unwrap();
        let target = world.directory("shared/target");
        fs::write(source.join("file"), "content").unwrap();
        drop(world.kernel.mount_fuse(&dead, &WRITABLE).unwrap());
        world.kernel.bind(&dead, &target, Access::ReadWrite).unwrap();
        mount_bind(&target, &volume).unwrap();
        mount_change(&volume, MountPropagationFlags::DOWNSTREAM).unwrap();
        assert_eq!(world.errno_of_probe(&volume), NOT_CONNECTED);

        world.kernel.bind_over(&source, &target, Access::ReadOnly).unwrap();
        for path in [&target, &volume] {
            assert_eq!(fs::read(path.join("file")).unwrap(), b"content");
            assert!(world.mounted_at(path).read_only);
        }
        world.kernel.unmount(&target).unwrap();
        for path in [&target, &volume] {
            assert_eq!(world.errno_of_probe(path), NOT_CONNECTED);
        }
        for path in [&target, &volume, &shared, &source, &dead] {
            world.kernel.unmount(path).unwrap();
        }
    });
}

/// Targets of one source, below kubelet's directory, which is shared.
#[test]
fn what_covers_one_target_does_not_cover_the_others() {
    check(|world| {
        let shared = world.tmpfs("shared");
        mount_change(&shared, MountPropagationFlags::SHARED).unwrap();
        let (source, dead) = (world.tmpfs("shared/source"), world.directory("shared/dead"));
        drop(world.kernel.mount_fuse(&dead, &WRITABLE).unwrap());
        let targets = ["shared/one", "shared/two", "shared/three"].map(|it| world.directory(it));
        let [one, two, three] = &targets;
        world.kernel.bind(&dead, one, Access::ReadWrite).unwrap();
        world.kernel.bind(&dead, two, Access::ReadWrite).unwrap();
        world.kernel.bind(&dead, three, Access::ReadOnly).unwrap();
        fs::write(source.join("file"), "content").unwrap();

        world.kernel.bind_over(&source, one, Access::ReadWrite).unwrap();
        for path in [two, three, &dead] {
            assert_eq!(world.errno_of_probe(path), NOT_CONNECTED, "{}", path.display());
        }
        world.kernel.bind_over(&source, two, Access::ReadWrite).unwrap();
        world.kernel.unmount(one).unwrap();
        assert_eq!(fs::read(two.join("file")).unwrap(), b"content");
        for path in [two, one, two, three, &dead, &source, &shared] {
            world.kernel.unmount(path).unwrap();
        }
    });
}
