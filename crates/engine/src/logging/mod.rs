//! Where log lines go: a file or syslog, and the standard output in the foreground. SIGUSR2 makes the log more verbose.
//! Also the panic hook, so that nothing we print ever contains a back trace.

pub mod crt;
mod redact;
mod syslog;

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;

use mountpoint_s3_client::config::AWSCRT_LOG_TARGET;
use mountpoint_s3_fs::logging::prepare_log_file_name;
use mountpoint_s3_fs::metrics;
use signal_hook::consts::SIGUSR2;
use signal_hook::iterator::Signals;
use tracing_subscriber::filter::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{fmt, reload};

use crate::cli::{Arguments, Environment};

#[derive(Debug, thiserror::Error)]
pub enum LoggingError {
    #[error("cannot create the log directory {path:?}")]
    Directory {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error("cannot create the log file {path:?}")]
    File {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error("cannot wait for SIGUSR2")]
    Signal {
        #[source]
        cause: io::Error,
    },
}

/// Starts logging for the rest of the process's life. Returns the connection errors that the S3 client library logs.
pub fn start(arguments: &Arguments, environment: &Environment) -> Result<crt::ConnectionErrors, LoggingError> {
    install_panic_hook();
    if arguments.no_log {
        return Ok(crt::install(crt::Verbosity::Quiet));
    }

    let file = arguments.log_directory.as_deref().map(open_file).transpose()?;
    let syslog = if file.is_none() { syslog::Syslog::connect() } else { None };
    let usual_filter = environment.log_filter.clone().unwrap_or_else(|| filter_of(arguments));
    let (filter, filter_handle) = reload::Layer::new(EnvFilter::new(&usual_filter));
    let console = arguments.foreground.then(|| fmt::layer().with_ansi(false).with_thread_ids(true));

    let verbosity = if usual_filter.contains(&format!("{AWSCRT_LOG_TARGET}=off")) {
        crt::Verbosity::Quiet
    } else {
        crt::Verbosity::Debug
    };
    let connection_errors = crt::install(verbosity);
    tracing_subscriber::registry()
        .with(filter)
        .with(syslog)
        .with(file.map(|file| fmt::layer().with_ansi(false).with_thread_ids(true).with_writer(file)))
        .with(console)
        .with(metrics::metrics_tracing_span_layer())
        .init();

    let mut signals = Signals::new([SIGUSR2]).map_err(|cause| LoggingError::Signal { cause })?;
    let filters = [usual_filter, format!("debug,{AWSCRT_LOG_TARGET}=off"), format!("trace,{AWSCRT_LOG_TARGET}=off")];
    thread::spawn(move || {
        for filter in (0..filters.len()).cycle().skip(1).zip(signals.forever()).map(|(next, _)| &filters[next]) {
            // It fails only if the subscriber is gone, and with it everybody who could read about it.
            let _ = filter_handle.reload(EnvFilter::new(filter));
            tracing::warn!(filter, "log filter changed by SIGUSR2");
        }
    });
    Ok(connection_errors)
}

fn filter_of(arguments: &Arguments) -> String {
    let everything = if arguments.debug { "debug" } else { "warn,mount_s3=info" };
    let client_library = if arguments.debug_crt { "debug" } else { "off" };
    let metrics_level = if arguments.log_metrics { "info" } else { "off" };
    // The FUSE library complains about the end of the start sequence (see session/init.rs), which is as it should be.
    format!("{everything},fuser=off,{AWSCRT_LOG_TARGET}={client_library},{}={metrics_level}", metrics::TARGET_NAME)
}

/// Logs name objects and users, so other users may not read them.
fn open_file(directory: &Path) -> Result<File, LoggingError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o750)
        .create(directory)
        .map_err(|cause| LoggingError::Directory { path: directory.to_owned(), cause })?;
    let path = prepare_log_file_name(directory);
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o640)
        .open(&path)
        .map_err(|cause| LoggingError::File { path, cause })
}

fn install_panic_hook() {
    std::panic::set_hook(Box::new(|panic| {
        let message = panic.payload_as_str().unwrap_or("no message");
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        tracing::error!(place, "panic: {message}");
        eprintln!("mount-s3: internal error: {message} ({place})");
    }));
}
