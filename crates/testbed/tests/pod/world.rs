//! One node for a test: the node plugin, the Mountpoint Pods on it, a store, and the API server that it shares with other tests.
//! Calls block. It ends what it started; the fixture then proves that nothing is left.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use s3csi_core::names::mountpoint_pod_name;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::{Kubelet, Volume};
use s3csi_testbed::leftovers::mounts_beneath;
use s3csi_testbed::plugin::{Plugin, Strategy};
use s3csi_testbed::process::Process;
use s3csi_testbed::processes;
use s3csi_testbed::s3::{Config, S3Server};
use s3csi_testbed::wait::{SOON, wait_for, wait_until};
use serde_json::json;
use tokio::runtime::Runtime;
use tonic::{Code, Status};

use crate::cluster::{Cluster, control_plane};

pub const BUCKET: &str = "bucket-1";
pub const PV: &str = "pv-1";

/// Declare it after its fixture. Dropping it ends everything as Kubernetes would, and panics if something does not end well.
pub struct World<'a> {
    pub kubelet: Kubelet,
    pub plugin: Plugin<'a>,
    pub store: S3Server,
    pub runtime: Runtime,
    pub cluster: Cluster,
    pub node_name: String,
    /// Part of every UID in this world, because the API server has those of others, too.
    number: u32,
    node: Option<Process>,
    pods: Mutex<BTreeMap<String, MountpointPod>>,
    entries: Mutex<BTreeMap<String, Vec<String>>>,
    fixture: &'a Fixture,
}

/// A Mountpoint Pod that was made here.
#[derive(Clone)]
pub struct MountpointPod {
    pub name: String,
    pub uid: String,
    /// The directory it shares with the node.
    pub directory: PathBuf,
    mounter: Option<Arc<Process>>,
}

impl<'a> World<'a> {
    /// The node plugin runs; there is no Mountpoint Pod yet.
    pub fn start(fixture: &'a Fixture) -> Self {
        let mut world = Self::prepare(fixture);
        world.start_node();
        world
    }

    pub fn prepare(fixture: &'a Fixture) -> Self {
        static WORLDS: AtomicU32 = AtomicU32::new(1);
        let number = WORLDS.fetch_add(1, Ordering::Relaxed);
        let node_name = format!("node-{number}");
        let buckets = (1..=3).map(|it| format!("bucket-{it}")).collect();
        let store = S3Server::start_blocking(Config { buckets, ..Config::default() }).unwrap();
        let mut plugin = Plugin::new(fixture, &store).unwrap();
        plugin.set_strategy(Strategy::Pod { kubeconfig: control_plane().kubeconfig() });
        plugin.set_node_name(&node_name);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let kubelet = runtime.block_on(async { plugin.kubelet() });
        let cluster = runtime.block_on(Cluster::connect(control_plane()));
        Self {
            kubelet,
            plugin,
            store,
            runtime,
            cluster,
            node_name,
            number,
            node: None,
            pods: Mutex::default(),
            entries: Mutex::default(),
            fixture,
        }
    }

    /// The volume of a workload. All of them have the same PV.
    pub fn volume(&self, number: u32) -> Volume {
        Volume::new(BUCKET, PV, &self.workload(number))
    }

    /// The UID of a workload.
    pub fn workload(&self, number: u32) -> String {
        format!("{number:08}-aaaa-4aaa-8aaa-{:012}", self.number)
    }

    /// The name of the Mountpoint Pod that is made for a workload.
    pub fn pod_name(&self, number: u32) -> String {
        mountpoint_pod_name(&self.workload(number).parse().unwrap(), &PV.parse().unwrap())
    }

    pub fn node(&self) -> &Process {
        self.node.as_ref().expect("the node plugin was not started")
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

    /// Waits for a node plugin that ends by itself.
    pub fn wait_for_end_of_node(&mut self) {
        self.node.take().expect("the node plugin was not started").wait_for_end();
    }

    /// Stops the node plugin as Kubernetes does.
    pub fn stop_node(&mut self) {
        let status = self.node.take().expect("the node plugin was not started").terminate();
        assert!(status.success(), "the node plugin ended with {status}");
    }

    /// The Mountpoint Pod for the first workload of this number: made, its mounter runs, and kubelet has said so.
    pub fn run_pod(&self, number: u32) -> MountpointPod {
        self.run_pod_with(number, &[])
    }

    pub fn run_pod_with(&self, number: u32, arguments: &[&str]) -> MountpointPod {
        let pod = self.create_pod(number);
        let pod = self.start_mounter(&pod, arguments);
        self.set_phase(&pod, "Running");
        pod
    }

    /// The object and its directory, but nothing runs in it.
    pub fn create_pod(&self, number: u32) -> MountpointPod {
        let name = self.pod_name(number);
        let uid = self.runtime.block_on(self.cluster.create_pod(&name, Some(&self.node_name)));
        let directory = self.plugin.make_communication_directory(&uid).unwrap();
        let pod = MountpointPod { name: name.clone(), uid, directory, mounter: None };
        self.pods().insert(name, pod.clone());
        pod
    }

    /// Starts the container's process.
    pub fn start_mounter(&self, pod: &MountpointPod, arguments: &[&str]) -> MountpointPod {
        let mounter = self.plugin.start_mounter_of_pod(&pod.uid, arguments).unwrap();
        let pod = MountpointPod { mounter: Some(Arc::new(mounter)), ..pod.clone() };
        self.pods().insert(pod.name.clone(), pod.clone());
        pod
    }

    pub fn set_phase(&self, pod: &MountpointPod, phase: &str) {
        self.runtime.block_on(self.cluster.set_status(&pod.name, json!({ "phase": phase })));
    }

    /// The controller's word that these workloads are served by this Mountpoint Pod.
    pub fn assign(&self, pod: &str, workloads: &[u32]) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.insert(pod.to_owned(), workloads.iter().map(|it| self.workload(*it)).collect());
        self.runtime.block_on(self.cluster.attach(&self.node_name, PV, &entries));
    }

    /// A running Mountpoint Pod that serves these workloads.
    pub fn serve(&self, workloads: &[u32]) -> MountpointPod {
        let pod = self.run_pod(workloads[0]);
        self.assign(&pod.name, workloads);
        pod
    }

    /// The controller's word that nobody is served by it any more.
    pub fn annotate_needs_unmount(&self, pod: &MountpointPod) {
        let annotate = self.cluster.annotate(&pod.name, "s3.csi.scality.com/needs-unmount", "true");
        self.runtime.block_on(annotate);
    }

    /// The Pod is gone, its containers and its directory with it.
    pub fn delete_pod(&self, pod: &MountpointPod) {
        self.kill_mounter(pod);
        self.runtime.block_on(self.cluster.delete_pod(&pod.name));
        fs::remove_dir_all(self.plugin.kubelet_root().join("pods").join(&pod.uid)).unwrap();
        self.pods().remove(&pod.name);
    }

    /// Ends the container's processes, as the kernel does when the first of them is killed.
    pub fn kill_mounter(&self, pod: &MountpointPod) {
        if let Some(mounter) = &pod.mounter {
            mounter.kill();
        }
        wait_for("the engine of the Mountpoint Pod is gone", || {
            let engines = self.engines_of(pod);
            for engine in &engines {
                // It may have ended by itself.
                let _ = kill_process(*engine, Signal::KILL);
            }
            engines.is_empty()
        });
    }

    /// The whole end of a Mountpoint Pod, as the controller wants it.
    #[track_caller]
    pub fn retire(&self, pod: &MountpointPod) {
        self.annotate_needs_unmount(pod);
        self.wait_for_end_of(pod);
    }

    /// Its mounter ended well: kubelet would call the Pod succeeded.
    #[track_caller]
    pub fn wait_for_end_of(&self, pod: &MountpointPod) {
        let status = pod.mounter().wait_for_end();
        assert!(status.success(), "the mounter ended with {status}: {}", pod.mounter());
        wait_for("the source and its credentials are gone", || {
            !self.source_exists(pod) && !pod.directory.join("credentials").exists()
        });
        self.pods().remove(&pod.name);
    }

    /// Looked up in the directory above: a look at the source itself would ask its engine.
    pub fn source_exists(&self, pod: &MountpointPod) -> bool {
        names_in(&self.plugin.sources()).contains(&pod.name)
    }

    pub fn source(&self, pod: &MountpointPod) -> PathBuf {
        self.plugin.sources().join(&pod.name)
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

    /// With less time than kubelet gives. The answer must come in it.
    #[track_caller]
    pub fn try_publish_within(&self, volume: &Volume, time: Duration) -> Result<(), Status> {
        let start = Instant::now();
        let target = self.kubelet.target(volume);
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        let mut request = tonic::Request::new(self.kubelet.publish_request(volume));
        request.set_timeout(time);
        let outcome = self.runtime.block_on(self.kubelet.node().node_publish_volume(request));
        assert!(start.elapsed() < time, "took {:?}", start.elapsed());
        outcome.map(drop)
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

    /// Engines of this node, whoever started them.
    pub fn engines(&self) -> Vec<Pid> {
        processes::running("mount-s3", self.fixture.directory())
    }

    /// Engines of one Mountpoint Pod: they run in its directory.
    pub fn engines_of(&self, pod: &MountpointPod) -> Vec<Pid> {
        let is_its_own = |it: &Pid| fs::read_link(format!("/proc/{it}/cwd")).is_ok_and(|cwd| cwd == pod.directory);
        self.engines().into_iter().filter(is_its_own).collect()
    }

    #[track_caller]
    pub fn engine(&self) -> Pid {
        let engines = self.engines();
        assert_eq!(engines.len(), 1, "engines: {engines:?}");
        engines[0]
    }

    pub fn mounts(&self) -> Vec<PathBuf> {
        mounts_beneath(self.fixture.directory())
    }

    /// Nothing is mounted, no engine runs, no source is there and no credentials are.
    #[track_caller]
    pub fn check_nothing_mounted(&self) {
        let is_clean =
            || self.mounts().is_empty() && self.engines().is_empty() && names_in(&self.plugin.sources()).is_empty();
        let is_clean = wait_until(Instant::now() + SOON, is_clean);
        let sources = names_in(&self.plugin.sources());
        assert!(is_clean, "left: mounts {:?}, engines {:?}, sources {sources:?}", self.mounts(), self.engines());
        for pod in self.pods().values() {
            assert!(!pod.directory.join("credentials").exists(), "credentials of {} are left", pod.name);
        }
    }

    fn pods(&self) -> MutexGuard<'_, BTreeMap<String, MountpointPod>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for World<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let running: Vec<MountpointPod> = self.pods().values().filter(|it| it.is_running()).cloned().collect();
        for pod in running {
            self.retire(&pod);
        }
        if let Some(node) = self.node.take() {
            let status = node.terminate();
            assert!(status.success(), "the node plugin ended with {status}: {node}");
        }
    }
}

impl MountpointPod {
    #[track_caller]
    pub fn mounter(&self) -> &Process {
        self.mounter.as_ref().expect("the mounter was not started")
    }

    pub fn is_running(&self) -> bool {
        self.mounter.as_ref().is_some_and(|it| it.is_running())
    }
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

/// Names in a directory, sorted; none if there is no such directory.
pub fn names_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|it| it.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}
