//! Runs the engine of one mount, and starts another one on the same mount when it dies, freezes or is to be replaced.
//!
//! The mounter calls [`run`] for each mount request, `mount-s3 --keep-alive` through [`standalone`].
#![forbid(unsafe_code)]

mod ca_bundle;
mod config;
pub mod control;
mod credentials_file;
mod engine;
mod exit_cause;
mod handle;
mod heartbeat;
mod launch;
pub mod log;
mod mount;
mod oom;
mod output;
mod spare;
pub mod standalone;
mod supervisor;

pub use ca_bundle::{CaBundle, system_ca_bundle};
pub use config::{Standby, SupervisorConfig};
pub use engine::{EngineExit, StartError, Stream};
pub use handle::SupervisorHandle;
pub use launch::{EngineDirectories, InvalidRequest, Launch, StageSpec};
pub use mount::{MountDescriptors, MountResources, MountSpec, TakeoverTrigger};
pub use oom::lower_own_oom_score;
pub use output::shorten;
pub use supervisor::{Outcome, run};
