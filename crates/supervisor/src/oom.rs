//! Makes the kernel's OOM killer prefer engines, which can be replaced, to their supervisor, which cannot.

use std::{fs, io};

use crate::log;

/// Half of the range between "as likely as others" and "never".
const SUPERVISOR_BONUS: i32 = 500;
const LOWEST: i32 = -999;
/// As if an engine used a tenth of all memory more than it does.
const ENGINE_PENALTY: i32 = 100;
const HIGHEST: i32 = 1000;

/// Lowers the `oom_score_adj` of this process and returns the one its engines are to have.
pub fn lower_own_oom_score() -> Option<i32> {
    let current = fs::read_to_string(file("self")).ok()?.trim().parse::<i32>().ok()?;
    let lowered = (current - SUPERVISOR_BONUS).max(LOWEST);
    match fs::write(file("self"), lowered.to_string()) {
        Ok(()) => Some(current),
        // Without CAP_SYS_RESOURCE the score can only be raised.
        Err(_) => Some((current + ENGINE_PENALTY).min(HIGHEST)),
    }
}

/// Sets the `oom_score_adj` of a child process. Engines of ours do it themselves, too.
pub fn set_oom_score(process: u32, score: i32) {
    let set = fs::write(file(&process.to_string()), score.to_string());
    // It may have ended already, or it has set it and cannot be inspected any more.
    if let Err(cause) = set
        && cause.kind() != io::ErrorKind::PermissionDenied
    {
        log::info("oom_score_adj of the engine not set", &[("pid", &process), ("error", &cause)]);
    }
}

fn file(process: &str) -> String {
    format!("/proc/{process}/oom_score_adj")
}
