//! Supervises one mount without a mounter, for an engine that a user or systemd started with `--keep-alive`.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use s3csi_handoff::Answer;

use crate::config::SupervisorConfig;
use crate::engine::{EngineExit, StartError, Stream};
use crate::handle::SupervisorHandle;
use crate::launch::{EngineDirectories, Launch};
use crate::log;
use crate::mount::{MountDescriptors, MountSpec};
use crate::supervisor;

/// How engines are run: all get the same arguments and the environment of this process.
#[derive(Debug)]
pub struct Standalone<'a> {
    pub program: &'a Path,
    pub arguments: Vec<OsString>,
    /// The credentials file that the environment names.
    pub credentials_file: Option<PathBuf>,
    pub config: SupervisorConfig,
}

#[derive(Debug, thiserror::Error)]
pub enum StandaloneError {
    #[error(transparent)]
    Start(StartError),

    /// The engine has printed why, and that was relayed.
    #[error("the engine failed")]
    Reported,

    #[error("the engine failed without a message: {status}")]
    Silent { status: ExitStatus },
}

impl Standalone<'_> {
    /// Runs engines until the mount is gone. Each learns by a variable which descriptor its mount is. Reports `held` when one
    /// serves the mount for the first time: from then on another process could continue the mount.
    pub fn run(
        self,
        descriptors: MountDescriptors,
        handle: &SupervisorHandle,
        report: &mut dyn FnMut(&Answer),
    ) -> Result<(), StandaloneError> {
        // A user who runs an engine by hand wants to see problems only.
        log::only_warnings();
        let Self { program, arguments, credentials_file, config } = self;
        let launch = Launch::with_own_environment(arguments, credentials_file);
        let config = Some(config);
        let spec = MountSpec {
            program,
            launch: &launch,
            directories: EngineDirectories::default(),
            label: "",
            handle,
            config,
            is_held: true,
            resume_cause: "its supervisor was killed",
        };
        let outcome = supervisor::run(&spec, descriptors, report, &mut relay).map_err(StandaloneError::Start)?;
        let EngineExit { status, stderr } = outcome.exit;
        match status {
            Ok(status) if status.success() || handle.is_stopped() => Ok(()),
            Ok(status) if stderr.is_empty() => Err(StandaloneError::Silent { status }),
            Ok(_) => Err(StandaloneError::Reported),
            Err(cause) => {
                log::warn("exit status of the engine unknown", &[("error", &cause)]);
                Ok(())
            }
        }
    }
}

fn relay(stream: Stream, line: &[u8]) {
    let mut line = line.to_vec();
    line.push(b'\n');
    // A closed stream must not end the mount.
    let _ = match stream {
        Stream::Stdout => std::io::stdout().lock().write_all(&line),
        Stream::Stderr => std::io::stderr().lock().write_all(&line),
    };
}
