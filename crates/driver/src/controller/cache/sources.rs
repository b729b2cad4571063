//! Sources with several Mountpoint Pods: one serves, and another one is to take over.

use std::collections::HashMap;

use s3csi_core::attachment::newest_first;

use super::{Cache, ReconcileKey};
use crate::api::PodCondition;

impl Cache {
    /// Whether a source is mounted, as the node says of the Mountpoint Pod that serves it, or else of the newest one.
    pub fn mounted(&self, key: &ReconcileKey, source: &str) -> Option<&PodCondition> {
        let of_key = self
            .pods_by_key
            .get(key)
            .map(String::as_str)
            .chain(std::iter::once(source))
            .filter_map(|it| self.pods.get(it));
        let pods = newest_first(of_key.filter(|it| it.pod.source == source), |it| it.pod.identity());
        let serving = pods.iter().find(|it| it.pod.is_mounted);
        serving.or_else(|| pods.first())?.mounted.as_ref()
    }

    /// How many sources of a node have more than one Mountpoint Pod.
    pub(super) fn replacements(&self, node: &str) -> usize {
        let mut pods: HashMap<&str, usize> = HashMap::new();
        for it in self.pods.values().filter(|it| it.node.as_deref() == Some(node)) {
            *pods.entry(&it.pod.source).or_default() += 1;
        }
        pods.values().filter(|it| 1 < **it).count()
    }
}
