//! The command line of the mounter.
#![forbid(unsafe_code)]

mod cache;
mod commands;
mod connection;
mod directory;
mod registry;
mod server;
mod socket;
mod stage;
mod subscribers;
mod wake;

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use s3csi_core::quantity::Quantity;
use s3csi_core::{Chain, duration};
use s3csi_handoff::core_dumps;
use s3csi_supervisor::{Standby, SupervisorConfig, log, lower_own_oom_score};

use server::{MounterConfig, serve};
use wake::Wake;

/// Receives mount requests and runs one engine for each.
///
/// The mounter listens on the socket `mount.sock` in its directory. The node plugin mounts a FUSE file system and sends a
/// request with its descriptor; the mounter starts the engine `mount-s3` on it and reports over the same connection that
/// the mount is served, why it failed, or that the engine has exited. It needs no privileges.
///
/// In a Mountpoint Pod it runs one engine (`--limit 1`) and exits with code 0 once the node plugin has created the file
/// `mount.exit` and the engine has exited. With a larger limit it serves all sources of a node, each with its own
/// sub-directory.
///
/// SIGTERM and SIGINT stop an idle mounter. While engines run, it continues until the last one has exited; with a larger
/// limit it ends those that the next mounter can resume, as soon as no data is lost by that. SIGUSR1 replaces
/// all engines with new processes of the current version of the program; open files stay open.
#[derive(Parser, Debug)]
#[command(version, after_long_help = FILES)]
struct Arguments {
    /// The directory that is shared with the node plugin.
    #[arg(long, value_name = "DIRECTORY", default_value = s3csi_handoff::COMMUNICATION_DIRECTORY)]
    directory: PathBuf,

    /// The engine to run. Without it, `mount-s3` in the directory of `--mountpoint-bin-dir`, else beside this program.
    #[arg(long, value_name = "FILE")]
    engine: Option<PathBuf>,

    /// The directory of the engine `mount-s3`.
    #[arg(long, value_name = "DIRECTORY", env = "MOUNTPOINT_BIN_DIR")]
    mountpoint_bin_dir: Option<PathBuf>,

    /// How many engines may run at once; 1 in a Mountpoint Pod.
    #[arg(long, value_name = "NUMBER", default_value = "1")]
    limit: NonZeroUsize,

    /// How long a peer may take to send its request, such as `90s` or `1m30s`.
    #[arg(long, value_name = "DURATION", default_value = "2m", value_parser = duration::parse)]
    mount_sock_recv_timeout: Duration,

    /// The directory for the caches of engines [default: the directory for temporary files]
    #[arg(long, value_name = "DIRECTORY")]
    cache_dir: Option<PathBuf>,

    /// The directory in which engines stage files above 8 MiB that are edited in place; each source has a directory of its own in it
    /// [default: each engine makes one in the directory for temporary files]
    #[arg(long, value_name = "DIRECTORY", requires = "stage_size_limit")]
    stage_dir: Option<PathBuf>,

    /// The size of the staging directory of one source, such as `1Gi`. An engine uses at most 95 % of it.
    #[arg(long, value_name = "QUANTITY", requires = "stage_dir")]
    stage_size_limit: Option<Quantity>,

    /// CA certificates that engines trust in addition to those of the system
    #[arg(long, value_name = "FILE")]
    ca_bundle: Option<PathBuf>,

    /// Whether an engine that dies is replaced on the same mount. Open files stay open; applications see a pause.
    #[arg(long, value_enum, default_value = "on")]
    keep: Switch,

    /// How long a mount may be without an engine before it is given up.
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration::parse)]
    longest_outage: Duration,

    /// An engine without a heartbeat for this long is killed and replaced.
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration::parse)]
    frozen_after: Duration,

    /// An engine that answers no request for this long, although requests wait, is killed and replaced. While a big file is
    /// being uploaded, it has six times as long.
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = duration::parse)]
    stuck_after: Duration,

    /// Whether a standby engine is kept for each mount, which shortens the pause when the first one dies and costs the memory
    /// of an idle engine.
    #[arg(long, value_enum, default_value = "off")]
    standby: Switch,

    /// How long a planned replacement of an engine waits for big files that are being written. After this time the replacement
    /// is given up and the current engine stays.
    #[arg(long, value_name = "DURATION", default_value = "1m", value_parser = duration::parse)]
    drain_time: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Switch {
    On,
    Off,
}

const FILES: &str = "\
Files in the directory:
  mount.sock   takes mount requests
  mount.commands  exists if the mounter executes commands, not only mount requests
  mount.err    the error of an engine that failed, in the directory of its source
  mount.exit   created by the node plugin to request the end

Example: a mounter for all sources of a node, with up to 200 engines
  s3csi-mounter --directory /var/lib/s3csi/mounter --limit 200 --engine /usr/bin/mount-s3";

const ENGINE: &str = "mount-s3";

fn main() -> ExitCode {
    // Its engines inherit this.
    core_dumps::forbid_core_dumps();
    match run(Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::error("mounter failed", &[("error", &Chain(&*error))]);
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> Result<(), Box<dyn std::error::Error>> {
    // No `..`: an unused flag does not compile.
    let Arguments {
        directory,
        engine,
        mountpoint_bin_dir,
        limit,
        mount_sock_recv_timeout,
        cache_dir,
        stage_dir,
        stage_size_limit,
        ca_bundle,
        keep,
        longest_outage,
        frozen_after,
        stuck_after,
        standby,
        drain_time,
    } = arguments;
    let wake = Arc::new(Wake::new()?);
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        wake.stop_on(signal)?;
    }
    wake.upgrade_on(signal_hook::consts::SIGUSR1)?;
    allow_descriptors(limit);
    let config = MounterConfig {
        directory,
        engine: engine_path(engine, mountpoint_bin_dir)?,
        limit,
        receive_timeout: mount_sock_recv_timeout,
        cache_root: cache_dir.unwrap_or_else(std::env::temp_dir),
        stage: stage_dir.zip(stage_size_limit),
        ca_bundle,
        supervisor: (keep == Switch::On).then_some(SupervisorConfig {
            longest_outage,
            frozen_after,
            stuck_after,
            drain_time,
            engine_oom_score: lower_own_oom_score(),
            standby: if standby == Switch::On { Standby::Prepared } else { Standby::None },
        }),
    };
    // Not earlier: the file with its own score belongs to root then.
    core_dumps::forbid_inspection();
    serve(config, &wake)?;
    Ok(())
}

/// Absolute, because a bare name would be searched in the `PATH` of the engine, which is empty.
fn engine_path(engine: Option<PathBuf>, directory: Option<PathBuf>) -> std::io::Result<PathBuf> {
    let path = match (engine, directory) {
        (Some(engine), _) => engine,
        (None, Some(directory)) => directory.join(ENGINE),
        (None, None) => std::env::current_exe()?.parent().unwrap_or(Path::new("/")).join(ENGINE),
    };
    std::path::absolute(path)
}

/// Raises the limit of open files for many engines: each takes seven (connection, two pipes, pidfd, FUSE, state, control).
fn allow_descriptors(limit: NonZeroUsize) {
    const PER_ENGINE: u64 = 12;
    const BASE: u64 = 1024;
    let wanted = BASE.saturating_add(PER_ENGINE.saturating_mul(limit.get() as u64));
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let allowed = maximum.map_or(wanted, |it| it.min(wanted));
    if current.is_some_and(|it| it < allowed)
        && let Err(cause) = setrlimit(Resource::Nofile, Rlimit { current: Some(allowed), maximum })
    {
        log::warn("limit of open files not raised", &[("error", &cause)]);
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn the_defaults_are_those_of_the_supervisor() {
        let Arguments { longest_outage, frozen_after, stuck_after, drain_time, .. } = Arguments::parse_from(["x"]);
        let flags = SupervisorConfig {
            longest_outage,
            frozen_after,
            stuck_after,
            drain_time,
            standby: Standby::None,
            engine_oom_score: None,
        };
        assert_eq!(flags, SupervisorConfig::DEFAULT);
    }

    #[test]
    fn the_engine_is_found_by_flag_then_directory_then_beside_the_mounter() {
        let path = |text: &str| Some(PathBuf::from(text));
        assert_eq!(engine_path(path("/x/e"), path("/bin")).unwrap(), Path::new("/x/e"));
        assert_eq!(engine_path(None, path("/bin")).unwrap(), Path::new("/bin/mount-s3"));
        let beside = std::env::current_exe().unwrap().with_file_name("mount-s3");
        assert_eq!(engine_path(None, None).unwrap(), beside);
        assert!(engine_path(path("e"), None).unwrap().is_absolute());
    }
}
