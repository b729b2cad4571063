//! The other end of the keeper's leash: whoever started this engine holds the FUSE connection and the state, and replaces the
//! engine when it dies. Each side says single letters.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use super::descriptor;
use crate::cli::KeeperDescriptors;
use crate::state::{State, StateError};

/// Everything is ready but the mount: it may still be served by another engine.
const PREPARED: u8 = b'S';
/// From the keeper: no other engine serves the mount.
const GO: u8 = b'G';
/// The mount is served.
const RUNNING: u8 = b'R';

#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    #[error("the descriptors of the keeper cannot be used")]
    Descriptors {
        #[source]
        cause: io::Error,
    },

    #[error(transparent)]
    State(StateError),

    #[error("the keeper is gone")]
    Gone {
        #[source]
        cause: io::Error,
    },
}

pub struct Keeper {
    control: UnixStream,
}

impl Keeper {
    /// The keeper and the state that it keeps.
    pub fn connect(descriptors: KeeperDescriptors) -> Result<(Self, State), KeeperError> {
        let inherited = |number| descriptor::inherited(number).map_err(|cause| KeeperError::Descriptors { cause });
        let control = UnixStream::from(inherited(descriptors.control)?);
        let state = State::shared(File::from(inherited(descriptors.state)?)).map_err(KeeperError::State)?;
        Ok((Self { control }, state))
    }

    /// Waits until the keeper says that no other engine serves the mount.
    pub fn wait_for_turn(&self) -> Result<(), KeeperError> {
        let gone = |cause| KeeperError::Gone { cause };
        let mut letter = [0];
        (&self.control).write_all(&[PREPARED]).map_err(gone)?;
        (&self.control).read_exact(&mut letter).map_err(gone)?;
        if letter == [GO] { Ok(()) } else { Err(gone(io::Error::other("it said something else than to go"))) }
    }

    /// From now on the keeper replaces this process when it dies, or when its heart stops.
    pub fn report_serving(&self, state: &State) -> Result<(), KeeperError> {
        let gone = |cause| KeeperError::Gone { cause };
        state.beat().map_err(gone)?;
        (&self.control).write_all(&[RUNNING]).map_err(gone)
    }
}
