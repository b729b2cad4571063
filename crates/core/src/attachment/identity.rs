//! The names of attachments and Mountpoint Pods, and which attachment applies if there are several.

use std::cmp::Reverse;

use crate::arguments::MountArguments;
use crate::identifiers::WorkloadUid;
use crate::names::{hex_sha224, is_derived};
use crate::sharing::SharingKey;

use super::facts::{Attachment, AttachmentFields, Timestamp};
use super::requirements::MountRequirement;

const ATTACHMENT_PREFIX: &str = "s3pa-";
const MOUNTPOINT_POD_PREFIX: &str = "mp-";

/// The name of the attachment for this key. Derived, so that the API server lets only one exist.
pub fn attachment_name(key: &SharingKey) -> String {
    format!("{ATTACHMENT_PREFIX}{}", key.name())
}

/// The name of the Mountpoint Pod that takes over from the one with this UID while that one serves its source.
///
/// Derived, so that the API server lets only one exist. The source keeps the name of its first Pod.
pub fn successor_name(source: &str, uid: &str) -> String {
    format!("{MOUNTPOINT_POD_PREFIX}{}", hex_sha224([source, "\n", uid]))
}

/// What orders the Mountpoint Pods of one source.
#[derive(Clone, Copy, Debug)]
pub struct PodIdentity<'a> {
    pub source: &'a str,
    pub name: &'a str,
    pub uid: &'a str,
    pub created_at: Timestamp,
}

/// Sorts the Mountpoint Pods of one source: the one that was started last comes first.
pub fn newest_first<'a, T>(
    pods: impl IntoIterator<Item = &'a T>,
    identity: impl Fn(&'a T) -> PodIdentity<'a>,
) -> Vec<&'a T> {
    let mut pods: Vec<&'a T> = pods.into_iter().collect();
    let successors: Vec<String> =
        pods.iter().map(|it| identity(it)).map(|it| successor_name(it.source, it.uid)).collect();
    // Kubernetes counts in seconds; of two Pods of one second the one that was derived from the other is newer.
    pods.sort_by_key(|it| {
        let PodIdentity { name, created_at, .. } = identity(it);
        Reverse((created_at, successors.iter().any(|it| it == name), name))
    });
    pods
}

/// Whether a Pod in the Mountpoint namespace is a Mountpoint Pod. All others are ignored.
pub fn is_mountpoint_pod_name(name: &str) -> bool {
    is_derived(MOUNTPOINT_POD_PREFIX, name)
}

/// The Mountpoint Pod that serves a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Assignment<'a> {
    pub attachment: &'a str,
    pub mountpoint_pod: &'a str,
}

/// Which Mountpoint Pod serves this workload, if several entries name it.
///
/// The node and the controller use the same function: what the node uses is what the controller keeps.
pub fn assignment<'a>(
    attachments: impl IntoIterator<Item = &'a Attachment>,
    workload: &WorkloadUid,
) -> Option<Assignment<'a>> {
    attachments
        .into_iter()
        .flat_map(|attachment| {
            attachment.entries.iter().flat_map(move |(mountpoint_pod, entries)| {
                let here = entries.iter().filter(|it| it.workload == *workload);
                here.map(move |it| rank(it.attached_at, &attachment.name, mountpoint_pod))
            })
        })
        .min()
        .map(|(_, attachment, mountpoint_pod)| Assignment { attachment, mountpoint_pod })
}

/// The smallest applies: the first assignment, because the node may have acted on it already.
///
/// These values never change, so two controllers that see different facts cannot remove each other's choice: the
/// smallest is never removed as a duplicate.
pub(super) fn rank<'a>(
    attached_at: Timestamp,
    attachment: &'a str,
    mountpoint_pod: &'a str,
) -> (Timestamp, &'a str, &'a str) {
    (attached_at, attachment, mountpoint_pod)
}

/// Whether an attachment is for this requirement.
///
/// A derived name identifies it, since it covers more than the fields do (a PV that was recreated with another bucket).
/// Attachments of earlier drivers have random names and are identified by their fields.
pub(super) fn is_for(name: &str, fields: &AttachmentFields, requirement: &MountRequirement) -> bool {
    if is_derived(ATTACHMENT_PREFIX, name) {
        return name == attachment_name(&requirement.key);
    }
    let required = &requirement.fields;
    let mut fields = fields.clone();
    if is_normalised(&fields.mount_options, &requirement.key.mount_options) {
        fields.mount_options.clone_from(&required.mount_options);
    }
    if fields.authentication_source.is_none() {
        // Earlier drivers did not write it; it never changes for a PV.
        fields.authentication_source.clone_from(&required.authentication_source);
    }
    // Where the identity is the workload's, an object that does not name it matches no workload.
    fields == *required
}

/// Whether options joined by commas mean the same as normalised ones, in another order or spelling.
fn is_normalised(joined: &str, normalised: &str) -> bool {
    // An option that contains a comma is split here; equal options then differ, at the price of one more source.
    let options = joined.split(',').filter(|it| !it.is_empty());
    MountArguments::parse(options).is_ok_and(|it| it.normalised().join("\n") == normalised)
}
