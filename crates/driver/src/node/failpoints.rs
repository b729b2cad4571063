//! The failpoints of publish and unpublish.

use clap::ValueEnum;

/// The step that was just completed, in the order of a publish, of an unpublish, and of a move to another mounter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Failpoint {
    Locked,
    DirectoryCreated,
    CredentialsWritten,
    Connected,
    FuseMounted,
    HandedOver,
    Served,
    Bound,
    Unbound,
    TargetRemoved,
    ExitAsked,
    SourceUnmounted,
    SourceRemoved,
    EngineEnded,
    MovePrepared,
    MoveReleased,
    MoveTold,
    MountMoved,
    CredentialsRemoved,
}

pub type Failpoints = crate::failpoints::Failpoints<Failpoint>;
