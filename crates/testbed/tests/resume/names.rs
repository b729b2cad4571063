//! Names that are not in the bucket yet when the engine dies, and requests whose outcome it could not tell.

use std::fs::{self, File};

use s3csi_s3_server::store::Store as _;
use s3csi_s3_server::{Effect, Fault, S3Operation};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::wait::wait_for;

use crate::world::{BUCKET, World};

#[test]
fn a_directory_that_is_nowhere_but_in_the_engine_lives_on() {
    let fixture = Fixture::new("resume-mkdir");
    let world = World::new(&fixture);
    world.put("other", b"x");
    let mount = world.mount();
    fs::create_dir_all(mount.path("a/b")).unwrap();
    fs::create_dir(mount.path("removed")).unwrap();
    mount.kill_engine();
    let names: Vec<_> = fs::read_dir(&mount.directory).unwrap().map(|it| it.unwrap().file_name()).collect();
    assert_eq!(names.len(), 3, "{names:?}");
    fs::remove_dir(mount.path("removed")).unwrap();
    fs::write(mount.path("a/b/file"), "content").unwrap();
    assert_eq!(world.store.object(BUCKET, "a/b/file").as_deref(), Some(&b"content"[..]));
    mount.kill_engine();
    assert!(!mount.path("removed").exists());
    assert_eq!(fs::read_to_string(mount.path("a/b/file")).unwrap(), "content");
    mount.unmount();
}

#[test]
fn a_directory_that_is_used_by_name_first_lives_on() {
    let fixture = Fixture::new("resume-by-name");
    let world = World::new(&fixture);
    let mount = world.mount();
    for name in ["one", "two", "three"] {
        fs::create_dir(mount.path(name)).unwrap();
    }
    mount.kill_engine();
    fs::remove_dir(mount.path("one")).unwrap();
    assert!(fs::metadata(mount.path("two")).unwrap().is_dir());
    assert!(fs::create_dir(mount.path("three")).is_err());
    mount.unmount();
}

#[test]
fn an_empty_file_that_is_open_is_stored_at_close() {
    let fixture = Fixture::new("resume-empty");
    let world = World::new(&fixture);
    let mount = world.mount();
    let file = File::create(mount.path("empty")).unwrap();
    mount.kill_engine();
    assert_eq!(fs::metadata(mount.path("empty")).unwrap().len(), 0);
    drop(file);
    wait_for("the file is stored", || world.store.object(BUCKET, "empty").is_some());
    mount.unmount();
}

#[test]
fn an_unlink_inside_the_engine_is_done_by_its_successor() {
    let fixture = Fixture::new("resume-unlink");
    let world = World::new(&fixture);
    world.put("directory/file", b"x");
    world.put("directory/other", b"x");
    let mount = world.mount();
    let frozen = world.store.inject(Fault::new(Effect::Frozen).operation(S3Operation::DeleteObject));
    let remover = std::thread::spawn({
        let path = mount.path("directory/file");
        move || fs::remove_file(path)
    });
    wait_for("the engine asks to delete", || frozen.hits() > 0);
    mount.signal_engine(rustix::process::Signal::KILL);
    frozen.release();
    remover.join().unwrap().unwrap();
    assert!(!mount.path("directory/file").exists());
    mount.resumed();
    mount.unmount();
}
