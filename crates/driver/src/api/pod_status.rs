//! Why a Pod does not run, or its container was killed, for messages of node and controller.

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use s3csi_core::attachment::Timestamp;

use super::timestamp;

/// Every Pod passes through these states; they are no problem.
const TRANSIENT_REASONS: [&str; 2] = ["ContainerCreating", "PodInitializing"];

/// As reported by kubelet for a container, by the scheduler, or by kubelet for the Pod; the first that there is.
pub fn pod_problem(status: &PodStatus) -> Option<String> {
    let text = |reason: Option<&str>, message: Option<&str>| {
        let parts: Vec<&str> = [reason, message].into_iter().flatten().filter(|it| !it.is_empty()).collect();
        (!parts.is_empty()).then(|| parts.join(": "))
    };
    let mut containers = status
        .container_statuses
        .iter()
        .flatten()
        .filter_map(|it| it.state.as_ref()?.waiting.as_ref())
        .filter(|it| it.message.is_some() || !it.reason.as_deref().is_some_and(|it| TRANSIENT_REASONS.contains(&it)))
        .filter_map(|it| text(it.reason.as_deref(), it.message.as_deref()));
    let mut scheduler = status
        .conditions
        .iter()
        .flatten()
        .filter(|it| it.type_ == "PodScheduled" && it.status == "False")
        .filter_map(|it| text(it.reason.as_deref(), it.message.as_deref()));
    let pod = || text(status.reason.as_deref(), status.message.as_deref());
    containers.next().or_else(|| scheduler.next()).or_else(pod)
}

/// A container of a Pod was killed because there was no memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryKill {
    pub at: Timestamp,
    /// The memory limit of the container. Without one the node had no memory left.
    pub limit: Option<String>,
}

/// The last time that kubelet reports such an end.
pub fn memory_kill(pod: &Pod) -> Option<MemoryKill> {
    let statuses = pod.status.as_ref()?.container_statuses.iter().flatten();
    let killed = statuses.filter_map(|it| {
        let states = [it.state.as_ref(), it.last_state.as_ref()].into_iter().flatten();
        let mut ends =
            states.filter_map(|it| it.terminated.as_ref()).filter(|it| it.reason.as_deref() == Some("OOMKilled"));
        let end = ends.next()?;
        let at = end.finished_at.as_ref().map_or(Timestamp::from_unix_seconds(0), timestamp);
        let container = pod.spec.as_ref()?.containers.iter().find(|container| container.name == it.name);
        let limits = container.and_then(|it| it.resources.as_ref()).and_then(|it| it.limits.as_ref());
        Some(MemoryKill { at, limit: limits.and_then(|it| it.get("memory")).map(|it| it.0.clone()) })
    });
    killed.max_by_key(|it| it.at)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[track_caller]
    fn check(status: Value, expected: Option<&str>) {
        let status: PodStatus = serde_json::from_value(status).unwrap();
        assert_eq!(pod_problem(&status).as_deref(), expected);
    }

    fn waiting(state: &Value) -> Value {
        let container = json!({ "name": "mountpoint", "image": "", "imageID": "", "ready": false, "restartCount": 0,
            "state": { "waiting": state } });
        json!({ "phase": "Pending", "containerStatuses": [container] })
    }

    #[test]
    fn the_problem_of_a_pod() {
        check(json!({}), None);
        check(json!({ "phase": "Running" }), None);
        check(waiting(&json!({ "reason": "ContainerCreating" })), None);
        check(
            waiting(&json!({ "reason": "ErrImagePull", "message": "no such image" })),
            Some("ErrImagePull: no such image"),
        );
        let unschedulable = json!({ "phase": "Pending", "conditions": [
            { "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available" },
        ] });
        check(unschedulable, Some("Unschedulable: 0/3 nodes are available"));
        check(json!({ "phase": "Failed", "reason": "Evicted", "message": "disk" }), Some("Evicted: disk"));
        check(json!({ "phase": "Failed", "message": "" }), None);
    }

    #[test]
    fn a_container_that_was_killed_for_its_memory() {
        let pod = |state: Value, last: Value| -> Pod {
            let container = json!({ "name": "mountpoint", "image": "", "imageID": "", "ready": true, "restartCount": 1,
                "state": state, "lastState": last });
            let resources = json!({ "limits": { "memory": "2Gi" } });
            serde_json::from_value(json!({
                "metadata": {}, "spec": { "containers": [{ "name": "mountpoint", "resources": resources }] },
                "status": { "containerStatuses": [container] },
            }))
            .unwrap()
        };
        let ended = |reason: &str| json!({ "terminated": { "exitCode": 137, "reason": reason, "finishedAt": "1970-01-01T00:00:07Z" } });
        let killed = Some(MemoryKill { at: Timestamp::from_unix_seconds(7), limit: Some("2Gi".to_owned()) });
        assert_eq!(memory_kill(&pod(json!({ "running": {} }), json!({}))), None);
        assert_eq!(memory_kill(&pod(json!({ "running": {} }), ended("Error"))), None);
        assert_eq!(memory_kill(&pod(ended("OOMKilled"), json!({}))), killed);
        assert_eq!(memory_kill(&pod(json!({ "running": {} }), ended("OOMKilled"))), killed);
    }
}
