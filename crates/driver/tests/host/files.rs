//! Directories in which somebody hostile has put things.

use std::fs;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use rustix::mount::{MountFlags, mount};
use s3csi_driver::host::{Host as _, SafeDir, SafeDirError};

use crate::world::{World, check, wait_until};

const TRAPS: [&str; 7] = ["link", "dangling", "loop", "fifo", "device", "directory", "socket"];

/// One of each thing that is not a regular file, and what the links lead to.
fn hostile(world: &World) -> SafeDir {
    let directory = world.directory("hostile");
    fs::write(world.path("outside"), "secret").unwrap();
    symlink("../outside", directory.join("link")).unwrap();
    symlink("../made-by-us", directory.join("dangling")).unwrap();
    symlink("loop", directory.join("loop")).unwrap();
    mknodat(CWD, directory.join("fifo"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let zero = makedev(1, 5);
    mknodat(CWD, directory.join("device"), FileType::CharacterDevice, Mode::RUSR | Mode::WUSR, zero).unwrap();
    fs::create_dir(directory.join("directory")).unwrap();
    drop(UnixListener::bind(directory.join("socket")).unwrap());
    SafeDir::open(&directory).unwrap()
}

#[test]
fn only_regular_files_are_read() {
    check(|world| {
        let dir = hostile(world);
        for name in TRAPS {
            let read = dir.read_bounded(name, 100);
            assert!(matches!(read, Err(SafeDirError::WrongType { .. })), "{name}: {read:?}");
        }
        assert_eq!(dir.read_bounded("missing", 100).unwrap(), None);
        fs::write(dir.path().join("file"), "content").unwrap();
        assert_eq!(dir.read_bounded("file", 100).unwrap().unwrap(), b"content");
    });
}

#[test]
fn an_endless_file_is_read_to_the_limit() {
    check(|world| {
        let dir = hostile(world);
        let file = fs::File::create(dir.path().join("huge")).unwrap();
        file.set_len(1 << 40).unwrap();
        assert_eq!(dir.read_bounded("huge", 1000).unwrap().unwrap(), [0; 1000]);
        assert_eq!(dir.read_bounded("huge", 0).unwrap().unwrap(), b"");
    });
}

#[test]
fn names_are_one_plain_component() {
    check(|world| {
        let dir = hostile(world);
        for name in ["", ".", "..", "/etc/passwd", "../outside", "directory/file", "nul\0byte"] {
            assert!(matches!(dir.read_bounded(name, 1), Err(SafeDirError::InvalidName { .. })), "{name:?}");
            assert!(matches!(dir.write_atomic(name, b"", 0o600, None), Err(SafeDirError::InvalidName { .. })));
            assert!(matches!(dir.create_empty(name, 0o600), Err(SafeDirError::InvalidName { .. })));
            assert!(matches!(dir.make_directory(name, 0o700, None), Err(SafeDirError::InvalidName { .. })));
            assert!(matches!(dir.directory(name), Err(SafeDirError::InvalidName { .. })));
            assert!(matches!(dir.remove_file(name), Err(SafeDirError::InvalidName { .. })));
            assert!(matches!(dir.remove_tree(name), Err(SafeDirError::InvalidName { .. })));
            assert!(matches!(dir.connect(name), Err(SafeDirError::InvalidName { .. })));
        }
        assert!(world.path("outside").exists());
    });
}

#[test]
fn a_written_file_replaces_the_name_and_never_what_it_leads_to() {
    check(|world| {
        let dir = hostile(world);
        for name in ["link", "dangling", "loop", "fifo", "device", "socket", "new"] {
            dir.write_atomic(name, b"content", 0o640, Some(4242)).unwrap();
            let found = fs::symlink_metadata(dir.path().join(name)).unwrap();
            assert!(found.is_file(), "{name}");
            assert_eq!((found.mode() & 0o7777, found.gid()), (0o640, 4242), "{name}");
            assert_eq!(dir.read_bounded(name, 100).unwrap().unwrap(), b"content");
        }
        assert_eq!(fs::read(world.path("outside")).unwrap(), b"secret");
        assert!(!world.path("made-by-us").exists());
    });
}

#[test]
fn a_write_that_fails_leaves_no_temporary_file() {
    check(|world| {
        let small = world.directory("small");
        mount("tmpfs", &small, "tmpfs", MountFlags::empty(), c"size=16k").unwrap();
        let dir = SafeDir::open(&small).unwrap();
        dir.write_atomic("file", b"old", 0o600, None).unwrap();
        let failed = dir.write_atomic("file", &vec![0; 100_000], 0o600, None);
        assert!(matches!(failed, Err(SafeDirError::Write { .. })), "{failed:?}");
        assert!(dir.make_directory("directory", 0o700, None).is_ok());
        assert!(dir.write_atomic("directory", b"", 0o600, None).is_err());

        let mut names: Vec<_> = fs::read_dir(&small).unwrap().map(|it| it.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["directory", "file"]);
        assert_eq!(dir.read_bounded("file", 100).unwrap().unwrap(), b"old");
        drop(dir);
        world.kernel.unmount(&small).unwrap();
    });
}

#[test]
fn a_reader_sees_the_old_or_the_new_content_whole() {
    check(|world| {
        let dir = SafeDir::open(&world.directory("directory")).unwrap();
        let content = |byte: u8| vec![byte; 10_000];
        dir.write_atomic("file", &content(0), 0o600, None).unwrap();
        std::thread::scope(|scope| {
            for writer in 0..3 {
                let dir = &dir;
                scope.spawn(move || {
                    for _ in 0..100 {
                        dir.write_atomic("file", &content(writer), 0o600, None).unwrap();
                    }
                });
            }
            for _ in 0..300 {
                let read = dir.read_bounded("file", 100_000).unwrap().unwrap();
                assert_eq!(read, content(read[0]));
            }
        });
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    });
}

#[test]
fn an_empty_file_is_made_once_and_not_through_a_link() {
    check(|world| {
        let dir = hostile(world);
        for name in TRAPS {
            assert!(matches!(dir.create_empty(name, 0o640), Err(SafeDirError::WrongType { .. })), "{name}");
        }
        assert!(!world.path("made-by-us").exists());
        dir.create_empty("mount.exit", 0o666).unwrap();
        dir.create_empty("mount.exit", 0o640).unwrap();
        let found = fs::metadata(dir.path().join("mount.exit")).unwrap();
        assert_eq!((found.len(), found.mode() & 0o7777), (0, 0o666));
    });
}

#[test]
fn directories_have_exactly_this_mode_and_group_and_are_no_links() {
    check(|world| {
        let dir = hostile(world);
        symlink("directory", dir.path().join("link-to-directory")).unwrap();
        for name in ["link-to-directory", "link", "dangling", "fifo", "device", "socket"] {
            let made = dir.make_directory(name, 0o700, None);
            assert!(matches!(made, Err(SafeDirError::WrongType { .. })), "{name}: {made:?}");
        }
        for name in ["new", "new", "directory"] {
            let made = dir.make_directory(name, 0o2770, Some(4242)).unwrap();
            let found = fs::metadata(made.path()).unwrap();
            assert_eq!((found.mode() & 0o7777, found.gid()), (0o2770, 4242), "{name}");
            assert_eq!(made.group().unwrap(), 4242);
            made.write_atomic("file", b"", 0o600, None).unwrap();
        }
        assert_eq!(fs::metadata(dir.path().join("new/file")).unwrap().gid(), 4242);
    });
}

#[test]
fn the_directory_itself_must_not_be_a_link() {
    check(|world| {
        let dir = hostile(world);
        symlink(dir.path(), world.path("alias")).unwrap();
        assert!(matches!(SafeDir::open(&world.path("alias")), Err(SafeDirError::Open { .. })));
        assert!(matches!(SafeDir::open(&world.path("outside")), Err(SafeDirError::Open { .. })));
    });
}

#[test]
fn a_tree_is_removed_without_leaving_it() {
    check(|world| {
        let dir = hostile(world);
        let directory = world.directory("parent");
        fs::rename(dir.path(), directory.join("tree")).unwrap();
        let parent = SafeDir::open(&directory).unwrap();
        symlink(world.path("outside"), directory.join("link")).unwrap();
        symlink(world.path("kept"), directory.join("tree/link-to-kept")).unwrap();
        fs::write(world.directory("kept").join("file"), "").unwrap();

        for name in ["tree", "link", "missing"] {
            parent.remove_tree(name).unwrap();
        }
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
        assert!(world.path("outside").exists() && world.path("kept/file").exists());
    });
}

#[test]
fn a_tree_that_is_too_deep_or_has_a_mount_in_it_is_refused() {
    check(|world| {
        let dir = hostile(world);
        fs::create_dir_all(dir.path().join("deep/".repeat(100))).unwrap();
        assert!(matches!(dir.remove_tree("deep"), Err(SafeDirError::Remove { .. })));

        let inside = world.tmpfs("hostile/directory/mount");
        fs::write(inside.join("file"), "").unwrap();
        assert!(matches!(dir.remove_tree("directory"), Err(SafeDirError::Remove { .. })));
        assert!(inside.join("file").exists());
        world.kernel.unmount(&inside).unwrap();
        dir.remove_tree("directory").unwrap();
    });
}

#[test]
fn files_are_removed_and_missing_ones_are_fine() {
    check(|world| {
        let dir = hostile(world);
        for name in ["link", "fifo", "device", "socket", "missing"] {
            dir.remove_file(name).unwrap();
        }
        assert!(world.path("outside").exists());
        assert!(matches!(dir.remove_file("directory"), Err(SafeDirError::Remove { .. })));
    });
}

#[test]
fn a_socket_is_reached_however_long_its_path_is() {
    check(|world| {
        let directory = world.directory(&"long-".repeat(40));
        let dir = SafeDir::open(&directory).unwrap();
        let listener = listen(&directory, "mount.sock");
        let mut client = dir.connect("mount.sock").unwrap();
        client.write_all(b"hello").unwrap();
        drop(client);
        let mut received = String::new();
        listener.accept().unwrap().0.read_to_string(&mut received).unwrap();
        assert_eq!(received, "hello");
    });
}

#[test]
fn a_socket_is_not_reached_through_a_link_and_connecting_to_a_dead_one_fails() {
    check(|world| {
        let dir = hostile(world);
        let _listener = listen(&world.directory("elsewhere"), "socket");
        symlink("../elsewhere/socket", dir.path().join("link-to-socket")).unwrap();
        for name in ["link-to-socket", "link", "fifo", "device", "directory"] {
            let connected = dir.connect(name);
            assert!(matches!(connected, Err(SafeDirError::WrongType { .. })), "{name}: {connected:?}");
        }
        for (name, kind) in [("missing", ErrorKind::NotFound), ("socket", ErrorKind::ConnectionRefused)] {
            let error = dir.connect(name).unwrap_err();
            assert!(error.is_not_listening(), "{error:?}");
            assert!(matches!(error, SafeDirError::Connect { cause, .. } if cause.kind() == kind));
        }
    });
}

#[test]
fn a_listener_that_never_accepts_does_not_stop_us() {
    check(|world| {
        let directory = world.directory("directory");
        let dir = SafeDir::open(&directory).unwrap();
        let _listener = listen(&directory, "mount.sock");
        let mut connected = Vec::new();
        wait_until("the queue of the listener is full", || match dir.connect("mount.sock") {
            Ok(stream) => {
                connected.push(stream);
                false
            }
            Err(error) => error.is_not_listening(),
        });
    });
}

#[test]
fn a_directory_that_was_moved_away_is_still_the_same() {
    check(|world| {
        let dir = hostile(world);
        fs::rename(dir.path(), world.path("moved")).unwrap();
        symlink("/etc", dir.path()).unwrap();
        dir.write_atomic("file", b"content", 0o600, None).unwrap();
        assert_eq!(fs::read(world.path("moved/file")).unwrap(), b"content");
        assert!(fs::symlink_metadata(world.path("moved/fifo")).unwrap().file_type().is_fifo());
        assert_eq!(fs::metadata(world.path("moved/file")).unwrap().permissions().mode() & 0o7777, 0o600);
    });
}

/// Binds with a short relative name, as the mounter does in its own directory.
fn listen(directory: &Path, name: &str) -> UnixListener {
    let handle = fs::File::open(directory).unwrap();
    let number = std::os::fd::AsRawFd::as_raw_fd(&handle);
    UnixListener::bind(format!("/proc/self/fd/{number}/{name}")).unwrap()
}
