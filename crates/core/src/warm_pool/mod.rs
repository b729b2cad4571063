//! How many warm Mountpoint Pods a node has: Pods that run an idle mounter until a source adopts them.
//!
//! Every decision is about one node. A warm Pod bears a label until it is adopted, which is a compare-and-swap against its version
//! (`attachment`); deleting one has the same precondition. So a Pod that two controllers want is either adopted or deleted, and once.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::attachment::{MountpointPod, PodPhase, Timestamp};
use crate::mountpoint_pod::PodTemplate;
use crate::names::hex_sha224;

/// kubelet forgets the driver while the node plugin restarts. After this long, it is gone.
const PLUGIN_RESTART: Duration = Duration::from_mins(2);

/// A Pod that fails as soon as it exists is not recreated faster than this.
const REPLACEMENT_PAUSE: Duration = Duration::from_secs(10);

/// Everything that is known about the warm Pods of one node.
#[derive(Clone, Debug)]
pub struct ObservedPool {
    pub node: String,
    /// How many warm Pods a node with a node plugin has.
    pub size: usize,
    pub plugin: NodePlugin,
    /// Our own.
    pub driver_version: String,
    /// What warm Pods are created from.
    pub template: PodTemplate,
    pub warm_pods: Vec<MountpointPod>,
    /// Names of Mountpoint Pods of this node. One that was adopted keeps its name.
    pub taken_names: BTreeSet<String>,
}

/// Whether a node can use Mountpoint Pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodePlugin {
    /// kubelet knows the driver.
    Registered,
    /// It does not, at least since this time.
    Missing { since: Timestamp },
    /// There is no such node.
    NoNode,
}

/// What to do next for one node. Without actions once the pool is as it should be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolDecision {
    pub actions: Vec<PoolAction>,
    /// When time alone changes the decision.
    pub requeue_after: Option<Duration>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoolAction {
    /// Create a warm Pod under this name, unless the node is cordoned. That it exists already is success.
    Start { name: String },
    /// With both as preconditions: one that was adopted meanwhile stays.
    Delete { name: String, uid: String, resource_version: String },
}

/// What to do next. Equal facts lead to equal decisions in every controller.
pub fn decide(observed: &ObservedPool, now: Timestamp) -> PoolDecision {
    let mut decision = PoolDecision::default();
    let (fit, unfit): (Vec<&MountpointPod>, Vec<&MountpointPod>) = observed
        .warm_pods
        .iter()
        .filter(|it| !it.is_terminating)
        .partition(|it| it.warm.as_ref() == Some(&observed.template) && it.is_suitable(&observed.driver_version));
    let mut failed = 0;
    for pod in unfit {
        let pause = REPLACEMENT_PAUSE.saturating_sub(pod.created_at.age(now));
        if pod.phase.is_finished() && !pause.is_zero() {
            failed += 1;
            decision.requeue_after(pause);
        } else {
            decision.delete(pod);
        }
    }
    let wanted = match observed.plugin {
        NodePlugin::Registered => observed.size,
        // None is started for a plugin that may not come back, and none is lost to a short restart.
        NodePlugin::Missing { since } => match PLUGIN_RESTART.saturating_sub(since.age(now)) {
            Duration::ZERO => 0,
            left => {
                decision.requeue_after(left);
                observed.size.min(fit.len())
            }
        },
        NodePlugin::NoNode => 0,
    };
    for pod in best_first(&fit).into_iter().skip(wanted) {
        decision.delete(pod);
    }
    let missing = wanted.saturating_sub(fit.len() + failed);
    let names = (0_usize..).map(|it| warm_pod_name(&observed.node, it));
    for name in names.filter(|it| !observed.taken_names.contains(it)).take(missing) {
        decision.actions.push(PoolAction::Start { name });
    }
    decision
}

/// Derived, so that two controllers that start the same warm Pod start one.
pub fn warm_pod_name(node: &str, number: usize) -> String {
    format!("mp-{}", hex_sha224(["warm\n", node, "\n", &number.to_string()]))
}

/// Of too many, those that were started last go.
fn best_first<'a>(pods: &[&'a MountpointPod]) -> Vec<&'a MountpointPod> {
    let mut pods = pods.to_vec();
    pods.sort_by_key(|it| (it.phase != PodPhase::Running, it.created_at, &it.name));
    pods
}

impl PoolDecision {
    fn delete(&mut self, pod: &MountpointPod) {
        let MountpointPod { name, uid, resource_version, .. } = pod.clone();
        self.actions.push(PoolAction::Delete { name, uid, resource_version });
    }

    fn requeue_after(&mut self, delay: Duration) {
        self.requeue_after = Some(self.requeue_after.map_or(delay, |it| it.min(delay)));
    }
}

#[cfg(test)]
mod tests;
