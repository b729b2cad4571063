//! Keeps session tokens out of the log: with `--debug-crt` the S3 client library prints whole requests, headers included.

use std::borrow::Cow;

/// The header, and the parameter of a signed URL, that carries a session token. In lower case.
const TOKEN_NAME: &str = "x-amz-security-token";

/// What the log shows in place of a token.
const REDACTED: &str = "<secret>";

/// The message without the values of session tokens.
pub fn redacted(message: &str) -> Cow<'_, str> {
    // ASCII only, so that offsets are the same in both.
    let lower = message.to_ascii_lowercase();
    if !lower.contains(TOKEN_NAME) {
        return Cow::Borrowed(message);
    }
    let mut clean = String::with_capacity(message.len());
    let mut rest = 0;
    for (at, name) in lower.match_indices(TOKEN_NAME) {
        let after = at + name.len();
        let value = after + message[after..].bytes().take_while(|it| b":=\"' ".contains(it)).count();
        let length =
            message[value..].bytes().take_while(|it| !b"&,;\"'".contains(it) && !it.is_ascii_whitespace()).count();
        // In a list of header names there is no value.
        let is_named = message[after..value].contains([':', '=', '"']);
        if at < rest || !is_named || length == 0 {
            continue;
        }
        clean.push_str(&message[rest..value]);
        clean.push_str(REDACTED);
        rest = value + length;
    }
    clean.push_str(&message[rest..]);
    Cow::Owned(clean)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn check(message: &str, expected: &str) {
        assert_eq!(redacted(message), expected);
    }

    #[test]
    fn a_session_token_is_never_logged() {
        check(
            "canonical request:\nhost:s3\nx-amz-security-token:AQoDYXdz//+=\nx-amz-date:2026",
            "canonical request:\nhost:s3\nx-amz-security-token:<secret>\nx-amz-date:2026",
        );
        check("X-Amz-Security-Token: abc", "X-Amz-Security-Token: <secret>");
        check("GET /?X-Amz-Security-Token=a%2Fb&X-Amz-Date=1", "GET /?X-Amz-Security-Token=<secret>&X-Amz-Date=1");
        check("{\"x-amz-security-token\": \"abc\"}", "{\"x-amz-security-token\": \"<secret>\"}");
    }

    #[test]
    fn everything_else_is_logged_as_it_is() {
        let list = "SignedHeaders=host;x-amz-date;x-amz-security-token, Signature=1";
        let names = "x-amz-date x-amz-security-token host";
        for message in ["", "ünïcødé", list, names, "x-amz-security-token\ne3b0c442", "x-amz-security-token:\nhost:s3"]
        {
            check(message, message);
        }
    }

    proptest! {
        #[test]
        fn no_message_makes_it_panic_or_shows_a_token(before in ".{0,40}", token in "[A-Za-z0-9/+=%]{8,40}", after in ".{0,40}") {
            let message = format!("{before}\nx-amz-security-token:{token}\n{after}");
            prop_assume!(!before.contains(&token) && !after.contains(&token));
            let value = format!("security-token:{token}");
            let clean = redacted(&message);
            prop_assert!(!clean.contains(&value), "{}", clean);
        }
    }
}
