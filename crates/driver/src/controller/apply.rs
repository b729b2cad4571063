//! Does what was decided: each step is one call of the API server that may be repeated, by us or by anybody else.
//!
//! The order is the decision's own: attachments by compare-and-swap, then Pods, then deletions with preconditions. Facts that
//! only a cache vouches for are read again, without one, before anything is written that depends on them.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Api, Client};
use s3csi_core::WorkloadUid;
use s3csi_core::attachment::{Creator, Decision, Deletion, Entries, PodStep, Precondition, SpecWrite, may_retire};
use s3csi_core::mountpoint_pod::{InvalidPodShape, PodShape};
use serde_json::{Value, json};

use super::cache::{Cache, News, Unit};
use super::facts;
use super::fresh::{Fresh, FreshError};
use super::pod::{PodOrder, PodSettings, mountpoint_pod};
use super::steps::{Step, Steps};
use crate::api::call::{CallError, call};
use crate::api::{self, MountpointS3PodAttachment, MountpointS3PodAttachmentSpec, WorkloadAttachment};

/// Everything that steps need.
pub struct Apply {
    pub attachments: Api<MountpointS3PodAttachment>,
    pub pods: Api<Pod>,
    pub settings: PodSettings,
    pub fresh: Fresh,
    pub steps: Steps,
}

/// Why a decision was not carried out to its end. The next look decides anew.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    #[error("attachment {name} was changed by somebody else meanwhile")]
    LostRace { name: String },

    #[error("failed to write attachment {name}")]
    WriteAttachment {
        name: String,
        #[source]
        cause: CallError,
    },

    #[error("failed to make sure that nobody needs what looks unused")]
    Fresh {
        #[source]
        cause: FreshError,
    },

    #[error("workload {workload} lives, although the watch has not told so yet")]
    StaleLives { workload: WorkloadUid },

    #[error("no Mountpoint Pod can be made for the volume")]
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

    #[error("failed to ask for the end of Mountpoint Pod {name}")]
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
    /// Whether attachments were not written as decided.
    pub fn is_about_specs(&self) -> bool {
        match self {
            // Reads without a cache come before writes of specs, and before a Pod is retired: both ways, nobody was told.
            Self::Fresh { .. } | Self::LostRace { .. } | Self::WriteAttachment { .. } | Self::StaleLives { .. } => true,
            Self::Shape { .. }
            | Self::StartPod { .. }
            | Self::RetirePod { .. }
            | Self::DeletePod { .. }
            | Self::DeleteAttachment { .. } => false,
        }
    }
}

impl Apply {
    pub fn new(client: &Client, settings: PodSettings, steps: Steps) -> Self {
        let driver = settings.names.driver().to_owned();
        Self {
            attachments: api::attachments(client.clone(), &driver),
            pods: Api::namespaced(client.clone(), &settings.namespace),
            fresh: Fresh::new(client, &driver, &settings.namespace),
            settings,
            steps,
        }
    }

    /// Carries a decision out. What was written is told to the cache at once. The errors are those of steps that stand on
    /// their own; one alone means that nothing after it was done.
    pub async fn run(&self, cache: &Mutex<Cache>, unit: &Unit, decision: &Decision) -> Vec<ApplyError> {
        let mut written = BTreeMap::new();
        for spec in &decision.specs {
            match self.write_spec(cache, unit, spec).await {
                Ok(version) => written.insert(spec.name(), version),
                Err(error) => return vec![error],
            };
        }
        let mut errors = Vec::new();
        for step in &decision.pods {
            let outcome = match step {
                PodStep::Start { name, attachment: _, workload } => self.start(cache, unit, name, workload).await,
                PodStep::Retire { name, uid, creator } => self.retire(cache, unit, name, uid, *creator).await,
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
    async fn write_spec(&self, cache: &Mutex<Cache>, unit: &Unit, spec: &SpecWrite) -> Result<String, ApplyError> {
        let stale: Vec<&WorkloadUid> = spec.stale_workloads().collect();
        if !stale.is_empty() {
            let living = self.fresh.living_workloads(&unit.node).await.map_err(|cause| ApplyError::Fresh { cause })?;
            if let Some(workload) = stale.into_iter().find(|it| living.contains(*it)) {
                return Err(ApplyError::StaleLives { workload: workload.clone() });
            }
        }
        let name = spec.name();
        let (object, step) = match spec {
            SpecWrite::CreateAttachment { fields, entries, .. } => {
                let spec = MountpointS3PodAttachmentSpec::new(fields, entries);
                let resource = api::attachment_resource(self.settings.names.driver());
                let mut object = MountpointS3PodAttachment::new(name, &resource, spec);
                let label = (self.settings.names.driver_version(), self.settings.driver_version.clone());
                object.metadata.labels = Some(BTreeMap::from([label]));
                (call(self.attachments.create(&PostParams::default(), &object)).await, Step::AttachmentCreated)
            }
            SpecWrite::EditAttachment { resource_version, entries, .. } => {
                let known = lock(cache).attachments_of(unit).find(|it| it.attachment.name == name).cloned();
                let removed = known.iter().flat_map(|it| it.attachment.entries.keys());
                let patch = Patch::Merge(entries_patch(resource_version, removed, entries));
                let parameters = PatchParams::default();
                (call(self.attachments.patch(name, &parameters, &patch)).await, Step::AttachmentEdited)
            }
        };
        let object = object.map_err(|cause| {
            let name = name.to_owned();
            // One that is gone was removed by somebody else; whoever still needs it makes it anew.
            if cause.is_lost_race() || cause.is_not_found() {
                ApplyError::LostRace { name }
            } else {
                ApplyError::WriteAttachment { name, cause }
            }
        })?;
        self.steps.done(step);
        tracing::info!(attachment = name, node = unit.node, volume = %unit.persistent_volume, changes = ?spec.changes(), "attachment written");
        let version = object.metadata.resource_version.clone().unwrap_or_default();
        if let Some(fact) = facts::attachment(&object) {
            lock(cache).tell_attachments(News::Changed(fact));
        }
        Ok(version)
    }

    async fn start(
        &self,
        cache: &Mutex<Cache>,
        unit: &Unit,
        name: &str,
        workload: &WorkloadUid,
    ) -> Result<(), ApplyError> {
        // Decided a moment ago; if the volume is gone meanwhile, the next look says so.
        let Some(volume) = lock(cache).volume(&unit.persistent_volume).cloned() else {
            return Ok(());
        };
        let shape =
            PodShape::parse(&volume.attributes, &volume.mount_options).map_err(|cause| ApplyError::Shape { cause })?;
        let order = PodOrder {
            name,
            node: &unit.node,
            workload,
            persistent_volume: &unit.persistent_volume,
            volume_id: &volume.handle,
            shape: &shape,
        };
        let pod = mountpoint_pod(&self.settings, &order);
        match call(self.pods.create(&PostParams::default(), &pod)).await {
            Ok(pod) => {
                self.steps.done(Step::PodStarted);
                tracing::info!(pod = name, node = unit.node, volume = %unit.persistent_volume, "Mountpoint Pod started");
                self.tell_pod(cache, &pod);
                Ok(())
            }
            Err(cause) if cause.is_already_there() => Ok(()),
            Err(cause) => Err(ApplyError::StartPod { name: name.to_owned(), workload: workload.clone(), cause }),
        }
    }

    async fn retire(
        &self,
        cache: &Mutex<Cache>,
        unit: &Unit,
        name: &str,
        uid: &str,
        creator: Creator,
    ) -> Result<(), ApplyError> {
        let observed = lock(cache).observe(unit);
        let fresh = self.fresh.read(unit, observed, creator).await.map_err(|cause| ApplyError::Fresh { cause })?;
        if !may_retire(&fresh, name) {
            tracing::debug!(pod = name, "Mountpoint Pod is in use after all");
            return Ok(());
        }
        // The UID is a precondition: the next Pod under this name is another one.
        let patch =
            json!({ "metadata": { "uid": uid, "annotations": { self.settings.names.needs_unmount(): "true" } } });
        match call(self.pods.patch(name, &PatchParams::default(), &Patch::Merge(patch))).await {
            Ok(pod) => {
                self.steps.done(Step::PodRetired);
                tracing::info!(pod = name, node = unit.node, volume = %unit.persistent_volume, "Mountpoint Pod is no longer needed");
                self.tell_pod(cache, &pod);
                Ok(())
            }
            Err(cause) if cause.is_not_found() || cause.is_lost_race() => Ok(()),
            Err(cause) => Err(ApplyError::RetirePod { name: name.to_owned(), cause }),
        }
    }

    async fn delete_pod(&self, name: &str, uid: &str, resource_version: &str) -> Result<(), ApplyError> {
        let preconditions =
            Preconditions { uid: Some(uid.to_owned()), resource_version: Some(resource_version.to_owned()) };
        let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        match call(self.pods.delete(name, &parameters)).await {
            Ok(_) => {
                self.steps.done(Step::PodDeleted);
                tracing::info!(pod = name, "Mountpoint Pod deleted");
                Ok(())
            }
            // It changed: the watch tells, and we look again.
            Err(cause) if cause.is_not_found() || cause.is_lost_race() => Ok(()),
            Err(cause) => Err(ApplyError::DeletePod { name: name.to_owned(), cause }),
        }
    }

    async fn delete_attachment(&self, name: &str, resource_version: &str) -> Result<(), ApplyError> {
        let preconditions = Preconditions { uid: None, resource_version: Some(resource_version.to_owned()) };
        let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        match call(self.attachments.delete(name, &parameters)).await {
            Ok(_) => {
                self.steps.done(Step::AttachmentDeleted);
                tracing::info!(attachment = name, "attachment deleted");
                Ok(())
            }
            Err(cause) if cause.is_not_found() || cause.is_lost_race() => Ok(()),
            Err(cause) => Err(ApplyError::DeleteAttachment { name: name.to_owned(), cause }),
        }
    }

    fn tell_pod(&self, cache: &Mutex<Cache>, pod: &Pod) {
        if let Some(fact) = facts::started_pod(&self.settings.names, pod) {
            lock(cache).tell_pods(News::Changed(fact));
        }
    }
}

/// All entries as they shall be, if the object still has this version. In a merge patch what is not named stays, so
/// entries that end are named as nothing.
fn entries_patch<'a>(version: &str, known: impl IntoIterator<Item = &'a String>, entries: &Entries) -> Value {
    let removed = known.into_iter().map(|it| (it.clone(), Value::Null));
    let kept = entries.iter().map(|(pod, entries)| {
        let workloads: Vec<WorkloadAttachment> = entries.iter().map(WorkloadAttachment::new).collect();
        (pod.clone(), json!(workloads))
    });
    let all: serde_json::Map<String, Value> = removed.chain(kept).collect();
    json!({ "metadata": { "resourceVersion": version }, "spec": { "mountpointS3PodAttachments": all } })
}

pub(super) fn lock(cache: &Mutex<Cache>) -> std::sync::MutexGuard<'_, Cache> {
    // A panic in the middle of a change leaves at worst old facts, which are harmless.
    cache.lock().unwrap_or_else(PoisonError::into_inner)
}
