//! What was put right without being asked: one log line and one count each, with a reason that an Event can carry.

use std::path::Path;
use std::sync::Arc;

use super::strategies::systemd::SWEEP_REASONS;
use crate::metrics::NodeMetrics;

/// An engine died and its target was mounted anew.
pub const REMOUNTED: &str = "EngineRemounted";
/// An engine died and could not be replaced; the next publish tries again.
pub const NOT_REMOUNTED: &str = "EngineNotRemounted";
/// Credentials of a target that is gone.
pub const CREDENTIALS_REMOVED: &str = "LeftoverCredentialsRemoved";
/// A source that did not answer any more, found by the publish that needed it.
pub const DEAD_SOURCE_REPLACED: &str = "DeadSourceReplaced";
/// A dead source that nobody uses.
pub const DEAD_SOURCE_REMOVED: &str = "DeadSourceRemoved";
/// A source whose Mountpoint Pod is gone, or that a crash left without a workload.
pub const ORPHANED_SOURCE_REMOVED: &str = "OrphanedSourceRemoved";

#[derive(Clone)]
pub struct Repairs(Arc<NodeMetrics>);

impl Repairs {
    /// Of a strategy whose sources are shared.
    pub fn of_sources(metrics: Arc<NodeMetrics>) -> Self {
        metrics.expect_repairs(&[DEAD_SOURCE_REPLACED, DEAD_SOURCE_REMOVED, ORPHANED_SOURCE_REMOVED]);
        Self(metrics)
    }

    /// Of strategy `systemd`.
    pub fn of_units(metrics: Arc<NodeMetrics>) -> Self {
        metrics.expect_repairs(&[REMOUNTED, NOT_REMOUNTED, CREDENTIALS_REMOVED]);
        metrics.expect_repairs(&SWEEP_REASONS);
        Self(metrics)
    }

    /// `who` is the unit or the source.
    pub fn done(&self, reason: &'static str, target: &Path, who: &str) {
        let total = self.0.repaired(reason);
        tracing::warn!(reason, total, ?target, who, "repaired");
    }

    /// An engine ended that should not have; whether its target could be repaired is counted when it is known.
    pub fn engine_died(&self) {
        self.0.engine_died();
    }
}
