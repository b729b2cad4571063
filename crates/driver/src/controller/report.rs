//! What people see: the status of attachments, and Events on workloads. Nothing depends on it, so it is written last, only
//! when it changed, and a failure is repaired by the next look.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp as Moment;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use s3csi_core::WorkloadUid;
use s3csi_core::attachment::{
    Activity, Attachment, MountpointPod, Notice, Observed, Phase, Timestamp, WaitReason, Workload,
};
use serde_json::{Value, json};

use super::call::{CallError, call};
use super::facts::ReportedAttachment;
use super::steps::{Step, Steps};
use crate::api::{self, Condition, MountpointPodStatus, MountpointS3PodAttachment, MountpointS3PodAttachmentStatus};

pub struct Report {
    pub client: Client,
    pub attachments: Api<MountpointS3PodAttachment>,
    /// Who we are: the component, and which one of several.
    pub component: String,
    pub identity: String,
    pub steps: Steps,
    told: Mutex<HashMap<WorkloadUid, Telling>>,
}

/// What a workload is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Telling {
    pub kind: Kind,
    pub reason: &'static str,
    pub text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Normal,
    Warning,
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

/// The API server takes no longer note.
const LONGEST_NOTE: usize = 1024;

impl Report {
    pub fn new(client: &Client, driver: &str, identity: &str, steps: Steps) -> Self {
        Self {
            attachments: api::attachments(client.clone(), driver),
            client: client.clone(),
            component: format!("{driver}/controller"),
            identity: identity.to_owned(),
            steps,
            told: Mutex::default(),
        }
    }

    /// Writes the status of an attachment if it is not what it should be.
    pub async fn status(
        &self,
        observed: &Observed,
        ReportedAttachment { attachment, status: known }: &ReportedAttachment,
        now: Timestamp,
    ) -> Result<Option<MountpointS3PodAttachment>, ReportError> {
        let status = status_of(observed, attachment, known.as_ref(), now);
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
        let event = self.event(workload, &telling);
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

    fn event(&self, workload: &Workload, Telling { kind, reason, text }: &Telling) -> Event {
        Event {
            metadata: ObjectMeta {
                generate_name: Some("s3csi-".to_owned()),
                namespace: Some(workload.namespace.clone()),
                ..ObjectMeta::default()
            },
            action: Some("Mount".to_owned()),
            event_time: Some(MicroTime(Moment::now())),
            note: Some(shortened(text)),
            reason: Some((*reason).to_owned()),
            regarding: Some(ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Pod".to_owned()),
                name: Some(workload.name.clone()),
                namespace: Some(workload.namespace.clone()),
                uid: Some(workload.uid.as_str().to_owned()),
                ..ObjectReference::default()
            }),
            reporting_controller: Some(self.component.clone()),
            reporting_instance: Some(self.identity.clone()),
            type_: Some(format!("{kind:?}")),
            ..Event::default()
        }
    }
}

impl Telling {
    /// `None` for what everybody goes through for a moment.
    pub fn new(notice: &Notice) -> Option<Self> {
        let (kind, reason) = match notice {
            Notice::Waits { reason: WaitReason::NotRunning { trouble: None, .. }, .. } => return None,
            Notice::Assigned { .. } => (Kind::Normal, "MountpointPodAssigned"),
            Notice::Waits { reason, .. } if reason.passes_by_itself() => (Kind::Normal, "WaitingForMountpointPod"),
            Notice::Waits { .. } => (Kind::Warning, "VolumeNotServed"),
            Notice::Replaces { .. } => (Kind::Warning, "MountpointPodReplaced"),
        };
        Some(Self { kind, reason, text: notice.to_string() })
    }
}

/// What should be written about an attachment.
fn status_of(
    observed: &Observed,
    attachment: &Attachment,
    known: Option<&MountpointS3PodAttachmentStatus>,
    now: Timestamp,
) -> MountpointS3PodAttachmentStatus {
    let pods: BTreeMap<&str, &MountpointPod> =
        observed.mountpoint_pods.iter().map(|it| (it.name.as_str(), it)).collect();
    let is_using =
        |uid: &WorkloadUid| observed.workloads.iter().any(|it| it.uid == *uid && it.activity == Activity::Using);
    let mut ready = 0;
    let mut mountpoint_pods = BTreeMap::new();
    for (name, entries) in &attachment.entries {
        let pod = pods.get(name.as_str()).copied();
        let is_used = entries.iter().any(|it| is_using(&it.workload));
        let seen = [readiness(pod), mountedness(is_used)];
        if seen[0].1 == "True" {
            ready += 1;
        }
        let known = known.and_then(|it| it.mountpoint_pods.get(name)).map(|it| it.conditions.as_slice());
        let conditions = seen.into_iter().map(|it| condition(it, known.unwrap_or_default(), now)).collect();
        mountpoint_pods.insert(name.clone(), MountpointPodStatus { conditions });
    }
    let count = |number: usize| i32::try_from(number).unwrap_or(i32::MAX);
    MountpointS3PodAttachmentStatus {
        workloads: count(attachment.entries.values().map(Vec::len).sum()),
        mountpoint_pod_count: count(attachment.entries.len()),
        ready: format!("{ready}/{}", attachment.entries.len()),
        mountpoint_pods,
    }
}

/// Type, status, reason, message.
type Seen = (&'static str, &'static str, &'static str, String);

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
    ("Ready", status, reason, message)
}

/// The node mounts before a workload's containers start: one that runs is the proof.
fn mountedness(is_used: bool) -> Seen {
    if is_used {
        ("Mounted", "True", "WorkloadRuns", String::new())
    } else {
        ("Mounted", "Unknown", "NoWorkloadRuns", "no workload runs on it yet".to_owned())
    }
}

fn condition((kind, status, reason, message): Seen, known: &[Condition], now: Timestamp) -> Condition {
    let unchanged = known.iter().find(|it| it.kind == kind && it.status == status);
    Condition {
        kind: kind.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message,
        last_transition_time: unchanged.map_or_else(|| api::time(now), |it| it.last_transition_time.clone()),
    }
}

fn shortened(text: &str) -> String {
    if text.len() <= LONGEST_NOTE {
        return text.to_owned();
    }
    let end = (0..=LONGEST_NOTE - '…'.len_utf8()).rev().find(|it| text.is_char_boundary(*it)).unwrap_or_default();
    format!("{}…", &text[..end])
}
