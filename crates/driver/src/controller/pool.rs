//! Keeps the warm Mountpoint Pods of each node: observe → decide → apply, as for volumes, with a queue of nodes of its own. Volumes
//! adopt warm Pods on their own keys.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use s3csi_core::Chain;
use s3csi_core::attachment::Timestamp;
use s3csi_core::mountpoint_pod::PodShape;
use s3csi_core::warm_pool::{PoolAction, decide};

use super::apply::ApplyError;
use super::failpoints::Failpoint;
use super::pod::{PodOwner, template, warm_pod};
use super::queue::{Priority, Queue};
use super::reconcile::{ReconcileOutcome, Reconciler};
use crate::api::call::{CallError, call};

/// The warm Pods of all nodes.
pub struct Pools {
    pub reconciler: Arc<Reconciler>,
    /// Nodes whose pool may have changed.
    pub queue: Arc<Queue<String>>,
    /// How many warm Pods each node has.
    pub size: usize,
}

#[derive(Debug, thiserror::Error)]
enum PoolError {
    #[error("warm Mountpoint Pod {name} is not created: the node is cordoned")]
    Cordoned { name: String },

    #[error("failed to create warm Mountpoint Pod {name}")]
    Start {
        name: String,
        #[source]
        cause: CallError,
    },

    #[error("failed to end a warm Mountpoint Pod")]
    Delete {
        #[source]
        cause: ApplyError,
    },
}

impl Pools {
    /// Never returns.
    pub async fn run(self, now: impl Fn() -> Timestamp) {
        loop {
            let node = self.queue.next().await;
            match self.reconcile(&node, now()).await {
                ReconcileOutcome::Done { requeue_after } => self.queue.done(&node, requeue_after),
                ReconcileOutcome::Retry => {
                    self.queue.failed(&node);
                }
            }
        }
    }

    async fn reconcile(&self, node: &str, now: Timestamp) -> ReconcileOutcome {
        let template = template(&self.reconciler.apply.settings, &PodShape::default());
        let observed = self.reconciler.cache.lock().observe_pool(node, self.size, template);
        let decision = decide(&observed, now);
        let mut has_succeeded = true;
        for action in &decision.actions {
            if let Err(error) = self.apply(node, action).await {
                has_succeeded = false;
                match error {
                    // It may take as long as the drain of the node.
                    PoolError::Cordoned { .. } => {
                        tracing::debug!(node, error = %Chain(&error), "pool not filled, retrying");
                    }
                    error => tracing::warn!(node, error = %Chain(&error), "pool not filled, retrying"),
                }
            }
        }
        if !has_succeeded {
            return ReconcileOutcome::Retry;
        }
        ReconcileOutcome::Done { requeue_after: decision.requeue_after.map(|it| (it, Priority::Normal)) }
    }

    async fn apply(&self, node: &str, action: &PoolAction) -> Result<(), PoolError> {
        match action {
            PoolAction::Start { name } => self.start(node, name).await,
            PoolAction::Delete { name, uid, resource_version } => {
                let deleted = self.reconciler.apply.delete_pod(name, uid, resource_version).await;
                deleted.map_err(|cause| PoolError::Delete { cause })
            }
        }
    }

    async fn start(&self, node: &str, name: &str) -> Result<(), PoolError> {
        let apply = &self.reconciler.apply;
        let facts = apply.uncached.node(node).await;
        if facts.as_ref().is_some_and(|it| it.is_cordoned) {
            return Err(PoolError::Cordoned { name: name.to_owned() });
        }
        let node_uid = facts.map(|it| it.uid);
        let pod: Pod = warm_pod(&apply.settings, PodOwner { name, node, node_uid: node_uid.as_deref() });
        match call(apply.pods.create(&PostParams::default(), &pod)).await {
            Ok(pod) => {
                apply.failpoints.hit(Failpoint::PodStarted);
                tracing::info!(pod = name, node, "warm Mountpoint Pod started");
                apply.update_pod(&self.reconciler.cache, &pod);
                Ok(())
            }
            Err(cause) if cause.is_already_exists() => Ok(()),
            Err(cause) => Err(PoolError::Start { name: name.to_owned(), cause }),
        }
    }
}
