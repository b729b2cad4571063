//! A client of systemd's private socket: starts transient units, captures their start-up output, and watches them. It knows
//! nothing about volumes, buckets or CSI.
//!
//! Calls block until a deadline, on threads that may block. All of them share one connection, no lock is held across a call,
//! and a lost connection (systemd re-executed itself) is re-established in the background.

mod client;
mod connection;
mod error;
mod names;
mod service;
mod signals;
mod socket;
mod terminal;

pub use self::client::Systemd;
pub use self::error::SystemdError;
pub use self::service::{Ended, Limits, Restart, Service, ServiceOutcome, ServiceType, Started};
pub use self::signals::Change;

/// systemd's socket for root.
pub const PRIVATE_SOCKET: &str = "/run/systemd/private";

/// A row of systemd's list of units.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitRow {
    pub name: String,
    pub active: ActiveState,
    /// A start or stop job is running.
    pub has_job: bool,
}

impl UnitRow {
    /// Its processes may be running, or will be: systemd restarts it.
    pub const fn is_running(&self) -> bool {
        self.active.is_running() || self.has_job
    }
}

/// The `ActiveState` of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActiveState {
    Active,
    Activating,
    Deactivating,
    Failed,
    Inactive,
    /// `reloading`, `maintenance` and states of later versions: treated as running.
    Other,
}

impl ActiveState {
    fn parse(text: &str) -> Self {
        match text {
            "active" => Self::Active,
            "activating" => Self::Activating,
            "deactivating" => Self::Deactivating,
            "failed" => Self::Failed,
            "inactive" => Self::Inactive,
            _ => Self::Other,
        }
    }

    /// Its processes may be running.
    pub const fn is_running(self) -> bool {
        matches!(self, Self::Active | Self::Activating | Self::Deactivating | Self::Other)
    }
}

/// What a unit was asked to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitCommand {
    /// The program and its arguments.
    pub command: Vec<String>,
    pub environment: Vec<String>,
    pub limits: Limits,
    /// Start time in microseconds of `CLOCK_MONOTONIC`.
    pub started: u64,
}
