//! Issuers of temporary keys: EC2's instance metadata service (`IMDSv2`), a security token service (STS), and the agent that serves
//! containers. Each is one documented exchange over HTTP.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use hyper::Uri;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use s3csi_core::credentials::{InvalidKeys, Keys};
use s3csi_core::environment::DriverSettings;
use s3csi_core::proxy::ProxySettings;
use s3csi_core::secret::Secret;
use serde::Deserialize;

use super::http::{self, IssuerHttpError, IssuerRequest, IssuerResponse};
use super::timestamp;

/// Six hours, which AWS's own clients ask for; it is used within seconds.
const METADATA_TOKEN_SECONDS: &str = "21600";

/// In AWS's log of assumed roles.
const ROLE_SESSION_NAME: &str = "s3csi";

/// Issuers as messages name them.
pub const SECURITY_TOKEN_SERVICE: &str = "the security token service";
pub const CONTAINER_AGENT: &str = "the agent for containers";

/// As much of a message as helps.
const LONGEST_MESSAGE_CHARACTERS: usize = 300;

/// The addresses besides the node itself at which AWS serves containers without TLS.
const CONTAINER_ADDRESSES: [&str; 3] = ["169.254.170.2", "169.254.170.23", "fd00:ec2::23"];

/// Who issues the driver's temporary keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Issuer {
    /// The role of the instance that this program runs on.
    InstanceProfile { endpoint: String },
    /// The role that STS grants to the bearer of a token.
    WebIdentity { sts: SecurityTokenService, role: String, token_file: PathBuf },
    /// Pod Identity and its like.
    Container { url: String, token_file: Option<PathBuf> },
}

/// A security token service, the file of certificates in PEM that are trusted beside the system's, and the way to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecurityTokenService {
    pub url: String,
    pub authorities: Option<PathBuf>,
    pub proxy: ProxySettings,
}

/// Keys that expire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemporaryKeys {
    pub keys: Keys,
    pub issued: SystemTime,
    pub expires: SystemTime,
}

/// Why an issuer gave no usable keys. Never shows a token or a key.
#[derive(Debug, thiserror::Error)]
pub enum IssuerError {
    #[error("failed to read the token {path:?}")]
    TokenFile {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error("the token {path:?} is empty or not one line of text")]
    Token { path: PathBuf },

    #[error("no usable answer")]
    Http {
        #[source]
        cause: IssuerHttpError,
    },

    #[error("it is not asked without TLS at {url:?}: use https, a loopback address or one of {}", CONTAINER_ADDRESSES.join(", "))]
    Insecure { url: String },

    #[error("it refused with status {status}: {message}")]
    Refused { status: u16, message: String },

    #[error("the instance has no instance profile")]
    NoInstanceProfile,

    #[error("its answer is malformed: {problem}")]
    Malformed { problem: &'static str },

    #[error("it issued keys that cannot be used")]
    Keys {
        #[source]
        cause: InvalidKeys,
    },

    #[error("it issued keys that have expired already; compare the clocks")]
    Expired,
}

/// The answer of the metadata service and of agents.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct IssuedJson {
    access_key_id: String,
    secret_access_key: String,
    token: String,
    expiration: String,
}

impl Issuer {
    pub const fn name(&self) -> &'static str {
        match self {
            Self::InstanceProfile { .. } => "the instance metadata service",
            Self::WebIdentity { .. } => SECURITY_TOKEN_SERVICE,
            Self::Container { .. } => CONTAINER_AGENT,
        }
    }

    /// Asks for keys.
    pub async fn issue(&self) -> Result<TemporaryKeys, IssuerError> {
        match self {
            Self::InstanceProfile { endpoint } => {
                read_json(&ask_instance_metadata(endpoint.trim_end_matches('/')).await?)
            }
            Self::WebIdentity { sts, role, token_file } => {
                sts.assume_role(role, ROLE_SESSION_NAME, &read_token(token_file)?).await
            }
            Self::Container { url, token_file } => {
                let token = token_file.as_deref().map(read_token).transpose()?;
                ask_container_agent(url, token.as_ref()).await
            }
        }
    }
}

impl SecurityTokenService {
    /// Without a URL that of AWS in the driver's region.
    pub fn new(url: Option<String>, settings: &DriverSettings, authorities: Option<PathBuf>) -> Self {
        let url = url.unwrap_or_else(|| match settings.region.as_deref() {
            None | Some("") => "https://sts.amazonaws.com".to_owned(),
            Some(region) => format!("https://sts.{region}.amazonaws.com"),
        });
        Self { url, authorities, proxy: settings.proxy.clone() }
    }

    /// `AssumeRoleWithWebIdentity`: the token is the proof, so the request is not signed. `session` is shown in the log of the service.
    pub async fn assume_role(
        &self,
        role: &str,
        session: &str,
        token: &Secret<String>,
    ) -> Result<TemporaryKeys, IssuerError> {
        let encode = |it: &str| utf8_percent_encode(it, NON_ALPHANUMERIC).to_string();
        let (role, session, encoded) = (encode(role), encode(session), Secret::new(encode(token.expose())));
        let body = format!(
            "Action=AssumeRoleWithWebIdentity&Version=2011-06-15&RoleSessionName={session}&RoleArn={role}\
             &WebIdentityToken={}",
            encoded.expose(),
        );
        let headers = [("content-type", "application/x-www-form-urlencoded"), ("accept", "application/xml")];
        let request = IssuerRequest { method: "POST", url: &self.url, headers: &headers, body };
        let answer = http::send_through(&self.proxy, request, self.authorities.as_deref()).await;
        let answer = answer.map_err(|cause| IssuerError::Http { cause })?;
        let answer = accepted(answer, &[token.expose(), encoded.expose()])?;
        let find = |name| element(answer.body.expose(), name);
        let incomplete = || IssuerError::Malformed { problem: "it lacks a part of the credentials" };
        let (id, key) = find("AccessKeyId").zip(find("SecretAccessKey")).ok_or_else(incomplete)?;
        let (token, expiration) = find("SessionToken").zip(find("Expiration")).ok_or_else(incomplete)?;
        check(&id, &key, &token, &expiration)
    }
}

impl IssuerError {
    /// Whether it may work later without anybody's doing.
    pub const fn is_transient(&self) -> bool {
        match self {
            Self::Http { .. } => true,
            Self::Refused { status, .. } => 500 <= *status || *status == 429,
            Self::TokenFile { .. }
            | Self::Token { .. }
            | Self::Insecure { .. }
            | Self::NoInstanceProfile
            | Self::Malformed { .. }
            | Self::Keys { .. }
            | Self::Expired => false,
        }
    }
}

async fn ask_instance_metadata(endpoint: &str) -> Result<IssuerResponse, IssuerError> {
    let url = format!("{endpoint}/latest/api/token");
    let headers = [("x-aws-ec2-metadata-token-ttl-seconds", METADATA_TOKEN_SECONDS), ("content-length", "0")];
    let session =
        send(IssuerRequest { method: "PUT", url: &url, headers: &headers, body: String::new() }, None).await?;
    let session = Secret::new(session.body.expose().trim().to_owned());
    let headers = [("x-aws-ec2-metadata-token", session.expose().as_str())];
    let get = |url: String| async move {
        http::send(IssuerRequest { method: "GET", url: &url, headers: &headers, body: String::new() }, None).await
    };
    let roles = format!("{endpoint}/latest/meta-data/iam/security-credentials/");
    let listed = get(roles.clone()).await.map_err(|cause| IssuerError::Http { cause })?;
    if listed.status == 404 {
        return Err(IssuerError::NoInstanceProfile);
    }
    let listed = accepted(listed, &[])?;
    let role = listed.body.expose().lines().next().unwrap_or_default().trim().to_owned();
    let is_role = |it: char| it.is_ascii_alphanumeric() || "+=,.@_-".contains(it);
    if role.is_empty() || !role.chars().all(is_role) {
        return Err(IssuerError::Malformed { problem: "it names no role" });
    }
    let answer = get(format!("{roles}{role}")).await.map_err(|cause| IssuerError::Http { cause })?;
    accepted(answer, &[session.expose().as_str()])
}

/// Keys for the bearer of this token, from the agent for containers.
pub async fn ask_container_agent(url: &str, token: Option<&Secret<String>>) -> Result<TemporaryKeys, IssuerError> {
    if !is_safe_for_containers(url) {
        return Err(IssuerError::Insecure { url: url.to_owned() });
    }
    let headers: Vec<_> = token.iter().map(|it| ("authorization", it.expose().as_str())).collect();
    let request = IssuerRequest { method: "GET", url, headers: &headers, body: String::new() };
    let answer = http::send(request, None).await.map_err(|cause| IssuerError::Http { cause })?;
    read_json(&accepted(answer, &token.iter().map(|it| it.expose().as_str()).collect::<Vec<_>>())?)
}

async fn send(request: IssuerRequest<'_>, authorities: Option<&Path>) -> Result<IssuerResponse, IssuerError> {
    let answer = http::send(request, authorities).await.map_err(|cause| IssuerError::Http { cause })?;
    accepted(answer, &[])
}

/// The answer, unless it is a refusal, whose message shows none of `secrets`.
fn accepted(answer: IssuerResponse, secrets: &[&str]) -> Result<IssuerResponse, IssuerError> {
    let IssuerResponse { status, body } = &answer;
    if (200..300).contains(status) {
        return Ok(answer);
    }
    let words = [element(body.expose(), "Code"), element(body.expose(), "Message")];
    let mut message = words.into_iter().flatten().collect::<Vec<_>>().join(": ");
    for secret in secrets {
        message = message.replace(secret, "<secret>");
    }
    let message = message.chars().filter(|it| !it.is_control()).take(LONGEST_MESSAGE_CHARACTERS).collect();
    Err(IssuerError::Refused { status: *status, message })
}

fn check(id: &str, key: &str, token: &str, expiration: &str) -> Result<TemporaryKeys, IssuerError> {
    let keys = Keys::driver(id, key, Some(token)).map_err(|cause| IssuerError::Keys { cause })?;
    let problem = "its Expiration is not a time";
    let expires = timestamp::parse(expiration).ok_or(IssuerError::Malformed { problem })?;
    let issued = SystemTime::now();
    if expires <= issued {
        return Err(IssuerError::Expired);
    }
    Ok(TemporaryKeys { keys, issued, expires })
}

fn read_json(answer: &IssuerResponse) -> Result<TemporaryKeys, IssuerError> {
    let malformed = |_| IssuerError::Malformed { problem: "it is not the JSON of credentials" };
    let IssuedJson { access_key_id, secret_access_key, token, expiration } =
        serde_json::from_str(answer.body.expose()).map_err(malformed)?;
    check(&access_key_id, &secret_access_key, &token, &expiration)
}

/// Read for every request: kubelet rotates tokens.
fn read_token(path: &Path) -> Result<Secret<String>, IssuerError> {
    let text = fs::read_to_string(path).map_err(|cause| IssuerError::TokenFile { path: path.to_owned(), cause })?;
    let token = text.trim();
    if token.is_empty() || !token.chars().all(|it| it.is_ascii_graphic()) {
        return Err(IssuerError::Token { path: path.to_owned() });
    }
    Ok(Secret::new(token.to_owned()))
}

/// The token must not cross a network in clear text; the rule is that of AWS's own clients.
fn is_safe_for_containers(url: &str) -> bool {
    let Ok(uri) = url.parse::<Uri>() else { return false };
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    let is_near = || {
        let is_loopback = host == "localhost" || host.parse::<IpAddr>().is_ok_and(|it| it.is_loopback());
        is_loopback || CONTAINER_ADDRESSES.contains(&host)
    };
    uri.scheme_str() == Some("https") || (uri.scheme_str() == Some("http") && is_near())
}

/// The text of the first element of this name. Credentials have no nested elements and no attributes.
fn element(xml: &str, name: &str) -> Option<String> {
    let (_, rest) = xml.split_once(&format!("<{name}>"))?;
    let (text, _) = rest.split_once(&format!("</{name}>"))?;
    let plain = [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&apos;", "'"), ("&amp;", "&")];
    Some(plain.iter().fold(text.trim().to_owned(), |text, (entity, it)| text.replace(entity, it)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_for_containers_never_cross_a_network_in_clear_text() {
        for url in [
            "https://agent.example.com/v1",
            "http://127.0.0.1:8080/v1/credentials",
            "http://localhost/",
            "http://169.254.170.23/v1/credentials",
            "http://[fd00:ec2::23]/v1/credentials",
            "http://[::1]:80/",
        ] {
            assert!(is_safe_for_containers(url), "{url}");
        }
        for url in ["http://agent.example.com/", "http://10.0.0.1/", "ftp://127.0.0.1/", "127.0.0.1", ""] {
            assert!(!is_safe_for_containers(url), "{url}");
        }
    }

    #[test]
    fn elements_are_found_and_unescaped() {
        let xml = "<A><AccessKeyId> id </AccessKeyId><SessionToken>a&amp;lt;b+/=</SessionToken></A>";
        assert_eq!(element(xml, "AccessKeyId").as_deref(), Some("id"));
        assert_eq!(element(xml, "SessionToken").as_deref(), Some("a&lt;b+/="));
        assert_eq!(element(xml, "Expiration"), None);
    }

    #[test]
    fn refusals_name_the_cause_and_hide_the_token() {
        let body = "<Error><Code>InvalidIdentityToken</Code><Message>bad token t0ken\n</Message></Error>";
        let answer = IssuerResponse { status: 400, body: Secret::new(body.to_owned()) };
        let error = accepted(answer, &["t0ken"]).err().unwrap();
        assert_eq!(error.to_string(), "it refused with status 400: InvalidIdentityToken: bad token <secret>");
        assert!(!error.is_transient());
    }

    #[test]
    fn expired_keys_are_refused() {
        let check = |expiration| check("a", "b", "c", expiration).map(drop).map_err(|error| error.to_string());
        assert_eq!(check("2999-01-01T00:00:00Z"), Ok(()));
        assert_eq!(check("1999-01-01T00:00:00Z").unwrap_err(), IssuerError::Expired.to_string());
        assert_eq!(check("soon").unwrap_err(), "its answer is malformed: its Expiration is not a time");
    }
}
