//! Numbers of objects in the cache.

use std::collections::{BTreeMap, BTreeSet};

use s3csi_core::attachment::{MountpointPod, PodPhase};

use super::Cache;
use crate::controller::facts::MountpointPodFacts;

/// Numbers of objects, for metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterCounts {
    /// Attachments all of whose Mountpoint Pods run.
    pub ready: usize,
    pub waiting: usize,
    pub workloads: usize,
    pub pods: BTreeMap<&'static str, usize>,
}

impl Cache {
    pub fn counts(&self) -> ClusterCounts {
        let mut pods: BTreeMap<&'static str, usize> =
            ["pending", "running", "ending"].into_iter().map(|it| (it, 0)).collect();
        for MountpointPodFacts { pod, .. } in self.pods.values() {
            *pods.entry(state_of(pod)).or_default() += 1;
        }
        let running: BTreeSet<&str> = self
            .pods
            .values()
            .map(|it| &it.pod)
            .filter(|it| state_of(it) == "running")
            .map(|it| it.source.as_str())
            .collect();
        let is_running = |source: &String| running.contains(source.as_str());
        let attachments = || self.attachments.values().map(|it| &it.attachment);
        let ready = attachments().filter(|it| it.entries.keys().all(is_running)).count();
        ClusterCounts {
            ready,
            waiting: self.attachments.len() - ready,
            workloads: attachments().flat_map(|it| it.entries.values()).map(Vec::len).sum(),
            pods,
        }
    }
}

fn state_of(pod: &MountpointPod) -> &'static str {
    match pod.phase {
        _ if pod.is_terminating || pod.is_retired => "ending",
        PodPhase::Running if pod.warm.is_some() => "warm",
        PodPhase::Pending => "pending",
        PodPhase::Running => "running",
        PodPhase::Succeeded => "succeeded",
        PodPhase::Failed => "failed",
        PodPhase::Unknown => "unknown",
    }
}
