//! A decision under construction: what the attachments will say, and the actions collected so far.
//! The rules that fill it are functions in `attach` and `pods`.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::identifiers::WorkloadUid;
use crate::names::mountpoint_pod_name;

use super::decide::{ObservedState, PodOnNode};
use super::decision::{
    AttachmentChange, AttachmentWrite, Decision, Deletion, Notice, Placement, Precondition, WaitReason,
};
use super::facts::{Activity, Attachment, AttachmentFields, Entries, Entry, MountpointPod, PodPhase, Timestamp};
use super::identity::newest_first;

pub(super) struct Plan<'a> {
    pub observed: &'a ObservedState,
    pub now: Timestamp,
    pub workloads: BTreeMap<&'a WorkloadUid, &'a PodOnNode>,
    /// The Mountpoint Pods of each source, the newest first.
    pub pods: BTreeMap<&'a str, Vec<&'a MountpointPod>>,
    /// Warm Mountpoint Pods that fit the volume and are not taken yet, the best one last.
    pub warm_pods: Vec<&'a MountpointPod>,
    pub drafts: Vec<AttachmentDraft<'a>>,
    /// Mountpoint Pods whose entry this decision removes.
    pub released: BTreeSet<String>,
    pub decision: Decision,
}

/// What one attachment will say.
pub(super) struct AttachmentDraft<'a> {
    /// `None` if it will be created.
    pub observed: Option<&'a Attachment>,
    pub name: String,
    pub fields: AttachmentFields,
    pub entries: Entries,
    pub changes: Vec<AttachmentChange>,
}

impl<'a> Plan<'a> {
    pub fn new(observed: &'a ObservedState, now: Timestamp) -> Self {
        let draft = |it: &'a Attachment| AttachmentDraft {
            observed: Some(it),
            name: it.name.clone(),
            fields: it.fields.clone(),
            entries: it.entries.clone(),
            changes: Vec::new(),
        };
        let mut drafts: Vec<AttachmentDraft<'a>> = observed.attachments.iter().map(draft).collect();
        // The decision does not depend on the order of the list.
        drafts.sort_by(|one, other| one.name.cmp(&other.name));
        Self {
            observed,
            now,
            workloads: observed.workloads.iter().map(|it| (&it.uid, it)).collect(),
            pods: pods_by_source(&observed.mountpoint_pods),
            warm_pods: fitting_warm_pods(observed),
            drafts,
            released: BTreeSet::new(),
            decision: Decision::default(),
        }
    }

    pub fn own_pod_name(&self, workload: &WorkloadUid) -> String {
        mountpoint_pod_name(workload, &self.observed.persistent_volume)
    }

    /// The newest Mountpoint Pod of a source.
    pub fn newest_pod(&self, source: &str) -> Option<&'a MountpointPod> {
        self.pods.get(source)?.first().copied()
    }

    /// `None` for workloads that the cache does not know.
    pub fn activity(&self, workload: &WorkloadUid) -> Option<Activity> {
        match self.workloads.get(workload) {
            Some(workload) => Some(workload.activity),
            None => self.observed.gone.contains(workload).then_some(Activity::Finished),
        }
    }

    /// Whether a draft names the Mountpoint Pod.
    pub fn is_named(&self, mountpoint_pod: &str) -> bool {
        self.drafts.iter().any(|it| it.entries.contains_key(mountpoint_pod))
    }

    pub fn wait(&mut self, workload: &WorkloadUid, reason: WaitReason) {
        self.decision.notices.push(Notice::Waits { workload: workload.clone(), reason });
    }

    pub fn finish(self) -> Decision {
        let Self { drafts, mut decision, .. } = self;
        for AttachmentDraft { observed, name, fields, entries, changes } in drafts {
            let is_empty = entries.is_empty();
            let is_changed = !changes.is_empty();
            match observed {
                None => {
                    decision.attachment_writes.push(AttachmentWrite::CreateAttachment {
                        name: name.clone(),
                        fields,
                        entries,
                        changes,
                    });
                }
                Some(Attachment { resource_version, .. }) if is_changed => {
                    let resource_version = resource_version.clone();
                    let name = name.clone();
                    decision.attachment_writes.push(AttachmentWrite::EditAttachment {
                        name,
                        resource_version,
                        entries,
                        changes,
                    });
                }
                Some(_) => {}
            }
            if let Some(attachment) = observed
                && is_empty
                && !attachment.is_terminating
            {
                let precondition = if is_changed {
                    Precondition::AsWritten
                } else {
                    Precondition::ResourceVersion(attachment.resource_version.clone())
                };
                decision.deletions.push(Deletion::Attachment { name, precondition });
            }
        }
        decision
    }
}

impl AttachmentDraft<'_> {
    pub fn is_terminating(&self) -> bool {
        self.observed.is_some_and(|it| it.is_terminating)
    }

    pub fn attach(&mut self, workload: &WorkloadUid, mountpoint_pod: &str, placement: Placement, now: Timestamp) {
        let entry = Entry { workload: workload.clone(), attached_at: now };
        self.entries.entry(mountpoint_pod.to_owned()).or_default().push(entry);
        let mountpoint_pod = mountpoint_pod.to_owned();
        self.changes.push(AttachmentChange::Attach { workload: workload.clone(), mountpoint_pod, placement });
    }
}

/// One that runs is better than one that is about to, and an old one has had the time to start its mounter.
fn fitting_warm_pods(observed: &ObservedState) -> Vec<&MountpointPod> {
    let Some(template) = &observed.template else { return Vec::new() };
    let is_fitting = |it: &&MountpointPod| it.is_ready_for(template, &observed.driver_version);
    let mut pods: Vec<&MountpointPod> = observed.warm_pods.iter().filter(is_fitting).collect();
    pods.sort_by_key(|it| (it.phase == PodPhase::Running, Reverse(it.created_at), &it.name));
    pods
}

fn pods_by_source(pods: &[MountpointPod]) -> BTreeMap<&str, Vec<&MountpointPod>> {
    let mut by_source: BTreeMap<&str, Vec<&MountpointPod>> = BTreeMap::new();
    for pod in pods {
        by_source.entry(&pod.source).or_default().push(pod);
    }
    by_source.into_iter().map(|(source, pods)| (source, newest_first(pods, MountpointPod::identity))).collect()
}
