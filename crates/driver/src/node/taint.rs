//! The start-up taint: new nodes are made with `<driver>/agent-not-ready`, so that no workload is scheduled to a node which cannot
//! mount yet. Once kubelet knows us it is taken away, and again whenever somebody puts it there, for as long as we run.
//!
//! Nothing else depends on it: without an API server, or without the right to change the node, the plugin works as ever.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::{Node, Taint};
use k8s_openapi::api::storage::v1::CSINode;
use kube::api::{Patch, PatchParams};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{Config, Event, watcher};
use kube::{Api, Client};
use s3csi_core::chain::Chain;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::api::call::{CallError, call};
use crate::metrics::NodeMetrics;

/// What is after the driver's name in the taint's key.
const TAINT: &str = "agent-not-ready";

/// The first retry; each further one waits twice as long.
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

/// How we know that kubelet has registered the driver.
pub enum Registered {
    /// It said so on our own registration socket, after it had written the `CSINode`.
    Acknowledged(watch::Receiver<bool>),
    /// Somebody else registers us: the `CSINode` lists the driver.
    Listed,
}

/// A version of the node that has the taint.
#[derive(Clone, Debug, PartialEq)]
struct Tainted {
    resource_version: String,
    /// All others, which stay.
    others: Vec<Taint>,
}

impl StartupTaint {
    pub async fn remove_forever(mut self) {
        let (seen, mut sight) = watch::channel(None);
        let nodes: Api<Node> = Api::all(self.client.clone());
        let key = format!("{}/{TAINT}", self.driver_name);
        tokio::join!(follow(nodes.clone(), self.node.clone(), &key, seen), async {
            let mut pause = FIRST_PAUSE;
            loop {
                // The sender lives as long as we do.
                let _ = sight.wait_for(Option::is_some).await;
                self.wait_until_registered(&key).await;
                // It may have changed while we waited.
                let Some(tainted) = sight.borrow_and_update().clone() else { continue };
                match remove(&nodes, &self.node, &tainted).await {
                    Ok(()) => {
                        tracing::info!(node = self.node, taint = key, "successfully removed taint");
                        self.metrics.taint_removed();
                        pause = FIRST_PAUSE;
                        // What we wrote comes back as news; until then the node only looks tainted.
                        let _ = sight.changed().await;
                    }
                    Err(error) => {
                        tracing::warn!(node = self.node, taint = key, error = %Chain(&error), "taint not removed, trying again");
                        tokio::time::sleep(pause).await;
                        pause = (pause * 2).min(LONGEST_PAUSE);
                    }
                }
            }
        });
    }

    async fn wait_until_registered(&mut self, taint: &str) {
        let waits =
            || tracing::info!(node = self.node, taint, "the taint stays until kubelet has registered the driver");
        match &mut self.registered {
            Registered::Acknowledged(acknowledged) => {
                if !*acknowledged.borrow() {
                    waits();
                }
                // Without a sender the plugin is ending.
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
                            tracing::warn!(error = %Chain(&error), "not known whether kubelet knows the driver");
                        }
                    }
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    }
}

/// Says, for ever, whether the node has the taint.
async fn follow(nodes: Api<Node>, node: String, key: &str, seen: watch::Sender<Option<Tainted>>) {
    let config = Config::default().fields(&format!("metadata.name={node}"));
    let mut told = String::new();
    loop {
        let mut events = std::pin::pin!(watcher(nodes.clone(), config.clone()).default_backoff());
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Apply(node) | Event::InitApply(node)) => {
                    seen.send_replace(Tainted::read(&node, key));
                }
                Ok(Event::Delete(_)) => {
                    seen.send_replace(None);
                }
                Ok(Event::Init | Event::InitDone) => {}
                Err(error) => {
                    let trouble = Chain(&error).to_string();
                    // It is tried again every half a minute; what does not change is told once.
                    if told != trouble {
                        tracing::warn!(node, error = trouble, "the node's taints cannot be seen at the moment");
                        told = trouble;
                    }
                    continue;
                }
            }
            told.clear();
        }
    }
}

/// Only if nobody has changed the node since it was seen: others add and remove taints, too.
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
    fn only_our_taint_goes() {
        check(&[], None);
        check(&["other", "agent-not-ready"], None);
        check(&["driver/agent-not-ready"], Some(&[]));
        check(&["a", "driver/agent-not-ready", "b", "driver/agent-not-ready"], Some(&["a", "b"]));
    }
}
