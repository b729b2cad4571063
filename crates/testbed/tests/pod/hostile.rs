//! A malicious Mountpoint Pod: it may write anything into the directory that it shares with the node. The node, which is root,
//! follows no link out of it, never waits for the Pod, and serves its other volumes meanwhile.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::CsiVolume;
use s3csi_testbed::wait::wait_for;
use tonic::Code;

use crate::world::{MountpointPod, PV, World, check_refused};

const TIME: Duration = Duration::from_secs(6);

/// A node with a harmless Mountpoint Pod for workload 2, and one for workload 1 in which nothing runs.
fn start(fixture: &Fixture) -> (World<'_>, MountpointPod) {
    let world = World::start(fixture);
    world.serve(&[2]);
    let pod = world.create_pod(1);
    world.set_phase(&pod, "Running");
    world.assign(&pod.name, &[1]);
    (world, pod)
}

/// The publish fails in time and leaves nothing behind, and other volumes are unaffected.
#[track_caller]
fn check(world: &World<'_>, pod: &MountpointPod, code: Code, words: &[&str]) {
    check_refused(world.try_publish_within(&world.volume(1), TIME), code, words);
    assert!(!world.source_exists(pod));
    let mounts = world.mounts();
    assert!(
        !mounts.contains(&world.source(pod)) && !mounts.contains(&world.kubelet.target(&world.volume(1))),
        "{mounts:?}"
    );
    let neighbour = world.publish(&world.volume(2));
    fs::write(neighbour.join("file"), "x").unwrap();
    world.unpublish(&world.volume(2));
}

/// A socket at this path, though the path is longer than an address.
pub fn listen(path: &Path) -> UnixListener {
    let directory = File::open(path.parent().unwrap()).unwrap();
    let number = std::os::fd::AsRawFd::as_raw_fd(&directory);
    let name = path.file_name().unwrap().to_str().unwrap();
    UnixListener::bind(format!("/proc/self/fd/{number}/{name}")).unwrap()
}

fn make_fifo(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[test]
fn credentials_are_not_written_through_a_link() {
    let fixture = Fixture::new("hostile-credentials");
    let (world, pod) = start(&fixture);
    let victim = fixture.create_directory("victim");
    symlink(&victim, pod.directory.join("credentials")).unwrap();
    check(&world, &pod, Code::Internal, &["failed to write the credentials", "not a directory"]);
    assert_eq!(fs::read_dir(&victim).unwrap().count(), 0);
}

#[test]
fn a_link_in_place_of_the_directory_is_not_followed() {
    let fixture = Fixture::new("hostile-directory");
    let (world, pod) = start(&fixture);
    let victim = fixture.create_directory("victim");
    fs::remove_dir(&pod.directory).unwrap();
    symlink(&victim, &pod.directory).unwrap();
    check(&world, &pod, Code::Unavailable, &["cannot be used"]);
    assert_eq!(fs::read_dir(&victim).unwrap().count(), 0);
}

#[test]
fn a_link_in_place_of_the_socket_is_not_followed() {
    let fixture = Fixture::new("hostile-link");
    let (world, pod) = start(&fixture);
    let elsewhere = fixture.path("elsewhere.sock");
    let listener = UnixListener::bind(&elsewhere).unwrap();
    listener.set_nonblocking(true).unwrap();
    symlink(&elsewhere, pod.directory.join("mount.sock")).unwrap();
    check(&world, &pod, Code::Unavailable, &["not a socket"]);
    assert_eq!(listener.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    fs::remove_file(&elsewhere).unwrap();
}

#[test]
fn a_fifo_or_a_file_in_place_of_the_socket_is_refused() {
    let fixture = Fixture::new("hostile-fifo");
    let (world, pod) = start(&fixture);
    let socket = pod.directory.join("mount.sock");
    make_fifo(&socket);
    check(&world, &pod, Code::Unavailable, &["not a socket"]);
    fs::remove_file(&socket).unwrap();
    fs::write(&socket, "").unwrap();
    check(&world, &pod, Code::Unavailable, &["not a socket"]);
}

#[test]
fn a_socket_that_accepts_and_hangs_is_given_up_in_time() {
    let fixture = Fixture::new("hostile-hangs");
    let (world, pod) = start(&fixture);
    let socket = pod.directory.join("mount.sock");
    let listener = listen(&socket);
    let accepted = std::thread::spawn(move || listener.accept().map(|it| it.0));
    check(&world, &pod, Code::DeadlineExceeded, &["did not answer in time"]);
    drop(accepted.join().unwrap().unwrap());
    fs::remove_file(&socket).unwrap();
}

#[test]
fn a_socket_that_never_accepts_is_given_up_in_time() {
    let fixture = Fixture::new("hostile-backlog");
    let (world, pod) = start(&fixture);
    let socket = pod.directory.join("mount.sock");
    let listener = listen(&socket);
    check(&world, &pod, Code::DeadlineExceeded, &["did not answer in time"]);
    drop(listener);
    fs::remove_file(&socket).unwrap();
}

#[test]
fn a_socket_that_talks_without_end_is_not_listened_to_without_end() {
    let fixture = Fixture::new("hostile-talks");
    let (world, pod) = start(&fixture);
    let socket = pod.directory.join("mount.sock");
    let listener = listen(&socket);
    let talking = std::thread::spawn(move || {
        let (mut stream, _): (UnixStream, _) = listener.accept().unwrap();
        let line = [b"{\"answer\":\"ready\"}\n".as_slice(), &[b'x'; 4096], b"\n"].concat();
        // Until the peer stops reading. Closing the connection closes the descriptor that was sent over it.
        while stream.write_all(&line).is_ok() {}
    });
    check(&world, &pod, Code::Unavailable, &["the mounter ended"]);
    talking.join().unwrap();
    fs::remove_file(&socket).unwrap();
}

/// Puts something where it does not belong.
type Placement = fn(&Path);

#[test]
fn an_error_file_that_is_a_fifo_a_link_or_huge_is_harmless() {
    let fixture = Fixture::new("hostile-words");
    let (world, pod) = start(&fixture);
    let (socket, words) = (pod.directory.join("mount.sock"), pod.directory.join("mount.err"));
    let place: [(&str, Placement); 4] = [
        ("a FIFO", make_fifo),
        ("a link to a device", |it| symlink("/dev/zero", it).unwrap()),
        ("a link to a secret", |it| symlink("/etc/shadow", it).unwrap()),
        ("huge", |it| File::create(it).unwrap().set_len(1 << 40).unwrap()),
    ];
    for (what, place) in place {
        let listener = listen(&socket);
        let answering = std::thread::spawn({
            let words = words.clone();
            // Takes the request, leaves its words and goes: what a mounter of an earlier driver does.
            move || {
                let (stream, _) = listener.accept().unwrap();
                let limits = s3csi_handoff::ReceiveLimits::until(std::time::Instant::now() + TIME);
                let request = s3csi_handoff::receive(&stream, limits).unwrap();
                place(&words);
                drop(request);
            }
        });
        let outcome = world.try_publish_within(&world.volume(1), TIME);
        answering.join().unwrap();
        let status = outcome.expect_err(what);
        assert!(!status.message().contains("root:"), "{what}: {}", status.message());
        assert!(status.message().len() < 16 << 10, "{what}: {} bytes", status.message().len());
        wait_for("the mount is gone", || world.mounts().is_empty());
        fs::remove_file(&socket).unwrap();
        // The node removes what has the name before the next attempt.
    }
    fs::remove_file(&words).unwrap();
}

#[test]
fn errors_of_a_healthy_mounter_arrive_though_its_error_file_is_a_directory() {
    let fixture = Fixture::new("hostile-error-directory");
    let world = World::start(&fixture);
    let pod = world.serve(&[1]);
    fs::create_dir(pod.directory.join("mount.err")).unwrap();
    let volume = CsiVolume::new("no-such-bucket", PV, &world.workload(1));
    check_refused(world.try_publish(&volume), Code::NotFound, &["does not exist"]);
    world.check_nothing_mounted();
    world.retire(&pod);
}

#[test]
fn links_do_not_lead_the_end_of_a_mountpoint_pod_astray() {
    let fixture = Fixture::new("hostile-retire");
    let world = World::start(&fixture);
    let pod = world.serve(&[1]);
    world.publish(&world.volume(1));
    let victim = fixture.create_directory("victim");
    fs::write(victim.join("precious"), "x").unwrap();
    let not_there = fixture.path("not-there");
    symlink(&not_there, pod.directory.join("mount.exit")).unwrap();
    symlink(&victim, pod.directory.join("credentials/more")).unwrap();
    world.unpublish(&world.volume(1));
    world.retire(&pod);
    assert!(!not_there.exists());
    assert!(victim.join("precious").exists());
    world.check_nothing_mounted();
}
