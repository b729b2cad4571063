//! What was put right without being asked: one log line and one count each, with a reason that an Event can carry.

use std::path::Path;
use std::sync::Arc;

use super::sweep;
use crate::metrics::Metrics;

/// An engine died and its target was mounted anew.
pub const REMOUNTED: &str = "EngineRemounted";
/// An engine died and could not be replaced; the next publish tries again.
pub const NOT_REMOUNTED: &str = "EngineNotRemounted";
/// Credentials of a target that is gone.
pub const CREDENTIALS_REMOVED: &str = "LeftoverCredentialsRemoved";

pub struct Repairs(Arc<Metrics>);

impl Repairs {
    pub fn new(metrics: Arc<Metrics>) -> Self {
        metrics.expect_repairs(&[REMOUNTED, NOT_REMOUNTED, CREDENTIALS_REMOVED]);
        metrics.expect_repairs(&sweep::REASONS);
        Self(metrics)
    }

    pub fn done(&self, reason: &'static str, target: &Path, unit: &str) {
        let total = self.0.repaired(reason);
        tracing::warn!(reason, total, ?target, unit, "repaired");
    }

    /// An engine ended that should not have; whether its target could be repaired is counted when it is known.
    pub fn engine_died(&self) {
        self.0.engine_died();
    }
}
