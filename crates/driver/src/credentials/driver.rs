//! The driver's own credentials, as they are now: files are read again for every call, temporary keys are renewed before they expire.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use s3csi_core::credentials::{ACCESS_KEY_ID, InvalidKeys, Keys, SECRET_ACCESS_KEY, SESSION_TOKEN};
use s3csi_core::driver_keys;
use s3csi_core::secret::Secret;

use super::issued::{FAILURE_PAUSE, IssuedKeys};
use super::issuer::{Issuer, IssuerError, TemporaryKeys};
use super::profile::{self, InvalidProfile};

/// kubelet replaces all files of a mounted Secret at once by renaming this link.
const GENERATION_LINK: &str = "..data";

/// The link changes about once a minute at most; a second change while three files are read does not happen.
const ATTEMPTS: u32 = 3;

/// Longer than any key or token that is accepted.
const LONGEST_FILE_BYTES: u64 = 64 << 10;

/// How often the background task asks an issuer that fails.
const RETRY_PERIOD: Duration = Duration::from_secs(30);

/// Where the driver's own keys come from. There is exactly one source; no source falls back to another.
#[derive(Clone, Debug)]
pub enum CredentialSource {
    /// A mounted Secret. Without one the keys of the environment.
    Secret { directory: Option<PathBuf>, environment: Option<Keys> },
    /// AWS's shared files `credentials` and `config` in a mounted Secret or ConfigMap.
    Profile { directory: PathBuf, profile: String },
    /// Temporary keys.
    Issuer(Issuer),
}

#[derive(Debug)]
pub struct DriverCredentials {
    source: CredentialSource,
    issued: IssuedKeys<IssuerError>,
}

/// Why the driver's own credentials cannot be used. Names files, never a value.
#[derive(Debug, thiserror::Error)]
pub enum DriverCredentialsError {
    #[error("failed to read {path:?}")]
    Read {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error("correct the driver's Secret (chart value s3CredentialSecret)")]
    Invalid {
        #[source]
        cause: InvalidKeys,
    },

    #[error("correct the shared credentials file (chart value credentials.profile)")]
    Profile {
        #[source]
        cause: InvalidProfile,
    },

    #[error("{issuer} issues no keys")]
    Issuer {
        issuer: &'static str,
        #[source]
        cause: Arc<IssuerError>,
    },
}

impl DriverCredentials {
    pub fn new(source: CredentialSource) -> Self {
        Self { source, issued: IssuedKeys::default() }
    }

    /// The keys as they are now. `None`: the driver has none of its own.
    pub async fn current(&self) -> Result<Option<Keys>, DriverCredentialsError> {
        match &self.source {
            CredentialSource::Secret { directory, environment } => {
                let secret = directory.as_deref().map(read_secret).transpose()?.unwrap_or_default();
                let invalid = |cause| DriverCredentialsError::Invalid { cause };
                driver_keys::choose(&secret, environment.as_ref()).map_err(invalid)
            }
            CredentialSource::Profile { directory, profile } => {
                let (credentials, config) = consistently(directory, || {
                    Ok((read_file(&directory.join("credentials"))?, read_file(&directory.join("config"))?))
                })?;
                let expose = |it: &Option<Secret<String>>| it.as_ref().map(|it| it.expose().clone());
                let (credentials, config) = (expose(&credentials), expose(&config));
                let invalid = |cause| DriverCredentialsError::Profile { cause };
                profile::keys(credentials.as_deref(), config.as_deref(), profile).map(Some).map_err(invalid)
            }
            CredentialSource::Issuer(issuer) => self.issue(issuer).await.map(|it| Some(it.keys)),
        }
    }

    async fn issue(&self, issuer: &Issuer) -> Result<TemporaryKeys, DriverCredentialsError> {
        let keys = self.issued.current("the driver", Box::pin(issuer.issue())).await;
        keys.map_err(|cause| DriverCredentialsError::Issuer { issuer: issuer.name(), cause })
    }

    /// Renews temporary keys for the life of the program. `observe` learns when the present ones expire; returns at once for keys that
    /// do not.
    pub async fn renew_forever(self: Arc<Self>, observe: impl Fn(Option<SystemTime>)) {
        let CredentialSource::Issuer(issuer) = &self.source else { return };
        loop {
            let renewed = self.issue(issuer).await;
            let expires = self.issued.expiry().await;
            observe(expires);
            let until = |time: SystemTime| time.duration_since(SystemTime::now()).unwrap_or_default();
            let pause = match renewed {
                Ok(keys) if !until(keys.renewal()).is_zero() => until(keys.renewal()),
                Ok(_) | Err(_) => RETRY_PERIOD,
            };
            // The end of keys that cannot be renewed is observed when it comes.
            let end = expires.map(until).filter(|it| !it.is_zero()).unwrap_or(RETRY_PERIOD);
            tokio::time::sleep(pause.min(end + FAILURE_PAUSE)).await;
        }
    }
}

/// The files of a mounted Secret. One that does not exist is an empty directory.
fn read_secret(directory: &Path) -> Result<BTreeMap<String, Secret<String>>, DriverCredentialsError> {
    consistently(directory, || {
        let mut secret = BTreeMap::new();
        for name in [ACCESS_KEY_ID, SECRET_ACCESS_KEY, SESSION_TOKEN] {
            if let Some(value) = read_file(&directory.join(name))? {
                secret.insert(name.to_owned(), value);
            }
        }
        Ok(secret)
    })
}

/// Reads files of one generation of a mounted directory.
fn consistently<T>(
    directory: &Path,
    read: impl Fn() -> Result<T, DriverCredentialsError>,
) -> Result<T, DriverCredentialsError> {
    let generation = || fs::read_link(directory.join(GENERATION_LINK)).ok();
    let mut attempt = 1;
    loop {
        let before = generation();
        let content = read();
        if attempt == ATTEMPTS || before == generation() {
            return content;
        }
        attempt += 1;
    }
}

/// `None` if there is no such file.
fn read_file(path: &Path) -> Result<Option<Secret<String>>, DriverCredentialsError> {
    let mut text = String::new();
    match File::open(path).and_then(|it| it.take(LONGEST_FILE_BYTES).read_to_string(&mut text)) {
        Ok(_) => Ok(Some(Secret::new(text))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(cause) => Err(DriverCredentialsError::Read { path: path.to_owned(), cause }),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use s3csi_core::chain::Chain;

    use super::*;

    fn secret(directory: Option<&Path>, environment: Option<&str>) -> DriverCredentials {
        let environment = environment.map(|it| Keys::driver(it, "e", None).unwrap());
        DriverCredentials::new(CredentialSource::Secret { directory: directory.map(Path::to_owned), environment })
    }

    /// Writes a generation as kubelet does.
    fn write(directory: &Path, generation: &str, files: &[(&str, &str)]) {
        fs::create_dir(directory.join(generation)).unwrap();
        for (name, value) in files {
            fs::write(directory.join(generation).join(name), value).unwrap();
            let _ = symlink(Path::new(GENERATION_LINK).join(name), directory.join(name));
        }
        symlink(generation, directory.join("..data_tmp")).unwrap();
        fs::rename(directory.join("..data_tmp"), directory.join(GENERATION_LINK)).unwrap();
    }

    fn current(credentials: &DriverCredentials) -> Result<Option<String>, String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let keys = runtime.block_on(credentials.current()).map_err(|error| Chain(&error).to_string())?;
        Ok(keys.map(|it| it.access_key_id().expose().clone()))
    }

    #[track_caller]
    fn check(credentials: &DriverCredentials, expected: Option<&str>) {
        assert_eq!(current(credentials).unwrap().as_deref(), expected);
    }

    #[test]
    fn a_mounted_secret_is_read_at_each_call() {
        let directory = tempfile::tempdir().unwrap();
        let credentials = secret(Some(directory.path()), Some("environment"));
        check(&credentials, Some("environment"));
        write(directory.path(), "..1", &[("access_key_id", "first\n"), ("secret_access_key", "s")]);
        check(&credentials, Some("first"));
        write(directory.path(), "..2", &[("access_key_id", "second"), ("secret_access_key", "s")]);
        check(&credentials, Some("second"));
        write(directory.path(), "..3", &[("access_key_id", "third")]);
        let error = current(&credentials).unwrap_err();
        assert!(error.contains("s3CredentialSecret") && error.contains("lacks secret_access_key"), "{error}");
    }

    #[test]
    fn without_a_directory_the_environment_counts() {
        check(&secret(None, None), None);
        check(&secret(None, Some("environment")), Some("environment"));
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("access_key_id")).unwrap();
        let error = current(&secret(Some(directory.path()), None)).unwrap_err();
        assert!(error.contains("failed to read") && error.contains("access_key_id"), "{error}");
    }

    #[test]
    fn a_profile_never_falls_back() {
        let directory = tempfile::tempdir().unwrap();
        let source = CredentialSource::Profile { directory: directory.path().to_owned(), profile: "ours".to_owned() };
        let credentials = DriverCredentials::new(source);
        let error = current(&credentials).unwrap_err();
        assert!(error.contains("there is no profile \"ours\""), "{error}");
        fs::write(directory.path().join("config"), "[profile ours]\naws_access_key_id=a\naws_secret_access_key=b\n")
            .unwrap();
        check(&credentials, Some("a"));
    }
}
