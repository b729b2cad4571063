//! The answers of a mounter to a request: one JSON object per line.

use s3csi_core::FailureCode;
use serde::{Deserialize, Serialize};

use crate::{MountRequest, failure};

/// The longest answer on the wire. Error messages are bounded, and escaping at most doubles their length, because they contain
/// no control characters that need more.
pub const MAX_ANSWER_BYTES: usize = 40 * 1024;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "lowercase")]
pub enum Answer {
    /// The engine serves the mount.
    Ready,
    /// The engine died or froze, and another one serves the mount. Open files stay open.
    Resumed {
        cause: String,
        /// How long no engine served the mount.
        stall_milliseconds: u64,
    },
    /// A healthy engine was replaced, by request or because its credentials changed. Open files stay open.
    Replaced {
        reason: String,
        /// How long no engine served the mount.
        stall_milliseconds: u64,
    },
    /// An engine serves the mount and another mounter could continue it. To a mount request with `hold` it comes once, with the
    /// state attached; to the command `hold` with FUSE descriptor and state, and with the request that is served.
    Held {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        request: Option<MountRequest>,
    },
    /// To a mount request with `wait`: the engine has started and waits for the command `go`.
    Prepared,
    /// To the command `release`: no engine of this mounter serves the mount, and all descriptors are closed.
    Released,
    /// There will be no mount.
    Failed {
        error: String,
        /// Missing if it was not the engine that failed, and from mounters that do not know it.
        #[serde(
            default,
            skip_serializing_if = "Option::is_none",
            serialize_with = "failure::write_optional_code",
            deserialize_with = "failure::read_optional_code"
        )]
        code: Option<FailureCode>,
    },
    /// The engine has exited after it was ready, or successfully before. Has either a code or a signal. Also the answer to a
    /// request to stop, when no engine is left.
    Exited {
        code: Option<i32>,
        signal: Option<i32>,
        /// The end of its error output.
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
        let failed = Answer::Failed { error: "no\n\"way\"".into(), code: None };
        check(&failed, r#"{"answer":"failed","error":"no\n\"way\""}"#);
        let failed = Answer::Failed { error: "no".into(), code: Some(FailureCode::Forbidden) };
        check(&failed, r#"{"answer":"failed","error":"no","code":"forbidden"}"#);
        let resumed = Answer::Resumed { cause: "signal 9".into(), stall_milliseconds: 120 };
        check(&resumed, r#"{"answer":"resumed","cause":"signal 9","stall_milliseconds":120}"#);
        let replaced = Answer::Replaced { reason: "on request".into(), stall_milliseconds: 9 };
        check(&replaced, r#"{"answer":"replaced","reason":"on request","stall_milliseconds":9}"#);
        check(&Answer::Held { request: None }, r#"{"answer":"held"}"#);
        let request = MountRequest { bucket_name: "b".into(), ..MountRequest::default() };
        let held = Answer::Held { request: Some(request) };
        check(&held, r#"{"answer":"held","request":{"bucketName":"b","args":[],"env":[]}}"#);
        check(&Answer::Prepared, r#"{"answer":"prepared"}"#);
        check(&Answer::Released, r#"{"answer":"released"}"#);
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
