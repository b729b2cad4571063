//! systemd on this node, over its private socket: transient units with the output of their start, and what becomes of
//! them. It knows nothing about volumes, buckets or CSI.
//!
//! Calls block and have a deadline: they are made from threads that may wait. One connection serves all of them at once, no
//! lock is held while anybody waits, and a connection that is lost (systemd was restarted) is made anew behind their backs.

mod client;
mod error;
mod link;
mod names;
mod service;
mod signals;
mod socket;
mod terminal;

pub use self::client::Systemd;
pub use self::error::SystemdError;
pub use self::names::random_uuid;
pub use self::service::{Ended, Kind, Limits, Outcome, Service, Started};
pub use self::signals::Change;

/// Where systemd listens for root.
pub const PRIVATE_SOCKET: &str = "/run/systemd/private";

/// A unit as systemd lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitRow {
    pub name: String,
    pub active: ActiveState,
    /// A start or stop of it is under way.
    pub has_job: bool,
}

/// What systemd says about a unit, as far as we care.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActiveState {
    Active,
    Activating,
    Deactivating,
    Failed,
    Inactive,
    /// `reloading`, `maintenance` and what later versions may add: it runs, in some way.
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

    /// Its processes run, or may.
    pub const fn is_running(self) -> bool {
        matches!(self, Self::Active | Self::Activating | Self::Deactivating | Self::Other)
    }
}

/// What a unit runs, as it was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitCommand {
    /// The program and its arguments.
    pub command: Vec<String>,
    pub environment: Vec<String>,
    pub limits: Limits,
    /// Microseconds on the clock that never goes back, when it was started; later units have larger ones.
    pub started: u64,
}
