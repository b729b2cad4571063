//! Kernels that do not resend the requests that a dead engine had read: the caller gets an error, or the kernel repeats the
//! request by itself; no caller waits forever.

use std::fs::{self, File};
use std::io::Write as _;
use std::thread::JoinHandle;

use rustix::io::Errno;
use rustix::process::{Signal, kill_process};
use s3csi_s3_server::store::Store as _;
use s3csi_s3_server::{Effect, Fault, S3Operation};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::wait::wait_for;

use crate::world::{BUCKET, Options, SupervisedMount, World, check_errno, noise};

fn mount<'a>(world: &World<'a>) -> SupervisedMount<'a> {
    world.mount_with(&Options { environment: &["S3CSI_ENGINE_TRIALS=no-resend"], ..Options::default() })
}

/// Kills the engine while it is inside this operation.
fn kill_inside<T: Send + 'static>(
    world: &World<'_>,
    mount: &SupervisedMount<'_>,
    operation: S3Operation,
    work: impl FnOnce() -> T + Send + 'static,
) -> JoinHandle<T> {
    let frozen = world.store.inject(Fault::new(Effect::Frozen).operation(operation));
    let worker = std::thread::spawn(work);
    wait_for("the engine asks the store", || frozen.hits() > 0);
    mount.signal_engine(Signal::KILL);
    mount.resumed();
    frozen.release();
    worker
}

#[test]
fn a_name_that_was_looked_for_is_looked_for_again() {
    let fixture = Fixture::new("resume-old-lookup");
    let world = World::new(&fixture);
    world.put("file", b"content");
    let mount = mount(&world);
    let path = mount.path("file");
    let worker = kill_inside(&world, &mount, S3Operation::HeadObject, move || fs::metadata(path));
    assert_eq!(worker.join().unwrap().unwrap().len(), 7);
    mount.unmount();
}

#[test]
fn a_read_ahead_that_was_lost_is_read_again() {
    let fixture = Fixture::new("resume-old-read");
    let world = World::new(&fixture);
    let content = noise(1, 1 << 20);
    world.put("file", &content);
    let mount = mount(&world);
    let path = mount.path("file");
    let worker = kill_inside(&world, &mount, S3Operation::GetObject, move || fs::read(path));
    assert!(worker.join().unwrap().unwrap() == content, "other bytes");
    mount.unmount();
}

#[test]
fn a_sync_that_was_lost_fails_and_the_file_can_be_written_again() {
    let fixture = Fixture::new("resume-old-sync");
    let world = World::new(&fixture);
    let mount = mount(&world);
    let mut file = File::create(mount.path("file")).unwrap();
    file.write_all(b"content").unwrap();
    let worker = kill_inside(&world, &mount, S3Operation::PutObject, move || file.sync_all());
    check_errno(worker.join().unwrap(), Errno::IO);
    fs::write(mount.path("other"), "content").unwrap();
    assert_eq!(world.store.object(BUCKET, "other").unwrap(), b"content"[..]);
    mount.unmount();
}

#[test]
fn a_closed_file_is_stored_though_its_release_was_lost() {
    let fixture = Fixture::new("resume-old-release");
    let world = World::new(&fixture);
    let mount = mount(&world);
    let path = mount.path("empty");
    // An empty file is stored by the very last request, for which no caller waits.
    let worker = kill_inside(&world, &mount, S3Operation::PutObject, move || drop(File::create(path).unwrap()));
    worker.join().unwrap();
    wait_for("the file is stored", || world.store.object(BUCKET, "empty").is_some());
    mount.unmount();
}

#[test]
fn a_planned_replacement_waits_for_a_moment_without_requests() {
    let fixture = Fixture::new("resume-old-upgrade");
    let world = World::new(&fixture);
    world.put("file", b"content");
    let mount = mount(&world);
    let engine = mount.engine();
    let frozen = world.store.inject(Fault::new(Effect::Frozen).operation(S3Operation::HeadObject));
    let path = mount.path("file");
    let worker = std::thread::spawn(move || fs::metadata(path));
    wait_for("the engine asks the store", || frozen.hits() > 0);
    kill_process(mount.mounter().pid(), Signal::USR1).unwrap();
    wait_for("another engine is prepared", || mount.engines().len() == 2);
    assert_eq!(mount.engine(), engine, "the request in flight would have failed");
    frozen.release();
    assert_eq!(worker.join().unwrap().unwrap().len(), 7);
    assert_eq!(mount.resumed().0, "replaced: upgrade requested");
    mount.unmount();
}

#[test]
fn a_planned_replacement_is_given_up_if_there_is_no_such_moment() {
    let fixture = Fixture::new("resume-old-busy");
    let world = World::new(&fixture);
    world.put("file", b"content");
    let environment = &["S3CSI_ENGINE_TRIALS=no-resend"];
    // Longer than a quiet moment is waited for where the kernel sends requests again.
    let mount = world.mount_with(&Options { environment, mounter: &["--drain-time", "3s"], ..Options::default() });
    let engine = mount.engine();
    let frozen = world.store.inject(Fault::new(Effect::Frozen).operation(S3Operation::HeadObject));
    let path = mount.path("file");
    let worker = std::thread::spawn(move || fs::metadata(path));
    wait_for("the engine asks the store", || frozen.hits() > 0);
    kill_process(mount.mounter().pid(), Signal::USR1).unwrap();
    wait_for("the request is given up", || mount.mounter().log_contains("requests are in flight"));
    assert_eq!(mount.engines(), [engine]);
    frozen.release();
    assert_eq!(worker.join().unwrap().unwrap().len(), 7);
    mount.unmount();
}
