//! Commands for a source that a mounter serves. They have no descriptor attached.
//!
//! A mounter in a Mountpoint Pod gets commands only after it has answered `held`: one of an earlier version exits at the first
//! message that is no mount request.

use std::io::Write as _;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use serde::{Deserialize, Serialize};

use crate::SendError;

/// `{"stop":"<source>"}` and the like. The name is empty for the only source of a Mountpoint Pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SourceCommand {
    /// The source was unmounted. A healthy engine exits with its mount; a frozen one does not, and only the mounter can kill it.
    /// The answer is [`crate::Answer::Exited`] once no engine serves the source, or [`crate::Answer::Failed`].
    Stop(String),
    /// Another mounter is going to serve the mount. The engine is killed as soon as no data is lost by that, then all descriptors
    /// are closed. The answer is [`crate::Answer::Released`], or [`crate::Answer::Failed`] if the engine serves on.
    Release(String),
    /// The prepared engine may take over: no other one serves the mount.
    Go(String),
    /// Requests copies of the descriptors, for a node plugin that was restarted. The answer is [`crate::Answer::Held`] with FUSE
    /// descriptor and state attached, and later events of the engine follow on the same connection; or
    /// [`crate::Answer::Prepared`] if the engine waits for [`SourceCommand::Go`].
    Hold(String),
}

/// Sends a command and shuts down the writing half.
pub fn send_command(mut stream: &UnixStream, command: &SourceCommand) -> Result<(), SendError> {
    let message = serde_json::to_vec(command).map_err(|cause| SendError::Render { cause })?;
    stream.write_all(&message).map_err(|cause| SendError::Send { cause })?;
    stream.shutdown(Shutdown::Write).map_err(|cause| SendError::End { cause })
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    #[test]
    fn a_command_is_sent_whole_and_nothing_follows() {
        let (node, mut mounter) = UnixStream::pair().unwrap();
        send_command(&node, &SourceCommand::Go("a".into())).unwrap();
        let mut received = String::new();
        mounter.read_to_string(&mut received).unwrap();
        assert_eq!(received, r#"{"go":"a"}"#);
    }

    #[test]
    fn commands_on_the_wire() {
        check(&SourceCommand::Stop("a".into()), r#"{"stop":"a"}"#);
        check(&SourceCommand::Release(String::new()), r#"{"release":""}"#);
        check(&SourceCommand::Go("a".into()), r#"{"go":"a"}"#);
        check(&SourceCommand::Hold("a".into()), r#"{"hold":"a"}"#);
    }

    #[track_caller]
    fn check(command: &SourceCommand, wire: &str) {
        assert_eq!(serde_json::to_string(command).unwrap(), wire);
        assert_eq!(&serde_json::from_str::<SourceCommand>(wire).unwrap(), command);
    }
}
