//! The steps of publish and unpublish by name.

use clap::ValueEnum;

/// What has just been done, in the order of a publish and then of an unpublish.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Step {
    Locked,
    PlaceMade,
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
    CredentialsRemoved,
}

pub type Steps = crate::steps::Steps<Step>;
