//! What people see: the status of attachments, and Events on workloads. Nothing depends on it, so it is written last, only
//! when it changed, and a failure is repaired by the next look.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};

use k8s_openapi::api::events::v1::Event;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use s3csi_core::WorkloadUid;
use s3csi_core::attachment::{Attachment, MountpointPod, Notice, Observed, Phase, Timestamp, WaitReason, Workload};
use serde_json::{Value, json};

use super::facts::ReportedAttachment;
use super::steps::{Step, Steps};
use crate::api::call::{CallError, call};
use crate::api::event::{Kind, Listener, Speaker, Telling, event};
use crate::api::{
    self, Condition, MountpointPodStatus, MountpointS3PodAttachment, MountpointS3PodAttachmentStatus, PodCondition,
};

pub struct Report {
    pub client: Client,
    pub attachments: Api<MountpointS3PodAttachment>,
    pub speaker: Speaker,
    pub steps: Steps,
    told: Mutex<HashMap<WorkloadUid, Telling>>,
}

#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    #[error("failed to write the status of attachment {name}")]
    Status {
        name: String,
        #[source]
        cause: CallError,
    },

    #[error("failed to write an Event for workload {workload}")]
    Event {
        workload: String,
        #[source]
        cause: CallError,
    },
}

impl Report {
    pub fn new(client: &Client, driver: &str, identity: &str, steps: Steps) -> Self {
        Self {
            attachments: api::attachments(client.clone(), driver),
            client: client.clone(),
            speaker: Speaker { component: format!("{driver}/controller"), instance: identity.to_owned() },
            steps,
            told: Mutex::default(),
        }
    }

    /// Writes the status of an attachment if it is not what it should be.
    pub async fn status(
        &self,
        observed: &Observed,
        ReportedAttachment { attachment, status: known }: &ReportedAttachment,
        mounted: &BTreeMap<String, PodCondition>,
        now: Timestamp,
    ) -> Result<Option<MountpointS3PodAttachment>, ReportError> {
        let status = status_of(observed, attachment, mounted, known.as_ref(), now);
        if known.as_ref() == Some(&status) {
            return Ok(None);
        }
        let mut patch = json!(status);
        // In a merge patch what is not named stays.
        for gone in known.iter().flat_map(|it| it.mountpoint_pods.keys()) {
            if !status.mountpoint_pods.contains_key(gone) {
                patch["mountpointPods"][gone] = Value::Null;
            }
        }
        let name = &attachment.name;
        let patch = Patch::Merge(json!({ "status": patch }));
        match call(self.attachments.patch_status(name, &PatchParams::default(), &patch)).await {
            Ok(object) => {
                self.steps.done(Step::StatusWritten);
                Ok(Some(object))
            }
            Err(cause) if cause.is_not_found() => Ok(None),
            Err(cause) => Err(ReportError::Status { name: name.clone(), cause }),
        }
    }

    /// Tells a workload something, unless that is what it was told last.
    pub async fn tell(&self, workload: &Workload, telling: Telling) -> Result<(), ReportError> {
        if self.told().get(&workload.uid) == Some(&telling) {
            return Ok(());
        }
        let listener = Listener {
            namespace: workload.namespace.clone(),
            name: workload.name.clone(),
            uid: workload.uid.as_str().to_owned(),
        };
        let event = event(&self.speaker, &listener, &telling);
        let events: Api<Event> = Api::namespaced(self.client.clone(), &workload.namespace);
        match call(events.create(&PostParams::default(), &event)).await {
            Ok(_) => self.steps.done(Step::EventWritten),
            // The namespace is being deleted, and the workload with it.
            Err(cause) if cause.is_not_found() || cause.is_end_of_namespace() => {}
            Err(cause) => {
                let workload = format!("{}/{}", workload.namespace, workload.name);
                return Err(ReportError::Event { workload, cause });
            }
        }
        self.told().insert(workload.uid.clone(), telling);
        Ok(())
    }

    /// Forgets what was told to workloads that are gone.
    pub fn forget(&self, is_gone: impl Fn(&WorkloadUid) -> bool) {
        self.told().retain(|uid, _| !is_gone(uid));
    }

    fn told(&self) -> std::sync::MutexGuard<'_, HashMap<WorkloadUid, Telling>> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `None` for what everybody goes through for a moment.
pub fn telling(notice: &Notice) -> Option<Telling> {
    let (kind, reason) = match notice {
        Notice::Waits { reason: WaitReason::NotRunning { trouble: None, .. }, .. } => return None,
        Notice::Assigned { .. } => (Kind::Normal, "MountpointPodAssigned"),
        Notice::Waits { reason, .. } if reason.passes_by_itself() => (Kind::Normal, "WaitingForMountpointPod"),
        Notice::Waits { .. } => (Kind::Warning, "VolumeNotServed"),
        Notice::Replaces { .. } => (Kind::Warning, "MountpointPodReplaced"),
    };
    Some(Telling { kind, reason, text: notice.to_string() })
}

/// What should be written about an attachment.
fn status_of(
    observed: &Observed,
    attachment: &Attachment,
    nodes_say: &BTreeMap<String, PodCondition>,
    known: Option<&MountpointS3PodAttachmentStatus>,
    now: Timestamp,
) -> MountpointS3PodAttachmentStatus {
    let pods: BTreeMap<&str, &MountpointPod> =
        observed.mountpoint_pods.iter().map(|it| (it.name.as_str(), it)).collect();
    let (mut ready, mut mounted) = (0, 0);
    let mut mountpoint_pods = BTreeMap::new();
    for name in attachment.entries.keys() {
        let seen = [readiness(pods.get(name.as_str()).copied()), mountedness(nodes_say.get(name))];
        ready += u32::from(seen[0].status == "True");
        mounted += u32::from(seen[1].status == "True");
        let known = known.and_then(|it| it.mountpoint_pods.get(name)).map(|it| it.conditions.as_slice());
        let conditions = seen.into_iter().map(|it| condition(it, known.unwrap_or_default(), now)).collect();
        mountpoint_pods.insert(name.clone(), MountpointPodStatus { conditions });
    }
    let count = |number: usize| i32::try_from(number).unwrap_or(i32::MAX);
    MountpointS3PodAttachmentStatus {
        workloads: count(attachment.entries.values().map(Vec::len).sum()),
        mountpoint_pod_count: count(attachment.entries.len()),
        ready: format!("{ready}/{}", attachment.entries.len()),
        mounted: format!("{mounted}/{}", attachment.entries.len()),
        mountpoint_pods,
    }
}

/// A condition without a time.
struct Seen {
    kind: &'static str,
    status: String,
    reason: String,
    message: String,
}

fn readiness(pod: Option<&MountpointPod>) -> Seen {
    let (status, reason, message) = match pod {
        None => ("False", "Missing", "the Pod does not exist yet".to_owned()),
        Some(pod) if pod.is_terminating || pod.is_retired => ("False", "Ending", "the Pod is ending".to_owned()),
        Some(pod) => match pod.phase {
            Phase::Running => ("True", "Running", String::new()),
            Phase::Pending => ("False", "Pending", pod.trouble.clone().unwrap_or_default()),
            Phase::Unknown => ("Unknown", "NodeSilent", pod.trouble.clone().unwrap_or_default()),
            Phase::Failed => ("False", "Failed", pod.trouble.clone().unwrap_or_default()),
            Phase::Succeeded => ("False", "Ended", pod.trouble.clone().unwrap_or_default()),
        },
    };
    Seen { kind: "Ready", status: status.to_owned(), reason: reason.to_owned(), message }
}

/// Only the node sees it, and writes it on the Mountpoint Pod.
fn mountedness(node_says: Option<&PodCondition>) -> Seen {
    let PodCondition { status, reason, message } = node_says.cloned().unwrap_or_else(|| PodCondition {
        status: "Unknown".to_owned(),
        reason: "NotReported".to_owned(),
        message: "the node has mounted nothing yet, or has not said so".to_owned(),
    });
    Seen { kind: "Mounted", status, reason, message }
}

fn condition(seen: Seen, known: &[Condition], now: Timestamp) -> Condition {
    let Seen { kind, status, reason, message } = seen;
    let unchanged = known.iter().find(|it| it.kind == kind && it.status == status);
    Condition {
        kind: kind.to_owned(),
        last_transition_time: unchanged.map_or_else(|| api::time(now), |it| it.last_transition_time.clone()),
        status,
        reason,
        message,
    }
}
