//! Kernels that do not send requests again which a dead engine had read: whoever waits hears of an error, or the kernel asks
//! again by itself; nobody waits for ever.

use std::fs::{self, File};
use std::io::Write as _;
use std::thread::JoinHandle;

use rustix::io::Errno;
use rustix::process::Signal;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::s3::{Effect, Fault, Operation};
use s3csi_testbed::store::Store as _;
use s3csi_testbed::wait::wait_for;

use crate::world::{BUCKET, Kept, Options, World, check_errno, noise};

fn mount<'a>(world: &World<'a>) -> Kept<'a> {
    world.mount_with(&Options { environment: &["S3CSI_ENGINE_TRIALS=no-resend"], ..Options::default() })
}

/// Kills the engine while it is inside this operation.
fn kill_inside<T: Send + 'static>(
    world: &World<'_>,
    kept: &Kept<'_>,
    operation: Operation,
    work: impl FnOnce() -> T + Send + 'static,
) -> JoinHandle<T> {
    let frozen = world.store.inject(Fault::new(Effect::Frozen).operation(operation));
    let worker = std::thread::spawn(work);
    wait_for("the engine asks the store", || frozen.hits() > 0);
    kept.signal_engine(Signal::KILL);
    kept.resumed();
    frozen.release();
    worker
}

#[test]
fn a_name_that_was_looked_for_is_looked_for_again() {
    let fixture = Fixture::new("resume-old-lookup");
    let world = World::new(&fixture);
    world.put("file", b"content");
    let kept = mount(&world);
    let path = kept.path("file");
    let worker = kill_inside(&world, &kept, Operation::HeadObject, move || fs::metadata(path));
    assert_eq!(worker.join().unwrap().unwrap().len(), 7);
    kept.unmount();
}

#[test]
fn a_read_ahead_that_was_lost_is_read_again() {
    let fixture = Fixture::new("resume-old-read");
    let world = World::new(&fixture);
    let content = noise(1, 1 << 20);
    world.put("file", &content);
    let kept = mount(&world);
    let path = kept.path("file");
    let worker = kill_inside(&world, &kept, Operation::GetObject, move || fs::read(path));
    assert!(worker.join().unwrap().unwrap() == content, "other bytes");
    kept.unmount();
}

#[test]
fn a_sync_that_was_lost_fails_and_the_file_can_be_written_again() {
    let fixture = Fixture::new("resume-old-sync");
    let world = World::new(&fixture);
    let kept = mount(&world);
    let mut file = File::create(kept.path("file")).unwrap();
    file.write_all(b"content").unwrap();
    let worker = kill_inside(&world, &kept, Operation::PutObject, move || file.sync_all());
    check_errno(worker.join().unwrap(), Errno::IO);
    fs::write(kept.path("other"), "content").unwrap();
    assert_eq!(world.store.object(BUCKET, "other").unwrap(), b"content"[..]);
    kept.unmount();
}

#[test]
fn a_file_that_nobody_has_open_any_more_is_stored_though_its_end_was_lost() {
    let fixture = Fixture::new("resume-old-release");
    let world = World::new(&fixture);
    let kept = mount(&world);
    let path = kept.path("empty");
    // An empty file is stored by the last request of all, for which nobody waits.
    let worker = kill_inside(&world, &kept, Operation::PutObject, move || drop(File::create(path).unwrap()));
    worker.join().unwrap();
    wait_for("the file is stored", || world.store.object(BUCKET, "empty").is_some());
    kept.unmount();
}
