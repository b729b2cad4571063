//! The objects this driver adds to the Kubernetes API, and how they are told in the words of core; and how one call of the API
//! server ends. Nothing is decided here.

mod attachment;
pub mod call;
pub mod count;
pub mod event;
mod pod_condition;

pub use attachment::{
    Condition, MountpointPodStatus, MountpointS3PodAttachment, MountpointS3PodAttachmentSpec,
    MountpointS3PodAttachmentStatus, WorkloadAttachment, attachment_definition, attachment_definition_yaml,
    attachment_facts, attachment_resource, attachments, time, timestamp,
};
pub use pod_condition::PodCondition;
