//! The mounter: receives mount requests with a FUSE descriptor each and runs one engine per request.
//!
//! [`handoff`] is both ends of the protocol and, with [`read_ahead`] and [`report`], all that the node uses; the rest is the
//! program `s3csi-mounter`.
#![forbid(unsafe_code)]

pub mod alone;
mod cache;
mod connection;
mod directory;
mod engine;
pub mod handoff;
mod keeper;
mod launch;
pub mod log;
mod output;
pub mod read_ahead;
pub mod report;
mod serve;
mod slots;
mod socket;
mod survival;
mod wake;

pub use keeper::{Keeping, Standby};
pub use serve::{ServeError, Settings, serve};
pub use survival::ask_for_mercy;
pub use wake::{Wake, WakeError};

/// The socket in the mounter's directory that takes mount requests.
pub const SOCKET: &str = "mount.sock";

/// What a failed engine said, in the directory of its source.
pub const ERROR_FILE: &str = "mount.err";

/// Made by the node in the directory of a source: the end of its engine was asked for.
pub const EXIT_FILE: &str = "mount.exit";
