//! Ordinary programs, run as users run them, on a volume with permission to delete and to overwrite.
//!
//! Each entry is a shell script that must succeed in an empty directory of the mount. `$OUTSIDE` is a directory on a local
//! disk. What an object store cannot do is listed as refused. The larger ones need packages that only `make compatibility`
//! installs.

mod going_back;
mod larger;
mod ordinary;
mod stressors;

use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use crate::environment::compatibility_python;
use crate::wait::wait_for_some;

pub use going_back::GOING_BACK;
pub use larger::LARGER;
pub use ordinary::ORDINARY;
pub use stressors::{FIO, STRESSOR_PREFIX, STRESSORS, stressor_script};

/// Name, script, and the program that reports the refusal.
pub const REFUSED: &[(&str, &str, &str)] = &[
    ("hard link", "echo 1 > f; ln f g", "ln: "),
    ("named pipe", "mkfifo p", "mkfifo: "),
    ("fallocate(2)", "fallocate -l 10000 f", "fallocate: "),
    ("punch a hole", "head -c 10000 /dev/zero > f; fallocate --punch-hole -o 0 -l 4096 f", "fallocate: "),
    ("other extended attributes", "echo 1 > f; setfattr -n trusted.a -v b f", "setfattr: "),
];

/// How a script ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScriptEnd {
    Succeeded,
    Failed { errors: String },
    TimedOut,
}

/// Runs a script in a directory of a mount, and ends it with everything it started when it takes too long.
pub fn run(script: &str, directory: &Path, outside: &Path, limit: Duration) -> io::Result<ScriptEnd> {
    let errors = outside.join("standard-error");
    let mut child = Command::new("bash")
        .args(["-euo", "pipefail", "-c", script])
        .current_dir(directory)
        .env("OUTSIDE", outside)
        .env("PYTHON", compatibility_python())
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        // cargo in a volume shall not use the settings of the cargo that runs the test.
        .env_remove("CARGO_TARGET_DIR")
        .env_remove("CARGO_BUILD_TARGET")
        .env_remove("RUSTFLAGS")
        .stdin(Stdio::null())
        .stdout(File::create(outside.join("standard-output"))?)
        .stderr(File::create(&errors)?)
        .process_group(0)
        .spawn()?;
    let ended = wait_for_some(Instant::now() + limit, || child.try_wait().transpose());
    let Some(status) = ended else {
        let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
        child.wait()?;
        return Ok(ScriptEnd::TimedOut);
    };
    if status?.success() {
        return Ok(ScriptEnd::Succeeded);
    }
    Ok(ScriptEnd::Failed { errors: String::from_utf8_lossy(&fs::read(errors)?).into_owned() })
}
