//! Names that are not in the bucket yet when the engine dies, and requests whose outcome it could not tell.

use std::fs::{self, File};

use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::s3::{Effect, Fault, Operation};
use s3csi_testbed::store::Store as _;
use s3csi_testbed::wait::wait_for;

use crate::world::{BUCKET, World};

#[test]
fn a_directory_that_is_nowhere_but_in_the_engine_lives_on() {
    let fixture = Fixture::new("resume-mkdir");
    let world = World::new(&fixture);
    world.put("other", b"x");
    let kept = world.mount();
    fs::create_dir_all(kept.path("a/b")).unwrap();
    fs::create_dir(kept.path("removed")).unwrap();
    kept.kill_engine();
    let names: Vec<_> = fs::read_dir(&kept.directory).unwrap().map(|it| it.unwrap().file_name()).collect();
    assert_eq!(names.len(), 3, "{names:?}");
    fs::remove_dir(kept.path("removed")).unwrap();
    fs::write(kept.path("a/b/file"), "content").unwrap();
    assert_eq!(world.store.object(BUCKET, "a/b/file").as_deref(), Some(&b"content"[..]));
    kept.kill_engine();
    assert!(!kept.path("removed").exists());
    assert_eq!(fs::read_to_string(kept.path("a/b/file")).unwrap(), "content");
    kept.unmount();
}

#[test]
fn a_directory_that_is_used_by_name_first_lives_on() {
    let fixture = Fixture::new("resume-by-name");
    let world = World::new(&fixture);
    let kept = world.mount();
    for name in ["one", "two", "three"] {
        fs::create_dir(kept.path(name)).unwrap();
    }
    kept.kill_engine();
    fs::remove_dir(kept.path("one")).unwrap();
    assert!(fs::metadata(kept.path("two")).unwrap().is_dir());
    assert!(fs::create_dir(kept.path("three")).is_err());
    kept.unmount();
}

#[test]
fn an_empty_file_that_is_open_is_stored_at_close() {
    let fixture = Fixture::new("resume-empty");
    let world = World::new(&fixture);
    let kept = world.mount();
    let file = File::create(kept.path("empty")).unwrap();
    kept.kill_engine();
    assert_eq!(fs::metadata(kept.path("empty")).unwrap().len(), 0);
    drop(file);
    wait_for("the file is stored", || world.store.object(BUCKET, "empty").is_some());
    kept.unmount();
}

#[test]
fn an_unlink_inside_the_engine_is_done_by_its_successor() {
    let fixture = Fixture::new("resume-unlink");
    let world = World::new(&fixture);
    world.put("directory/file", b"x");
    world.put("directory/other", b"x");
    let kept = world.mount();
    let frozen = world.store.inject(Fault::new(Effect::Frozen).operation(Operation::DeleteObject));
    let remover = std::thread::spawn({
        let path = kept.path("directory/file");
        move || fs::remove_file(path)
    });
    wait_for("the engine asks to delete", || frozen.hits() > 0);
    kept.signal_engine(rustix::process::Signal::KILL);
    frozen.release();
    remover.join().unwrap().unwrap();
    assert!(!kept.path("directory/file").exists());
    kept.resumed();
    kept.unmount();
}
