//! The assignment of workloads on this node to Mountpoint Pods. The controller writes it into attachments; this module watches
//! these and the Mountpoint Pods of this node, and waits for what does not exist yet. It writes nothing.

mod error;
mod facts;
mod watches;

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};
use parking_lot::{Condvar, Mutex};
use s3csi_core::chain::Chain;
use s3csi_core::identifiers::{PvName, WorkloadUid};
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};

pub use self::error::AssignmentError;
pub use self::facts::LocalMountpointPod;
use self::facts::{Facts, Missing};

/// For the one API call after the deadline that explains what is missing.
const EXPLAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// How often the directory of a Mountpoint Pod that is starting is searched for the socket of its mounter. kubelet reports a container
/// that runs up to a second later.
const SOCKET_INTERVAL: Duration = Duration::from_millis(20);

/// A cache of this node's attachments and Mountpoint Pods.
pub struct Assignments {
    scope: AssignmentScope,
    client: Client,
    runtime: Handle,
    facts: Mutex<Facts>,
    /// Wakes the threads that wait for an assignment.
    changed: Condvar,
    /// Wakes the tasks that wait for one.
    version: watch::Sender<u64>,
    /// Wakes the sweep.
    sweep: Notify,
    /// Wakes the writer of conditions.
    conditions: Notify,
}

/// Which node the assignments are for, and where their Mountpoint Pods are.
#[derive(Clone, Debug)]
pub struct AssignmentScope {
    pub node: String,
    /// The namespace of Mountpoint Pods.
    pub namespace: String,
    /// The prefix of our annotations.
    pub driver_name: String,
}

impl Assignments {
    pub fn new(scope: AssignmentScope, client: Client, runtime: Handle) -> Self {
        Self {
            scope,
            client,
            runtime,
            facts: Mutex::default(),
            changed: Condvar::new(),
            version: watch::Sender::new(0),
            sweep: Notify::new(),
            conditions: Notify::new(),
        }
    }

    pub fn namespace(&self) -> &str {
        &self.scope.namespace
    }

    /// Waits for the running Mountpoint Pod of a workload; at the deadline the error says what is missing.
    pub fn wait_for(
        &self,
        workload: &WorkloadUid,
        volume: &PvName,
        deadline: Instant,
    ) -> Result<LocalMountpointPod, AssignmentError> {
        let mut facts = self.facts.lock();
        loop {
            let missing = match facts.find(workload, volume) {
                Ok(pod) => return Ok(pod.clone()),
                Err(missing) => missing,
            };
            if deadline <= Instant::now() {
                drop(facts);
                return Err(self.explain(missing, workload, volume));
            }
            self.changed.wait_until(&mut facts, deadline);
        }
    }

    /// Waits, without a thread, until a workload has a Mountpoint Pod whose mounter runs, or for the deadline. `is_listening` must not
    /// block.
    pub async fn wait_until_assigned(
        &self,
        workload: &WorkloadUid,
        volume: &PvName,
        deadline: Instant,
        is_listening: impl Fn(&LocalMountpointPod) -> bool,
    ) {
        let mut version = self.version.subscribe();
        // At the deadline the call itself says what is missing.
        while Instant::now() < deadline {
            version.mark_unchanged();
            let starting = match self.facts.lock().find(workload, volume) {
                Ok(_) => return,
                Err(Missing::NotRunning { pod, .. }) => Some(pod),
                Err(_) => None,
            };
            let starting = starting.and_then(|it| self.pod(&it));
            let is_starting = starting.is_some();
            if let Some(pod) = starting.filter(|it| is_listening(it)) {
                self.change(|facts| facts.set_listening(&pod));
                return;
            }
            let until = if is_starting { deadline.min(Instant::now() + SOCKET_INTERVAL) } else { deadline };
            // The sender lives as long as we do.
            let _ = tokio::time::timeout_at(until.into(), version.changed()).await;
        }
    }

    /// Whether the controller has not assigned a Mountpoint Pod to a workload, as far as the watches have delivered.
    pub fn is_unassigned(&self, workload: &WorkloadUid, volume: &PvName) -> bool {
        matches!(self.facts.lock().find(workload, volume), Err(Missing::Unassigned))
    }

    /// The Mountpoint Pod of this name, if it is on this node.
    pub fn pod(&self, name: &str) -> Option<LocalMountpointPod> {
        self.facts.lock().pods.get(name).cloned()
    }

    /// The Mountpoint Pods of a source on this node, the newest first.
    pub fn pods_of(&self, source: &str) -> Vec<LocalMountpointPod> {
        self.facts.lock().pods_of(source).into_iter().cloned().collect()
    }

    /// All Mountpoint Pods of this node; `None` before the first complete list.
    pub fn pods(&self) -> Option<Vec<LocalMountpointPod>> {
        self.facts.lock().pods.all().map(|it| it.cloned().collect())
    }

    /// Requests a sweep: a source may have become unused.
    pub fn request_sweep(&self) {
        self.sweep.notify_one();
    }

    pub async fn sweep_requested(&self) {
        self.sweep.notified().await;
    }

    /// Completes when the cache has changed since the last call.
    pub async fn changed(&self) {
        self.conditions.notified().await;
    }

    /// The only request outside of the watches, which do not contain Pods without a node.
    fn explain(&self, missing: Missing, workload: &WorkloadUid, volume: &PvName) -> AssignmentError {
        let AssignmentScope { node, namespace, .. } = &self.scope;
        // The chart installs node plugin and controller into the same namespace, which is the client's default one.
        let driver_namespace = || self.client.default_namespace().to_owned();
        match missing {
            Missing::NotSynced { kind, reason } => AssignmentError::NotSynced {
                kind,
                reason,
                namespace: namespace.clone(),
                driver_namespace: driver_namespace(),
            },
            Missing::Unassigned => AssignmentError::NotAssigned {
                workload: workload.to_string(),
                volume: volume.to_string(),
                node: node.clone(),
                driver_namespace: driver_namespace(),
            },
            Missing::Unseen { attachment, pod } => self.explain_unseen(attachment, pod),
            Missing::NotRunning { pod, why } => AssignmentError::NotRunning { namespace: namespace.clone(), pod, why },
            Missing::Ended { attachment, pod, how } => {
                AssignmentError::Ended { namespace: namespace.clone(), attachment, pod, how }
            }
            Missing::Leaving { attachment, pod } => AssignmentError::Leaving { attachment, pod },
        }
    }

    fn explain_unseen(&self, attachment: String, pod: String) -> AssignmentError {
        let AssignmentScope { node, namespace, .. } = &self.scope;
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let asked = self.runtime.block_on(async { tokio::time::timeout(EXPLAIN_TIMEOUT, pods.get_opt(&pod)).await });
        let namespace = namespace.clone();
        let found = match asked {
            Ok(Ok(found)) => found,
            Ok(Err(cause)) => {
                tracing::warn!(pod, error = %Chain(&cause), "failed to get the Mountpoint Pod");
                None
            }
            Err(_) => None,
        };
        let Some(found) = found else { return AssignmentError::Gone { attachment, pod } };
        match found.spec.as_ref().and_then(|it| it.node_name.as_deref()).filter(|it| !it.is_empty()) {
            None => AssignmentError::NotScheduled { namespace, why: facts::waiting_reason(&found), pod },
            Some(elsewhere) if elsewhere != node => {
                AssignmentError::Elsewhere { attachment, pod, node: elsewhere.to_owned() }
            }
            // It was just scheduled to this node; kubelet's next call finds it.
            Some(_) => AssignmentError::NotRunning { namespace, why: facts::waiting_reason(&found), pod },
        }
    }

    fn change(&self, change: impl FnOnce(&mut Facts)) {
        {
            let mut facts = self.facts.lock();
            change(&mut facts);
            facts.apply_listening();
        }
        self.changed.notify_all();
        self.version.send_modify(|it| *it += 1);
        self.conditions.notify_one();
    }
}
