//! Workloads with identities of their own: two teams, each with a service account, a role and an account of the store, that mount the same
//! volume. Tests of all strategies use it.

use std::net::Ipv4Addr;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use s3csi_s3_server::store::{Account, SECRET_MARK, Store as _};
use s3csi_s3_server::{Config, S3Server};
use serde_json::{Value, json};

use crate::credential_issuer::{CredentialIssuer, RoleTrust};
use crate::http;
use crate::kubelet::CsiVolume;

/// The bucket that each team has one of.
pub const SHARED_BUCKET: &str = "shared";

/// For whom the tokens are meant.
pub const AUDIENCE: &str = "sts.testbed";

/// The same for the agent for containers.
pub const AGENT_AUDIENCE: &str = "agent.testbed";

/// The teams, which are namespaces as well.
pub const TEAMS: [&str; 2] = ["red", "blue"];

/// The service account in the documents, which may have every role.
const DOCUMENTED_ACCOUNT: &str = "robot";

/// Every team's service account.
pub const SERVICE_ACCOUNT: &str = "robot";

/// What kubelet calls the tokens.
const TOKENS: &str = "csi.storage.k8s.io/serviceAccount.tokens";

/// Longer than any test.
const TOKEN_LIFETIME: Duration = Duration::from_hours(1);

/// The role of a team.
pub fn role(team: &str) -> String {
    format!("arn:aws:iam::000000000000:role/{team}")
}

/// The name of a service account in its tokens.
pub fn subject(namespace: &str, service_account: &str) -> String {
    format!("system:serviceaccount:{namespace}:{service_account}")
}

/// Gives each team an account, a bucket of the same name with a file that says whose it is, and a role.
pub fn add_teams(store: &S3Server) -> Vec<RoleTrust> {
    let mut trusts = Vec::new();
    for team in TEAMS {
        add_team(store, team, SHARED_BUCKET);
        let subject = subject(team, SERVICE_ACCOUNT);
        for role in [Some(role(team)), None] {
            trusts.push(RoleTrust { subject: subject.clone(), role, account: Account::named(team) });
        }
    }
    trusts
}

/// An account with a bucket that other accounts have, too.
fn add_team(store: &S3Server, team: &str, bucket: &str) {
    let (account, bucket) = (Account::named(team), format!("{team}:{bucket}"));
    store.add_account(&account).expect("an account");
    store.create_bucket(&bucket, &account).expect("a bucket");
    store.put_object(&bucket, "whose", team.as_bytes()).expect("an object");
}

/// Under which name the store has the bucket of a team.
pub fn own_bucket(team: &str) -> String {
    format!("{team}:{SHARED_BUCKET}")
}

/// Lets the issuer accept the tokens that are made here.
pub fn trust_teams(issuer: &CredentialIssuer, trusts: &[RoleTrust]) {
    issuer.trust(Box::new(verify), trusts);
}

/// A token as the API server would issue it, with a signature that the issuer knows.
pub fn token(subject: &str, expires: SystemTime) -> String {
    let expires = expires.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let claims = json!({ "sub": subject, "exp": expires });
    let encode = |it: &Value| URL_SAFE_NO_PAD.encode(it.to_string());
    format!("{}.{}.signature-{SECRET_MARK}", encode(&json!({ "alg": "none" })), encode(&claims))
}

/// The subject of a token with the right signature that has not expired.
fn verify(token: &str) -> Option<String> {
    let (rest, signature) = token.rsplit_once('.')?;
    let claims = claims(rest)?;
    let expires = UNIX_EPOCH + Duration::from_secs(claims["exp"].as_u64()?);
    let is_valid = signature == format!("signature-{SECRET_MARK}") && SystemTime::now() < expires;
    claims["sub"].as_str().filter(|_| is_valid).map(str::to_owned)
}

fn claims(token: &str) -> Option<Value> {
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(token.split('.').nth(1)?).ok()?).ok()
}

/// Prints for which Pod a token was issued, and when: tests wait until kubelet has got another one.
fn say_which(token: &str) {
    let claims = claims(token).unwrap_or_default();
    println!("token {} {}", claims["kubernetes.io"]["pod"]["name"], claims["iat"]);
}

/// What kubelet sends: a token for each audience.
pub fn tokens(token: &str) -> String {
    let one = json!({ "token": token, "expirationTimestamp": "2030-01-01T00:00:00Z" });
    json!({ AUDIENCE: one, AGENT_AUDIENCE: one }).to_string()
}

/// The volume of all teams, as kubelet publishes it for a Pod of this service account with a fresh token.
pub fn shared_volume(pod_uid: &str, namespace: &str, service_account: &str) -> CsiVolume {
    with_identity(CsiVolume::new(SHARED_BUCKET, "pv-shared", pod_uid), namespace, service_account)
}

/// A volume with `authenticationSource: pod`, as kubelet publishes it for a Pod of this service account with a fresh token.
#[must_use]
pub fn with_identity(mut volume: CsiVolume, namespace: &str, service_account: &str) -> CsiVolume {
    for (key, value) in [
        ("authenticationSource", "pod"),
        ("csi.storage.k8s.io/pod.namespace", namespace),
        ("csi.storage.k8s.io/serviceAccount.name", service_account),
    ] {
        volume.attributes.insert(key.to_owned(), value.to_owned());
    }
    let token = token(&subject(namespace, service_account), SystemTime::now() + TOKEN_LIFETIME);
    with_tokens(volume, &tokens(&token))
}

/// As kubelet sends them since Kubernetes 1.35.
#[must_use]
pub fn with_tokens(mut volume: CsiVolume, tokens: &str) -> CsiVolume {
    volume.secrets.insert(TOKENS.to_owned(), tokens.to_owned());
    volume
}

/// As kubelet sends them before Kubernetes 1.35: among the attributes.
#[must_use]
pub fn with_tokens_among_attributes(mut volume: CsiVolume, tokens: &str) -> CsiVolume {
    volume.secrets.remove(TOKENS);
    volume.attributes.insert(TOKENS.to_owned(), tokens.to_owned());
    volume
}

#[must_use]
pub fn without_tokens(mut volume: CsiVolume) -> CsiVolume {
    volume.secrets.remove(TOKENS);
    volume
}

#[must_use]
pub fn with_role(mut volume: CsiVolume, role: &str) -> CsiVolume {
    volume.attributes.insert("roleArn".to_owned(), role.to_owned());
    volume
}

/// The arguments of a node plugin that exchanges tokens at this issuer.
pub fn arguments(issuer: &CredentialIssuer) -> Vec<String> {
    let url = issuer.url();
    ["--pod-identity", "on", "--pod-identity-audience", AUDIENCE, "--pod-identity-sts-endpoint-url", &url]
        .map(str::to_owned)
        .to_vec()
}

/// A store and an issuer for a whole cluster. The issuer asks the API server whether a token is valid; the service accounts `red` and
/// `blue` of namespace `default` may have the roles of these teams.
pub struct IssuingStore {
    pub store: S3Server,
    pub issuer: CredentialIssuer,
}

impl IssuingStore {
    /// `api` is the socket of the API server, for its administrator.
    pub fn start(address: Ipv4Addr, api: &Path, buckets: &[String], lifetime: Duration) -> anyhow::Result<Self> {
        let store = S3Server::start_blocking(Config { address, ..Config::default() })?;
        let issuer = CredentialIssuer::start_at(address, store.sessions(), store.account(), lifetime);
        let mut trusts = Vec::new();
        for team in TEAMS {
            for bucket in buckets {
                add_team(&store, team, bucket);
            }
            for account in [team, DOCUMENTED_ACCOUNT] {
                let (subject, role) = (subject("default", account), Some(role(team)));
                trusts.push(RoleTrust { subject, role, account: Account::named(team) });
            }
        }
        let api = api.to_owned();
        issuer.trust(Box::new(move |token| review(&api, token).inspect(|_| say_which(token))), &trusts);
        Ok(Self { store, issuer })
    }
}

/// For whom the API server issued a token, if it is valid for the issuer.
fn review(api: &Path, token: &str) -> Option<String> {
    let review = json!({
        "apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
        "spec": { "token": token, "audiences": [AUDIENCE] },
    });
    let answer = http::post_over(api, "/apis/authentication.k8s.io/v1/tokenreviews", &review.to_string()).ok()?;
    let review: Value = serde_json::from_str(&answer.body).ok()?;
    let is_valid = answer.status == 201 && review["status"]["authenticated"] == true;
    review["status"]["user"]["username"].as_str().filter(|_| is_valid).map(str::to_owned)
}
