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
const FRAGMENTS: [(&str, Cause); 23] = [
    ("signaturedoesnotmatch", Cause::UnknownKey),
    ("request signature", Cause::UnknownKey),
    ("invalidaccesskeyid", Cause::UnknownKey),
    ("access key id", Cause::UnknownKey),
    ("does not know the access key", Cause::UnknownKey),
    ("no signing credentials", Cause::NoCredentials),
    ("no credentials", Cause::NoCredentials),
    ("nosuchbucket", Cause::NoSuchBucket),
    ("bucket does not exist", Cause::NoSuchBucket),
    ("accessdenied", Cause::Forbidden),
    ("access denied", Cause::Forbidden),
    ("no permission", Cause::Forbidden),
    ("forbidden", Cause::Forbidden),
    ("certificate", Cause::Certificate),
    ("tls_error", Cause::Certificate),
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
    let words = without_names(words).to_lowercase();
    FRAGMENTS.iter().find(|(fragment, _)| words.contains(fragment)).map_or(Cause::Other, |(_, cause)| *cause)
}

/// The words without quoted text and addresses: users choose these, and a bucket may be called "access-denied".
fn without_names(words: &str) -> String {
    let unquoted: String = words.split('"').step_by(2).collect();
    unquoted.split_whitespace().filter(|it| !it.contains("://")).collect::<Vec<_>>().join(" ")
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
        check(
            "cannot mount bucket \"b\": bucket \"b\" does not exist at http://s3:1; check its name",
            Cause::NoSuchBucket,
        );
        check("http://s3:1 does not know the access key (NotSignedUp); check the profile", Cause::UnknownKey);
        check("the credentials have no permission to list bucket \"b\" at http://s3:1 (403)", Cause::Forbidden);
        check("http://s3:1 cannot be reached (socket is closed); check the network", Cause::Unreachable);
        check("http://s3:1 did not answer within 25 seconds", Cause::Unreachable);
        check("the certificate of https://s3:1 is not trusted (TLS)", Cause::Certificate);
        check("", Cause::Other);
    }

    #[test]
    fn names_that_users_choose_say_nothing_about_the_cause() {
        check("bucket \"dns-certificate\" does not exist at http://forbidden.example", Cause::NoSuchBucket);
        check("no permission to list \"no-credentials\" at https://certificate.example (403)", Cause::Forbidden);
        check("cannot mount bucket \"access-denied\": something else", Cause::Other);
    }

    #[track_caller]
    fn check(words: &str, expected: Cause) {
        assert_eq!(cause(words), expected, "{words}");
    }
}
