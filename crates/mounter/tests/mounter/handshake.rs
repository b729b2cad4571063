//! What peers may send, and that nothing stays open whatever they send.

use std::io::Write;
use std::os::fd::AsFd;

use s3csi_handoff::{Answer, ReceiveLimits};

use crate::fixture::{Client, Gate, Mounter, PATIENCE, Pipe, eventually, exited, expect_closed, scripted};

const REQUEST: &[u8] = br#"{"bucketName":"bucket","args":[],"env":["SCRIPT=exit 0"]}"#;

#[test]
fn a_request_needs_exactly_one_descriptor() {
    let mounter = Mounter::start(&[]);
    let error = "the mount request has 0 descriptors instead of 1";
    refuse(&mounter, error, |client, _| client.send(REQUEST, &[]));
    let error = "the mount request has 2 descriptors instead of 1";
    refuse(&mounter, error, |client, pipe| client.send(REQUEST, &[pipe.writer.as_fd(), pipe.writer.as_fd()]));
    refuse(&mounter, error, |client, pipe| {
        client.send(&REQUEST[..10], &[pipe.writer.as_fd()]);
        client.send(&REQUEST[10..], &[pipe.writer.as_fd()]);
    });
    let error = "the mount request has more descriptors than can be received";
    refuse(&mounter, error, |client, pipe| client.send(REQUEST, &[pipe.writer.as_fd(); 20]));
}

#[test]
fn a_resume_needs_the_state_as_well() {
    const RESUME: &[u8] = br#"{"bucketName":"bucket","args":[],"env":["SCRIPT=exit 0"],"resume":true}"#;
    let mounter = Mounter::start(&[]);
    let error = "the mount request has 1 descriptors instead of 2";
    refuse(&mounter, error, |client, pipe| client.send(RESUME, &[pipe.writer.as_fd()]));
    let unsupervised = Mounter::start(&["--keep", "off"]);
    let error = "this mounter does not keep mounts alive, so it cannot resume one";
    refuse(&unsupervised, error, |client, pipe| client.send(RESUME, &[pipe.writer.as_fd(), pipe.writer.as_fd()]));
}

#[test]
fn commands_for_a_source_that_is_not_served() {
    let mounter = Mounter::start(&[]);
    let error = "source \"\" is not served by this mounter";
    refuse(&mounter, error, |client, _| client.send(br#"{"hold":""}"#, &[]));
    refuse(&mounter, error, |client, _| client.send(br#"{"go":""}"#, &[]));
    let mut client = mounter.connect();
    client.send(br#"{"release":""}"#, &[]);
    client.finish();
    assert_eq!(client.answer(), Answer::Released);
}

#[test]
fn a_request_must_be_json_of_the_right_shape() {
    let mounter = Mounter::start(&[]);
    check(&mounter, b"mount, please", "it is not JSON in line 1, column 1");
    check(&mounter, b"{\"bucketName\":\"b\"", "it is truncated in line 1, column 17");
    check(&mounter, b"{}", "a field is missing or of the wrong type in line 1, column 2");
    check(&mounter, br#"{"bucketName":7}"#, "a field is missing or of the wrong type in line 1, column 15");
    check(&mounter, b"{}{}", "a field is missing or of the wrong type in line 1, column 2");
    check(&mounter, b"\xff\xfe\x00", "it is not JSON in line 1, column 1");

    let secret = br#"{"bucketName":"b","env":"AWS_SECRET_ACCESS_KEY=hunter2"}"#;
    check(&mounter, secret, "a field is missing or of the wrong type in line 1, column 55");
    assert!(!mounter.log().contains("hunter2"), "{}", mounter.log());
}

#[track_caller]
fn check(mounter: &Mounter, bytes: &[u8], problem: &str) {
    let error = format!("the mount request is not valid: {problem}");
    refuse(mounter, &error, |client, pipe| client.send(bytes, &[pipe.writer.as_fd()]));
}

#[test]
fn garbage_without_end_is_cut_off() {
    let mounter = Mounter::start(&[]);
    mounter.leaks_nothing(|| {
        let mut client = mounter.connect();
        let Pipe { reader, writer } = Pipe::new();
        client.send(b"x", &[writer.as_fd()]);
        drop(writer);
        // The mounter closes the connection while we are still writing.
        client.stream().set_write_timeout(Some(PATIENCE)).unwrap();
        let garbage = vec![b'x'; 64 * 1024];
        while client.stream().write_all(&garbage).is_ok() {}
        let limit = ReceiveLimits::DEFAULT_BYTES;
        assert_eq!(client.failure(), format!("the mount request is larger than {limit} bytes"));
        expect_closed(&reader);
    });
}

#[test]
fn a_peer_that_stops_half_way_is_given_up() {
    let mounter = Mounter::start(&["--mount-sock-recv-timeout", "200ms"]);
    mounter.leaks_nothing(|| {
        let mut client = mounter.connect();
        let Pipe { reader, writer } = Pipe::new();
        client.send(&REQUEST[..10], &[writer.as_fd()]);
        drop(writer);
        // Not closed: only the mounter's patience ends this.
        assert_eq!(client.failure(), "the mount request was not complete in time; 10 bytes were received");
        expect_closed(&reader);
    });
}

#[test]
fn a_peer_that_goes_away_half_way_leaves_nothing() {
    let mounter = Mounter::start(&[]);
    mounter.leaks_nothing(|| {
        let client = mounter.connect();
        let Pipe { reader, writer } = Pipe::new();
        client.send(&REQUEST[..10], &[writer.as_fd()]);
        drop((client, writer));
        expect_closed(&reader);
    });
    let mut client = mounter.connect();
    client.finish();
    assert_eq!(client.failure(), "the connection was closed without a mount request");
}

#[test]
fn the_mounter_serves_after_every_refusal() {
    let mounter = Mounter::start(&[]);
    refuse(&mounter, "the mount request has 0 descriptors instead of 1", |client, _| client.send(REQUEST, &[]));
    mounter.run("exit 0").expect(&exited(0, ""));
}

#[test]
fn a_request_may_come_in_pieces() {
    let mounter = Mounter::start(&[]);
    let mut client = mounter.connect();
    let Pipe { reader, writer } = Pipe::new();
    for (number, byte) in REQUEST.iter().enumerate() {
        let descriptors = if number == 20 { vec![writer.as_fd()] } else { vec![] };
        client.send(&[*byte], &descriptors);
    }
    client.finish();
    client.expect(&exited(0, ""));
    drop(writer);
    expect_closed(&reader);
}

#[test]
fn an_older_node_closes_at_once_and_is_served() {
    let mounter = Mounter::start(&[]);
    let mark = mounter.beside("mark");
    mounter.leaks_nothing(|| {
        let client = mounter.connect();
        let Pipe { reader, writer } = Pipe::new();
        let script = format!("echo bucket is mounted at x; echo done > {}", mark.display());
        // As Go writes it: an empty list is null, and the angle bracket is escaped.
        let request =
            format!(r#"{{"bucketName":"bucket","args":null,"env":["SCRIPT={}"]}}"#, script.replace('>', r"\u003e"));
        client.send(request.as_bytes(), &[writer.as_fd()]);
        drop((client, writer));
        eventually("the engine has run", || std::fs::read_to_string(&mark).is_ok_and(|it| it == "done\n"));
        expect_closed(&reader);
    });
}

#[test]
fn silent_peers_do_not_keep_a_request_from_being_served() {
    let mounter = Mounter::start(&["--mount-sock-recv-timeout", "300ms"]);
    mounter.leaks_nothing(|| {
        // More than may shake hands at once: the rest waits its turn.
        let silent: Vec<Client> = (0..150).map(|_| mounter.connect()).collect();
        mounter.run("exit 0").expect(&exited(0, ""));
        drop(silent);
    });
}

#[test]
fn an_engine_serves_on_when_its_node_has_gone() {
    let mounter = Mounter::start(&[]);
    let gate = Gate::new(&mounter, "gate");
    let pipe = Pipe::new();
    let mut client = mounter.request(&gate.served(), pipe.writer);
    client.expect(&Answer::Ready);
    drop(client);
    // The mounter has seen the end of the connection when it has served a later one.
    let mut later = mounter.connect();
    later.finish();
    assert_eq!(later.failure(), "the connection was closed without a mount request");
    assert_eq!(mounter.engines().len(), 1);
    gate.open();
    expect_closed(&pipe.reader);
    eventually("the slot is free", || mounter.engines().is_empty());
    eventually("the mounter serves again", || {
        let mut client = mounter.request(&scripted("exit 0"), Pipe::new().writer);
        client.answer() == exited(0, "")
    });
}

/// Sends something wrong with a descriptor and expects the words, the end of the connection, and no trace of it.
#[track_caller]
fn refuse(mounter: &Mounter, error: &str, send: impl FnOnce(&Client, &Pipe)) {
    mounter.leaks_nothing(|| {
        let mut client = mounter.connect();
        let pipe = Pipe::new();
        send(&client, &pipe);
        client.finish();
        assert_eq!(client.failure(), error);
        drop(pipe.writer);
        expect_closed(&pipe.reader);
    });
}
