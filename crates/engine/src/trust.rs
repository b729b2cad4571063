//! The certificates that the client trusts: those of the system or of `--ca-bundle`, and those that the volume brings.
//!
//! The library reads all of them at its start, which is more than half of the processor time of a start (13 of 24 ms). Where the
//! store is reached without TLS and the keys are at hand, there is nothing to trust, and it gets one certificate of the system's.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use rustix::fs::MemfdFlags;

use crate::cli::{Arguments, Environment};

/// Whether anything is asked by TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsUse {
    Possible,
    Never,
}

/// Words in files of profiles that make the library ask for keys.
const ASKING: [&str; 6] =
    ["role_arn", "sso_", "credential_process", "credential_source", "web_identity", "source_profile"];

impl TlsUse {
    pub fn of(arguments: &Arguments, environment: &Environment) -> Self {
        let endpoint = arguments.endpoint_url.as_ref().or(environment.endpoint_url.as_ref());
        let is_plain = endpoint.is_some_and(|it| it.starts_with("http://")) && !environment.has_proxy;
        if is_plain && has_local_keys(arguments, environment) { Self::Never } else { Self::Possible }
    }
}

/// Whether the keys are known without a request.
fn has_local_keys(arguments: &Arguments, environment: &Environment) -> bool {
    if arguments.no_sign_request {
        return true;
    }
    if arguments.profile.is_none() && environment.has_keys {
        return true;
    }
    let Some(profile) = arguments.profile.as_ref().or(environment.profile.as_ref()) else { return false };
    let (Some(keys), Some(profiles)) = (&environment.keys, &environment.profiles) else { return false };
    let texts = [keys, profiles].map(|it| fs::read_to_string(it).unwrap_or_default());
    let asks = texts.iter().any(|text| ASKING.iter().any(|word| text.contains(word)));
    !asks && has_keys(&texts[0], profile)
}

/// Whether the file of keys has some for this profile.
fn has_keys(text: &str, profile: &str) -> bool {
    let header = format!("[{profile}]");
    let lines = text.lines().map(str::trim).skip_while(|it| *it != header).skip(1);
    lines.take_while(|it| !it.starts_with('[')).any(|it| it.starts_with("aws_access_key_id"))
}

/// A file in memory with all certificates: the client library takes a path. It exists as long as this value.
pub struct TrustFile {
    file: File,
}

impl TrustFile {
    /// `None` if there are no additional ones: then the client trusts what it trusts by itself.
    pub fn new(base: Option<&Path>, additional: Option<&Path>, tls: TlsUse) -> io::Result<Option<Self>> {
        let system = s3csi_supervisor::system_ca_bundle();
        let additional = match additional.map(fs::read) {
            None => None,
            Some(Err(error)) if error.kind() == io::ErrorKind::NotFound => None,
            Some(content) => Some(content?),
        };
        match (additional, base, system) {
            (None, None, Some(system)) if tls == TlsUse::Never => {
                let all = fs::read(system)?;
                first_certificate(&all).map(Self::with).transpose()
            }
            (None, _, _) => Ok(None),
            (Some(additional), base, system) => {
                let mut all = base.or(system).map(fs::read).transpose()?.unwrap_or_default();
                // PEM is line by line, and the last line of a file may lack its end.
                all.push(b'\n');
                all.extend(additional);
                Self::with(&all).map(Some)
            }
        }
    }

    fn with(certificates: &[u8]) -> io::Result<Self> {
        let mut file = File::from(rustix::fs::memfd_create("certificates", MemfdFlags::CLOEXEC)?);
        file.write_all(certificates)?;
        Ok(Self { file })
    }

    pub fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.file.as_raw_fd()).into()
    }
}

/// With its last line. A file may begin with comments.
fn first_certificate(pem: &[u8]) -> Option<&[u8]> {
    const END: &[u8] = b"-----END CERTIFICATE-----";
    let end = pem.windows(END.len()).position(|it| it == END)? + END.len();
    pem.get(..=end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tls_use(words: &str, environment: &Environment) -> TlsUse {
        let words = format!("mount-s3 bucket /mnt {words}");
        let arguments = Arguments::parse_from_command_line(words.split_whitespace().map(Into::into)).unwrap();
        TlsUse::of(&arguments, environment)
    }

    #[test]
    fn tls_is_never_used_with_a_plain_endpoint_and_keys_at_hand() {
        let plain = "--endpoint-url http://127.0.0.1:1";
        let none = Environment::default();
        let keys = Environment { has_keys: true, ..none.clone() };
        assert_eq!(tls_use(plain, &keys), TlsUse::Never);
        assert_eq!(tls_use(&format!("{plain} --no-sign-request"), &none), TlsUse::Never);
        assert_eq!(tls_use(plain, &none), TlsUse::Possible);
        assert_eq!(tls_use("--endpoint-url https://127.0.0.1:1", &keys), TlsUse::Possible);
        assert_eq!(tls_use("", &keys), TlsUse::Possible);
        assert_eq!(tls_use(plain, &Environment { has_proxy: true, ..keys.clone() }), TlsUse::Possible);
        assert_eq!(tls_use(&format!("{plain} --profile p"), &keys), TlsUse::Possible);
    }

    #[test]
    fn keys_of_a_profile_are_at_hand_unless_it_says_whom_to_ask() {
        let place = tempfile::tempdir().unwrap();
        let [keys, profiles] = ["keys", "profiles"].map(|it| place.path().join(it));
        let environment =
            Environment { keys: Some(keys.clone()), profiles: Some(profiles.clone()), ..Environment::default() };
        let check = |key_text: &str, profile_text: &str, expected| {
            fs::write(&keys, key_text).unwrap();
            fs::write(&profiles, profile_text).unwrap();
            assert_eq!(tls_use("--endpoint-url http://h --profile p", &environment), expected, "{profile_text}");
            let environment = Environment { profile: Some("p".to_owned()), ..environment.clone() };
            assert_eq!(tls_use("--endpoint-url http://h", &environment), expected, "{profile_text}, by a variable");
        };
        check("[p]\naws_access_key_id = a\n", "[profile p]\n", TlsUse::Never);
        check("[p]\naws_access_key_id = a\n", "[profile p]\nrole_arn = r\n", TlsUse::Possible);
        check("[p]\n", "[profile p]\n", TlsUse::Possible);
        check("[p]\n[other]\naws_access_key_id = a\n", "[profile p]\n", TlsUse::Possible);
    }

    #[test]
    fn one_certificate_is_enough_where_none_is_used() {
        let all = b"# comment\n-----BEGIN CERTIFICATE-----\nA\n-----END CERTIFICATE-----\n-----BEGIN";
        let first = first_certificate(all).unwrap();
        assert!(first.ends_with(b"\nA\n-----END CERTIFICATE-----\n"));
        assert_eq!(first_certificate(b"-----BEGIN CERTIFICATE-----"), None);
    }

    #[test]
    fn additional_certificates_follow_the_others() {
        let place = tempfile::tempdir().unwrap();
        let [base, additional] = ["base", "additional"].map(|it| place.path().join(it));
        fs::write(&base, "base").unwrap();
        let trusted = TrustFile::new(Some(&base), Some(&additional), TlsUse::Possible).unwrap();
        assert!(trusted.is_none(), "the volume brings none at the moment");
        fs::write(&additional, "additional").unwrap();
        let trusted = TrustFile::new(Some(&base), Some(&additional), TlsUse::Possible).unwrap().unwrap();
        assert_eq!(fs::read_to_string(trusted.path()).unwrap(), "base\nadditional");
        assert!(TrustFile::new(Some(&base), None, TlsUse::Never).unwrap().is_none());
    }
}
