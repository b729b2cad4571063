//! Names that the controller and the node both compute, without asking each other.

use std::fmt::Write as _;

use sha2::{Digest as _, Sha224, Sha256};

use crate::identifiers::{PvName, WorkloadUid};

/// Digits of a SHA-224.
const HASH_LENGTH: usize = 56;

/// The name of the Mountpoint Pod that was started for this workload and PV: `mp-` and 56 hex digits.
///
/// The hash is of the concatenated texts, as in earlier drivers, so that their running Pods are found.
pub fn mountpoint_pod_name(workload: &WorkloadUid, volume: &PvName) -> String {
    format!("mp-{}", hex_sha224([workload.as_str(), volume.as_str()]))
}

/// The volume handle that kubelet makes for an inline volume of a workload. It is used as the name of its PV, which it has not.
pub fn inline_volume_name(workload: &WorkloadUid, volume: &str) -> PvName {
    let handle = format!("csi-{}", hex(&Sha256::digest(format!("{workload}{volume}"))));
    // Hex digits are a plain path component.
    PvName::from_digest(handle)
}

/// 56 hex digits: short enough for a label or a name, long enough to never meet another.
pub(crate) fn hex_sha224<Part: AsRef<[u8]>>(parts: impl IntoIterator<Item = Part>) -> String {
    let mut hash = Sha224::new();
    for part in parts {
        hash.update(part);
    }
    hex(&hash.finalize())
}

/// Whether a name is this prefix and a hash of [`hex_sha224`].
pub(crate) fn is_derived(prefix: &str, name: &str) -> bool {
    name.strip_prefix(prefix).is_some_and(|hash| {
        hash.len() == HASH_LENGTH && hash.bytes().all(|it| it.is_ascii_digit() || (b'a'..=b'f').contains(&it))
    })
}

fn hex(digest: &[u8]) -> String {
    digest.iter().fold(String::with_capacity(2 * digest.len()), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(workload: &str, volume: &str, expected: &str) {
        assert_eq!(mountpoint_pod_name(&workload.parse().unwrap(), &volume.parse().unwrap()), expected);
    }

    #[test]
    fn mountpoint_pod_names_are_those_of_earlier_drivers() {
        check(
            "a4509011-bd2a-4f37-b1b0-05d715087852",
            "test-vol",
            "mp-55f7d2331f3149f00d62d7af839d4cee895e1c68a2f0d96ffd359f79",
        );
        check("test-pod-uid", "test-vol", "mp-8ef7856a0c7f1d5706bd6af93fdc4bc90b33cf2ceb6769b4afd62586");
    }

    /// kubelet: `csi-` and the SHA-256 of the Pod's UID and the volume's name.
    #[test]
    fn inline_volumes_are_named_as_kubelet_does() {
        let name = inline_volume_name(&"uid-1".parse().unwrap(), "data");
        assert_eq!(name.as_str(), "csi-d6e418cffb6079f9b02d83af7dffbf3511ed5a26b3f106f1f3ca764ed6505c9c");
    }
}
