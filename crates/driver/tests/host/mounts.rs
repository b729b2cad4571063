//! Mounting, binding, probing, aborting and unmounting.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::thread;
use std::time::Instant;

use rustix::fs::{Mode, OFlags, open};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_bind, mount_change};
use s3csi_driver::host::{Access, FuseOptions, Host as _, HostError, Kernel, Probe};

use crate::server::Server;
use crate::world::{IMPATIENCE, PATIENCE, WRITABLE, World, check, wait_until};

const NOT_CONNECTED: i32 = 107;
const ABORTED: i32 = 103;
const EIO: i32 = 5;

#[test]
fn a_served_mount_is_alive_as_its_own_device_and_its_bind_too() {
    check(|world| {
        let (source, target) = (world.directory("source"), world.directory("target"));
        let server = Server::start(world.kernel.mount_fuse(&source, &WRITABLE).unwrap());
        world.kernel.bind(&source, &target, Access::ReadWrite).unwrap();

        let mounted = world.mounted_at(&source);
        assert!(mounted.is_ours());
        assert_eq!((mounted.kind.as_str(), mounted.source.as_str()), ("fuse", "mountpoint-s3"));
        assert!(!mounted.read_only && !mounted.super_read_only);
        for path in [&source, &target] {
            match world.probe(path, PATIENCE) {
                Probe::Alive { device } => assert_eq!(device, mounted.device),
                other => panic!("{} is {other}", path.display()),
            }
        }
        assert_eq!(world.kernel.mount_table().unwrap().of_device(mounted.device).count(), 2);
        let setting = format!("/sys/class/bdi/{}/read_ahead_kb", mounted.device);
        assert_eq!(fs::read_to_string(&setting).unwrap(), "128\n");
        world.kernel.set_read_ahead(mounted.device).unwrap();
        assert_eq!(fs::read_to_string(&setting).unwrap(), "512\n");

        world.kernel.unmount(&target).unwrap();
        world.kernel.unmount(&source).unwrap();
        server.join();
        assert!(matches!(world.kernel.set_read_ahead(mounted.device), Err(HostError::ReadAhead { .. })));
    });
}

#[test]
fn an_unserved_mount_hangs_until_it_is_aborted_and_then_it_is_dead() {
    check(|world| {
        let source = world.directory("source");
        let descriptor = world.kernel.mount_fuse(&source, &WRITABLE).unwrap();
        let device = world.device(&source);

        assert!(matches!(world.probe(&source, IMPATIENCE), Probe::Hung));
        assert_eq!(world.kernel.probes_in_flight(), 1);
        world.kernel.abort(device).unwrap();
        wait_until("the thread of the probe returns", || world.kernel.probes_in_flight() == 0);

        assert_eq!(world.errno_of_probe(&source), NOT_CONNECTED);
        assert_eq!(world.device(&source), device, "an abort leaves the mount in place");
        world.kernel.detach(&source).unwrap();
        drop(descriptor);
    });
}

#[test]
fn a_server_that_is_stuck_in_a_request_is_aborted_too() {
    check(|world| {
        let source = world.directory("source");
        let server = Server::start(world.kernel.mount_fuse(&source, &WRITABLE).unwrap());
        assert!(matches!(world.probe(&source, PATIENCE), Probe::Alive { .. }));
        server.fall_silent();
        let before = server.received();

        let waiting = thread::scope(|scope| {
            let waiting = scope.spawn(|| world.probe(&source, PATIENCE));
            wait_until("the server has taken the request", || before < server.received());
            assert!(matches!(world.probe(&source, IMPATIENCE), Probe::Hung));
            world.kernel.abort(world.device(&source)).unwrap();
            waiting.join().unwrap()
        });

        match waiting {
            Probe::Dead(cause) => assert_eq!(cause.raw_os_error(), Some(ABORTED)),
            other => panic!("the probe that waited says {other}"),
        }
        world.kernel.detach(&source).unwrap();
        server.join();
    });
}

#[test]
fn an_abort_works_with_and_without_the_control_file_system() {
    check(|world| {
        let control = world.directory("control");
        mount("fusectl", &control, "fusectl", MountFlags::empty(), None).unwrap();
        for kernel in [Kernel::with_fuse_control(&control), Kernel::with_fuse_control("/nowhere"), Kernel::new()] {
            let source = world.directory("source");
            let descriptor = kernel.mount_fuse(&source, &WRITABLE).unwrap();
            kernel.abort(world.device(&source)).unwrap();
            assert_eq!(world.errno_of_probe(&source), NOT_CONNECTED);
            kernel.unmount(&source).unwrap();
            drop(descriptor);
        }
        world.kernel.unmount(&control).unwrap();
    });
}

#[test]
fn an_abort_finds_a_mount_point_that_is_not_hidden_and_says_when_there_is_none() {
    check(|world| {
        let (source, target) = (world.directory("source"), world.directory("target"));
        let descriptor = world.kernel.mount_fuse(&source, &WRITABLE).unwrap();
        let device = world.device(&source);
        // What is mounted on it below must not appear on its bind as well.
        mount_change(&source, MountPropagationFlags::PRIVATE).unwrap();
        mount("tmpfs", &source, "tmpfs", MountFlags::empty(), None).unwrap();
        assert!(matches!(world.kernel.abort(device), Err(HostError::AbortHidden { .. })));
        assert_eq!(world.mounted_at(&source).kind, "tmpfs");

        world.kernel.unmount(&source).unwrap();
        world.kernel.bind(&source, &target, Access::ReadWrite).unwrap();
        mount("tmpfs", &source, "tmpfs", MountFlags::empty(), None).unwrap();
        world.kernel.abort(device).unwrap();
        assert_eq!(world.errno_of_probe(&target), NOT_CONNECTED);

        for path in [&source, &source, &target] {
            world.kernel.unmount(path).unwrap();
        }
        world.kernel.abort(device).unwrap();
        drop(descriptor);
    });
}

#[test]
fn a_file_system_that_is_not_fuse_is_never_aborted() {
    check(|world| {
        let tmpfs = world.tmpfs("tmpfs");
        world.kernel.abort(world.device(&tmpfs)).unwrap();
        assert!(matches!(world.probe(&tmpfs, PATIENCE), Probe::Alive { .. }));
        assert_eq!(world.mounts().len(), 1);
        world.kernel.unmount(&tmpfs).unwrap();
    });
}

#[test]
fn a_mount_whose_descriptor_is_closed_is_dead_and_can_be_unmounted() {
    check(|world| {
        let source = world.directory("source");
        drop(world.kernel.mount_fuse(&source, &WRITABLE).unwrap());
        assert_eq!(world.errno_of_probe(&source), NOT_CONNECTED);
        assert!(matches!(world.kernel.remove_directory(&source), Err(HostError::Busy { .. })));
        world.kernel.unmount(&source).unwrap();
        world.kernel.remove_directory(&source).unwrap();
    });
}

#[test]
fn nothing_but_a_probe_waits_for_a_silent_server() {
    check(|world| {
        let (source, targets) = (world.directory("source"), ["a", "b"].map(|it| world.directory(it)));
        let server = Server::start(world.kernel.mount_fuse(&source, &WRITABLE).unwrap());
        assert!(matches!(world.probe(&source, PATIENCE), Probe::Alive { .. }));
        server.fall_silent();

        let kernel = &world.kernel;
        let started = Instant::now();
        kernel.bind(&source, &targets[0], Access::ReadWrite).unwrap();
        kernel.bind(&source, &targets[1], Access::ReadOnly).unwrap();
        kernel.create_directory(&source, 0o755).unwrap();
        kernel.create_directory(&targets[0], 0o755).unwrap();
        assert_eq!(kernel.resolve(&source).unwrap(), source);
        assert_eq!(kernel.mounted_at(&targets[1]).unwrap(), Some(world.device(&source)));
        assert!(matches!(kernel.remove_directory(&source), Err(HostError::Busy { .. })));
        assert!(matches!(kernel.mount_fuse(&source, &WRITABLE), Err(HostError::Occupied { .. })));
        kernel.unmount(&targets[0]).unwrap();
        kernel.detach(&targets[1]).unwrap();
        kernel.unmount(&source).unwrap();
        assert!(started.elapsed() < PATIENCE);
        server.join();
    });
}

#[test]
fn a_read_only_bind_refuses_writes_while_its_source_accepts_them() {
    check(|world| {
        let (source, target) = (world.tmpfs("source"), world.directory("target"));
        world.kernel.bind(&source, &target, Access::ReadOnly).unwrap();

        assert!(world.mounted_at(&target).read_only);
        assert!(!world.mounted_at(&source).read_only);
        fs::write(source.join("file"), "content").unwrap();
        assert_eq!(fs::read(target.join("file")).unwrap(), b"content");
        let refused = fs::write(target.join("file"), "other").unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);

        world.kernel.unmount(&target).unwrap();
        world.kernel.unmount(&source).unwrap();
    });
}

#[test]
fn a_read_only_bind_is_read_only_wherever_it_propagates() {
    check(|world| {
        let (source, shared, peer) = (world.tmpfs("source"), world.tmpfs("shared"), world.directory("peer"));
        mount_change(&shared, MountPropagationFlags::SHARED).unwrap();
        mount_bind(&shared, &peer).unwrap();
        let target = world.directory("shared/target");

        world.kernel.bind(&source, &target, Access::ReadOnly).unwrap();
        assert!(world.mounted_at(&target).read_only);
        assert!(world.mounted_at(&peer.join("target")).read_only);

        for path in [&target, &peer, &shared, &source] {
            world.kernel.unmount(path).unwrap();
        }
    });
}

#[test]
fn a_read_only_volume_is_read_only_as_a_file_system() {
    check(|world| {
        let source = world.directory("source");
        let options = FuseOptions { access: Access::ReadOnly, allow_other: false };
        drop(world.kernel.mount_fuse(&source, &options).unwrap());
        let mounted = world.mounted_at(&source);
        assert!(mounted.read_only && mounted.super_read_only);
        world.kernel.unmount(&source).unwrap();
    });
}

#[test]
fn a_directory_inside_a_file_system_can_be_bound_read_only() {
    check(|world| {
        let (source, target) = (world.tmpfs("source"), world.directory("target"));
        let inner = world.directory("source/inner");
        world.kernel.bind(&inner, &target, Access::ReadOnly).unwrap();
        assert!(world.mounted_at(&target).read_only);
        assert_eq!(world.mounted_at(&target).root, Path::new("/inner"));
        world.kernel.unmount(&target).unwrap();
        world.kernel.unmount(&source).unwrap();
    });
}

#[test]
fn a_bind_that_fails_leaves_nothing() {
    check(|world| {
        let (source, target) = (world.tmpfs("source"), world.directory("target"));
        for access in [Access::ReadOnly, Access::ReadWrite] {
            let missing = world.kernel.bind(&world.path("missing"), &target, access);
            assert!(matches!(missing, Err(HostError::Bind { .. })), "{missing:?}");
            let nowhere = world.kernel.bind(&source, &world.path("missing"), access);
            assert!(matches!(nowhere, Err(HostError::OpenDirectory { .. })), "{nowhere:?}");
        }
        assert_eq!(world.mounts().len(), 1);
        world.kernel.unmount(&source).unwrap();
    });
}

#[test]
fn nothing_is_mounted_on_top_of_something_or_through_a_link() {
    check(|world| {
        let (source, target, link) = (world.tmpfs("source"), world.directory("target"), world.path("link"));
        std::os::unix::fs::symlink(&target, &link).unwrap();
        assert!(matches!(world.kernel.mount_fuse(&link, &WRITABLE), Err(HostError::OpenDirectory { .. })));
        assert!(world.kernel.bind(&source, &link, Access::ReadWrite).is_err());

        world.kernel.bind(&source, &target, Access::ReadWrite).unwrap();
        for access in [Access::ReadOnly, Access::ReadWrite] {
            let second = world.kernel.bind(&source, &target, access);
            assert!(matches!(second, Err(HostError::Occupied { .. })), "{second:?}");
        }
        assert!(matches!(world.kernel.mount_fuse(&target, &WRITABLE), Err(HostError::Occupied { .. })));
        assert_eq!(world.mounts().len(), 2);
        world.kernel.unmount(&target).unwrap();
        world.kernel.unmount(&source).unwrap();
    });
}

#[test]
fn a_mount_in_use_is_busy_and_unharmed_and_can_be_detached() {
    check(|world| {
        let source = world.directory("source");
        let server = Server::start(world.kernel.mount_fuse(&source, &WRITABLE).unwrap());
        let inside = open(&source, OFlags::PATH, Mode::empty()).unwrap();

        assert!(matches!(world.kernel.unmount(&source), Err(HostError::Busy { .. })));
        assert!(matches!(world.probe(&source, PATIENCE), Probe::Alive { .. }));
        world.kernel.detach(&source).unwrap();
        assert_eq!(world.mounts(), []);
        drop(inside);
        server.join();
    });
}

#[test]
fn a_mount_that_is_hidden_below_another_is_an_error_that_names_it() {
    check(|world| {
        let parent = world.directory("parent");
        let source = world.directory("parent/source");
        let descriptor = world.kernel.mount_fuse(&source, &WRITABLE).unwrap();
        mount("tmpfs", &parent, "tmpfs", MountFlags::empty(), None).unwrap();
        for removed in [world.kernel.unmount(&source), world.kernel.detach(&source)] {
            assert!(matches!(&removed, Err(HostError::Hidden { at, .. }) if *at == source), "{removed:?}");
        }
        // The same where the path still exists.
        fs::create_dir(&source).unwrap();
        assert!(matches!(world.kernel.unmount(&source), Err(HostError::Hidden { .. })));
        world.kernel.unmount(&parent).unwrap();
        world.kernel.unmount(&source).unwrap();
        drop(descriptor);
    });
}

#[test]
fn an_error_that_the_server_answers_is_no_death() {
    check(|world| {
        let source = world.directory("source");
        let server = Server::start(world.kernel.mount_fuse(&source, &WRITABLE).unwrap());
        assert!(matches!(world.probe(&source, PATIENCE), Probe::Alive { .. }));
        server.answer_with(EIO);
        assert!(matches!(world.probe(&source, PATIENCE), Probe::Unknown(_)));
        world.kernel.unmount(&source).unwrap();
        server.join();
    });
}

#[test]
fn a_server_that_drops_requests_costs_one_thread_however_often_it_is_probed() {
    check(|world| {
        let (source, target) = (world.directory("source"), world.directory("target"));
        let server = Server::start(world.kernel.mount_fuse(&source, &WRITABLE).unwrap());
        world.kernel.bind(&source, &target, Access::ReadWrite).unwrap();
        assert!(matches!(world.probe(&source, PATIENCE), Probe::Alive { .. }));
        server.fall_silent();
        for path in [&source, &target, &source, &target] {
            assert!(matches!(world.probe(path, IMPATIENCE), Probe::Hung));
            assert_eq!(world.kernel.probes_in_flight(), 1);
        }
        world.kernel.abort(world.device(&source)).unwrap();
        wait_until("the thread of the probe returns", || world.kernel.probes_in_flight() == 0);
        world.kernel.detach(&target).unwrap();
        world.kernel.detach(&source).unwrap();
        server.join();
    });
}

#[test]
fn unmounting_nothing_is_no_error() {
    check(|world| {
        let directory = world.directory("directory");
        std::os::unix::fs::symlink("/", world.path("link")).unwrap();
        for path in [directory, world.path("missing"), world.path("link"), world.path("missing/below")] {
            world.kernel.unmount(&path).unwrap();
            world.kernel.detach(&path).unwrap();
        }
    });
}

#[test]
fn paths_may_contain_anything() {
    for name in ["with blank", "tab\tand\nnewline", "back\\slash\\040", "ünïcødé 🪣", "#hash", "//deleted", "- -"]
    {
        check(|world| {
            let directory = world.directory(name);
            let (source, target) = (world.tmpfs(&format!("{name}/source")), world.directory(&format!("{name}/target")));
            world.kernel.bind(&source, &target, Access::ReadOnly).unwrap();
            let table = world.kernel.mount_table().unwrap();
            assert_eq!(table.at(&source).unwrap().device, table.at(&target).unwrap().device);
            assert_eq!(table.beneath(&directory).count(), 2);
            world.kernel.unmount(&target).unwrap();
            world.kernel.unmount(&source).unwrap();
        });
    }
}

#[test]
fn directories_have_exactly_the_mode_that_was_asked_for() {
    check(|world| {
        let path = world.path("a/b/c");
        world.kernel.create_directory(&path, 0o2770).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o2770);
        world.kernel.create_directory(&path, 0o755).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o2770, "it is left as it is");

        fs::write(world.path("file"), "").unwrap();
        std::os::unix::fs::symlink(&path, world.path("link")).unwrap();
        for name in ["file", "link", "file/below"] {
            assert!(world.kernel.create_directory(&world.path(name), 0o755).is_err(), "{name}");
        }
        assert!(world.kernel.remove_directory(&world.path("a")).is_err(), "it is not empty");
        world.kernel.remove_directory(&path).unwrap();
        world.kernel.remove_directory(&path).unwrap();
    });
}

#[test]
fn however_many_servers_hang_others_are_probed_and_all_probes_return_after_an_abort() {
    // More than there were threads for probes, once.
    const HUNG: usize = 520;
    check(|world| {
        let sources: Vec<_> = (0..HUNG).map(|it| world.directory(&it.to_string())).collect();
        let descriptors: Vec<_> = sources.iter().map(|it| world.kernel.mount_fuse(it, &WRITABLE).unwrap()).collect();
        let healthy = world.directory("healthy");
        let server = Server::start(world.kernel.mount_fuse(&healthy, &WRITABLE).unwrap());
        thread::scope(|scope| {
            for source in &sources {
                scope.spawn(|| assert!(matches!(world.probe(source, IMPATIENCE), Probe::Hung)));
            }
        });
        assert_eq!(world.kernel.probes_in_flight(), HUNG);
        assert!(matches!(world.probe(&healthy, PATIENCE), Probe::Alive { .. }));
        for source in &sources {
            world.kernel.abort(world.device(source)).unwrap();
            world.kernel.detach(source).unwrap();
        }
        world.kernel.unmount(&healthy).unwrap();
        server.join();
        drop(descriptors);
    });
}

/// What is tested here is the clean-up of the tests themselves.
#[test]
fn a_failed_test_leaves_no_mount_behind() {
    let directory = std::sync::Mutex::new(None);
    let failed = std::panic::catch_unwind(|| {
        check(|world: &World| {
            *directory.lock().unwrap() = Some(world.tmpfs("left"));
        });
    });
    assert!(failed.is_err());
    let left = directory.lock().unwrap().take().unwrap();
    assert_eq!(Kernel::new().mount_table().unwrap().at(&left), None);
    assert!(!left.exists());
}
