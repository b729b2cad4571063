//! Why an engine failed. Our engine names the reason by a code; the message of any other engine is searched for known phrases.

use std::str::FromStr;

/// The reason why an engine could not start, as callers act on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureCode {
    /// The access key does not exist, its secret is wrong, or its session has expired.
    UnknownKey,
    NoCredentials,
    /// The key is valid, but has no permission.
    Forbidden,
    NoSuchBucket,
    Unreachable,
    Certificate,
    /// What answers is no S3 server, or none that we understand.
    InvalidResponse,
    BadArguments,
    Other,
}

/// Of a later version.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown failure code {code:?}")]
pub struct UnknownFailureCode {
    code: String,
}

/// As they are written on the wire.
const CODES: [(FailureCode, &str); 9] = [
    (FailureCode::UnknownKey, "unknown-key"),
    (FailureCode::NoCredentials, "no-credentials"),
    (FailureCode::Forbidden, "forbidden"),
    (FailureCode::NoSuchBucket, "no-such-bucket"),
    (FailureCode::Unreachable, "unreachable"),
    (FailureCode::Certificate, "certificate"),
    (FailureCode::InvalidResponse, "invalid-response"),
    (FailureCode::BadArguments, "bad-arguments"),
    (FailureCode::Other, "other"),
];

/// In lower case, the more specific ones first.
const PHRASES: [(&str, FailureCode); 26] = [
    ("signaturedoesnotmatch", FailureCode::UnknownKey),
    ("request signature", FailureCode::UnknownKey),
    ("invalidaccesskeyid", FailureCode::UnknownKey),
    ("access key id", FailureCode::UnknownKey),
    ("does not know the access key", FailureCode::UnknownKey),
    ("session token", FailureCode::UnknownKey),
    ("provided token", FailureCode::UnknownKey),
    ("no signing credentials", FailureCode::NoCredentials),
    ("no credentials", FailureCode::NoCredentials),
    ("nosuchbucket", FailureCode::NoSuchBucket),
    ("bucket does not exist", FailureCode::NoSuchBucket),
    ("accessdenied", FailureCode::Forbidden),
    ("access denied", FailureCode::Forbidden),
    ("no permission", FailureCode::Forbidden),
    ("forbidden", FailureCode::Forbidden),
    ("certificate", FailureCode::Certificate),
    ("tls_error", FailureCode::Certificate),
    ("cannot be reached", FailureCode::Unreachable),
    ("connection refused", FailureCode::Unreachable),
    ("did not answer", FailureCode::Unreachable),
    ("dns", FailureCode::Unreachable),
    ("socket", FailureCode::Unreachable),
    ("no s3 listing", FailureCode::InvalidResponse),
    ("unexpected argument", FailureCode::BadArguments),
    ("invalid value", FailureCode::BadArguments),
    ("cannot be used with", FailureCode::BadArguments),
];

impl FailureCode {
    /// The code of an engine that only says it in prose.
    pub fn of_message(message: &str) -> Self {
        let message = without_names(message).to_lowercase();
        PHRASES.iter().find(|(phrase, _)| message.contains(phrase)).map_or(Self::Other, |(_, code)| *code)
    }

    pub fn as_str(self) -> &'static str {
        CODES.iter().find(|(code, _)| *code == self).map_or("other", |(_, text)| text)
    }
}

impl FromStr for FailureCode {
    type Err = UnknownFailureCode;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = CODES.iter().find(|(_, it)| *it == text).map(|(code, _)| *code);
        found.ok_or_else(|| UnknownFailureCode { code: text.to_owned() })
    }
}

/// The message without quoted text and addresses: users choose these, and a bucket may be called "access-denied".
fn without_names(message: &str) -> String {
    let unquoted: String = message.split('"').step_by(2).collect();
    unquoted.split_whitespace().filter(|it| !it.contains("://")).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_a_code() {
        check("Forbidden: The request signature we calculated does not match", FailureCode::UnknownKey);
        check("Client error: Forbidden: Access Denied.", FailureCode::Forbidden);
        check("Client error: Forbidden: The provided token has expired.", FailureCode::UnknownKey);
        check("The bucket does not exist", FailureCode::NoSuchBucket);
        check("No signing credentials available", FailureCode::NoCredentials);
        check("something else entirely", FailureCode::Other);
        check(
            "cannot mount bucket \"b\": bucket \"b\" does not exist at http://s3:1; check its name",
            FailureCode::NoSuchBucket,
        );
        check("http://s3:1 does not know the access key (NotSignedUp); check the profile", FailureCode::UnknownKey);
        check("http://s3:1 does not accept the session token (ExpiredToken); renew", FailureCode::UnknownKey);
        check("the credentials have no permission to list bucket \"b\" at http://s3:1 (403)", FailureCode::Forbidden);
        check("http://s3:1 cannot be reached (socket is closed); check the network", FailureCode::Unreachable);
        check("http://s3:1 did not answer within 25 seconds", FailureCode::Unreachable);
        check("the certificate of https://s3:1 is not trusted (TLS)", FailureCode::Certificate);
        check(
            "http://s3:1 answered with something that is no S3 listing of bucket \"b\"",
            FailureCode::InvalidResponse,
        );
        check("", FailureCode::Other);
    }

    #[test]
    fn names_that_users_choose_do_not_change_the_code() {
        check("bucket \"dns-certificate\" does not exist at http://forbidden.example", FailureCode::NoSuchBucket);
        check("no permission to list \"no-credentials\" at https://certificate.example (403)", FailureCode::Forbidden);
        check("cannot mount bucket \"access-denied\": something else", FailureCode::Other);
    }

    #[track_caller]
    fn check(message: &str, expected: FailureCode) {
        assert_eq!(FailureCode::of_message(message), expected, "{message}");
    }

    #[test]
    fn codes_are_read_as_they_are_written() {
        for (code, text) in CODES {
            assert_eq!((code.as_str(), text.parse()), (text, Ok(code)));
        }
        assert_eq!("later".parse::<FailureCode>().unwrap_err().to_string(), "unknown failure code \"later\"");
    }
}
