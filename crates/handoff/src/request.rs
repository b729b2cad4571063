//! The mount request on the wire. The supervisor validates what an engine is run with.

use std::fmt;
use std::ops::Not;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize};

/// Bucket, arguments and environment of an engine. The FUSE descriptor is attached to the message.
#[derive(Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MountRequest {
    pub bucket_name: String,
    /// Rendered arguments: `--key` or `--key=value`, never a positional one.
    #[serde(default, deserialize_with = "null_as_empty")]
    pub args: Vec<String>,
    /// `KEY=VALUE` each; the engine's whole environment.
    #[serde(default, deserialize_with = "null_as_empty")]
    pub env: Vec<String>,
    /// The sub-directory of the mounter's directory that belongs to this source; absent in a Mountpoint Pod, whose whole
    /// directory belongs to its one source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// The node plugin keeps the FUSE descriptor and wants a copy of the state once an engine serves the mount.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub hold: bool,
    /// Another mounter has served this mount. Its state is attached after the FUSE descriptor.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub resume: bool,
    /// With `resume`: another mounter still serves the mount, so the engine waits for the command `go`.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub wait: bool,
}

/// The name of a source: one plain path component, validated.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SourceName(String);

#[derive(Debug, thiserror::Error)]
#[error("source name {name:?} {problem}")]
pub struct InvalidSourceName {
    name: String,
    problem: &'static str,
}

/// The limit of file systems for one path component.
const MAX_NAME_BYTES: usize = 255;

impl fmt::Debug for MountRequest {
    /// Names of variables only: older node plugins send secrets in the environment.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bucket_name, args, env, source, hold, resume, wait } = self;
        let names: Vec<&str> = env.iter().map(|it| it.split_once('=').map_or("<no name>", |(name, _)| name)).collect();
        formatter
            .debug_struct("MountRequest")
            .field("bucket_name", bucket_name)
            .field("args", args)
            .field("env", &names)
            .field("source", source)
            .field("hold", hold)
            .field("resume", resume)
            .field("wait", wait)
            .finish()
    }
}

impl SourceName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for SourceName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl FromStr for SourceName {
    type Err = InvalidSourceName;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let invalid = |problem| InvalidSourceName { name: name.chars().take(MAX_NAME_BYTES).collect(), problem };
        if name.is_empty() || MAX_NAME_BYTES < name.len() {
            return Err(invalid("must be 1 to 255 characters long"));
        }
        if name == "." || name == ".." {
            return Err(invalid("must not be a relative path"));
        }
        if !name.bytes().all(|it| it.is_ascii_alphanumeric() || b"._-".contains(&it)) {
            return Err(invalid("may only contain letters, digits, dots, underscores and hyphens"));
        }
        Ok(Self(name.to_owned()))
    }
}

/// Older node plugins are written in Go, which renders an empty list as `null`.
fn null_as_empty<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_names_are_one_plain_path_component() {
        check("0a1b2c", Ok(()));
        check("mp-1.x_Y", Ok(()));
        check("...", Ok(()));
        check("", Err("source name \"\" must be 1 to 255 characters long"));
        check(".", Err("source name \".\" must not be a relative path"));
        check("..", Err("source name \"..\" must not be a relative path"));
        let problem = "may only contain letters, digits, dots, underscores and hyphens";
        check("a/b", Err(&format!("source name \"a/b\" {problem}")));
        check("a\0b", Err(&format!("source name \"a\\0b\" {problem}")));
        check("ä", Err(&format!("source name \"ä\" {problem}")));
    }

    #[track_caller]
    fn check(name: &str, expected: Result<(), &str>) {
        let result = name.parse::<SourceName>().map(|it| assert_eq!(it.as_str(), name));
        assert_eq!(result.map_err(|it| it.to_string()), expected.map_err(str::to_owned));
    }

    #[test]
    fn requests_of_older_node_plugins_are_accepted() {
        let expected = MountRequest { bucket_name: "b".into(), ..MountRequest::default() };
        check_wire(r#"{"bucketName":"b","args":null,"env":null}"#, &expected);
        check_wire(r#"{"bucketName":"b","unknown":{"x":[1]}}"#, &expected);
        check_wire(
            r#"{"bucketName":"b","args":["--x"],"env":[]}"#,
            &MountRequest { args: vec!["--x".into()], ..expected },
        );
    }

    #[test]
    fn names_of_sources_have_at_most_255_characters() {
        assert!("s".repeat(MAX_NAME_BYTES).parse::<SourceName>().is_ok());
        assert!("s".repeat(MAX_NAME_BYTES + 1).parse::<SourceName>().is_err());
    }

    #[track_caller]
    fn check_wire(wire: &str, expected: &MountRequest) {
        assert_eq!(&serde_json::from_str::<MountRequest>(wire).unwrap(), expected);
    }

    #[test]
    fn the_wire_form_is_that_of_older_mounters() {
        let request = MountRequest {
            bucket_name: "b".into(),
            args: vec!["--allow-root".into(), "--prefix=a b/".into()],
            env: vec!["AWS_REGION=x".into()],
            ..MountRequest::default()
        };
        let wire = r#"{"bucketName":"b","args":["--allow-root","--prefix=a b/"],"env":["AWS_REGION=x"]}"#;
        assert_eq!(serde_json::to_string(&request).unwrap(), wire);
    }

    #[test]
    fn values_of_the_environment_are_never_printed() {
        let env = vec!["AWS_SECRET_ACCESS_KEY=hunter2=".to_owned(), "hunter2".to_owned()];
        let printed = format!("{:?}", MountRequest { env, ..MountRequest::default() });
        assert!(printed.contains("AWS_SECRET_ACCESS_KEY"), "{printed}");
        assert!(!printed.contains("hunter2"), "{printed}");
    }
}
