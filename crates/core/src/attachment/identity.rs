//! What attachments and Mountpoint Pods are called, which attachment is meant, and which one counts if several are.

use crate::arguments::Arguments;
use crate::identifiers::WorkloadUid;
use crate::sharing::SharingKey;

use super::facts::{Attachment, Fields, Timestamp};
use super::needs::Need;

const ATTACHMENT_PREFIX: &str = "s3pa-";
const MOUNTPOINT_POD_PREFIX: &str = "mp-";
const HASH_LENGTH: usize = 56;

/// The name of the attachment for this key. The API server lets it exist once, whoever creates it.
pub fn attachment_name(key: &SharingKey) -> String {
    format!("{ATTACHMENT_PREFIX}{}", key.name())
}

/// Whether a Pod in the Mountpoint namespace is one of ours. Others that somebody put there are none of our business.
pub fn is_mountpoint_pod_name(name: &str) -> bool {
    is_derived(MOUNTPOINT_POD_PREFIX, name)
}

/// Where a workload finds its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Assignment<'a> {
    pub attachment: &'a str,
    pub mountpoint_pod: &'a str,
}

/// By whom this workload is served, if several say so.
///
/// The node and the controller ask the same function: what the node uses is what the controller keeps.
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

/// The smaller one counts: the first assignment, because the node may have acted on it already.
///
/// Nothing in here ever changes, so two controllers that see different facts cannot remove each other's choice: the
/// smallest is never removed as a duplicate.
pub(super) fn rank<'a>(
    attached_at: Timestamp,
    attachment: &'a str,
    mountpoint_pod: &'a str,
) -> (Timestamp, &'a str, &'a str) {
    (attached_at, attachment, mountpoint_pod)
}

/// Whether an attachment is for this need.
///
/// One with a derived name says so by its name, which knows more than its fields do (a PV made anew with another bucket).
/// All others, made by drivers before us under random names, say so by their fields.
pub(super) fn is_for(name: &str, fields: &Fields, need: &Need) -> bool {
    if is_derived(ATTACHMENT_PREFIX, name) {
        return name == attachment_name(&need.key);
    }
    let Fields {
        node,
        persistent_volume,
        volume_id,
        mount_options,
        fs_group,
        authentication_source,
        workload_namespace,
        service_account,
    } = &need.fields;
    *node == fields.node
        && *persistent_volume == fields.persistent_volume
        && *volume_id == fields.volume_id
        && *fs_group == fields.fs_group
        && (*mount_options == fields.mount_options || is_normalised(&fields.mount_options, &need.key.mount_options))
        // Drivers before us did not write it: a PV has one for its whole life.
        && (fields.authentication_source.is_none() || *authentication_source == fields.authentication_source)
        // Where the identity is the workload's, an object that does not say whose it is, is nobody's.
        && *workload_namespace == fields.workload_namespace
        && *service_account == fields.service_account
}

/// Whether options joined by commas mean the same as normalised ones, in another order or spelling.
fn is_normalised(joined: &str, normalised: &str) -> bool {
    // An option that contains a comma comes apart here; two texts that mean the same then differ, which costs a source.
    let options = joined.split(',').filter(|it| !it.is_empty());
    Arguments::parse(options).is_ok_and(|it| it.normalised().join("\n") == normalised)
}

fn is_derived(prefix: &str, name: &str) -> bool {
    name.strip_prefix(prefix).is_some_and(|hash| {
        hash.len() == HASH_LENGTH && hash.bytes().all(|it| it.is_ascii_digit() || (b'a'..=b'f').contains(&it))
    })
}
