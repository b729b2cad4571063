//! Executes a decision: each action is one idempotent call of the API server.
//!
//! In this order: attachments by compare-and-swap, then Pods, then deletions with preconditions. Facts that
//! only the cache has are read again without it before anything is written that depends on them.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Api, Client};
use parking_lot::Mutex;
use s3csi_core::WorkloadUid;
use s3csi_core::attachment::{
    AttachmentWrite, CreatorState, Decision, Deletion, Entries, PodAction, Precondition, VolumeFacts, may_retire,
};
use s3csi_core::mountpoint_pod::{InvalidPodShape, PodShape, PodTemplate};
use serde_json::{Value, json};

use super::cache::{Cache, ReconcileKey};
use super::facts;
use super::failpoints::{Failpoint, Failpoints};
use super::pod::{PodParameters, PodSettings, Room, adoption, mountpoint_pod, template};
use super::uncached::{UncachedReadError, UncachedReader};
use crate::api::call::{CallError, call};
use crate::api::watch::WatchUpdate;
use crate::api::{self, MountpointS3PodAttachment, MountpointS3PodAttachmentSpec, WorkloadAttachment};

pub struct Apply {
    pub attachments: Api<MountpointS3PodAttachment>,
    pub pods: Api<Pod>,
    pub settings: PodSettings,
    pub uncached: UncachedReader,
    pub failpoints: Failpoints,
}

/// A Mountpoint Pod and the source it serves.
#[derive(Clone, Copy)]
struct PodName<'a> {
    name: &'a str,
    source: &'a str,
}

/// What identifies one state of a Pod.
#[derive(Clone, Copy)]
struct PodVersion<'a> {
    uid: &'a str,
    resource_version: &'a str,
}

/// Why a decision was not executed completely. The next reconciliation decides again.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    #[error("attachment {name} was changed by another writer")]
    LostRace { name: String },

    #[error("failed to write attachment {name}")]
    WriteAttachment {
        name: String,
        #[source]
        cause: CallError,
    },

    #[error("failed to verify that what looks unused is unused")]
    UncachedReader {
        #[source]
        cause: UncachedReadError,
    },

    #[error("workload {workload} exists, although the watch has not reported it yet")]
    StaleWorkloadExists { workload: WorkloadUid },

    #[error("no Mountpoint Pod can be created for the volume")]
    Shape {
        #[source]
        cause: InvalidPodShape,
    },

    #[error("failed to create Mountpoint Pod {name}")]
    StartPod {
        name: String,
        workload: WorkloadUid,
        #[source]
        cause: CallError,
    },

    #[error(
        "Mountpoint Pod {name} is not created: node {node} is cordoned, and the Pod before it serves until it ends"
    )]
    Cordoned { name: String, node: String },

    #[error("warm Mountpoint Pod {name} was changed by another writer")]
    LostWarmPod { name: String },

    #[error("failed to adopt warm Mountpoint Pod {name}")]
    AdoptPod {
        name: String,
        #[source]
        cause: CallError,
    },

    #[error("failed to retire Mountpoint Pod {name}")]
    RetirePod {
        name: String,
        #[source]
        cause: CallError,
    },

    #[error("failed to delete Mountpoint Pod {name}")]
    DeletePod {
        name: String,
        #[source]
        cause: CallError,
    },

    #[error("failed to delete attachment {name}")]
    DeleteAttachment {
        name: String,
        #[source]
        cause: CallError,
    },
}

impl ApplyError {
    /// Whether the attachments were not written as decided.
    pub fn is_attachment_write(&self) -> bool {
        match self {
            // Uncached reads come before attachments are written and before a Pod is retired: either way no workload is assigned yet.
            Self::UncachedReader { .. }
            | Self::LostRace { .. }
            | Self::WriteAttachment { .. }
            | Self::StaleWorkloadExists { .. } => true,
            Self::Shape { .. }
            | Self::StartPod { .. }
            | Self::Cordoned { .. }
            | Self::LostWarmPod { .. }
            | Self::AdoptPod { .. }
            | Self::RetirePod { .. }
            | Self::DeletePod { .. }
            | Self::DeleteAttachment { .. } => false,
        }
    }
}

impl Apply {
    pub fn new(client: &Client, settings: PodSettings, failpoints: Failpoints) -> Self {
        let driver = settings.keys.driver().to_owned();
        Self {
            attachments: api::attachments(client.clone(), &driver),
            pods: Api::namespaced(client.clone(), &settings.namespace),
            uncached: UncachedReader::new(client, &driver, &settings.namespace),
            settings,
            failpoints,
        }
    }

    /// Executes a decision and updates the cache with what was written. A failed attachment write is the only error; the errors
    /// of all later actions are collected.
    pub async fn run(&self, cache: &Mutex<Cache>, key: &ReconcileKey, decision: &Decision) -> Vec<ApplyError> {
        let mut written = BTreeMap::new();
        for spec in &decision.attachment_writes {
            match self.write_spec(cache, key, spec).await {
                Ok(version) => written.insert(spec.name(), version),
                Err(error) => return vec![error],
            };
        }
        let mut errors = Vec::new();
        for step in &decision.pods {
            let outcome = match step {
                PodAction::Start { name, source, attachment: _, workload } => {
                    self.start(cache, key, PodName { name, source }, workload).await
                }
                PodAction::Adopt { name, uid, resource_version, source, workload } => {
                    let version = PodVersion { uid, resource_version };
                    self.adopt(cache, key, PodName { name, source }, version, workload).await
                }
                PodAction::Retire { name, uid, source, creator } => {
                    self.retire(cache, key, PodName { name, source }, uid, *creator).await
                }
            };
            errors.extend(outcome.err());
        }
        for deletion in &decision.deletions {
            let outcome = match deletion {
                Deletion::MountpointPod { name, uid, resource_version } => {
                    self.delete_pod(name, uid, resource_version).await
                }
                Deletion::Attachment { name, precondition } => {
                    let version = match precondition {
                        Precondition::ResourceVersion(version) => Some(version),
                        Precondition::AsWritten => written.get(name.as_str()),
                    };
                    match version {
                        Some(version) => self.delete_attachment(name, version).await,
                        None => Ok(()),
                    }
                }
            };
            errors.extend(outcome.err());
        }
        errors
    }

    /// Returns the version that was written.
    async fn write_spec(
        &self,
        cache: &Mutex<Cache>,
        key: &ReconcileKey,
        spec: &AttachmentWrite,
    ) -> Result<String, ApplyError> {
        let stale: Vec<&WorkloadUid> = spec.stale_workloads().collect();
        if !stale.is_empty() {
            let living = self
                .uncached
                .living_workloads(&key.node)
                .await
                .map_err(|cause| ApplyError::UncachedReader { cause })?;
            if let Some(workload) = stale.into_iter().find(|it| living.contains(*it)) {
                return Err(ApplyError::StaleWorkloadExists { workload: workload.clone() });
            }
        }
        let name = spec.name();
        let (object, step) = match spec {
            AttachmentWrite::CreateAttachment { fields, entries, .. } => {
                let spec = MountpointS3PodAttachmentSpec::new(fields, entries);
                let resource = api::attachment_resource(self.settings.keys.driver());
                let mut object = MountpointS3PodAttachment::new(name, &resource, spec);
                let label = (self.settings.keys.driver_version(), self.settings.driver_version.clone());
                object.metadata.labels = Some(BTreeMap::from([label]));
                (call(self.attachments.create(&PostParams::default(), &object)).await, Failpoint::AttachmentCreated)
            }
            AttachmentWrite::EditAttachment { resource_version, entries, .. } => {
                let known = cache.lock().attachments_of(key).find(|it| it.attachment.name == name).cloned();
                let removed = known.iter().flat_map(|it| it.attachment.entries.keys());
                let patch = Patch::Merge(entries_patch(resource_version, removed, entries));
                let parameters = PatchParams::default();
                (call(self.attachments.patch(name, &parameters, &patch)).await, Failpoint::AttachmentEdited)
            }
        };
        let object = object.map_err(|cause| {
            let name = name.to_owned();
            // Deleted by another writer; if it is still needed, the next reconciliation creates it.
            if cause.is_lost_race() || cause.is_not_found() {
                ApplyError::LostRace { name }
            } else {
                ApplyError::WriteAttachment { name, cause }
            }
        })?;
        self.failpoints.hit(step);
        tracing::info!(attachment = name, node = key.node, volume = %key.persistent_volume, changes = ?spec.changes(), "attachment written");
        let version = object.metadata.resource_version.clone().unwrap_or_default();
        if let Some(fact) = facts::attachment(&object) {
            cache.lock().update_attachments(WatchUpdate::Changed(fact));
        }
        Ok(version)
    }

    async fn start(
        &self,
        cache: &Mutex<Cache>,
        key: &ReconcileKey,
        PodName { name, source }: PodName<'_>,
        workload: &WorkloadUid,
    ) -> Result<(), ApplyError> {
        // If the volume was deleted meanwhile, the next reconciliation reports it.
        let Some(volume) = cache.lock().volume(&key.persistent_volume).cloned() else {
            return Ok(());
        };
        let shape =
            PodShape::parse(&volume.attributes, &volume.mount_options).map_err(|cause| ApplyError::Shape { cause })?;
        let node_uid = if name == source {
            self.uncached.node_uid(&key.node).await
        } else {
            let node = self.uncached.node(&key.node).await;
            if node.as_ref().is_some_and(|it| it.is_cordoned) {
                return Err(ApplyError::Cordoned { name: name.to_owned(), node: key.node.clone() });
            }
            node.map(|it| it.uid)
        };
        let has_headroom = cache.lock().has_headroom(workload);
        let parameters = PodParameters {
            name,
            source,
            node_uid: node_uid.as_deref(),
            node: &key.node,
            workload,
            persistent_volume: &key.persistent_volume,
            volume_id: &volume.handle,
            shape: &shape,
            room: if has_headroom { Room::Reserved } else { Room::NotReserved },
        };
        let pod = mountpoint_pod(&self.settings, &parameters);
        match call(self.pods.create(&PostParams::default(), &pod)).await {
            Ok(pod) => {
                self.failpoints.hit(Failpoint::PodStarted);
                tracing::info!(pod = name, node = key.node, volume = %key.persistent_volume, "Mountpoint Pod started");
                self.update_pod(cache, &pod);
                Ok(())
            }
            Err(cause) if cause.is_already_exists() => Ok(()),
            Err(cause) => Err(ApplyError::StartPod { name: name.to_owned(), workload: workload.clone(), cause }),
        }
    }

    async fn adopt(
        &self,
        cache: &Mutex<Cache>,
        key: &ReconcileKey,
        PodName { name, source }: PodName<'_>,
        PodVersion { uid, resource_version }: PodVersion<'_>,
        workload: &WorkloadUid,
    ) -> Result<(), ApplyError> {
        // If the volume was deleted meanwhile, the next reconciliation reports it.
        let Some(volume) = cache.lock().volume(&key.persistent_volume).cloned() else {
            return Ok(());
        };
        let parameters = PodParameters {
            name,
            source,
            node_uid: None,
            node: &key.node,
            workload,
            persistent_volume: &key.persistent_volume,
            volume_id: &volume.handle,
            shape: &PodShape::default(),
            room: Room::NotReserved,
        };
        let patch = Patch::Merge(adoption(&self.settings, &parameters, uid, resource_version));
        match call(self.pods.patch(name, &PatchParams::default(), &patch)).await {
            Ok(pod) => {
                self.failpoints.hit(Failpoint::PodAdopted);
                tracing::info!(pod = name, source, node = key.node, volume = %key.persistent_volume, "warm Mountpoint Pod adopted");
                self.update_pod(cache, &pod);
                Ok(())
            }
            Err(cause) if cause.is_not_found() || cause.is_lost_race() => {
                Err(ApplyError::LostWarmPod { name: name.to_owned() })
            }
            Err(cause) => Err(ApplyError::AdoptPod { name: name.to_owned(), cause }),
        }
    }

    /// What Mountpoint Pods for a volume are created from; `None` if none can be created.
    pub fn template(&self, volume: &VolumeFacts) -> Option<PodTemplate> {
        let shape = PodShape::parse(&volume.attributes, &volume.mount_options).ok()?;
        Some(template(&self.settings, &shape))
    }

    async fn retire(
        &self,
        cache: &Mutex<Cache>,
        key: &ReconcileKey,
        PodName { name, source }: PodName<'_>,
        uid: &str,
        creator: CreatorState,
    ) -> Result<(), ApplyError> {
        let observed = cache.lock().observe(key);
        let uncached =
            self.uncached.read(key, observed, creator).await.map_err(|cause| ApplyError::UncachedReader { cause })?;
        if !may_retire(&uncached, source) {
            tracing::debug!(pod = name, "Mountpoint Pod is in use after all");
            return Ok(());
        }
        // The UID is a precondition: the next Pod under this name is another one.
        let patch =
            json!({ "metadata": { "uid": uid, "annotations": { self.settings.keys.needs_unmount(): "true" } } });
        match call(self.pods.patch(name, &PatchParams::default(), &Patch::Merge(patch))).await {
            Ok(pod) => {
                self.failpoints.hit(Failpoint::PodRetired);
                tracing::info!(pod = name, node = key.node, volume = %key.persistent_volume, "Mountpoint Pod is no longer needed");
                self.update_pod(cache, &pod);
                Ok(())
            }
            Err(cause) if cause.is_not_found() || cause.is_lost_race() => Ok(()),
            Err(cause) => Err(ApplyError::RetirePod { name: name.to_owned(), cause }),
        }
    }

    pub async fn delete_pod(&self, name: &str, uid: &str, resource_version: &str) -> Result<(), ApplyError> {
        let preconditions =
            Preconditions { uid: Some(uid.to_owned()), resource_version: Some(resource_version.to_owned()) };
        let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        match call(self.pods.delete(name, &parameters)).await {
            Ok(_) => {
                self.failpoints.hit(Failpoint::PodDeleted);
                tracing::info!(pod = name, "Mountpoint Pod deleted");
                Ok(())
            }
            // It changed: the watch reports it, and the key is reconciled again.
            Err(cause) if cause.is_not_found() || cause.is_lost_race() => Ok(()),
            Err(cause) => Err(ApplyError::DeletePod { name: name.to_owned(), cause }),
        }
    }

    async fn delete_attachment(&self, name: &str, resource_version: &str) -> Result<(), ApplyError> {
        let preconditions = Preconditions { uid: None, resource_version: Some(resource_version.to_owned()) };
        let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        match call(self.attachments.delete(name, &parameters)).await {
            Ok(_) => {
                self.failpoints.hit(Failpoint::AttachmentDeleted);
                tracing::info!(attachment = name, "attachment deleted");
                Ok(())
            }
            Err(cause) if cause.is_not_found() || cause.is_lost_race() => Ok(()),
            Err(cause) => Err(ApplyError::DeleteAttachment { name: name.to_owned(), cause }),
        }
    }

    pub fn update_pod(&self, cache: &Mutex<Cache>, pod: &Pod) {
        if let Some(fact) = facts::mountpoint_pod_facts(&self.settings.keys, pod) {
            cache.lock().update_pods(WatchUpdate::Changed(fact));
        }
    }
}

/// Replaces all entries if the object still has this version. A merge patch keeps what it does not name, so
/// entries that are removed are set to null.
fn entries_patch<'a>(version: &str, known: impl IntoIterator<Item = &'a String>, entries: &Entries) -> Value {
    let removed = known.into_iter().map(|it| (it.clone(), Value::Null));
    let kept = entries.iter().map(|(pod, entries)| {
        let workloads: Vec<WorkloadAttachment> = entries.iter().map(WorkloadAttachment::new).collect();
        (pod.clone(), json!(workloads))
    });
    let all: serde_json::Map<String, Value> = removed.chain(kept).collect();
    json!({ "metadata": { "resourceVersion": version }, "spec": { "mountpointS3PodAttachments": all } })
}
