//! Removes the start-up taint `<driver>/agent-not-ready`, with which administrators create nodes so that no workload is scheduled
//! before the driver can mount. It is removed once kubelet has registered the driver, and again whenever it is added.
//!
//! Nothing else depends on it: without an API server, or without the permission to patch the node, the plugin works as usual.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Taint};
use k8s_openapi::api::storage::v1::CSINode;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use s3csi_core::chain::Chain;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::api::call::{CallError, call};
use crate::api::watch::{FieldSelector, Heartbeat, Watch, WatchUpdate};
use crate::metrics::NodeMetrics;

/// The taint's key, after the driver's name.
const TAINT: &str = "agent-not-ready";

/// Exponential back-off between retries.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

pub struct StartupTaint {
    pub client: Client,
    /// Name of this node.
    pub node: String,
    pub driver_name: String,
    pub registered: Registered,
    pub metrics: Arc<NodeMetrics>,
}

/// How to find out that kubelet has registered the driver.
pub enum Registered {
    /// By the call on our registration socket, which follows the update of the `CSINode`.
    Acknowledged(watch::Receiver<bool>),
    /// By the `CSINode`, because another process registers the driver.
    Listed,
}

/// A version of the node with the taint.
#[derive(Clone, Debug, PartialEq)]
struct Tainted {
    resource_version: String,
    /// The other taints, which stay.
    others: Vec<Taint>,
}

impl StartupTaint {
    pub async fn remove_forever(mut self) {
        let (seen, mut sight) = watch::channel(None);
        let nodes: Api<Node> = Api::all(self.client.clone());
        let key = format!("{}/{TAINT}", self.driver_name);
        let node = self.node.clone();
        tokio::join!(watch_node(nodes.clone(), &node, &key, seen), async {
            let mut pause = FIRST_PAUSE;
            loop {
                // The sender lives as long as this future.
                let _ = sight.wait_for(Option::is_some).await;
                self.wait_until_registered(&key).await;
                // It may have changed meanwhile.
                let Some(tainted) = sight.borrow_and_update().clone() else { continue };
                match remove(&nodes, &self.node, &tainted).await {
                    Ok(()) => {
                        tracing::info!(node = self.node, taint = key, "successfully removed taint");
                        self.metrics.taint_removed();
                        pause = FIRST_PAUSE;
                        // Until the watch delivers our own write, the cached node still has the taint.
                        let _ = sight.changed().await;
                    }
                    Err(error) => {
                        tracing::warn!(node = self.node, taint = key, error = %Chain(&error), "failed to remove the taint, retrying");
                        tokio::time::sleep(pause).await;
                        pause = (pause * 2).min(LONGEST_PAUSE);
                    }
                }
            }
        });
    }

    async fn wait_until_registered(&mut self, taint: &str) {
        let waits = || tracing::info!(node = self.node, taint, "taint stays until kubelet has registered the driver");
        match &mut self.registered {
            Registered::Acknowledged(acknowledged) => {
                if !*acknowledged.borrow() {
                    waits();
                }
                // The sender is gone when the plugin shuts down.
                let _ = acknowledged.wait_for(|it| *it).await;
            }
            Registered::Listed => {
                let api: Api<CSINode> = Api::all(self.client.clone());
                let mut pause = FIRST_PAUSE;
                loop {
                    match call(api.get(&self.node)).await {
                        Ok(found) if found.spec.drivers.iter().any(|it| it.name == self.driver_name) => return,
                        Ok(_) => waits(),
                        Err(error) if error.is_not_found() => waits(),
                        Err(error) => {
                            tracing::warn!(error = %Chain(&error), "failed to read the CSINode");
                        }
                    }
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    }
}

/// Watches the node for the taint.
async fn watch_node(nodes: Api<Node>, node: &str, key: &str, seen: watch::Sender<Option<Tainted>>) {
    let heartbeat = Heartbeat::new("nodes");
    let selector = FieldSelector::Required(format!("metadata.name={node}"));
    let handler = |update: WatchUpdate<Option<Tainted>>| {
        let tainted = match update {
            WatchUpdate::Listed(nodes) => nodes.into_iter().flatten().next(),
            WatchUpdate::Changed(tainted) => tainted,
            WatchUpdate::Deleted(_) => None,
        };
        seen.send_replace(tainted);
    };
    Watch { api: nodes, selector, heartbeat: &heartbeat }.run(|it| Some(Tainted::read(it, key)), handler).await;
}

/// With the resource version as precondition: others add and remove taints, too.
async fn remove(nodes: &Api<Node>, node: &str, tainted: &Tainted) -> Result<(), CallError> {
    let Tainted { resource_version, others } = tainted;
    let taints = if others.is_empty() { Value::Null } else { json!(others) };
    let patch = json!({ "metadata": { "resourceVersion": resource_version }, "spec": { "taints": taints } });
    call(nodes.patch(node, &PatchParams::default(), &Patch::Merge(patch))).await.map(drop)
}

impl Tainted {
    fn read(node: &Node, key: &str) -> Option<Self> {
        let taints = node.spec.as_ref()?.taints.as_ref()?;
        let others: Vec<Taint> = taints.iter().filter(|it| it.key != key).cloned().collect();
        let resource_version = node.metadata.resource_version.clone()?;
        (others.len() < taints.len()).then_some(Self { resource_version, others })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(taints: &[&str], expected: Option<&[&str]>) {
        let taints: Vec<Value> = taints.iter().map(|it| json!({ "key": it, "effect": "NoExecute" })).collect();
        let node = json!({ "metadata": { "resourceVersion": "7" }, "spec": { "taints": taints } });
        let found = Tainted::read(&serde_json::from_value(node).unwrap(), "driver/agent-not-ready");
        let others = found.map(|it| it.others.into_iter().map(|it| it.key).collect::<Vec<_>>());
        assert_eq!(others, expected.map(|it| it.iter().map(ToString::to_string).collect()));
    }

    #[test]
    fn only_our_taint_is_removed() {
        check(&[], None);
        check(&["other", "agent-not-ready"], None);
        check(&["driver/agent-not-ready"], Some(&[]));
        check(&["a", "driver/agent-not-ready", "b", "driver/agent-not-ready"], Some(&["a", "b"]));
    }
}
