//! The cluster as lines of text, in the test's own words: what exists, and nothing else.

use std::collections::BTreeMap;
use std::time::Instant;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, Patch, PatchParams};
use s3csi_core::attachment::Attachment;
use s3csi_core::mountpoint_pod_name;
use s3csi_driver::api::{self, MountpointS3PodAttachment};
use serde_json::json;

use super::{PAUSE, SOON, Workload, World};

impl World {
    /// Waits until attachments and Mountpoint Pods of this world are these, each on a line:
    /// `attachment PV on NODE: mp(a)=a b, mp(c)=c` and `pod mp(a) of PV on NODE: Pending`.
    #[track_caller]
    pub fn check(&self, workloads: &[&Workload], expected: &[&str]) -> impl Future<Output = ()> {
        let caller = std::panic::Location::caller();
        let deadline = Instant::now() + SOON;
        let mut expected: Vec<String> = expected.iter().map(|it| (*it).to_owned()).collect();
        expected.sort();
        async move {
            loop {
                let state = self.state(workloads).await;
                if state == expected {
                    return;
                }
                assert!(
                    Instant::now() < deadline,
                    "{caller}: waited {SOON:?} in vain\n  for {expected:#?}\n  found {state:#?}"
                );
                wait_a_moment().await;
            }
        }
    }

    /// Now, and not only in the end.
    pub async fn check_now(&self, workloads: &[&Workload], expected: &[&str]) {
        let mut expected: Vec<String> = expected.iter().map(|it| (*it).to_owned()).collect();
        expected.sort();
        assert_eq!(self.state(workloads).await, expected);
    }

    pub async fn state(&self, workloads: &[&Workload]) -> Vec<String> {
        let mut lines = Vec::new();
        for object in self.attachments().await {
            let Attachment { fields, entries, .. } = api::attachment_facts(&object).unwrap();
            let words = Words::new(workloads, fields.persistent_volume.as_str());
            let mut entries: Vec<String> = entries
                .iter()
                .map(|(pod, entries)| {
                    let mut served: Vec<String> = entries.iter().map(|it| words.of(it.workload.as_str())).collect();
                    served.sort();
                    format!("{}={}", words.of(pod), served.join(" "))
                })
                .collect();
            entries.sort();
            let volume = self.stripped(fields.persistent_volume.as_str());
            lines.push(format!("attachment {volume} on {}: {}", self.stripped(&fields.node), entries.join(", ")));
        }
        for pod in self.mountpoint_pods().await {
            let annotations = pod.metadata.annotations.clone().unwrap_or_default();
            let volume = &annotations[&format!("{}/volume-name", self.driver)];
            let words = Words::new(workloads, volume);
            let is_retired = annotations.contains_key(&format!("{}/needs-unmount", self.driver));
            let mut state = pod.status.clone().and_then(|it| it.phase).unwrap_or_default();
            if is_retired {
                state += " retired";
            }
            if pod.metadata.deletion_timestamp.is_some() {
                state += " terminating";
            }
            let name = words.of(pod.metadata.name.as_ref().unwrap());
            lines.push(format!(
                "pod {name} of {} on {}: {state}",
                self.stripped(volume),
                self.stripped(&node_of(&pod))
            ));
        }
        lines.sort();
        lines
    }

    pub async fn attachments(&self) -> Vec<MountpointS3PodAttachment> {
        let all = self.attachment_api().list(&ListParams::default()).await.unwrap();
        let prefix = self.unique("");
        all.items.into_iter().filter(|it| it.spec.persistent_volume_name.starts_with(&prefix)).collect()
    }

    pub async fn mountpoint_pods(&self) -> Vec<Pod> {
        let all = self.pod_api(&self.mountpoint_namespace).list(&ListParams::default()).await.unwrap();
        let key = format!("{}/volume-name", self.driver);
        let prefix = self.unique("");
        let is_ours = |it: &Pod| {
            let volume = it.metadata.annotations.as_ref().and_then(|it| it.get(&key));
            volume.is_some_and(|it| it.starts_with(&prefix))
        };
        all.items.into_iter().filter(is_ours).collect()
    }

    /// The Mountpoint Pod that is named after this workload.
    pub fn pod_of(&self, workload: &Workload, volume: &str) -> String {
        mountpoint_pod_name(&workload.uid, &self.unique(volume).parse().unwrap())
    }

    /// Kubelet has started, or lost, the Mountpoint Pod named after this workload.
    pub async fn set_pod_phase(&self, workload: &Workload, volume: &str, phase: &str) {
        self.set_phase_of(&self.mountpoint_namespace, &self.pod_of(workload, volume), phase).await;
    }

    pub async fn annotate_pod(&self, workload: &Workload, volume: &str, name: &str) {
        let patch = json!({ "metadata": { "annotations": { format!("{}/{name}", self.driver): "true" } } });
        let pods = self.pod_api(&self.mountpoint_namespace);
        pods.patch(&self.pod_of(workload, volume), &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    }

    fn stripped(&self, name: &str) -> String {
        name.strip_prefix(&self.unique("")).unwrap_or(name).to_owned()
    }
}

/// What things are called in a test: workloads by their names, Mountpoint Pods after the workload whose name they bear.
struct Words(BTreeMap<String, String>);

impl Words {
    fn new(workloads: &[&Workload], volume: &str) -> Self {
        let volume = volume.parse().unwrap();
        let names = workloads.iter().flat_map(|it| {
            let pod = mountpoint_pod_name(&it.uid, &volume);
            [(it.uid.as_str().to_owned(), it.name.clone()), (pod, format!("mp({})", it.name))]
        });
        Self(names.collect())
    }

    fn of(&self, name: &str) -> String {
        self.0.get(name).cloned().unwrap_or_else(|| name.to_owned())
    }
}

fn node_of(pod: &Pod) -> String {
    let affinity = pod.spec.as_ref().and_then(|it| it.affinity.as_ref()).and_then(|it| it.node_affinity.as_ref());
    let required = affinity.and_then(|it| it.required_during_scheduling_ignored_during_execution.as_ref()).unwrap();
    required.node_selector_terms[0].match_fields.as_ref().unwrap()[0].values.as_ref().unwrap()[0].clone()
}

async fn wait_a_moment() {
    tokio::time::sleep(PAUSE).await;
}
