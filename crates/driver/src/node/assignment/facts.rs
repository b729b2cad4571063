//! The cached attachments and Mountpoint Pods of this node, and which of them serves a workload. No I/O.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Pod;
use s3csi_core::attachment::{
    Attachment, PodIdentity, PodPhase, Timestamp, assignment, is_mountpoint_pod_name, newest_first,
};
use s3csi_core::identifiers::{PvName, WorkloadUid};

use crate::api::{MemoryKill, MetadataKeys, PodCondition, memory_kill, pod_problem, timestamp};

#[derive(Debug)]
pub struct Facts {
    pub attachments: Cached<Attachment>,
    pub pods: Cached<LocalMountpointPod>,
    /// Mountpoint Pods whose mounter was seen to listen.
    listening: BTreeSet<WorkloadUid>,
}

/// Objects of one kind by name, as far as the watch has delivered them.
#[derive(Debug)]
pub struct Cached<T> {
    kind: &'static str,
    objects: BTreeMap<String, T>,
    is_complete: bool,
    /// Why the watch fails at the moment.
    watch_error: Option<String>,
}

/// A Mountpoint Pod on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalMountpointPod {
    pub name: String,
    /// The name of its source: that of the first Mountpoint Pod that served it.
    pub source: String,
    pub created_at: Timestamp,
    /// A plain path component: the name of the Pod's directory in kubelet's.
    pub uid: WorkloadUid,
    pub phase: PodPhase,
    pub is_terminating: bool,
    /// Annotated `needs-unmount`.
    pub is_retired: bool,
    /// Why it is not running yet.
    pub waiting_reason: String,
    /// The condition of its source, as this node last wrote it.
    pub mounted: Option<PodCondition>,
    /// The condition that another one can take over, as this node last wrote it.
    pub movable: Option<PodCondition>,
    /// The last time its container was killed for its memory.
    pub memory_kill: Option<MemoryKill>,
}

/// Why a workload has no running Mountpoint Pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Missing {
    NotSynced { kind: &'static str, reason: String },
    Unassigned,
    Unseen { attachment: String, pod: String },
    NotRunning { pod: String, why: String },
    Ended { attachment: String, pod: String, how: &'static str },
    Leaving { attachment: String, pod: String },
}

impl Default for Facts {
    fn default() -> Self {
        let attachments = Cached::new("mountpoints3podattachments");
        Self { attachments, pods: Cached::new("pods"), listening: BTreeSet::new() }
    }
}

impl Facts {
    /// The Mountpoint Pod that serves a workload, if it can be used now.
    pub fn find(&self, workload: &WorkloadUid, volume: &PvName) -> Result<&LocalMountpointPod, Missing> {
        let of_volume = self.attachments.objects.values().filter(|it| it.fields.persistent_volume == *volume);
        let Some(assigned) = assignment(of_volume, workload) else {
            // It may exist although the watch has not delivered it.
            return Err(self.attachments.not_synced().unwrap_or(Missing::Unassigned));
        };
        let (attachment, name) = (assigned.attachment.to_owned(), assigned.mountpoint_pod.to_owned());
        let pods = self.pods_of(&name);
        let Some(newest) = pods.first() else {
            return Err(self.pods.not_synced().unwrap_or(Missing::Unseen { attachment, pod: name }));
        };
        // One that is terminating serves on until the next one has taken over.
        let is_serving = |it: &&LocalMountpointPod| it.phase == PodPhase::Running && !it.is_retired;
        let available = pods.iter().copied().find(|it| it.is_available());
        let serving = || pods.iter().skip(1).copied().find(is_serving).filter(|_| !newest.is_retired);
        if let Some(pod) = available.or_else(serving) {
            return Ok(pod);
        }
        let (pod, name) = (*newest, newest.name.clone());
        if pod.is_retired || pod.is_terminating {
            return Err(Missing::Leaving { attachment, pod: name });
        }
        match pod.phase {
            PodPhase::Running | PodPhase::Pending | PodPhase::Unknown => {
                Err(Missing::NotRunning { pod: name, why: pod.waiting_reason.clone() })
            }
            PodPhase::Succeeded => Err(Missing::Ended { attachment, pod: name, how: "Succeeded" }),
            PodPhase::Failed => Err(Missing::Ended { attachment, pod: name, how: "Failed" }),
        }
    }

    /// A Mountpoint Pod runs, although kubelet has not reported it yet.
    pub fn set_listening(&mut self, pod: &LocalMountpointPod) {
        self.listening.insert(pod.uid.clone());
        self.apply_listening();
    }

    /// To be called after each change: the API server's word on a Mountpoint Pod may be older than what was seen on the node.
    pub fn apply_listening(&mut self) {
        let (pods, listening) = (&mut self.pods.objects, &mut self.listening);
        for pod in pods.values_mut().filter(|it| it.phase == PodPhase::Pending && listening.contains(&it.uid)) {
            pod.phase = PodPhase::Running;
        }
        if pods.len() < listening.len() {
            listening.retain(|uid| pods.values().any(|it| it.uid == *uid));
        }
    }

    /// The Mountpoint Pods of a source, the newest first.
    pub fn pods_of(&self, source: &str) -> Vec<&LocalMountpointPod> {
        newest_first(self.pods.objects.values().filter(|it| it.source == source), LocalMountpointPod::identity)
    }
}

impl LocalMountpointPod {
    /// Whether it can serve a source now.
    pub fn is_available(&self) -> bool {
        self.phase == PodPhase::Running && !self.is_retired && !self.is_terminating
    }

    pub fn identity(&self) -> PodIdentity<'_> {
        PodIdentity { source: &self.source, name: &self.name, uid: self.uid.as_str(), created_at: self.created_at }
    }
}

impl<T> Cached<T> {
    const fn new(kind: &'static str) -> Self {
        Self { kind, objects: BTreeMap::new(), is_complete: false, watch_error: None }
    }

    pub fn get(&self, name: &str) -> Option<&T> {
        self.objects.get(name)
    }

    /// `None` before the first complete list.
    pub fn all(&self) -> Option<impl Iterator<Item = &T>> {
        self.is_complete.then(|| self.objects.values())
    }

    /// Replaces the content by a complete list.
    pub fn replace(&mut self, objects: BTreeMap<String, T>) {
        self.objects = objects;
        self.is_complete = true;
        self.watch_error = None;
    }

    pub fn insert(&mut self, name: String, object: T) {
        self.objects.insert(name, object);
        self.watch_error = None;
    }

    pub fn remove(&mut self, name: &str) {
        self.objects.remove(name);
        self.watch_error = None;
    }

    /// The watch failed: the content stays, but may be out of date.
    pub fn fail(&mut self, error: String) {
        self.watch_error = Some(error);
    }

    fn not_synced(&self) -> Option<Missing> {
        let not_synced = |reason: &str| Missing::NotSynced { kind: self.kind, reason: reason.to_owned() };
        match &self.watch_error {
            Some(error) => Some(not_synced(error)),
            None if self.is_complete => None,
            None => Some(not_synced("the first list is not complete")),
        }
    }
}

/// Parses a Pod, if it is a Mountpoint Pod.
pub fn read_pod(pod: &Pod, driver_name: &str) -> Option<LocalMountpointPod> {
    let name = pod.metadata.name.clone().filter(|it| is_mountpoint_pod_name(it))?;
    let keys = MetadataKeys::new(driver_name);
    let is_annotated =
        pod.metadata.annotations.as_ref().and_then(|it| it.get(&keys.needs_unmount())).is_some_and(|it| it == "true");
    let source = pod.metadata.labels.as_ref().and_then(|it| it.get(&keys.source())).cloned();
    Some(LocalMountpointPod {
        source: source.filter(|it| is_mountpoint_pod_name(it)).unwrap_or_else(|| name.clone()),
        created_at: pod.metadata.creation_timestamp.as_ref().map_or(Timestamp::from_unix_seconds(0), timestamp),
        name,
        uid: pod.metadata.uid.as_deref()?.parse().ok()?,
        phase: PodPhase::from_text(pod.status.as_ref().and_then(|it| it.phase.as_deref())),
        is_terminating: pod.metadata.deletion_timestamp.is_some(),
        is_retired: is_annotated,
        waiting_reason: waiting_reason(pod),
        mounted: PodCondition::read(pod, &PodCondition::mounted(driver_name)),
        movable: PodCondition::read(pod, &PodCondition::movable(driver_name)),
        memory_kill: memory_kill(pod),
    })
}

/// Why a Pod is not running: its problem, or else its phase.
pub fn waiting_reason(pod: &Pod) -> String {
    let status = pod.status.as_ref();
    let phase =
        || status.and_then(|it| it.phase.clone()).unwrap_or_else(|| "its status is not reported yet".to_owned());
    status.and_then(pod_problem).unwrap_or_else(phase)
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
        let pods = pods.iter().filter_map(|it| read_pod(it, "s3.csi.scality.com")).map(|it| (it.name.clone(), it));
        facts.pods.replace(pods.collect());
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
    fn before_the_first_list_nothing_counts_as_missing() {
        let reason = "the first list is not complete".to_owned();
        check(&Facts::default(), Err(Missing::NotSynced { kind: "mountpoints3podattachments", reason }));
        let mut failing = facts(&[attachment()], &[]);
        failing.pods.fail("forbidden".to_owned());
        check(&failing, Err(Missing::NotSynced { kind: "pods", reason: "forbidden".to_owned() }));
        // What was cached before the failure is used.
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
        check(&with(serde_json::json!({ "status": null })), not_running("its status is not reported yet"));
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
    fn a_mounter_that_listens_runs_whatever_the_api_server_says() {
        let pending = || pod(&serde_json::json!({ "status": { "phase": "Pending" } }));
        let read = |pod: &Pod| read_pod(pod, "s3.csi.scality.com").unwrap();
        let mut facts = facts(&[attachment()], &[pending()]);
        facts.set_listening(&read(&pending()));
        check(&facts, Ok(POD));
        // A report that kubelet wrote before.
        facts.pods.insert(POD.to_owned(), read(&pending()));
        facts.apply_listening();
        check(&facts, Ok(POD));
        // Another Pod of the same name.
        let other = pod(&serde_json::json!({
            "metadata": { "uid": "22222222-1111-4111-8111-111111111111" }, "status": { "phase": "Pending" },
        }));
        facts.pods.insert(POD.to_owned(), read(&other));
        facts.apply_listening();
        check(&facts, Err(Missing::NotRunning { pod: POD.to_owned(), why: "Pending".to_owned() }));
        facts.pods.remove(POD);
        facts.apply_listening();
        assert_eq!(facts.listening, BTreeSet::new());
    }

    #[test]
    fn a_pod_that_is_terminating_is_used_until_the_next_one_runs() {
        const NEXT: &str = "mp-66f7d2331f3149f00d62d7af839d4cee895e1c68a2f0d96ffd359f79";
        let next = |phase: &str| {
            pod(&serde_json::json!({
                "metadata": {
                    "name": NEXT,
                    "uid": "22222222-1111-4111-8111-111111111111",
                    "labels": { "s3.csi.scality.com/source": POD },
                    "creationTimestamp": "2026-01-02T03:05:05Z",
                },
                "status": { "phase": phase },
            }))
        };
        let old = |change: &serde_json::Value| {
            let mut old = serde_json::json!({ "metadata": { "creationTimestamp": "2026-01-02T03:04:05Z" } });
            merge(&mut old, change);
            pod(&old)
        };
        let deleted = serde_json::json!({ "metadata": { "deletionTimestamp": "2026-01-02T03:04:05Z" } });
        check(&facts(&[attachment()], &[old(&deleted), next("Pending")]), Ok(POD));
        check(&facts(&[attachment()], &[old(&deleted), next("Running")]), Ok(NEXT));
        check(&facts(&[attachment()], &[old(&serde_json::json!({})), next("Pending")]), Ok(POD));
        check(&facts(&[attachment()], &[next("Running")]), Ok(NEXT));
    }

    #[test]
    fn the_scheduler_says_why_a_pod_is_nowhere() {
        let unschedulable = pod(&serde_json::json!({ "status": { "phase": "Pending", "conditions": [
            { "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available" },
        ] } }));
        assert_eq!(waiting_reason(&unschedulable), "Unschedulable: 0/3 nodes are available");
    }

    #[test]
    fn other_pods_in_the_namespace_are_ignored() {
        assert_eq!(read_pod(&pod(&serde_json::json!({ "metadata": { "name": "nginx" } })), "x"), None);
        assert_eq!(read_pod(&pod(&serde_json::json!({ "metadata": { "uid": "../x" } })), "x"), None);
    }
}
