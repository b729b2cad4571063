//! Whose keys a volume is mounted with.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::workload::WorkloadIdentity;
use super::{InvalidPublish, context};
use crate::credentials::{InvalidKeys, Keys};
use crate::secret::Secret;

/// The attribute `authenticationSource`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AuthenticationSource {
    Driver,
    Secret,
    Pod,
}

/// The keys that the engine uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Identity {
    Driver,
    Secret(Keys),
    /// The workload's own: keys that are issued for its service account.
    Workload(WorkloadIdentity),
}

/// Where a volume that says `authenticationSource: secret` and names no Secret uses the driver's keys. Earlier drivers provisioned such
/// volumes, which cannot be changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SecretFallback {
    namespaces: BTreeSet<String>,
}

/// Why `authenticationSource: secret` cannot be honoured.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnusableSecret {
    #[error(
        "set spec.csi.nodePublishSecretRef of the PersistentVolume to a Secret with access_key_id and secret_access_key"
    )]
    Missing,

    #[error("correct the Secret that spec.csi.nodePublishSecretRef of the PersistentVolume names")]
    Invalid {
        #[source]
        cause: InvalidKeys,
    },
}

impl AuthenticationSource {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        [Self::Driver, Self::Secret, Self::Pod].into_iter().find(|it| it.as_str() == text)
    }

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Driver => "driver",
            Self::Secret => "secret",
            Self::Pod => "pod",
        }
    }
}

impl fmt::Display for AuthenticationSource {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

impl SecretFallback {
    pub fn in_namespaces(namespaces: impl IntoIterator<Item = String>) -> Self {
        Self { namespaces: namespaces.into_iter().filter(|it| !it.is_empty()).collect() }
    }

    /// Never for a volume of another store: the driver's keys are sent to the driver's store only.
    fn applies_to(&self, volume_context: &BTreeMap<String, String>) -> bool {
        let attribute = |key: &str| volume_context.get(key).filter(|it| !it.is_empty());
        attribute(context::ENDPOINT_URL).is_none()
            && attribute(context::POD_NAMESPACE).is_some_and(|it| self.namespaces.contains(it))
    }
}

impl Identity {
    /// Who the workload is, where that matters: namespace, service account and the role that the volume names.
    pub const fn workload(&self) -> Option<&WorkloadIdentity> {
        match self {
            Self::Driver | Self::Secret(_) => None,
            Self::Workload(workload) => Some(workload),
        }
    }

    pub const fn source(&self) -> AuthenticationSource {
        match self {
            Self::Driver => AuthenticationSource::Driver,
            Self::Secret(_) => AuthenticationSource::Secret,
            Self::Workload(_) => AuthenticationSource::Pod,
        }
    }
}

pub(crate) fn parse_source(text: Option<&str>) -> Result<AuthenticationSource, InvalidPublish> {
    let Some(text) = text else {
        return Ok(AuthenticationSource::Driver);
    };
    AuthenticationSource::parse(text).ok_or_else(|| InvalidPublish::AuthenticationSource { value: text.to_owned() })
}

/// The precedence: the volume says whose keys are used, and nothing stands in for keys that are missing, except
/// [`SecretFallback`].
pub(super) fn parse_identity(
    source: AuthenticationSource,
    volume_context: &BTreeMap<String, String>,
    secrets: &BTreeMap<String, Secret<String>>,
    fallback: &SecretFallback,
) -> Result<Identity, InvalidPublish> {
    // kubelet sends tokens to drivers that ask for them with every call, whatever the volume says.
    let has_secret = secrets.keys().any(|it| it != context::SERVICE_ACCOUNT_TOKENS);
    let unusable = |cause| InvalidPublish::Credentials { cause };
    match source {
        AuthenticationSource::Driver => Ok(Identity::Driver),
        AuthenticationSource::Secret if has_secret => Keys::from_secret(secrets)
            .map(Identity::Secret)
            .map_err(|cause| unusable(UnusableSecret::Invalid { cause })),
        AuthenticationSource::Secret if fallback.applies_to(volume_context) => Ok(Identity::Driver),
        AuthenticationSource::Secret => Err(unusable(UnusableSecret::Missing)),
        AuthenticationSource::Pod => WorkloadIdentity::parse(volume_context, secrets).map(Identity::Workload),
    }
}
