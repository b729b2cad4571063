//! Strategy `pod`: writes the health of each source as condition `<driver>/Mounted` of the Mountpoint Pod that serves it, and as
//! `<driver>/Movable` whether another one could take over. Level-based: conditions are written if they differ from what is found.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use s3csi_core::chain::Chain;
use serde_json::{Value, json};

use super::assignment::{Assignments, LocalMountpointPod};
use super::memory_kills::MemoryKills;
use super::mount_health::{MountHealth, MountState};
use super::reporter::{EngineEvent, Reporter};
use crate::api::PodCondition;
use crate::api::call::call;

/// Resync period: an engine that dies after a restart of the plugin sends no event.
const RESYNC: Duration = Duration::from_secs(30);

/// Minimum pause between two rounds: many Pods start at once.
const PAUSE: Duration = Duration::from_secs(1);

/// After a failed write.
const RETRY: Duration = Duration::from_secs(5);

pub struct Conditions {
    pub assignments: Arc<Assignments>,
    pub mount_health: Arc<MountHealth>,
    pub reporter: Arc<Reporter>,
    pub client: Client,
    pub driver_name: String,
}

impl Conditions {
    pub async fn write_forever(self) {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), self.assignments.namespace());
        let mut memory_kills = MemoryKills::default();
        loop {
            if let Some(known) = self.assignments.pods() {
                memory_kills.report(&known, &self.reporter);
            }
            let is_written = self.sync(&pods).await;
            tokio::time::sleep(PAUSE).await;
            tokio::select! {
                () = tokio::time::sleep(if is_written { RESYNC } else { RETRY }) => {}
                () = self.reporter.changed() => {}
                () = self.assignments.changed() => {}
            }
        }
    }

    async fn sync(&self, pods: &Api<Pod>) -> bool {
        // The first list is not complete yet.
        let Some(known) = self.assignments.pods() else { return true };
        let health = self.mount_health.clone();
        let Ok(Some((mounts, _))) = tokio::task::spawn_blocking(move || health.check()).await else { return false };
        let states: HashMap<String, MountState> = mounts
            .into_iter()
            .filter(|it| it.at.parent() == Some(&self.mount_health.sources))
            .filter_map(|it| Some((it.at.file_name()?.to_str()?.to_owned(), it.state)))
            .collect();
        let mut is_written = true;
        for pod in &known {
            let state = states.get(&pod.source).copied();
            if state.is_none() {
                self.reporter.forget(&pod.source);
            }
            let held = self.mount_health.held_mounts.find(&self.mount_health.sources.join(&pod.source));
            let server = match held.as_ref().and_then(|it| it.pod()) {
                Some(server) if server == pod.uid => Server::ThisPod,
                Some(_) => Server::AnotherPod,
                None if known.iter().filter(|it| it.source == pod.source).count() == 1 => Server::ThisPod,
                // After a restart of this plugin, until a mounter was asked.
                None => continue,
            };
            let event = self.reporter.last_engine_event(&pod.source);
            let mounted = mounted_condition(pod, server, state, event);
            let is_movable = server == Server::ThisPod && held.is_some_and(|it| it.is_movable());
            let movable = movable_condition(pod, server, is_movable);
            let changed: Vec<(String, PodCondition)> = [
                (PodCondition::mounted(&self.driver_name), &pod.mounted, mounted),
                (PodCondition::movable(&self.driver_name), &pod.movable, movable),
            ]
            .into_iter()
            .filter(|(_, known, condition)| *known != condition)
            .filter_map(|(kind, _, condition)| Some((kind, condition?)))
            .collect();
            if !changed.is_empty() {
                is_written &= self.write(pods, pod, &changed).await;
            }
        }
        is_written
    }

    async fn write(&self, pods: &Api<Pod>, pod: &LocalMountpointPod, changed: &[(String, PodCondition)]) -> bool {
        let known = |kind: &str| {
            let is_mounted = kind == PodCondition::mounted(&self.driver_name);
            if is_mounted { pod.mounted.as_ref() } else { pod.movable.as_ref() }
        };
        let written: Vec<Value> = changed
            .iter()
            .map(|(kind, condition)| {
                let PodCondition { status, reason, message } = condition;
                let mut written = json!({ "type": kind, "status": status, "reason": reason, "message": message });
                if known(kind).map(|it| &it.status) != Some(status) {
                    written["lastTransitionTime"] =
                        json!(Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default());
                }
                written
            })
            .collect();
        // Conditions are merged by type, so kubelet's stay. The UID is a precondition: a Pod created again under this name is
        // another Pod.
        let patch = json!({ "metadata": { "uid": pod.uid.as_str() }, "status": { "conditions": written } });
        match call(pods.patch_status(&pod.name, &PatchParams::default(), &Patch::Strategic(patch))).await {
            Ok(_) => {
                tracing::debug!(pod = pod.name, ?changed, "conditions of the Mountpoint Pod written");
                true
            }
            Err(error) if error.is_not_found() || error.is_lost_race() => true,
            Err(error) => {
                tracing::warn!(pod = pod.name, error = %Chain(&error), "failed to write the conditions of the Mountpoint Pod, retrying");
                false
            }
        }
    }
}

/// Which Mountpoint Pod serves a source, seen from one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Server {
    ThisPod,
    AnotherPod,
}

/// Whether another Pod could take over from this one. None if it never served.
fn movable_condition(pod: &LocalMountpointPod, server: Server, is_movable: bool) -> Option<PodCondition> {
    let condition = |status: &str, reason: &str, message: &str| {
        Some(PodCondition { status: status.to_owned(), reason: reason.to_owned(), message: message.to_owned() })
    };
    match server {
        Server::ThisPod if is_movable => condition("True", "MountHeld", "another Mountpoint Pod can take over"),
        _ if pod.movable.is_none() => None,
        Server::ThisPod => condition("False", "MountNotHeld", "the mount ends with this Pod"),
        Server::AnotherPod => condition("False", "MountMoved", "another Mountpoint Pod serves the source"),
    }
}

/// Whether a Mountpoint Pod serves its source. None if it never did.
fn mounted_condition(
    pod: &LocalMountpointPod,
    server: Server,
    state: Option<MountState>,
    event: Option<EngineEvent>,
) -> Option<PodCondition> {
    let condition = |status: &str, reason: &str, message: String| {
        Some(PodCondition { status: status.to_owned(), reason: reason.to_owned(), message })
    };
    if server == Server::AnotherPod {
        let message = "another Mountpoint Pod serves the source".to_owned();
        return pod.mounted.as_ref().and_then(|_| condition("False", "MountMoved", message));
    }
    match (state, event) {
        (Some(MountState::Alive), Some(EngineEvent::Resumed { cause, stall })) => condition(
            "True",
            "EngineResumed",
            format!("the engine died ({cause}); a new engine resumed the mount after {} ms", stall.as_millis()),
        ),
        (Some(MountState::Alive), _) => condition("True", "Serving", "the source is mounted and answers".to_owned()),
        (Some(MountState::Dead), Some(EngineEvent::Died { error })) => condition("False", "EngineDied", error),
        (Some(MountState::Dead), _) => condition("False", "EngineDied", "the source has no engine".to_owned()),
        (Some(MountState::Hung), _) => condition("Unknown", "NoAnswer", "the source does not answer".to_owned()),
        (Some(MountState::Unserved), _) => condition(
            "Unknown",
            "MounterGone",
            "the mounter is gone; the mount waits for the next one, and so do its users".to_owned(),
        ),
        // Keep the last known condition until the next round.
        (Some(MountState::Unknown), _) => pod.mounted.clone(),
        (None, _) if pod.mounted.is_none() => None,
        (None, _) => condition("False", "Unmounted", "the source is not mounted".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use s3csi_core::attachment::PodPhase;

    use super::*;

    #[track_caller]
    fn check(
        known: Option<&str>,
        state: Option<MountState>,
        event: Option<EngineEvent>,
        expected: Option<(&str, &str)>,
    ) {
        let mounted =
            known.map(|it| PodCondition { status: it.to_owned(), reason: "Known".to_owned(), message: String::new() });
        let pod = LocalMountpointPod {
            name: "mp-a".to_owned(),
            source: "mp-a".to_owned(),
            created_at: s3csi_core::attachment::Timestamp::from_unix_seconds(0),
            uid: "uid".parse().unwrap(),
            phase: PodPhase::Running,
            is_terminating: false,
            is_retired: false,
            waiting_reason: String::new(),
            mounted,
            movable: None,
            memory_kill: None,
        };
        let found = mounted_condition(&pod, Server::ThisPod, state, event);
        assert_eq!(found.as_ref().map(|it| (it.status.as_str(), it.reason.as_str())), expected);
    }

    #[test]
    fn a_source_that_answers_is_mounted_and_no_other() {
        let died = || Some(EngineEvent::Died { error: "out of memory".to_owned() });
        let resumed = || Some(EngineEvent::Resumed { cause: "killed".to_owned(), stall: Duration::from_millis(9) });
        check(None, None, None, None);
        check(None, Some(MountState::Alive), None, Some(("True", "Serving")));
        check(Some("True"), Some(MountState::Alive), resumed(), Some(("True", "EngineResumed")));
        check(Some("True"), Some(MountState::Dead), None, Some(("False", "EngineDied")));
        check(Some("True"), Some(MountState::Dead), died(), Some(("False", "EngineDied")));
        check(Some("False"), Some(MountState::Alive), died(), Some(("True", "Serving")));
        check(Some("True"), Some(MountState::Hung), None, Some(("Unknown", "NoAnswer")));
        check(Some("True"), Some(MountState::Unserved), None, Some(("Unknown", "MounterGone")));
        check(Some("True"), Some(MountState::Unknown), None, Some(("True", "Known")));
        check(Some("True"), None, None, Some(("False", "Unmounted")));
    }
}
