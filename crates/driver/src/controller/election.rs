//! Who works, if several controllers run: whoever holds the Lease.
//!
//! Every write is a compare-and-swap. Nobody compares clocks: a Lease is free when the one who watches it has seen no
//! change for as long as it lasts, by its own clock.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};
use s3csi_core::Chain;
use tokio::time::Instant;

use super::watch::Pulse;
use crate::api::call::{CallError, call};

/// Which Lease, and who we are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidacy {
    pub namespace: String,
    pub lease: String,
    /// Of this process, different for each.
    pub identity: String,
    /// How long a Lease lasts that nobody renews.
    pub duration: Duration,
}

pub struct Election {
    api: Api<Lease>,
    candidacy: Candidacy,
    /// The last state of the Lease that was seen, and since when it is so.
    seen: Option<(String, Instant)>,
}

#[derive(Debug, thiserror::Error)]
enum ElectionError {
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

impl Election {
    pub fn new(client: Client, candidacy: Candidacy) -> Self {
        Self { api: Api::namespaced(client, &candidacy.namespace), candidacy, seen: None }
    }

    /// Returns once we hold the Lease.
    pub async fn win(&mut self, pulse: &Pulse) {
        loop {
            pulse.beat(Instant::now());
            match self.try_to_hold().await {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) => tracing::warn!(error = %Chain(&error), "not elected, trying again"),
            }
            tokio::time::sleep(self.retry()).await;
        }
    }

    /// Returns when we may no longer believe that we hold the Lease.
    pub async fn hold(&mut self, pulse: &Pulse) {
        let mut renewed = Instant::now();
        loop {
            tokio::time::sleep(self.retry()).await;
            let asked = Instant::now();
            // Whoever waits for us to fail counts the whole duration; we stop well before.
            let deadline = renewed + self.candidacy.duration * 2 / 3;
            match tokio::time::timeout_at(deadline, self.try_to_hold()).await {
                Ok(Ok(true)) => {
                    renewed = asked;
                    pulse.beat(Instant::now());
                }
                Ok(Err(error)) => tracing::warn!(error = %Chain(&error), "Lease not renewed, trying again"),
                Ok(Ok(false)) | Err(_) => return,
            }
        }
    }

    /// Gives the Lease back, so that nobody has to wait for its end.
    pub async fn resign(&self) {
        let Ok(mut lease) = call(self.api.get(&self.candidacy.lease)).await else {
            return;
        };
        let spec = lease.spec.get_or_insert_default();
        if spec.holder_identity.as_ref() != Some(&self.candidacy.identity) {
            return;
        }
        spec.holder_identity = None;
        spec.lease_duration_seconds = Some(1);
        if let Err(error) = call(self.api.replace(&self.candidacy.lease, &PostParams::default(), &lease)).await {
            tracing::debug!(error = %Chain(&error), "Lease not given back, it will end by itself");
        }
    }

    /// Whether we hold it now.
    async fn try_to_hold(&mut self) -> Result<bool, ElectionError> {
        let name = self.candidacy.lease.clone();
        let lease = match call(self.api.get(&name)).await {
            Ok(lease) => lease,
            Err(cause) if cause.is_not_found() => {
                let lease = Lease {
                    metadata: ObjectMeta { name: Some(name), ..ObjectMeta::default() },
                    spec: Some(self.terms(&LeaseSpec::default())),
                };
                return written(call(self.api.create(&PostParams::default(), &lease)).await);
            }
            Err(cause) => return Err(ElectionError::Read { cause }),
        };
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.as_deref().filter(|it| !it.is_empty());
        let is_ours = holder == Some(&self.candidacy.identity);
        if !is_ours && holder.is_some() && !self.has_ended(&lease, &spec) {
            return Ok(false);
        }
        let lease = Lease { spec: Some(self.terms(&spec)), ..lease };
        written(call(self.api.replace(&name, &PostParams::default(), &lease)).await)
    }

    /// Whether nobody has renewed it for as long as it lasts.
    fn has_ended(&mut self, lease: &Lease, spec: &LeaseSpec) -> bool {
        let version = lease.metadata.resource_version.clone().unwrap_or_default();
        let since = match &self.seen {
            Some((seen, since)) if *seen == version => *since,
            Some(_) | None => {
                let now = Instant::now();
                self.seen = Some((version, now));
                now
            }
        };
        let seconds = spec.lease_duration_seconds.and_then(|it| u64::try_from(it).ok());
        seconds.map_or(self.candidacy.duration, Duration::from_secs) <= since.elapsed()
    }

    fn terms(&self, last: &LeaseSpec) -> LeaseSpec {
        let now = MicroTime(Timestamp::now());
        let is_ours = last.holder_identity.as_ref() == Some(&self.candidacy.identity);
        let transitions = last.lease_transitions.unwrap_or_default();
        LeaseSpec {
            holder_identity: Some(self.candidacy.identity.clone()),
            lease_duration_seconds: i32::try_from(self.candidacy.duration.as_secs().max(1)).ok(),
            acquire_time: if is_ours { last.acquire_time.clone() } else { Some(now.clone()) },
            renew_time: Some(now),
            lease_transitions: Some(if is_ours { transitions } else { transitions.saturating_add(1) }),
            ..last.clone()
        }
    }

    fn retry(&self) -> Duration {
        self.candidacy.duration / 6
    }
}

fn written(outcome: Result<Lease, CallError>) -> Result<bool, ElectionError> {
    match outcome {
        Ok(_) => Ok(true),
        Err(cause) if cause.is_lost_race() => Ok(false),
        Err(cause) => Err(ElectionError::Write { cause }),
    }
}
