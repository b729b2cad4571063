//! One look at one unit: observe, decide, apply, report.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use s3csi_core::Chain;
use s3csi_core::attachment::{Notice, Timestamp, decide};

use super::apply::{Apply, ApplyError, lock};
use super::cache::{Cache, News, Unit};
use super::facts;
use super::report::{Report, telling};
use crate::api::PodCondition;
use crate::api::event::{Kind, Telling};

/// A Mountpoint Pod that starts changes several times within a second, and every change would be a status.
const REPORTED_AFTER: Duration = Duration::from_secs(1);

pub struct Reconciler {
    pub cache: Mutex<Cache>,
    pub apply: Apply,
    pub report: Report,
}

/// How a look ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing more to do until something changes, or until this time has passed.
    Done { look_again_in: Option<Duration> },
    /// Something failed or somebody else was faster; it was logged.
    TryAgain,
}

impl Outcome {
    /// For Prometheus.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Done { .. } => "done",
            Self::TryAgain => "retry",
        }
    }
}

impl Reconciler {
    pub async fn look_at(&self, unit: &Unit, now: Timestamp) -> Outcome {
        let observed = lock(&self.cache).observe(unit);
        let decision = decide(&observed, now);
        let errors = self.apply.run(&self.cache, unit, &decision).await;
        let mut is_well = errors.is_empty();
        for error in &errors {
            self.log(unit, error).await;
        }
        // What was planned on a write that failed is not true.
        let lost_specs = errors.iter().any(ApplyError::is_about_specs);
        for notice in decision.notices.iter().filter(|it| !lost_specs || !matches!(it, Notice::Assigned { .. })) {
            is_well &= self.tell(notice).await;
        }
        if decision.is_settled() {
            let known: Vec<_> = lock(&self.cache).attachments_of(unit).cloned().collect();
            for attachment in &known {
                let named = attachment.attachment.entries.keys();
                let mounted: BTreeMap<String, PodCondition> = {
                    let cache = lock(&self.cache);
                    named.filter_map(|it| Some((it.clone(), cache.pod(it)?.mounted.clone()?))).collect()
                };
                match self.report.status(&observed, attachment, &mounted, now).await {
                    Ok(Some(object)) => {
                        if let Some(fact) = facts::attachment(&object) {
                            lock(&self.cache).tell_attachments(News::Changed(fact));
                        }
                    }
                    Ok(None) => {}
                    Err(error) => {
                        is_well = false;
                        tracing::warn!(error = %Chain(&error), "status not written, trying again");
                    }
                }
            }
        }
        if !is_well {
            return Outcome::TryAgain;
        }
        // Our own writes were told to the cache. A watch that tells the same later is no news, so nobody else would ask for the look
        // that reports them.
        let report_in = (!decision.is_settled()).then_some(REPORTED_AFTER);
        Outcome::Done { look_again_in: [decision.look_again_in, report_in].into_iter().flatten().min() }
    }

    async fn tell(&self, notice: &Notice) -> bool {
        let Some(workload) = lock(&self.cache).workload(notice.workload()).cloned() else {
            return true;
        };
        let Some(telling) = telling(notice) else {
            return true;
        };
        match self.report.tell(&workload, telling).await {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "Event not written, trying again");
                false
            }
        }
    }

    async fn log(&self, unit: &Unit, error: &ApplyError) {
        let (node, volume) = (&unit.node, &unit.persistent_volume);
        match error {
            // Whoever was faster has done what we wanted, most often.
            ApplyError::LostRace { .. } => tracing::debug!(node, %volume, error = %Chain(error), "looking again"),
            error => tracing::warn!(node, %volume, error = %Chain(error), "not done, trying again"),
        }
        let ApplyError::StartPod { workload, .. } = error else {
            return;
        };
        let Some(workload) = lock(&self.cache).workload(workload).cloned() else {
            return;
        };
        let telling =
            Telling { kind: Kind::Warning, reason: "MountpointPodNotCreated", text: Chain(error).to_string() };
        if let Err(error) = self.report.tell(&workload, telling).await {
            tracing::warn!(error = %Chain(&error), "Event not written");
        }
    }
}
