//! `authenticationSource: pod`: the token of a workload's service account is exchanged for temporary keys.
//!
//! kubelet repeats each publish about every minute with tokens that are valid, so there is no background task: the keys are renewed by the
//! call that comes when it is time. Workloads with the same identity use the same keys.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use parking_lot::Mutex;
use s3csi_core::publish::{Grant, WorkloadIdentity};
use s3csi_core::role::{InvalidRoleArn, RoleArn};
use s3csi_core::secret::Secret;
use serde::Deserialize;

use super::issued::IssuedKeys;
use super::issuer::{
    CONTAINER_AGENT, IssuerError, SECURITY_TOKEN_SERVICE, SecurityTokenService, TemporaryKeys, ask_container_agent,
};
use crate::api::call::CallError;
use crate::api::{ROLE_ANNOTATION, ServiceAccounts};

/// The limit of STS for the name of a session.
const LONGEST_SESSION_NAME: usize = 64;

/// Who exchanges tokens for keys.
#[derive(Clone)]
pub struct PodIdentitySettings {
    pub sts: SecurityTokenService,
    /// For whom the tokens that STS gets are meant.
    pub audience: String,
    /// Where neither service account nor volume name a role.
    pub default_role: Option<RoleArn>,
    /// Where no role is named at all.
    pub agent: Option<AgentSettings>,
    /// Reads the roles of service accounts. `None`: only volumes and the default name roles.
    pub service_accounts: Option<ServiceAccounts>,
}

/// The agent for containers, such as that of EKS Pod Identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentSettings {
    pub url: String,
    pub audience: String,
}

/// The keys of all workloads on this node.
pub struct WorkloadCredentials {
    /// `None`: tokens of workloads are not exchanged.
    settings: Option<PodIdentitySettings>,
    holders: Mutex<BTreeMap<Holder, HolderState>>,
}

/// Whose keys they are.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Holder {
    namespace: String,
    service_account: String,
    /// The role that the volume names.
    role: Option<RoleArn>,
}

#[derive(Clone, Default)]
struct HolderState {
    issued: Arc<IssuedKeys<WorkloadCredentialsError>>,
    expires: Option<SystemTime>,
}

/// Why a workload gets no keys of its own. Never shows a token.
#[derive(Debug, thiserror::Error)]
pub enum WorkloadCredentialsError {
    #[error("tokens of Pods are not exchanged: set the chart value podIdentity.enabled")]
    Disabled,

    #[error("kubelet's tokens are not the JSON that the CSI documentation of Kubernetes describes")]
    Malformed,

    #[error("kubelet sent no token for the audience {audience:?}: tokenRequests of the CSIDriver object must list it")]
    NoToken { audience: String },

    #[error("the token is not that of service account {service_account}")]
    OtherSubject { service_account: String },

    #[error("failed to read service account {service_account}")]
    ServiceAccount {
        service_account: String,
        #[source]
        cause: CallError,
    },

    #[error("correct the annotation {ROLE_ANNOTATION} of service account {service_account}")]
    Annotation {
        service_account: String,
        #[source]
        cause: InvalidRoleArn,
    },

    #[error(
        "no role is named: set the annotation {ROLE_ANNOTATION} of service account {service_account}, the volume attribute \
         roleArn, or the chart value podIdentity.roleArn"
    )]
    NoRole { service_account: String },

    #[error("{issuer} issues no keys for service account {service_account}")]
    Issuer {
        issuer: &'static str,
        service_account: String,
        #[source]
        cause: IssuerError,
    },
}

/// One of the tokens that kubelet sends.
#[derive(Deserialize)]
struct TokenJson {
    token: String,
}

/// The part of a token that names its service account. The issuer checks the signature.
#[derive(Deserialize)]
struct Claims {
    sub: String,
}

impl WorkloadCredentials {
    pub fn new(settings: Option<PodIdentitySettings>) -> Self {
        Self { settings, holders: Mutex::default() }
    }

    /// The keys of a workload as they are now. Keys that were issued stay in use until they expire, even if no new ones are issued.
    pub async fn current(&self, workload: &WorkloadIdentity) -> Result<TemporaryKeys, Arc<WorkloadCredentialsError>> {
        let settings = self.settings.as_ref().ok_or(WorkloadCredentialsError::Disabled)?;
        let holder = Holder::of(workload);
        let issued = {
            let mut holders = self.holders.lock();
            if !holders.contains_key(&holder) {
                holders.retain(|_, it| it.issued.is_needed());
            }
            holders.entry(holder.clone()).or_default().issued.clone()
        };
        let keys = issued.current(&workload.to_string(), Box::pin(settings.exchange(workload))).await?;
        let expires = Some(keys.expires);
        self.holders.lock().insert(holder, HolderState { issued, expires });
        Ok(keys)
    }

    /// When the keys of a workload expire that it got last.
    pub fn expiry(&self, workload: &WorkloadIdentity) -> Option<SystemTime> {
        self.holders.lock().get(&Holder::of(workload))?.expires
    }
}

impl PodIdentitySettings {
    async fn exchange(&self, workload: &WorkloadIdentity) -> Result<TemporaryKeys, WorkloadCredentialsError> {
        let service_account = || workload.to_string();
        let annotated = match &self.service_accounts {
            None => None,
            Some(accounts) => {
                let read = accounts.role(&workload.namespace, &workload.service_account).await;
                let failed =
                    |cause| WorkloadCredentialsError::ServiceAccount { service_account: service_account(), cause };
                let invalid =
                    |cause| WorkloadCredentialsError::Annotation { service_account: service_account(), cause };
                read.map_err(failed)?.map(|it| it.parse().map_err(invalid)).transpose()?
            }
        };
        let grant = Grant::choose(annotated, workload.role.as_ref(), self.default_role.as_ref(), self.agent.is_some());
        let (issuer, answer) = match (grant, &self.agent) {
            (Some(Grant::Role(role)), _) => {
                let token = token(workload, &self.audience)?;
                let session = session_name(workload);
                (SECURITY_TOKEN_SERVICE, self.sts.assume_role(role.as_str(), &session, &token).await)
            }
            (Some(Grant::Agent), Some(AgentSettings { url, audience })) => {
                let token = token(workload, audience)?;
                (CONTAINER_AGENT, ask_container_agent(url, Some(&token)).await)
            }
            (Some(Grant::Agent) | None, _) => {
                return Err(WorkloadCredentialsError::NoRole { service_account: service_account() });
            }
        };
        let failed = |cause| WorkloadCredentialsError::Issuer { issuer, service_account: service_account(), cause };
        answer.map_err(failed)
    }
}

impl Holder {
    fn of(workload: &WorkloadIdentity) -> Self {
        let WorkloadIdentity { namespace, service_account, tokens: _, role } = workload.clone();
        Self { namespace, service_account, role }
    }
}

/// In the log of STS.
fn session_name(workload: &WorkloadIdentity) -> String {
    let is_allowed = |it: &char| it.is_ascii_alphanumeric() || "+=,.@_-".contains(*it);
    let name = format!("{}@{}", workload.service_account, workload.namespace);
    name.chars().filter(is_allowed).take(LONGEST_SESSION_NAME).collect()
}

/// The token for an audience, if it is one of the service account that kubelet names.
fn token(workload: &WorkloadIdentity, audience: &str) -> Result<Secret<String>, WorkloadCredentialsError> {
    let tokens: BTreeMap<String, TokenJson> =
        serde_json::from_str(workload.tokens.expose()).map_err(|_| WorkloadCredentialsError::Malformed)?;
    let missing = || WorkloadCredentialsError::NoToken { audience: audience.to_owned() };
    let TokenJson { token } = tokens.get(audience).ok_or_else(missing)?;
    let is_line = !token.is_empty() && token.chars().all(|it| it.is_ascii_graphic());
    let subject = subject(token).filter(|_| is_line).ok_or(WorkloadCredentialsError::Malformed)?;
    let expected = format!("system:serviceaccount:{}:{}", workload.namespace, workload.service_account);
    if subject != expected {
        return Err(WorkloadCredentialsError::OtherSubject { service_account: workload.to_string() });
    }
    Ok(Secret::new(token.clone()))
}

/// For whom a token was issued. A volume could bring a token among its attributes where kubelet adds none: it must not be taken for the
/// workload's.
fn subject(token: &str) -> Option<String> {
    let claims = URL_SAFE_NO_PAD.decode(token.split('.').nth(1)?).ok()?;
    serde_json::from_slice(&claims).ok().map(|Claims { sub }| sub)
}

#[cfg(test)]
mod tests {
    use s3csi_core::chain::Chain;

    use super::*;

    fn jwt(subject: &str) -> String {
        let encode = |it: String| URL_SAFE_NO_PAD.encode(it);
        format!("{}.{}.c2lnbmF0dXJl", encode("{}".to_owned()), encode(format!(r#"{{"sub":"{subject}"}}"#)))
    }

    fn workload(tokens: &str) -> WorkloadIdentity {
        WorkloadIdentity {
            namespace: "team".to_owned(),
            service_account: "robot".to_owned(),
            tokens: Secret::new(tokens.to_owned()),
            role: None,
        }
    }

    #[track_caller]
    fn check(tokens: &str, expected: Result<&str, &str>) {
        let found = token(&workload(tokens), "sts").map(|it| it.expose().clone()).map_err(|it| Chain(&it).to_string());
        assert_eq!(found.as_deref().map_err(String::as_str), expected);
    }

    #[test]
    fn the_token_of_the_audience_and_the_service_account_is_used() {
        let ours = jwt("system:serviceaccount:team:robot");
        let other = jwt("system:serviceaccount:team:admin");
        let sent = |audience: &str, token: &str| {
            format!(r#"{{"{audience}":{{"token":"{token}","expirationTimestamp":"2030-01-01T00:00:00Z"}}}}"#)
        };
        check(&sent("sts", &ours), Ok(&ours));
        check(
            &sent("other", &ours),
            Err("kubelet sent no token for the audience \"sts\": tokenRequests of the CSIDriver object must list it"),
        );
        check(&sent("sts", &other), Err("the token is not that of service account team/robot"));
        let malformed = "kubelet's tokens are not the JSON that the CSI documentation of Kubernetes describes";
        for tokens in ["", "[]", r#"{"sts":"token"}"#, &sent("sts", ""), &sent("sts", "a b"), &sent("sts", "a.b.c")] {
            check(tokens, Err(malformed));
        }
    }

    #[test]
    fn session_names_are_what_sts_accepts() {
        assert_eq!(session_name(&workload("")), "robot@team");
        let long = WorkloadIdentity { service_account: "a".repeat(100), ..workload("") };
        assert_eq!(session_name(&long).len(), 64);
    }

    #[tokio::test]
    async fn tokens_are_not_exchanged_unless_that_is_enabled() {
        let error = WorkloadCredentials::new(None).current(&workload("{}")).await.unwrap_err();
        assert!(matches!(*error, WorkloadCredentialsError::Disabled));
    }
}
