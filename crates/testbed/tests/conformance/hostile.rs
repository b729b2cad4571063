//! A store that means harm, or is broken: calls end with an error in bounded time, the engine keeps within its memory and serves on.

use std::fs;
use std::io;
use std::time::{Duration, Instant};

use rustix::fs::{XattrFlags, setxattr};
use rustix::io::Errno;
use s3csi_s3_server::store::{SECRET_MARK, Store as _};
use s3csi_s3_server::{Config, Effect, Fault, S3Operation, S3Server, Transport};
use s3csi_testbed::engine::{EngineLauncher, EngineMount, FailedStart};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::wait::wait_for;

use crate::world::{BUCKET, World, check_errno, in_process_with, listing, peak_memory, start_versitygw};

/// In mebibytes; the smallest that is accepted.
const MEMORY_TARGET: u64 = 512;

/// The memory target, what an answer may take in addition, and as much again: a buffer is copied when it grows.
const MOST_MEMORY: u64 = (MEMORY_TARGET + 256) * 2;

/// A deadline of the engine that is shorter than in real life, and how long a call may take then on a busy machine.
const LONGEST_ANSWER: &str = "longest-answer=2";
const ENDS_WITHIN: Duration = Duration::from_mins(1);
/// Twice as long as an answer may take.
const OBSERVED: Duration = Duration::from_secs(4);

fn world(rule: &str) -> World<S3Server> {
    let world = in_process_with(rule, Config::default());
    world.put("file", b"content");
    world
}

fn mount(world: &World<S3Server>) -> EngineMount<'_> {
    let engine = world.engine().writable().argument(format!("--memory-target={MEMORY_TARGET}"));
    let engine = engine.argument("--store-timeout=1s");
    engine.environment("S3CSI_ENGINE_TRIALS", LONGEST_ANSWER).mount()
}

/// A call fails soon while the store misbehaves, costs no more memory than allowed, and succeeds afterwards.
#[track_caller]
fn check_bounded<T>(rule: &str, fault: Fault, call: impl Fn(&EngineMount<'_>) -> io::Result<T>) {
    let world = world(rule);
    let mount = mount(&world);
    let fault = world.store.inject(fault);
    let start = Instant::now();
    check_errno(call(&mount), &[Errno::IO]);
    let took = start.elapsed();
    assert!(took < ENDS_WITHIN, "{rule}: took {took:?}");
    assert!(0 < fault.hits(), "{rule}: never met");
    let peak = peak_memory(&mount);
    println!("{rule}: {took:?}, {peak} MiB");
    assert!(peak < MOST_MEMORY, "{rule}: {peak} MiB");
    fault.release();
    // A request that was sent before may still fail.
    wait_for("the store is used again", || list(&mount).is_ok());
    assert_eq!(listing(mount.directory()), ["file"], "{rule}");
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"content", "{rule}");
    mount.unmount();
}

fn list(mount: &EngineMount<'_>) -> io::Result<usize> {
    fs::read_dir(mount.directory())?.map(|it| it.map(|_| 1)).sum()
}

fn read(mount: &EngineMount<'_>) -> io::Result<Vec<u8>> {
    fs::read(mount.path("file"))
}

#[test]
fn a_listing_without_end_is_given_up() {
    let fault = Fault::new(Effect::Endless { status: 200 }).operation(S3Operation::ListObjectsV2);
    check_bounded("endless-listing", fault, list);
}

#[test]
fn an_error_without_end_is_given_up() {
    let fault = Fault::new(Effect::Endless { status: 403 });
    check_bounded("endless-list-error", fault.clone().operation(S3Operation::ListObjectsV2), list);
    check_bounded("endless-read-error", fault.operation(S3Operation::GetObject), read);
}

#[test]
fn one_byte_after_the_other_is_given_up() {
    let fault = Fault::new(Effect::Dripping { interval: Duration::from_millis(500) });
    check_bounded("dripping", fault.operation(S3Operation::ListObjectsV2), list);
}

#[test]
fn pages_without_end_are_given_up() {
    let listings = |effect| Fault::new(effect).operation(S3Operation::ListObjectsV2);
    check_bounded("repeated-pages", listings(Effect::RepeatedPages { tokens: 1 }), list);
    check_bounded("alternating-pages", listings(Effect::RepeatedPages { tokens: 3 }), list);
    check_bounded("empty-pages", listings(Effect::EmptyPages), list);
}

/// The next page of a long listing is requested before a program wants it. This program never does.
#[test]
fn a_page_without_end_that_nothing_waits_for_is_given_up() {
    let world = world("endless-next-page");
    for number in 0..1500 {
        world.put(&format!("{number}"), b"");
    }
    let mount = mount(&world);
    let listings = |effect| Fault::new(effect).operation(S3Operation::ListObjectsV2);
    let first = world.store.inject(listings(Effect::Slow(Duration::ZERO)).times(1));
    let next = world.store.inject(listings(Effect::Endless { status: 200 }));
    let mut names = fs::read_dir(mount.directory()).unwrap();
    assert!(names.next().unwrap().is_ok());
    wait_for("the next page is requested", || 0 < next.hits());
    assert_eq!(first.hits(), 1);
    // It would take all memory in less time.
    let start = Instant::now();
    while start.elapsed() < OBSERVED {
        let peak = peak_memory(&mount);
        assert!(peak < MOST_MEMORY, "{peak} MiB after {:?}", start.elapsed());
    }
    next.release();
    println!("next page: {} hits, {} MiB", next.hits(), peak_memory(&mount));
    drop(names);
    wait_for("the store is used again", || list(&mount).is_ok_and(|it| it == 1501));
    mount.unmount();
}

#[test]
fn a_page_without_entries_does_not_end_a_listing() {
    let world = world("one-empty-page");
    // The token of the empty page says how far the listing is; names before it do not come any more.
    world.put("zebra", b"content");
    let mount = mount(&world);
    let fault = world.store.inject(Fault::new(Effect::EmptyPages).operation(S3Operation::ListObjectsV2).times(1));
    assert_eq!(listing(mount.directory()), ["zebra"]);
    assert_eq!(fault.hits(), 1);
    mount.unmount();
}

#[test]
fn a_huge_header_is_bounded() {
    let world = world("huge-header");
    let mount = mount(&world);
    let fault =
        world.store.inject(Fault::new(Effect::HugeHeader { bytes: 64 << 20 }).operation(S3Operation::HeadObject));
    let start = Instant::now();
    // Whether it is accepted does not matter.
    let _ = fs::metadata(mount.path("file"));
    assert!(start.elapsed() < ENDS_WITHIN, "took {:?}", start.elapsed());
    assert!(0 < fault.hits());
    let peak = peak_memory(&mount);
    assert!(peak < MOST_MEMORY, "{peak} MiB");
    fault.release();
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"content");
    mount.unmount();
}

#[test]
fn objects_without_etag_in_listings_keep_no_others_away() {
    let world = world("empty-etags");
    world.put("directory/file & more", b"deep");
    let fault = world.store.inject(Fault::new(Effect::EmptyEtags).operation(S3Operation::ListObjectsV2));
    let mount = mount(&world);
    assert!(0 < fault.hits(), "never met");
    assert_eq!(listing(mount.directory()), ["directory", "file"]);
    assert_eq!(listing(&mount.path("directory")), ["file & more"]);
    // Listed a moment ago: the attributes of the listing are used.
    assert_eq!(fs::read(mount.path("directory/file & more")).unwrap(), b"deep");
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"content");
    fs::write(mount.path("new"), "new").unwrap();
    assert_eq!(listing(mount.directory()), ["directory", "file", "new"]);
    mount.unmount();
}

#[test]
fn files_that_were_there_before_versitygw_are_served() {
    let fixture = Fixture::new("old-files");
    let store = start_versitygw(&fixture, Transport::Plain);
    let old = store.bucket_directory(BUCKET).join("old");
    fs::write(&old, "old").unwrap();
    let mount = EngineLauncher::new(&fixture, store.as_ref(), BUCKET).writable().mount();
    assert_eq!(listing(mount.directory()), ["old"]);
    fs::write(mount.path("new"), "new").unwrap();
    assert_eq!(listing(mount.directory()), ["new", "old"]);
    assert_eq!(fs::read(mount.path("new")).unwrap(), b"new");
    mount.unmount();

    // As clients leave it that send no checksum: its entry in a listing has an empty algorithm.
    fs::remove_file(store.bucket_directory(BUCKET).join("new")).unwrap();
    setxattr(&old, "user.etag", b"149603e6c03516362a8da23f624db945", XattrFlags::empty()).unwrap();
    let mount = EngineLauncher::new(&fixture, store.as_ref(), BUCKET).writable().mount();
    assert_eq!(listing(mount.directory()), ["old"]);
    assert_eq!(fs::read(mount.path("old")).unwrap(), b"old");
    mount.unmount();
    drop(store);
}

#[test]
fn an_endpoint_that_is_no_s3_server_is_named_in_one_line() {
    let world = world("no-s3");
    let _fault = world.store.inject(Fault::new(Effect::WebPage).operation(S3Operation::ListObjectsV2));
    let FailedStart { errors, .. } = world.engine().refusal(ENDS_WITHIN);
    assert_eq!(errors.lines().count(), 1, "{errors}");
    assert!(errors.contains("check that the endpoint is an S3 server") && errors.len() < 400, "{errors}");
    let engine = world.engine().environment("S3CSI_ENGINE_ERRORS", "json");
    let FailedStart { errors, .. } = engine.refusal(ENDS_WITHIN);
    assert!(errors.contains("\"code\":\"invalid-response\""), "{errors}");
}

#[test]
fn a_session_token_is_in_no_log() {
    let world = world("session-token");
    let token = format!("token-{SECRET_MARK}");
    let mount = world.engine().argument("--debug-crt").environment("AWS_SESSION_TOKEN", &token).mount();
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"content");
    let process = mount.process().unwrap();
    let log = process.output() + &process.errors();
    assert!(log.contains("x-amz-security-token"), "the library logs no requests any more");
    assert!(!log.contains(&token), "the log contains the session token");
    mount.unmount();
}

#[test]
fn two_buckets_have_no_block_of_a_cache_in_common() {
    let world = world("cache-keys");
    world.create_bucket("other", world.store.account());
    world.put_into("other", "file", b"content");
    let cache = world.fixture.create_directory("cache");
    for bucket in [BUCKET, "other"] {
        let engine = EngineLauncher::new(&world.fixture, world.store.as_ref(), bucket);
        let engine = engine.argument("--cache").argument(&cache);
        let mount = engine.environment("UNSTABLE_MOUNTPOINT_DISABLE_CACHE_CLEANUP", "1").mount();
        assert_eq!(fs::read(mount.path("file")).unwrap(), b"content");
        mount.unmount();
    }
    assert_eq!(listing(&cache.join("mountpoint-cache")).len(), 2, "one directory for each store and bucket");
}
