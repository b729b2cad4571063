//! The hand-over protocol of the earlier driver, in both directions: an upgrade replaces the node plugin while its Mountpoint Pods
//! run, and the reverse.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use s3csi_driver::host::{Access, FuseOptions, Host as _, Kernel, Probe};
use s3csi_handoff::{self as handoff, MountRequest, ReceiveLimits, ReceivedMount, Request};
use s3csi_s3_server::store::Store as _;
use s3csi_testbed::engine::{EngineLauncher, EngineMount};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::CsiVolume;
use s3csi_testbed::leftovers::mounts_beneath;
use s3csi_testbed::wait::{SOON, wait_for, wait_until};
use tonic::Code;

use crate::world::{BUCKET, MountpointPod, PV, World, check_refused, names_in};

/// A mounter of the earlier driver: takes one request, never answers, and leaves the error message of a failed engine in a
/// file before it ends.
struct OldMounter {
    serving: JoinHandle<Option<i32>>,
}

impl OldMounter {
    fn start(world: &World<'_>, pod: &MountpointPod) -> Self {
        let engine = world.plugin.for_the_mounter("mount-s3").unwrap();
        let directory = fs::File::open(&pod.directory).unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&directory);
        let listener = std::os::unix::net::UnixListener::bind(format!("/proc/self/fd/{number}/mount.sock")).unwrap();
        let place = pod.directory.clone();
        let serving = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            drop(listener);
            fs::remove_file(place.join("mount.sock")).unwrap();
            let received = handoff::receive(&stream, ReceiveLimits::until(Instant::now() + SOON)).unwrap();
            let Request::Mount(ReceivedMount { request, fuse, .. }) = received else { panic!("not a mount request") };
            assert_eq!(request.source, None, "there is no such field for it");
            let output = run(engine, request, fuse, &place).wait_with_output().unwrap();
            if !output.status.success() {
                fs::write(place.join("mount.err"), &output.stderr).unwrap();
            }
            // Open until now, but without a word.
            drop(stream);
            output.status.code()
        });
        Self { serving }
    }

    fn end(self) -> Option<i32> {
        self.serving.join().unwrap()
    }
}

fn run(engine: PathBuf, request: MountRequest, fuse: OwnedFd, place: &std::path::Path) -> Child {
    let environment = request.env.iter().map(|it| it.split_once('=').unwrap());
    Command::new(engine)
        .arg(request.bucket_name)
        .arg("/dev/fd/0")
        .args(request.args)
        .arg("--foreground")
        .env_clear()
        .envs(environment)
        .current_dir(place)
        .stdin(Stdio::from(fuse))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn start(fixture: &Fixture) -> (World<'_>, MountpointPod, OldMounter) {
    let world = World::start(fixture);
    let pod = world.create_pod(1);
    let mounter = OldMounter::start(&world, &pod);
    world.set_phase(&pod, "Running");
    world.assign(&pod.name, &[1, 2]);
    (world, pod, mounter)
}

#[test]
fn a_mounter_that_never_answers_but_serves_is_fine() {
    let fixture = Fixture::new("old-mounter");
    let (world, pod, mounter) = start(&fixture);
    let target = world.publish(&world.volume(1));
    fs::write(target.join("file"), "content").unwrap();
    assert_eq!(world.store.object(BUCKET, "file").as_deref(), Some(b"content".as_slice()));
    // It does not listen any more, and does not have to.
    world.publish(&world.volume(1));
    world.publish(&world.volume(2));
    assert_eq!(world.engines().len(), 1);

    world.unpublish(&world.volume(1));
    world.unpublish(&world.volume(2));
    world.annotate_needs_unmount(&pod);
    assert_eq!(mounter.end(), Some(0), "its Pod succeeds");
    wait_for("the source is gone", || !world.source_exists(&pod));
    assert!(pod.directory.join("mount.exit").exists());
    world.check_nothing_mounted();
}

#[test]
fn the_error_file_of_an_older_mounter_is_in_the_error() {
    let fixture = Fixture::new("old-words");
    let (world, pod, mounter) = start(&fixture);
    let volume = CsiVolume::new("no-such-bucket", PV, &world.workload(1));
    let outcome = world.try_publish_within(&volume, Duration::from_secs(40));
    check_refused(outcome, Code::NotFound, &["the engine failed", "does not exist", "kubectl logs", &pod.name]);
    assert_ne!(mounter.end(), Some(0));
    world.check_nothing_mounted();
}

#[test]
fn error_output_of_an_earlier_failure_is_not_reported_again() {
    let fixture = Fixture::new("old-stale-words");
    let (world, pod, mounter) = start(&fixture);
    fs::write(pod.directory.join("mount.err"), "the words of yesterday").unwrap();
    world.publish(&world.volume(1));
    assert!(!names_in(&pod.directory).contains(&"mount.err".to_owned()));
    world.unpublish(&world.volume(1));
    world.annotate_needs_unmount(&pod);
    assert_eq!(mounter.end(), Some(0));
}

#[test]
fn a_request_of_an_older_node_is_served_by_our_mounter() {
    let fixture = Fixture::new("old-node");
    let world = World::start(&fixture);
    let pod = world.run_pod(1);
    let source = fixture.create_directory("source");
    let host = Kernel::new();
    let fuse = host.mount_fuse(&source, &FuseOptions { access: Access::ReadWrite, allow_other: true }).unwrap();

    // As it is written in Go: keys in the environment, no field but these three, and it closes at once without reading.
    let account = world.store.account();
    let request = serde_json::json!({
        "bucketName": BUCKET,
        "args": ["--allow-delete", "--allow-root", "--force-path-style"],
        "env": [
            format!("AWS_ENDPOINT_URL={}", world.store.endpoint()),
            format!("AWS_REGION={}", world.store.region()),
            format!("AWS_ACCESS_KEY_ID={}", account.access_key),
            format!("AWS_SECRET_ACCESS_KEY={}", account.secret_key),
        ],
    });
    let request: MountRequest = serde_json::from_value(request).unwrap();
    let connection = handoff::connect(&pod.directory.join("mount.sock"), SOON).unwrap();
    handoff::send(&connection, &request, std::os::fd::AsFd::as_fd(&fuse)).unwrap();
    drop((connection, fuse));

    assert!(matches!(host.probe(&source, Instant::now() + SOON), Probe::Alive { .. }));
    fs::write(source.join("file"), "content").unwrap();
    assert_eq!(world.store.object(BUCKET, "file").as_deref(), Some(b"content".as_slice()));

    fs::write(pod.directory.join("mount.exit"), "").unwrap();
    host.unmount(&source).unwrap();
    assert_eq!(mounts_beneath(&source), Vec::<PathBuf>::new());
    assert!(pod.mounter().wait_for_end().success());
}

/// A mount as version 1 leaves it at a target, with its key files in the plugin's directory.
fn mount_as_version_1<'a>(
    fixture: &'a Fixture,
    world: &'a World<'_>,
    volume: &CsiVolume,
    arguments: &[&str],
) -> (EngineMount<'a>, [PathBuf; 2]) {
    let target = world.kubelet.target(volume);
    fs::create_dir_all(&target).unwrap();
    let engine =
        arguments.iter().fold(EngineLauncher::new(fixture, &world.store, BUCKET), |it, more| it.argument(*more));
    let profile = format!("{}-{}-s3-csi", volume.pod_uid, volume.handle);
    let files = ["config", "credentials"].map(|it| plugin_directory(world).join(format!("{profile}-{it}")));
    for file in &files {
        fs::write(file, "old").unwrap();
    }
    (engine.mount_at(&target), files)
}

fn plugin_directory(world: &World<'_>) -> PathBuf {
    world.plugin.sources().parent().unwrap().to_owned()
}

#[test]
fn a_mount_of_version_1_is_kept_with_rotated_keys_that_are_removed_with_it() {
    let fixture = Fixture::new("pod-version-1");
    let world = World::start(&fixture);
    let (writable, read_only) = (world.volume(1), CsiVolume { is_read_only: true, ..world.volume(2) });
    for (volume, arguments) in [(&writable, &["--allow-delete"][..]), (&read_only, &["--read-only"])] {
        let (mount, files) = mount_as_version_1(&fixture, &world, volume, arguments);
        let before = world.mounts();
        // Without a Mountpoint Pod: the call is answered at once.
        world.publish(volume);
        assert_eq!(world.mounts(), before, "nothing is mounted over it");
        let keys = fs::read_to_string(&files[1]).unwrap();
        assert!(keys.contains(&world.store.account().access_key), "the keys were not refreshed: {keys}");
        // Those of a Secret as well.
        let mut with_secret = volume.clone();
        with_secret.attributes.insert("authenticationSource".to_owned(), "secret".to_owned());
        let secret = [("access_key_id", "rotated"), ("secret_access_key", "rotated-NeverPrintThis")];
        with_secret.secrets.extend(secret.map(|(key, value)| (key.to_owned(), value.to_owned())));
        world.publish(&with_secret);
        let keys = fs::read_to_string(&files[1]).unwrap();
        assert!(keys.contains("aws_access_key_id=rotated\n"), "the Secret's keys were not written: {keys}");
        assert_eq!(world.mounts(), before, "nothing is mounted over it");
        world.unpublish(volume);
        assert!(files.iter().all(|it| !it.exists()), "keys are left: {files:?}");
        assert!(mount.process().unwrap().wait_for_end().success());
        drop(mount);
    }
    world.check_nothing_mounted();
}

/// Its container is ready and never ends: only the node knows that the mount is dead.
#[test]
fn a_dead_mount_of_version_1_is_reported_to_the_controller_and_mounted_again() {
    let fixture = Fixture::new("pod-version-1-dies");
    let world = World::start(&fixture);
    let name = format!("kept-{}", world.node_name);
    let uid = world.runtime.block_on(world.cluster.create_workload(&name, &world.node_name));
    let mut volume = CsiVolume::new(BUCKET, PV, &uid);
    volume.attributes.insert("csi.storage.k8s.io/pod.name".to_owned(), name.clone());
    let condition = || {
        let kind = "s3.csi.scality.com/Mounted";
        world.runtime.block_on(world.cluster.condition_in("default", &name, kind)).unwrap_or_default()
    };

    let (mount, files) = mount_as_version_1(&fixture, &world, &volume, &["--allow-delete"]);
    world.publish(&volume);
    assert_eq!(condition(), "", "a mount that answers needs no condition");
    mount.process().unwrap().kill();
    // The first call may come before the node plugin knows all attachments; kubelet repeats it.
    let is_reported = || {
        let refused = world.try_publish_within(&volume, Duration::from_secs(3));
        check_refused(refused, Code::Unavailable, &["no Mountpoint Pod is assigned to workload", &uid]);
        condition().starts_with("False EngineDied: the unit that served volume pv-1 is dead")
    };
    assert!(wait_until(Instant::now() + SOON, is_reported), "{}", condition());

    // What the controller does then.
    let pod = world.run_pod(1);
    let entries = BTreeMap::from([(pod.name.clone(), vec![uid])]);
    world.runtime.block_on(world.cluster.attach(&world.node_name, PV, &entries));
    let target = world.publish(&volume);
    fs::write(target.join("file"), "content").unwrap();
    assert_eq!(world.store.object(BUCKET, "file").as_deref(), Some(b"content".as_slice()));
    assert!(condition().starts_with("True VolumeRemounted: a Mountpoint Pod serves volume pv-1"), "{}", condition());
    world.unpublish(&volume);
    assert!(files.iter().all(|it| !it.exists()), "keys are left: {files:?}");
    world.retire(&pod);
    drop(mount);
    world.check_nothing_mounted();
}
