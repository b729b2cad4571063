//! Puts a source of keys into a state, and says how a volume is refused in it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use s3csi_s3_server::store::{Account, SECRET_MARK, Store as _};
use s3csi_s3_server::{S3Server, Sessions};
use tonic::Code;

use super::KeySource;
use crate::credential_issuer::{CredentialIssuer, IssuerMode, ROLE, RoleTrust};
use crate::fixture::Fixture;
use crate::kubelet::CsiVolume;
use crate::workload_identity::{
    self, SERVICE_ACCOUNT, subject, token, tokens, trust_teams, with_identity, with_role, with_tokens, without_tokens,
};

/// The workload identity of the driver itself.
pub const TOKEN: &str = "driver-token-NeverPrintThis";

/// No test lasts as long.
pub const LIFETIME: Duration = Duration::from_hours(1);

/// How a volume is refused with keys that the store accepts no more.
pub const EXPIRED: [&str; 2] = ["Could not mount", "ExpiredToken"];

const PROFILE: &str = "ours";

const NAMESPACE: &str = "default";

/// What a source has to offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Supply {
    Keys {
        lifetime: Duration,
    },
    ExpiredKeys,
    Malformed,
    /// Half of the keys.
    Incomplete,
    /// No keys, or an issuer that refuses.
    Missing,
    /// An issuer with a failure of its own.
    Failing,
    TokenMissing,
    TokenMalformed,
    /// One that the issuer accepts no more.
    TokenExpired,
}

/// How a volume is refused with such a supply.
pub struct Refusal {
    pub supply: Supply,
    pub code: Code,
    pub words: [&'static str; 2],
}

/// A source and what it has to offer now.
pub struct KeySupply {
    pub source: KeySource,
    pub issuer: CredentialIssuer,
    /// The node plugin's.
    pub arguments: Vec<String>,
    /// Those that were written into a file or a Secret last.
    pub written: Option<SessionKeys>,
    sessions: Sessions,
    account: Account,
    now: Supply,
    /// What the Secret of a volume contains.
    secret: Vec<(&'static str, String)>,
    /// The directory that the driver's Secret or the shared files are mounted in.
    directory: PathBuf,
    generation: u32,
    /// The file with the driver's own token.
    token: PathBuf,
}

/// Keys of a session in the store.
pub struct SessionKeys {
    pub keys: Account,
    pub token: String,
}

impl KeySource {
    /// By an issuer of temporary keys, whose answers the node plugin remembers.
    pub const fn is_issued(self) -> bool {
        match self {
            Self::Secret | Self::DriverSecret | Self::Profile => false,
            Self::InstanceProfile | Self::WebIdentity | Self::Container | Self::PodIdentity => true,
        }
    }

    /// The states in which nothing can be mounted.
    pub fn refusals(self) -> Vec<Refusal> {
        let secret = "no usable Secret";
        let driver = "the driver's credentials cannot be used";
        let profile = "chart value credentials.profile";
        let own = "the Pod's own identity gives no credentials";
        let (sts, agent) = ("the security token service", "the agent for containers");
        let malformed = "malformed value for secret_access_key";
        let invalid_token = ["InvalidIdentityToken", "<secret>"];
        match self {
            Self::Secret => {
                of_files([secret, "nodePublishSecretRef"], [secret, "lacks secret_access_key"], [secret, malformed])
            }
            Self::DriverSecret => of_files(
                ["the driver has no credentials", "s3CredentialSecret"],
                [driver, "lacks secret_access_key"],
                [driver, malformed],
            ),
            Self::Profile => of_files(
                [profile, "there is no profile \"ours\""],
                [profile, "profile \"ours\" lacks aws_secret_access_key"],
                [profile, "profile \"ours\" has role_arn, which is not supported"],
            ),
            Self::InstanceProfile => of_issuer(driver, ["the instance metadata service", "has no instance profile"]),
            Self::WebIdentity => {
                let mut all = of_issuer(driver, [sts, "AccessDenied: the role is not yours"]);
                all.extend(of_token_file(invalid_token));
                all
            }
            Self::Container => {
                let mut all = of_issuer(driver, [agent, "AccessDenied: the role is not yours"]);
                all.extend(of_token_file([agent, "status 401"]));
                all
            }
            Self::PodIdentity => {
                let mut all = of_issuer(own, [sts, "AccessDenied: the role is not yours"]);
                let missing = ["no usable token came with the request", "podIdentity.enabled"];
                all.extend(of_tokens(missing, [own, "not the JSON"], invalid_token));
                all
            }
        }
    }
}

const fn refusal(supply: Supply, words: [&'static str; 2]) -> Refusal {
    Refusal { supply, code: Code::Unauthenticated, words }
}

fn of_files(missing: [&'static str; 2], incomplete: [&'static str; 2], malformed: [&'static str; 2]) -> Vec<Refusal> {
    vec![
        refusal(Supply::Missing, missing),
        refusal(Supply::Incomplete, incomplete),
        refusal(Supply::Malformed, malformed),
        refusal(Supply::ExpiredKeys, EXPIRED),
    ]
}

fn of_issuer(who: &'static str, missing: [&'static str; 2]) -> Vec<Refusal> {
    vec![
        refusal(Supply::Missing, missing),
        refusal(Supply::Malformed, [who, "its answer is malformed"]),
        refusal(Supply::ExpiredKeys, [who, "expired already"]),
        Refusal { code: Code::Unavailable, ..refusal(Supply::Failing, [who, "status 500"]) },
    ]
}

fn of_tokens(missing: [&'static str; 2], malformed: [&'static str; 2], expired: [&'static str; 2]) -> [Refusal; 3] {
    [
        refusal(Supply::TokenMissing, missing),
        refusal(Supply::TokenMalformed, malformed),
        refusal(Supply::TokenExpired, expired),
    ]
}

fn of_token_file(expired: [&'static str; 2]) -> [Refusal; 3] {
    let file = "the token";
    of_tokens([file, "failed to read"], [file, "is empty or not one line of text"], expired)
}

impl KeySupply {
    /// The keys act as the store's default account.
    pub fn new(fixture: &Fixture, source: KeySource, issuer: CredentialIssuer, store: &S3Server) -> Self {
        let (subject, account) = (subject(NAMESPACE, SERVICE_ACCOUNT), store.account().clone());
        trust_teams(&issuer, &[RoleTrust { subject, role: Some(ROLE.to_owned()), account: account.clone() }]);
        let (directory, token) = (fixture.create_directory("mounted-secret"), fixture.path("token"));
        let arguments = arguments(source, &issuer, &directory, &token);
        Self {
            source,
            issuer,
            arguments,
            written: None,
            sessions: store.sessions(),
            account,
            now: Supply::Missing,
            secret: Vec::new(),
            directory,
            generation: 0,
            token,
        }
    }

    pub fn set(&mut self, supply: Supply) {
        self.now = supply;
        if self.source.is_issued() {
            self.instruct_issuer();
        } else {
            self.write_keys();
        }
    }

    fn instruct_issuer(&self) {
        self.issuer.set_mode(match self.now {
            Supply::Keys { lifetime } => IssuerMode::Issue { lifetime },
            Supply::ExpiredKeys => IssuerMode::IssueExpired,
            Supply::Malformed => IssuerMode::Malformed,
            Supply::Incomplete | Supply::Missing => IssuerMode::Refuse,
            Supply::Failing => IssuerMode::Fail,
            Supply::TokenMissing | Supply::TokenMalformed | Supply::TokenExpired => {
                IssuerMode::Issue { lifetime: LIFETIME }
            }
        });
        let content = match self.now {
            Supply::TokenMissing => return fs::remove_file(&self.token).unwrap(),
            Supply::TokenMalformed => "two words-NeverPrintThis",
            Supply::TokenExpired => "another-NeverPrintThis",
            _ => TOKEN,
        };
        fs::write(&self.token, format!("{content}\n")).unwrap();
    }

    /// Puts keys where they are read again for each call. Files do not say when keys expire; [`Self::expire`] does it.
    fn write_keys(&mut self) {
        self.generation += 1;
        let session = SessionKeys {
            keys: Account::named(&format!("written-{}", self.generation)),
            token: format!("written-token-{}-{SECRET_MARK}+/=", self.generation),
        };
        self.sessions.add(&self.account, &session.keys, &session.token, SystemTime::now() + LIFETIME);
        if self.now == Supply::ExpiredKeys {
            self.expire(&session);
        }
        let [id, key, token] = match self.source {
            KeySource::Profile => ["aws_access_key_id", "aws_secret_access_key", "aws_session_token"],
            _ => ["access_key_id", "secret_access_key", "session_token"],
        };
        let Account { access_key, secret_key } = session.keys.clone();
        let secret_key = if self.now == Supply::Malformed { format!("two words-{SECRET_MARK}") } else { secret_key };
        let mut values = vec![(id, access_key), (key, secret_key), (token, session.token.clone())];
        match self.now {
            Supply::Missing => values.clear(),
            Supply::Incomplete => drop(values.remove(1)),
            _ => {}
        }
        self.written = Some(session);
        match self.source {
            KeySource::Secret => self.secret = values,
            KeySource::Profile => mount_secret(&self.directory, self.generation, &self.profile(&values)),
            _ => mount_secret(&self.directory, self.generation, &values),
        }
    }

    /// The shared files of a profile with these properties.
    fn profile(&self, values: &[(&'static str, String)]) -> Vec<(&'static str, String)> {
        let lines = match self.now {
            Supply::Missing => return Vec::new(),
            // Any printable key is one here, so it is malformed in another way.
            Supply::Malformed => format!("role_arn={ROLE}\n"),
            _ => values.iter().map(|(name, value)| format!("{name}={value}\n")).collect::<Vec<_>>().concat(),
        };
        vec![("credentials", format!("[{PROFILE}]\n{lines}"))]
    }

    /// Ends a session as if its time were over.
    pub fn expire(&self, SessionKeys { keys, token }: &SessionKeys) {
        self.sessions.add(&self.account, keys, token, SystemTime::now() - Duration::from_secs(1));
    }

    /// A volume as kubelet publishes it now.
    pub fn with_keys(&self, mut volume: CsiVolume) -> CsiVolume {
        match self.source {
            KeySource::Secret => {
                volume.secrets.extend(self.secret.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
                volume.with_attribute("authenticationSource", "secret")
            }
            KeySource::PodIdentity => self.with_identity(volume),
            _ => volume,
        }
    }

    fn with_identity(&self, volume: CsiVolume) -> CsiVolume {
        let volume = with_role(with_identity(volume, NAMESPACE, SERVICE_ACCOUNT), ROLE);
        let expired = || token(&subject(NAMESPACE, SERVICE_ACCOUNT), SystemTime::now() - Duration::from_secs(1));
        match self.now {
            Supply::TokenMissing => without_tokens(volume),
            Supply::TokenMalformed => with_tokens(volume, SECRET_MARK),
            Supply::TokenExpired => with_tokens(volume, &tokens(&expired())),
            _ => volume,
        }
    }
}

fn arguments(source: KeySource, issuer: &CredentialIssuer, directory: &Path, token: &Path) -> Vec<String> {
    let (url, directory, token) = (issuer.url(), text(directory), text(token));
    let agent = format!("{url}/v1/credentials");
    let words: &[&str] = match source {
        KeySource::Secret => &[],
        KeySource::DriverSecret => &["secret", "--credentials-directory", &directory],
        KeySource::Profile => &["profile", "--credentials-directory", &directory, "--credentials-profile", PROFILE],
        KeySource::InstanceProfile => &["instance-profile", "--instance-metadata-url", &url],
        KeySource::WebIdentity => {
            &["web-identity", "--role-arn", ROLE, "--sts-endpoint-url", &url, "--web-identity-token-file", &token]
        }
        KeySource::Container => &["container", "--container-credentials-url", &agent, "--container-token-file", &token],
        KeySource::PodIdentity => {
            let mut all = workload_identity::arguments(issuer);
            all.extend(["--pod-identity-service-account-roles", "off"].map(str::to_owned));
            return all;
        }
    };
    let flag = words.first().map(|_| "--credentials-source");
    flag.into_iter().chain(words.iter().copied()).map(str::to_owned).collect()
}

/// A Secret as kubelet mounts it: all files change at once.
fn mount_secret(directory: &Path, generation: u32, files: &[(&str, String)]) {
    let data = format!("..{generation}");
    fs::create_dir(directory.join(&data)).unwrap();
    for (name, value) in files {
        fs::write(directory.join(&data).join(name), value).unwrap();
        if !directory.join(name).is_symlink() {
            symlink(Path::new("..data").join(name), directory.join(name)).unwrap();
        }
    }
    symlink(&data, directory.join("..data_tmp")).unwrap();
    fs::rename(directory.join("..data_tmp"), directory.join("..data")).unwrap();
    if generation > 1 {
        fs::remove_dir_all(directory.join(format!("..{}", generation - 1))).unwrap();
    }
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
