//! The kill matrix: which part of the driver or its surroundings is ended, how, with which strategy and under which workload, and what
//! the application may see. The table is complete; a cell that is not measured names the test that shows it, or its reason.
//!
//! `run` measures a row, `disrupt` ends the part, `work` is the workload, and `page` writes docs/reliability-matrix.md.

pub mod disrupt;
pub mod page;
pub mod run;
mod table;
pub mod work;

pub use table::row;

/// How engines run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MatrixStrategy {
    Daemon,
    Pod,
    Systemd,
}

/// What is ended or stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Victim {
    Engine,
    Supervisor,
    Container,
    NodePlugin,
    /// Node plugin and whole container at the same moment.
    Both,
    Controller,
    Kubelet,
    Containerd,
    ApiServer,
    S3Server,
    Systemd,
    Node,
}

/// How it is ended or stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Disruption {
    Kill,
    Stop,
    Terminate,
    Restart,
    DeletePod,
    Evict,
}

/// What the application does meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MatrixWorkload {
    Idle,
    Reading,
    WritingSmall,
    WritingBig,
    Listing,
    Mmap,
    Publishing,
    Unpublishing,
    Shared,
    ReadOnly,
    SubPath,
}

/// A row of the matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixRow {
    /// Run by a test of this strategy, for each workload.
    Measured(Expectation),
    /// Needs what only another test has: `program::module::test`.
    Shown {
        test: &'static str,
    },
    NotApplicable {
        reason: &'static str,
    },
}

/// What applications may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expectation {
    /// A pause, and no error.
    Pause,
    /// A pause; only the writer of a file of more than 8 MiB may get an error, and then the object is the one of before.
    WriterError,
    /// Errors while the store is away; after that all go on with the same mount.
    StoreErrors,
    /// Errors until the volume is published again; files that were open stay broken.
    Lost,
}

impl MatrixStrategy {
    pub const ALL: [Self; 3] = [Self::Daemon, Self::Pod, Self::Systemd];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Daemon => "daemon",
            Self::Pod => "pod",
            Self::Systemd => "systemd",
        }
    }
}

impl Victim {
    pub const ALL: [Self; 12] = [
        Self::Engine,
        Self::Supervisor,
        Self::Container,
        Self::NodePlugin,
        Self::Both,
        Self::Controller,
        Self::Kubelet,
        Self::Containerd,
        Self::ApiServer,
        Self::S3Server,
        Self::Systemd,
        Self::Node,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Engine => "engine",
            Self::Supervisor => "supervisor",
            Self::Container => "whole container",
            Self::NodePlugin => "node plugin",
            Self::Both => "both",
            Self::Controller => "controller",
            Self::Kubelet => "kubelet",
            Self::Containerd => "containerd",
            Self::ApiServer => "API server",
            Self::S3Server => "S3 server",
            Self::Systemd => "systemd",
            Self::Node => "node",
        }
    }
}

impl Disruption {
    pub const ALL: [Self; 6] = [Self::Kill, Self::Stop, Self::Terminate, Self::Restart, Self::DeletePod, Self::Evict];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill -9",
            Self::Stop => "SIGSTOP",
            Self::Terminate => "SIGTERM",
            Self::Restart => "restart",
            Self::DeletePod => "delete Pod",
            Self::Evict => "evict",
        }
    }
}

impl MatrixWorkload {
    pub const ALL: [Self; 11] = [
        Self::Idle,
        Self::Reading,
        Self::WritingSmall,
        Self::WritingBig,
        Self::Listing,
        Self::Mmap,
        Self::Publishing,
        Self::Unpublishing,
        Self::Shared,
        Self::ReadOnly,
        Self::SubPath,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Reading => "reading",
            Self::WritingSmall => "writing small",
            Self::WritingBig => "writing big",
            Self::Listing => "listing",
            Self::Mmap => "mmap",
            Self::Publishing => "publishing",
            Self::Unpublishing => "unpublishing",
            Self::Shared => "shared by 3",
            Self::ReadOnly => "read-only",
            Self::SubPath => "subPath",
        }
    }

    /// Why there is no such workload with a strategy.
    pub const fn missing(self, strategy: MatrixStrategy) -> Option<&'static str> {
        match (strategy, self) {
            (MatrixStrategy::Systemd, Self::Shared) => Some("each target has a unit and an engine of its own"),
            _ => None,
        }
    }
}

/// Every row of a strategy, in the order of the page.
pub fn rows(strategy: MatrixStrategy) -> impl Iterator<Item = (Victim, Disruption, MatrixRow)> {
    Victim::ALL.into_iter().flat_map(move |victim| {
        Disruption::ALL.into_iter().map(move |disruption| (victim, disruption, row(strategy, victim, disruption)))
    })
}

/// The rows that a test of this strategy runs: all of them, or in every CI run the few that show the most.
pub fn measured_rows(strategy: MatrixStrategy, is_whole: bool) -> Vec<(Victim, Disruption, Expectation)> {
    let is_usual = |victim, disruption| {
        matches!(
            (strategy, victim, disruption),
            (MatrixStrategy::Daemon, Victim::Container | Victim::Both, Disruption::Kill)
                | (MatrixStrategy::Pod, Victim::Container, Disruption::DeletePod)
                | (MatrixStrategy::Systemd, Victim::Container, Disruption::Kill)
        )
    };
    rows(strategy)
        .filter_map(|(victim, disruption, row)| match row {
            MatrixRow::Measured(expectation) if is_whole || is_usual(victim, disruption) => {
                Some((victim, disruption, expectation))
            }
            _ => None,
        })
        .collect()
}
