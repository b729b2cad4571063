//! Why a workload has no running Mountpoint Pod, and whom to ask about it.

#[derive(Debug, thiserror::Error)]
pub enum AssignmentError {
    #[error(
        "the API server has not shown this node its {kind} yet ({trouble}); may the node plugin reach it and watch them? \
         See: kubectl auth can-i watch {kind} --as system:serviceaccount:kube-system:s3-csi-driver-sa"
    )]
    Blind { kind: &'static str, trouble: String },

    #[error(
        "no Mountpoint Pod is assigned to workload {workload} for PersistentVolume {volume} on node {node}; is the controller \
         running? See: kubectl get s3pa, and: kubectl logs -n kube-system -l app=s3-csi-controller"
    )]
    NotAssigned { workload: String, volume: String, node: String },

    #[error(
        "Mountpoint Pod {pod} does not exist, though the workload is assigned to it: it was not made yet, or it is gone. \
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
        "Mountpoint Pod {pod} has ended ({how}) and was not replaced yet. See: kubectl logs -n {namespace} {pod}, and: \
         kubectl describe s3pa {attachment}"
    )]
    Ended { namespace: String, attachment: String, pod: String, how: &'static str },

    #[error(
        "Mountpoint Pod {pod} is being taken away and no other one is assigned yet. See: kubectl describe s3pa {attachment}"
    )]
    Leaving { attachment: String, pod: String },
}
