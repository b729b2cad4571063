//! Directories, listings and names that need care on their way to the server.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use rustix::io::Errno;

use crate::on_both_servers;
use crate::world::{World, check_errno, listing};

on_both_servers!(
    directories_can_be_made_and_removed,
    files_in_nested_directories_are_stored_by_their_whole_path,
    a_directory_with_files_is_not_removed,
    a_directory_is_not_removed_while_its_file_is_being_stored,
    empty_directories_are_kept,
    a_tree_is_removed,
    a_directory_stays_when_its_last_file_goes,
    a_removed_directory_that_is_in_use_has_no_links,
    prefixes_of_keys_are_directories,
    every_name_comes_back_as_it_was_written,
    a_listing_of_more_than_one_page_is_complete,
);

fn directories_can_be_made_and_removed(world: &World) {
    let mount = world.mount();
    fs::create_dir(mount.path("directory")).unwrap();
    assert!(fs::metadata(mount.path("directory")).unwrap().is_dir());
    assert_eq!(listing(mount.directory()), ["directory"]);
    check_errno(fs::create_dir(mount.path("directory")), &[Errno::EXIST]);
    fs::remove_dir(mount.path("directory")).unwrap();
    assert_eq!(listing(mount.directory()), Vec::<String>::new());
    mount.unmount();
}

fn files_in_nested_directories_are_stored_by_their_whole_path(world: &World) {
    let mount = world.mount();
    fs::create_dir_all(mount.path("a/b/c")).unwrap();
    fs::write(mount.path("a/b/c/file"), "deep").unwrap();
    fs::write(mount.path("a/file"), "shallow").unwrap();
    world.check_object("a/b/c/file", b"deep");
    world.check_object("a/file", b"shallow");
    assert_eq!(listing(&mount.path("a")), ["b", "file"]);
    assert_eq!(fs::read(mount.path("a/b/c/file")).unwrap(), b"deep");
    mount.unmount();
}

fn a_directory_with_files_is_not_removed(world: &World) {
    world.put("directory/file", b"content");
    let mount = world.mount();
    check_errno(fs::remove_dir(mount.path("directory")), &[Errno::NOTEMPTY, Errno::PERM]);
    world.check_object("directory/file", b"content");
    mount.unmount();
}

fn a_directory_is_not_removed_while_its_file_is_being_stored(world: &World) {
    let mount = world.mount();
    for number in 0..20 {
        let directory = mount.path(&format!("{number}"));
        fs::create_dir(&directory).unwrap();
        // Stored by the release of the file, for which close does not wait.
        drop(fs::File::create(directory.join("file")).unwrap());
        check_errno(fs::remove_dir(&directory), &[Errno::NOTEMPTY]);
        assert_eq!(listing(&directory), ["file"]);
    }
    mount.unmount();
}

fn empty_directories_are_kept(world: &World) {
    let mount = world.mount();
    fs::create_dir_all(mount.path("a/b")).unwrap();
    mount.unmount();
    let mount = world.mount();
    assert_eq!(listing(&mount.path("a")), ["b"]);
    fs::remove_dir(mount.path("a/b")).unwrap();
    fs::remove_dir(mount.path("a")).unwrap();
    assert_eq!(world.keys(), Vec::<String>::new());
    mount.unmount();
}

fn a_tree_is_removed(world: &World) {
    for key in ["tree/1", "tree/a/2", "tree/a/b/3", "tree/a/b/4"] {
        world.put(key, key.as_bytes());
    }
    let mount = world.mount();
    fs::create_dir(mount.path("tree/empty")).unwrap();
    fs::write(mount.path("tree/empty/new"), "new").unwrap();
    fs::remove_dir_all(mount.path("tree")).unwrap();
    assert_eq!(listing(mount.directory()), Vec::<String>::new());
    assert_eq!(world.keys(), Vec::<String>::new());
    mount.unmount();
}

fn a_directory_stays_when_its_last_file_goes(world: &World) {
    world.put("directory/file", b"content");
    let mount = world.mount();
    fs::remove_file(mount.path("directory/file")).unwrap();
    assert!(fs::metadata(mount.path("directory")).unwrap().is_dir());
    assert_eq!(listing(&mount.path("directory")), Vec::<String>::new());
    fs::write(mount.path("directory/again"), "again").unwrap();
    world.check_object("directory/again", b"again");
    mount.unmount();
}

/// kubelet takes ENOENT for the root of a bind mount for "not mounted" and never removes the Pod.
fn a_removed_directory_that_is_in_use_has_no_links(world: &World) {
    let mount = world.mount();
    fs::create_dir(mount.path("directory")).unwrap();
    let directory = fs::File::open(mount.path("directory")).unwrap();
    fs::remove_dir(mount.path("directory")).unwrap();
    let attributes = directory.metadata().unwrap();
    assert!(attributes.is_dir());
    assert_eq!(attributes.nlink(), 0);
    check_errno(fs::metadata(mount.path("directory")), &[Errno::NOENT]);
    drop(directory);
    mount.unmount();
}

fn prefixes_of_keys_are_directories(world: &World) {
    for key in ["one", "two/a", "two/b", "two/three/c"] {
        world.put(key, key.as_bytes());
    }
    let mount = world.mount();
    assert_eq!(listing(mount.directory()), ["one", "two"]);
    assert_eq!(listing(&mount.path("two")), ["a", "b", "three"]);
    assert_eq!(fs::read(mount.path("two/three/c")).unwrap(), b"two/three/c");
    mount.unmount();
}

fn every_name_comes_back_as_it_was_written(world: &World) {
    let names = [
        "Grüße.txt",
        "文件",
        "🚀",
        "e\u{301} decomposed",
        "with blank",
        "plus+and&and=and?and#",
        "percent%20sign",
        "quote'\"<>",
        "back\\slash",
        ".hidden",
        "~tilde~",
        "colon:semicolon;",
        "[brackets]{braces}",
        "trailing ",
        "-dash",
    ];
    let mount = world.mount();
    for name in names {
        fs::write(mount.path(name), name).unwrap_or_else(|error| panic!("{name:?}: {error}"));
        world.check_object(name, name.as_bytes());
        assert_eq!(fs::read(mount.path(name)).unwrap(), name.as_bytes(), "{name:?}");
    }
    let mut expected = names.map(str::to_owned);
    expected.sort();
    assert_eq!(listing(mount.directory()), expected);
    for name in names {
        fs::remove_file(mount.path(name)).unwrap_or_else(|error| panic!("{name:?}: {error}"));
    }
    assert_eq!(world.keys(), Vec::<String>::new());
    mount.unmount();
}

/// S3 lists a thousand keys at a time.
fn a_listing_of_more_than_one_page_is_complete(world: &World) {
    let names: Vec<String> = (0..1050).map(|number| format!("file-{number:04}")).collect();
    for name in &names {
        world.put(&format!("many/{name}"), name.as_bytes());
    }
    let mount = world.mount();
    assert_eq!(listing(&mount.path("many")), names);
    assert_eq!(fs::read(mount.path("many/file-1049")).unwrap(), b"file-1049");
    mount.unmount();
}
