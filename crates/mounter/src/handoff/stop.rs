//! The other request: the mount of a source is gone, its engine shall be gone, too. A healthy engine ends by itself with its
//! mount; a frozen one does not, and only the mounter may end it.

use std::io::Write as _;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use serde::{Deserialize, Serialize};

use super::SendError;

/// `{"stop":"<source>"}`, without a descriptor. Answered with [`super::Answer::Exited`] once no engine serves the source,
/// or with [`super::Answer::Failed`] if one could not be ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StopRequest {
    pub stop: String,
}

/// Asks the mounter to see to it that no engine serves `source` any more. Only for a source that is not mounted.
pub fn send_stop(mut stream: &UnixStream, source: &str) -> Result<(), SendError> {
    let message =
        serde_json::to_vec(&StopRequest { stop: source.to_owned() }).map_err(|cause| SendError::Render { cause })?;
    stream.write_all(&message).map_err(|cause| SendError::Send { cause })?;
    stream.shutdown(Shutdown::Write).map_err(|cause| SendError::End { cause })
}
