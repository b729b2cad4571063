use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixListener;

use s3csi_core::publish::Access;

use super::*;
use crate::host::fake::{Call, FakeHost};
use crate::metrics::NodeMetrics;

const PATH: &str = "/sources/a";

fn deadline() -> Instant {
    Instant::now() + Duration::from_mins(1)
}

fn manager() -> (Arc<FakeHost>, SourceManager) {
    let (host, metrics) = (Arc::new(FakeHost::new()), Arc::new(NodeMetrics::new()));
    let manager = SourceManager {
        host: host.clone(),
        failpoints: Failpoints::default(),
        remediations: Remediations::of_sources(metrics.clone()),
        reporter: Arc::new(Reporter::without_events(metrics)),
        held_mounts: HeldMounts::default(),
    };
    (host, manager)
}

fn spec() -> SourceSpec {
    SourceSpec {
        name: "a".to_owned(),
        path: PATH.into(),
        options: FuseOptions { access: Access::ReadWrite, allow_other: true },
        request: MountRequest { bucket_name: "b".to_owned(), ..MountRequest::default() },
    }
}

fn mounter(directory: &Path) -> Mounter {
    let open = || SafeDir::open(directory).unwrap();
    Mounter { kind: MounterKind::Dedicated, directory: open(), error_directory: open(), pod: None }
}

/// A source that is mounted already, and whose engine answers the next probe like this.
fn check_mounted(probe: Probe) -> (Result<Device, SourceError>, Vec<Call>) {
    let directory = tempfile::tempdir().unwrap();
    let (host, manager) = manager();
    host.create_directory(Path::new(PATH), 0o755).unwrap();
    host.mount_fuse(Path::new(PATH), &spec().options).unwrap();
    let before = host.calls().len();
    host.answer_probe(PATH, probe);
    // Without a mounter, a source that has to be mounted again ends in an error.
    let soon = Instant::now() + Duration::from_millis(50);
    let outcome = manager.ensure(&spec(), &mounter(directory.path()), soon);
    (outcome, host.calls()[before..].to_vec())
}

fn is_destructive(call: &Call) -> bool {
    matches!(call, Call::Abort { .. } | Call::Detach { .. } | Call::Unmount { .. })
}

#[test]
fn a_silent_source_is_kept_and_the_publish_reports_why_it_failed() {
    let (outcome, calls) = check_mounted(Probe::Hung);
    assert!(matches!(outcome, Err(SourceError::Silent { .. })), "{outcome:?}");
    assert!(!calls.iter().any(is_destructive), "{calls:?}");
}

#[test]
fn a_source_that_cannot_be_probed_is_kept() {
    let (outcome, calls) = check_mounted(Probe::Unknown(io::ErrorKind::TimedOut.into()));
    assert!(matches!(outcome, Err(SourceError::Unknown { .. })), "{outcome:?}");
    assert!(!calls.iter().any(is_destructive), "{calls:?}");
}

#[test]
fn a_dead_source_is_cleared_and_mounted_again() {
    let (outcome, calls) = check_mounted(Probe::Dead(io::ErrorKind::NotConnected.into()));
    assert!(matches!(outcome, Err(SourceError::Unreachable { .. })), "{outcome:?}");
    assert!(calls.iter().any(is_destructive), "{calls:?}");
}

#[test]
fn a_mount_that_does_not_go_away_is_an_error_and_no_endless_loop() {
    let (host, manager) = manager();
    host.create_directory(Path::new(PATH), 0o755).unwrap();
    host.mount_fuse(Path::new(PATH), &spec().options).unwrap();
    host.pin(PATH);
    let error = manager.clear(Path::new(PATH)).unwrap_err();
    assert!(matches!(error, SourceError::Clear { cause: HostError::TooManyMounts { .. }, .. }), "{error:?}");
    let error = unmount(host.as_ref(), &HeldMounts::default(), Path::new(PATH)).unwrap_err();
    assert!(matches!(error, HostError::TooManyMounts { .. }), "{error:?}");
}

#[test]
fn a_mounter_that_fails_without_closing_its_connection_costs_neither_thread_nor_descriptor() {
    let directory = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(directory.path().join(handoff::SOCKET)).unwrap();
    let hostile = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"{\"answer\":\"failed\",\"error\":\"no\"}\n").unwrap();
        stream.set_read_timeout(Some(Duration::from_mins(1))).unwrap();
        // Ends when the node has closed all its copies, and not before.
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).is_ok()
    });
    let (host, manager) = manager();
    // The engine is dead, so the mounter's answer decides.
    host.answer_probe(PATH, Probe::Dead(io::ErrorKind::NotConnected.into()));
    let outcome = manager.ensure(&spec(), &mounter(directory.path()), deadline());
    assert!(matches!(outcome, Err(SourceError::Engine { .. })), "{outcome:?}");
    assert!(hostile.join().unwrap(), "the node keeps its connection to a mounter that failed");
}
