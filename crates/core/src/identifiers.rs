//! Names that others chose for us: the volume's handle, the PV's name, the workload's UID.
//! They are kept apart by type, because all three are strings that travel together.

use std::fmt;
use std::str::FromStr;

/// The volume handle of a PV (`volume_id` of CSI). Any text that is not empty.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeId(String);

/// The name of a PV as kubelet writes it into a path (`/` appears as `~`). One plain path component.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PvName(String);

/// The UID of a workload Pod. One plain path component.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkloadUid(String);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind} {text:?} {problem}")]
pub struct InvalidIdentifier {
    pub kind: &'static str,
    pub text: String,
    pub problem: &'static str,
}

impl FromStr for VolumeId {
    type Err = InvalidIdentifier;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.is_empty() {
            return Err(InvalidIdentifier { kind: "volume ID", text: String::new(), problem: "must not be empty" });
        }
        Ok(Self(text.to_owned()))
    }
}

impl FromStr for PvName {
    type Err = InvalidIdentifier;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        path_component("PV name", text).map(Self)
    }
}

impl PvName {
    /// A text of letters, digits and hyphens.
    pub(crate) const fn from_digest(text: String) -> Self {
        Self(text)
    }
}

impl FromStr for WorkloadUid {
    type Err = InvalidIdentifier;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        path_component("workload UID", text).map(Self)
    }
}

macro_rules! reads_as_text {
    ($($name:ident),*) => {$(
        impl $name {
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str(&self.0)
            }
        }
    )*};
}

reads_as_text!(VolumeId, PvName, WorkloadUid);

fn path_component(kind: &'static str, text: &str) -> Result<String, InvalidIdentifier> {
    let problem = match text {
        "" => "must not be empty",
        "." | ".." => "must not be a relative path",
        _ if text.contains('/') => "must not contain a slash",
        _ if text.chars().any(char::is_control) => "must not contain control characters",
        _ => return Ok(text.to_owned()),
    };
    Err(InvalidIdentifier { kind, text: text.to_owned(), problem })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check<T: FromStr<Err = InvalidIdentifier> + AsRef<str>>(text: &str, expected: Result<(), &str>) {
        match text.parse::<T>() {
            Ok(identifier) => {
                assert_eq!(identifier.as_ref(), text);
                assert_eq!(expected, Ok(()));
            }
            Err(error) => assert_eq!(expected, Err(error.to_string().as_str())),
        }
    }

    #[test]
    fn volume_ids_may_be_any_text() {
        check::<VolumeId>("a/b ü", Ok(()));
        check::<VolumeId>("", Err("volume ID \"\" must not be empty"));
    }

    #[test]
    fn pv_names_and_uids_are_one_path_component() {
        check::<PvName>("s3-csi~driver", Ok(()));
        check::<PvName>("a/b", Err("PV name \"a/b\" must not contain a slash"));
        check::<WorkloadUid>("a4509011-bd2a-4f37-b1b0-05d715087852", Ok(()));
        check::<WorkloadUid>("", Err("workload UID \"\" must not be empty"));
        check::<WorkloadUid>("..", Err("workload UID \"..\" must not be a relative path"));
        check::<WorkloadUid>("a\nb", Err("workload UID \"a\\nb\" must not contain control characters"));
    }
}
