//! What was put right without being asked: one log line and one count each, with a reason that an Event can carry.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// An engine died and its target was mounted anew.
pub const REMOUNTED: &str = "EngineRemounted";
/// An engine died and could not be replaced; the next publish tries again.
pub const NOT_REMOUNTED: &str = "EngineNotRemounted";
/// Credentials of a target that is gone.
pub const CREDENTIALS_REMOVED: &str = "LeftoverCredentialsRemoved";

#[derive(Debug, Default)]
pub struct Repairs(Mutex<BTreeMap<&'static str, u64>>);

impl Repairs {
    pub fn done(&self, reason: &'static str, target: &Path, unit: &str) {
        let total = self.count(reason);
        tracing::warn!(reason, total, ?target, unit, "repaired");
    }

    /// How often each reason was one.
    pub fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn count(&self, reason: &'static str) -> u64 {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(reason).or_default();
        *count += 1;
        *count
    }
}
