//! What only the node knows of a Mountpoint Pod's source, as conditions in the Pod's status: whether it is mounted, and whether
//! another Pod can take over. The node writes them, the controller reads them.

use k8s_openapi::api::core::v1::Pod;

/// A condition of a Mountpoint Pod without its type and time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodCondition {
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// Machine-readable cause.
    pub reason: String,
    /// Human-readable cause.
    pub message: String,
}

impl PodCondition {
    /// The type of the condition that the Pod serves its source.
    pub fn mounted(driver: &str) -> String {
        format!("{driver}/Mounted")
    }

    /// The type of the condition that another Pod can take over while this one serves.
    pub fn movable(driver: &str) -> String {
        format!("{driver}/Movable")
    }

    pub fn is_true(&self) -> bool {
        self.status == "True"
    }

    pub fn read(pod: &Pod, kind: &str) -> Option<Self> {
        let conditions = pod.status.as_ref()?.conditions.as_ref()?;
        let found = conditions.iter().find(|it| it.type_ == kind)?;
        Some(Self {
            status: found.status.clone(),
            reason: found.reason.clone().unwrap_or_default(),
            message: found.message.clone().unwrap_or_default(),
        })
    }
}
