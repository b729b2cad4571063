//! Keys for S3: when they are usable, and how they are written for the engine. Where the files go is not decided here.

use std::collections::BTreeMap;

use crate::ca_certificates::CaCertificates;
use crate::secret::Secret;

/// Name of the only profile an engine has. It is the same for every source, so that rewritten files reach it.
pub const PROFILE: &str = "s3-csi";

/// Keys of a Kubernetes Secret (`nodePublishSecretRef`).
pub const ACCESS_KEY_ID: &str = "access_key_id";
pub const SECRET_ACCESS_KEY: &str = "secret_access_key";
pub const SESSION_TOKEN: &str = "session_token";

/// Longest access key ID and secret key. AWS's have at most 128 characters; other stores let administrators choose longer ones.
const LONGEST_KEY_BYTES: usize = 1024;

/// Longest session token we take: AWS documents no limit and recommends to allow for 4096 bytes.
const LONGEST_TOKEN_BYTES: usize = 4096;

/// A usable pair of keys. Holding one is the proof that it fits into a profile file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys {
    access_key_id: Secret<String>,
    secret_access_key: Secret<String>,
    session_token: Option<Secret<String>>,
    /// Of the store that the keys are for, in addition to those that are trusted anyway.
    ca_certificates: Option<CaCertificates>,
}

/// The files of the profile [`PROFILE`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProfileFiles {
    pub config: String,
    pub credentials: Secret<String>,
    pub ca_certificates: Option<CaCertificates>,
}

/// Names what is wrong, never a value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidKeys {
    #[error("the Secret lacks {}", names.join(", "))]
    Missing { names: Vec<&'static str> },

    #[error("the Secret has a malformed value for {}; it must be the plain key: printable ASCII without spaces", names.join(", "))]
    Malformed { names: Vec<&'static str> },

    #[error("invalid credentials: {} empty or not printable (a trailing line break, perhaps)", are(names))]
    NotPrintable { names: Vec<&'static str> },
}

impl Keys {
    /// Keys from a Kubernetes Secret. Values may have white space around them, which editors like to leave there.
    ///
    /// Stores let administrators choose keys, so any printable character is taken. A space is not: in a profile, a `#` after one begins
    /// a comment.
    pub fn from_secret(secret: &BTreeMap<String, Secret<String>>) -> Result<Self, InvalidKeys> {
        let value = |key: &str| secret.get(key).map(|it| it.expose().trim());
        let missing: Vec<_> =
            [ACCESS_KEY_ID, SECRET_ACCESS_KEY].into_iter().filter(|it| value(it).is_none_or(str::is_empty)).collect();
        let (Some(access_key_id), Some(secret_access_key), []) =
            (value(ACCESS_KEY_ID), value(SECRET_ACCESS_KEY), missing.as_slice())
        else {
            return Err(InvalidKeys::Missing { names: missing });
        };
        let session_token = value(SESSION_TOKEN).filter(|it| !it.is_empty());

        let is_id = is_plain(access_key_id, LONGEST_KEY_BYTES);
        let is_secret = is_plain(secret_access_key, LONGEST_KEY_BYTES);
        let is_token = session_token.is_none_or(|it| is_plain(it, LONGEST_TOKEN_BYTES));
        let names = offending([(ACCESS_KEY_ID, is_id), (SECRET_ACCESS_KEY, is_secret), (SESSION_TOKEN, is_token)]);
        if !names.is_empty() {
            return Err(InvalidKeys::Malformed { names });
        }
        Ok(Self::checked(access_key_id, secret_access_key, session_token))
    }

    /// The driver's own keys, from its environment. An empty session token counts as none.
    pub fn driver(
        access_key_id: &str,
        secret_access_key: &str,
        session_token: Option<&str>,
    ) -> Result<Self, InvalidKeys> {
        let session_token = session_token.filter(|it| !it.is_empty());
        let names = offending([
            ("AWS_ACCESS_KEY_ID", is_printable(access_key_id)),
            ("AWS_SECRET_ACCESS_KEY", is_printable(secret_access_key)),
            ("AWS_SESSION_TOKEN", session_token.is_none_or(is_printable)),
        ]);
        if !names.is_empty() {
            return Err(InvalidKeys::NotPrintable { names });
        }
        Ok(Self::checked(access_key_id, secret_access_key, session_token))
    }

    pub fn access_key_id(&self) -> &Secret<String> {
        &self.access_key_id
    }

    pub fn secret_access_key(&self) -> &Secret<String> {
        &self.secret_access_key
    }

    pub fn session_token(&self) -> Option<&Secret<String>> {
        self.session_token.as_ref()
    }

    #[must_use]
    pub fn with_certificates(self, ca_certificates: Option<CaCertificates>) -> Self {
        Self { ca_certificates, ..self }
    }

    /// The files an engine reads these keys from.
    pub fn profile_files(&self) -> ProfileFiles {
        self.profile_files_named(PROFILE)
    }

    /// The same for an engine of an earlier driver, which uses another profile name.
    pub fn profile_files_named(&self, profile: &str) -> ProfileFiles {
        let Self { access_key_id, secret_access_key, session_token, ca_certificates } = self;
        let mut credentials = format!(
            "[{profile}]\naws_access_key_id={}\naws_secret_access_key={}\n",
            access_key_id.expose(),
            secret_access_key.expose(),
        );
        if let Some(token) = session_token {
            credentials.push_str("aws_session_token=");
            credentials.push_str(token.expose());
            credentials.push('\n');
        }
        if let Some(certificates) = ca_certificates {
            // Engines are replaced when this file changes, also for other certificates.
            credentials.push_str("# certificates ");
            credentials.push_str(&certificates.fingerprint());
            credentials.push('\n');
        }
        ProfileFiles {
            config: format!("[profile {profile}]\n"),
            credentials: Secret::new(credentials),
            ca_certificates: ca_certificates.clone(),
        }
    }

    fn checked(access_key_id: &str, secret_access_key: &str, session_token: Option<&str>) -> Self {
        Self {
            access_key_id: Secret::new(access_key_id.to_owned()),
            secret_access_key: Secret::new(secret_access_key.to_owned()),
            session_token: session_token.map(|it| Secret::new(it.to_owned())),
            ca_certificates: None,
        }
    }
}

fn is_plain(value: &str, longest_bytes: usize) -> bool {
    !value.is_empty() && value.len() <= longest_bytes && value.chars().all(|it| it.is_ascii_graphic())
}

/// A line break in a value would write a line of its own into the profile.
fn is_printable(value: &str) -> bool {
    !value.is_empty() && value.chars().all(|it| it == ' ' || !(it.is_control() || it.is_whitespace()))
}

fn offending<const N: usize>(checks: [(&'static str, bool); N]) -> Vec<&'static str> {
    checks.into_iter().filter(|(_, is_fine)| !is_fine).map(|(name, _)| name).collect()
}

fn are(names: &[&str]) -> String {
    format!("{} {}", names.join(", "), if names.len() == 1 { "is" } else { "are" })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ca_certificates::tests::PEM;

    fn secret(entries: &[(&str, &str)]) -> BTreeMap<String, Secret<String>> {
        entries.iter().map(|(key, value)| ((*key).to_owned(), Secret::new((*value).to_owned()))).collect()
    }

    #[track_caller]
    fn check(keys: Result<Keys, InvalidKeys>, expected: Result<&str, &str>) {
        match keys {
            Ok(keys) => {
                let ProfileFiles { config, credentials, ca_certificates: None } = keys.profile_files() else {
                    panic!("keys alone have no certificates");
                };
                assert_eq!(config, "[profile s3-csi]\n");
                assert_eq!(expected, Ok(credentials.expose().as_str()));
            }
            Err(error) => assert_eq!(expected, Err(error.to_string().as_str())),
        }
    }

    #[track_caller]
    fn check_secret(entries: &[(&str, &str)], expected: Result<&str, &str>) {
        check(Keys::from_secret(&secret(entries)), expected);
    }

    #[test]
    fn secrets_become_a_profile() {
        check_secret(
            &[("access_key_id", "accessKey1"), ("secret_access_key", "very/Secret+Key-1="), ("other", "ignored")],
            Ok("[s3-csi]\naws_access_key_id=accessKey1\naws_secret_access_key=very/Secret+Key-1=\n"),
        );
        check_secret(
            &[("access_key_id", " a1\n"), ("secret_access_key", "\ts2 \r\n"), ("session_token", "t:3_%~\n")],
            Ok("[s3-csi]\naws_access_key_id=a1\naws_secret_access_key=s2\naws_session_token=t:3_%~\n"),
        );
        check_secret(
            &[("access_key_id", "a"), ("secret_access_key", "s"), ("session_token", " ")],
            Ok("[s3-csi]\naws_access_key_id=a\naws_secret_access_key=s\n"),
        );
    }

    #[test]
    fn keys_may_have_any_printable_character() {
        check_secret(
            &[("access_key_id", "a-b_c.d"), ("secret_access_key", "#;=\"'[]%$\\`")],
            Ok("[s3-csi]\naws_access_key_id=a-b_c.d\naws_secret_access_key=#;=\"'[]%$\\`\n"),
        );
    }

    #[test]
    fn what_a_secret_lacks_is_named() {
        check_secret(&[], Err("the Secret lacks access_key_id, secret_access_key"));
        check_secret(&[("access_key_id", "a")], Err("the Secret lacks secret_access_key"));
        check_secret(&[("access_key_id", " "), ("secret_access_key", "s")], Err("the Secret lacks access_key_id"));
        check_secret(&[("key_id", "a"), ("access_key", "s")], Err("the Secret lacks access_key_id, secret_access_key"));
    }

    #[test]
    fn malformed_values_are_named_but_not_shown() {
        let malformed = |names| {
            format!(
                "the Secret has a malformed value for {names}; it must be the plain key: printable ASCII without spaces"
            )
        };
        check_secret(&[("access_key_id", "a 1"), ("secret_access_key", "s")], Err(&malformed("access_key_id")));
        check_secret(&[("access_key_id", "a"), ("secret_access_key", "s s")], Err(&malformed("secret_access_key")));
        check_secret(
            &[("access_key_id", "a\nb"), ("secret_access_key", "s\tt"), ("session_token", "t\nu")],
            Err(&malformed("access_key_id, secret_access_key, session_token")),
        );
        check_secret(
            &[("access_key_id", &"a".repeat(1025)), ("secret_access_key", &"s".repeat(1025))],
            Err(&malformed("access_key_id, secret_access_key")),
        );
        check_secret(
            &[("access_key_id", "ä"), ("secret_access_key", "s"), ("session_token", &"t".repeat(4097))],
            Err(&malformed("access_key_id, session_token")),
        );
    }

    #[test]
    fn the_longest_keys_have_1024_characters() {
        let longest = "k".repeat(1024);
        assert!(Keys::from_secret(&secret(&[("access_key_id", &longest), ("secret_access_key", &longest)])).is_ok());
    }

    #[test]
    fn driver_keys_must_be_printable() {
        check(
            Keys::driver("accessKey1", "verySecret Key1", Some("")),
            Ok("[s3-csi]\naws_access_key_id=accessKey1\naws_secret_access_key=verySecret Key1\n"),
        );
        check(
            Keys::driver("a", "b", Some("c")),
            Ok("[s3-csi]\naws_access_key_id=a\naws_secret_access_key=b\naws_session_token=c\n"),
        );
        let not_printable =
            |names| format!("invalid credentials: {names} empty or not printable (a trailing line break, perhaps)");
        check(Keys::driver("", "b", None), Err(&not_printable("AWS_ACCESS_KEY_ID is")));
        check(Keys::driver("a", "b\n", None), Err(&not_printable("AWS_SECRET_ACCESS_KEY is")));
        check(
            Keys::driver("a\t", "b\u{2028}", Some("c\0")),
            Err(&not_printable("AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN are")),
        );
    }

    #[test]
    fn other_certificates_change_the_file_of_the_keys() {
        let keys = Keys::driver("a", "b", None).unwrap();
        let one: CaCertificates = PEM.parse().unwrap();
        let files = |certificates: Option<CaCertificates>| keys.clone().with_certificates(certificates).profile_files();
        let two = one.and(Some(&one));
        let texts = [None, Some(one.clone()), Some(two)].map(|it| files(it).credentials.expose().clone());
        assert_eq!(files(Some(one.clone())).ca_certificates, Some(one));
        assert!(texts[0] != texts[1] && texts[1] != texts[2]);
        assert!(texts.iter().all(|it| it.starts_with(&texts[0])));
        assert!(texts[1][texts[0].len()..].starts_with("# certificates "));
    }

    #[test]
    fn keys_are_never_printed() {
        let keys = Keys::driver("visible1", "visible2", Some("visible3")).unwrap();
        assert!(!format!("{keys:?} {:?}", keys.profile_files()).contains("visible"));
    }

    /// The value of a property as the engine's library reads it: the line up to a comment, which white space precedes, then what
    /// follows the first `=`, without white space around it.
    fn read_property<'a>(profile: &'a str, name: &str) -> Option<&'a str> {
        let line = profile.lines().find(|it| it.split('=').next() == Some(name))?;
        let comment = [" #", " ;", "\t#", "\t;"].iter().filter_map(|it| line.find(it)).min().unwrap_or(line.len());
        line[..comment].split_once('=').map(|(_, value)| value.trim())
    }

    proptest! {
        #[test]
        fn keys_of_a_secret_are_read_as_it_is_written(id in "[!-~]{1,40}", key in "[!-~]{1,40}") {
            let keys = Keys::from_secret(&secret(&[(ACCESS_KEY_ID, &id), (SECRET_ACCESS_KEY, &key)])).unwrap();
            let files = keys.profile_files();
            prop_assert_eq!(read_property(files.credentials.expose(), "aws_access_key_id"), Some(id.as_str()));
            prop_assert_eq!(read_property(files.credentials.expose(), "aws_secret_access_key"), Some(key.as_str()));
        }

        #[test]
        fn no_value_can_add_a_line_to_the_profile(id in any::<String>(), key in any::<String>(), token in any::<String>()) {
            let given = secret(&[(ACCESS_KEY_ID, &id), (SECRET_ACCESS_KEY, &key), (SESSION_TOKEN, &token)]);
            for keys in [Keys::from_secret(&given), Keys::driver(&id, &key, Some(&token))].into_iter().flatten() {
                let lines = 3 + usize::from(keys.session_token().is_some());
                prop_assert_eq!(keys.profile_files().credentials.expose().lines().count(), lines);
            }
        }
    }
}
