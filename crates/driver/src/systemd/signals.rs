//! One dispatcher for everything systemd says without being asked. It only sorts: it never waits for anybody, because
//! while it does, no answer is read either.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::StreamExt as _;
use tokio::sync::{broadcast, mpsc};
use zbus::message::Type;
use zbus::{Message, MessageStream, OwnedObjectPath, OwnedVariant};

use super::names::{unit_name, unit_path};
use super::{ActiveState, link};

/// How many changes a listener may fall behind; one that does is told to look at everything.
const BACKLOG: usize = 1024;

/// What is said about one unit that somebody waits for.
#[derive(Debug)]
pub enum Signal {
    Properties(HashMap<String, OwnedVariant>),
    JobRemoved {
        job: String,
        result: String,
    },
    /// This connection was made, perhaps after a loss: anything that was said before it may have been missed.
    Connected {
        number: u64,
    },
}

/// What is said about any unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// It failed, or systemd has forgotten it. A reload of systemd says the latter of units that live on.
    MayHaveEnded { unit: String },
    /// What it says about itself, now or for a while already.
    Says { unit: String, words: String },
    /// Changes may have been missed.
    LookAtAll,
}

#[derive(Clone)]
pub struct Dispatcher {
    watchers: Watchers,
    changes: broadcast::Sender<Change>,
}

type Watchers = Arc<Mutex<HashMap<String, mpsc::UnboundedSender<Signal>>>>;

/// What is said about one unit, for as long as this exists.
pub struct Watch {
    path: String,
    signals: mpsc::UnboundedReceiver<Signal>,
    watchers: Watchers,
}

impl Dispatcher {
    pub fn new() -> Self {
        Self { watchers: Watchers::default(), changes: broadcast::channel(BACKLOG).0 }
    }

    /// Everything that is said about a unit from now on. One watcher per unit: names are made up for one caller.
    pub fn watch(&self, unit: &str) -> Watch {
        let (sender, signals) = mpsc::unbounded_channel();
        let path = unit_path(unit);
        self.watchers().insert(path.clone(), sender);
        Watch { path, signals, watchers: self.watchers.clone() }
    }

    pub fn changes(&self) -> broadcast::Receiver<Change> {
        self.changes.subscribe()
    }

    pub fn connected(&self, number: u64) {
        for watcher in self.watchers().values() {
            // Who does not listen any more is about to leave the list.
            let _ = watcher.send(Signal::Connected { number });
        }
        let _ = self.changes.send(Change::LookAtAll);
    }

    /// Sorts until the connection ends.
    pub async fn run(&self, mut messages: MessageStream) {
        while let Some(Ok(message)) = messages.next().await {
            if message.message_type() == Type::Signal {
                self.sort(&message);
            }
        }
    }

    fn sort(&self, message: &Message) -> Option<()> {
        let header = message.header();
        let (interface, member) = (header.interface()?.as_str(), header.member()?.as_str());
        match (interface, member) {
            (link::MANAGER, "UnitRemoved") => {
                let (unit, _) = message.body().deserialize::<(String, OwnedObjectPath)>().ok()?;
                self.change(unit);
            }
            (link::MANAGER, "JobRemoved") => {
                let (_, job, unit, result) =
                    message.body().deserialize::<(u32, OwnedObjectPath, String, String)>().ok()?;
                self.tell(&unit_path(&unit), Signal::JobRemoved { job: job.to_string(), result });
            }
            (link::PROPERTIES, "PropertiesChanged") => {
                let path = header.path()?.as_str();
                // Most units of a node are not ours; their properties are not even looked at.
                let is_watched = self.watchers().contains_key(path);
                let unit = if self.changes.receiver_count() > 0 { unit_name(path) } else { None };
                let is_mount = unit.as_deref().is_some_and(|it| it.ends_with(".service"));
                if !is_watched && !is_mount {
                    return None;
                }
                let (_, changed, _) =
                    message.body().deserialize::<(String, HashMap<String, OwnedVariant>, Vec<String>)>().ok()?;
                if let Some(words) = text(&changed, "StatusText").filter(|it| !it.is_empty()) {
                    let (unit, words) = (unit.clone()?, words.to_owned());
                    // Nobody listens: then nobody wants to know.
                    let _ = self.changes.send(Change::Says { unit, words });
                }
                if text(&changed, "ActiveState").is_some_and(|it| ActiveState::parse(it) == ActiveState::Failed) {
                    self.change(unit?);
                }
                self.tell(path, Signal::Properties(changed));
            }
            _ => {}
        }
        Some(())
    }

    fn change(&self, unit: String) {
        // Nobody listens: then nobody wants to know.
        let _ = self.changes.send(Change::MayHaveEnded { unit });
    }

    fn tell(&self, path: &str, signal: Signal) {
        if let Some(watcher) = self.watchers().get(path) {
            let _ = watcher.send(signal);
        }
    }

    fn watchers(&self) -> MutexGuard<'_, HashMap<String, mpsc::UnboundedSender<Signal>>> {
        self.watchers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watch {
    pub async fn next(&mut self) -> Signal {
        // The sender is in the dispatcher's list until we leave it.
        self.signals.recv().await.unwrap_or(Signal::Connected { number: u64::MAX })
    }

    /// What has been said already, if anything.
    pub fn heard(&mut self) -> Option<Signal> {
        self.signals.try_recv().ok()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.watchers.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.path);
    }
}

pub fn text<'a>(properties: &'a HashMap<String, OwnedVariant>, name: &str) -> Option<&'a str> {
    properties.get(name).and_then(|it| <&str>::try_from(&**it).ok())
}

pub fn number(properties: &HashMap<String, OwnedVariant>, name: &str) -> Option<i32> {
    properties.get(name).and_then(|it| i32::try_from(&**it).ok())
}
