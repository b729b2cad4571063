//! The Kubernetes API as node and controller use it: our custom resource and its conversion to facts of core, metadata keys, Pod
//! conditions, Events, watches, and single calls. Nothing is decided here.

mod attachment;
pub mod call;
pub mod count;
mod metadata_keys;
mod pod_condition;
mod pod_status;
pub mod recorder;
mod service_account;
pub mod watch;

pub use attachment::{
    Condition, MountpointPodStatus, MountpointS3PodAttachment, MountpointS3PodAttachmentSpec,
    MountpointS3PodAttachmentStatus, WorkloadAttachment, attachment_definition, attachment_definition_yaml,
    attachment_facts, attachment_resource, attachments, time, timestamp,
};
pub use metadata_keys::{MetadataKeys, is_label_value};
pub use pod_condition::PodCondition;
pub use pod_status::{MemoryKill, memory_kill, pod_problem};
pub use service_account::{ROLE_ANNOTATION, ServiceAccounts};
