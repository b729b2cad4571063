//! Log lines of mounter and supervisor, `level=… msg=… key=…` on stderr. The output of engines is relayed unchanged, not logged.

use std::fmt::{Display, Write as _};
use std::io::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};

static IS_QUIET: AtomicBool = AtomicBool::new(false);

/// Suppresses informational messages from now on.
pub fn only_warnings() {
    IS_QUIET.store(true, Ordering::Relaxed);
}

pub fn info(message: &str, fields: &[(&str, &dyn Display)]) {
    if IS_QUIET.load(Ordering::Relaxed) {
        return;
    }
    line("info", message, fields);
}

pub fn warn(message: &str, fields: &[(&str, &dyn Display)]) {
    line("warn", message, fields);
}

pub fn error(message: &str, fields: &[(&str, &dyn Display)]) {
    line("error", message, fields);
}

fn line(level: &str, message: &str, fields: &[(&str, &dyn Display)]) {
    // A closed stderr must not end the engines.
    let _ = std::io::stderr().lock().write_all(render(level, message, fields).as_bytes());
}

fn render(level: &str, message: &str, fields: &[(&str, &dyn Display)]) -> String {
    let mut line = format!("level={level} msg={message:?}");
    for (key, value) in fields {
        // Quoted as Rust does, so that values of peers stay on this line.
        let _ = write!(line, " {key}={:?}", value.to_string());
    }
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_cannot_start_a_line() {
        let line = render("info", "engine ended", &[("code", &1), ("error", &"a\nlevel=\"x\"")]);
        assert_eq!(line, "level=info msg=\"engine ended\" code=\"1\" error=\"a\\nlevel=\\\"x\\\"\"\n");
    }
}
