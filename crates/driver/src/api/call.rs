//! One call of the API server, with a deadline and a typed error.

use std::time::Duration;

use kube::core::Status;

/// The API server answers in milliseconds if at all; its own deadline for a request is a minute.
const DEADLINE: Duration = Duration::from_secs(30);

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    #[error("the API server rejected the request: {}", status.message)]
    Refused { status: Box<Status> },

    #[error("the API server is not reachable")]
    Unreachable {
        #[source]
        cause: kube::Error,
    },

    #[error("the API server did not answer within {DEADLINE:?}")]
    Deadline,
}

pub async fn call<T>(request: impl Future<Output = kube::Result<T>>) -> Result<T, CallError> {
    match tokio::time::timeout(DEADLINE, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(kube::Error::Api(status))) => Err(CallError::Refused { status }),
        Ok(Err(cause)) => Err(CallError::Unreachable { cause }),
        Err(_) => Err(CallError::Deadline),
    }
}

impl CallError {
    pub fn is_not_found(&self) -> bool {
        self.code() == Some(404)
    }

    /// A conflict: the object has another version or UID, or exists already.
    pub fn is_lost_race(&self) -> bool {
        self.code() == Some(409)
    }

    pub fn is_already_exists(&self) -> bool {
        matches!(self, Self::Refused { status } if status.reason == "AlreadyExists")
    }

    /// Nothing can be created in a namespace that is being deleted.
    pub fn is_namespace_terminating(&self) -> bool {
        let Self::Refused { status } = self else {
            return false;
        };
        let causes = status.details.iter().flat_map(|it| &it.causes);
        status.code == 403 && causes.into_iter().any(|it| it.reason == "NamespaceTerminating")
    }

    /// Most often a selector that this API server does not support.
    pub fn is_bad_request(&self) -> bool {
        self.code() == Some(400)
    }

    /// The resource version is older than the API server's history.
    pub fn is_expired(&self) -> bool {
        self.code() == Some(410)
    }

    fn code(&self) -> Option<u16> {
        match self {
            Self::Refused { status } => Some(status.code),
            Self::Unreachable { .. } | Self::Deadline => None,
        }
    }
}
