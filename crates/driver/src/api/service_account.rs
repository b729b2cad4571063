//! The roles that service accounts name. Only single objects are read, by name.

use k8s_openapi::api::core::v1::ServiceAccount;
use kube::{Api, Client};

use super::call::{CallError, call};

/// The annotation that AWS's tools use for it.
pub const ROLE_ANNOTATION: &str = "eks.amazonaws.com/role-arn";

/// Reads service accounts of any namespace.
#[derive(Clone)]
pub struct ServiceAccounts {
    client: Client,
}

impl ServiceAccounts {
    pub const fn new(client: Client) -> Self {
        Self { client }
    }

    /// The role of a service account; `None` if it names none or does not exist any more.
    pub async fn role(&self, namespace: &str, name: &str) -> Result<Option<String>, CallError> {
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), namespace);
        let account = call(accounts.get_metadata_opt(name)).await?;
        let annotations = account.and_then(|it| it.metadata.annotations).unwrap_or_default();
        Ok(annotations.get(ROLE_ANNOTATION).filter(|it| !it.is_empty()).cloned())
    }
}
