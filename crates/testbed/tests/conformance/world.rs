//! What each rule starts with: a fixture, a server and a bucket.

use std::io;

use bytes::Bytes;
use s3csi_core::chain::Chain;
use s3csi_testbed::engine::{Engine, Mount};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::s3::{Config, S3Server, Transport};
use s3csi_testbed::store::Store;
use s3csi_testbed::versitygw::Versitygw;
use s3csi_testbed::wait::wait_for;

pub const BUCKET: &str = "conformance";

/// The server is declared, and so dropped, before the fixture that looks for what it left.
pub struct World<S: ?Sized + Store = dyn Store> {
    pub store: Box<S>,
    pub fixture: Fixture,
}

impl World {
    pub fn in_process(rule: &str) -> Self {
        let World { store, fixture } = in_process_with(rule, Config::default());
        World { store, fixture }
    }

    pub fn versitygw(rule: &str) -> Self {
        let fixture = Fixture::new(rule);
        World { store: start_versitygw(&fixture, Transport::Plain), fixture }
    }
}

pub fn in_process_with(rule: &str, config: Config) -> World<S3Server> {
    let fixture = Fixture::new(rule);
    let config = Config { buckets: vec![BUCKET.to_owned()], ..config };
    let store = S3Server::start_blocking(config).unwrap_or_else(|error| panic!("{}", Chain(&error)));
    World { store: Box::new(store), fixture }
}

pub fn start_versitygw(fixture: &Fixture, transport: Transport) -> Box<Versitygw> {
    let store = Versitygw::start(fixture, transport).unwrap_or_else(|error| panic!("{}", Chain(&error)));
    store.create_bucket(BUCKET, store.account()).unwrap_or_else(|error| panic!("{}", Chain(&error)));
    Box::new(store)
}

impl World<S3Server> {
    pub fn engine(&self) -> Engine<'_> {
        Engine::new(&self.fixture, self.store.as_ref(), BUCKET)
    }

    pub fn mount(&self) -> Mount<'_> {
        self.engine().writable().mount()
    }
}

impl World {
    pub fn engine(&self) -> Engine<'_> {
        Engine::new(&self.fixture, self.store.as_ref(), BUCKET)
    }

    pub fn mount(&self) -> Mount<'_> {
        self.engine().writable().mount()
    }
}

impl<S: ?Sized + Store> World<S> {
    #[track_caller]
    pub fn put(&self, key: &str, content: &[u8]) {
        self.store.put_object(BUCKET, key, content).unwrap_or_else(|error| panic!("{}", Chain(&error)));
    }

    pub fn object(&self, key: &str) -> Option<Bytes> {
        self.store.object(BUCKET, key)
    }

    pub fn keys(&self) -> Vec<String> {
        self.store.keys(BUCKET)
    }

    #[track_caller]
    pub fn check_object(&self, key: &str, content: &[u8]) {
        let object = self.object(key).unwrap_or_else(|| panic!("there is no object {key:?} but {:?}", self.keys()));
        assert!(
            object == content,
            "object {key:?} has {} bytes, or other ones than the {} expected",
            object.len(),
            content.len()
        );
    }

    /// For what the engine stores a moment after close: empty files.
    #[track_caller]
    pub fn check_object_soon(&self, key: &str, content: &[u8]) {
        wait_for(&format!("object {key:?} is stored"), || self.object(key).is_some_and(|it| it == content));
    }
}

/// Bytes that do not compress, repeat or line up with anything; the same ones for the same seed.
pub fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// Names in a directory, sorted.
#[track_caller]
pub fn listing(directory: &std::path::Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    let mut names: Vec<String> = entries.map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Expects a system call to fail with one of these error numbers.
#[track_caller]
pub fn check_refused<T>(result: io::Result<T>, expected: &[rustix::io::Errno]) {
    let Err(error) = result else {
        panic!("this should have been refused");
    };
    let is_expected = expected.iter().any(|it| error.raw_os_error() == Some(it.raw_os_error()));
    assert!(is_expected, "refused with {error}, expected one of {expected:?}");
}
