//! The log flags, which all long-running commands share.

use std::io::{self, IsTerminal as _};

use clap::{Args, ValueEnum};

/// From this verbosity on debug messages are logged; as in other Kubernetes components.
const DEBUG_VERBOSITY: u8 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

#[derive(Args, Debug)]
pub struct LogArgs {
    /// Format of log lines.
    #[arg(long, value_enum, default_value = "text")]
    log_format: LogFormat,

    /// Log verbosity; 4 and above includes debug messages.
    #[arg(long, short, value_name = "LEVEL", default_value_t = 2)]
    v: u8,
}

impl LogArgs {
    /// Logs to stderr from now on.
    pub fn start(self) {
        let Self { log_format, v } = self;
        let level = if v >= DEBUG_VERBOSITY { "debug" } else { "info" };
        let filter = tracing_subscriber::EnvFilter::new(format!("warn,s3csi_driver={level}"));
        let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_target(false);
        match log_format {
            LogFormat::Text => log.with_ansi(io::stderr().is_terminal()).init(),
            LogFormat::Json => log.json().flatten_event(true).init(),
        }
    }
}
