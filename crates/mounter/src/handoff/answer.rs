//! What a mounter tells the node about the engine of a request: one JSON object per line.

use serde::{Deserialize, Serialize};

/// No answer is longer on the wire, so a reader may stop there. Quoted words are bounded, and escaping them at most doubles
/// their length, because they contain no control characters that need more.
pub const MAX_ANSWER_BYTES: usize = 40 * 1024;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "lowercase")]
pub enum Answer {
    /// The engine serves the mount.
    Ready,
    /// The engine died, or stood still, and another one has taken its place: the mount lives on, and so do open files.
    Resumed {
        cause: String,
        /// How long nobody served the mount.
        stall_milliseconds: u64,
    },
    /// The engine was replaced while it was well: on request, or for its new keys. Open files live on.
    Replaced {
        reason: String,
        /// How long nobody served the mount.
        stall_milliseconds: u64,
    },
    /// There will be no mount; mostly the engine's own words.
    Failed { error: String },
    /// The engine has ended: after it was ready, or in peace before. Code and signal exclude each other. Also the answer to a
    /// request to stop, when no engine is left.
    Exited {
        code: Option<i32>,
        signal: Option<i32>,
        /// The last words on its stderr.
        #[serde(default)]
        error: String,
    },
}

#[derive(Debug, thiserror::Error)]
#[error("not an answer of a mounter")]
pub struct InvalidAnswer {
    #[source]
    cause: serde_json::Error,
}

impl Answer {
    pub fn from_line(line: &str) -> Result<Self, InvalidAnswer> {
        serde_json::from_str(line).map_err(|cause| InvalidAnswer { cause })
    }

    /// The answer as one line, with its end.
    pub fn to_line(&self) -> String {
        let mut line =
            serde_json::to_string(self).unwrap_or_else(|_| unreachable!("strings and numbers can be written"));
        line.push('\n');
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_on_the_wire() {
        check(&Answer::Ready, r#"{"answer":"ready"}"#);
        check(&Answer::Failed { error: "no\n\"way\"".into() }, r#"{"answer":"failed","error":"no\n\"way\""}"#);
        let resumed = Answer::Resumed { cause: "signal 9".into(), stall_milliseconds: 120 };
        check(&resumed, r#"{"answer":"resumed","cause":"signal 9","stall_milliseconds":120}"#);
        let replaced = Answer::Replaced { reason: "on request".into(), stall_milliseconds: 9 };
        check(&replaced, r#"{"answer":"replaced","reason":"on request","stall_milliseconds":9}"#);
        let exited = Answer::Exited { code: None, signal: Some(9), error: String::new() };
        check(&exited, r#"{"answer":"exited","code":null,"signal":9,"error":""}"#);
        let exited = Answer::Exited { code: Some(0), signal: None, error: "x".into() };
        check(&exited, r#"{"answer":"exited","code":0,"signal":null,"error":"x"}"#);
    }

    #[track_caller]
    fn check(answer: &Answer, wire: &str) {
        assert_eq!(answer.to_line(), format!("{wire}\n"));
        assert_eq!(&Answer::from_line(wire).unwrap(), answer);
        assert_eq!(&Answer::from_line(&answer.to_line()).unwrap(), answer);
    }

    #[test]
    fn anything_else_is_not_an_answer() {
        for line in ["", "{}", "ready", r#"{"answer":"maybe"}"#, r#"{"answer":"failed"}"#, "[1]"] {
            assert_eq!(Answer::from_line(line).unwrap_err().to_string(), "not an answer of a mounter", "{line}");
        }
    }
}
