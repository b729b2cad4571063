//! The two watches that fill the cache. They run for the life of the plugin and survive outages of the API server.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt as _};

use super::Assignments;
use super::facts::{Cached, Facts, read_pod};
use crate::api::watch::{FieldSelector, Heartbeat, Watch, WatchHandler, WatchUpdate};
use crate::api::{MountpointS3PodAttachment, attachment_facts, attachments};

impl Assignments {
    pub async fn watch_forever(self: Arc<Self>) {
        tokio::join!(self.watch_attachments(), self.watch_pods());
    }

    async fn watch_attachments(&self) {
        let node = &self.scope.node;
        let heartbeat = Heartbeat::new("attachments");
        let api = attachments(self.client.clone(), &self.scope.driver_name);
        let selector = FieldSelector::IfSupported(format!("spec.nodeName={node}"));
        // Filtered again: an API server without selectable fields sends those of all nodes.
        let read = |it: &MountpointS3PodAttachment| {
            Some((it.name_any(), attachment_facts(it).filter(|it| it.fields.node == *node)))
        };
        let handler = CacheWriter { assignments: self, cached: |facts: &mut Facts| &mut facts.attachments };
        Watch { api, selector, heartbeat: &heartbeat }.run(read, handler).await;
    }

    async fn watch_pods(&self) {
        let node = &self.scope.node;
        let heartbeat = Heartbeat::new("Mountpoint Pods");
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &self.scope.namespace);
        let selector = FieldSelector::Required(format!("spec.nodeName={node}"));
        let read = |it: &Pod| Some((it.name_any(), read_pod(it, &self.scope.driver_name)));
        let handler = CacheWriter { assignments: self, cached: |facts: &mut Facts| &mut facts.pods };
        Watch { api, selector, heartbeat: &heartbeat }.run(read, handler).await;
    }
}

/// Writes what one watch reports into its part of the cache.
struct CacheWriter<'a, T> {
    assignments: &'a Assignments,
    cached: fn(&mut Facts) -> &mut Cached<T>,
}

/// An object without facts is of no interest (any more).
impl<T> WatchHandler<(String, Option<T>)> for CacheWriter<'_, T> {
    fn update(&mut self, update: WatchUpdate<(String, Option<T>)>) {
        let cached = self.cached;
        self.assignments.change(|facts| match update {
            WatchUpdate::Listed(objects) => {
                let known = objects.into_iter().filter_map(|(name, object)| Some((name, object?)));
                cached(facts).replace(known.collect());
            }
            WatchUpdate::Changed((name, Some(object))) => cached(facts).insert(name, object),
            WatchUpdate::Changed((name, None)) | WatchUpdate::Deleted((name, _)) => cached(facts).remove(&name),
        });
        self.assignments.request_sweep();
    }

    fn failed(&mut self, message: &str) {
        self.assignments.change(|facts| (self.cached)(facts).fail(message.to_owned()));
    }
}
