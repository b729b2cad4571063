//! `--keep-alive`: this process mounts and supervises a child process that serves the mount and is restarted when it dies.
//!
//! If a service manager runs it, descriptor and state of the mount are in the manager's file descriptor store, so that the next
//! process of the service resumes the mount when this one is killed.

use std::io::Write as _;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};
use std::{env, io};

use s3csi_handoff::{Answer, ServiceManager, StatusReport, StoredDescriptor, core_dumps};
use s3csi_supervisor::standalone::{Standalone, StandaloneError};
use s3csi_supervisor::{MountDescriptors, SupervisorConfig, SupervisorHandle, TakeoverTrigger, lower_own_oom_score};
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;

use crate::cli::{Arguments, Environment};
use crate::pid_file::PidFileError;
use crate::session::{self, AllowedUsers, MountError, MountOptions, Unmount};
use crate::{background, pid_file};

/// Time for open files to be closed after SIGTERM.
const GRACE: Duration = Duration::from_secs(5);

/// Time for files that are being written and would be lost, from SIGTERM on.
const WRITE_GRACE: Duration = Duration::from_mins(1);

/// How often files that are being written are counted.
const WRITE_INTERVAL: Duration = Duration::from_millis(250);

/// Time for the engine to store edited files that are still open. With the times above less than the stop timeout of units.
const STORE_TIME: Duration = Duration::from_secs(20);

#[derive(Debug, thiserror::Error)]
pub enum KeepAliveError {
    #[error(transparent)]
    MountPoint(MountError),

    #[error("cannot mount")]
    Mount(#[source] MountError),

    #[error("cannot resume the mount of an earlier process")]
    Resume(#[source] MountError),

    #[error("cannot find the path of the mount")]
    Path {
        #[source]
        cause: io::Error,
    },

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

/// The mount to serve.
struct Mounted {
    descriptors: MountDescriptors,
    unmount: Option<Unmount>,
}

/// Mounts and supervises the engine until the mount is unmounted or a signal stops it.
pub fn run(arguments: &Arguments, environment: &Environment) -> Result<(), KeepAliveError> {
    // Read now: an upgrade replaces the file, and successors run the new version.
    let program = env::current_exe().map_err(|cause| KeepAliveError::Program { cause })?;
    let supervised = SupervisorHandle::new().map_err(|cause| KeepAliveError::Signals { cause })?;
    let signals = Signals::new([SIGTERM, SIGINT, SIGUSR1]).map_err(|cause| KeepAliveError::Signals { cause })?;
    let Some(Mounted { descriptors, unmount }) = mount(arguments, environment)? else {
        say(arguments, "was unmounted from");
        return Ok(());
    };
    if let Some(path) = &environment.pid_file {
        pid_file::write(path).map_err(KeepAliveError::PidFile)?;
    }
    let handle = signals.handle();
    let unmount = Arc::new(unmount);
    let outlives_process = unmount.as_ref().as_ref().is_some_and(Unmount::outlives_process);
    let manager = environment.manager.as_ref().filter(|_| outlives_process);
    let stop = Stop { handle: supervised.clone(), unmount: Arc::clone(&unmount), manager: manager.cloned() };
    stop.start(signals).map_err(|cause| KeepAliveError::Signals { cause })?;
    let is_resumed = matches!(descriptors, MountDescriptors::Resumed { .. });
    let mut engines = 1;
    let mut report = |event: &Answer| {
        match event {
            Answer::Held { .. } => store(manager, &supervised),
            Answer::Ready => {
                if let Some(unmount) = &*unmount {
                    unmount.read_far_ahead();
                }
                detach_streams(environment);
            }
            Answer::Resumed { .. } if is_resumed && engines == 1 && environment.is_background_child => {
                // Our parent waits for it. The engine says it, too, but perhaps later than the streams are detached.
                say(arguments, "is mounted at");
                detach_streams(environment);
            }
            _ => {}
        }
        if let Some(report) = StatusReport::after(event, engines + 1) {
            engines += 1;
            log_failure(environment.manager.as_ref().map(|it| it.report_status(&report)));
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
    let outcome = standalone.run(descriptors, &supervised, &mut report);
    // The state stays, and proves to the next process, should there be one, that the mount is not to be mounted again.
    forget(manager, StoredDescriptor::Fuse);
    handle.close();
    if let Some(unmount) = &*unmount {
        // Fails if the user has unmounted it already; otherwise a dead mount would block the directory.
        let _ = unmount.detach();
    }
    outcome.map_err(KeepAliveError::Standalone)
}

/// Mounts, or finds the mount of an earlier process of this service. `None` if that one is gone.
fn mount(arguments: &Arguments, environment: &Environment) -> Result<Option<Mounted>, KeepAliveError> {
    if let Some(stored) = environment.stored {
        // The path must not be looked at: nothing would answer.
        let Some(resources) = session::stored_mount(stored).map_err(KeepAliveError::Resume)? else { return Ok(None) };
        let unmount =
            Unmount::of_earlier_process(&arguments.mount_point).map_err(|cause| KeepAliveError::Path { cause })?;
        let descriptors = MountDescriptors::Resumed { resources, takeover: TakeoverTrigger::Immediate };
        return Ok(Some(Mounted { descriptors, unmount: Some(unmount) }));
    }
    let options = MountOptions {
        access: AllowedUsers::of(arguments),
        is_read_only: arguments.read_only,
        unmounts_itself: arguments.auto_unmount,
    };
    let mount_point = session::mount_point(arguments, environment).map_err(KeepAliveError::MountPoint)?;
    let connection = mount_point.connect(&options).map_err(KeepAliveError::Mount)?;
    let descriptors = MountDescriptors::New { fuse: connection.device.into() };
    Ok(Some(Mounted { descriptors, unmount: connection.unmount }))
}

/// Tells the parent of a background process, or the user.
fn say(arguments: &Arguments, what: &str) {
    let line = format!("{} {what} {}\n", arguments.bucket, arguments.mount_point.display());
    // A closed stream must not end the mount.
    let _ = io::stdout().lock().write_all(line.as_bytes());
}

/// The parent of a background process has read the result by now.
fn detach_streams(environment: &Environment) {
    if environment.is_background_child
        && let Err(error) = background::detach_streams()
    {
        tracing::debug!(%error, "cannot detach the standard streams");
    }
}

/// Stores what the next process of this service needs to resume the mount.
fn store(manager: Option<&ServiceManager>, supervised: &SupervisorHandle) {
    let (Some(manager), Some(resources)) = (manager, supervised.resources()) else { return };
    log_failure(Some(manager.store(StoredDescriptor::State, resources.state.as_fd())));
    log_failure(Some(manager.store(StoredDescriptor::Fuse, resources.fuse.as_fd())));
}

/// Before every wanted end: with a copy of the descriptor in the store, callers would wait for an engine that never comes.
fn forget(manager: Option<&ServiceManager>, kind: StoredDescriptor) {
    log_failure(manager.map(|it| it.remove(kind)));
}

fn log_failure(notified: Option<io::Result<()>>) {
    if let Some(Err(error)) = notified {
        tracing::debug!(%error, "cannot notify the service manager");
    }
}

/// What ends the mount on a signal.
struct Stop {
    handle: SupervisorHandle,
    unmount: Arc<Option<Unmount>>,
    manager: Option<ServiceManager>,
}

/// What a wait was ended by.
#[derive(PartialEq, Eq)]
enum Waited {
    /// The engine has exited.
    Ended,
    /// Another signal.
    Again,
    TimedOut,
}

impl Stop {
    /// Unmounts on SIGTERM and SIGINT, and stops the engine after a grace period; SIGUSR1 restarts it with the current binary.
    fn start(self, mut signals: Signals) -> io::Result<()> {
        let (sender, ends) = channel();
        let upgrades = self.handle.clone();
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
        thread::Builder::new().name("stop".into()).spawn(move || self.on_signal(&ends))?;
        Ok(())
    }

    fn on_signal(&self, ends: &Receiver<()>) {
        if ends.recv().is_err() {
            return;
        }
        let since = Instant::now();
        // Both: a unit that is restarted on purpose mounts again.
        for kind in [StoredDescriptor::Fuse, StoredDescriptor::State] {
            forget(self.manager.as_ref(), kind);
        }
        if let Some(unmount) = &*self.unmount {
            // Fails if the user has unmounted it already; then the engine stores what was written and ends.
            let _ = unmount.detach();
        }
        let mut waited = wait(ends, GRACE);
        while waited == Waited::TimedOut && self.handle.has_data_at_risk() && since.elapsed() < WRITE_GRACE {
            waited = wait(ends, WRITE_INTERVAL);
        }
        if waited == Waited::TimedOut {
            self.handle.finish();
            waited = wait(ends, STORE_TIME);
        }
        if waited != Waited::Ended {
            self.handle.stop();
        }
    }
}

fn wait(ends: &Receiver<()>, time: Duration) -> Waited {
    match ends.recv_timeout(time) {
        Ok(()) => Waited::Again,
        Err(RecvTimeoutError::Disconnected) => Waited::Ended,
        Err(RecvTimeoutError::Timeout) => Waited::TimedOut,
    }
}
