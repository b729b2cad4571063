//! The command line of the mounter.
#![forbid(unsafe_code)]

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use s3csi_mounter::log::{self, Chain};
use s3csi_mounter::{Keeping, Settings, Standby, Wake, ask_for_mercy, serve};

/// Receives mount requests and runs one engine for each.
///
/// The mounter listens on the socket `mount.sock` in its directory. The node plugin mounts a FUSE file system and sends a
/// request with its descriptor; the mounter starts the engine `mount-s3` on it and tells the node over the same
/// connection when the mount is served, why it failed, or that the engine has ended. It needs no privileges.
///
/// In a Mountpoint Pod it runs one engine (`--limit 1`) and ends with code 0 once the node has made the file `mount.exit`
/// and the engine has ended. With a larger limit it serves all sources of a node, each with a sub-directory of its own.
///
/// SIGTERM and SIGINT end an idle mounter. While engines run it goes on until the last one has ended. SIGUSR1 replaces all
/// engines by new ones, of the version that the program is by then; open files live on.
#[derive(Parser, Debug)]
#[command(version, after_long_help = FILES)]
struct Arguments {
    /// The directory that is shared with the node.
    #[arg(long, value_name = "DIRECTORY", default_value = "/comm")]
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

    /// How long a connected node may take to send its whole request, such as `90s` or `1m30s`.
    #[arg(long, value_name = "DURATION", default_value = "2m", value_parser = duration)]
    mount_sock_recv_timeout: Duration,

    /// Where engines keep their caches, a fresh directory each. Without it, the directory for temporary files.
    #[arg(long, value_name = "DIRECTORY")]
    cache_dir: Option<PathBuf>,

    /// Certificates of those whom engines trust [default: the system's]
    #[arg(long, value_name = "FILE")]
    ca_bundle: Option<PathBuf>,

    /// Whether an engine that dies is replaced by another one on the same mount. Open files live on; applications see a pause.
    #[arg(long, value_enum, default_value = "on")]
    keep: Switch,

    /// How long a mount may be without an engine before it is given up.
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration)]
    longest_outage: Duration,

    /// An engine that shows no sign of life for so long is killed and replaced.
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration)]
    frozen_after: Duration,

    /// An engine that lives, but answers nobody for so long though somebody waits, is killed and replaced. While a big file is being
    /// uploaded, six times as long.
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = duration)]
    stuck_after: Duration,

    /// Whether a second engine stands by for each mount, so that the pause is shorter when the first one dies. It costs the memory
    /// of an idle engine.
    #[arg(long, value_enum, default_value = "off")]
    standby: Switch,

    /// When engines are replaced on request (SIGUSR1): how long big files that are being written may take. Later the request is
    /// given up and the present engine stays.
    #[arg(long, value_name = "DURATION", default_value = "1m", value_parser = duration)]
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
  mount.err    the words of an engine that failed, in the directory of its source
  mount.exit   made by the node: the end was asked for

Example: a mounter for all sources of a node, with up to 200 engines
  s3csi-mounter --directory /var/lib/s3csi/mounter --limit 200 --engine /usr/bin/mount-s3";

const ENGINE: &str = "mount-s3";

fn main() -> ExitCode {
    match run(Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::error("mounter failed", &[("error", &Chain(&*error))]);
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> Result<(), Box<dyn std::error::Error>> {
    // No `..`: a flag nobody uses does not compile.
    let Arguments {
        directory,
        engine,
        mountpoint_bin_dir,
        limit,
        mount_sock_recv_timeout,
        cache_dir,
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
    let settings = Settings {
        directory,
        engine: engine_path(engine, mountpoint_bin_dir)?,
        limit,
        receive_timeout: mount_sock_recv_timeout,
        cache_root: cache_dir.unwrap_or_else(std::env::temp_dir),
        ca_bundle,
        keeping: (keep == Switch::On).then_some(Keeping {
            longest_outage,
            frozen_after,
            stuck_after,
            drain_time,
            engine_oom_score: ask_for_mercy(),
            standby: if standby == Switch::On { Standby::Prepared } else { Standby::None },
        }),
    };
    serve(settings, &wake)?;
    Ok(())
}

/// Absolute, because a bare name would be looked for in the engine's own search path, which is empty.
fn engine_path(engine: Option<PathBuf>, directory: Option<PathBuf>) -> std::io::Result<PathBuf> {
    let path = match (engine, directory) {
        (Some(engine), _) => engine,
        (None, Some(directory)) => directory.join(ENGINE),
        (None, None) => std::env::current_exe()?.parent().unwrap_or(Path::new("/")).join(ENGINE),
    };
    std::path::absolute(path)
}

/// Raises the usual limit of 1024 open files when many engines are to run: each takes seven (connection, two pipes, process, the
/// FUSE connection, state and control).
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

/// Durations as Go writes them, because charts pass them on: `2m`, `1m30s`, `500ms`, `1.5h`.
fn duration(text: &str) -> Result<Duration, String> {
    let invalid = || format!("{text:?} is not a duration such as 90s or 1m30s");
    let mut rest = text;
    let mut seconds = 0.0;
    while !rest.is_empty() {
        let number_end = rest.find(|it: char| it.is_ascii_alphabetic()).ok_or_else(invalid)?;
        let (number, after) = rest.split_at(number_end);
        let unit_end = after.find(|it: char| !it.is_ascii_alphabetic()).unwrap_or(after.len());
        let (unit, after) = after.split_at(unit_end);
        let scale = match unit {
            "h" => 3600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 1e-3,
            "us" => 1e-6,
            "ns" => 1e-9,
            _ => return Err(invalid()),
        };
        seconds += number.parse::<f64>().map_err(|_| invalid())? * scale;
        rest = after;
    }
    // Longer than a day is as good as for ever, and everybody can still add it to the current time.
    let is_sane = 0.0 < seconds && seconds <= 86_400.0;
    if is_sane { Ok(Duration::from_secs_f64(seconds)) } else { Err(format!("{text:?} is not between 1ns and 24h")) }
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
    fn durations() {
        check("2m", Ok(120_000));
        check("1m30s", Ok(90_000));
        check("500ms", Ok(500));
        check("1.5h", Ok(5_400_000));
        check("", Err("\"\" is not between 1ns and 24h"));
        check("0s", Err("\"0s\" is not between 1ns and 24h"));
        check("-1s", Err("\"-1s\" is not between 1ns and 24h"));
        check("25h", Err("\"25h\" is not between 1ns and 24h"));
        for text in ["2", "m", "2 m", "2x", "1m2", "infs", "NaNs"] {
            check(text, Err(&format!("{text:?} is not a duration such as 90s or 1m30s")));
        }
    }

    #[track_caller]
    fn check(text: &str, expected: Result<u128, &str>) {
        assert_eq!(duration(text).map(|it| it.as_millis()), expected.map_err(str::to_owned));
    }

    #[test]
    fn the_engine_is_found_by_flag_then_directory_then_beside_us() {
        let path = |text: &str| Some(PathBuf::from(text));
        assert_eq!(engine_path(path("/x/e"), path("/bin")).unwrap(), Path::new("/x/e"));
        assert_eq!(engine_path(None, path("/bin")).unwrap(), Path::new("/bin/mount-s3"));
        let beside = std::env::current_exe().unwrap().with_file_name("mount-s3");
        assert_eq!(engine_path(None, None).unwrap(), beside);
        assert!(engine_path(path("e"), None).unwrap().is_absolute());
    }
}
