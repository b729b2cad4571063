//! What is known of this node's attachments and Mountpoint Pods, and which of them serves a workload. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use s3csi_core::attachment::{Attachment, Phase, assignment, is_mountpoint_pod_name};
use s3csi_core::identifiers::{PvName, WorkloadUid};

use crate::api::PodCondition;

/// The controller sets it to `true` when nobody is served by a Mountpoint Pod any more.
const NEEDS_UNMOUNT: &str = "needs-unmount";

#[derive(Debug)]
pub struct Facts {
    pub attachments: Known<Attachment>,
    pub pods: Known<MountpointPod>,
}

/// Objects of one kind by name, as far as they were seen.
#[derive(Debug)]
pub struct Known<T> {
    kind: &'static str,
    objects: BTreeMap<String, T>,
    is_complete: bool,
    /// Why they cannot be seen at the moment.
    trouble: Option<String>,
}

/// A Mountpoint Pod on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountpointPod {
    pub name: String,
    /// One plain path component: kubelet keeps the Pod's directory under it.
    pub uid: WorkloadUid,
    pub phase: Phase,
    pub is_terminating: bool,
    /// Annotated `needs-unmount`.
    pub is_retired: bool,
    /// What keeps it from running.
    pub trouble: String,
    /// What this node, or the plugin before us, has said of its source.
    pub mounted: Option<PodCondition>,
}

/// Why a workload has no running Mountpoint Pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Missing {
    Blind { kind: &'static str, trouble: String },
    Unassigned,
    Unseen { attachment: String, pod: String },
    NotRunning { pod: String, why: String },
    Ended { attachment: String, pod: String, how: &'static str },
    Leaving { attachment: String, pod: String },
}

impl Default for Facts {
    fn default() -> Self {
        Self { attachments: Known::new("mountpoints3podattachments"), pods: Known::new("pods") }
    }
}

impl Facts {
    /// The Mountpoint Pod that serves a workload, if it can be used now.
    pub fn find(&self, workload: &WorkloadUid, volume: &PvName) -> Result<&MountpointPod, Missing> {
        let of_volume = self.attachments.objects.values().filter(|it| it.fields.persistent_volume == *volume);
        let Some(assigned) = assignment(of_volume, workload) else {
            // What was not seen may be there.
            return Err(self.attachments.blindness().unwrap_or(Missing::Unassigned));
        };
        let (attachment, name) = (assigned.attachment.to_owned(), assigned.mountpoint_pod.to_owned());
        let Some(pod) = self.pods.get(&name) else {
            return Err(self.pods.blindness().unwrap_or(Missing::Unseen { attachment, pod: name }));
        };
        if pod.is_retired || pod.is_terminating {
            return Err(Missing::Leaving { attachment, pod: name });
        }
        match pod.phase {
            Phase::Running => Ok(pod),
            Phase::Pending | Phase::Unknown => Err(Missing::NotRunning { pod: name, why: pod.trouble.clone() }),
            Phase::Succeeded => Err(Missing::Ended { attachment, pod: name, how: "Succeeded" }),
            Phase::Failed => Err(Missing::Ended { attachment, pod: name, how: "Failed" }),
        }
    }
}

impl<T> Known<T> {
    const fn new(kind: &'static str) -> Self {
        Self { kind, objects: BTreeMap::new(), is_complete: false, trouble: None }
    }

    pub const fn kind(&self) -> &'static str {
        self.kind
    }

    pub fn get(&self, name: &str) -> Option<&T> {
        self.objects.get(name)
    }

    /// `None` as long as there may be more than was seen.
    pub fn all(&self) -> Option<impl Iterator<Item = &T>> {
        self.is_complete.then(|| self.objects.values())
    }

    /// Everything there is.
    pub fn replace(&mut self, objects: BTreeMap<String, T>) {
        self.objects = objects;
        self.is_complete = true;
        self.trouble = None;
    }

    pub fn insert(&mut self, name: String, object: T) {
        self.objects.insert(name, object);
        self.trouble = None;
    }

    pub fn remove(&mut self, name: &str) {
        self.objects.remove(name);
        self.trouble = None;
    }

    /// What is known stays, but may be out of date.
    pub fn fail(&mut self, trouble: String) {
        self.trouble = Some(trouble);
    }

    fn blindness(&self) -> Option<Missing> {
        let blind = |trouble: &str| Missing::Blind { kind: self.kind, trouble: trouble.to_owned() };
        match &self.trouble {
            Some(trouble) => Some(blind(trouble)),
            None if self.is_complete => None,
            None => Some(blind("it was not asked long enough")),
        }
    }
}

/// A Pod as plain data, if it is a Mountpoint Pod.
pub fn read_pod(pod: &Pod, driver_name: &str) -> Option<(String, MountpointPod)> {
    let name = pod.metadata.name.clone().filter(|it| is_mountpoint_pod_name(it))?;
    let annotation = format!("{driver_name}/{NEEDS_UNMOUNT}");
    let is_annotated =
        pod.metadata.annotations.as_ref().and_then(|it| it.get(&annotation)).is_some_and(|it| it == "true");
    let read = MountpointPod {
        name: name.clone(),
        uid: pod.metadata.uid.as_deref()?.parse().ok()?,
        phase: Phase::from_text(pod.status.as_ref().and_then(|it| it.phase.as_deref())),
        is_terminating: pod.metadata.deletion_timestamp.is_some(),
        is_retired: is_annotated,
        trouble: trouble(pod),
        mounted: PodCondition::read(pod, driver_name),
    };
    Some((name, read))
}

/// What keeps a Pod from running, in the words of the scheduler or of kubelet.
pub fn trouble(pod: &Pod) -> String {
    let said = |reason: Option<&str>, message: Option<&str>| match (reason, message) {
        (Some(reason), Some(message)) => Some(format!("{reason}: {message}")),
        (Some(text), None) | (None, Some(text)) => Some(text.to_owned()),
        (None, None) => None,
    };
    let status = pod.status.as_ref();
    let of_containers = || {
        let containers = status.and_then(|it| it.container_statuses.as_ref()).into_iter().flatten();
        containers
            .filter_map(|it| it.state.as_ref()?.waiting.as_ref())
            .find_map(|it| said(it.reason.as_deref(), it.message.as_deref()))
    };
    let of_scheduler = || {
        let conditions = status.and_then(|it| it.conditions.as_ref()).into_iter().flatten();
        conditions
            .filter(|it| it.type_ == "PodScheduled" && it.status == "False")
            .find_map(|it| said(it.reason.as_deref(), it.message.as_deref()))
    };
    let of_pod = || said(status?.reason.as_deref(), status?.message.as_deref());
    let phase = || status.and_then(|it| it.phase.clone()).unwrap_or_else(|| "nobody has reported on it yet".to_owned());
    of_containers().or_else(of_scheduler).or_else(of_pod).unwrap_or_else(phase)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{MountpointS3PodAttachment, attachment_facts};

    const WORKLOAD: &str = "46efe8aa-75d9-4b12-8fdd-0ce0c2cabd99";
    const POD: &str = "mp-55f7d2331f3149f00d62d7af839d4cee895e1c68a2f0d96ffd359f79";

    fn attachment() -> MountpointS3PodAttachment {
        from_json(&serde_json::json!({
            "apiVersion": "s3.csi.scality.com/v2",
            "kind": "MountpointS3PodAttachment",
            "metadata": { "name": "s3pa-1", "resourceVersion": "7" },
            "spec": {
                "nodeName": "node-1",
                "persistentVolumeName": "pv-1",
                "volumeID": "handle",
                "mountOptions": "allow-delete",
                "workloadFSGroup": "",
                "mountpointS3PodAttachments": {
                    POD: [
                        { "workloadPodUID": WORKLOAD, "attachmentTime": "2026-01-02T03:04:05Z" },
                    ],
                },
            },
        }))
    }

    fn pod(change: &serde_json::Value) -> Pod {
        let mut object = serde_json::json!({
            "metadata": { "name": POD, "uid": "11111111-1111-4111-8111-111111111111" },
            "status": { "phase": "Running" },
        });
        merge(&mut object, change);
        from_json(&object)
    }

    fn merge(object: &mut serde_json::Value, change: &serde_json::Value) {
        match (object, change) {
            (serde_json::Value::Object(object), serde_json::Value::Object(change)) => {
                for (key, value) in change {
                    merge(object.entry(key.clone()).or_insert(serde_json::Value::Null), value);
                }
            }
            (object, change) => *object = change.clone(),
        }
    }

    fn from_json<T: serde::de::DeserializeOwned>(value: &serde_json::Value) -> T {
        serde_json::from_value(value.clone()).unwrap()
    }

    fn facts(attachments: &[MountpointS3PodAttachment], pods: &[Pod]) -> Facts {
        let mut facts = Facts::default();
        let attachments = attachments.iter().filter_map(attachment_facts).map(|it| (it.name.clone(), it));
        facts.attachments.replace(attachments.collect());
        facts.pods.replace(pods.iter().filter_map(|it| read_pod(it, "s3.csi.scality.com")).collect());
        facts
    }

    #[track_caller]
    fn check(facts: &Facts, expected: Result<&str, Missing>) {
        let found = facts.find(&WORKLOAD.parse().unwrap(), &"pv-1".parse().unwrap());
        match expected {
            Ok(name) => assert_eq!(found.unwrap().name, name),
            Err(missing) => assert_eq!(found.unwrap_err(), missing),
        }
    }

    #[test]
    fn a_running_mountpoint_pod_is_found_by_the_attachment() {
        check(&facts(&[attachment()], &[pod(&serde_json::json!({}))]), Ok(POD));
    }

    #[test]
    fn without_an_entry_for_this_volume_nothing_is_assigned() {
        check(&facts(&[], &[pod(&serde_json::json!({}))]), Err(Missing::Unassigned));
        let mut other = attachment();
        other.spec.persistent_volume_name = "pv-2".to_owned();
        check(&facts(&[other], &[pod(&serde_json::json!({}))]), Err(Missing::Unassigned));
    }

    #[test]
    fn before_everything_was_seen_nothing_is_known_to_be_missing() {
        let trouble = "it was not asked long enough".to_owned();
        check(&Facts::default(), Err(Missing::Blind { kind: "mountpoints3podattachments", trouble }));
        let mut blind = facts(&[attachment()], &[]);
        blind.pods.fail("forbidden".to_owned());
        check(&blind, Err(Missing::Blind { kind: "pods", trouble: "forbidden".to_owned() }));
        // What was seen before the trouble counts.
        let mut lately = facts(&[attachment()], &[pod(&serde_json::json!({}))]);
        lately.pods.fail("no route".to_owned());
        lately.attachments.fail("no route".to_owned());
        check(&lately, Ok(POD));
    }

    #[test]
    fn a_mountpoint_pod_that_is_not_on_this_node_is_unseen() {
        let unseen = Missing::Unseen { attachment: "s3pa-1".to_owned(), pod: POD.to_owned() };
        check(&facts(&[attachment()], &[]), Err(unseen));
    }

    #[test]
    fn a_mountpoint_pod_that_cannot_be_used_says_why() {
        let with = |change: serde_json::Value| facts(&[attachment()], &[pod(&change)]);
        let not_running = |why: &str| Err(Missing::NotRunning { pod: POD.to_owned(), why: why.to_owned() });
        let ended = |how| Err(Missing::Ended { attachment: "s3pa-1".to_owned(), pod: POD.to_owned(), how });
        let leaving = || Err(Missing::Leaving { attachment: "s3pa-1".to_owned(), pod: POD.to_owned() });
        check(&with(serde_json::json!({ "status": { "phase": "Pending" } })), not_running("Pending"));
        check(&with(serde_json::json!({ "status": null })), not_running("nobody has reported on it yet"));
        let waiting = serde_json::json!({ "status": { "phase": "Pending", "containerStatuses": [{
            "name": "mountpoint", "image": "", "imageID": "", "ready": false, "restartCount": 0,
            "state": { "waiting": { "reason": "ImagePullBackOff", "message": "no such image" } },
        }] } });
        check(&with(waiting), not_running("ImagePullBackOff: no such image"));
        check(&with(serde_json::json!({ "status": { "phase": "Failed" } })), ended("Failed"));
        check(&with(serde_json::json!({ "status": { "phase": "Succeeded" } })), ended("Succeeded"));
        let deleted = serde_json::json!({ "metadata": { "deletionTimestamp": "2026-01-02T03:04:05Z" } });
        check(&with(deleted), leaving());
        let annotated = |value: &str| serde_json::json!({ "metadata": { "annotations": { "s3.csi.scality.com/needs-unmount": value } } });
        check(&with(annotated("true")), leaving());
        check(&with(annotated("false")), Ok(POD));
    }

    #[test]
    fn the_scheduler_says_why_a_pod_is_nowhere() {
        let unschedulable = pod(&serde_json::json!({ "status": { "phase": "Pending", "conditions": [
            { "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available" },
        ] } }));
        assert_eq!(trouble(&unschedulable), "Unschedulable: 0/3 nodes are available");
    }

    #[test]
    fn strangers_in_the_namespace_are_left_out() {
        assert_eq!(read_pod(&pod(&serde_json::json!({ "metadata": { "name": "nginx" } })), "x"), None);
        assert_eq!(read_pod(&pod(&serde_json::json!({ "metadata": { "uid": "../x" } })), "x"), None);
    }
}
