//! Follows one kind of object: lists it, then watches it from there, for ever. What is told is facts, in order; objects are
//! turned into facts at once, so that at no time more than a page of them is in memory.
//!
//! Every answer of the API server is a heartbeat, also the bookmarks that it sends while nothing happens: so a watch that
//! hangs is noticed, by us and by whoever asks for our health.

use std::fmt::Debug;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

use futures::StreamExt as _;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::{Api, Resource, ResourceExt as _};
use s3csi_core::Chain;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use super::cache::News;
use crate::api::call::{CallError, call};

/// The API server ends a watch after this, and we ask anew: a connection that died without a word is noticed soon after.
const WATCH_SECONDS: u32 = 60;

/// A watch that is silent for longer than it may last is dead.
const LONGEST_SILENCE: Duration = Duration::from_secs(75);

const PAGE: u32 = 500;

const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// When a watch last tried, and when it last heard something.
#[derive(Debug)]
pub struct Pulse {
    name: &'static str,
    beats: Mutex<Beats>,
    has_listed: tokio::sync::watch::Sender<bool>,
}

#[derive(Clone, Copy, Debug)]
struct Beats {
    tried: Instant,
    heard: Option<Instant>,
}

/// Which objects are followed.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    pub fields: Option<String>,
}

#[derive(Debug, thiserror::Error)]
enum WatchError {
    #[error("failed to list them")]
    List {
        #[source]
        cause: CallError,
    },

    #[error("failed to start the watch")]
    Start {
        #[source]
        cause: CallError,
    },

    #[error("the watch broke")]
    Broken {
        #[source]
        cause: kube::Error,
    },

    #[error("the API server ended the watch: {message}")]
    Ended { message: String },

    #[error("the watch was silent for {LONGEST_SILENCE:?}")]
    Silent,
}

/// Never returns. `begin` is called before each list, `fact` drops what nobody asks for, `tell` is called for each change,
/// in order.
pub async fn follow<K, Fact>(
    api: Api<K>,
    selection: Selection,
    pulse: &Pulse,
    mut begin: impl FnMut(),
    fact: impl Fn(&K) -> Option<Fact>,
    mut tell: impl FnMut(News<Fact>),
) where
    K: Resource + Clone + Debug + DeserializeOwned + 'static,
{
    let mut version: Option<String> = None;
    let mut pause = FIRST_PAUSE;
    loop {
        pulse.try_again();
        let outcome = match &version {
            None => {
                begin();
                list(&api, &selection, pulse, &fact).await.map(|(facts, listed_at)| {
                    tell(News::All(facts));
                    pulse.listed();
                    Some(listed_at)
                })
            }
            Some(from) => watch(&api, &selection, pulse, &fact, &mut tell, from.clone()).await,
        };
        match outcome {
            Ok(next) => {
                version = next;
                pause = FIRST_PAUSE;
            }
            Err((error, next)) => {
                tracing::warn!(kind = pulse.name, error = %Chain(&error), "lost sight of the cluster, looking again");
                version = next;
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }
}

type Lost = (WatchError, Option<String>);

async fn list<K, Fact>(
    api: &Api<K>,
    selection: &Selection,
    pulse: &Pulse,
    fact: &impl Fn(&K) -> Option<Fact>,
) -> Result<(Vec<Fact>, String), Lost>
where
    K: Clone + Debug + DeserializeOwned,
{
    let mut facts = Vec::new();
    let mut parameters = ListParams::default().limit(PAGE);
    parameters.field_selector.clone_from(&selection.fields);
    loop {
        let page = call(api.list(&parameters)).await.map_err(|cause| (WatchError::List { cause }, None))?;
        pulse.hear();
        facts.extend(page.items.iter().filter_map(fact));
        match page.metadata.continue_.filter(|it| !it.is_empty()) {
            Some(token) => parameters.continue_token = Some(token),
            None => return Ok((facts, page.metadata.resource_version.unwrap_or_default())),
        }
    }
}

/// Returns the version to go on from, or nothing if everything must be listed again.
async fn watch<K, Fact>(
    api: &Api<K>,
    selection: &Selection,
    pulse: &Pulse,
    fact: &impl Fn(&K) -> Option<Fact>,
    tell: &mut impl FnMut(News<Fact>),
    mut version: String,
) -> Result<Option<String>, Lost>
where
    K: Resource + Clone + Debug + DeserializeOwned + 'static,
{
    let mut parameters = WatchParams::default().timeout(WATCH_SECONDS);
    parameters.field_selector.clone_from(&selection.fields);
    let stream = match call(api.watch(&parameters, &version)).await {
        Ok(stream) => stream,
        Err(cause) if cause.is_expired() => return Ok(None),
        Err(cause) => return Err((WatchError::Start { cause }, Some(version))),
    };
    pulse.hear();
    let mut stream = std::pin::pin!(stream);
    loop {
        let event = match tokio::time::timeout(LONGEST_SILENCE, stream.next()).await {
            Err(_) => return Err((WatchError::Silent, Some(version))),
            Ok(None) => return Ok(Some(version)),
            Ok(Some(Err(cause))) => return Err((WatchError::Broken { cause }, Some(version))),
            Ok(Some(Ok(event))) => event,
        };
        pulse.hear();
        match event {
            WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                version = object.resource_version().unwrap_or(version);
                fact(&object).map(News::Changed).map(&mut *tell);
            }
            WatchEvent::Deleted(object) => {
                version = object.resource_version().unwrap_or(version);
                fact(&object).map(News::Gone).map(&mut *tell);
            }
            WatchEvent::Bookmark(bookmark) => version = bookmark.metadata.resource_version,
            // Too old to go on from: everything is listed again.
            WatchEvent::Error(status) if status.code == 410 => return Ok(None),
            WatchEvent::Error(status) => {
                return Err((WatchError::Ended { message: status.message }, Some(version)));
            }
        }
    }
}

impl Pulse {
    pub fn new(name: &'static str) -> Self {
        Self {
            name,
            beats: Mutex::new(Beats { tried: Instant::now(), heard: None }),
            has_listed: tokio::sync::watch::Sender::new(false),
        }
    }

    /// As if it had just been made.
    pub fn reset(&self) {
        self.change(|it| *it = Beats { tried: Instant::now(), heard: None });
        self.has_listed.send_replace(false);
    }

    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Whether everything that existed when the watch began is known.
    pub fn has_listed(&self) -> bool {
        *self.has_listed.borrow()
    }

    pub async fn wait_until_listed(&self) {
        // The sender is ours, so there is always an answer.
        let _ = self.has_listed.subscribe().wait_for(|it| *it).await;
    }

    pub fn listed(&self) {
        self.has_listed.send_replace(true);
    }

    /// How long ago the API server last said something; `None` if never.
    pub fn heard_ago(&self, now: Instant) -> Option<Duration> {
        self.beats().heard.map(|it| now.saturating_duration_since(it))
    }

    /// How long nothing was even tried: what hangs is us.
    pub fn stuck_for(&self, now: Instant) -> Duration {
        let Beats { tried, heard } = self.beats();
        now.saturating_duration_since(heard.map_or(tried, |it| it.max(tried)))
    }

    /// For what is no watch but must not get stuck either.
    pub fn beat(&self, now: Instant) {
        self.change(|it| *it = Beats { tried: now, heard: Some(now) });
    }

    fn try_again(&self) {
        self.change(|it| it.tried = Instant::now());
    }

    fn hear(&self) {
        self.change(|it| it.heard = Some(Instant::now()));
    }

    fn beats(&self) -> Beats {
        *self.beats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Beats)) {
        change(&mut self.beats.lock().unwrap_or_else(PoisonError::into_inner));
    }
}
