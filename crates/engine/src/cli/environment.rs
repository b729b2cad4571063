//! What the environment says and no flag does.

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;

/// Variables that the file system library reads by itself, and dies of if they are not numbers. Checked before it starts.
const NUMBERS_OF_THE_LIBRARY: [&str; 3] = [
    "UNSTABLE_MOUNTPOINT_MAX_BACKGROUND",
    "UNSTABLE_MOUNTPOINT_CONGESTION_THRESHOLD",
    "UNSTABLE_CRT_EVENTLOOP_THREADS",
];

#[derive(Clone, Debug, Default)]
pub struct Environment {
    /// Where to write our process id once the mount works.
    pub pid_file: Option<PathBuf>,
    /// Makes the cache directory of this mount different from others below the same `--cache`.
    pub cache_key: Option<OsString>,
    /// Leave the cache directory as it is at start and end.
    pub keeps_cache: bool,
    /// The server's address, if no flag gives one.
    pub endpoint_url: Option<String>,
    /// Log filter in the syntax of `tracing`; replaces the one that the flags stand for.
    pub log_filter: Option<String>,
    /// We are the process that serves, started by one that waits for us (see background.rs).
    pub is_background_child: bool,
    /// Whoever started us holds our state and replaces us when we die.
    pub keeper: Option<KeeperDescriptors>,
}

/// Inherited descriptors, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeeperDescriptors {
    /// A file in memory.
    pub state: i32,
    /// A socket.
    pub control: i32,
}

/// Tells a child of ours that it is one.
pub const BACKGROUND_CHILD: &str = "S3CSI_ENGINE_BACKGROUND_CHILD";

/// `STATE,CONTROL`: set by the mounter for an engine in the foreground. A variable, because an engine that does not know it
/// must work as well.
const KEEPER: &str = "S3CSI_ENGINE_KEEPER";

impl Environment {
    pub fn read() -> Result<Self, String> {
        for name in NUMBERS_OF_THE_LIBRARY {
            if let Some(value) = env::var_os(name)
                && value.to_str().is_none_or(|it| it.parse::<u16>().is_err())
            {
                return Err(format!("the environment variable {name} must be a number from 0 to 65535"));
            }
        }
        Ok(Self {
            pid_file: set("UNSTABLE_MOUNTPOINT_PID_FILE").map(PathBuf::from),
            cache_key: set("UNSTABLE_MOUNTPOINT_CACHE_KEY"),
            keeps_cache: set("UNSTABLE_MOUNTPOINT_DISABLE_CACHE_CLEANUP").is_some(),
            endpoint_url: text("AWS_ENDPOINT_URL"),
            log_filter: text("MOUNTPOINT_LOG"),
            is_background_child: set(BACKGROUND_CHILD).is_some(),
            keeper: text(KEEPER).map(|it| keeper(&it)).transpose()?,
        })
    }
}

fn keeper(text: &str) -> Result<KeeperDescriptors, String> {
    let numbers = text.split_once(',').and_then(|(state, control)| Some((state.parse().ok()?, control.parse().ok()?)));
    let (state, control) = numbers.ok_or_else(|| format!("the environment variable {KEEPER} must be two numbers"))?;
    Ok(KeeperDescriptors { state, control })
}

fn set(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|it| !it.is_empty())
}

fn text(name: &str) -> Option<String> {
    set(name).and_then(|it| it.into_string().ok())
}
