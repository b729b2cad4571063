//! By which Mountpoint Pod a workload of this node is served. The controller says so in attachments; this room watches
//! them, and the Mountpoint Pods of this node, and waits for what is not there yet. It asks nobody twice and changes nothing.

mod error;
mod facts;
mod watch;

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};
use s3csi_core::chain::Chain;
use s3csi_core::identifiers::{PvName, WorkloadUid};
use tokio::runtime::Handle;
use tokio::sync::Notify;

pub use self::error::AssignmentError;
pub use self::facts::MountpointPod;
use self::facts::{Facts, Missing};

/// For the one question that is asked when the time is up, to say better what is missing.
const EXPLAINED_WITHIN: Duration = Duration::from_secs(2);

/// What the API server shows of this node.
pub struct Assignments {
    place: Place,
    client: Client,
    runtime: Handle,
    facts: Mutex<Facts>,
    /// Told about every change of the facts.
    changed: Condvar,
    /// Told when there may be something to take away.
    wake: Notify,
    /// Told about every change of the facts, too.
    news: Notify,
}

/// Whom the assignments are for, and where their Mountpoint Pods are.
#[derive(Clone, Debug)]
pub struct Place {
    pub node: String,
    /// The namespace of Mountpoint Pods.
    pub namespace: String,
    /// Annotations derive from it.
    pub driver_name: String,
}

impl Assignments {
    pub fn new(place: Place, client: Client, runtime: Handle) -> Self {
        Self {
            place,
            client,
            runtime,
            facts: Mutex::default(),
            changed: Condvar::new(),
            wake: Notify::new(),
            news: Notify::new(),
        }
    }

    pub fn namespace(&self) -> &str {
        &self.place.namespace
    }

    /// The running Mountpoint Pod of a workload, as soon as there is one; at the deadline, what keeps it from being one.
    pub fn wait_for(
        &self,
        workload: &WorkloadUid,
        volume: &PvName,
        deadline: Instant,
    ) -> Result<MountpointPod, AssignmentError> {
        let mut facts = self.facts();
        loop {
            let missing = match facts.find(workload, volume) {
                Ok(pod) => return Ok(pod.clone()),
                Err(missing) => missing,
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(facts);
                return Err(self.explain(missing, workload, volume));
            }
            facts = self.changed.wait_timeout(facts, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The Mountpoint Pod of this name, if there is one on this node.
    pub fn pod(&self, name: &str) -> Option<MountpointPod> {
        self.facts().pods.get(name).cloned()
    }

    /// All Mountpoint Pods of this node; `None` as long as they were not all seen.
    pub fn pods(&self) -> Option<Vec<MountpointPod>> {
        self.facts().pods.all().map(|it| it.cloned().collect())
    }

    /// Somebody should look for what can be taken away.
    pub fn wake(&self) {
        self.wake.notify_one();
    }

    pub async fn woken(&self) {
        self.wake.notified().await;
    }

    /// Completes when something has changed since the last time.
    pub async fn changed(&self) {
        self.news.notified().await;
    }

    /// Only here the API server is asked instead of watched: the watch shows no Pod that is on no node yet.
    fn explain(&self, missing: Missing, workload: &WorkloadUid, volume: &PvName) -> AssignmentError {
        let Place { node, namespace, .. } = &self.place;
        match missing {
            Missing::Blind { kind, trouble } => AssignmentError::Blind { kind, trouble },
            Missing::Unassigned => AssignmentError::NotAssigned {
                workload: workload.to_string(),
                volume: volume.to_string(),
                node: node.clone(),
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
        let Place { node, namespace, .. } = &self.place;
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let asked = self.runtime.block_on(async { tokio::time::timeout(EXPLAINED_WITHIN, pods.get_opt(&pod)).await });
        let namespace = namespace.clone();
        let found = match asked {
            Ok(Ok(found)) => found,
            Ok(Err(cause)) => {
                tracing::warn!(pod, error = %Chain(&cause), "Mountpoint Pod cannot be asked for");
                None
            }
            Err(_) => None,
        };
        let Some(found) = found else { return AssignmentError::Gone { attachment, pod } };
        match found.spec.as_ref().and_then(|it| it.node_name.as_deref()).filter(|it| !it.is_empty()) {
            None => AssignmentError::NotScheduled { namespace, why: facts::trouble(&found), pod },
            Some(elsewhere) if elsewhere != node => {
                AssignmentError::Elsewhere { attachment, pod, node: elsewhere.to_owned() }
            }
            // It came to this node just now; kubelet's next call finds it.
            Some(_) => AssignmentError::NotRunning { namespace, why: facts::trouble(&found), pod },
        }
    }

    /// Facts are replaced by single assignments, so a panic elsewhere cannot have left them half changed.
    fn facts(&self) -> MutexGuard<'_, Facts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Facts)) {
        change(&mut self.facts());
        self.changed.notify_all();
        self.news.notify_one();
    }
}
