//! The ARN of a role that a security token service grants.

use std::fmt;
use std::str::FromStr;

/// The limit of AWS.
const LONGEST_BYTES: usize = 2048;

/// `arn:<partition>:<service>:<region>:<account>:<resource>`.
const PARTS: usize = 6;

/// A role as a request names it. Whether it exists and who may have it, the security token service decides.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RoleArn(String);

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("role {text:?} must look like arn:aws:iam::123456789012:role/name")]
pub struct InvalidRoleArn {
    text: String,
}

impl RoleArn {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for RoleArn {
    type Err = InvalidRoleArn;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_printable = text.len() <= LONGEST_BYTES && text.chars().all(|it| it.is_ascii_graphic());
        let mut parts = text.splitn(PARTS, ':');
        let is_arn = parts.next() == Some("arn") && parts.nth(PARTS - 2).is_some_and(|it| !it.is_empty());
        if is_printable && is_arn { Ok(Self(text.to_owned())) } else { Err(InvalidRoleArn { text: text.to_owned() }) }
    }
}

impl fmt::Display for RoleArn {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_of_several_stores() {
        for text in [
            "arn:aws:iam::123456789012:role/team/a",
            "arn:minio:iam:::role/idp-x",
            "arn:scality:utapi:::role:with:colons",
        ] {
            assert_eq!(text.parse::<RoleArn>().unwrap().as_str(), text);
        }
        for text in
            ["", "role", "arn:aws:iam::1", "arn:aws:iam::1:", "urn:aws:iam::1:role/a", "arn:aws:iam::1:role/a b"]
        {
            let expected = format!("role {text:?} must look like arn:aws:iam::123456789012:role/name");
            assert_eq!(text.parse::<RoleArn>().unwrap_err().to_string(), expected);
        }
        assert!(format!("arn:aws:iam::1:{}", "r".repeat(LONGEST_BYTES)).parse::<RoleArn>().is_err());
    }
}
