//! What a mount that keeps itself alive says about itself: one line that people read, and the node understands.

use std::fmt;
use std::str::FromStr;

use crate::handoff::Answer;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// How many engines have served the mount.
    pub engines: u64,
    pub cause: String,
    pub stall_milliseconds: u64,
    /// The engine before was well.
    pub is_planned: bool,
}

const BEGINNING: &str = "engine ";
const DIED: &str = " serves; the one before died (";
const REPLACED: &str = " serves; the one before was replaced (";
const PAUSE: &str = "), pause ";
const END: &str = " ms";

#[derive(Debug, PartialEq, Eq)]
pub struct NotAReport;

impl Report {
    /// What there is to say after this news.
    pub fn after(news: &Answer, engines: u64) -> Option<Self> {
        let (cause, stall_milliseconds, is_planned) = match news {
            Answer::Resumed { cause, stall_milliseconds } => (cause, *stall_milliseconds, false),
            Answer::Replaced { reason, stall_milliseconds } => (reason, *stall_milliseconds, true),
            Answer::Ready | Answer::Failed { .. } | Answer::Exited { .. } => return None,
        };
        Some(Self { engines, cause: cause.clone(), stall_milliseconds, is_planned })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { engines, cause, stall_milliseconds, is_planned } = self;
        let middle = if *is_planned { REPLACED } else { DIED };
        let cause = cause.replace(char::is_control, " ");
        write!(formatter, "{BEGINNING}{engines}{middle}{cause}{PAUSE}{stall_milliseconds}{END}")
    }
}

impl FromStr for Report {
    type Err = NotAReport;

    fn from_str(line: &str) -> Result<Self, NotAReport> {
        let rest = line.strip_prefix(BEGINNING).and_then(|it| it.strip_suffix(END)).ok_or(NotAReport)?;
        let (rest, stall) = rest.rsplit_once(PAUSE).ok_or(NotAReport)?;
        let (engines, cause, is_planned) = match (rest.split_once(DIED), rest.split_once(REPLACED)) {
            (Some((engines, cause)), _) => (engines, cause, false),
            (None, Some((engines, cause))) => (engines, cause, true),
            (None, None) => return Err(NotAReport),
        };
        Ok(Self {
            engines: engines.parse().map_err(|_| NotAReport)?,
            cause: cause.to_owned(),
            stall_milliseconds: stall.parse().map_err(|_| NotAReport)?,
            is_planned,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_understood() {
        let died = Answer::Resumed { cause: "killed by signal 9".into(), stall_milliseconds: 61 };
        check(&died, 2, "engine 2 serves; the one before died (killed by signal 9), pause 61 ms");
        let replaced = Answer::Replaced { reason: "for its new keys".into(), stall_milliseconds: 7 };
        check(&replaced, 30, "engine 30 serves; the one before was replaced (for its new keys), pause 7 ms");
        let odd = Answer::Resumed { cause: "exit code 1: (a), pause b".into(), stall_milliseconds: 0 };
        check(&odd, 2, "engine 2 serves; the one before died (exit code 1: (a), pause b), pause 0 ms");
    }

    #[track_caller]
    fn check(news: &Answer, engines: u64, line: &str) {
        let report = Report::after(news, engines).unwrap();
        assert_eq!(report.to_string(), line);
        assert_eq!(line.parse(), Ok(report));
    }

    #[test]
    fn it_is_one_line_whatever_the_engine_said() {
        let died = Answer::Resumed { cause: "a\nMAINPID=1".into(), stall_milliseconds: 1 };
        assert_eq!(Report::after(&died, 2).unwrap().to_string().lines().count(), 1);
    }

    #[test]
    fn other_news_and_other_words_are_nothing() {
        assert_eq!(Report::after(&Answer::Ready, 1), None);
        for words in ["", "engine", "engine x serves; the one before died (y), pause 1 ms", "Processing requests..."] {
            assert_eq!(words.parse::<Report>(), Err(NotAReport), "{words}");
        }
    }
}
