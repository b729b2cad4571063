//! One mount that was not asked for by a node: for an engine that is run by hand and supervises itself.

use std::ffi::OsString;
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;

use crate::engine::{Ended, StartError, Stream};
use crate::handoff::Answer;
use crate::keeper::{self, Keeping, Post};
use crate::launch::Launch;
use crate::log;
use crate::slots::{Refused, Slot, Slots};
use crate::wake::{Wake, WakeError};

/// A mount that is kept by this process.
pub struct Alone {
    slots: Arc<Slots>,
    slot: Slot,
}

/// How the mount can be ended, and its engine replaced, from another thread.
#[derive(Clone, Debug)]
pub struct Reins(Arc<Slots>);

#[derive(Debug, thiserror::Error)]
pub enum AloneError {
    #[error(transparent)]
    Wake(WakeError),

    #[error(transparent)]
    Refused(Refused),

    #[error(transparent)]
    Start(StartError),

    /// It has said why, and that was relayed.
    #[error("the engine ended")]
    Explained,

    #[error("the engine ended: {status}")]
    Silent { status: ExitStatus },
}

impl Alone {
    pub fn new() -> Result<Self, AloneError> {
        // Whoever runs an engine by hand is not interested in each step.
        log::only_warnings();
        let wake = Wake::new().map_err(AloneError::Wake)?;
        let slots = Slots::new(std::num::NonZeroUsize::MIN, Arc::new(wake));
        let slot = slots.reserve(None).map_err(AloneError::Refused)?;
        Ok(Self { slots, slot })
    }

    pub fn reins(&self) -> Reins {
        Reins(Arc::clone(&self.slots))
    }

    /// Runs engines until the mount has ended. Each gets the same arguments and our environment, and is told by a variable
    /// which descriptor its mount is. `keys` is the file that the environment says the keys are in.
    pub fn keep(
        &self,
        program: &Path,
        arguments: Vec<OsString>,
        keys: Option<PathBuf>,
        fuse: OwnedFd,
        keeping: Keeping,
        tell: &mut dyn FnMut(&Answer),
    ) -> Result<(), AloneError> {
        let launch = Launch::repeated(arguments, keys);
        let post = Post { program, launch: &launch, cache: None, slot: &self.slot, keeping: Some(keeping) };
        let finished = keeper::run(&post, fuse, tell, &mut relay).map_err(AloneError::Start)?;
        let Ended { status, stderr } = finished.ended;
        match status {
            Ok(status) if status.success() || self.slot.is_unwanted() => Ok(()),
            Ok(status) if stderr.is_empty() => Err(AloneError::Silent { status }),
            Ok(_) => Err(AloneError::Explained),
            Err(cause) => {
                log::warn("end of the engine unknown", &[("error", &cause)]);
                Ok(())
            }
        }
    }
}

impl Reins {
    /// Ends the engine for good.
    pub fn end(&self) {
        self.0.kill_all();
    }

    /// Replaces the engine by one of the version that the program is by now.
    pub fn upgrade(&self) {
        self.0.upgrade();
    }
}

fn relay(stream: Stream, line: &[u8]) {
    let mut line = line.to_vec();
    line.push(b'\n');
    // Nobody has to listen.
    let _ = match stream {
        Stream::Stdout => std::io::stdout().lock().write_all(&line),
        Stream::Stderr => std::io::stderr().lock().write_all(&line),
    };
}
