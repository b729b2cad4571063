//! The hand-over protocol between node plugin and mounter, and what both share with the engine: file names, environment
//! variables, the format of a failure. Does not decide what is done with a request.
//!
//! A mount request is one message on a Unix stream socket: a JSON object with the FUSE descriptor attached; then the node
//! plugin shuts down its writing half. The mounter answers on the same connection, one JSON object per line, until the engine
//! has exited. Older mounters never answer and older node plugins never read, so neither side may depend on the answers.
//!
//! Requests without a descriptor are commands for a source that is served: to stop its engine, to send copies of its descriptors,
//! to hand the mount over to another mounter.

#![forbid(unsafe_code)]

mod answer;
mod answer_stream;
mod command;
pub mod core_dumps;
mod failure;
#[cfg(test)]
mod properties;
pub mod read_ahead;
mod receive;

mod request;
mod send;
mod service_manager;
mod status;

pub use answer::{Answer, InvalidAnswer, MAX_ANSWER_BYTES};
pub use answer_stream::{AnswerReader, ReadAnswerError, ReceivedAnswer, send_answer};
pub use command::{SourceCommand, send_command};
pub use failure::{ERRORS_VARIABLE, EngineFailure, JSON_ERRORS};
pub use receive::{ReceiveError, ReceiveLimits, ReceivedMount, Request, receive};
pub use request::{InvalidSourceName, MountRequest, SourceName};
pub use send::{ConnectError, SendError, connect, send, send_resume};
pub use service_manager::{ServiceManager, StoredDescriptor};
pub use status::{InvalidStatusReport, StatusReport};

/// Set for an engine that is to supervise itself, like its flag `--keep-alive`.
pub const KEEP_ALIVE_VARIABLE: &str = "S3CSI_ENGINE_KEEP_ALIVE";

/// The directory that a Mountpoint Pod shares with the node plugin: its path in the Pod, and the name of its volume.
pub const COMMUNICATION_DIRECTORY: &str = "/comm";
pub const COMMUNICATION_VOLUME: &str = "comm";

/// The socket in the mounter's directory that takes mount requests.
pub const SOCKET: &str = "mount.sock";

/// Written by the mounter beside its socket: it executes commands. A mounter without it exits at the first one.
pub const COMMANDS_FILE: &str = "mount.commands";

/// Written by the mounter in the directory of a source: the error output of an engine that failed.
pub const ERROR_FILE: &str = "mount.err";

/// Written by the node plugin in the directory of a source: the engine is to end with its mount and not to be replaced.
pub const EXIT_FILE: &str = "mount.exit";
