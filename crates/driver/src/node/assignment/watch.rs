//! The two watches that feed the facts. They go on for ever: the API server may come and go, mounts stay.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Config, Event, watcher};
use kube::{Api, Resource, ResourceExt as _};
use s3csi_core::chain::Chain;
use serde::de::DeserializeOwned;

use super::Assignments;
use super::facts::{Facts, Known, read_pod};
use crate::api::{MountpointS3PodAttachment, attachment_facts, attachments};

/// An API server that does not know a field to select by answers this.
const BAD_REQUEST: u16 = 400;

impl Assignments {
    pub async fn watch_forever(self: Arc<Self>) {
        tokio::join!(self.watch_attachments(), self.watch_pods());
    }

    async fn watch_attachments(&self) {
        let node = &self.place.node;
        let api = attachments(self.client.clone(), &self.place.driver_name);
        // Selected twice: an API server without selectable fields shows those of all nodes.
        let read = |it: &MountpointS3PodAttachment| {
            let attachment = attachment_facts(it).filter(|it| it.fields.node == *node)?;
            Some((attachment.name.clone(), attachment))
        };
        self.follow(api, &format!("spec.nodeName={node}"), |facts| &mut facts.attachments, read).await;
    }

    async fn watch_pods(&self) {
        let node = &self.place.node;
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &self.place.namespace);
        let is_here = |it: &Pod| it.spec.as_ref().and_then(|it| it.node_name.as_ref()) == Some(node);
        let read = |it: &Pod| read_pod(it, &self.place.driver_name).filter(|_| is_here(it));
        self.follow(api, &format!("spec.nodeName={node}"), |facts| &mut facts.pods, read).await;
    }

    async fn follow<K, T>(
        &self,
        api: Api<K>,
        selector: &str,
        known: impl Fn(&mut Facts) -> &mut Known<T>,
        read: impl Fn(&K) -> Option<(String, T)>,
    ) where
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        let mut config = Config::default().fields(selector);
        loop {
            let mut events = std::pin::pin!(watcher(api.clone(), config.clone()).default_backoff());
            let mut listed = BTreeMap::new();
            while let Some(event) = events.next().await {
                if config.field_selector.is_some() && event.as_ref().is_err_and(is_selector_unknown) {
                    tracing::warn!(selector, "the API server cannot select by this field; watching all nodes instead");
                    config = Config::default();
                    break;
                }
                match event {
                    Ok(Event::Init) => listed.clear(),
                    Ok(Event::InitApply(object)) => listed.extend(read(&object)),
                    Ok(Event::InitDone) => {
                        let listed = std::mem::take(&mut listed);
                        self.change(|facts| known(facts).replace(listed));
                    }
                    Ok(Event::Apply(object)) => {
                        let (name, object) = (object.name_any(), read(&object));
                        self.change(|facts| match object {
                            Some((name, object)) => known(facts).insert(name, object),
                            None => known(facts).remove(&name),
                        });
                    }
                    Ok(Event::Delete(object)) => self.change(|facts| known(facts).remove(&object.name_any())),
                    Err(error) => {
                        let trouble = Chain(&error).to_string();
                        self.change(|facts| {
                            let known = known(facts);
                            tracing::warn!(kind = known.kind(), error = trouble, "the watch is interrupted");
                            known.fail(trouble);
                        });
                        continue;
                    }
                }
                self.wake();
            }
        }
    }
}

fn is_selector_unknown(error: &watcher::Error) -> bool {
    let (watcher::Error::InitialListFailed(kube::Error::Api(status))
    | watcher::Error::WatchStartFailed(kube::Error::Api(status))
    | watcher::Error::WatchError(status)) = error
    else {
        return false;
    };
    status.code == BAD_REQUEST
}
