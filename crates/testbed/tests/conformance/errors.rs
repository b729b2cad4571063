//! An engine that cannot start says so in one clear line and ends with 1, soon, whatever `RUST_BACKTRACE` says.

use std::net::TcpListener;
use std::time::Duration;

use s3csi_s3_server::store::{Account, SECRET_MARK};
use s3csi_s3_server::{Config, Effect, Fault, Transport};
use s3csi_testbed::engine::{EngineLauncher, FailedStart, Trust};
use s3csi_testbed::fixture::Fixture;

use crate::on_both_servers;
use crate::world::{BUCKET, World, in_process_with, start_versitygw};

/// The library alone retries some of these for 48 to 254 seconds.
const LIMIT: Duration = Duration::from_secs(20);

/// A server that is there but says nothing gets as long as background mode waits for a mount.
const SILENCE_LIMIT: Duration = Duration::from_secs(35);

on_both_servers!(
    a_missing_bucket_is_named,
    a_wrong_secret_is_reported,
    an_unknown_access_key_is_reported,
    missing_credentials_are_reported,
    the_bucket_of_another_account_is_refused,
);

/// `words`: at least one of them, in any case, is in the one line that a user gets to see.
#[track_caller]
fn check(refusal: &FailedStart, words: &[&str]) {
    let FailedStart { status, output, errors, took } = refusal;
    println!("after {took:?}: {errors}");
    assert_eq!(status.code(), Some(1), "{errors}");
    let lines: Vec<&str> = errors.lines().collect();
    assert_eq!(lines.len(), 1, "more or less than one line:\n{errors}");
    let line = lines[0].to_lowercase();
    assert!(words.iter().any(|it| line.contains(&it.to_lowercase())), "none of {words:?} is in: {errors}");
    assert!(!errors.contains("::"), "this is for programmers: {errors}");
    // In the foreground, standard output is the engine's log.
    for text in [output, errors] {
        assert!(!text.contains("backtrace"), "this is a back trace: {text}");
        assert!(!text.contains(SECRET_MARK), "this is a secret: {text}");
    }
}

fn a_missing_bucket_is_named(world: &World) {
    let engine = EngineLauncher::new(&world.fixture, world.store.as_ref(), "missing-bucket");
    check(&engine.refusal(LIMIT), &["missing-bucket"]);
}

fn a_wrong_secret_is_reported(world: &World) {
    let wrong = Account::new(&world.store.account().access_key, &format!("wrong-{SECRET_MARK}"));
    check(&world.engine().account(&wrong).refusal(LIMIT), &["signature", "secret"]);
}

fn an_unknown_access_key_is_reported(world: &World) {
    check(
        &world.engine().account(&Account::named("unknown")).refusal(LIMIT),
        &["access key", "credentials", "does not exist"],
    );
}

fn missing_credentials_are_reported(world: &World) {
    check(&world.engine().without_account().refusal(LIMIT), &["credentials"]);
}

fn the_bucket_of_another_account_is_refused(world: &World) {
    let other = Account::named("other");
    world.store.add_account(&other).unwrap();
    check(&world.engine().account(&other).refusal(LIMIT), &["denied", "forbidden", "not allowed", "permission"]);
}

#[test]
fn an_endpoint_that_refuses_connections_is_reported() {
    let world = in_process_with("unreachable", Config::default());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let refusal = world.engine().endpoint(&format!("http://127.0.0.1:{port}")).refusal(LIMIT);
    check(&refusal, &["connect", "reach", "refused"]);
}

#[test]
fn an_endpoint_that_cannot_be_resolved_is_reported() {
    let world = in_process_with("unresolvable", Config::default());
    let refusal = world.engine().endpoint("http://no-such-host.invalid").refusal(LIMIT);
    check(&refusal, &["no-such-host.invalid", "resolve", "dns"]);
}

#[test]
fn an_endpoint_that_never_answers_is_reported() {
    let world = in_process_with("frozen-start", Config::default());
    let fault = world.store.inject(Fault::new(Effect::Frozen));
    check(&world.engine().refusal(SILENCE_LIMIT), &["answer"]);
    fault.release();
}

#[test]
fn an_endpoint_that_drops_connections_is_reported() {
    let world = in_process_with("dropping-start", Config::default());
    let _fault = world.store.inject(Fault::new(Effect::Dropped));
    check(&world.engine().refusal(SILENCE_LIMIT), &["answer", "reach"]);
}

#[test]
fn an_untrusted_certificate_is_reported() {
    let world = in_process_with("untrusted", Config { transport: Transport::Tls, ..Config::default() });
    check(&world.engine().trust(Trust::Nothing).refusal(LIMIT), &["certificate", "tls"]);
}

#[test]
fn an_untrusted_certificate_of_versitygw_is_reported() {
    let fixture = Fixture::new("untrusted");
    let store = start_versitygw(&fixture, Transport::Tls);
    check(
        &EngineLauncher::new(&fixture, store.as_ref(), BUCKET).trust(Trust::Nothing).refusal(LIMIT),
        &["certificate", "tls"],
    );
    drop(store);
}

#[test]
fn invalid_arguments_are_reported() {
    let world = in_process_with("arguments", Config::default());
    for (arguments, word) in [
        (["--no-such-flag"].as_slice(), "--no-such-flag"),
        (&["--uid=0"], "uid"),
        (&["--upload-checksums=md5"], "md5"),
        (&["--allow-root", "--allow-other"], "--allow-other"),
        (&["--file-mode=999"], "999"),
        (&["--prefix=no-slash"], "no-slash"),
        (&["--memory-target=1"], "memory"),
    ] {
        let engine = arguments.iter().fold(world.engine(), |engine, it| engine.argument(*it));
        check(&engine.refusal(LIMIT), &[word]);
    }
}
