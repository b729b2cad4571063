//! One node and its store for a test of strategy `daemon` or `systemd`. It ends what it started; the fixture then proves that nothing is
//! left.

use std::fs;
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};
use s3csi_s3_server::store::Store as _;
use s3csi_s3_server::{Config, S3Server};

use crate::fixture::Fixture;
use crate::kubelet::CsiVolume;
use crate::plugin::{Plugin, PluginStrategy, StoreSettings};
use crate::process::Process;
use crate::processes;
use crate::systemd::units;
use crate::test_node::TestNode;
use crate::wait::{SOON, wait_for, wait_until};

pub use crate::test_node::{check_refused, names_in};

pub const BUCKET: &str = "bucket-1";
pub const PV: &str = "pv-1";

/// Declare it after its fixture. Dropping it stops the programs as Kubernetes would, and panics if they do not end well.
pub struct World<'a> {
    node: TestNode<'a>,
    mounter: Option<Process>,
}

impl<'a> Deref for World<'a> {
    type Target = TestNode<'a>;

    fn deref(&self) -> &Self::Target {
        &self.node
    }
}

impl DerefMut for World<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.node
    }
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
        world.plugin.set_strategy(PluginStrategy::Systemd);
        world
    }

    /// As `start`, but an engine that dies is not replaced and takes its mounts with it, as another `mount-s3` would.
    pub fn start_without_supervisor(fixture: &'a Fixture) -> Self {
        let mut world = Self::prepare(fixture);
        world.start_mounter_with(&["--keep", "off"]);
        world.start_node();
        world
    }

    /// As `start`, but the driver is configured with another store or other keys.
    pub fn start_with(fixture: &'a Fixture, change: impl FnOnce(&mut StoreSettings)) -> Self {
        let mut world = Self::prepare_with(fixture, change);
        world.start_mounter();
        world.start_node();
        world
    }

    /// The store runs and the node's directories are there; its programs are not started yet.
    pub fn prepare(fixture: &'a Fixture) -> Self {
        Self::prepare_with(fixture, |_| {})
    }

    pub fn prepare_with(fixture: &'a Fixture, change: impl FnOnce(&mut StoreSettings)) -> Self {
        Self::prepare_for(fixture, Config::default(), change)
    }

    /// As `prepare_with`, for another kind of store.
    pub fn prepare_for(fixture: &'a Fixture, config: Config, change: impl FnOnce(&mut StoreSettings)) -> Self {
        let buckets = (1..=10).map(|it| format!("bucket-{it}")).collect();
        let store = S3Server::start_blocking(Config { buckets, ..config }).unwrap();
        let mut served = StoreSettings {
            endpoint_url: store.endpoint(),
            region: store.region().to_owned(),
            account: Some(store.account().clone()),
        };
        change(&mut served);
        let plugin = Plugin::at(fixture, served).unwrap();
        Self { node: TestNode::new(fixture, store, plugin), mounter: None }
    }

    pub fn mounter(&self) -> &Process {
        self.mounter.as_ref().expect("the mounter was not started")
    }

    pub fn start_mounter(&mut self) {
        self.start_mounter_with(&[]);
    }

    pub fn start_mounter_with(&mut self, arguments: &[&str]) {
        self.mounter = Some(self.plugin.start_mounter_with(arguments).unwrap());
    }

    pub fn kill_mounter(&mut self) {
        self.mounter.take().expect("the mounter was not started").kill();
    }

    /// The engines of this node, one process for each mount: where a unit of systemd supervises its engine, the supervisor; see
    /// [`Self::serving`].
    pub fn engines(&self) -> Vec<Pid> {
        let all = self.engine_processes();
        let is_supervised = |it: &Pid| processes::parent(*it).is_some_and(|parent| all.contains(&parent));
        all.iter().copied().filter(|it| !is_supervised(it)).collect()
    }

    /// The process that serves the mount of a supervisor.
    pub fn serving(&self, supervisor: Pid) -> Option<Pid> {
        self.engine_processes().into_iter().find(|it| processes::parent(*it) == Some(supervisor))
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

    /// Ends the only engine and waits until it is gone.
    #[track_caller]
    pub fn kill_engine(&self) {
        self.kill(self.engine());
    }

    /// Ends an engine without a chance to clean up, together with the process it supervises, and waits until they are gone. systemd
    /// starts a unit again whose supervisor gets SIGKILL, but not after SIGHUP.
    pub fn kill(&self, engine: Pid) {
        let serving = self.serving(engine);
        kill_process(engine, if serving.is_some() { Signal::HUP } else { Signal::KILL }).unwrap();
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
    pub fn mounter_source_directory(&self) -> PathBuf {
        self.plugin.mounter_directory().join(self.source().file_name().unwrap())
    }

    /// What of a volume is still there, though nothing is published any more.
    pub fn leftovers(&self) -> Vec<String> {
        let mut found: Vec<String> = self.mounts().iter().map(|it| format!("mount {}", it.display())).collect();
        found.extend(self.engines().iter().map(|it| format!("engine {it}")));
        found.extend(names_in(&self.plugin.sources()).iter().map(|it| format!("source {it}")));
        // The rest is the mounter's own.
        let is_of_a_volume = |it: &&String| !it.starts_with("mount.") && !it.starts_with('.') && *it != "ca-bundle.crt";
        let directories = names_in(&self.plugin.mounter_directory());
        found.extend(directories.iter().filter(is_of_a_volume).map(|it| format!("directory {it}")));
        if *self.plugin.strategy() == PluginStrategy::Systemd {
            found.extend(units("mount-s3-*").iter().map(|it| format!("unit {it}")));
            found.extend(names_in(&self.plugin.credentials()).iter().map(|it| format!("credentials {it}")));
            found.extend(names_in(&self.plugin.stages()).iter().map(|it| format!("staging directory {it}")));
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
}

impl Drop for World<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        self.node.stop_node();
        if let Some(mounter) = self.mounter.take() {
            let status = mounter.terminate();
            assert!(status.success(), "{} ended with {status}: {mounter}", mounter.name());
        }
    }
}

/// A volume that any number of Pods may use.
pub fn volume(number: u32) -> CsiVolume {
    CsiVolume::new(BUCKET, PV, &pod(number))
}

pub fn pod(number: u32) -> String {
    format!("{number:08}-aaaa-4aaa-8aaa-aaaaaaaaaaaa")
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
