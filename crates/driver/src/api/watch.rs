//! Lists one kind of object, then watches it from there, for ever: for the controller's cache and for the node. Objects are converted
//! to facts at once, so at no time more than a page of them is in memory.
//!
//! kube's own `watcher` is not used: it keeps no record of when the API server last answered. Here every answer is a heartbeat, also the
//! bookmarks that are sent while nothing changes, so a watch that hangs is noticed by us and by the health endpoint.

use std::fmt::Debug;
use std::time::Duration;

use futures::StreamExt as _;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::{Api, Resource, ResourceExt as _};
use parking_lot::Mutex;
use s3csi_core::Chain;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use super::call::{CallError, call};

/// The API server ends a watch after this, and we start the next one: a connection that died silently is noticed soon after.
const WATCH_SECONDS: u32 = 60;

/// A watch that is silent for longer than it may last is dead.
const LONGEST_SILENCE: Duration = Duration::from_secs(75);

/// Objects in one page of a list.
const PAGE_SIZE: u32 = 500;

/// The first retry; each further one waits twice as long.
const FIRST_RETRY: Duration = Duration::from_millis(200);
const LONGEST_RETRY: Duration = Duration::from_secs(10);

/// One list/watch.
pub struct Watch<'a, K> {
    pub api: Api<K>,
    pub selector: FieldSelector,
    pub heartbeat: &'a Heartbeat,
}

/// Which objects are watched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum FieldSelector {
    #[default]
    All,
    Required(String),
    /// An API server that cannot select by this field sends all objects: the facts must be selected again.
    IfSupported(String),
}

/// A change that a watch reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatchUpdate<Fact> {
    /// Everything there is. What is not in it does not exist any more.
    Listed(Vec<Fact>),
    Changed(Fact),
    Deleted(Fact),
}

/// Receives what a watch reports, in order. Closures that take a [`WatchUpdate`] are handlers.
pub trait WatchHandler<Fact> {
    fn update(&mut self, update: WatchUpdate<Fact>);

    /// Called before each list.
    fn before_list(&mut self) {}

    /// The watch failed and is retried; what was reported so far may be out of date.
    fn failed(&mut self, _message: &str) {}
}

impl<Fact, F: FnMut(WatchUpdate<Fact>)> WatchHandler<Fact> for F {
    fn update(&mut self, update: WatchUpdate<Fact>) {
        self(update);
    }
}

/// When a periodic activity last tried, and when it last succeeded.
#[derive(Debug)]
pub struct Heartbeat {
    name: &'static str,
    beats: Mutex<Beats>,
    has_listed: tokio::sync::watch::Sender<bool>,
}

#[derive(Clone, Copy, Debug)]
struct Beats {
    attempted: Instant,
    answered: Option<Instant>,
}

#[derive(Debug, thiserror::Error)]
enum WatchError {
    #[error("failed to list")]
    List {
        #[source]
        cause: CallError,
    },

    #[error("failed to start the watch")]
    Start {
        #[source]
        cause: CallError,
    },

    #[error("the watch connection broke")]
    Broken {
        #[source]
        cause: kube::Error,
    },

    #[error("the API server ended the watch: {message}")]
    Ended { message: String },

    #[error("the watch was silent for {LONGEST_SILENCE:?}")]
    Silent,
}

/// A failure, and the version to continue from if it is still known.
type Interrupted = (WatchError, Option<String>);

impl<K> Watch<'_, K>
where
    K: Resource + Clone + Debug + DeserializeOwned + 'static,
{
    /// Never returns. `fact` drops objects that are not needed.
    pub async fn run<Fact>(mut self, fact: impl Fn(&K) -> Option<Fact>, mut handler: impl WatchHandler<Fact>) {
        let mut version: Option<String> = None;
        let mut retry = FIRST_RETRY;
        let mut reported = String::new();
        loop {
            self.heartbeat.attempt();
            let outcome = match &version {
                None => {
                    handler.before_list();
                    self.list(&fact).await.map(|(facts, listed_at)| {
                        handler.update(WatchUpdate::Listed(facts));
                        self.heartbeat.set_listed();
                        Some(listed_at)
                    })
                }
                Some(from) => self.watch(&fact, &mut handler, from.clone()).await,
            };
            let (error, next) = match outcome {
                Ok(next) => {
                    version = next;
                    retry = FIRST_RETRY;
                    reported.clear();
                    continue;
                }
                Err(interrupted) => interrupted,
            };
            version = next;
            let kind = self.heartbeat.name;
            if let (WatchError::List { cause }, FieldSelector::IfSupported(selector)) = (&error, &self.selector)
                && cause.is_bad_request()
            {
                tracing::warn!(kind, selector, "the API server cannot select by this field, watching all objects");
                self.selector = FieldSelector::All;
                continue;
            }
            let message = Chain(&error).to_string();
            // Retried every few seconds, perhaps for hours: an error that does not change is logged once.
            if reported != message {
                tracing::warn!(kind, error = message, "watch failed, retrying");
            }
            handler.failed(&message);
            reported = message;
            tokio::time::sleep(retry).await;
            retry = (retry * 2).min(LONGEST_RETRY);
        }
    }

    async fn list<Fact>(&self, fact: &impl Fn(&K) -> Option<Fact>) -> Result<(Vec<Fact>, String), Interrupted> {
        let mut facts = Vec::new();
        let mut parameters = ListParams::default().limit(PAGE_SIZE);
        parameters.field_selector = self.selector.text();
        loop {
            let page = call(self.api.list(&parameters)).await.map_err(|cause| (WatchError::List { cause }, None))?;
            self.heartbeat.answer();
            facts.extend(page.items.iter().filter_map(fact));
            match page.metadata.continue_.filter(|it| !it.is_empty()) {
                Some(token) => parameters.continue_token = Some(token),
                None => return Ok((facts, page.metadata.resource_version.unwrap_or_default())),
            }
        }
    }

    /// Returns the version to continue from, or nothing if everything must be listed again.
    async fn watch<Fact>(
        &self,
        fact: &impl Fn(&K) -> Option<Fact>,
        handler: &mut impl WatchHandler<Fact>,
        mut version: String,
    ) -> Result<Option<String>, Interrupted> {
        let mut parameters = WatchParams::default().timeout(WATCH_SECONDS);
        parameters.field_selector = self.selector.text();
        let stream = match call(self.api.watch(&parameters, &version)).await {
            Ok(stream) => stream,
            Err(cause) if cause.is_expired() => return Ok(None),
            Err(cause) => return Err((WatchError::Start { cause }, Some(version))),
        };
        self.heartbeat.answer();
        let mut stream = std::pin::pin!(stream);
        loop {
            let event = match tokio::time::timeout(LONGEST_SILENCE, stream.next()).await {
                Err(_) => return Err((WatchError::Silent, Some(version))),
                Ok(None) => return Ok(Some(version)),
                Ok(Some(Err(cause))) => return Err((WatchError::Broken { cause }, Some(version))),
                Ok(Some(Ok(event))) => event,
            };
            self.heartbeat.answer();
            match event {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                    version = object.resource_version().unwrap_or(version);
                    if let Some(fact) = fact(&object) {
                        handler.update(WatchUpdate::Changed(fact));
                    }
                }
                WatchEvent::Deleted(object) => {
                    version = object.resource_version().unwrap_or(version);
                    if let Some(fact) = fact(&object) {
                        handler.update(WatchUpdate::Deleted(fact));
                    }
                }
                WatchEvent::Bookmark(bookmark) => version = bookmark.metadata.resource_version,
                // Too old to continue from: everything is listed again.
                WatchEvent::Error(status) if status.code == 410 => return Ok(None),
                WatchEvent::Error(status) => {
                    return Err((WatchError::Ended { message: status.message }, Some(version)));
                }
            }
        }
    }
}

impl FieldSelector {
    fn text(&self) -> Option<String> {
        match self {
            Self::All => None,
            Self::Required(selector) | Self::IfSupported(selector) => Some(selector.clone()),
        }
    }
}

impl Heartbeat {
    pub fn new(name: &'static str) -> Self {
        Self {
            name,
            beats: Mutex::new(Beats { attempted: Instant::now(), answered: None }),
            has_listed: tokio::sync::watch::Sender::new(false),
        }
    }

    /// As if it had just been created.
    pub fn reset(&self) {
        self.change(|it| *it = Beats { attempted: Instant::now(), answered: None });
        self.has_listed.send_replace(false);
    }

    pub const fn name(&self) -> &'static str {
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

    pub fn set_listed(&self) {
        self.has_listed.send_replace(true);
    }

    /// How long ago the API server last answered; `None` if never.
    pub fn since_answer(&self, now: Instant) -> Option<Duration> {
        self.beats().answered.map(|it| now.saturating_duration_since(it))
    }

    /// How long ago anything was last attempted or answered: what hangs is this process.
    pub fn since_activity(&self, now: Instant) -> Duration {
        let Beats { attempted, answered } = self.beats();
        now.saturating_duration_since(answered.map_or(attempted, |it| it.max(attempted)))
    }

    /// For activities that are no watch.
    pub fn beat(&self, now: Instant) {
        self.change(|it| *it = Beats { attempted: now, answered: Some(now) });
    }

    fn attempt(&self) {
        self.change(|it| it.attempted = Instant::now());
    }

    fn answer(&self) {
        self.change(|it| it.answered = Some(Instant::now()));
    }

    fn beats(&self) -> Beats {
        *self.beats.lock()
    }

    fn change(&self, change: impl FnOnce(&mut Beats)) {
        change(&mut self.beats.lock());
    }
}
