//! How often the server is asked when many files of one directory are used, and what that means for changes by others.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use s3csi_s3_server::{Config, Effect, Fault, S3Operation, S3Server};
use s3csi_testbed::engine::EngineMount;
use s3csi_testbed::wait::{SOON, wait_for, wait_until};

use crate::world::{World, in_process_with};

/// What others change is seen after this, whatever we do meanwhile.
const MOMENT: Duration = Duration::from_millis(100);

/// As a server in the same region answers; much longer than anything that happens on this machine.
const ROUND_TRIP: Duration = Duration::from_millis(15);

const FILES: usize = 40;

fn distant(rule: &str) -> World<S3Server> {
    let world = in_process_with(rule, Config::default());
    world.put("many/there", b"");
    world.store.inject(Fault::new(Effect::Slow(ROUND_TRIP)));
    world
}

/// Stores small files one after the other, and so gives the engine reason to expect more.
fn create(mount: &EngineMount<'_>, names: impl IntoIterator<Item = usize>) {
    for name in names {
        fs::write(mount.path(&format!("many/{name}")), format!("content {name}")).unwrap();
    }
}

fn looks(world: &World<S3Server>) -> [usize; 2] {
    [S3Operation::HeadObject, S3Operation::ListObjectsV2].map(|it| world.store.count(it))
}

#[test]
fn a_file_that_is_created_after_others_costs_one_request() {
    let world = distant("created");
    let mount = world.mount();
    world.store.forget_requests();
    create(&mount, 0..FILES);
    let [heads, lists] = looks(&world);
    assert_eq!(world.store.count(S3Operation::PutObject), FILES);
    assert!(heads < FILES / 2 && lists < FILES, "{heads} looks at objects, {lists} lists for {FILES} files");
    for name in 0..FILES {
        world.check_object(&format!("many/{name}"), format!("content {name}").as_bytes());
    }
    mount.unmount();
}

#[test]
fn a_small_file_that_is_read_after_others_costs_no_look_at_the_object() {
    let world = distant("read-after-others");
    let content = |name: usize| format!("content {name}");
    for name in 0..FILES {
        world.put(&format!("many/{name}"), content(name).as_bytes());
    }
    let mount = world.mount();
    world.store.forget_requests();
    for name in 0..FILES {
        assert_eq!(fs::read_to_string(mount.path(&format!("many/{name}"))).unwrap(), content(name));
    }
    let ([heads, lists], gets) = (looks(&world), world.store.count(S3Operation::GetObject));
    assert!(heads < FILES / 4 && gets <= FILES + 2, "{heads} looks at objects, {gets} reads for {FILES} files");
    assert!(lists < FILES * 3 / 4, "{lists} lists for {FILES} files");
    let modified = fs::metadata(mount.path("many/7")).unwrap().modified().unwrap();
    assert!(modified.elapsed().is_ok_and(|it| it < SOON * 10), "not the time of the object");
    mount.unmount();
}

#[test]
fn a_directory_hides_a_file_also_where_many_files_are_read() {
    let world = distant("hidden-beside-others");
    for name in 0..FILES {
        world.put(&format!("many/{name}"), b"content");
    }
    world.put("many/hidden", b"hidden");
    world.put("many/hidden/file", b"");
    let mount = world.mount();
    for name in 0..FILES {
        assert_eq!(fs::read(mount.path(&format!("many/{name}"))).unwrap(), b"content");
        assert!(fs::metadata(mount.path("many/hidden")).unwrap().is_dir());
    }
    // A directory that others make is found at once, as long as there is no file of that name.
    world.put("many/new/file", b"new");
    assert_eq!(fs::read(mount.path("many/new/file")).unwrap(), b"new");
    mount.unmount();
}

/// Names beneath a directory, as find(1) finds them.
fn walk(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
        found.push(entry.path());
        if entry.file_type().unwrap().is_dir() {
            found.extend(walk(&entry.path()));
        }
    }
    found
}

#[test]
fn a_directory_that_is_listed_after_others_costs_one_request() {
    let world = distant("tree");
    for name in 0..FILES {
        world.put(&format!("tree/{name}/file"), b"content");
        world.put(&format!("tree/{name}/deeper/file"), b"content");
    }
    // A directory hides a file, also where its marker is all there is of it.
    world.put("tree/hidden", b"hidden");
    world.put("tree/hidden/", b"");
    let mount = world.mount();
    world.store.forget_requests();
    assert_eq!(walk(&mount.path("tree")).len(), FILES * 4 + 1);
    let directories = 2 * FILES + 2;
    let [heads, lists] = looks(&world);
    // The first file of each directory is looked at: does it have metadata?
    let most = directories * 3 / 2;
    assert!(heads < most && lists < most, "{heads} looks at objects, {lists} lists for {directories} directories");
    assert!(fs::metadata(mount.path("tree/hidden")).unwrap().is_dir());
    fs::write(mount.path("tree/7/new"), "new").unwrap();
    assert!(walk(&mount.path("tree")).contains(&mount.path("tree/7/new")));
    mount.unmount();
}

#[test]
fn a_directory_that_is_removed_costs_one_request() {
    let world = distant("removed");
    for name in 0..FILES {
        world.put(&format!("tree/{name}/file"), b"content");
    }
    let mount = world.mount();
    let requests = (0..FILES).map(|name| {
        let directory = mount.path(&format!("tree/{name}"));
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 1);
        fs::remove_file(directory.join("file")).unwrap();
        world.store.forget_requests();
        fs::remove_dir(&directory).unwrap();
        looks(&world).iter().sum::<usize>()
    });
    // On a busy machine, others take longer than the kernel believes that there is such a directory.
    assert_eq!(requests.min(), Some(1));
    world.put("tree/7", b"a file");
    // That there is no such name is believed for a moment.
    wait_for("the file is found", || fs::read(mount.path("tree/7")).is_ok_and(|it| it == b"a file"));
    mount.unmount();
}

#[test]
fn who_wants_every_look_to_ask_gets_it() {
    for argument in ["--metadata-ttl=minimal", "--metadata-ttl=0", "--negative-metadata-ttl=minimal"] {
        let world = distant("asked");
        let mount = world.engine().writable().argument(argument).mount();
        world.store.forget_requests();
        create(&mount, 0..5);
        let [heads, lists] = looks(&world);
        assert!(5 <= heads && 5 <= lists, "{argument}: {heads} looks at objects, {lists} lists");
        mount.unmount();
    }
}

#[test]
fn a_file_of_others_is_found_at_once_where_we_store_nothing() {
    let world = distant("found");
    for name in 0..FILES {
        world.put(&format!("many/{name}"), b"old");
    }
    let mount = world.mount();
    for name in 0..FILES {
        assert_eq!(fs::read(mount.path(&format!("many/{name}"))).unwrap(), b"old");
        world.put(&format!("many/new-{name}"), b"new");
        assert_eq!(fs::read(mount.path(&format!("many/new-{name}"))).unwrap(), b"new");
    }
    mount.unmount();
}

#[test]
fn a_file_of_others_is_found_after_a_moment_where_we_store_many() {
    let world = distant("seen");
    let mount = world.mount();
    for round in 0..5 {
        create(&mount, round * 10..round * 10 + 8);
        let (key, content) = (format!("many/theirs-{round}"), format!("theirs {round}"));
        let made = Instant::now();
        world.put(&key, content.as_bytes());
        // We go on, so that there is always a listing that is just believed.
        let mut mine = round * 1000 + 1000;
        while made.elapsed() < MOMENT {
            create(&mount, [mine]);
            mine += 1;
        }
        assert_eq!(fs::read_to_string(mount.path(&key)).unwrap(), content);
    }
    mount.unmount();
}

#[test]
fn what_we_made_ourselves_is_there_at_once() {
    let world = distant("ours");
    let mount = world.mount();
    for name in 0..FILES {
        create(&mount, [name]);
        assert_eq!(fs::read_to_string(mount.path(&format!("many/{name}"))).unwrap(), format!("content {name}"));
        fs::rename(mount.path(&format!("many/{name}")), mount.path(&format!("many/moved-{name}"))).unwrap();
        assert!(fs::exists(mount.path(&format!("many/moved-{name}"))).unwrap());
        assert!(!fs::exists(mount.path(&format!("many/{name}"))).unwrap());
        fs::create_dir(mount.path(&format!("many/directory-{name}"))).unwrap();
        fs::write(mount.path(&format!("many/directory-{name}/file")), "content").unwrap();
        assert!(fs::metadata(mount.path(&format!("many/directory-{name}"))).unwrap().is_dir());
    }
    mount.unmount();
}

/// No file of another client is half overwritten, and readers see only what is stored.
#[test]
fn creating_what_others_created_meanwhile_is_settled_by_who_was_last() {
    let world = distant("both");
    let mount = world.mount();
    for round in 0..5 {
        create(&mount, round * 10..round * 10 + 8);
        let key = format!("many/both-{round}");
        world.put(&key, b"theirs, and longer than ours");
        fs::write(mount.path(&key), "ours").unwrap();
        world.check_object(&key, b"ours");
        assert_eq!(fs::read(mount.path(&key)).unwrap(), b"ours");
        world.put(&key, b"theirs again");
        let is_seen = || fs::read(mount.path(&key)).is_ok_and(|it| it == b"theirs again");
        assert!(wait_until(Instant::now() + SOON, is_seen), "the last one is not seen");
    }
    mount.unmount();
}

#[test]
fn without_permission_nothing_that_is_there_is_overwritten_after_a_moment() {
    let world = distant("permission");
    let mount = world.engine().mount();
    create(&mount, 0..8);
    let made = Instant::now();
    world.put("many/theirs", b"theirs");
    let mut mine = 8;
    while made.elapsed() < MOMENT {
        create(&mount, [mine]);
        mine += 1;
    }
    assert!(fs::write(mount.path("many/theirs"), "ours").is_err());
    world.check_object("many/theirs", b"theirs");
    mount.unmount();
}
