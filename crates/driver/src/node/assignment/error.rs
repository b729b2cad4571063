//! Why a workload has no running Mountpoint Pod, and how to find out more.

/// `namespace` is that of Mountpoint Pods, `driver_namespace` that of the driver itself.
#[derive(Debug, thiserror::Error)]
pub enum AssignmentError {
    #[error(
        "the watch of {kind} has not synced yet ({reason}); check that the node plugin reaches the API server and that its \
         service account may watch {kind}: kubectl auth can-i watch {kind} -n {namespace} --as \
         system:serviceaccount:{driver_namespace}:$(kubectl get daemonset s3-csi-node -n {driver_namespace} --no-headers \
         -o custom-columns=:.spec.template.spec.serviceAccountName)"
    )]
    NotSynced { kind: &'static str, reason: String, namespace: String, driver_namespace: String },

    #[error(
        "no Mountpoint Pod is assigned to workload {workload} for PersistentVolume {volume} on node {node}; check that \
         the controller is running. See: kubectl get s3pa, and: kubectl logs -n {driver_namespace} -l app=s3-csi-controller"
    )]
    NotAssigned { workload: String, volume: String, node: String, driver_namespace: String },

    #[error(
        "Mountpoint Pod {pod} does not exist, although the workload is assigned to it: it is not created yet, or was deleted. \
         See: kubectl describe s3pa {attachment}"
    )]
    Gone { attachment: String, pod: String },

    #[error("Mountpoint Pod {pod} is not scheduled: {why}. See: kubectl describe pod -n {namespace} {pod}")]
    NotScheduled { namespace: String, pod: String, why: String },

    #[error("Mountpoint Pod {pod} is on node {node} and not on this one. See: kubectl describe s3pa {attachment}")]
    Elsewhere { attachment: String, pod: String, node: String },

    #[error(
        "Mountpoint Pod {pod} is not running: {why}. See: kubectl describe pod -n {namespace} {pod}, and: \
         kubectl logs -n {namespace} {pod}"
    )]
    NotRunning { namespace: String, pod: String, why: String },

    #[error(
        "Mountpoint Pod {pod} has ended ({how}) and is not replaced yet. See: kubectl logs -n {namespace} {pod}, and: \
         kubectl describe s3pa {attachment}"
    )]
    Ended { namespace: String, attachment: String, pod: String, how: &'static str },

    #[error(
        "Mountpoint Pod {pod} is terminating and no other one is assigned yet. See: kubectl describe s3pa {attachment}"
    )]
    Leaving { attachment: String, pod: String },
}
