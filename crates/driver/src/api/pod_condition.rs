//! What a node says of a Mountpoint Pod's source, as a condition in the Pod's status: the node writes it, the controller reads it.

use k8s_openapi::api::core::v1::Pod;

/// The condition `<driver>/Mounted`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodCondition {
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// Why, in one word.
    pub reason: String,
    /// Why, for people.
    pub message: String,
}

impl PodCondition {
    pub fn kind(driver: &str) -> String {
        format!("{driver}/Mounted")
    }

    pub fn read(pod: &Pod, driver: &str) -> Option<Self> {
        let kind = Self::kind(driver);
        let conditions = pod.status.as_ref()?.conditions.as_ref()?;
        let found = conditions.iter().find(|it| it.type_ == kind)?;
        Some(Self {
            status: found.status.clone(),
            reason: found.reason.clone().unwrap_or_default(),
            message: found.message.clone().unwrap_or_default(),
        })
    }
}
