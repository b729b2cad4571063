//! The engine's end of the control socket to its supervisor, which holds the FUSE device and the state memory and replaces the
//! engine when it dies. Messages are single bytes.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use s3csi_supervisor::control::{GO, PREPARED, SERVING, SERVING_WITHOUT_RESEND};

use super::{Resending, descriptor};
use crate::cli::SupervisorDescriptors;
use crate::state::{State, StateError};

#[derive(Debug, thiserror::Error)]
pub enum SupervisorError {
    #[error("cannot use the descriptors inherited from the supervisor")]
    Descriptors {
        #[source]
        cause: io::Error,
    },

    #[error(transparent)]
    State(StateError),

    #[error("lost the connection to the supervisor")]
    Gone {
        #[source]
        cause: io::Error,
    },
}

pub struct Supervisor {
    control: UnixStream,
}

impl Supervisor {
    /// The supervisor and the state that it keeps.
    pub fn connect(descriptors: SupervisorDescriptors) -> Result<(Self, State), SupervisorError> {
        let inherited = |number| descriptor::inherited(number).map_err(|cause| SupervisorError::Descriptors { cause });
        let control = UnixStream::from(inherited(descriptors.control)?);
        let state = State::shared(File::from(inherited(descriptors.state)?)).map_err(SupervisorError::State)?;
        Ok((Self { control }, state))
    }

    /// Waits until the supervisor says that no other engine serves the mount.
    pub fn wait_for_turn(&self) -> Result<(), SupervisorError> {
        let gone = |cause| SupervisorError::Gone { cause };
        let mut letter = [0];
        (&self.control).write_all(&[PREPARED]).map_err(gone)?;
        (&self.control).read_exact(&mut letter).map_err(gone)?;
        if letter == [GO] { Ok(()) } else { Err(gone(io::Error::other("it said something else than to go"))) }
    }

    /// From now on the supervisor replaces this process when it dies, or when its heart stops.
    /// Its planned replacements wait for a moment without requests if the kernel does not send them again.
    pub fn report_serving(&self, state: &State, resending: Resending) -> Result<(), SupervisorError> {
        let gone = |cause| SupervisorError::Gone { cause };
        state.beat().map_err(gone)?;
        let message = match resending {
            Resending::IfPossible => SERVING,
            Resending::Never => SERVING_WITHOUT_RESEND,
        };
        (&self.control).write_all(&[message]).map_err(gone)
    }
}
