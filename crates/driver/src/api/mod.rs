//! The objects this driver adds to the Kubernetes API, and how they are told in the words of core. Nothing is decided here.

mod attachment;

pub use attachment::{
    Condition, MountpointPodStatus, MountpointS3PodAttachment, MountpointS3PodAttachmentSpec,
    MountpointS3PodAttachmentStatus, WorkloadAttachment, attachment_definition, attachment_definition_yaml,
    attachment_facts, attachment_resource, attachments, time, timestamp,
};
