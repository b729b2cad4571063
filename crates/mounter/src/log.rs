//! Log lines of the mounter itself, `level=… msg=… key=…` on stderr. What engines say is relayed as it is, not logged.

use std::error::Error;
use std::fmt::{self, Display, Write as _};
use std::io::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};

static IS_QUIET: AtomicBool = AtomicBool::new(false);

/// From now on only warnings and errors are logged.
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

/// An error with all its causes, on one line.
pub struct Chain<'a>(pub &'a dyn Error);

impl Display for Chain<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.0)?;
        let mut next = self.0.source();
        while let Some(cause) = next {
            write!(formatter, ": {cause}")?;
            next = cause.source();
        }
        Ok(())
    }
}

fn line(level: &str, message: &str, fields: &[(&str, &dyn Display)]) {
    // A reader of our stderr that went away must not end the engines.
    let _ = std::io::stderr().lock().write_all(render(level, message, fields).as_bytes());
}

fn render(level: &str, message: &str, fields: &[(&str, &dyn Display)]) -> String {
    let mut line = format!("level={level} msg={message:?}");
    for (key, value) in fields {
        // Quoted as Rust does: whatever a peer sent stays on this one line.
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
