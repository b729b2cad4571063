//! What the environment says and no flag does.

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use s3csi_core::environment::CA_BUNDLE_VARIABLE;
use s3csi_handoff::{ERRORS_VARIABLE, JSON_ERRORS, KEEP_ALIVE_VARIABLE, ServiceManager, StoredDescriptor};
use s3csi_supervisor::control::{CHECK_CREDENTIALS_VARIABLE, DESCRIPTORS_VARIABLE, OOM_SCORE_VARIABLE};

/// Variables that the file system library reads by itself, and dies of if they are not numbers. Checked before it starts.
const NUMBERS_OF_THE_LIBRARY: [&str; 3] = [
    "UNSTABLE_MOUNTPOINT_MAX_BACKGROUND",
    "UNSTABLE_MOUNTPOINT_CONGESTION_THRESHOLD",
    "UNSTABLE_CRT_EVENTLOOP_THREADS",
];

const PROXY_VARIABLES: [&str; 4] = ["HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"];

#[derive(Clone, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a variable that is set or not")]
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
    /// Set by the supervisor that started this engine.
    pub supervisor: Option<SupervisorDescriptors>,
    /// The `oom_score_adj` that the supervisor wants this process to have.
    pub oom_score: Option<i32>,
    /// The service manager that started this service.
    pub manager: Option<ServiceManager>,
    /// Set by the service manager if an earlier process of this service was killed.
    pub stored: Option<StoredDescriptors>,
    /// The profile to use, if no flag names one.
    pub profile: Option<String>,
    /// The file that the keys are in.
    pub keys: Option<PathBuf>,
    /// The file that says how a profile gets its keys.
    pub profiles: Option<PathBuf>,
    /// The keys are in the environment itself.
    pub has_keys: bool,
    /// Requests may be sent through a proxy.
    pub has_proxy: bool,
    /// A file with certificates that are trusted in addition to others. It need not exist.
    pub additional_ca_bundle: Option<PathBuf>,
    /// Threads of the S3 client library's event loop, if not as many as it chooses.
    pub event_loop_threads: Option<u16>,
    /// Where a staging directory is made if no flag names one.
    pub temporary_directory: PathBuf,
    pub test_hooks: TestHooks,
}

/// Faults and modes that only tests ask for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TestHooks {
    /// Behave as on a kernel that does not send requests again.
    pub is_resending_off: bool,
    /// Use the FUSE front of the library instead of ours, to compare them.
    pub is_library_front: bool,
    /// In the first engine of a mount, LOOKUP of this name never returns.
    pub hang_on_lookup: Option<OsString>,
    /// How long a store may take for an answer without content.
    pub longest_answer: Option<Duration>,
}

/// What the supervisor gives: inherited descriptors, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SupervisorDescriptors {
    /// A file in memory.
    pub state: i32,
    /// A socket.
    pub control: i32,
    /// The mount, if the arguments name a directory.
    pub fuse: Option<i32>,
    /// Ask the server before the mount is taken over: the keys are new.
    pub must_check_credentials: bool,
}

/// What the service manager stored for an earlier process of this service: inherited descriptors, by number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredDescriptors {
    pub fuse: Option<i32>,
    pub state: Option<i32>,
}

/// How errors are written to stderr.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorFormat {
    /// A line for people.
    Text,
    /// A line for the program that started us.
    Json,
}

/// Read apart from the rest, which may be what is wrong.
pub fn error_format() -> ErrorFormat {
    match text(ERRORS_VARIABLE).as_deref() {
        Some(JSON_ERRORS) => ErrorFormat::Json,
        Some(_) | None => ErrorFormat::Text,
    }
}

/// Tells a child of ours that it is one.
pub const BACKGROUND_CHILD: &str = "S3CSI_ENGINE_BACKGROUND_CHILD";

/// Words with commas between them: `no-resend`, `library-front`, `hang-on-lookup=NAME`, `longest-answer=SECONDS`.
const TEST_HOOKS: &str = "S3CSI_ENGINE_TRIALS";

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
            keeps_alive: set(KEEP_ALIVE_VARIABLE).is_some(),
            supervisor: text(DESCRIPTORS_VARIABLE).map(|it| supervisor(&it)).transpose()?,
            oom_score: text(OOM_SCORE_VARIABLE).and_then(|it| it.parse().ok()),
            manager: set("NOTIFY_SOCKET").map(|it| ServiceManager::at(it.into())),
            stored: stored(),
            profile: text("AWS_PROFILE"),
            keys: set("AWS_SHARED_CREDENTIALS_FILE").map(PathBuf::from),
            profiles: set("AWS_CONFIG_FILE").map(PathBuf::from),
            has_keys: ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"].into_iter().all(|it| set(it).is_some()),
            has_proxy: PROXY_VARIABLES.into_iter().any(|it| set(it).is_some()),
            additional_ca_bundle: set(CA_BUNDLE_VARIABLE).map(PathBuf::from),
            event_loop_threads: text("UNSTABLE_CRT_EVENTLOOP_THREADS").and_then(|it| it.parse().ok()),
            temporary_directory: set("TMPDIR").map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from),
            test_hooks: text(TEST_HOOKS).map(|it| test_hooks(&it)).transpose()?.unwrap_or_default(),
        })
    }
}

/// The first descriptor that a service manager passes on.
const FIRST_STORED: i32 = 3;

/// The variables of `sd_listen_fds`. They name the process that they are for, which in the background is our parent.
fn stored() -> Option<StoredDescriptors> {
    let mut processes = vec![std::process::id()];
    if set(BACKGROUND_CHILD).is_some() {
        processes.push(std::os::unix::process::parent_id());
    }
    let process = text("LISTEN_PID")?.parse().ok()?;
    let count = text("LISTEN_FDS")?.parse().ok()?;
    let stored = StoredDescriptors::named(count, &text("LISTEN_FDNAMES").unwrap_or_default());
    // Others are not of this program.
    (processes.contains(&process) && stored != StoredDescriptors::default()).then_some(stored)
}

impl StoredDescriptors {
    fn named(count: usize, names: &str) -> Self {
        let mut stored = Self::default();
        for (number, name) in (FIRST_STORED..).zip(names.split(':').take(count)) {
            match StoredDescriptor::from_name(name) {
                Some(StoredDescriptor::Fuse) => stored.fuse = Some(number),
                Some(StoredDescriptor::State) => stored.state = Some(number),
                None => {}
            }
        }
        stored
    }
}

fn supervisor(text: &str) -> Result<SupervisorDescriptors, String> {
    let numbers: Result<Vec<i32>, _> = text.split(',').map(str::parse).collect();
    let must_check_credentials = set(CHECK_CREDENTIALS_VARIABLE).is_some();
    match numbers.as_deref() {
        Ok(&[state, control]) => Ok(SupervisorDescriptors { state, control, fuse: None, must_check_credentials }),
        Ok(&[state, control, fuse]) => {
            Ok(SupervisorDescriptors { state, control, fuse: Some(fuse), must_check_credentials })
        }
        Ok(_) | Err(_) => Err(format!("the environment variable {DESCRIPTORS_VARIABLE} must be two or three numbers")),
    }
}

fn test_hooks(text: &str) -> Result<TestHooks, String> {
    let mut test_hooks = TestHooks::default();
    for word in text.split(',') {
        match word.split_once('=') {
            None if word == "no-resend" => test_hooks.is_resending_off = true,
            None if word == "library-front" => test_hooks.is_library_front = true,
            Some(("hang-on-lookup", name)) => test_hooks.hang_on_lookup = Some(name.into()),
            Some(("longest-answer", seconds)) if seconds.parse::<u32>().is_ok() => {
                test_hooks.longest_answer = seconds.parse().ok().map(Duration::from_secs);
            }
            _ => return Err(format!("the environment variable {TEST_HOOKS} contains the unknown word {word:?}")),
        }
    }
    Ok(test_hooks)
}

fn set(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|it| !it.is_empty())
}

fn text(name: &str) -> Option<String> {
    set(name).and_then(|it| it.into_string().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(count: usize, names: &str, fuse: Option<i32>, state: Option<i32>) {
        assert_eq!(StoredDescriptors::named(count, names), StoredDescriptors { fuse, state }, "{names}");
    }

    #[test]
    fn stored_descriptors_are_found_by_name_in_any_order() {
        check(2, "state:fuse", Some(4), Some(3));
        check(2, "fuse:state", Some(3), Some(4));
        check(3, "connection:state:fuse", Some(5), Some(4));
        // The mount was about to end.
        check(1, "state", None, Some(3));
        check(1, "state:fuse", None, Some(3));
        check(0, "", None, None);
    }
}
