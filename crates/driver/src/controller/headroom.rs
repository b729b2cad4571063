//! Reserves room for the Mountpoint Pods of workloads with a scheduling gate: observe → decide → apply, with a queue of workloads of its
//! own.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Api, Client};
use s3csi_core::attachment::{HeadroomGate, Workload};
use s3csi_core::headroom::{HeadroomAction, decide};
use s3csi_core::mountpoint_pod::{InvalidPodShape, PodShape};
use s3csi_core::{Chain, PvName, WorkloadUid};

use super::facts;
use super::failpoints::Failpoint;
use super::headroom_pod::{HeadroomLabel, HeadroomParameters, gate_removal, headroom_pod};
use super::queue::Queue;
use super::reconcile::{ReconcileOutcome, Reconciler};
use crate::api::call::{CallError, call};
use crate::api::watch::WatchUpdate;

/// The headroom Pods of all workloads.
pub struct HeadroomReconciler {
    pub client: Client,
    pub reconciler: Arc<Reconciler>,
    /// Workloads whose headroom Pods may have to change.
    pub queue: Arc<Queue<WorkloadUid>>,
}

#[derive(Debug, thiserror::Error)]
enum HeadroomError {
    #[error("volume {persistent_volume} is gone")]
    VolumeGone { persistent_volume: PvName },

    #[error("no Mountpoint Pod can be created for volume {persistent_volume}")]
    Shape {
        persistent_volume: PvName,
        #[source]
        cause: InvalidPodShape,
    },

    #[error("failed to create headroom Pod {name}")]
    Create {
        name: String,
        #[source]
        cause: CallError,
    },

    #[error("failed to delete headroom Pod {name}")]
    Delete {
        name: String,
        #[source]
        cause: CallError,
    },

    #[error("failed to remove the scheduling gate")]
    RemoveGate {
        #[source]
        cause: CallError,
    },

    #[error("the workload was changed by another writer")]
    LostRace,
}

impl HeadroomReconciler {
    /// Never returns. Several may run.
    pub async fn run(&self) {
        loop {
            let uid = self.queue.next().await;
            match self.reconcile(&uid).await {
                ReconcileOutcome::Done { requeue_after } => self.queue.done(&uid, requeue_after),
                ReconcileOutcome::Retry => {
                    self.queue.failed(&uid);
                }
            }
        }
    }

    async fn reconcile(&self, uid: &WorkloadUid) -> ReconcileOutcome {
        let (observed, workload) = {
            let cache = self.reconciler.cache.lock();
            (cache.observe_headroom(uid), cache.workload(uid).cloned())
        };
        let decision = decide(&observed);
        if let (Some(workload), Some(notice)) = (&workload, &decision.notice) {
            self.reconciler.status.headroom_waits(workload, notice);
        }
        for action in &decision.actions {
            if let Err(error) = self.apply(workload.as_ref(), action).await {
                self.report(uid, workload.as_ref(), &error);
                return ReconcileOutcome::Retry;
            }
        }
        ReconcileOutcome::Done { requeue_after: None }
    }

    fn report(&self, uid: &WorkloadUid, workload: Option<&Workload>, error: &HeadroomError) {
        match error {
            HeadroomError::VolumeGone { .. } | HeadroomError::LostRace => {
                tracing::debug!(workload = %uid, error = %Chain(error), "lost a race, reconciling again");
            }
            error => {
                tracing::warn!(workload = %uid, error = %Chain(error), "headroom not reconciled, retrying");
                if let Some(workload) = workload.filter(|it| it.headroom_gate == HeadroomGate::Present) {
                    self.reconciler.status.headroom_not_reserved(workload, Chain(error).to_string());
                }
            }
        }
    }

    async fn apply(&self, workload: Option<&Workload>, action: &HeadroomAction) -> Result<(), HeadroomError> {
        match (action, workload) {
            (HeadroomAction::Delete { name, uid }, _) => self.delete(name, uid).await,
            (HeadroomAction::Reserve { name, persistent_volume }, Some(workload)) => {
                self.create(workload, name, persistent_volume).await
            }
            (HeadroomAction::LabelAndRemoveGate, Some(workload)) => {
                self.remove_gate(workload, HeadroomLabel::Set).await
            }
            (HeadroomAction::RemoveGate, Some(workload)) => self.remove_gate(workload, HeadroomLabel::Unneeded).await,
            // Decided for workloads that are there.
            (
                HeadroomAction::Reserve { .. } | HeadroomAction::LabelAndRemoveGate | HeadroomAction::RemoveGate,
                None,
            ) => Ok(()),
        }
    }

    async fn create(&self, workload: &Workload, name: &str, volume: &PvName) -> Result<(), HeadroomError> {
        let apply = &self.reconciler.apply;
        let facts = self.reconciler.cache.lock().volume(volume).cloned();
        // The gate must not be removed without a headroom Pod, and the next decision knows what has changed. It is never made without
        // settings.
        let (Some(settings), Some(facts)) = (&apply.settings.headroom, facts) else {
            return Err(HeadroomError::VolumeGone { persistent_volume: volume.clone() });
        };
        let shape = PodShape::parse(&facts.attributes, &facts.mount_options)
            .map_err(|cause| HeadroomError::Shape { persistent_volume: volume.clone(), cause })?;
        let parameters = HeadroomParameters {
            name,
            workload: &workload.uid,
            namespace: &workload.namespace,
            persistent_volume: volume,
            shape: &shape,
        };
        let pod = headroom_pod(&apply.settings, settings, &parameters);
        match call(apply.pods.create(&PostParams::default(), &pod)).await {
            Ok(pod) => {
                apply.failpoints.hit(Failpoint::HeadroomPodCreated);
                tracing::info!(pod = name, workload = %workload.uid, %volume, "headroom Pod created");
                if let Some(fact) = facts::headroom_pod(&apply.settings.keys, &pod) {
                    self.reconciler.cache.lock().update_headroom_pods(WatchUpdate::Changed(fact));
                }
                Ok(())
            }
            Err(cause) if cause.is_already_exists() => Ok(()),
            Err(cause) => Err(HeadroomError::Create { name: name.to_owned(), cause }),
        }
    }

    async fn delete(&self, name: &str, uid: &str) -> Result<(), HeadroomError> {
        let apply = &self.reconciler.apply;
        let preconditions = Preconditions { uid: Some(uid.to_owned()), resource_version: None };
        let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        match call(apply.pods.delete(name, &parameters)).await {
            Ok(_) => {
                apply.failpoints.hit(Failpoint::HeadroomPodDeleted);
                tracing::info!(pod = name, "headroom Pod deleted");
                Ok(())
            }
            Err(cause) if cause.is_not_found() || cause.is_lost_race() => {
                // The watch may have reported its end before the response to its creation arrived.
                self.reconciler.cache.lock().forget_headroom_pod(name, uid);
                Ok(())
            }
            Err(cause) => Err(HeadroomError::Delete { name: name.to_owned(), cause }),
        }
    }

    async fn remove_gate(&self, workload: &Workload, label: HeadroomLabel) -> Result<(), HeadroomError> {
        let apply = &self.reconciler.apply;
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &workload.namespace);
        let patch = Patch::Strategic(gate_removal(&apply.settings.keys, workload, label));
        match call(pods.patch(&workload.name, &PatchParams::default(), &patch)).await {
            Ok(pod) => {
                apply.failpoints.hit(Failpoint::GateRemoved);
                tracing::info!(namespace = workload.namespace, pod = workload.name, ?label, "scheduling gate removed");
                // One that has a node already affects volumes, which the watch reports.
                let fact = facts::workload(apply.settings.keys.driver(), &pod).filter(|it| it.node.is_none());
                let mut cache = self.reconciler.cache.lock();
                // The watch may have reported a node, or the end of the Pod, before this response arrived.
                let is_known = |it: &Workload| it.headroom_gate == HeadroomGate::Present && it.node.is_none();
                if let Some(fact) = fact.filter(|_| cache.workload(&workload.uid).is_some_and(is_known)) {
                    cache.update_workloads(WatchUpdate::Changed(fact), std::time::Instant::now());
                }
                Ok(())
            }
            Err(cause) if cause.is_not_found() => Ok(()),
            // If another Pod has its name, the watch reports the end of this one.
            Err(cause) if cause.is_lost_race() => Err(HeadroomError::LostRace),
            Err(cause) => Err(HeadroomError::RemoveGate { cause }),
        }
    }
}
