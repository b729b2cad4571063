//! Strategy `pod`: writes what this node sees of its sources as a condition on their Mountpoint Pods, `<driver>/Mounted`, where the
//! controller finds it and shows it in the attachment. Compared with what the Pod says, and written only if that is not true.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use s3csi_core::chain::Chain;
use serde_json::json;

use super::assignment::{Assignments, MountpointPod};
use super::census::{Census, State};
use super::teller::{Teller, Turn};
use crate::api::PodCondition;
use crate::api::call::call;

/// How often everything is looked at though nothing was told; an engine that died after a restart of ours tells nobody.
const LOOK_EVERY: Duration = Duration::from_secs(30);

/// After a look, whatever happens: many Pods start at once.
const PAUSE: Duration = Duration::from_secs(1);

/// After a failed write.
const RETRY: Duration = Duration::from_secs(5);

pub struct Conditions {
    pub assignments: Arc<Assignments>,
    pub census: Arc<Census>,
    pub teller: Arc<Teller>,
    pub client: Client,
    pub driver_name: String,
}

impl Conditions {
    pub async fn write_forever(self) {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), self.assignments.namespace());
        loop {
            let is_well = self.look(&pods).await;
            tokio::time::sleep(PAUSE).await;
            tokio::select! {
                () = tokio::time::sleep(if is_well { LOOK_EVERY } else { RETRY }) => {}
                () = self.teller.something_turned() => {}
                () = self.assignments.changed() => {}
            }
        }
    }

    async fn look(&self, pods: &Api<Pod>) -> bool {
        // Without having seen them all, there is nothing to compare with.
        let Some(known) = self.assignments.pods() else { return true };
        let census = self.census.clone();
        let Ok(Some((counted, _))) = tokio::task::spawn_blocking(move || census.take()).await else { return false };
        let states: HashMap<String, State> = counted
            .into_iter()
            .filter(|it| it.at.parent() == Some(&self.census.sources))
            .filter_map(|it| Some((it.at.file_name()?.to_str()?.to_owned(), it.state)))
            .collect();
        let mut is_well = true;
        for pod in known {
            let state = states.get(&pod.name).copied();
            if state.is_none() {
                self.teller.forget(&pod.name);
            }
            let Some(condition) = condition(&pod, state, self.teller.last_turn(&pod.name)) else { continue };
            if pod.mounted.as_ref() == Some(&condition) {
                continue;
            }
            is_well &= self.write(pods, &pod, &condition).await;
        }
        is_well
    }

    async fn write(&self, pods: &Api<Pod>, pod: &MountpointPod, condition: &PodCondition) -> bool {
        let PodCondition { status, reason, message } = condition;
        let mut written = json!({
            "type": PodCondition::kind(&self.driver_name), "status": status, "reason": reason, "message": message,
        });
        if pod.mounted.as_ref().map(|it| &it.status) != Some(status) {
            written["lastTransitionTime"] =
                json!(Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default());
        }
        // Conditions are merged by their type, so kubelet's stay. The UID is a precondition: the next Pod of this name is another one.
        let patch = json!({ "metadata": { "uid": pod.uid.as_str() }, "status": { "conditions": [written] } });
        match call(pods.patch_status(&pod.name, &PatchParams::default(), &Patch::Strategic(patch))).await {
            Ok(_) => {
                tracing::debug!(pod = pod.name, status, reason, "condition of the Mountpoint Pod written");
                true
            }
            Err(error) if error.is_not_found() || error.is_lost_race() => true,
            Err(error) => {
                tracing::warn!(pod = pod.name, error = %Chain(&error), "condition of the Mountpoint Pod not written, trying again");
                false
            }
        }
    }
}

/// What is to be said of a Mountpoint Pod; nothing of one for which nobody has mounted anything yet.
fn condition(pod: &MountpointPod, state: Option<State>, turn: Option<Turn>) -> Option<PodCondition> {
    let said = |status: &str, reason: &str, message: String| {
        Some(PodCondition { status: status.to_owned(), reason: reason.to_owned(), message })
    };
    match (state, turn) {
        (Some(State::Alive), Some(Turn::Resumed { cause, stall })) => said(
            "True",
            "EngineResumed",
            format!("an engine died ({cause}); another one took its place after {} ms", stall.as_millis()),
        ),
        (Some(State::Alive), _) => said("True", "Serving", "the source answers".to_owned()),
        (Some(State::Dead), Some(Turn::Died { words })) => said("False", "EngineDied", words),
        (Some(State::Dead), _) => said("False", "EngineDied", "nobody serves the source any more".to_owned()),
        (Some(State::Hung), _) => said("Unknown", "NoAnswer", "the source does not answer".to_owned()),
        // The next look may know better.
        (Some(State::Unknown), _) => pod.mounted.clone(),
        (None, _) if pod.mounted.is_none() => None,
        (None, _) => said("False", "Unmounted", "the source is not mounted".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use s3csi_core::attachment::Phase;

    use super::*;

    #[track_caller]
    fn check(known: Option<&str>, state: Option<State>, turn: Option<Turn>, expected: Option<(&str, &str)>) {
        let mounted =
            known.map(|it| PodCondition { status: it.to_owned(), reason: "Known".to_owned(), message: String::new() });
        let pod = MountpointPod {
            name: "mp-a".to_owned(),
            uid: "uid".parse().unwrap(),
            phase: Phase::Running,
            is_terminating: false,
            is_retired: false,
            trouble: String::new(),
            mounted,
        };
        let found = condition(&pod, state, turn);
        assert_eq!(found.as_ref().map(|it| (it.status.as_str(), it.reason.as_str())), expected);
    }

    #[test]
    fn a_source_that_answers_is_mounted_and_no_other() {
        let died = || Some(Turn::Died { words: "out of memory".to_owned() });
        let resumed = || Some(Turn::Resumed { cause: "killed".to_owned(), stall: Duration::from_millis(9) });
        check(None, None, None, None);
        check(None, Some(State::Alive), None, Some(("True", "Serving")));
        check(Some("True"), Some(State::Alive), resumed(), Some(("True", "EngineResumed")));
        check(Some("True"), Some(State::Dead), None, Some(("False", "EngineDied")));
        check(Some("True"), Some(State::Dead), died(), Some(("False", "EngineDied")));
        check(Some("False"), Some(State::Alive), died(), Some(("True", "Serving")));
        check(Some("True"), Some(State::Hung), None, Some(("Unknown", "NoAnswer")));
        check(Some("True"), Some(State::Unknown), None, Some(("True", "Known")));
        check(Some("True"), None, None, Some(("False", "Unmounted")));
    }
}
