//! When attachments and Mountpoint Pods were first seen, by watches of our own.

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Resource};
use s3csi_driver::api::{MountpointS3PodAttachment, attachment_facts, attachments};
use serde::de::DeserializeOwned;
use tokio::task::JoinHandle;

use s3csi_testbed::cluster::Administrator;

/// Dropping it ends the watches.
pub struct Observations {
    seen: Arc<Mutex<Seen>>,
    watches: [JoinHandle<()>; 2],
}

/// When a workload was seen to be served.
#[derive(Clone, Copy, Debug)]
pub struct ObservedTimes {
    pub attached: Instant,
    /// And the Mountpoint Pod is there.
    pub started: Instant,
}

#[derive(Default)]
struct Seen {
    /// By the workload's UID: when, and the Mountpoint Pod.
    attached: HashMap<String, (Instant, String)>,
    /// By name.
    pods: HashMap<String, Instant>,
}

impl Observations {
    /// Needs a runtime around it.
    pub fn watch(administrator: &Administrator, driver: &str, namespace: &str) -> Self {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let of_attachments = {
            let seen = seen.clone();
            follow(attachments(administrator.client().clone(), driver), move |it: &MountpointS3PodAttachment| {
                lock(&seen).attachment(it);
            })
        };
        let of_pods = {
            let seen = seen.clone();
            follow(administrator.pods(namespace), move |it: &Pod| {
                let name = it.metadata.name.clone().unwrap_or_default();
                lock(&seen).pods.entry(name).or_insert_with(Instant::now);
            })
        };
        Self { seen, watches: [of_attachments, of_pods] }
    }

    pub fn of(&self, workload: &str) -> Option<ObservedTimes> {
        lock(&self.seen).of(workload)
    }

    /// How many workloads have an attachment and a Mountpoint Pod.
    pub fn served(&self) -> usize {
        let seen = lock(&self.seen);
        seen.attached.values().filter(|(_, pod)| seen.pods.contains_key(pod)).count()
    }
}

impl Drop for Observations {
    fn drop(&mut self) {
        for watch in &self.watches {
            watch.abort();
        }
    }
}

impl Seen {
    fn attachment(&mut self, object: &MountpointS3PodAttachment) {
        let now = Instant::now();
        for (pod, entries) in attachment_facts(object).into_iter().flat_map(|it| it.entries) {
            for entry in entries {
                self.attached.entry(entry.workload.as_str().to_owned()).or_insert_with(|| (now, pod.clone()));
            }
        }
    }

    fn of(&self, workload: &str) -> Option<ObservedTimes> {
        let (attached, pod) = self.attached.get(workload)?;
        // Workloads that share a Mountpoint Pod find it there.
        Some(ObservedTimes { attached: *attached, started: *self.pods.get(pod)?.max(attached) })
    }
}

fn follow<K>(api: Api<K>, tell: impl Fn(&K) + Send + 'static) -> JoinHandle<()>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    tokio::spawn(async move {
        let mut events = std::pin::pin!(watcher::watcher(api, watcher::Config::default()));
        while let Some(event) = events.next().await {
            // After an error the watch relists.
            if let Ok(Event::Apply(object) | Event::InitApply(object)) = event {
                tell(&object);
            }
        }
    })
}

fn lock(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}
