//! Files that are edited in place, as on a local disk, and stored as a whole.

use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::process::Command;

use rustix::io::Errno;
use s3csi_s3_server::S3Operation;

use crate::on_both_servers;
use crate::world::{BUCKETS, World, check_errno, in_process_with, listing, noise};

on_both_servers!(
    a_file_is_appended_to,
    a_file_is_changed_in_the_middle,
    a_writer_may_go_back,
    a_writer_may_go_back_in_a_large_file,
    a_writer_reads_back_what_it_wrote,
    a_file_is_made_shorter_and_longer,
    a_file_that_is_being_written_changes_its_length,
    a_mapped_file_is_stored,
    all_handles_of_a_file_see_one_content,
    an_open_file_is_removed,
    an_open_file_is_renamed,
    a_file_that_is_open_is_replaced_by_a_rename,
    a_large_file_is_edited,
    a_program_may_only_change_what_the_mount_allows,
    a_sequential_mount_refuses_to_edit,
);

fn editable(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

fn a_file_is_appended_to(world: &World) {
    world.put("log", b"one\n");
    let mount = world.mount();
    for line in ["two\n", "three\n"] {
        let mut file = OpenOptions::new().append(true).open(mount.path("log")).unwrap();
        file.write_all(line.as_bytes()).unwrap();
    }
    world.check_object("log", b"one\ntwo\nthree\n");
    let mut file = OpenOptions::new().append(true).create(true).open(mount.path("new log")).unwrap();
    file.write_all(b"a").unwrap();
    file.write_all(b"b").unwrap();
    drop(file);
    world.check_object("new log", b"ab");
    mount.unmount();
}

fn a_file_is_changed_in_the_middle(world: &World) {
    world.put("file", b"0123456789");
    let mount = world.mount();
    let file = editable(&mount.path("file"));
    file.write_all_at(b"ab", 3).unwrap();
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"012ab56789");
    file.sync_all().unwrap();
    world.check_object("file", b"012ab56789");
    file.write_all_at(b"z", 12).unwrap();
    drop(file);
    world.check_object("file", b"012ab56789\0\0z");
    assert_eq!(fs::metadata(mount.path("file")).unwrap().len(), 13);
    mount.unmount();
}

fn a_writer_may_go_back(world: &World) {
    let mount = world.mount();
    let mut file = File::create(mount.path("archive")).unwrap();
    let content = noise(1, 300_000);
    file.write_all(&content).unwrap();
    file.seek(SeekFrom::Start(4)).unwrap();
    file.write_all(b"header").unwrap();
    file.seek(SeekFrom::End(0)).unwrap();
    file.write_all(b"end").unwrap();
    drop(file);
    let mut expected = content;
    expected[4..10].copy_from_slice(b"header");
    expected.extend(b"end");
    world.check_object("archive", &expected);
    mount.unmount();
}

fn a_writer_may_go_back_in_a_large_file(world: &World) {
    let stage = world.fixture.create_directory("stage");
    let mount = world.engine().writable().argument("--stage").argument(&stage).mount();
    let mut content = noise(2, 30 << 20);
    let mut file = File::create(mount.path("film")).unwrap();
    file.write_all(&content).unwrap();
    file.seek(SeekFrom::Start(4)).unwrap();
    file.write_all(b"header").unwrap();
    file.seek(SeekFrom::End(0)).unwrap();
    file.write_all(b"end").unwrap();
    content[4..10].copy_from_slice(b"header");
    content.extend(b"end");
    assert!(fs::read(mount.path("film")).unwrap() == content, "a reader does not see what was written");
    drop(file);
    world.check_object("film", &content);
    mount.unmount();
}

fn a_writer_reads_back_what_it_wrote(world: &World) {
    let mount = world.mount();
    let mut file =
        OpenOptions::new().read(true).write(true).create(true).truncate(true).open(mount.path("file")).unwrap();
    file.write_all(b"written").unwrap();
    file.seek(SeekFrom::Start(0)).unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "written");
    drop(file);
    world.check_object("file", b"written");
    mount.unmount();
}

fn a_file_is_made_shorter_and_longer(world: &World) {
    world.put("file", b"0123456789");
    let mount = world.mount();
    let truncate = |size: u64| {
        let program = Command::new("truncate").arg(format!("--size={size}")).arg(mount.path("file")).status().unwrap();
        assert!(program.success());
    };
    truncate(4);
    world.check_object("file", b"0123");
    truncate(6);
    world.check_object("file", b"0123\0\0");
    truncate(0);
    world.check_object("file", b"");
    mount.unmount();
}

fn a_file_that_is_being_written_changes_its_length(world: &World) {
    let mount = world.mount();
    let mut file = File::create(mount.path("file")).unwrap();
    file.write_all(b"0123456789").unwrap();
    file.set_len(10).unwrap();
    file.set_len(3).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 3);
    file.set_len(5).unwrap();
    drop(file);
    world.check_object("file", b"012\0\0");
    mount.unmount();
}

fn a_mapped_file_is_stored(world: &World) {
    world.put("file", &[b'.'; 10_000]);
    let mount = world.mount();
    let script = "import mmap, os, sys\n\
        f = os.open(sys.argv[1], os.O_RDWR)\n\
        m = mmap.mmap(f, 0)\n\
        os.close(f)\n\
        m[5000:5004] = b'edit'\n\
        m.close()\n";
    let python = Command::new("python3").args(["-c", script]).arg(mount.path("file")).output().unwrap();
    assert!(python.status.success(), "{}", String::from_utf8_lossy(&python.stderr));
    let mut expected = vec![b'.'; 10_000];
    expected[5000..5004].copy_from_slice(b"edit");
    assert_eq!(fs::read(mount.path("file")).unwrap(), expected);
    // Stored after the last use of the mapping, which no call waits for.
    world.check_object_soon("file", &expected);
    mount.unmount();
}

fn all_handles_of_a_file_see_one_content(world: &World) {
    world.put("file", b"0123456789");
    let mount = world.mount();
    let reader = File::open(mount.path("file")).unwrap();
    let mut bytes = [0; 4];
    reader.read_exact_at(&mut bytes, 0).unwrap();
    let (first, second) = (editable(&mount.path("file")), editable(&mount.path("file")));
    first.write_all_at(b"AB", 0).unwrap();
    second.write_all_at(b"CD", 2).unwrap();
    reader.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"ABCD");
    assert_eq!(listing(mount.directory()), ["file"]);
    drop(first);
    world.check_object("file", b"ABCD456789");
    second.write_all_at(b"E", 4).unwrap();
    drop(second);
    world.check_object("file", b"ABCDE56789");
    reader.read_exact_at(&mut bytes, 4).unwrap();
    assert_eq!(&bytes, b"E567");
    drop(reader);
    mount.unmount();
}

fn an_open_file_is_removed(world: &World) {
    world.put("file", b"content");
    let mount = world.mount();
    let mut journal = File::create(mount.path("journal")).unwrap();
    journal.write_all(b"never stored").unwrap();
    let file = editable(&mount.path("file"));
    file.write_all_at(b"C", 0).unwrap();
    for name in ["journal", "file"] {
        fs::remove_file(mount.path(name)).unwrap();
        check_errno(fs::metadata(mount.path(name)), &[Errno::NOENT]);
    }
    assert_eq!(file.metadata().unwrap().nlink(), 0);
    let mut bytes = [0; 7];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"Content");
    journal.write_all(b", still").unwrap();
    fs::write(mount.path("journal"), "another file").unwrap();
    drop((file, journal));
    world.check_object("journal", b"another file");
    assert_eq!(world.keys(), ["journal"]);
    mount.unmount();
}

fn an_open_file_is_renamed(world: &World) {
    world.put("existing", b"0123");
    let mount = world.mount();
    let mut new = File::create(mount.path("new.lock")).unwrap();
    new.write_all(b"new").unwrap();
    fs::rename(mount.path("new.lock"), mount.path("new")).unwrap();
    let existing = editable(&mount.path("existing"));
    existing.write_all_at(b"A", 0).unwrap();
    fs::rename(mount.path("existing"), mount.path("renamed")).unwrap();
    existing.write_all_at(b"B", 1).unwrap();
    new.write_all(b"er").unwrap();
    drop((new, existing));
    world.check_object("new", b"newer");
    world.check_object("renamed", b"AB23");
    assert_eq!(world.keys(), ["new", "renamed"]);
    mount.unmount();
}

fn a_file_that_is_open_is_replaced_by_a_rename(world: &World) {
    world.put("file", b"old content");
    let mount = world.mount();
    let open = editable(&mount.path("file"));
    open.write_all_at(b"O", 0).unwrap();
    fs::write(mount.path("file.new"), "new content").unwrap();
    fs::rename(mount.path("file.new"), mount.path("file")).unwrap();
    open.write_all_at(b"X", 1).unwrap();
    drop(open);
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"new content");
    world.check_object("file", b"new content");
    mount.unmount();
}

fn a_large_file_is_edited(world: &World) {
    let mut content = noise(7, 30 << 20);
    world.put("file", &content);
    let stage = world.fixture.create_directory("stage");
    let mount = world.engine().writable().argument("--stage").argument(&stage).mount();
    let file = editable(&mount.path("file"));
    file.write_all_at(b"middle", 20 << 20).unwrap();
    content[20 << 20..(20 << 20) + 6].copy_from_slice(b"middle");
    let mut file = { file };
    file.seek(SeekFrom::End(0)).unwrap();
    file.write_all(b"more").unwrap();
    content.extend(b"more");
    drop(file);
    world.check_object("file", &content);
    let refused = world.engine().writable().argument("--max-stage-size=0").mount();
    let file = editable(&refused.path("file"));
    check_errno(file.write_all_at(b"x", 0), &[Errno::NOSPC]);
    drop(file);
    world.check_object("file", &content);
    refused.unmount();
    mount.unmount();
    assert_eq!(fs::read_dir(&stage).unwrap().count(), 0, "the staging directory is not empty");
}

fn a_program_may_only_change_what_the_mount_allows(world: &World) {
    world.put("file", b"content");
    let mount = world.engine().mount();
    check_errno(OpenOptions::new().append(true).open(mount.path("file")), &[Errno::PERM]);
    let file = editable(&mount.path("file"));
    check_errno(file.write_all_at(b"x", 0), &[Errno::PERM]);
    check_errno(fs::rename(mount.path("file"), mount.path("other")), &[Errno::PERM]);
    drop(file);
    // A new file is not an existing one.
    let mut new = File::create(mount.path("new")).unwrap();
    new.write_all(b"0123").unwrap();
    new.seek(SeekFrom::Start(0)).unwrap();
    new.write_all(b"A").unwrap();
    drop(new);
    world.check_object("new", b"A123");
    world.check_object("file", b"content");
    mount.unmount();
}

fn a_sequential_mount_refuses_to_edit(world: &World) {
    world.put("file", b"content");
    let mount = world.engine().writable().argument("--writes=sequential").mount();
    check_errno(OpenOptions::new().append(true).open(mount.path("file")), &[Errno::PERM]);
    let mut new = File::create(mount.path("new")).unwrap();
    new.write_all(b"0123").unwrap();
    check_errno(new.set_len(2), &[Errno::INVAL]);
    new.seek(SeekFrom::Start(0)).unwrap();
    check_errno(new.write_all(b"A"), &[Errno::INVAL]);
    drop(new);
    world.check_object("file", b"content");
    assert_eq!(world.keys(), ["file"]);
    mount.unmount();
}

#[test]
fn an_object_that_was_changed_meanwhile_is_not_replaced() {
    let world = World::in_process("changed-meanwhile", BUCKETS);
    world.put("file", b"content");
    let mount = world.mount();
    let file = editable(&mount.path("file"));
    file.write_all_at(b"C", 0).unwrap();
    world.put("file", b"of another client");
    check_errno(file.sync_all(), &[Errno::STALE]);
    world.check_object("file", b"of another client");
    drop(file);
    mount.unmount();
}

#[test]
fn the_server_copies_what_was_not_changed() {
    let world = in_process_with("part-copy", s3csi_s3_server::Config::default());
    let mut content = noise(8, 40 << 20);
    world.put("file", &content);
    let mount = world.mount();
    let mut file = OpenOptions::new().append(true).open(mount.path("file")).unwrap();
    file.write_all(b"ten bytes!").unwrap();
    drop(file);
    content.extend(b"ten bytes!");
    world.check_object("file", &content);
    assert_eq!(world.store.count(S3Operation::UploadPartCopy), 1);
    assert_eq!(world.store.count(S3Operation::UploadPart), 1);
    mount.unmount();
}

#[test]
fn a_new_file_written_in_order_is_one_request() {
    let world = in_process_with("one-request", s3csi_s3_server::Config::default());
    let mount = world.mount();
    fs::write(mount.path("file"), "content").unwrap();
    assert_eq!(world.store.count(S3Operation::PutObject), 1);
    assert_eq!(world.store.count(S3Operation::GetObject), 0);
    mount.unmount();
}
