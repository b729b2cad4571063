//! The status of attachments, and Events on workloads. Nothing depends on them, so they are written last and only
//! when they changed; the next reconciliation repairs a failure.

use std::collections::BTreeMap;

use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use s3csi_core::PvName;
use s3csi_core::attachment::{
    Attachment, MountpointPod, Notice, ObservedState, PodPhase, Timestamp, WaitReason, Workload, newest_first,
};
use s3csi_core::headroom::HeadroomNotice;
use serde_json::{Value, json};

use super::facts::AttachmentWithStatus;
use super::failpoints::{Failpoint, Failpoints};
use crate::api::call::{CallError, call};
use crate::api::recorder::{EventDetails, EventLimits, EventRecorder, EventType, PodReference, ReportingController};
use crate::api::{
    self, Condition, MountpointPodStatus, MountpointS3PodAttachment, MountpointS3PodAttachmentStatus, PodCondition,
};
use crate::metrics::EventOutcome;

pub struct StatusReporter {
    attachments: Api<MountpointS3PodAttachment>,
    pub events: EventRecorder,
    failpoints: Failpoints,
}

#[derive(Debug, thiserror::Error)]
pub enum StatusError {
    #[error("failed to write the status of attachment {name}")]
    Status {
        name: String,
        #[source]
        cause: CallError,
    },
}

impl StatusReporter {
    /// The second part writes the Events and must be run.
    pub fn new(
        client: &Client,
        driver: &str,
        identity: &str,
        failpoints: Failpoints,
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let reporter = ReportingController {
            name: format!("{driver}/controller"),
            instance: identity.to_owned(),
            limits: EventLimits::CONTROLLER,
        };
        let on_outcome = move |outcome| {
            if outcome == EventOutcome::Written {
                failpoints.hit(Failpoint::EventWritten);
            }
        };
        let (events, writer) = EventRecorder::new(client.clone(), reporter, on_outcome);
        (Self { attachments: api::attachments(client.clone(), driver), events, failpoints }, writer)
    }

    /// Writes the status of an attachment if it has changed.
    pub async fn write(
        &self,
        observed: &ObservedState,
        AttachmentWithStatus { attachment, status: known }: &AttachmentWithStatus,
        mounted: &BTreeMap<String, PodCondition>,
        now: Timestamp,
    ) -> Result<Option<MountpointS3PodAttachment>, StatusError> {
        let status = status_of(observed, attachment, mounted, known.as_ref(), now);
        if known.as_ref() == Some(&status) {
            return Ok(None);
        }
        let mut patch = json!(status);
        // A merge patch keeps what it does not name.
        for gone in known.iter().flat_map(|it| it.mountpoint_pods.keys()) {
            if !status.mountpoint_pods.contains_key(gone) {
                patch["mountpointPods"][gone] = Value::Null;
            }
        }
        let name = &attachment.name;
        let patch = Patch::Merge(json!({ "status": patch }));
        match call(self.attachments.patch_status(name, &PatchParams::default(), &patch)).await {
            Ok(object) => {
                self.failpoints.hit(Failpoint::StatusWritten);
                Ok(Some(object))
            }
            Err(cause) if cause.is_not_found() => Ok(None),
            Err(cause) => Err(StatusError::Status { name: name.clone(), cause }),
        }
    }

    /// Records an Event on the workload that the notice is about.
    pub fn notice(&self, workload: &Workload, volume: &PvName, notice: &Notice) {
        let (severity, reason) = match notice {
            // Every workload goes through this for a moment.
            Notice::Waits { reason: WaitReason::NotRunning { problem: None, .. }, .. } => return,
            Notice::Assigned { .. } => (EventType::Normal, "MountpointPodAssigned"),
            Notice::Waits { reason, .. } if reason.passes_by_itself() => (EventType::Normal, "WaitingForMountpointPod"),
            Notice::Waits { .. } => (EventType::Warning, "VolumeNotServed"),
            Notice::Replaces { .. } => (EventType::Warning, "MountpointPodReplaced"),
        };
        let details = EventDetails { severity, reason, subject: volume.to_string(), note: notice.to_string() };
        match notice {
            Notice::Assigned { .. } | Notice::Replaces { .. } => self.events.record(&reference(workload), details),
            Notice::Waits { .. } => self.events.record_condition(&reference(workload), details),
        }
    }

    /// Records that the Mountpoint Pod of this workload cannot be created.
    pub fn pod_not_created(&self, workload: &Workload, volume: &PvName, note: String) {
        let (severity, reason) = (EventType::Warning, "MountpointPodNotCreated");
        let details = EventDetails { severity, reason, subject: volume.to_string(), note };
        self.events.record_condition(&reference(workload), details);
    }

    /// Records why a workload keeps its scheduling gate for now.
    pub fn headroom_waits(&self, workload: &Workload, notice: &HeadroomNotice) {
        let details = EventDetails {
            severity: EventType::Normal,
            reason: "WaitingForClaims",
            subject: "headroom".to_owned(),
            note: notice.to_string(),
        };
        self.events.record_condition(&reference(workload), details);
    }

    /// Records that no room can be reserved for the Mountpoint Pods of this workload, which keeps its scheduling gate.
    pub fn headroom_not_reserved(&self, workload: &Workload, note: String) {
        let (severity, reason) = (EventType::Warning, "HeadroomNotReserved");
        let details = EventDetails { severity, reason, subject: "headroom".to_owned(), note };
        self.events.record_condition(&reference(workload), details);
    }
}

fn reference(workload: &Workload) -> PodReference {
    PodReference {
        namespace: workload.namespace.clone(),
        name: workload.name.clone(),
        uid: workload.uid.as_str().to_owned(),
    }
}

/// The status that an attachment should have.
fn status_of(
    observed: &ObservedState,
    attachment: &Attachment,
    node_conditions: &BTreeMap<String, PodCondition>,
    known: Option<&MountpointS3PodAttachmentStatus>,
    now: Timestamp,
) -> MountpointS3PodAttachmentStatus {
    // Of several Pods of a source the one that serves counts.
    let pod_of = |source: &str| {
        let of_source = observed.mountpoint_pods.iter().filter(|it| it.source == source);
        let pods = newest_first(of_source, MountpointPod::identity);
        pods.iter().find(|it| it.is_mounted && !it.is_terminating).or_else(|| pods.first()).copied()
    };
    let (mut ready, mut mounted) = (0, 0);
    let mut mountpoint_pods = BTreeMap::new();
    for name in attachment.entries.keys() {
        let seen = [ready_condition(pod_of(name)), mounted_condition(node_conditions.get(name))];
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

/// A condition without its time.
struct ObservedCondition {
    kind: &'static str,
    status: String,
    reason: String,
    message: String,
}

fn ready_condition(pod: Option<&MountpointPod>) -> ObservedCondition {
    let (status, reason, message) = match pod {
        None => ("False", "Missing", "the Pod does not exist yet".to_owned()),
        Some(pod) if pod.is_terminating || pod.is_retired => ("False", "Ending", "the Pod is terminating".to_owned()),
        Some(pod) => match pod.phase {
            PodPhase::Running => ("True", "Running", String::new()),
            PodPhase::Pending => ("False", "Pending", pod.problem.clone().unwrap_or_default()),
            PodPhase::Unknown => ("Unknown", "NodeSilent", pod.problem.clone().unwrap_or_default()),
            PodPhase::Failed => ("False", "Failed", pod.problem.clone().unwrap_or_default()),
            PodPhase::Succeeded => ("False", "Ended", pod.problem.clone().unwrap_or_default()),
        },
    };
    ObservedCondition { kind: "Ready", status: status.to_owned(), reason: reason.to_owned(), message }
}

/// Only the node knows it, and writes it on the Mountpoint Pod.
fn mounted_condition(reported: Option<&PodCondition>) -> ObservedCondition {
    let PodCondition { status, reason, message } = reported.cloned().unwrap_or_else(|| PodCondition {
        status: "Unknown".to_owned(),
        reason: "NotReported".to_owned(),
        message: "the node has not mounted it yet, or has not reported".to_owned(),
    });
    ObservedCondition { kind: "Mounted", status, reason, message }
}

fn condition(observed: ObservedCondition, known: &[Condition], now: Timestamp) -> Condition {
    let ObservedCondition { kind, status, reason, message } = observed;
    let unchanged = known.iter().find(|it| it.kind == kind && it.status == status);
    Condition {
        kind: kind.to_owned(),
        last_transition_time: unchanged.map_or_else(|| api::time(now), |it| it.last_transition_time.clone()),
        status,
        reason,
        message,
    }
}
