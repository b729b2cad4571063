//! One node whose engines are run by systemd, with blocking calls.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::{Kubelet, Volume};
use s3csi_testbed::leftovers::mounts_beneath;
use s3csi_testbed::plugin::{Plugin, ServedAt, Strategy};
use s3csi_testbed::process::Process;
use s3csi_testbed::processes;
use s3csi_testbed::s3::{Config, S3Server};
use s3csi_testbed::store::Store as _;
use s3csi_testbed::systemd::units;
use s3csi_testbed::wait::{SOON, wait_for, wait_until};
use tokio::runtime::Runtime;
use tonic::{Code, Status};

pub const BUCKET: &str = "bucket-1";

/// Declare it after its fixture.
pub struct World<'a> {
    pub kubelet: Kubelet,
    pub plugin: Plugin<'a>,
    pub store: S3Server,
    pub runtime: Runtime,
    node: Option<Process>,
    fixture: &'a Fixture,
}

impl<'a> World<'a> {
    pub fn start(fixture: &'a Fixture) -> Self {
        let mut world = Self::prepare(fixture);
        world.start_node();
        world
    }

    /// The store runs; the node plugin does not yet.
    pub fn prepare(fixture: &'a Fixture) -> Self {
        let buckets = (1..=10).map(|it| format!("bucket-{it}")).collect();
        let store = S3Server::start_blocking(Config { buckets, ..Config::default() }).unwrap();
        let served = ServedAt {
            endpoint_url: store.endpoint(),
            region: store.region().to_owned(),
            account: Some(store.account().clone()),
        };
        let mut plugin = Plugin::at(fixture, served).unwrap();
        plugin.set_strategy(Strategy::Systemd);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let kubelet = runtime.block_on(async { plugin.kubelet() });
        Self { kubelet, plugin, store, runtime, node: None, fixture }
    }

    pub fn start_node(&mut self) {
        self.start_node_with(&[]);
    }

    pub fn start_node_with(&mut self, arguments: &[&str]) {
        self.node = Some(self.plugin.start_node_with(arguments).unwrap());
        // A connection to an earlier node plugin would fail once before it is made anew.
        self.kubelet = self.runtime.block_on(async { self.plugin.kubelet() });
    }

    pub fn kill_node(&mut self) {
        self.node.take().expect("the node plugin was not started").kill();
    }

    /// As Kubernetes does.
    #[track_caller]
    pub fn stop_node(&mut self) {
        let process = self.node.take().expect("the node plugin was not started");
        let status = process.terminate();
        assert!(status.success(), "{} ended with {status}: {process}", process.name());
    }

    pub fn wait_for_end_of_node(&mut self) {
        self.node.take().expect("the node plugin was not started").wait_for_end();
    }

    pub fn node(&self) -> &Process {
        self.node.as_ref().expect("the node plugin was not started")
    }

    #[track_caller]
    pub fn publish(&self, volume: &Volume) -> PathBuf {
        match self.try_publish(volume) {
            Ok(target) => target,
            Err(status) => panic!("{} not published: {:?}: {}", volume.pv, status.code(), status.message()),
        }
    }

    pub fn try_publish(&self, volume: &Volume) -> Result<PathBuf, Status> {
        self.runtime.block_on(self.kubelet.publish(volume))
    }

    #[track_caller]
    pub fn unpublish(&self, volume: &Volume) {
        if let Err(status) = self.try_unpublish(volume) {
            panic!("{} not unpublished: {:?}: {}", volume.pv, status.code(), status.message());
        }
    }

    pub fn try_unpublish(&self, volume: &Volume) -> Result<(), Status> {
        self.runtime.block_on(self.kubelet.unpublish(volume))
    }

    pub fn engines(&self) -> Vec<Pid> {
        processes::running("mount-s3", self.fixture.directory())
    }

    #[track_caller]
    pub fn kill_engine(&self) {
        let engines = self.engines();
        assert_eq!(engines.len(), 1, "engines: {engines:?}");
        kill_process(engines[0], Signal::KILL).unwrap();
        wait_for("the engine is gone", || !self.engines().contains(&engines[0]));
    }

    pub fn mounts(&self) -> Vec<PathBuf> {
        mounts_beneath(self.fixture.directory())
    }

    /// What of a volume is still there, though nothing is published any more.
    pub fn leftovers(&self) -> Vec<String> {
        let mut found: Vec<String> = self.mounts().iter().map(|it| format!("mount {}", it.display())).collect();
        found.extend(self.engines().iter().map(|it| format!("engine {it}")));
        found.extend(units("mount-s3-*").iter().map(|it| format!("unit {it}")));
        found.extend(names_in(&self.plugin.credentials()).iter().map(|it| format!("credentials {it}")));
        found
    }

    #[track_caller]
    pub fn check_nothing_left(&self) {
        let is_clean = wait_until(Instant::now() + SOON, || self.leftovers().is_empty());
        assert!(is_clean, "left behind: {:#?}", self.leftovers());
    }

    /// The volume works: it is read from and written to.
    #[track_caller]
    pub fn check_serves(&self, target: &Path) {
        self.store.put_object(BUCKET, "from-the-store", b"hello").unwrap();
        assert_eq!(fs::read_to_string(target.join("from-the-store")).unwrap(), "hello");
        fs::write(target.join("from-the-workload"), "hi").unwrap();
        assert_eq!(self.store.object(BUCKET, "from-the-workload").as_deref(), Some(b"hi".as_slice()));
    }
}

impl Drop for World<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        if self.node.is_some() {
            self.stop_node();
        }
    }
}

/// Units that serve mounts; those that unmount come and go.
pub fn mount_units() -> Vec<String> {
    units("mount-s3-*.service").into_iter().filter(|it| !it.starts_with("mount-s3-umount-")).collect()
}

/// The only unit that serves a mount.
#[track_caller]
pub fn only_unit() -> String {
    let units = mount_units();
    assert_eq!(units.len(), 1, "units: {units:?}");
    units[0].clone()
}

/// The volume of one Pod.
pub fn volume(number: u32) -> Volume {
    Volume::new(BUCKET, "pv-1", &format!("{number:08}-aaaa-4aaa-8aaa-aaaaaaaaaaaa"))
}

/// The call was refused with this code and with all of these words.
#[track_caller]
pub fn check_refused<T: std::fmt::Debug>(outcome: Result<T, Status>, code: Code, words: &[&str]) {
    let status = outcome.expect_err("the call must fail");
    assert_eq!(status.code(), code, "{}", status.message());
    for word in words {
        assert!(status.message().contains(word), "{word:?} is missing in: {}", status.message());
    }
    assert!(!status.message().contains('\n'), "more than one line: {}", status.message());
}

/// Names in a directory, sorted; none if there is no such directory.
pub fn names_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|it| it.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}
