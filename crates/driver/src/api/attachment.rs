//! `MountpointS3PodAttachment`: which workload is served by which Mountpoint Pod on one node, as the API server stores it.

use std::collections::BTreeMap;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::core::{ApiResource, Object};
use kube::{Api, Client, CustomResource, CustomResourceExt as _, KubeSchema};
use s3csi_core::attachment as facts;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

const VERSION: &str = "v2";
const KIND: &str = "MountpointS3PodAttachment";
const PLURAL: &str = "mountpoints3podattachments";

/// An attachment. Its API group is the driver's name, which is known at run time only.
pub type MountpointS3PodAttachment = Object<MountpointS3PodAttachmentSpec, MountpointS3PodAttachmentStatus>;

/// The attachments of this driver.
pub fn attachments(client: Client, driver: &str) -> Api<MountpointS3PodAttachment> {
    Api::all_with(client, &attachment_resource(driver))
}

pub fn attachment_resource(driver: &str) -> ApiResource {
    ApiResource {
        group: driver.to_owned(),
        version: VERSION.to_owned(),
        api_version: format!("{driver}/{VERSION}"),
        kind: KIND.to_owned(),
        plural: PLURAL.to_owned(),
    }
}

/// The CRD, to be applied to a cluster before the driver is started.
pub fn attachment_definition(driver: &str) -> CustomResourceDefinition {
    let mut definition = Definition::crd();
    definition.metadata.name = Some(format!("{PLURAL}.{driver}"));
    driver.clone_into(&mut definition.spec.group);
    definition
}

/// The same as a document for `kubectl apply`.
pub fn attachment_definition_yaml(driver: &str) -> Result<String, serde_saphyr::ser::Error> {
    serde_saphyr::to_string(&attachment_definition(driver))
}

/// Assigns the workloads that use one volume on one node to Mountpoint Pods.
// The first five fields and the map are those of Scality's driver 2.x; its objects stay valid.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[kube(
    group = "s3.csi.scality.com",
    version = "v2",
    kind = "MountpointS3PodAttachment",
    doc = "Assigns the workloads that use one volume on one node to Mountpoint Pods.",
    root = "Definition",
    plural = "mountpoints3podattachments",
    singular = "mountpoints3podattachment",
    shortname = "s3pa",
    status = "MountpointS3PodAttachmentStatus",
    selectable = ".spec.nodeName",
    selectable = ".spec.persistentVolumeName",
    selectable = ".spec.volumeID",
    selectable = ".spec.mountOptions",
    selectable = ".spec.workloadFSGroup",
    selectable = ".spec.authenticationSource",
    selectable = ".spec.workloadNamespace",
    selectable = ".spec.workloadServiceAccountName",
    printcolumn = r#"{"name":"Node","type":"string","jsonPath":".spec.nodeName"}"#,
    printcolumn = r#"{"name":"PV Name","type":"string","jsonPath":".spec.persistentVolumeName"}"#,
    printcolumn = r#"{"name":"Workloads","type":"integer","jsonPath":".status.workloads"}"#,
    printcolumn = r#"{"name":"Mountpoint Pods","type":"integer","jsonPath":".status.mountpointPodCount"}"#,
    printcolumn = r#"{"name":"Ready","type":"string","jsonPath":".status.ready"}"#,
    printcolumn = r#"{"name":"Mounted","type":"string","jsonPath":".status.mounted"}"#,
    printcolumn = r#"{"name":"Mount Options","type":"string","jsonPath":".spec.mountOptions","priority":1}"#,
    printcolumn = r#"{"name":"FSGroup","type":"string","jsonPath":".spec.workloadFSGroup","priority":1}"#,
    printcolumn = r#"{"name":"Auth","type":"string","jsonPath":".spec.authenticationSource","priority":1}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct MountpointS3PodAttachmentSpec {
    /// The node on which the workloads run.
    #[x_kube(validation = Rule::new("self == oldSelf").message("nodeName is immutable"))]
    pub node_name: String,

    /// The PersistentVolume they use.
    #[x_kube(validation = Rule::new("self == oldSelf").message("persistentVolumeName is immutable"))]
    pub persistent_volume_name: String,

    /// The volume handle of the PersistentVolume.
    #[serde(rename = "volumeID")]
    #[x_kube(validation = Rule::new("self == oldSelf").message("volumeID is immutable"))]
    pub volume_id: String,

    /// Its mount options when the attachment was created, joined by commas.
    #[x_kube(validation = Rule::new("self == oldSelf").message("mountOptions is immutable"))]
    pub mount_options: String,

    /// The fsGroup of the workloads; empty without one.
    #[serde(rename = "workloadFSGroup")]
    #[x_kube(validation = Rule::new("self == oldSelf").message("workloadFSGroup is immutable"))]
    pub workload_fs_group: String,

    /// Whose credentials are used: `driver`, `secret` or `pod`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self == oldSelf").message("authenticationSource is immutable"))]
    pub authentication_source: Option<String>,

    /// The namespace of the workloads, if the credentials are theirs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self == oldSelf").message("workloadNamespace is immutable"))]
    pub workload_namespace: Option<String>,

    /// The service account of the workloads, if the credentials are theirs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self == oldSelf").message("workloadServiceAccountName is immutable"))]
    pub workload_service_account_name: Option<String>,

    /// Mountpoint Pods by name, and the workloads that each of them serves.
    #[serde(rename = "mountpointS3PodAttachments")]
    pub mountpoint_s3_pod_attachments: BTreeMap<String, Vec<WorkloadAttachment>>,
}

/// One workload that a Mountpoint Pod serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadAttachment {
    /// UID of the workload Pod.
    #[serde(rename = "workloadPodUID")]
    pub workload_pod_uid: String,

    /// When it was attached.
    pub attachment_time: Time,
}

/// Observed state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MountpointS3PodAttachmentStatus {
    /// Number of workloads.
    #[serde(default)]
    pub workloads: i32,

    /// Number of Mountpoint Pods.
    #[serde(default)]
    pub mountpoint_pod_count: i32,

    /// Mountpoint Pods that run, such as `1/2`.
    #[serde(default)]
    pub ready: String,

    /// Mountpoint Pods whose source is mounted and answers on its node, such as `1/2`.
    #[serde(default)]
    pub mounted: String,

    /// Mountpoint Pods by name.
    #[serde(default)]
    pub mountpoint_pods: BTreeMap<String, MountpointPodStatus>,
}

/// Observed state of one Mountpoint Pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MountpointPodStatus {
    /// `Ready`: the Pod runs. `Mounted`: its source is mounted and answers on its node.
    #[serde(default)]
    pub conditions: Vec<Condition>,
}

/// A condition as in other Kubernetes objects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// `Ready` or `Mounted`.
    #[serde(rename = "type")]
    pub kind: String,

    /// `True`, `False` or `Unknown`.
    pub status: String,

    /// Machine-readable cause.
    pub reason: String,

    /// Human-readable cause.
    #[serde(default)]
    pub message: String,

    /// When the status last changed.
    pub last_transition_time: Time,
}

impl MountpointS3PodAttachmentSpec {
    pub fn new(fields: &facts::AttachmentFields, entries: &facts::Entries) -> Self {
        // No `..`: a field that is not stored does not compile.
        let facts::AttachmentFields {
            node,
            persistent_volume,
            volume_id,
            mount_options,
            fs_group,
            authentication_source,
            workload_namespace,
            service_account,
        } = fields;
        Self {
            node_name: node.clone(),
            persistent_volume_name: persistent_volume.as_str().to_owned(),
            volume_id: volume_id.clone(),
            mount_options: mount_options.clone(),
            workload_fs_group: fs_group.clone(),
            authentication_source: authentication_source.clone(),
            workload_namespace: workload_namespace.clone(),
            workload_service_account_name: service_account.clone(),
            mountpoint_s3_pod_attachments: entries
                .iter()
                .map(|(pod, entries)| (pod.clone(), entries.iter().map(WorkloadAttachment::new).collect()))
                .collect(),
        }
    }
}

impl WorkloadAttachment {
    pub fn new(entry: &facts::Entry) -> Self {
        Self { workload_pod_uid: entry.workload.as_str().to_owned(), attachment_time: time(entry.attached_at) }
    }

    /// `None` for text that is no UID.
    fn fact(&self) -> Option<facts::Entry> {
        Some(facts::Entry {
            workload: self.workload_pod_uid.parse().ok()?,
            attached_at: timestamp(&self.attachment_time),
        })
    }
}

/// An attachment as facts of core; `None` if it names no PV.
pub fn attachment_facts(attachment: &MountpointS3PodAttachment) -> Option<facts::Attachment> {
    let Object { metadata, spec, .. } = attachment;
    Some(facts::Attachment {
        name: metadata.name.clone()?,
        resource_version: metadata.resource_version.clone().unwrap_or_default(),
        is_terminating: metadata.deletion_timestamp.is_some(),
        fields: facts::AttachmentFields {
            node: spec.node_name.clone(),
            persistent_volume: spec.persistent_volume_name.parse().ok()?,
            volume_id: spec.volume_id.clone(),
            mount_options: spec.mount_options.clone(),
            fs_group: spec.workload_fs_group.clone(),
            authentication_source: spec.authentication_source.clone(),
            workload_namespace: spec.workload_namespace.clone(),
            service_account: spec.workload_service_account_name.clone(),
        },
        entries: spec
            .mountpoint_s3_pod_attachments
            .iter()
            .map(|(pod, workloads)| (pod.clone(), workloads.iter().filter_map(WorkloadAttachment::fact).collect()))
            .collect(),
    })
}

/// A point in time as the API writes it.
pub fn time(moment: facts::Timestamp) -> Time {
    // Times beyond the years 0 to 9999 cannot be written.
    let moment = k8s_openapi::jiff::Timestamp::from_second(moment.unix_seconds());
    Time(moment.unwrap_or(k8s_openapi::jiff::Timestamp::UNIX_EPOCH))
}

/// A point in time as core counts it.
pub fn timestamp(time: &Time) -> facts::Timestamp {
    facts::Timestamp::from_unix_seconds(time.0.as_second())
}

#[cfg(test)]
mod tests {
    use s3csi_core::attachment::{Attachment, AttachmentFields, Entry, Timestamp};

    use super::*;

    #[test]
    fn the_group_is_the_driver_s_name() {
        let definition = attachment_definition("s3.example.com");
        assert_eq!(definition.metadata.name.as_deref(), Some("mountpoints3podattachments.s3.example.com"));
        assert_eq!(definition.spec.group, "s3.example.com");
        assert_eq!(attachment_resource("s3.example.com").api_version, "s3.example.com/v2");
        assert_eq!(definition.spec.names.kind, KIND);
        assert_eq!(definition.spec.names.plural, PLURAL);
        assert_eq!(definition.spec.versions[0].name, VERSION);
    }

    #[test]
    fn facts_are_stored_and_read_unchanged() {
        let fields = AttachmentFields {
            node: "node".to_owned(),
            persistent_volume: "pv".parse().unwrap(),
            volume_id: "handle".to_owned(),
            mount_options: "a,b".to_owned(),
            fs_group: "1000".to_owned(),
            authentication_source: Some("secret".to_owned()),
            workload_namespace: Some("ns".to_owned()),
            service_account: Some("account".to_owned()),
        };
        let entry =
            Entry { workload: "uid".parse().unwrap(), attached_at: Timestamp::from_unix_seconds(1_700_000_000) };
        let entries = BTreeMap::from([("mp-a".to_owned(), vec![entry])]);
        let spec = MountpointS3PodAttachmentSpec::new(&fields, &entries);
        let mut stored = MountpointS3PodAttachment::new("name", &attachment_resource("s3.example.com"), spec);
        stored.metadata.resource_version = Some("7".to_owned());
        let read = serde_json::from_value(serde_json::to_value(stored).unwrap()).unwrap();
        let expected = Attachment {
            name: "name".to_owned(),
            resource_version: "7".to_owned(),
            is_terminating: false,
            fields,
            entries,
        };
        assert_eq!(attachment_facts(&read), Some(expected));
    }

    #[test]
    fn objects_of_earlier_drivers_are_understood() {
        let object = serde_json::json!({
            "apiVersion": "s3.csi.scality.com/v2",
            "kind": "MountpointS3PodAttachment",
            "metadata": { "name": "s3pa-x7k2p", "resourceVersion": "3" },
            "spec": {
                "nodeName": "node", "persistentVolumeName": "pv", "volumeID": "handle", "mountOptions": "", "workloadFSGroup": "",
                "mountpointS3PodAttachments": {
                    "mp-a": [
                        { "workloadPodUID": "uid", "attachmentTime": "2025-01-01T00:00:00Z" },
                        { "workloadPodUID": "not/a uid", "attachmentTime": "2025-01-01T00:00:00Z" },
                    ],
                },
            },
        });
        let facts = attachment_facts(&serde_json::from_value(object).unwrap()).unwrap();
        assert_eq!(facts.fields.authentication_source, None);
        let workloads: Vec<&str> = facts.entries["mp-a"].iter().map(|it| it.workload.as_str()).collect();
        assert_eq!(workloads, ["uid"]);
    }
}
