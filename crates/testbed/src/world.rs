//! One node and its store for a test, with blocking calls, whoever runs the engines. Ends what it started; the fixture then
//! proves that nothing is left.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};
use tokio::runtime::Runtime;
use tonic::{Code, Status};

use crate::fixture::Fixture;
use crate::http::{self, Answer};
use crate::kubelet::{Kubelet, Volume};
use crate::leftovers::mounts_beneath;
use crate::plugin::{Plugin, ServedAt, Strategy};
use crate::process::Process;
use crate::processes;
use crate::s3::{Config, S3Server};
use crate::store::Store as _;
use crate::systemd::units;
use crate::wait::{SOON, wait_for, wait_until};

pub const BUCKET: &str = "bucket-1";
pub const PV: &str = "pv-1";

/// Declare it after its fixture. Dropping it stops the programs as Kubernetes would, and panics if they do not end well.
pub struct World<'a> {
    pub kubelet: Kubelet,
    pub plugin: Plugin<'a>,
    pub store: S3Server,
    pub runtime: Runtime,
    node: Option<Process>,
    mounter: Option<Process>,
    fixture: &'a Fixture,
}

impl<'a> World<'a> {
    /// Everything runs, and the driver has the keys of the store's default account.
    pub fn start(fixture: &'a Fixture) -> Self {
        let mut world = Self::prepare(fixture);
        world.start_mounter();
        world.start_node();
        world
    }

    /// As `start`, but systemd runs the engines, and no mounter does.
    pub fn start_beside_systemd(fixture: &'a Fixture) -> Self {
        let mut world = Self::prepare_beside_systemd(fixture);
        world.start_node();
        world
    }

    /// The store runs; the node plugin, which will leave the engines to systemd, is not started yet.
    pub fn prepare_beside_systemd(fixture: &'a Fixture) -> Self {
        let mut world = Self::prepare(fixture);
        world.plugin.set_strategy(Strategy::Systemd);
        world
    }

    /// As `start`, but an engine that dies is not replaced and takes its mounts with it, as another `mount-s3` would.
    pub fn start_without_keeper(fixture: &'a Fixture) -> Self {
        let mut world = Self::prepare(fixture);
        world.mounter = Some(world.plugin.start_mounter_with(&["--keep", "off"]).unwrap());
        world.start_node();
        world
    }

    /// As `start`, but the driver is told of another store or other keys.
    pub fn start_with(fixture: &'a Fixture, change: impl FnOnce(&mut ServedAt)) -> Self {
        let mut world = Self::prepare_with(fixture, change);
        world.start_mounter();
        world.start_node();
        world
    }

    /// The store runs and the node's directories are there; its programs are not started yet.
    pub fn prepare(fixture: &'a Fixture) -> Self {
        Self::prepare_with(fixture, |_| {})
    }

    pub fn prepare_with(fixture: &'a Fixture, change: impl FnOnce(&mut ServedAt)) -> Self {
        let buckets = (1..=10).map(|it| format!("bucket-{it}")).collect();
        let store = S3Server::start_blocking(Config { buckets, ..Config::default() }).unwrap();
        let mut served = ServedAt {
            endpoint_url: store.endpoint(),
            region: store.region().to_owned(),
            account: Some(store.account().clone()),
        };
        change(&mut served);
        let plugin = Plugin::at(fixture, served).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let kubelet = runtime.block_on(async { plugin.kubelet() });
        Self { kubelet, plugin, store, runtime, node: None, mounter: None, fixture }
    }

    pub fn node(&self) -> &Process {
        self.node.as_ref().expect("the node plugin was not started")
    }

    pub fn mounter(&self) -> &Process {
        self.mounter.as_ref().expect("the mounter was not started")
    }

    pub fn start_mounter(&mut self) {
        self.mounter = Some(self.plugin.start_mounter().unwrap());
    }

    pub fn start_node(&mut self) {
        self.start_node_with(&[]);
    }

    pub fn start_node_with(&mut self, arguments: &[&str]) {
        self.node = Some(self.plugin.start_node_with(arguments).unwrap());
        // A connection to an earlier node plugin would fail once before it is made anew.
        self.kubelet = self.runtime.block_on(async { self.plugin.kubelet() });
    }

    /// What the node plugin answers at its health address, which it must have been started with.
    #[track_caller]
    pub fn get(&self, path: &str) -> Answer {
        self.node().wait_for_log("serving /healthz");
        let log = self.node().errors();
        let address = log.lines().find_map(|it| it.split("address=").nth(1)).unwrap();
        http::get(address.split(' ').next().unwrap(), path)
    }

    /// One of the node plugin's figures, as it is called in the text that Prometheus reads.
    #[track_caller]
    pub fn figure(&self, name: &str) -> u64 {
        let Answer { status, body, .. } = self.get("/metrics");
        assert_eq!(status, 200, "{body}");
        let line = body.lines().find_map(|it| it.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("there is no {name} in:\n{body}")).parse().unwrap()
    }

    pub fn kill_node(&mut self) {
        self.node.take().expect("the node plugin was not started").kill();
    }

    pub fn kill_mounter(&mut self) {
        self.mounter.take().expect("the mounter was not started").kill();
    }

    /// Waits for a node plugin that ends by itself.
    pub fn wait_for_end_of_node(&mut self) {
        self.node.take().expect("the node plugin was not started").wait_for_end();
    }

    /// Publishes and answers the target.
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

    /// A publish that runs while the test does something else.
    pub fn publish_in_background(&self, volume: &Volume) -> tokio::task::JoinHandle<Result<PathBuf, Status>> {
        let (kubelet, volume) = (self.kubelet.clone(), volume.clone());
        self.runtime.spawn(async move { kubelet.publish(&volume).await })
    }

    pub fn unpublish_in_background(&self, volume: &Volume) -> tokio::task::JoinHandle<Result<(), Status>> {
        let (kubelet, volume) = (self.kubelet.clone(), volume.clone());
        self.runtime.spawn(async move { kubelet.unpublish(&volume).await })
    }

    /// Engines of this node, whoever started them.
    /// One for each mount. Where a unit of systemd keeps its engine alive, this is the process that keeps; see [`Self::serving`].
    pub fn engines(&self) -> Vec<Pid> {
        let all = self.engine_processes();
        let is_kept = |it: &Pid| processes::parent(*it).is_some_and(|parent| all.contains(&parent));
        all.iter().copied().filter(|it| !is_kept(it)).collect()
    }

    /// The process that serves the mount which another one keeps alive.
    pub fn serving(&self, keeper: Pid) -> Option<Pid> {
        self.engine_processes().into_iter().find(|it| processes::parent(*it) == Some(keeper))
    }

    fn engine_processes(&self) -> Vec<Pid> {
        processes::running("mount-s3", self.fixture.directory())
    }

    /// Engines end some milliseconds after their mount.
    #[track_caller]
    pub fn wait_for_engines(&self, count: usize) {
        wait_for(&format!("{count} engines are left"), || self.engines().len() == count);
    }

    #[track_caller]
    pub fn engine(&self) -> Pid {
        let engines = self.engines();
        assert_eq!(engines.len(), 1, "engines: {engines:?}");
        engines[0]
    }

    /// Ends the only engine with SIGKILL and waits until it is gone.
    #[track_caller]
    pub fn kill_engine(&self) {
        self.kill(self.engine());
    }

    /// Ends an engine with SIGKILL, together with whoever it keeps alive, and waits until they are gone.
    pub fn kill(&self, engine: Pid) {
        let serving = self.serving(engine);
        kill_process(engine, Signal::KILL).unwrap();
        if let Some(serving) = serving {
            // systemd ends what is left of a unit, too, and may be quicker.
            let _ = kill_process(serving, Signal::KILL);
        }
        let family: Vec<Pid> = [engine].into_iter().chain(serving).collect();
        wait_for("the engine is gone", || !self.engine_processes().iter().any(|it| family.contains(it)));
    }

    /// The only source's path.
    #[track_caller]
    pub fn source(&self) -> PathBuf {
        let sources = names_in(&self.plugin.sources());
        assert_eq!(sources.len(), 1, "sources: {sources:?}");
        self.plugin.sources().join(&sources[0])
    }

    /// The directory that the mounter shares with the node for the only source.
    #[track_caller]
    pub fn place(&self) -> PathBuf {
        self.plugin.mounter_directory().join(self.source().file_name().unwrap())
    }

    /// What is mounted for this node.
    pub fn mounts(&self) -> Vec<PathBuf> {
        mounts_beneath(self.fixture.directory())
    }

    /// What of a volume is still there, though nothing is published any more.
    pub fn leftovers(&self) -> Vec<String> {
        let mut found: Vec<String> = self.mounts().iter().map(|it| format!("mount {}", it.display())).collect();
        found.extend(self.engines().iter().map(|it| format!("engine {it}")));
        found.extend(names_in(&self.plugin.sources()).iter().map(|it| format!("source {it}")));
        let is_of_a_volume = |it: &&String| !it.starts_with("mount.") && !it.starts_with('.');
        let places = names_in(&self.plugin.mounter_directory());
        found.extend(places.iter().filter(is_of_a_volume).map(|it| format!("place {it}")));
        if *self.plugin.strategy() == Strategy::Systemd {
            found.extend(units("mount-s3-*").iter().map(|it| format!("unit {it}")));
            found.extend(names_in(&self.plugin.credentials()).iter().map(|it| format!("credentials {it}")));
        }
        found
    }

    /// Engines end some milliseconds after their mount; the rest must be gone when the call has been answered.
    #[track_caller]
    pub fn check_nothing_left(&self) {
        let deadline = Instant::now() + SOON;
        let is_clean = wait_until(deadline, || self.leftovers().is_empty());
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

    /// Stops the node plugin as Kubernetes does and answers whether it ended well.
    pub fn stop_node(&mut self) -> bool {
        self.node.take().is_some_and(|it| it.terminate().success())
    }
}

impl Drop for World<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        for process in [self.node.take(), self.mounter.take()].into_iter().flatten() {
            let status = process.terminate();
            assert!(status.success(), "{} ended with {status}: {process}", process.name());
        }
    }
}

/// A volume that any number of Pods may use.
pub fn volume(number: u32) -> Volume {
    Volume::new(BUCKET, PV, &pod(number))
}

pub fn pod(number: u32) -> String {
    format!("{number:08}-aaaa-4aaa-8aaa-aaaaaaaaaaaa")
}

/// The call was refused with this code and with all of these words.
#[track_caller]
pub fn check_refused<T: std::fmt::Debug>(outcome: Result<T, Status>, code: Code, words: &[&str]) {
    let status = outcome.expect_err("the call must fail");
    assert_eq!(status.code(), code, "{}", status.message());
    for word in words {
        assert!(status.message().contains(word), "{word:?} is missing in: {}", status.message());
    }
    assert!(!status.message().contains("stack backtrace"), "{}", status.message());
    assert!(!status.message().contains('\n'), "more than one line: {}", status.message());
}

pub fn device(path: &Path) -> u64 {
    fs::metadata(path).unwrap().dev()
}

/// How many KiB the kernel reads ahead in the file system that a path is in.
pub fn read_ahead(path: &Path) -> String {
    let device = device(path);
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    fs::read_to_string(format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb")).unwrap().trim().to_owned()
}

/// Names in a directory, sorted; none if there is no such directory.
pub fn names_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|it| it.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}
