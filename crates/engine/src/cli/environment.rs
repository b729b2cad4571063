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
    /// As `--keep-alive`, for those who do not know whether the engine they start knows that flag.
    pub keeps_alive: bool,
    /// Whoever started us holds our state and replaces us when we die.
    pub keeper: Option<KeeperDescriptors>,
    /// Where the service manager wants to hear how we are.
    pub manager: Option<PathBuf>,
    /// The file that the keys are in.
    pub keys: Option<PathBuf>,
    pub trials: Trials,
}

/// Trouble that tests ask for, because no machine makes it on demand.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trials {
    /// Behave as on a kernel that does not send requests again.
    pub is_resending_off: bool,
    /// Use the FUSE front of the library instead of ours, to compare them.
    pub is_library_front: bool,
    /// Whoever looks for this name in the first engine of a mount waits for ever.
    pub trap: Option<OsString>,
}

/// What the keeper gives: inherited descriptors, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeeperDescriptors {
    /// A file in memory.
    pub state: i32,
    /// A socket.
    pub control: i32,
    /// The mount, if the arguments name a directory.
    pub fuse: Option<i32>,
    /// Ask the server before the mount is taken over: the keys are new.
    pub must_be_sure: bool,
}

/// Tells a child of ours that it is one.
pub const BACKGROUND_CHILD: &str = "S3CSI_ENGINE_BACKGROUND_CHILD";

/// `STATE,CONTROL` or `STATE,CONTROL,MOUNT`: set by whoever keeps the mount. A variable, because an engine that does not know it
/// must work as well.
const KEEPER: &str = "S3CSI_ENGINE_KEEPER";

/// Set to anything by whoever keeps the mount.
const WHEN_SURE: &str = "S3CSI_ENGINE_WHEN_SURE";

/// Set to anything by strategy `systemd` of the driver. A variable for the same reason.
const KEEP_ALIVE: &str = "S3CSI_ENGINE_KEEP_ALIVE";

/// Words with commas between them: `no-resend`, `library-front`, `trap=NAME`.
const TRIALS: &str = "S3CSI_ENGINE_TRIALS";

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
            keeps_alive: set(KEEP_ALIVE).is_some(),
            keeper: text(KEEPER).map(|it| keeper(&it)).transpose()?,
            manager: set("NOTIFY_SOCKET").map(PathBuf::from),
            keys: set("AWS_SHARED_CREDENTIALS_FILE").map(PathBuf::from),
            trials: text(TRIALS).map(|it| trials(&it)).transpose()?.unwrap_or_default(),
        })
    }
}

fn keeper(text: &str) -> Result<KeeperDescriptors, String> {
    let numbers: Result<Vec<i32>, _> = text.split(',').map(str::parse).collect();
    let must_be_sure = set(WHEN_SURE).is_some();
    match numbers.as_deref() {
        Ok(&[state, control]) => Ok(KeeperDescriptors { state, control, fuse: None, must_be_sure }),
        Ok(&[state, control, fuse]) => Ok(KeeperDescriptors { state, control, fuse: Some(fuse), must_be_sure }),
        Ok(_) | Err(_) => Err(format!("the environment variable {KEEPER} must be two or three numbers")),
    }
}

fn trials(text: &str) -> Result<Trials, String> {
    let mut trials = Trials::default();
    for word in text.split(',') {
        match word.split_once('=') {
            None if word == "no-resend" => trials.is_resending_off = true,
            None if word == "library-front" => trials.is_library_front = true,
            Some(("trap", name)) => trials.trap = Some(name.into()),
            _ => return Err(format!("the environment variable {TRIALS} contains {word:?}, which nobody knows")),
        }
    }
    Ok(trials)
}

fn set(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|it| !it.is_empty())
}

fn text(name: &str) -> Option<String> {
    set(name).and_then(|it| it.into_string().ok())
}
