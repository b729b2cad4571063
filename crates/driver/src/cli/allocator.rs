//! How many heaps the C library has.

use std::env;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

/// The C library reads it before `main`.
const HEAPS: &str = "MALLOC_ARENA_MAX";

/// Starts this process once more with one heap for all threads, unless the environment says how many there are. By default there are
/// up to eight per processor, and each keeps what it once needed: after a hundred calls at once that is more than all that is in use.
/// Returns why that failed; the process works without it.
pub fn ensure_one_heap() -> Result<(), io::Error> {
    if env::var_os(HEAPS).is_some() {
        return Ok(());
    }
    let mut arguments = env::args_os();
    let name = arguments.next().unwrap_or_default();
    Err(Command::new(env::current_exe()?).arg0(name).args(arguments).env(HEAPS, "1").exec())
}
