//! Certificates of authorities that a volume's engine trusts in addition to the system's. Whether they verify anything is the engine's
//! business; here only their form is checked.

use std::fmt;
use std::str::FromStr;

use crate::names::hex_sha224;

/// One or more certificates in PEM, without any text around them. Holding some is the proof that they were checked.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CaCertificates(String);

/// Does not quote the text: it may contain a private key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be certificates in PEM (-----BEGIN CERTIFICATE-----): it {problem}")]
pub struct InvalidCaCertificates {
    pub problem: &'static str,
}

const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";

/// The bundle of a whole operating system has about 220 kB. The file lies in memory, together with the keys.
const LONGEST_BYTES: usize = 512 << 10;

impl CaCertificates {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Both, one after the other.
    #[must_use]
    pub fn and(&self, other: Option<&Self>) -> Self {
        Self(format!("{}{}", self.0, other.map_or("", Self::as_str)))
    }

    /// Stands for the content.
    pub fn fingerprint(&self) -> String {
        hex_sha224([&self.0])
    }
}

impl FromStr for CaCertificates {
    type Err = InvalidCaCertificates;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = |problem| InvalidCaCertificates { problem };
        if LONGEST_BYTES < text.len() {
            return Err(invalid("is longer than 512 KiB"));
        }
        if text.contains("PRIVATE KEY-----") {
            return Err(invalid("contains a private key; remove it"));
        }
        let mut certificates = String::new();
        let mut open: Option<usize> = None;
        for line in text.lines().map(str::trim) {
            match (line, open) {
                (BEGIN, None) => open = Some(0),
                (END, Some(1..)) => open = None,
                (_, None) => continue,
                (line, Some(lines)) if is_base64(line) => open = Some(lines + 1),
                (_, Some(_)) => return Err(invalid("has a certificate with a malformed line")),
            }
            certificates.push_str(line);
            certificates.push('\n');
        }
        if open.is_some() {
            return Err(invalid("has a certificate without an end"));
        }
        if certificates.is_empty() {
            return Err(invalid("has no certificate"));
        }
        Ok(Self(certificates))
    }
}

/// Short in logs: certificates are long, not secret.
impl fmt::Debug for CaCertificates {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "CaCertificates({} bytes)", self.0.len())
    }
}

fn is_base64(line: &str) -> bool {
    !line.is_empty() && line.bytes().all(|it| it.is_ascii_alphanumeric() || b"+/=".contains(&it))
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub const PEM: &str = "-----BEGIN CERTIFICATE-----\nMIIB+/a=\n-----END CERTIFICATE-----\n";

    #[track_caller]
    fn check(text: &str, expected: Result<&str, &str>) {
        let parsed = text.parse::<CaCertificates>();
        assert_eq!(parsed.as_ref().map(CaCertificates::as_str).map_err(|it| it.problem), expected);
    }

    #[test]
    fn certificates_are_kept_and_text_around_them_is_not() {
        check(PEM, Ok(PEM));
        check(&format!("# our CA\r\n  {}", PEM.replace('\n', "\r\n  ")), Ok(PEM));
        check(&format!("{PEM}subject=x\n{PEM}"), Ok(&format!("{PEM}{PEM}")));
    }

    #[test]
    fn other_text_is_refused() {
        check("", Err("has no certificate"));
        check("certificate", Err("has no certificate"));
        check("-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----", Err("has a certificate with a malformed line"));
        check("-----BEGIN CERTIFICATE-----\nMIIB", Err("has a certificate without an end"));
        check(
            "-----BEGIN CERTIFICATE-----\nM I\n-----END CERTIFICATE-----",
            Err("has a certificate with a malformed line"),
        );
        check(
            &format!("{PEM}-----BEGIN PRIVATE KEY-----\nMIIB\n-----END PRIVATE KEY-----"),
            Err("contains a private key; remove it"),
        );
        check(&PEM.repeat(10_000), Err("is longer than 512 KiB"));
    }

    #[test]
    fn certificates_are_joined_and_their_fingerprint_follows_the_content() {
        let one: CaCertificates = PEM.parse().unwrap();
        let two = one.and(Some(&one));
        assert_eq!(two.as_str(), format!("{PEM}{PEM}"));
        assert_eq!(one.and(None), one);
        assert_ne!(one.fingerprint(), two.fingerprint());
    }

    proptest! {
        #[test]
        fn what_was_parsed_is_parsed_as_the_same_again(text in "(-----(BEGIN|END) CERTIFICATE-----|[a-zA/+= \r]{0,5}|\n){0,12}") {
            if let Ok(parsed) = text.parse::<CaCertificates>() {
                prop_assert_eq!(parsed.as_str().parse::<CaCertificates>(), Ok(parsed));
            }
        }
    }
}
