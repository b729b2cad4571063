//! Remediations that no call asked for: each is logged and counted with a reason, which Events and metrics share.

use std::path::Path;
use std::sync::Arc;

use super::strategies::systemd::SWEEP_REASONS;
use crate::metrics::NodeMetrics;

/// An engine died and its target was mounted again.
pub const REMOUNTED: &str = "EngineRemounted";
/// An engine died and could not be replaced; the next publish tries again.
pub const NOT_REMOUNTED: &str = "EngineNotRemounted";
/// Credentials of a target that no longer exists.
pub const CREDENTIALS_REMOVED: &str = "LeftoverCredentialsRemoved";
/// A dead source, found by the publish that needed it.
pub const DEAD_SOURCE_REPLACED: &str = "DeadSourceReplaced";
/// A dead source without users.
pub const DEAD_SOURCE_REMOVED: &str = "DeadSourceRemoved";
/// A source whose Mountpoint Pod is gone, or that a crash left without a workload.
pub const ORPHANED_SOURCE_REMOVED: &str = "OrphanedSourceRemoved";

#[derive(Clone)]
pub struct Remediations(Arc<NodeMetrics>);

impl Remediations {
    /// For the strategies with sources.
    pub fn of_sources(metrics: Arc<NodeMetrics>) -> Self {
        metrics.expect_remediations(&[DEAD_SOURCE_REPLACED, DEAD_SOURCE_REMOVED, ORPHANED_SOURCE_REMOVED]);
        Self(metrics)
    }

    /// For strategy `systemd`.
    pub fn of_units(metrics: Arc<NodeMetrics>) -> Self {
        metrics.expect_remediations(&[REMOUNTED, NOT_REMOUNTED, CREDENTIALS_REMOVED]);
        metrics.expect_remediations(&SWEEP_REASONS);
        Self(metrics)
    }

    /// `subject` is the unit or the source.
    pub fn record(&self, reason: &'static str, target: &Path, subject: &str) {
        let total = self.0.remediated(reason);
        tracing::warn!(reason, total, ?target, subject, "remediated");
    }

    /// An engine ended unexpectedly. The outcome for its target is recorded separately.
    pub fn engine_died(&self) {
        self.0.engine_died();
    }
}
