//! `mv` either really moves or changes nothing. Servers that pretend are the reason for this file.

use std::fs;
use std::io::Write as _;

use rustix::io::Errno;
use s3csi_s3_server::{Config, CopySupport, Effect, Fault, RenameSupport, S3Operation};

use crate::on_both_servers;
use crate::world::{World, check_errno, in_process_with, listing, noise};

/// What a file system answers that cannot move files.
const NO_MOVES: [Errno; 4] = [Errno::NOTSUP, Errno::NOSYS, Errno::PERM, Errno::XDEV];

on_both_servers!(
    a_moved_file_keeps_its_content_and_leaves_its_old_name,
    a_moved_file_replaces_an_existing_one,
    a_file_moves_into_another_directory,
    a_large_file_moves,
    moving_over_a_file_needs_permission_to_overwrite,
    moving_a_missing_file_changes_nothing,
    a_directory_moves_with_everything_below,
    a_directory_does_not_move_onto_others_or_beyond_the_limit,
    a_sequential_mount_moves_no_directory,
    moving_needs_permission_to_delete,
);

fn a_moved_file_keeps_its_content_and_leaves_its_old_name(world: &World) {
    let mount = world.mount();
    fs::write(mount.path("old name"), "precious").unwrap();
    fs::rename(mount.path("old name"), mount.path("new näme")).unwrap();
    world.check_object("new näme", b"precious");
    assert_eq!(world.keys(), ["new näme"]);
    assert_eq!(fs::read(mount.path("new näme")).unwrap(), b"precious");
    check_errno(fs::metadata(mount.path("old name")), &[Errno::NOENT]);
    assert_eq!(listing(mount.directory()), ["new näme"]);
    mount.unmount();
}

fn a_moved_file_replaces_an_existing_one(world: &World) {
    world.put("source", b"new content");
    world.put("destination", b"old");
    let mount = world.mount();
    fs::rename(mount.path("source"), mount.path("destination")).unwrap();
    world.check_object("destination", b"new content");
    assert_eq!(world.keys(), ["destination"]);
    assert_eq!(fs::read(mount.path("destination")).unwrap(), b"new content");
    mount.unmount();
}

fn a_file_moves_into_another_directory(world: &World) {
    world.put("from/file", b"content");
    world.put("to/other", b"other");
    let mount = world.mount();
    fs::rename(mount.path("from/file"), mount.path("to/file")).unwrap();
    assert_eq!(world.keys(), ["to/file", "to/other"]);
    world.check_object("to/file", b"content");
    assert_eq!(fs::read(mount.path("to/file")).unwrap(), b"content");
    mount.unmount();
}

fn a_large_file_moves(world: &World) {
    let content = noise(20, 20 * 1024 * 1024);
    let mount = world.mount();
    fs::write(mount.path("source"), &content).unwrap();
    fs::rename(mount.path("source"), mount.path("destination")).unwrap();
    world.check_object("destination", &content);
    assert_eq!(world.keys(), ["destination"]);
    mount.unmount();
}

fn moving_over_a_file_needs_permission_to_overwrite(world: &World) {
    world.put("source", b"new");
    world.put("destination", b"old");
    let mount = world.engine().argument("--allow-delete").mount();
    check_errno(fs::rename(mount.path("source"), mount.path("destination")), &[Errno::EXIST, Errno::PERM]);
    world.check_object("source", b"new");
    world.check_object("destination", b"old");
    mount.unmount();
}

fn moving_a_missing_file_changes_nothing(world: &World) {
    world.put("destination", b"old");
    let mount = world.mount();
    check_errno(fs::rename(mount.path("missing"), mount.path("destination")), &[Errno::NOENT]);
    world.check_object("destination", b"old");
    mount.unmount();
}

fn a_directory_moves_with_everything_below(world: &World) {
    for key in ["directory/file", "directory/inner/other", "stays/file"] {
        world.put(key, key.as_bytes());
    }
    let mount = world.mount();
    let reader = fs::File::open(mount.path("directory/file")).unwrap();
    let mut open = fs::File::create(mount.path("directory/open")).unwrap();
    open.write_all(b"before").unwrap();
    fs::rename(mount.path("directory"), mount.path("stays/moved")).unwrap();
    open.write_all(b" and after").unwrap();
    drop(open);
    check_errno(fs::metadata(mount.path("directory")), &[Errno::NOENT]);
    assert_eq!(fs::read(mount.path("stays/moved/file")).unwrap(), b"directory/file");
    assert_eq!(fs::read(mount.path("stays/moved/inner/other")).unwrap(), b"directory/inner/other");
    assert_eq!(std::io::read_to_string(&reader).unwrap(), "directory/file");
    drop(reader);
    world.check_object("stays/moved/open", b"before and after");
    let files: Vec<String> = world.keys().into_iter().filter(|it| !it.ends_with('/')).collect();
    assert_eq!(files, ["stays/file", "stays/moved/file", "stays/moved/inner/other", "stays/moved/open"]);
    mount.unmount();
}

fn a_directory_does_not_move_onto_others_or_beyond_the_limit(world: &World) {
    for key in ["directory/1", "directory/2", "directory/3", "other/file"] {
        world.put(key, key.as_bytes());
    }
    let mount = world.engine().writable().argument("--max-rename-objects=2").mount();
    check_errno(fs::rename(mount.path("directory"), mount.path("new")), &[Errno::TOOBIG]);
    check_errno(fs::rename(mount.path("other"), mount.path("directory")), &[Errno::NOTEMPTY, Errno::EXIST]);
    assert_eq!(world.keys(), ["directory/1", "directory/2", "directory/3", "other/file"]);
    mount.unmount();
}

fn moving_needs_permission_to_delete(world: &World) {
    world.put("source", b"content");
    let mount = world.engine().argument("--allow-overwrite").mount();
    check_errno(fs::rename(mount.path("source"), mount.path("destination")), &[Errno::PERM]);
    assert_eq!(world.keys(), ["source"]);
    mount.unmount();
}

fn a_sequential_mount_moves_no_directory(world: &World) {
    world.put("directory/file", b"content");
    let mount = world.engine().writable().argument("--writes=sequential").mount();
    let refused = fs::rename(mount.path("directory"), mount.path("elsewhere"));
    check_errno(refused, &[Errno::NOTSUP, Errno::NOSYS, Errno::PERM, Errno::XDEV, Errno::INVAL, Errno::ISDIR]);
    assert_eq!(world.keys(), ["directory/file"]);
    mount.unmount();
}

/// Moves a file to a new name and over another one; neither may change anything.
#[track_caller]
fn check_errno_without_change(config: Config) {
    let world = in_process_with("refused-move", config);
    world.put("source", b"precious");
    world.put("destination", b"also precious");
    let mount = world.mount();
    check_errno(fs::rename(mount.path("source"), mount.path("new")), &NO_MOVES);
    check_errno(fs::rename(mount.path("source"), mount.path("destination")), &NO_MOVES);
    world.check_object("source", b"precious");
    world.check_object("destination", b"also precious");
    assert_eq!(world.keys(), ["destination", "source"]);
    assert_eq!(fs::read(mount.path("source")).unwrap(), b"precious");
    assert_eq!(fs::read(mount.path("destination")).unwrap(), b"also precious");
    check_errno(fs::metadata(mount.path("new")), &[Errno::NOENT]);
    mount.unmount();
}

#[test]
fn a_server_that_refuses_copies_moves_nothing() {
    check_errno_without_change(Config { copy: CopySupport::Refused, ..Config::default() });
    let copy = CopySupport::Refused;
    check_errno_without_change(Config { copy, rename: RenameSupport::Refused, ..Config::default() });
}

#[test]
fn a_server_that_pretends_to_copy_moves_nothing() {
    check_errno_without_change(Config { copy: CopySupport::Ignored, ..Config::default() });
}

#[test]
fn a_copy_that_fails_leaves_the_source_and_the_destination() {
    let world = in_process_with("failed-copy", Config::default());
    world.put("proof", b"this one moves");
    world.put("source", b"precious");
    world.put("destination", b"also precious");
    let mount = world.mount();
    // The server has shown that it can copy before it fails.
    fs::rename(mount.path("proof"), mount.path("proven")).unwrap();
    let fault = world.store.inject(Fault::new(Effect::Denied).operation(S3Operation::CopyObject));
    fs::rename(mount.path("source"), mount.path("destination")).unwrap_err();
    assert!(0 < fault.hits());
    world.check_object("source", b"precious");
    world.check_object("destination", b"also precious");
    fault.release();
    fs::rename(mount.path("source"), mount.path("destination")).unwrap();
    world.check_object("destination", b"precious");
    mount.unmount();
}

#[test]
fn a_move_whose_source_cannot_be_deleted_fails_and_keeps_the_source() {
    let world = in_process_with("failed-delete", Config::default());
    world.put("source", b"precious");
    let mount = world.mount();
    let _fault =
        world.store.inject(Fault::new(Effect::Denied).operation(S3Operation::DeleteObject).key_prefix("source"));
    fs::rename(mount.path("source"), mount.path("destination")).unwrap_err();
    world.check_object("source", b"precious");
    assert_eq!(fs::read(mount.path("source")).unwrap(), b"precious");
    mount.unmount();
}
