//! Bucket names. Whether the bucket exists is the store's business.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

/// A bucket name S3 would accept. Holding one is the proof that it was checked.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BucketName(String);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("bucket name {name:?} {problem}")]
pub struct InvalidBucketName {
    pub name: String,
    pub problem: &'static str,
}

impl BucketName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for BucketName {
    type Err = InvalidBucketName;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let invalid = |problem| InvalidBucketName { name: name.to_owned(), problem };
        let is_letter_or_digit = |it: char| it.is_ascii_lowercase() || it.is_ascii_digit();
        if name.len() < 3 || 63 < name.len() {
            return Err(invalid("must be 3 to 63 characters long"));
        }
        if !name.chars().all(|it| is_letter_or_digit(it) || it == '.' || it == '-') {
            return Err(invalid("may only contain lower-case letters, digits, dots and hyphens"));
        }
        if !name.starts_with(is_letter_or_digit) || !name.ends_with(is_letter_or_digit) {
            return Err(invalid("must begin and end with a letter or a digit"));
        }
        if name.contains("..") {
            return Err(invalid("must not contain two dots in a row"));
        }
        if name.parse::<Ipv4Addr>().is_ok() {
            return Err(invalid("must not look like an IP address"));
        }
        Ok(Self(name.to_owned()))
    }
}

impl AsRef<str> for BucketName {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for BucketName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(name: &str, expected: Result<(), &str>) {
        match name.parse::<BucketName>() {
            Ok(bucket) => {
                assert_eq!(bucket.as_str(), name);
                assert_eq!(expected, Ok(()));
            }
            Err(error) => assert_eq!(expected, Err(error.to_string().as_str())),
        }
    }

    #[test]
    fn bucket_names() {
        check("logs.example-1", Ok(()));
        check("csi-s3-6b8f2f0e-6f0f-4f3c-8a51-0a4d8a0f3f3b", Ok(()));
        check("ab", Err("bucket name \"ab\" must be 3 to 63 characters long"));
        check("", Err("bucket name \"\" must be 3 to 63 characters long"));
        check("Logs", Err("bucket name \"Logs\" may only contain lower-case letters, digits, dots and hyphens"));
        check("a/b/c", Err("bucket name \"a/b/c\" may only contain lower-case letters, digits, dots and hyphens"));
        check("--read-only", Err("bucket name \"--read-only\" must begin and end with a letter or a digit"));
        check("logs-", Err("bucket name \"logs-\" must begin and end with a letter or a digit"));
        check("a..b", Err("bucket name \"a..b\" must not contain two dots in a row"));
        check("10.0.0.1", Err("bucket name \"10.0.0.1\" must not look like an IP address"));
    }

    #[test]
    fn the_longest_name_has_63_characters() {
        check(&"a".repeat(63), Ok(()));
        assert!("a".repeat(64).parse::<BucketName>().is_err());
    }
}
