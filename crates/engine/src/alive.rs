//! `--keep-alive`: this process mounts and keeps the mount; a child of it serves, and is replaced when it dies.

use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;
use std::{env, io};

use s3csi_mounter::alone::{Alone, AloneError, Reins};
use s3csi_mounter::handoff::Answer;
use s3csi_mounter::report::Report;
use s3csi_mounter::{Keeping, Standby, ask_for_mercy};
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;

use crate::background;
use crate::cli::{Arguments, Environment};
use crate::session::{self, Access, MountError, MountOptions, Unmount};

/// As the mounter of the driver does it.
const KEEPING: Keeping = Keeping {
    longest_outage: Duration::from_secs(30),
    frozen_after: Duration::from_secs(10),
    stuck_after: Duration::from_mins(5),
    drain_time: Duration::from_mins(1),
    standby: Standby::None,
    engine_oom_score: None,
};

/// How long files that are open may be finished after the end was asked for.
const GRACE: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum AliveError {
    #[error(transparent)]
    MountPoint(MountError),

    #[error("cannot mount")]
    Mount(#[source] MountError),

    #[error("cannot find the program that is to be kept alive")]
    Program {
        #[source]
        cause: io::Error,
    },

    #[error("cannot wait for signals")]
    Signals {
        #[source]
        cause: io::Error,
    },

    #[error("cannot write the process id to {path:?}")]
    PidFile {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error(transparent)]
    Alone(AloneError),
}

/// Mounts, and keeps the mount until it is unmounted or the end is asked for.
pub fn run(arguments: &Arguments, environment: &Environment) -> Result<(), AliveError> {
    // Now: later the file may be another version, which is what a successor is to be.
    let program = env::current_exe().map_err(|cause| AliveError::Program { cause })?;
    let mount_point = session::mount_point(arguments, environment).map_err(AliveError::MountPoint)?;
    let options = MountOptions {
        access: Access::of(arguments),
        is_read_only: arguments.read_only,
        unmounts_itself: arguments.auto_unmount,
    };
    let alone = Alone::new().map_err(AliveError::Alone)?;
    let signals = Signals::new([SIGTERM, SIGINT, SIGUSR1]).map_err(|cause| AliveError::Signals { cause })?;
    let connection = mount_point.connect(&options).map_err(AliveError::Mount)?;
    if let Some(path) = &environment.pid_file {
        std::fs::write(path, std::process::id().to_string())
            .map_err(|cause| AliveError::PidFile { path: path.clone(), cause })?;
    }
    let handle = signals.handle();
    let unmount = Arc::new(connection.unmount);
    heed(signals, alone.reins(), Arc::clone(&unmount)).map_err(|cause| AliveError::Signals { cause })?;
    let is_background_child = environment.is_background_child;
    let mut engines = 1;
    let mut tell = |news: &Answer| {
        if *news == Answer::Ready {
            if let Some(unmount) = &*unmount {
                unmount.read_far_ahead();
            }
            // From now on nobody listens to the standard streams.
            if is_background_child && let Err(error) = background::detach_streams() {
                tracing::debug!(%error, "the standard streams stay open");
            }
        }
        if let Some(report) = Report::after(news, engines + 1) {
            engines += 1;
            tell_manager(environment, &report);
        }
    };
    let words = env::args_os().skip(1).collect();
    let keeping = Keeping { engine_oom_score: ask_for_mercy(), ..KEEPING };
    let keys = environment.keys.clone();
    let kept = alone.keep(&program, words, keys, connection.device.into(), keeping, &mut tell);
    handle.close();
    if let Some(unmount) = &*unmount {
        // Nothing to do if somebody else did; else the directory of a mount that was given up would stay unusable.
        let _ = unmount.detach();
    }
    kept.map_err(AliveError::Alone)
}

/// `systemctl status` shows it, and the node hears of it.
fn tell_manager(environment: &Environment, report: &Report) {
    let Some(socket) = &environment.manager else { return };
    let told = UnixDatagram::unbound().and_then(|it| it.send_to(format!("STATUS={report}").as_bytes(), socket));
    if let Err(error) = told {
        tracing::debug!(%error, "the service manager was not told");
    }
}

/// Unmounts when the end is asked for; whoever still has files open after a while loses them.
fn heed(mut signals: Signals, reins: Reins, unmount: Arc<Option<Unmount>>) -> io::Result<()> {
    let (sender, ends) = channel();
    let upgrades = reins.clone();
    thread::Builder::new().name("signals".into()).spawn(move || {
        for signal in signals.forever() {
            if signal == SIGUSR1 {
                upgrades.upgrade();
            } else {
                // Nobody listens any more: the end has come.
                let _ = sender.send(());
            }
        }
    })?;
    thread::Builder::new()
        .name("stop".into())
        .spawn(move || end_on_request(&ends, &reins, unmount.as_ref().as_ref()))?;
    Ok(())
}

fn end_on_request(ends: &Receiver<()>, reins: &Reins, unmount: Option<&Unmount>) {
    if ends.recv().is_err() {
        return;
    }
    let is_detached = unmount.is_some_and(|it| it.detach().is_ok());
    if is_detached && ends.recv_timeout(GRACE) == Err(RecvTimeoutError::Disconnected) {
        return;
    }
    reins.end();
}
