//! Warm Mountpoint Pods, and the nodes that get some.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use s3csi_core::attachment::{MountpointPod, Timestamp};
use s3csi_core::mountpoint_pod::PodTemplate;
use s3csi_core::warm_pool::{NodePlugin, ObservedPool};

use super::index::Index;
use super::{Cache, ReconcileKeys};
use crate::api::watch::WatchUpdate;
use crate::controller::facts::{MountpointPodFacts, NodeRegistration};
use crate::controller::queue::{Priority, Queue};

/// A warm Pod that was adopted is replaced a moment later: its node is busy with the workload that waits for it.
const REFILL_DELAY: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) struct WarmPods {
    by_node: Index<String, String>,
    /// Those that a worker is about to adopt.
    reserved: BTreeSet<String>,
    plugins: HashMap<String, NodePlugin>,
    changed: Arc<Queue<String>>,
}

impl Cache {
    /// Gets the nodes whose warm Pods change.
    pub fn with_pool_queue(mut self, changed: Arc<Queue<String>>) -> Self {
        self.warm.changed = changed;
        self
    }

    /// The warm Pods of a node that may be adopted.
    pub(super) fn warm_pods(&self, node: &str) -> Vec<MountpointPod> {
        let names = self.warm.by_node.get(node).filter(|it| !self.warm.reserved.contains(*it));
        names.filter_map(|it| self.pods.get(it)).map(|it| it.pod.clone()).collect()
    }

    /// Until they are released, no other decision gets these warm Pods.
    pub fn reserve<'a>(&mut self, names: impl IntoIterator<Item = &'a str>) {
        self.warm.reserved.extend(names.into_iter().map(str::to_owned));
    }

    pub fn release<'a>(&mut self, names: impl IntoIterator<Item = &'a str>) {
        for name in names {
            self.warm.reserved.remove(name);
        }
    }

    pub fn observe_pool(&self, node: &str, size: usize, template: PodTemplate) -> ObservedPool {
        let names = self.warm.by_node.get(node).filter(|it| !self.warm.reserved.contains(*it));
        let on_node = self.pods.values().filter(|it| it.node.as_deref() == Some(node));
        ObservedPool {
            node: node.to_owned(),
            size: size.saturating_sub(self.reserved_on(node)),
            plugin: self.warm.plugins.get(node).copied().unwrap_or(NodePlugin::NoNode),
            driver_version: self.driver_version.clone(),
            template,
            warm_pods: names.filter_map(|it| self.pods.get(it)).map(|it| it.pod.clone()).collect(),
            taken_names: on_node.map(|it| it.pod.name.clone()).collect(),
        }
    }

    /// Every node that has warm Pods or should have some.
    pub fn pool_nodes(&self) -> BTreeSet<String> {
        self.warm.by_node.keys().chain(self.warm.plugins.keys()).cloned().collect()
    }

    pub fn update_nodes(&mut self, update: WatchUpdate<NodeRegistration>, now: Timestamp) -> ReconcileKeys {
        match update {
            WatchUpdate::Listed(nodes) => {
                let kept: BTreeSet<String> = nodes.iter().map(|it| it.node.clone()).collect();
                let lost: Vec<String> = self.warm.plugins.keys().filter(|it| !kept.contains(*it)).cloned().collect();
                for node in lost {
                    self.set_plugin(node, None);
                }
                for registration in nodes {
                    self.set_registration(registration, now);
                }
            }
            WatchUpdate::Changed(registration) => self.set_registration(registration, now),
            WatchUpdate::Deleted(NodeRegistration { node, .. }) => self.set_plugin(node, None),
        }
        // No volume is affected.
        ReconcileKeys::new()
    }

    fn set_registration(&mut self, NodeRegistration { node, is_registered }: NodeRegistration, now: Timestamp) {
        let plugin = match self.warm.plugins.get(&node) {
            _ if is_registered => NodePlugin::Registered,
            Some(missing @ NodePlugin::Missing { .. }) => *missing,
            Some(NodePlugin::Registered | NodePlugin::NoNode) | None => NodePlugin::Missing { since: now },
        };
        self.set_plugin(node, Some(plugin));
    }

    fn set_plugin(&mut self, node: String, plugin: Option<NodePlugin>) {
        if self.warm.plugins.get(&node).copied() == plugin {
            return;
        }
        match plugin {
            Some(plugin) => self.warm.plugins.insert(node.clone(), plugin),
            None => self.warm.plugins.remove(&node),
        };
        self.warm.changed.add(node, Duration::ZERO, Priority::Normal);
    }

    fn reserved_on(&self, node: &str) -> usize {
        self.warm.by_node.get(node).filter(|it| self.warm.reserved.contains(*it)).count()
    }
}

impl WarmPods {
    /// A Mountpoint Pod changes, from one state to another.
    pub fn update(&mut self, name: &str, from: Option<&MountpointPodFacts>, to: Option<&MountpointPodFacts>) {
        let warm_on = |it: Option<&MountpointPodFacts>| it.filter(|it| it.pod.warm.is_some())?.node.clone();
        let (before, after) = (warm_on(from), warm_on(to));
        if before != after {
            if let Some(node) = &before {
                self.by_node.remove(node, name);
            }
            if let Some(node) = &after {
                self.by_node.insert(node.clone(), name.to_owned());
            }
        }
        for node in [before, after].into_iter().flatten() {
            self.changed.add(node, REFILL_DELAY, Priority::Normal);
        }
    }
}
