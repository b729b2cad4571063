//! Why a Pod does not run, for messages of node and controller.

use k8s_openapi::api::core::v1::PodStatus;

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
}
