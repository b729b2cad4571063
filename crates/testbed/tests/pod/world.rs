//! One node for a test: the node plugin, the Mountpoint Pods on it, a store, and the API server that it shares with other tests.
//! Calls block. It ends what it started; the fixture then proves that nothing is left.

use std::collections::BTreeMap;
use std::fs;
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};
use s3csi_core::attachment::successor_name;
use s3csi_core::names::mountpoint_pod_name;
use s3csi_s3_server::{Config, S3Server};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::CsiVolume;
use s3csi_testbed::plugin::{Plugin, PluginStrategy};
use s3csi_testbed::process::Process;
use s3csi_testbed::test_node::TestNode;
use s3csi_testbed::wait::{SOON, wait_for, wait_until};
use serde_json::json;

use crate::cluster::{Cluster, control_plane};

pub use s3csi_testbed::test_node::{check_refused, names_in};

pub const BUCKET: &str = "bucket-1";
pub const PV: &str = "pv-1";

/// Declare it after its fixture. Dropping it ends everything as Kubernetes would, and panics if something does not end well.
pub struct World<'a> {
    node: TestNode<'a>,
    pub cluster: Cluster,
    pub node_name: String,
    /// Part of every UID in this world, because the API server has those of others, too.
    number: u32,
    pods: Mutex<BTreeMap<String, MountpointPod>>,
    entries: Mutex<BTreeMap<String, Vec<String>>>,
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

/// A Mountpoint Pod that was made here.
#[derive(Clone)]
pub struct MountpointPod {
    pub name: String,
    /// The name of the first Mountpoint Pod of its source.
    pub source: String,
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
        plugin.set_strategy(PluginStrategy::Pod { kubeconfig: control_plane().kubeconfig() });
        plugin.set_node_name(&node_name);
        let node = TestNode::new(fixture, store, plugin);
        let cluster = node.runtime.block_on(Cluster::connect(control_plane()));
        Self { node, cluster, node_name, number, pods: Mutex::default(), entries: Mutex::default() }
    }

    /// The volume of a workload. All of them have the same PV.
    pub fn volume(&self, number: u32) -> CsiVolume {
        CsiVolume::new(BUCKET, PV, &self.workload(number))
    }

    /// The UID of a workload.
    pub fn workload(&self, number: u32) -> String {
        format!("{number:08}-aaaa-4aaa-8aaa-{:012}", self.number)
    }

    /// The name of the Mountpoint Pod that is made for a workload.
    pub fn pod_name(&self, number: u32) -> String {
        mountpoint_pod_name(&self.workload(number).parse().unwrap(), &PV.parse().unwrap())
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
        let pod = MountpointPod { source: name.clone(), name: name.clone(), uid, directory, mounter: None };
        self.pods().insert(name, pod.clone());
        pod
    }

    /// A running Mountpoint Pod that is to take over from another one, as the controller starts it.
    pub fn run_successor(&self, pod: &MountpointPod, arguments: &[&str]) -> MountpointPod {
        let (name, source) = (successor_name(&pod.source, &pod.uid), pod.source.clone());
        let uid = self.runtime.block_on(self.cluster.create_successor(&name, &self.node_name, &source));
        let directory = self.plugin.make_communication_directory(&uid).unwrap();
        let pod = MountpointPod { name, source, uid, directory, mounter: None };
        let pod = self.start_mounter(&pod, arguments);
        self.set_phase(&pod, "Running");
        pod
    }

    /// Deletes the Pod: its containers receive SIGTERM and a grace period.
    pub fn begin_deletion(&self, pod: &MountpointPod) {
        self.runtime.block_on(self.cluster.begin_deletion(&pod.name));
        pod.mounter().signal(Signal::TERM);
    }

    /// Its mounter has ended well, and the Pod is gone.
    #[track_caller]
    pub fn finish_deletion(&self, pod: &MountpointPod) {
        let status = pod.mounter().wait_for_end();
        assert!(status.success(), "the mounter ended with {status}: {}", pod.mounter());
        self.delete_pod(pod);
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

    /// The annotation by which the controller says that no workload uses the Mountpoint Pod.
    pub fn annotate_needs_unmount(&self, pod: &MountpointPod) {
        let annotate = self.cluster.annotate(&pod.name, "s3.csi.scality.com/needs-unmount", "true");
        self.runtime.block_on(annotate);
    }

    /// The Pod is gone, its containers and its directory with it.
    pub fn delete_pod(&self, pod: &MountpointPod) {
        self.kill_mounter(pod);
        self.runtime.block_on(self.cluster.delete_pod(&pod.name));
        // Kubelet repeats this as well: the node plugin may write a file there until it has seen the end of the Pod.
        let directory = self.plugin.kubelet_root().join("pods").join(&pod.uid);
        wait_for("the directory of the Pod is gone", || fs::remove_dir_all(&directory).is_ok() || !directory.exists());
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
        names_in(&self.plugin.sources()).contains(&pod.source)
    }

    pub fn source(&self, pod: &MountpointPod) -> PathBuf {
        self.plugin.sources().join(&pod.source)
    }

    pub fn engines(&self) -> Vec<Pid> {
        self.node.engine_processes()
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

    /// Nothing is mounted, no engine runs, no source is there and no credentials are.
    #[track_caller]
    pub fn check_nothing_mounted(&self) {
        let credentials = || {
            let pods = self.pods();
            let left = pods.values().filter(|it| it.directory.join("credentials").exists());
            left.map(|it| it.name.clone()).collect::<Vec<_>>()
        };
        let leftovers = || (self.mounts(), self.engines(), names_in(&self.plugin.sources()), credentials());
        let is_clean = wait_until(Instant::now() + SOON, || leftovers() == (vec![], vec![], vec![], vec![]));
        assert!(is_clean, "left (mounts, engines, sources, credentials): {:?}", leftovers());
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
        self.node.stop_node();
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
