//! Strategy `pod`: reports containers of Mountpoint Pods that were killed for their memory, and which setting to change.
//!
//! A mounter that dies with its engine cannot say why; kubelet can, in the status of the Pod.

use std::collections::HashMap;

use s3csi_core::identifiers::WorkloadUid;
use s3csi_core::mountpoint_pod::context::{LIMITS_MEMORY, REQUESTS_MEMORY};

use super::assignment::LocalMountpointPod;
use super::reporter::Reporter;
use crate::api::MemoryKill;

const REASON: &str = "MountpointPodOutOfMemory";

/// The last kill of each Mountpoint Pod that is known.
#[derive(Debug, Default)]
pub struct MemoryKills {
    known: HashMap<WorkloadUid, Option<MemoryKill>>,
}

impl MemoryKills {
    /// Records an Event on the workloads of each Pod whose container was killed since the last call.
    pub fn report(&mut self, pods: &[LocalMountpointPod], reporter: &Reporter) {
        for (pod, kill) in self.update(pods) {
            tracing::warn!(
                pod = pod.name,
                source = pod.source,
                limit = kill.limit,
                "Mountpoint Pod was killed, out of memory"
            );
            reporter.warn_users(&pod.source, REASON, &note(&pod.name, kill));
        }
    }

    /// Kills from before a Pod was first seen were reported by an earlier process of this plugin.
    fn update<'a>(&mut self, pods: &'a [LocalMountpointPod]) -> Vec<(&'a LocalMountpointPod, &'a MemoryKill)> {
        let known = std::mem::take(&mut self.known);
        self.known = pods.iter().map(|it| (it.uid.clone(), it.memory_kill.clone())).collect();
        let is_new = |pod: &LocalMountpointPod| known.get(&pod.uid).is_some_and(|it| *it != pod.memory_kill);
        pods.iter().filter(|it| is_new(it)).filter_map(|it| Some((it, it.memory_kill.as_ref()?))).collect()
    }
}

fn note(pod: &str, kill: &MemoryKill) -> String {
    let remedy = match &kill.limit {
        Some(limit) => format!(
            "its limit is {limit}; raise it with the volume attribute {LIMITS_MEMORY}, or for all volumes with the chart value \
             mountpointPod.resources.limits.memory"
        ),
        None => format!("the node has no memory left; reserve some with the volume attribute {REQUESTS_MEMORY}"),
    };
    format!("the container of Mountpoint Pod {pod} was killed, out of memory (OOM): {remedy}")
}

#[cfg(test)]
mod tests {
    use s3csi_core::attachment::{PodPhase, Timestamp};

    use super::*;

    fn pod(uid: &str, killed_at: Option<i64>) -> LocalMountpointPod {
        LocalMountpointPod {
            name: format!("mp-{uid}"),
            source: format!("mp-{uid}"),
            created_at: Timestamp::from_unix_seconds(0),
            uid: uid.parse().unwrap(),
            phase: PodPhase::Running,
            is_terminating: false,
            is_retired: false,
            waiting_reason: String::new(),
            mounted: None,
            movable: None,
            memory_kill: killed_at.map(|it| MemoryKill { at: Timestamp::from_unix_seconds(it), limit: None }),
        }
    }

    #[test]
    fn each_kill_is_reported_once() {
        let mut kills = MemoryKills::default();
        let mut check = |pods: &[LocalMountpointPod], expected: &[&str]| {
            let found: Vec<&str> = kills.update(pods).into_iter().map(|(pod, _)| pod.name.as_str()).collect();
            assert_eq!(found, expected);
        };
        check(&[pod("a", None), pod("b", Some(1))], &[]);
        check(&[pod("a", Some(2)), pod("b", Some(1))], &["mp-a"]);
        check(&[pod("a", Some(2)), pod("b", Some(3))], &["mp-b"]);
        check(&[pod("a", Some(2)), pod("b", Some(3))], &[]);
        check(&[pod("b", Some(3))], &[]);
    }

    #[test]
    fn the_event_says_what_to_change() {
        let kill =
            |limit: Option<&str>| MemoryKill { at: Timestamp::from_unix_seconds(0), limit: limit.map(str::to_owned) };
        let said = note("mp-a", &kill(Some("2Gi")));
        assert!(said.contains("OOM") && said.contains("2Gi") && said.contains(LIMITS_MEMORY), "{said}");
        let said = note("mp-a", &kill(None));
        assert!(said.contains("OOM") && said.contains(REQUESTS_MEMORY), "{said}");
    }
}
