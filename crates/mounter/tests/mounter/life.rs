//! When a mounter starts, goes on and ends.

use std::os::unix::net::{UnixListener, UnixStream};

use rustix::process::Signal;
use s3csi_handoff::Answer;
use s3csi_handoff::{EXIT_FILE, SOCKET};

use crate::fixture::{Gate, Mounter, Pipe, eventually, exited, expect_closed, for_source, killed, send_signal, spawn};

#[test]
fn a_mounter_ends_when_the_node_asked_for_it_and_the_engine_has_ended() {
    let mut mounter = Mounter::start(&[]);
    let gate = Gate::new(&mounter, "gate");
    let mut client = mounter.request(&gate.served(), Pipe::new().writer);
    client.expect(&Answer::Ready);
    std::fs::write(mounter.path(EXIT_FILE), "").unwrap();
    assert!(mounter.is_running());
    gate.open();
    client.expect(&exited(0, ""));
    assert_eq!(mounter.wait().code(), Some(0));
    assert!(!mounter.path(SOCKET).exists());
}

#[test]
fn how_the_engine_ended_does_not_matter_when_the_end_was_asked_for() {
    let mut mounter = Mounter::start(&[]);
    let gate = Gate::new(&mounter, "gate");
    let mut client = mounter.request(&gate.served(), Pipe::new().writer);
    client.expect(&Answer::Ready);
    std::fs::write(mounter.path(EXIT_FILE), "").unwrap();
    send_signal(mounter.engines()[0], Signal::KILL);
    client.expect(&killed(Signal::KILL));
    assert_eq!(mounter.wait().code(), Some(0));
}

#[test]
fn an_idle_mounter_notices_that_it_may_go() {
    let mut mounter = Mounter::start(&[]);
    mounter.run("exit 0").expect(&exited(0, ""));
    std::fs::write(mounter.path(EXIT_FILE), "").unwrap();
    assert_eq!(mounter.wait().code(), Some(0));
    assert!(!mounter.path(SOCKET).exists());
}

#[test]
fn a_source_can_be_served_again_after_its_engine_was_killed() {
    let mut mounter = Mounter::start(&[]);
    let gate = Gate::new(&mounter, "gate");
    let id = mounter.id();
    for _ in 0..20 {
        let pipe = Pipe::new();
        let mut client = mounter.request(&gate.served(), pipe.writer);
        client.expect(&Answer::Ready);
        send_signal(mounter.engines()[0], Signal::KILL);
        client.expect(&killed(Signal::KILL));
        expect_closed(&pipe.reader);
    }
    assert!(mounter.is_running());
    assert_eq!(mounter.id(), id);
}

#[test]
fn signals_end_an_idle_mounter() {
    for signal in [Signal::TERM, Signal::INT] {
        let mut mounter = Mounter::start(&[]);
        mounter.signal(signal);
        assert_eq!(mounter.wait().code(), Some(0));
        assert!(!mounter.path(SOCKET).exists());
    }
}

#[test]
fn signals_do_not_disturb_engines() {
    for signal in [Signal::TERM, Signal::INT] {
        let mut mounter = Mounter::start(&["--limit", "2"]);
        let gates = ["a", "b"].map(|it| Gate::new(&mounter, it));
        let start = |gate: &Gate, name: &str| {
            let mut client = mounter.request(&for_source(&mounter, gate.served(), name), Pipe::new().writer);
            client.expect(&Answer::Ready);
            client
        };
        let (mut a, mut b) = (start(&gates[0], "a"), start(&gates[1], "b"));
        let engines = mounter.engines();

        mounter.signal(signal);
        eventually("the signal is noted", || mounter.log().contains("stop requested, waiting"));
        mounter.signal(signal);
        assert_eq!(mounter.engines(), engines);

        gates[0].open();
        a.expect(&exited(0, ""));
        assert!(mounter.is_running(), "one engine is left");
        gates[1].open();
        b.expect(&exited(0, ""));
        assert_eq!(mounter.wait().code(), Some(0));
        assert!(!mounter.path(SOCKET).exists());
    }
}

#[test]
fn a_killed_mounter_has_a_successor() {
    let mut mounter = Mounter::start(&[]);
    mounter.kill();
    assert!(mounter.path(SOCKET).exists(), "it had no time to remove it");
    let successor = Mounter::start_in(mounter.into_place(), &[]);
    successor.run("exit 0").expect(&exited(0, ""));
}

#[test]
fn the_node_sees_that_a_mounter_was_killed() {
    let mut mounter = Mounter::start(&[]);
    let gate = Gate::new(&mounter, "gate");
    let mut client = mounter.request(&gate.served(), Pipe::new().writer);
    client.expect(&Answer::Ready);
    mounter.kill();
    client.expect_end();
    gate.open();
}

#[test]
fn a_second_mounter_does_not_take_the_place_of_the_first() {
    let mut mounter = Mounter::start(&[]);
    let status = spawn(mounter.directory().parent().unwrap(), &[]).wait().unwrap();
    assert_eq!(status.code(), Some(1));
    assert!(mounter.log().contains("another mounter already serves"), "{}", mounter.log());
    mounter.run("exit 0").expect(&exited(0, ""));
    assert!(mounter.is_running());
}

#[test]
fn a_foreign_listener_is_not_replaced() {
    let place = tempfile::tempdir().unwrap();
    std::fs::create_dir(place.path().join("directory")).unwrap();
    let socket = place.path().join("directory").join(SOCKET);
    let foreign = UnixListener::bind(&socket).unwrap();
    assert_eq!(spawn(place.path(), &[]).wait().unwrap().code(), Some(1));
    // The mounter has connected, to find out whether the socket is served. This connection reaches the same listener.
    let _client = UnixStream::connect(&socket).unwrap();
    foreign.set_nonblocking(true).unwrap();
    for _ in 0..2 {
        foreign.accept().unwrap();
    }
}

#[test]
fn a_mounter_without_its_directory_says_so() {
    let place = tempfile::tempdir().unwrap();
    let status = spawn(place.path(), &["--limit", "0"]).wait().unwrap();
    assert_eq!(status.code(), Some(2), "wrong flags");
    let missing = place.path().join("none");
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_s3csi-mounter"))
        .arg("--directory")
        .arg(&missing)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let expected = format!("failed to open the mounter's directory {missing:?}");
    let words = String::from_utf8(output.stderr).unwrap().replace('\\', "");
    assert!(words.contains(&expected), "{words}");
}
