//! What an engine's last words mean. Engines end with one sentence and exit code 1; the sentence is for people, this turns
//! it into a kind that a caller can act on.

/// Why an engine could not start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The key does not exist, or its secret is wrong.
    UnknownKey,
    NoCredentials,
    /// The key is right, but may not do this.
    Forbidden,
    NoSuchBucket,
    Unreachable,
    Certificate,
    BadArguments,
    Other,
}

/// Fragments in lower case, the more telling ones first.
const FRAGMENTS: [(&str, Cause); 22] = [
    ("signaturedoesnotmatch", Cause::UnknownKey),
    ("request signature", Cause::UnknownKey),
    ("invalidaccesskeyid", Cause::UnknownKey),
    ("access key id", Cause::UnknownKey),
    ("no signing credentials", Cause::NoCredentials),
    ("no credentials", Cause::NoCredentials),
    ("nosuchbucket", Cause::NoSuchBucket),
    ("bucket does not exist", Cause::NoSuchBucket),
    ("certificate", Cause::Certificate),
    ("tls_error", Cause::Certificate),
    ("accessdenied", Cause::Forbidden),
    ("access denied", Cause::Forbidden),
    ("forbidden", Cause::Forbidden),
    ("unreachable", Cause::Unreachable),
    ("cannot be reached", Cause::Unreachable),
    ("connection refused", Cause::Unreachable),
    ("did not answer", Cause::Unreachable),
    ("dns", Cause::Unreachable),
    ("socket", Cause::Unreachable),
    ("unexpected argument", Cause::BadArguments),
    ("invalid value", Cause::BadArguments),
    ("cannot be used with", Cause::BadArguments),
];

pub fn cause(words: &str) -> Cause {
    let words = words.to_lowercase();
    FRAGMENTS.iter().find(|(fragment, _)| words.contains(fragment)).map_or(Cause::Other, |(_, cause)| *cause)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_have_a_cause() {
        check("Forbidden: The request signature we calculated does not match", Cause::UnknownKey);
        check("Client error: Forbidden: Access Denied.", Cause::Forbidden);
        check("The bucket does not exist", Cause::NoSuchBucket);
        check("No signing credentials available", Cause::NoCredentials);
        check("something else entirely", Cause::Other);
        check("", Cause::Other);
    }

    fn check(words: &str, expected: Cause) {
        assert_eq!(cause(words), expected, "{words}");
    }
}
