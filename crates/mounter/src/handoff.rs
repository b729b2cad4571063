//! Both ends of the hand-over protocol: how a mount request and its FUSE descriptor get from the node to a mounter, and what
//! the mounter answers. What is done with a request is not decided here.
//!
//! A request is one message on a Unix stream socket: a JSON object and exactly one descriptor; then the node closes its
//! writing half. The mounter answers on the same connection, one JSON object per line, until the engine has ended. Older
//! mounters never answer and older nodes never read, so neither side may depend on the answers.
//!
//! A second kind of request, without a descriptor, asks for the end of an engine whose mount is gone.

mod answer;
mod receive;
mod request;
mod send;
mod stop;

pub use answer::{Answer, InvalidAnswer, MAX_ANSWER_BYTES};
pub use receive::{ReceiveError, ReceiveLimits, Request, receive};
pub use request::{InvalidSourceName, MountRequest, SourceName};
pub use send::{ConnectError, SendError, connect, send};
pub use stop::{StopRequest, send_stop};
