//! Directories, listings and names that need care on their way to the server.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{Dir, Mode, OFlags};
use rustix::io::Errno;

use crate::on_both_servers;
use crate::world::{World, check_errno, listing};

/// For how long the kernel believes attributes, with the default options.
const BELIEVED: Duration = Duration::from_millis(100);

on_both_servers!(
    directories_can_be_made_and_removed,
    files_in_nested_directories_are_stored_by_their_whole_path,
    a_directory_with_files_is_not_removed,
    a_directory_is_not_removed_while_its_file_is_being_stored,
    empty_directories_are_kept,
    a_tree_is_removed,
    a_directory_stays_when_its_last_file_goes,
    a_directory_stays_when_its_last_directory_or_file_is_removed_or_moved,
    a_removed_directory_that_is_in_use_has_no_links,
    prefixes_of_keys_are_directories,
    every_name_comes_back_as_it_was_written,
    a_listing_of_more_than_one_page_is_complete,
    a_listing_shows_what_was_stored_a_moment_ago,
    directories_of_a_tree_show_what_was_made_a_moment_ago,
    a_directory_is_listed_while_files_are_made_moved_and_removed_in_it,
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

fn a_directory_stays_when_its_last_directory_or_file_is_removed_or_moved(world: &World) {
    for key in ["a/sub/file", "b/file", "c/sub/file"] {
        world.put(key, b"content");
    }
    let mount = world.mount();
    fs::remove_dir_all(mount.path("a/sub")).unwrap();
    fs::rename(mount.path("b/file"), mount.path("file")).unwrap();
    fs::rename(mount.path("c/sub"), mount.path("sub")).unwrap();
    // Longer than the kernel believes that they exist.
    let start = Instant::now();
    while start.elapsed() < BELIEVED * 3 {
        for directory in ["a", "b", "c"] {
            assert!(fs::metadata(mount.path(directory)).unwrap().is_dir());
        }
    }
    for directory in ["a", "b", "c"] {
        assert_eq!(listing(&mount.path(directory)), Vec::<String>::new());
        fs::remove_dir(mount.path(directory)).unwrap();
    }
    assert_eq!(listing(mount.directory()), ["file", "sub"]);
    assert_eq!(world.keys().into_iter().filter(|it| !it.ends_with('/')).collect::<Vec<_>>(), ["file", "sub/file"]);
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

/// The names of a directory, with sizes.
fn sizes(directory: &Path) -> BTreeMap<OsString, u64> {
    let entries = fs::read_dir(directory).unwrap().map(Result::unwrap);
    entries.map(|it| (it.file_name(), it.metadata().unwrap().len())).collect()
}

/// Small and large ones, which are stored in different ways, and a page of the listing that is just believed.
fn a_listing_shows_what_was_stored_a_moment_ago(world: &World) {
    let large = vec![7; 9 << 20];
    world.put("directory/large", &large);
    let mount = world.mount();
    let directory = mount.path("directory");
    let mut expected = BTreeMap::from([(OsString::from("large"), large.len() as u64)]);
    for round in 0..5 {
        assert_eq!(sizes(&directory), expected);
        let mut file = OpenOptions::new().append(true).open(directory.join("large")).unwrap();
        file.write_all(b"more").unwrap();
        drop(file);
        *expected.get_mut(OsStr::new("large")).unwrap() += 4;
        assert_eq!(sizes(&directory), expected);
        let name = OsString::from(format!("small-{round}"));
        fs::write(directory.join(&name), "small").unwrap();
        expected.insert(name.clone(), 5);
        assert_eq!(sizes(&directory), expected);
        if round % 2 == 1 {
            fs::remove_file(directory.join(&name)).unwrap();
            expected.remove(&name);
        }
    }
    mount.unmount();
}

/// Listings of the next directories are requested while the first ones are read.
fn directories_of_a_tree_show_what_was_made_a_moment_ago(world: &World) {
    for number in 0..20 {
        world.put(&format!("tree/{number:02}/file"), b"content");
    }
    let mount = world.mount();
    for round in 0..3 {
        for number in 0..20 {
            let expected: Vec<String> =
                ["file".to_owned()].into_iter().chain((0..round).map(|it| format!("made-{it}"))).collect();
            let directory = mount.path(&format!("tree/{number:02}"));
            assert_eq!(listing(&directory), expected, "{number}");
            // In this one, which was listed, and in one that will be.
            let next = mount.path(&format!("tree/{:02}", (number + 2) % 20));
            fs::write(next.join("moment"), "").unwrap();
            assert_eq!(listing(&next).last().map(String::as_str), Some("moment"));
            fs::remove_file(next.join("moment")).unwrap();
            fs::write(directory.join(format!("made-{round}")), "made").unwrap();
        }
    }
    mount.unmount();
}

/// A file that is being made is in its directory a moment before it can be found.
fn a_directory_is_listed_while_files_are_made_moved_and_removed_in_it(world: &World) {
    const FILES: usize = 150;
    let mount = world.mount();
    fs::create_dir(mount.path("busy")).unwrap();
    let directory = mount.path("busy");
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..3)
            .map(|writer| {
                let directory = &directory;
                scope.spawn(move || {
                    for number in 0..FILES {
                        let name = directory.join(format!("{writer}-{number}"));
                        fs::write(&name, "content").unwrap();
                        match number % 4 {
                            0 => fs::rename(&name, directory.join(format!("{writer}-moved-{number}"))).unwrap(),
                            1 => fs::remove_file(&name).unwrap(),
                            _ => {}
                        }
                    }
                })
            })
            .collect();
        let opened = rustix::fs::open(&directory, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
        let mut again = Dir::new(opened).unwrap();
        while !writers.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            let names: Result<Vec<_>, _> = fs::read_dir(&directory).and_then(Iterator::collect);
            assert!(names.is_ok(), "{names:?}");
            again.rewind();
            let names: Result<Vec<_>, _> = again.by_ref().collect();
            assert!(names.is_ok(), "{names:?}");
        }
    });
    assert_eq!(listing(&directory).len(), 3 * (0..FILES).filter(|it| it % 4 != 1).count());
    mount.unmount();
}
