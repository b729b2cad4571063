//! What a rule about an S3 server starts with: a fixture and one of two servers, ours in this process or versitygw.

use aws_sdk_s3::Client;
use bytes::Bytes;
use s3csi_core::chain::Chain;
use s3csi_s3_server::store::{Account, Store};
use s3csi_s3_server::{Config, S3Server, Transport};

use crate::engine::{EngineLauncher, EngineMount};
use crate::fixture::Fixture;
use crate::provisioning::Provisioning;
use crate::s3_client::s3_client;
use crate::versitygw::{Versioning, Versitygw};
use crate::wait::wait_for;

/// `on_both_servers!(buckets; rule, …)` where each rule is a `fn(&StoreWorld)` of the calling module: one test per server and rule.
#[macro_export]
macro_rules! on_both_servers {
    ($buckets:path; $($rule:ident),* $(,)?) => {
        mod in_process {
            $(#[test] fn $rule() {
                super::$rule(&$crate::store_world::StoreWorld::in_process(stringify!($rule), $buckets));
            })*
        }
        mod versitygw {
            $(#[test] fn $rule() {
                super::$rule(&$crate::store_world::StoreWorld::versitygw(stringify!($rule), $buckets));
            })*
        }
    };
}

/// The server is declared, and so dropped, before the fixture that looks for what it left.
pub struct StoreWorld<S: ?Sized + Store = dyn Store> {
    pub store: Box<S>,
    pub fixture: Fixture,
    /// The bucket of rules that need only one; the empty string for rules that start with none.
    bucket: String,
}

impl StoreWorld {
    pub fn in_process(rule: &str, buckets: &[&str]) -> Self {
        let StoreWorld { store, fixture, bucket } = in_process_with(rule, buckets, Config::default());
        Self { store, fixture, bucket }
    }

    pub fn versitygw(rule: &str, buckets: &[&str]) -> Self {
        let StoreWorld { store, fixture, bucket } =
            versitygw_with(rule, buckets, Transport::Plain, Versioning::Unavailable);
        Self { store, fixture, bucket }
    }
}

pub fn in_process_with(rule: &str, buckets: &[&str], config: Config) -> StoreWorld<S3Server> {
    let fixture = Fixture::new(rule);
    let config = Config { buckets: buckets.iter().map(ToString::to_string).collect(), ..config };
    let store = S3Server::start_blocking(config).unwrap_or_else(|error| panic!("{}", Chain(&error)));
    StoreWorld { store: Box::new(store), fixture, bucket: first(buckets) }
}

pub fn versitygw_with(
    rule: &str,
    buckets: &[&str],
    transport: Transport,
    versioning: Versioning,
) -> StoreWorld<Versitygw> {
    let fixture = Fixture::new(rule);
    let store = Versitygw::start_with(&fixture, transport, versioning);
    let store = Box::new(store.unwrap_or_else(|error| panic!("{}", Chain(&error))));
    let world = StoreWorld { store, fixture, bucket: first(buckets) };
    for bucket in buckets {
        world.create_bucket(bucket, world.store.account());
    }
    world
}

fn first(buckets: &[&str]) -> String {
    buckets.first().copied().unwrap_or_default().to_owned()
}

impl<S: ?Sized + Store> StoreWorld<S> {
    pub fn engine(&self) -> EngineLauncher<'_> {
        EngineLauncher::new(&self.fixture, self.store.as_dyn(), &self.bucket)
    }

    /// A mount that may delete and overwrite.
    #[track_caller]
    pub fn mount(&self) -> EngineMount<'_> {
        self.engine().writable().mount()
    }

    pub fn provisioning(&self) -> Provisioning<'_> {
        Provisioning::new(&self.fixture, self.store.as_dyn())
    }

    pub fn client(&self) -> Client {
        s3_client(self.store.as_dyn(), self.store.account())
    }

    #[track_caller]
    pub fn add_account(&self, name: &str) -> Account {
        let account = Account::named(name);
        self.store.add_account(&account).unwrap_or_else(|error| panic!("{}", Chain(&error)));
        account
    }

    pub fn buckets(&self) -> Vec<String> {
        self.store.buckets().into_iter().map(|it| it.0).collect()
    }

    pub fn owner(&self, bucket: &str) -> Option<String> {
        self.store.buckets().into_iter().find(|it| it.0 == bucket).map(|it| it.1)
    }

    #[track_caller]
    pub fn create_bucket(&self, name: &str, owner: &Account) {
        self.store.create_bucket(name, owner).unwrap_or_else(|error| panic!("{}", Chain(&error)));
    }

    #[track_caller]
    pub fn put(&self, key: &str, content: &[u8]) {
        self.put_into(&self.bucket, key, content);
    }

    #[track_caller]
    pub fn put_into(&self, bucket: &str, key: &str, content: &[u8]) {
        self.store.put_object(bucket, key, content).unwrap_or_else(|error| panic!("{}", Chain(&error)));
    }

    pub fn object(&self, key: &str) -> Option<Bytes> {
        self.store.object(&self.bucket, key)
    }

    pub fn keys(&self) -> Vec<String> {
        self.store.keys(&self.bucket)
    }

    #[track_caller]
    pub fn check_object(&self, key: &str, content: &[u8]) {
        let object = self.object(key).unwrap_or_else(|| panic!("there is no object {key:?} but {:?}", self.keys()));
        let differs = object.iter().zip(content).position(|(found, expected)| found != expected);
        assert!(
            object == content,
            "object {key:?} has {} bytes instead of {} and differs at {differs:?}",
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
