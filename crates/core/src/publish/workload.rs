//! `authenticationSource: pod`: the identity of the workload itself, as kubelet names and proves it.

use std::collections::BTreeMap;
use std::fmt;

use super::{InvalidPublish, context};
use crate::role::RoleArn;
use crate::secret::Secret;

/// Who a workload is. The proof is kubelet's: a token of the service account for each audience that the `CSIDriver` object lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkloadIdentity {
    pub namespace: String,
    pub service_account: String,
    /// JSON by audience, as kubelet sends it.
    pub tokens: Secret<String>,
    /// The role that the volume names.
    pub role: Option<RoleArn>,
}

/// What a workload's token is exchanged for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Grant {
    /// Keys of a role, from the security token service.
    Role(RoleArn),
    /// Whatever the agent for containers associates with the service account.
    Agent,
}

/// Why `authenticationSource: pod` cannot be honoured.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnusableToken {
    #[error(
        "set the chart value podIdentity.enabled, so that kubelet sends a token of the Pod's service account with each call"
    )]
    Missing,

    #[error(
        "kubelet must name the Pod's namespace and service account: podInfoOnMount of the CSIDriver object must be true"
    )]
    Unnamed,
}

/// Moves the tokens that kubelet sent among the attributes to the secrets, where nothing prints them. Tokens among the secrets win:
/// kubelet alone writes them there, whereas an author of volumes may write any attribute.
pub fn guard_tokens(volume_context: &mut BTreeMap<String, String>, secrets: &mut BTreeMap<String, Secret<String>>) {
    if let Some(tokens) = volume_context.remove(context::SERVICE_ACCOUNT_TOKENS) {
        secrets.entry(context::SERVICE_ACCOUNT_TOKENS.to_owned()).or_insert(Secret::new(tokens));
    }
}

impl WorkloadIdentity {
    pub(super) fn parse(
        volume_context: &BTreeMap<String, String>,
        secrets: &BTreeMap<String, Secret<String>>,
    ) -> Result<Self, InvalidPublish> {
        let unusable = |cause| InvalidPublish::Token { cause };
        let attribute = |key: &str| volume_context.get(key).filter(|it| !it.is_empty()).cloned();
        let role = parse_role(attribute(context::ROLE_ARN).as_deref())?;
        let tokens = secrets.get(context::SERVICE_ACCOUNT_TOKENS).filter(|it| !it.expose().is_empty());
        let tokens = tokens.cloned().ok_or(unusable(UnusableToken::Missing))?;
        let named = attribute(context::POD_NAMESPACE).zip(attribute(context::SERVICE_ACCOUNT_NAME));
        let (namespace, service_account) = named.ok_or(unusable(UnusableToken::Unnamed))?;
        Ok(Self { namespace, service_account, tokens, role })
    }
}

/// `namespace/service account`, as messages name it.
impl fmt::Display for WorkloadIdentity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { namespace, service_account, .. } = self;
        write!(formatter, "{namespace}/{service_account}")
    }
}

impl Grant {
    /// The role of the service account is the word of the namespace's owner: a volume cannot replace it, only fill its absence. The
    /// driver's default comes last, and the agent is asked only where no role is named. `None`: nothing says what to ask for.
    pub fn choose(
        service_account: Option<RoleArn>,
        volume: Option<&RoleArn>,
        default: Option<&RoleArn>,
        has_agent: bool,
    ) -> Option<Self> {
        let role = service_account.or_else(|| volume.cloned()).or_else(|| default.cloned());
        role.map(Self::Role).or_else(|| has_agent.then_some(Self::Agent))
    }
}

pub(crate) fn parse_role(text: Option<&str>) -> Result<Option<RoleArn>, InvalidPublish> {
    text.map(str::parse).transpose().map_err(|cause| InvalidPublish::RoleArn { cause })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_never_replaces_the_role_of_the_service_account() {
        let role = |name: &str| format!("arn:aws:iam::1:role/{name}").parse::<RoleArn>().unwrap();
        let (account, volume, default) = (role("account"), role("volume"), role("default"));
        let check = |it: [bool; 4], expected: Option<Grant>| {
            let [has_account, has_volume, has_default, has_agent] = it;
            let chosen = Grant::choose(
                has_account.then(|| account.clone()),
                has_volume.then_some(&volume),
                has_default.then_some(&default),
                has_agent,
            );
            assert_eq!(chosen, expected, "{it:?}");
        };
        for others in 0..8_u8 {
            let [second, third, agent] = [1, 2, 4].map(|bit| others & bit != 0);
            check([true, second, third, agent], Some(Grant::Role(account.clone())));
            check([false, true, third, agent], Some(Grant::Role(volume.clone())));
            check([false, false, true, agent], Some(Grant::Role(default.clone())));
        }
        check([false, false, false, true], Some(Grant::Agent));
        check([false; 4], None);
    }

    #[test]
    fn tokens_among_the_secrets_win_and_none_stays_among_the_attributes() {
        let check = |secret: Option<&str>, attribute: Option<&str>, expected: Option<&str>| {
            let key = context::SERVICE_ACCOUNT_TOKENS.to_owned();
            let mut secrets: BTreeMap<_, _> =
                secret.iter().map(|it| (key.clone(), Secret::new((*it).to_owned()))).collect();
            let mut attributes: BTreeMap<_, _> = attribute.iter().map(|it| (key.clone(), (*it).to_owned())).collect();
            guard_tokens(&mut attributes, &mut secrets);
            assert!(attributes.is_empty());
            assert_eq!(secrets.get(&key).map(|it| it.expose().as_str()), expected);
        };
        check(None, None, None);
        check(None, Some("attribute"), Some("attribute"));
        check(Some("secret"), None, Some("secret"));
        check(Some("secret"), Some("attribute"), Some("secret"));
    }
}
