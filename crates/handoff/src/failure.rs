//! Why an engine failed, as it crosses the border between processes: the last line of its stderr.

use s3csi_core::FailureCode;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Set to [`JSON_ERRORS`] for an engine whose stderr is read by a program: it then ends with an [`EngineFailure`] in one line
/// instead of a line for people.
pub const ERRORS_VARIABLE: &str = "S3CSI_ENGINE_ERRORS";
pub const JSON_ERRORS: &str = "json";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineFailure {
    #[serde(serialize_with = "write_code", deserialize_with = "read_code")]
    pub code: FailureCode,
    pub message: String,
}

impl EngineFailure {
    /// Takes the failure from what an engine wrote to stderr. Other engines write prose, all of which is the message then.
    pub fn from_error_output(output: &str) -> Self {
        let last_line = output.trim_end().lines().next_back().unwrap_or_default();
        serde_json::from_str(last_line).unwrap_or_else(|_| Self::from_message(output.trim()))
    }

    /// The code is derived from the message.
    pub fn from_message(message: &str) -> Self {
        Self { code: FailureCode::of_message(message), message: message.to_owned() }
    }

    /// The failure as one line, without its end.
    pub fn to_line(&self) -> String {
        serde_json::to_string(self).unwrap_or_else(|_| unreachable!("strings can be written"))
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn write_code<S: Serializer>(code: &FailureCode, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(code.as_str())
}

/// A code of a later version means nothing to us.
fn read_code<'de, D: Deserializer<'de>>(deserializer: D) -> Result<FailureCode, D::Error> {
    let text = String::deserialize(deserializer)?;
    Ok(text.parse().unwrap_or(FailureCode::Other))
}

#[expect(clippy::trivially_copy_pass_by_ref, clippy::ref_option, reason = "serde passes a reference")]
pub fn write_optional_code<S: Serializer>(code: &Option<FailureCode>, serializer: S) -> Result<S::Ok, S::Error> {
    code.map(FailureCode::as_str).serialize(serializer)
}

pub fn read_optional_code<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<FailureCode>, D::Error> {
    let text: Option<String> = Option::deserialize(deserializer)?;
    Ok(text.map(|it| it.parse().unwrap_or(FailureCode::Other)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_of_our_engine_is_the_failure() {
        let failure = EngineFailure { code: FailureCode::NoSuchBucket, message: "bucket \"b\" does not exist".into() };
        let line = r#"{"code":"no-such-bucket","message":"bucket \"b\" does not exist"}"#;
        assert_eq!(failure.to_line(), line);
        assert_eq!(EngineFailure::from_error_output(line), failure);
        assert_eq!(EngineFailure::from_error_output(&format!("a warning\n{line}\n\n")), failure);
    }

    #[test]
    fn codes_of_later_versions_keep_their_message() {
        let failure = EngineFailure::from_error_output(r#"{"code":"quota","message":"no more"}"#);
        assert_eq!(failure, EngineFailure { code: FailureCode::Other, message: "no more".into() });
    }

    #[test]
    fn other_engines_are_understood_by_what_they_write() {
        let output = "Error: Failed to create S3 client\n  Caused by: Client error: Forbidden: Access Denied.\n";
        let failure = EngineFailure::from_error_output(output);
        assert_eq!(failure, EngineFailure { code: FailureCode::Forbidden, message: output.trim().into() });
        let silent = EngineFailure { code: FailureCode::Other, message: String::new() };
        assert_eq!(EngineFailure::from_error_output(""), silent);
    }
}
