//! One mounter for many sources, and how many engines there may be.

use rustix::process::Signal;
use s3csi_handoff::{self as handoff, Answer, MountRequest, SourceCommand};
use s3csi_handoff::{ERROR_FILE, EXIT_FILE};

use crate::fixture::{Client, Gate, Mounter, Pipe, exited, expect_closed, for_source, killed, scripted, send_signal};

#[test]
fn each_source_has_its_own_directory() {
    let mounter = Mounter::start(&["--limit", "10"]);
    let gate = Gate::new(&mounter, "gate");
    let mut healthy = mounter.request(&for_source(&mounter, gate.served(), "healthy"), Pipe::new().writer);
    healthy.expect(&Answer::Ready);
    let request = for_source(&mounter, scripted("echo no >&2; exit 1"), "broken");
    assert_eq!(mounter.request(&request, Pipe::new().writer).failure(), "no");
    assert_eq!(std::fs::read_to_string(mounter.path("broken").join(ERROR_FILE)).unwrap(), "no");
    assert!(!mounter.path("healthy").join(ERROR_FILE).exists());
    assert!(!mounter.path(ERROR_FILE).exists());
    gate.open();
    healthy.expect(&exited(0, ""));
}

#[test]
fn a_source_is_served_by_one_engine_at_a_time() {
    let mounter = Mounter::start(&["--limit", "10"]);
    let gate = Gate::new(&mounter, "gate");
    let request = for_source(&mounter, gate.served(), "source");
    let mut first = mounter.request(&request, Pipe::new().writer);
    first.expect(&Answer::Ready);

    let pipe = Pipe::new();
    let mut second = mounter.request(&request, pipe.writer);
    assert_eq!(second.failure(), "source source is already served by a running engine");
    expect_closed(&pipe.reader);
    assert!(!mounter.path("source").join(ERROR_FILE).exists(), "the file belongs to the running engine");

    // After the answer, the source can be served again immediately.
    for _ in 0..20 {
        gate.open();
        first.expect(&exited(0, ""));
        first = mounter.request(&request, Pipe::new().writer);
        first.expect(&Answer::Ready);
    }
}

#[test]
fn no_more_engines_run_than_allowed() {
    let mounter = Mounter::start(&["--limit", "3"]);
    let gate = Gate::new(&mounter, "gate");
    mounter.leaks_nothing(|| {
        let start = |name: &str| mounter.request(&for_source(&mounter, gate.served(), name), Pipe::new().writer);
        let mut running = ["a", "b", "c"].map(start);
        for client in &mut running {
            client.expect(&Answer::Ready);
        }
        let pipe = Pipe::new();
        let mut refused = mounter.request(&for_source(&mounter, gate.served(), "d"), pipe.writer);
        assert_eq!(refused.failure(), "this mounter already runs 3 of at most 3 engines");
        expect_closed(&pipe.reader);
        for _ in &running {
            gate.open();
        }
        for client in &mut running {
            client.expect(&exited(0, ""));
        }
        let mut again = start("d");
        again.expect(&Answer::Ready);
        gate.open();
        again.expect(&exited(0, ""));
    });
}

#[test]
fn a_mountpoint_pod_has_one_engine_and_the_next_request_waits_for_its_end() {
    let mounter = Mounter::start(&[]);
    let gate = Gate::new(&mounter, "gate");
    let mut first = mounter.request(&gate.served(), Pipe::new().writer);
    first.expect(&Answer::Ready);
    let mut second = mounter.request(&gate.served(), Pipe::new().writer);
    // The node took the first mount away, and the engine notices.
    gate.open();
    first.expect(&exited(0, ""));
    second.expect(&Answer::Ready);
    assert_eq!(mounter.engines().len(), 1);
    gate.open();
    second.expect(&exited(0, ""));
}

#[test]
fn the_next_request_to_a_mountpoint_pod_ends_a_frozen_engine() {
    let mounter = Mounter::start(&[]);
    let gate = Gate::new(&mounter, "gate");
    let mut frozen = mounter.request(&gate.served(), Pipe::new().writer);
    frozen.expect(&Answer::Ready);
    send_signal(mounter.engines()[0], Signal::STOP);
    let mut next = mounter.request(&gate.served(), Pipe::new().writer);
    frozen.expect(&killed(Signal::KILL));
    next.expect(&Answer::Ready);
    assert_eq!(mounter.engines().len(), 1);
    gate.open();
    next.expect(&exited(0, ""));
}

#[test]
fn a_source_is_a_directory_the_node_has_made() {
    let mounter = Mounter::start(&["--limit", "10"]);
    let problem = "may only contain letters, digits, dots, underscores and hyphens";
    check(&mounter, "../directory", &format!("source name \"../directory\" {problem}"));
    check(&mounter, "..", "source name \"..\" must not be a relative path");
    check(&mounter, "", "source name \"\" must be 1 to 255 characters long");
    let place = mounter.directory();
    let expected =
        |name: &str, reason: &str| format!("the directory of source {name} cannot be opened in {place:?}: {reason}");
    check(&mounter, "none", &expected("none", "No such file or directory (os error 2)"));
    std::os::unix::fs::symlink("/tmp", mounter.path("link")).unwrap();
    check(&mounter, "link", &expected("link", "Not a directory (os error 20)"));
}

#[track_caller]
fn check(mounter: &Mounter, source: &str, expected: &str) {
    let pipe = Pipe::new();
    let request = MountRequest { source: Some(source.to_owned()), ..scripted("exit 0") };
    let error = mounter.leaks_nothing(|| mounter.request(&request, pipe.writer).failure());
    assert_eq!(error, expected);
    expect_closed(&pipe.reader);
}

#[test]
fn the_end_of_one_source_is_not_the_end_of_a_mounter_for_many() {
    let mut mounter = Mounter::start(&["--limit", "10"]);
    for _ in 0..2 {
        let request = for_source(&mounter, scripted("exit 0"), "source");
        std::fs::write(mounter.path("source").join(EXIT_FILE), "").unwrap();
        std::fs::write(mounter.path(EXIT_FILE), "").unwrap();
        mounter.request(&request, Pipe::new().writer).expect(&exited(0, ""));
    }
    assert!(mounter.is_running());
}

#[test]
fn a_stopped_source_has_no_engine() {
    let mounter = Mounter::start(&["--limit", "10"]);
    let gate = Gate::new(&mounter, "gate");
    stop(&mounter, "never-seen").expect(&exited(0, ""));

    // This one ends by itself, as engines do when their mount is gone.
    let mut healthy = mounter.request(&for_source(&mounter, gate.served(), "healthy"), Pipe::new().writer);
    healthy.expect(&Answer::Ready);
    let mut stopping = stop(&mounter, "healthy");
    gate.open();
    healthy.expect(&exited(0, ""));
    stopping.expect(&exited(0, ""));
}

#[test]
fn a_frozen_engine_is_killed_and_others_are_not() {
    let mounter = Mounter::start(&["--limit", "10"]);
    let gate = Gate::new(&mounter, "gate");
    let start = |name: &str| {
        let mut client = mounter.request(&for_source(&mounter, gate.served(), name), Pipe::new().writer);
        client.expect(&Answer::Ready);
        client
    };
    let mut frozen = start("frozen");
    send_signal(mounter.engines()[0], Signal::STOP);
    let mut other = start("other");

    stop(&mounter, "frozen").expect(&killed(Signal::KILL));
    frozen.expect(&killed(Signal::KILL));
    let mut again = start("frozen");
    assert_eq!(mounter.engines().len(), 2);
    gate.open();
    gate.open();
    for client in [&mut again, &mut other] {
        client.expect(&exited(0, ""));
    }
}

#[test]
fn only_sources_can_be_stopped() {
    let mounter = Mounter::start(&["--limit", "10"]);
    assert_eq!(stop(&mounter, "..").failure(), "source name \"..\" must not be a relative path");
}

fn stop(mounter: &Mounter, source: &str) -> Client {
    let client = mounter.connect();
    handoff::send_command(client.stream(), &SourceCommand::Stop(source.to_owned())).unwrap();
    client
}
