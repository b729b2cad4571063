//! `--keep-alive`: this process mounts and supervises a child process that serves the mount and is restarted when it dies.

use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;
use std::{env, io};

use s3csi_handoff::{Answer, StatusReport, core_dumps};
use s3csi_supervisor::standalone::{Standalone, StandaloneError};
use s3csi_supervisor::{SupervisorConfig, SupervisorHandle, lower_own_oom_score};
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;

use crate::cli::{Arguments, Environment};
use crate::pid_file::PidFileError;
use crate::session::{self, AllowedUsers, MountError, MountOptions, Unmount};
use crate::{background, pid_file};

/// Time for open files to be completed after SIGTERM.
const GRACE: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum KeepAliveError {
    #[error(transparent)]
    MountPoint(MountError),

    #[error("cannot mount")]
    Mount(#[source] MountError),

    #[error("cannot find the path of this program")]
    Program {
        #[source]
        cause: io::Error,
    },

    #[error("cannot wait for signals")]
    Signals {
        #[source]
        cause: io::Error,
    },

    #[error(transparent)]
    PidFile(PidFileError),

    #[error(transparent)]
    Standalone(StandaloneError),
}

/// Mounts and supervises the engine until the mount is unmounted or a signal stops it.
pub fn run(arguments: &Arguments, environment: &Environment) -> Result<(), KeepAliveError> {
    // Read now: an upgrade replaces the file, and successors run the new version.
    let program = env::current_exe().map_err(|cause| KeepAliveError::Program { cause })?;
    let mount_point = session::mount_point(arguments, environment).map_err(KeepAliveError::MountPoint)?;
    let options = MountOptions {
        access: AllowedUsers::of(arguments),
        is_read_only: arguments.read_only,
        unmounts_itself: arguments.auto_unmount,
    };
    let supervised = SupervisorHandle::new().map_err(|cause| KeepAliveError::Signals { cause })?;
    let signals = Signals::new([SIGTERM, SIGINT, SIGUSR1]).map_err(|cause| KeepAliveError::Signals { cause })?;
    let connection = mount_point.connect(&options).map_err(KeepAliveError::Mount)?;
    if let Some(path) = &environment.pid_file {
        pid_file::write(path).map_err(KeepAliveError::PidFile)?;
    }
    let handle = signals.handle();
    let unmount = Arc::new(connection.unmount);
    handle_signals(signals, supervised.clone(), Arc::clone(&unmount))
        .map_err(|cause| KeepAliveError::Signals { cause })?;
    let is_background_child = environment.is_background_child;
    let mut engines = 1;
    let mut tell = |news: &Answer| {
        if *news == Answer::Ready {
            if let Some(unmount) = &*unmount {
                unmount.read_far_ahead();
            }
            // The parent of a background process has read the result by now.
            if is_background_child && let Err(error) = background::detach_streams() {
                tracing::debug!(%error, "cannot detach the standard streams");
            }
        }
        if let Some(report) = StatusReport::after(news, engines + 1) {
            engines += 1;
            notify_manager(environment, &report);
        }
    };
    let standalone = Standalone {
        program: &program,
        arguments: env::args_os().skip(1).collect(),
        credentials_file: environment.keys.clone(),
        config: SupervisorConfig { engine_oom_score: lower_own_oom_score(), ..SupervisorConfig::DEFAULT },
    };
    // Not earlier: the file with its own score belongs to root then.
    core_dumps::forbid_inspection();
    let outcome = standalone.run(connection.device.into(), &supervised, &mut tell);
    handle.close();
    if let Some(unmount) = &*unmount {
        // Fails if the user has unmounted it already; otherwise a dead mount would block the directory.
        let _ = unmount.detach();
    }
    outcome.map_err(KeepAliveError::Standalone)
}

/// Shown by `systemctl status`, and read by the node plugin.
fn notify_manager(environment: &Environment, report: &StatusReport) {
    let Some(socket) = &environment.manager else { return };
    let told = UnixDatagram::unbound().and_then(|it| it.send_to(format!("STATUS={report}").as_bytes(), socket));
    if let Err(error) = told {
        tracing::debug!(%error, "cannot notify the service manager");
    }
}

/// Unmounts on SIGTERM and SIGINT, and stops the engine after a grace period; SIGUSR1 restarts it with the current binary.
fn handle_signals(mut signals: Signals, handle: SupervisorHandle, unmount: Arc<Option<Unmount>>) -> io::Result<()> {
    let (sender, ends) = channel();
    let upgrades = handle.clone();
    thread::Builder::new().name("signals".into()).spawn(move || {
        for signal in signals.forever() {
            if signal == SIGUSR1 {
                upgrades.upgrade();
            } else {
                // The receiver may have ended already.
                let _ = sender.send(());
            }
        }
    })?;
    thread::Builder::new()
        .name("stop".into())
        .spawn(move || stop_on_signal(&ends, &handle, unmount.as_ref().as_ref()))?;
    Ok(())
}

fn stop_on_signal(ends: &Receiver<()>, handle: &SupervisorHandle, unmount: Option<&Unmount>) {
    if ends.recv().is_err() {
        return;
    }
    let is_detached = unmount.is_some_and(|it| it.detach().is_ok());
    if is_detached && ends.recv_timeout(GRACE) == Err(RecvTimeoutError::Disconnected) {
        return;
    }
    handle.stop();
}
