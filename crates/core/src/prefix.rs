//! The part of a bucket that a volume shows: everything whose key begins with one prefix.

use std::fmt;
use std::str::FromStr;

/// `team/claim/`: never empty, ends with a slash, and no component of it is empty or a relative path.
/// Holding one is the proof that it was checked.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Prefix(String);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("prefix {text:?} {problem}")]
pub struct InvalidPrefix {
    pub text: String,
    pub problem: &'static str,
}

/// A key has at most 1024 bytes; half of them are left for the names of files.
const LONGEST_BYTES: usize = 512;

/// Where the driver stores metadata of provisioned volumes. No volume may expose it.
pub const RESERVED: &str = ".s3csi/";

impl Prefix {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The prefixes that this one lies in, outermost first, itself excluded.
    pub fn ancestors(&self) -> impl Iterator<Item = Self> {
        let inner = &self.0[..self.0.len() - 1];
        inner.match_indices('/').map(|(at, _)| Self(inner[..=at].to_owned()))
    }
}

impl FromStr for Prefix {
    type Err = InvalidPrefix;

    /// The slash at the end may be left out.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = |problem| InvalidPrefix { text: text.to_owned(), problem };
        let inner = text.strip_suffix('/').unwrap_or(text);
        if inner.is_empty() {
            return Err(invalid("must not be empty"));
        }
        if LONGEST_BYTES <= inner.len() {
            return Err(invalid("must be shorter than 512 bytes"));
        }
        if inner.chars().any(char::is_control) {
            return Err(invalid("must not contain control characters"));
        }
        if inner.split('/').any(|it| matches!(it, "" | "." | "..")) {
            return Err(invalid("must not begin with a slash, have two slashes in a row or contain \".\" or \"..\""));
        }
        let prefix = format!("{inner}/");
        if is_reserved(&prefix) {
            return Err(invalid("is reserved for the driver's metadata"));
        }
        Ok(Self(prefix))
    }
}

/// Whether a mount with this prefix would show the driver's metadata, whether or not it is a valid [`Prefix`].
pub fn is_reserved(prefix: &str) -> bool {
    prefix.starts_with(RESERVED.trim_end_matches('/'))
        && matches!(prefix.as_bytes().get(RESERVED.len() - 1), None | Some(b'/'))
}

impl AsRef<str> for Prefix {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn check(text: &str, expected: Result<&str, &str>) {
        let parsed = text.parse::<Prefix>().map(|it| it.to_string()).map_err(|it| it.to_string());
        assert_eq!(parsed, expected.map(str::to_owned).map_err(|problem| format!("prefix {text:?} {problem}")));
    }

    #[test]
    fn prefixes() {
        check("a", Ok("a/"));
        check("team/claim/", Ok("team/claim/"));
        check("ä b/=c", Ok("ä b/=c/"));
        check("", Err("must not be empty"));
        check("/", Err("must not be empty"));
        let shape = "must not begin with a slash, have two slashes in a row or contain \".\" or \"..\"";
        for text in ["/a", "a//b", "a//", "a/../b", "./a", ".."] {
            check(text, Err(shape));
        }
        check("a\nb", Err("must not contain control characters"));
        check(".s3csi", Err("is reserved for the driver's metadata"));
        check(".s3csi/x", Err("is reserved for the driver's metadata"));
        check(&"a".repeat(511), Ok(&format!("{}/", "a".repeat(511))));
        check(&"a".repeat(512), Err("must be shorter than 512 bytes"));
    }

    #[test]
    fn ancestors_are_the_prefixes_around() {
        let ancestors = |text: &str| text.parse::<Prefix>().unwrap().ancestors().map(|it| it.0).collect::<Vec<_>>();
        assert_eq!(ancestors("a"), Vec::<String>::new());
        assert_eq!(ancestors("a/b/c"), ["a/", "a/b/"]);
    }

    #[test]
    fn the_driver_s_metadata_are_reserved() {
        for reserved in [".s3csi", ".s3csi/", ".s3csi/volumes/", ".s3csi//"] {
            assert!(is_reserved(reserved), "{reserved}");
        }
        for free in ["", "a/.s3csi/", ".s3csi2/", ".s3cs", "/.s3csi/"] {
            assert!(!is_reserved(free), "{free}");
        }
    }

    proptest! {
        #[test]
        fn a_prefix_is_read_as_it_is_written(text in prop_oneof![any::<String>(), "[./ab:3csi]{0,12}"]) {
            if let Ok(prefix) = text.parse::<Prefix>() {
                prop_assert_eq!(prefix.as_str().parse::<Prefix>(), Ok(prefix.clone()));
                prop_assert!(!prefix.as_str().starts_with(RESERVED) && prefix.as_str().ends_with('/'));
                for ancestor in prefix.ancestors() {
                    prop_assert!(prefix.as_str().starts_with(ancestor.as_str()) && ancestor != prefix);
                    prop_assert_eq!(ancestor.as_str().parse::<Prefix>(), Ok(ancestor.clone()));
                }
            }
        }
    }
}
