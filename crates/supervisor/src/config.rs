//! How long a supervisor tolerates what, and whether it keeps a standby engine.

use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SupervisorConfig {
    /// A mount without an engine is given up after this time. Until then its callers wait and cannot be killed.
    pub longest_outage: Duration,
    /// An engine without a heartbeat for this long is killed and replaced.
    pub frozen_after: Duration,
    /// An engine that answers no request for this long, although requests wait, is killed and replaced.
    pub stuck_after: Duration,
    /// How long a planned replacement waits for files that are being written.
    pub drain_time: Duration,
    pub standby: Standby,
    /// The `oom_score_adj` of engines, if it differs from that of the supervisor.
    pub engine_oom_score: Option<i32>,
}

/// Whether a second engine is kept prepared to take over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standby {
    None,
    Prepared,
}

impl SupervisorConfig {
    /// The defaults of `s3csi-mounter`, which `mount-s3 --keep-alive` uses, too.
    pub const DEFAULT: Self = Self {
        longest_outage: Duration::from_secs(30),
        frozen_after: Duration::from_secs(10),
        stuck_after: Duration::from_mins(5),
        drain_time: Duration::from_mins(1),
        standby: Standby::None,
        engine_oom_score: None,
    };

    /// Never kills an engine, never waits for another one.
    pub(crate) const OFF: Self = Self {
        longest_outage: Duration::ZERO,
        frozen_after: Duration::MAX,
        stuck_after: Duration::MAX,
        drain_time: Duration::ZERO,
        standby: Standby::None,
        engine_oom_score: None,
    };
}
