//! Parts of Kubernetes that act by themselves, where a test needs many of their acts.

use futures::{StreamExt as _, pin_mut};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::runtime::watcher::{self, Event};
use serde_json::json;

use super::World;

/// Dropping it ends the act.
pub struct Actor(tokio::task::JoinHandle<()>);

impl Drop for Actor {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl World {
    /// Kubelet and node plugin, as far as Mountpoint Pods are concerned: they start, end when asked to, and vanish when
    /// deleted.
    pub fn play_nodes(&self) -> Actor {
        let pods = self.pod_api(&self.mountpoint_namespace);
        let needs_unmount = format!("{}/needs-unmount", self.driver);
        Actor(tokio::spawn(async move {
            let events = watcher::watcher(pods.clone(), watcher::Config::default());
            pin_mut!(events);
            while let Some(event) = events.next().await {
                if let Ok(Event::Apply(pod) | Event::InitApply(pod)) = event {
                    play(&pods, &needs_unmount, &pod).await;
                }
            }
        }))
    }
}

async fn play(pods: &kube::Api<Pod>, needs_unmount: &str, pod: &Pod) {
    let name = pod.metadata.name.as_deref().unwrap();
    let phase = pod.status.as_ref().and_then(|it| it.phase.as_deref()).unwrap_or_default();
    let is_retired = pod.metadata.annotations.as_ref().is_some_and(|it| it.contains_key(needs_unmount));
    // Each may fail because somebody was faster; then another event tells.
    if pod.metadata.deletion_timestamp.is_some() {
        let _ = pods.delete(name, &DeleteParams::default().grace_period(0)).await;
    } else if let Some(next) = match (phase, is_retired) {
        ("Pending", false) => Some("Running"),
        ("Pending" | "Running", true) => Some("Succeeded"),
        _ => None,
    } {
        let patch = Patch::Merge(json!({ "status": { "phase": next } }));
        let _ = pods.patch_status(name, &PatchParams::default(), &patch).await;
    }
}
