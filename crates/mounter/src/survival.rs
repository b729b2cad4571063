//! Who is to die first when the machine runs out of memory: an engine, which can be replaced, and not the mounter, which cannot.

use std::fs;

use crate::log;

/// Half of what there is between "as likely as others" and "never".
const ADVANTAGE: i32 = 500;
const LOWEST: i32 = -999;
/// As if an engine used a tenth of all memory more than it does.
const HANDICAP: i32 = 100;
const HIGHEST: i32 = 1000;

/// Makes this process less likely to be killed than engines. Answers how likely those are to be made.
pub fn ask_for_mercy() -> Option<i32> {
    let usual = fs::read_to_string(file("self")).ok()?.trim().parse::<i32>().ok()?;
    let favoured = (usual - ADVANTAGE).max(LOWEST);
    match fs::write(file("self"), favoured.to_string()) {
        Ok(()) => Some(usual),
        // Without privileges one can only be made more likely.
        Err(_) => Some((usual + HANDICAP).min(HIGHEST)),
    }
}

/// Makes a child of ours as likely to be killed as that.
pub fn expose(process: u32, score: i32) {
    // It may have ended already.
    if let Err(cause) = fs::write(file(&process.to_string()), score.to_string()) {
        log::info("the engine is spared when memory runs out", &[("pid", &process), ("error", &cause)]);
    }
}

fn file(process: &str) -> String {
    format!("/proc/{process}/oom_score_adj")
}
