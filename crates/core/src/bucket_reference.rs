//! What a volume may name as its bucket: a bucket (also a directory bucket), the alias of an access point, which looks like a bucket's
//! name, or the ARN of an access point. Whether the store knows it is the store's business.

use std::fmt;
use std::str::FromStr;

use crate::bucket::{BucketName, InvalidBucketName};

/// The name of a bucket, or the ARN of an access point. Holding one is the proof that it was checked.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BucketReference(Reference);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Reference {
    Name(BucketName),
    AccessPoint(String),
}

const ARN: &str = "arn:";

/// The services of S3 that have access points.
const SERVICES: [&str; 4] = ["s3", "s3-object-lambda", "s3-outposts", "s3express"];

/// AWS's longest are below 200.
const LONGEST_ARN: usize = 512;

const NOT_AN_ACCESS_POINT: &str =
    "is not the ARN of an access point, such as arn:aws:s3:eu-west-1:123456789012:accesspoint/name";

impl BucketReference {
    pub fn as_str(&self) -> &str {
        match &self.0 {
            Reference::Name(name) => name.as_str(),
            Reference::AccessPoint(arn) => arn,
        }
    }

    /// Requests can only name an access point in the host, never in the path.
    pub const fn is_arn(&self) -> bool {
        matches!(self.0, Reference::AccessPoint(_))
    }
}

impl FromStr for BucketReference {
    type Err = InvalidBucketName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if !text.starts_with(ARN) {
            return text.parse().map(|it| Self(Reference::Name(it)));
        }
        let invalid = |problem| InvalidBucketName { name: text.to_owned(), problem };
        if LONGEST_ARN < text.len() {
            return Err(invalid("is longer than 512 characters"));
        }
        let fields: Vec<&str> = text.splitn(6, ':').collect();
        let &[_, partition, service, region, account, resource] = fields.as_slice() else {
            return Err(invalid(NOT_AN_ACCESS_POINT));
        };
        if service == "s3" && account.is_empty() && !resource.contains(['/', ':']) {
            return Err(invalid("is the ARN of a bucket; use the bucket's name"));
        }
        let is_plain = |it: &str| it.chars().all(|it| it.is_ascii_alphanumeric() || it == '-');
        let is_account = !account.is_empty() && account.bytes().all(|it| it.is_ascii_digit());
        let is_fine = !partition.is_empty() && is_plain(partition) && is_plain(region) && is_account;
        if is_fine && SERVICES.contains(&service) && is_access_point(resource) {
            Ok(Self(Reference::AccessPoint(text.to_owned())))
        } else {
            Err(invalid(NOT_AN_ACCESS_POINT))
        }
    }
}

impl AsRef<str> for BucketReference {
    fn as_ref(&self) -> &str {
        self.as_str()
    }
}

impl fmt::Display for BucketReference {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

/// `accesspoint/name` or `outpost/id/accesspoint/name`; AWS also writes colons for the slashes.
fn is_access_point(resource: &str) -> bool {
    let parts: Vec<&str> = resource.split(['/', ':']).collect();
    let is_name = |it: &&str| {
        !it.is_empty()
            && it.starts_with(|it: char| it.is_ascii_alphanumeric())
            && it.chars().all(|it| it.is_ascii_alphanumeric() || "-._".contains(it))
    };
    let is_shape = matches!(parts.as_slice(), ["accesspoint", _] | ["outpost", _, "accesspoint", _]);
    is_shape && parts.iter().all(is_name)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn check(text: &str, expected: Result<bool, &str>) {
        let parsed = text.parse::<BucketReference>();
        if let Ok(reference) = &parsed {
            assert_eq!(reference.as_str(), text);
        }
        assert_eq!(parsed.as_ref().map(BucketReference::is_arn).map_err(|it| it.problem), expected, "{text}");
    }

    #[test]
    fn buckets_and_aliases_are_names() {
        for name in [
            "logs",
            "my-bucket--usw2-az1--x-s3",
            "my-point-hrzrlukc5m36ft7okagglf3gmwluquse1b-s3alias",
            "my-point-bucket-a1b2c3d4--ol-s3",
            "my-point--usw2-az1--xa-s3",
        ] {
            check(name, Ok(false));
        }
        check("Logs", Err("may only contain lower-case letters, digits, dots and hyphens"));
    }

    #[test]
    fn access_points_have_arns() {
        for arn in [
            "arn:aws:s3:eu-west-1:123456789012:accesspoint/my-point",
            "arn:aws:s3:eu-west-1:123456789012:accesspoint:my-point",
            "arn:aws:s3::123456789012:accesspoint/mfzwi23gnjvgw.mrap",
            "arn:aws-cn:s3:cn-north-1:555555555555:accesspoint/point",
            "arn:aws-us-gov:s3-object-lambda:us-gov-west-1:555555555555:accesspoint/point",
            "arn:aws:s3-outposts:us-east-1:555555555555:outpost/op-01ac5d28a6a232904/accesspoint/point",
            "arn:aws:s3express:us-west-2:555555555555:accesspoint/point--usw2-az1--xa-s3",
        ] {
            check(arn, Ok(true));
        }
    }

    #[test]
    fn other_arns_are_refused_with_an_example() {
        check("arn:aws:s3:::my-bucket", Err("is the ARN of a bucket; use the bucket's name"));
        check(&format!("arn:aws:s3:a:1:accesspoint/{}", "x".repeat(512)), Err("is longer than 512 characters"));
        for wrong in [
            "arn:",
            "arn:aws:s3",
            "arn:aws:iam::123456789012:role/name",
            "arn:aws:s3:eu-west-1:account:accesspoint/name",
            "arn:aws:s3:eu-west-1::accesspoint/name",
            "arn:aws:s3:eu-west-1:123456789012:accesspoint/",
            "arn:aws:s3:eu-west-1:123456789012:accesspoint/a/b",
            "arn:aws:s3:eu-west-1:123456789012:accesspoint/-o",
            "arn:aws:s3:eu west:123456789012:accesspoint/name",
            "arn:aws:s3:eu-west-1:123456789012:accesspoint/na me",
            "arn::s3:eu-west-1:123456789012:accesspoint/name",
        ] {
            check(wrong, Err(NOT_AN_ACCESS_POINT));
        }
    }

    proptest! {
        #[test]
        fn no_reference_has_spaces_or_looks_like_an_option(text in "(arn:|-)?[a-z0-9:/ \n.-]{0,60}") {
            if let Ok(reference) = text.parse::<BucketReference>() {
                let text = reference.as_str();
                prop_assert!(!text.starts_with('-') && !text.contains(|it: char| it.is_whitespace() || it.is_control()));
            }
        }
    }
}
