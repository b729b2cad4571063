//! Leader election: of several controllers the holder of the Lease works.
//!
//! Every write is a compare-and-swap. Clocks are not compared: a Lease has expired when an observer has seen no change for its
//! duration, by its own clock. kube has no leader election; the crates that add one compare the clocks of different machines.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};
use s3csi_core::Chain;
use tokio::time::Instant;

use crate::api::call::{CallError, call};
use crate::api::watch::Heartbeat;

/// The Lease, and our identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaderElectionConfig {
    pub namespace: String,
    pub lease: String,
    /// Unique for each process.
    pub identity: String,
    /// After this time without renewal the Lease has expired.
    pub duration: Duration,
}

pub struct LeaderElection {
    api: Api<Lease>,
    config: LeaderElectionConfig,
    /// The version of the Lease that was last observed, and since when.
    observed: Option<(String, Instant)>,
}

#[derive(Debug, thiserror::Error)]
enum LeaderElectionError {
    #[error("failed to read the Lease")]
    Read {
        #[source]
        cause: CallError,
    },

    #[error("failed to write the Lease")]
    Write {
        #[source]
        cause: CallError,
    },
}

impl LeaderElection {
    pub fn new(client: Client, config: LeaderElectionConfig) -> Self {
        Self { api: Api::namespaced(client, &config.namespace), config, observed: None }
    }

    /// Returns when we hold the Lease, with the time since when: other candidates may have observed it as soon as the call that
    /// wrote it began, however late the answer arrived.
    pub async fn acquire(&mut self, heartbeat: &Heartbeat) -> Instant {
        loop {
            let asked = Instant::now();
            heartbeat.beat(asked);
            match self.acquire_or_renew().await {
                Ok(true) if asked.elapsed() < self.trusted() => return asked,
                // Ours, but the answer took so long that it must be renewed first.
                Ok(true) => continue,
                Ok(false) => {}
                Err(error) => tracing::warn!(error = %Chain(&error), "failed to acquire the Lease, retrying"),
            }
            tokio::time::sleep(self.retry()).await;
        }
    }

    /// Returns when the Lease is lost, or could not be renewed for too long. `renewed` is the time since when it is ours.
    pub async fn renew(&mut self, heartbeat: &Heartbeat, mut renewed: Instant) {
        loop {
            tokio::time::sleep(self.retry()).await;
            let asked = Instant::now();
            let deadline = renewed + self.trusted();
            match tokio::time::timeout_at(deadline, self.acquire_or_renew()).await {
                Ok(Ok(true)) => {
                    renewed = asked;
                    heartbeat.beat(Instant::now());
                }
                Ok(Err(error)) => tracing::warn!(error = %Chain(&error), "failed to renew the Lease, retrying"),
                Ok(Ok(false)) | Err(_) => return,
            }
        }
    }

    /// Releases the Lease, so that the next leader need not wait until it expires.
    pub async fn release(&self) {
        let Ok(mut lease) = call(self.api.get(&self.config.lease)).await else {
            return;
        };
        let spec = lease.spec.get_or_insert_default();
        if spec.holder_identity.as_ref() != Some(&self.config.identity) {
            return;
        }
        spec.holder_identity = None;
        spec.lease_duration_seconds = Some(1);
        if let Err(error) = call(self.api.replace(&self.config.lease, &PostParams::default(), &lease)).await {
            tracing::debug!(error = %Chain(&error), "failed to release the Lease, it will expire");
        }
    }

    /// Whether we hold it now.
    async fn acquire_or_renew(&mut self) -> Result<bool, LeaderElectionError> {
        let name = self.config.lease.clone();
        let lease = match call(self.api.get(&name)).await {
            Ok(lease) => lease,
            Err(cause) if cause.is_not_found() => {
                let lease = Lease {
                    metadata: ObjectMeta { name: Some(name), ..ObjectMeta::default() },
                    spec: Some(self.renewed_spec(&LeaseSpec::default())),
                };
                return written(call(self.api.create(&PostParams::default(), &lease)).await);
            }
            Err(cause) => return Err(LeaderElectionError::Read { cause }),
        };
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.as_deref().filter(|it| !it.is_empty());
        let is_ours = holder == Some(&self.config.identity);
        if !is_ours && holder.is_some() && !self.has_expired(&lease, &spec) {
            return Ok(false);
        }
        let lease = Lease { spec: Some(self.renewed_spec(&spec)), ..lease };
        written(call(self.api.replace(&name, &PostParams::default(), &lease)).await)
    }

    /// Whether it was not renewed for its duration.
    fn has_expired(&mut self, lease: &Lease, spec: &LeaseSpec) -> bool {
        let version = lease.metadata.resource_version.clone().unwrap_or_default();
        let since = match &self.observed {
            Some((known, since)) if *known == version => *since,
            Some(_) | None => {
                let now = Instant::now();
                self.observed = Some((version, now));
                now
            }
        };
        let seconds = spec.lease_duration_seconds.and_then(|it| u64::try_from(it).ok());
        seconds.map_or(self.config.duration, Duration::from_secs) <= since.elapsed()
    }

    fn renewed_spec(&self, last: &LeaseSpec) -> LeaseSpec {
        let now = MicroTime(Timestamp::now());
        let is_ours = last.holder_identity.as_ref() == Some(&self.config.identity);
        let transitions = last.lease_transitions.unwrap_or_default();
        LeaseSpec {
            holder_identity: Some(self.config.identity.clone()),
            lease_duration_seconds: i32::try_from(self.config.duration.as_secs().max(1)).ok(),
            acquire_time: if is_ours { last.acquire_time.clone() } else { Some(now.clone()) },
            renew_time: Some(now),
            lease_transitions: Some(if is_ours { transitions } else { transitions.saturating_add(1) }),
            ..last.clone()
        }
    }

    /// How long we work without a renewal. Other candidates wait for the whole duration; we stop well before.
    fn trusted(&self) -> Duration {
        self.config.duration * 2 / 3
    }

    fn retry(&self) -> Duration {
        self.config.duration / 6
    }
}

fn written(outcome: Result<Lease, CallError>) -> Result<bool, LeaderElectionError> {
    match outcome {
        Ok(_) => Ok(true),
        Err(cause) if cause.is_lost_race() => Ok(false),
        Err(cause) => Err(LeaderElectionError::Write { cause }),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use http_body_util::Full;
    use hyper::body::Bytes;
    use hyper::{Method, Request, Response};
    use kube::client::Body;

    use super::*;

    const NEVER: Duration = Duration::from_hours(1);

    /// What the API server does with a request.
    #[derive(Clone, Copy)]
    enum ApiServer {
        /// There is no Lease yet, and one can be created.
        Creates,
        Silent,
    }

    /// An election against such a server, and when its requests arrived.
    fn election(server: ApiServer, duration: Duration) -> (LeaderElection, Arc<Mutex<Vec<Instant>>>) {
        let arrivals = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&arrivals);
        let answer = move |request: Request<Body>| {
            seen.lock().unwrap().push(Instant::now());
            let is_create = request.method() == Method::POST;
            async move {
                let (status, body) = match server {
                    ApiServer::Creates if is_create => (201, r#"{"metadata":{"name":"lease"}}"#),
                    ApiServer::Creates => {
                        (404, r#"{"kind":"Status","status":"Failure","reason":"NotFound","code":404}"#)
                    }
                    ApiServer::Silent => std::future::pending().await,
                };
                let body = Full::new(Bytes::from_static(body.as_bytes()));
                Response::builder().status(status).body(body)
            }
        };
        let config = LeaderElectionConfig {
            namespace: "default".to_owned(),
            lease: "lease".to_owned(),
            identity: "us".to_owned(),
            duration,
        };
        (LeaderElection::new(Client::new(tower::service_fn(answer), "default"), config), arrivals)
    }

    #[tokio::test]
    async fn the_lease_is_ours_since_the_winning_call_began() {
        let (mut election, arrivals) = election(ApiServer::Creates, NEVER);
        let since = election.acquire(&Heartbeat::new("election")).await;
        let arrivals = arrivals.lock().unwrap();
        assert_eq!(arrivals.len(), 2, "one to read, one to create");
        assert!(since <= arrivals[0], "trusted from {:?} after the call began", since - arrivals[0]);
    }

    #[tokio::test]
    async fn a_lease_that_cannot_be_renewed_is_trusted_for_two_thirds_since_it_was_won() {
        let duration = Duration::from_millis(600);
        let (mut election, _) = election(ApiServer::Silent, duration);
        let begin = Instant::now();
        election.renew(&Heartbeat::new("election"), begin).await;
        assert!(duration * 2 / 3 <= begin.elapsed(), "given up after {:?}", begin.elapsed());
        // Won by a call that took almost the whole duration.
        let begin = Instant::now();
        election.renew(&Heartbeat::new("election"), begin - duration).await;
        assert!(begin.elapsed() < duration * 2 / 3, "trusted for {:?} more", begin.elapsed());
    }
}
