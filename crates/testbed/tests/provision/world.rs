//! What each rule starts with: a fixture and a server. The driver is started by the rule.

use aws_sdk_s3::Client;
use s3csi_core::chain::Chain;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::provisioning::Provisioning;
use s3csi_testbed::s3::{Config, S3Server, Transport};
use s3csi_testbed::s3_client::s3_client;
use s3csi_testbed::store::{Account, Store};
use s3csi_testbed::versitygw::{Versioning, Versitygw};
use tonic::{Code, Status};

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
        let World { store, fixture } = versitygw_with(rule, Transport::Plain, Versioning::Unavailable);
        World { store, fixture }
    }
}

pub fn in_process_with(rule: &str, config: Config) -> World<S3Server> {
    let fixture = Fixture::new(rule);
    let store = S3Server::start_blocking(config).unwrap_or_else(|error| panic!("{}", Chain(&error)));
    World { store: Box::new(store), fixture }
}

pub fn versitygw_with(rule: &str, transport: Transport, versioning: Versioning) -> World<Versitygw> {
    let fixture = Fixture::new(rule);
    let store = Versitygw::start_with(&fixture, transport, versioning);
    World { store: Box::new(store.unwrap_or_else(|error| panic!("{}", Chain(&error)))), fixture }
}

impl<S: Store> World<S> {
    pub fn provisioning(&self) -> Provisioning<'_> {
        Provisioning::new(&self.fixture, self.store.as_ref())
    }

    pub fn buckets(&self) -> Vec<String> {
        buckets(self.store.as_ref())
    }

    pub fn client(&self) -> Client {
        s3_client(self.store.as_ref(), self.store.account())
    }
}

impl World {
    pub fn provisioning(&self) -> Provisioning<'_> {
        Provisioning::new(&self.fixture, self.store.as_ref())
    }

    pub fn buckets(&self) -> Vec<String> {
        buckets(self.store.as_ref())
    }

    pub fn client(&self) -> Client {
        s3_client(self.store.as_ref(), self.store.account())
    }

    pub fn account(&self, name: &str) -> Account {
        let account = Account::named(name);
        self.store.add_account(&account).unwrap_or_else(|error| panic!("{}", Chain(&error)));
        account
    }

    #[track_caller]
    pub fn create_bucket(&self, name: &str, owner: &Account) {
        self.store.create_bucket(name, owner).unwrap_or_else(|error| panic!("{}", Chain(&error)));
    }

    #[track_caller]
    pub fn put(&self, bucket: &str, key: &str, content: &[u8]) {
        self.store.put_object(bucket, key, content).unwrap_or_else(|error| panic!("{}", Chain(&error)));
    }

    pub fn owner(&self, bucket: &str) -> Option<String> {
        self.store.buckets().into_iter().find(|it| it.0 == bucket).map(|it| it.1)
    }
}

fn buckets(store: &dyn Store) -> Vec<String> {
    store.buckets().into_iter().map(|it| it.0).collect()
}

/// The answer's code, and a part of its message.
#[track_caller]
pub fn check_refused<T: std::fmt::Debug>(answer: Result<T, Status>, code: Code, message: &str) {
    let status = answer.expect_err("this should not work");
    assert!(
        status.code() == code && status.message().contains(message),
        "{:?}: {}\nexpected {code:?}: …{message}…",
        status.code(),
        status.message()
    );
}
