//! The status text of a unit that supervises its own engine: for `systemctl status`, and parsed by the node plugin.

use std::fmt;
use std::str::FromStr;

use crate::Answer;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusReport {
    /// How many engines have served the mount.
    pub engines: u64,
    pub cause: String,
    pub stall_milliseconds: u64,
    /// The previous engine was healthy.
    pub is_planned: bool,
}

const PREFIX: &str = "engine ";
const DIED: &str = " is serving; the previous one died (";
const REPLACED: &str = " is serving; the previous one was replaced (";
const PAUSE: &str = "), pause ";
const SUFFIX: &str = " ms";

#[derive(Debug, PartialEq, Eq)]
pub struct InvalidStatusReport;

impl StatusReport {
    /// The status after an event, if it changes.
    pub fn after(event: &Answer, engines: u64) -> Option<Self> {
        let (cause, stall_milliseconds, is_planned) = match event {
            Answer::Resumed { cause, stall_milliseconds } => (cause, *stall_milliseconds, false),
            Answer::Replaced { reason, stall_milliseconds } => (reason, *stall_milliseconds, true),
            Answer::Ready
            | Answer::Held { .. }
            | Answer::Prepared
            | Answer::Released
            | Answer::Failed { .. }
            | Answer::Exited { .. } => return None,
        };
        Some(Self { engines, cause: cause.clone(), stall_milliseconds, is_planned })
    }
}

impl fmt::Display for StatusReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { engines, cause, stall_milliseconds, is_planned } = self;
        let middle = if *is_planned { REPLACED } else { DIED };
        let cause = cause.replace(char::is_control, " ");
        write!(formatter, "{PREFIX}{engines}{middle}{cause}{PAUSE}{stall_milliseconds}{SUFFIX}")
    }
}

impl FromStr for StatusReport {
    type Err = InvalidStatusReport;

    fn from_str(line: &str) -> Result<Self, InvalidStatusReport> {
        let rest = line.strip_prefix(PREFIX).and_then(|it| it.strip_suffix(SUFFIX)).ok_or(InvalidStatusReport)?;
        let (rest, stall) = rest.rsplit_once(PAUSE).ok_or(InvalidStatusReport)?;
        // The cause may contain any of these words, so the first ones count.
        let digits = rest.find(|it: char| !it.is_ascii_digit()).ok_or(InvalidStatusReport)?;
        let (engines, rest) = rest.split_at(digits);
        let (cause, is_planned) = match (rest.strip_prefix(DIED), rest.strip_prefix(REPLACED)) {
            (Some(cause), _) => (cause, false),
            (None, Some(cause)) => (cause, true),
            (None, None) => return Err(InvalidStatusReport),
        };
        Ok(Self {
            engines: engines.parse().map_err(|_| InvalidStatusReport)?,
            cause: cause.to_owned(),
            stall_milliseconds: stall.parse().map_err(|_| InvalidStatusReport)?,
            is_planned,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_texts_are_parsed() {
        let died = Answer::Resumed { cause: "killed by signal 9".into(), stall_milliseconds: 61 };
        check(&died, 2, "engine 2 is serving; the previous one died (killed by signal 9), pause 61 ms");
        let replaced = Answer::Replaced { reason: "credentials changed".into(), stall_milliseconds: 7 };
        check(&replaced, 30, "engine 30 is serving; the previous one was replaced (credentials changed), pause 7 ms");
        let odd = Answer::Resumed { cause: "exit code 1: (a), pause b".into(), stall_milliseconds: 0 };
        check(&odd, 2, "engine 2 is serving; the previous one died (exit code 1: (a), pause b), pause 0 ms");
    }

    #[track_caller]
    fn check(event: &Answer, engines: u64, line: &str) {
        let report = StatusReport::after(event, engines).unwrap();
        assert_eq!(report.to_string(), line);
        assert_eq!(line.parse(), Ok(report));
    }

    #[test]
    fn a_status_is_one_line() {
        let died = Answer::Resumed { cause: "a\nMAINPID=1".into(), stall_milliseconds: 1 };
        assert_eq!(StatusReport::after(&died, 2).unwrap().to_string().lines().count(), 1);
    }

    #[test]
    fn other_events_and_texts_are_no_status() {
        assert_eq!(StatusReport::after(&Answer::Ready, 1), None);
        for text in
            ["", "engine", "engine x is serving; the previous one died (y), pause 1 ms", "Processing requests..."]
        {
            assert_eq!(text.parse::<StatusReport>(), Err(InvalidStatusReport), "{text}");
        }
    }
}
