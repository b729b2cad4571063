//! How many calls may occupy a thread at once, in total and per tenant. Waiting for room costs no thread, so calls of one tenant
//! whose mounters do not answer delay neither those of others nor any unpublish.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;

/// Half of tokio's blocking pool; the rest is for sweeps, recovery and metrics. A node runs 110 Pods by default.
const PUBLISHES: usize = 256;

/// A namespace with more volumes that start at once than this waits for its own.
const PUBLISHES_PER_NAMESPACE: usize = 64;

/// Each has a thread of its own, outside of the pool.
const UNPUBLISHES: usize = 128;

#[derive(Debug)]
pub struct Admission {
    publishes: Arc<Semaphore>,
    unpublishes: Arc<Semaphore>,
    namespaces: Mutex<HashMap<String, Arc<Semaphore>>>,
}

/// Room for one call; given back when dropped.
#[derive(Debug)]
#[must_use = "the room is given back when this is dropped"]
pub struct Admitted {
    _permits: Vec<OwnedSemaphorePermit>,
}

impl Default for Admission {
    fn default() -> Self {
        Self {
            publishes: Arc::new(Semaphore::new(PUBLISHES)),
            unpublishes: Arc::new(Semaphore::new(UNPUBLISHES)),
            namespaces: Mutex::default(),
        }
    }
}

impl Admission {
    /// Room for a publish of a workload in this namespace.
    pub async fn publish(&self, namespace: &str, deadline: Instant) -> Result<Admitted, Status> {
        let tenant = self.tenant(namespace);
        // The tenant's own room comes first: who waits for it holds nothing that others need.
        let own = acquire(tenant, deadline).await.ok_or_else(|| {
            Status::unavailable(format!(
                "{PUBLISHES_PER_NAMESPACE} volumes of namespace {namespace:?} are being published on this node and have not \
                 finished; kubelet will retry"
            ))
        })?;
        let shared = acquire(self.publishes.clone(), deadline).await.ok_or_else(|| {
            Status::unavailable(format!("{PUBLISHES} volumes are being published on this node; kubelet will retry"))
        })?;
        Ok(Admitted { _permits: vec![own, shared] })
    }

    pub async fn unpublish(&self, deadline: Instant) -> Result<Admitted, Status> {
        let room = acquire(self.unpublishes.clone(), deadline).await.ok_or_else(|| {
            Status::unavailable(format!("{UNPUBLISHES} volumes are being unpublished on this node; kubelet will retry"))
        })?;
        Ok(Admitted { _permits: vec![room] })
    }

    fn tenant(&self, namespace: &str) -> Arc<Semaphore> {
        let mut namespaces = self.namespaces.lock();
        // A semaphore that only this map refers to has neither permits in use nor waiting calls.
        namespaces.retain(|_, it| Arc::strong_count(it) > 1);
        let room = || Arc::new(Semaphore::new(PUBLISHES_PER_NAMESPACE));
        namespaces.entry(namespace.to_owned()).or_insert_with(room).clone()
    }
}

async fn acquire(room: Arc<Semaphore>, deadline: Instant) -> Option<OwnedSemaphorePermit> {
    tokio::time::timeout_at(deadline.into(), room.acquire_owned()).await.ok()?.ok()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(20)
    }

    #[tokio::test]
    async fn one_namespace_cannot_take_the_room_of_others_or_of_any_unpublish() {
        let admission = Admission::default();
        let mut held = Vec::new();
        for _ in 0..PUBLISHES_PER_NAMESPACE {
            held.push(admission.publish("greedy", soon()).await.unwrap());
        }
        let error = admission.publish("greedy", soon()).await.unwrap_err();
        assert!(error.message().contains("namespace \"greedy\""), "{error}");
        let _other = admission.publish("modest", soon()).await.unwrap();
        let _unpublish = admission.unpublish(soon()).await.unwrap();

        held.pop();
        held.push(admission.publish("greedy", soon()).await.unwrap());
        drop(held);
        assert!(admission.namespaces.lock().contains_key("greedy"));
        let _again = admission.publish("modest", soon()).await.unwrap();
        assert!(!admission.namespaces.lock().contains_key("greedy"), "an idle namespace is forgotten");
    }

    #[tokio::test]
    async fn with_all_room_for_publishes_taken_an_unpublish_still_has_its_own() {
        let admission = Admission::default();
        let mut held = Vec::new();
        for number in 0..PUBLISHES {
            held.push(admission.publish(&format!("team-{}", number / 8), soon()).await.unwrap());
        }
        assert!(admission.publish("late", soon()).await.is_err());
        assert!(admission.unpublish(soon()).await.is_ok());
    }
}
