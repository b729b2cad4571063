//! Staging directories: without room the writer gets an error, and the object stays as it was; large files are edited in any order.

use std::fs::{self, File, OpenOptions};
use std::io::{Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::on_both_servers;
use crate::world::{World, noise};

on_both_servers!(
    a_full_disk_is_an_error_and_the_object_stays,
    a_full_staging_directory_is_an_error_and_the_object_stays,
    large_files_are_written_in_any_order,
    readers_of_a_file_that_is_shortened_get_what_is_left,
);

fn editable(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

/// What a program prints. It is a process of its own: one that another thread starts in the middle of it would close its copies of
/// this process's files, and closing stores.
#[track_caller]
fn run_python(script: &str, path: &Path) -> Vec<String> {
    let output = Command::new("python3").args(["-c", script]).arg(path).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

/// Edits beyond what there is room for, and again where there is.
fn check_full(world: &World, stage: &Path, limit: &str) {
    let content = noise(4, 30 << 20);
    world.put("file", &content);
    let mount = world.engine().writable().argument("--stage").argument(stage).argument(limit).mount();
    // The program may ignore an error, but what it has then is not the file that it meant.
    let script = "import errno, os, sys\n\
        f = os.open(sys.argv[1], os.O_RDWR)\n\
        for call in [lambda: os.pwrite(f, b'edit', 5), lambda: os.pwrite(f, b'edit', 20 << 20),\
                     lambda: os.pwrite(f, b'edit', 100), lambda: os.fsync(f)]:\n    \
            try:\n        \
                call()\n        \
                print('ok')\n    \
            except OSError as e:\n        \
                print(errno.errorcode[e.errno])\n";
    assert_eq!(run_python(script, &mount.path("file")), ["ok", "ENOSPC", "EIO", "EIO"]);
    world.check_object("file", &content);
    assert!(fs::read(mount.path("file")).unwrap() == content, "the file was changed");
    // A program that looks at nothing but its last call.
    let script = "f = open(__import__('sys').argv[1], 'r+b', buffering=0)\n\
        for at in range(0, 30 << 20, 1 << 20):\n    \
            f.seek(at)\n    \
            try: f.write(b'edit')\n    \
            except OSError: pass\n\
        f.close()\n";
    let python = Command::new("python3").args(["-c", script]).arg(mount.path("file")).output().unwrap();
    assert!(!python.status.success(), "close does not report that the file is not stored");
    world.check_object("file", &content);
    // What has room is edited as if nothing had happened.
    let file = editable(&mount.path("file"));
    file.write_all_at(b"edit", 5).unwrap();
    file.sync_all().unwrap();
    drop(file);
    let mut edited = content;
    edited[5..9].copy_from_slice(b"edit");
    world.check_object("file", &edited);
    mount.unmount();
}

fn a_full_disk_is_an_error_and_the_object_stays(world: &World) {
    let stage = world.fixture.create_directory("stage");
    mount("none", &stage, "tmpfs", MountFlags::empty(), Some(c"size=12m")).unwrap();
    check_full(world, &stage, "--max-stage-size=1024");
    unmount(&stage, UnmountFlags::empty()).unwrap();
}

fn a_full_staging_directory_is_an_error_and_the_object_stays(world: &World) {
    check_full(world, &world.fixture.create_directory("stage"), "--max-stage-size=8");
}

fn large_files_are_written_in_any_order(world: &World) {
    let stage = world.fixture.create_directory("stage");
    let mount = world.engine().writable().argument("--writes=staged").argument("--stage").argument(&stage).mount();
    let mut content = noise(6, 20 << 20);
    let mut file = File::create(mount.path("video")).unwrap();
    file.write_all(&content).unwrap();
    file.seek(SeekFrom::Start(4)).unwrap();
    file.write_all(b"header").unwrap();
    drop(file);
    content[4..10].copy_from_slice(b"header");
    world.check_object("video", &content);
    mount.unmount();
}

/// Directly, since the kernel's page cache would answer most reads.
fn readers_of_a_file_that_is_shortened_get_what_is_left(world: &World) {
    const LENGTH: u64 = 9 << 20;
    let mount = world.mount();
    let path = mount.path("file");
    fs::write(&path, noise(5, 9 << 20)).unwrap();
    let writer = editable(&path);
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reads = scope.spawn(|| {
            let options = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC;
            let reader = File::from(rustix::fs::open(&path, options, Mode::empty()).unwrap());
            let mut piece = vec![0; 1 << 20];
            let mut count = 0;
            while !is_done.load(Ordering::Acquire) {
                let read = reader.read_at(&mut piece, LENGTH - (1 << 20));
                assert!(read.is_ok(), "after {count} reads: {read:?}");
                count += 1;
            }
            count
        });
        for _ in 0..300 {
            writer.set_len(LENGTH - (1 << 20) + 5).unwrap();
            writer.set_len(LENGTH).unwrap();
        }
        is_done.store(true, Ordering::Release);
        assert!(reads.join().unwrap() > 0);
    });
    drop(writer);
    mount.unmount();
}
