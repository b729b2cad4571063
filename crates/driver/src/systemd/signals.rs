//! The dispatcher of systemd's signals. It never blocks, because replies are read by the same task.

use std::collections::HashMap;
use std::sync::Arc;

use futures::StreamExt as _;
use parking_lot::Mutex;
use tokio::sync::{broadcast, mpsc};
use zbus::message::Type;
use zbus::{Message, MessageStream, OwnedObjectPath, OwnedVariant};

use super::names::{unit_name, unit_path};
use super::{ActiveState, connection};

/// How many changes a subscriber may fall behind; then it must resync.
const BACKLOG: usize = 1024;

/// The `SubState` of a unit between its death and its next start.
const RESTARTING: &str = "auto-restart";

/// A signal about a watched unit.
#[derive(Debug)]
pub enum UnitSignal {
    Properties(HashMap<String, OwnedVariant>),
    JobRemoved {
        job: String,
        result: String,
    },
    /// A connection was established, perhaps after a loss: earlier signals may have been missed.
    Connected {
        number: u64,
    },
}

/// A change of any unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// It failed or was unloaded. A reload of systemd announces the latter for running units, too.
    MayHaveEnded { unit: String },
    /// It was killed, and systemd is about to start it again.
    Restarting { unit: String },
    /// Its status text, which systemd repeats with every other change.
    Status { unit: String, text: String },
    /// Changes may have been missed.
    Resync,
}

#[derive(Clone)]
pub struct Dispatcher {
    watchers: Watchers,
    changes: broadcast::Sender<Change>,
}

type Watchers = Arc<Mutex<HashMap<String, mpsc::UnboundedSender<UnitSignal>>>>;

/// A subscription to the signals about one unit; ends when dropped.
pub struct SignalSubscription {
    path: String,
    signals: mpsc::UnboundedReceiver<UnitSignal>,
    watchers: Watchers,
}

impl Dispatcher {
    pub fn new() -> Self {
        Self { watchers: Watchers::default(), changes: broadcast::channel(BACKLOG).0 }
    }

    /// Subscribes to the signals about a unit. One watcher per unit: names are unique to a caller.
    pub fn watch(&self, unit: &str) -> SignalSubscription {
        let (sender, signals) = mpsc::unbounded_channel();
        let path = unit_path(unit);
        self.watchers.lock().insert(path.clone(), sender);
        SignalSubscription { path, signals, watchers: self.watchers.clone() }
    }

    pub fn changes(&self) -> broadcast::Receiver<Change> {
        self.changes.subscribe()
    }

    pub fn connected(&self, number: u64) {
        for watcher in self.watchers.lock().values() {
            // A closed receiver is about to be removed from the map.
            let _ = watcher.send(UnitSignal::Connected { number });
        }
        let _ = self.changes.send(Change::Resync);
    }

    /// Dispatches signals until the connection ends.
    pub async fn run(&self, mut messages: MessageStream) {
        while let Some(Ok(message)) = messages.next().await {
            if message.message_type() == Type::Signal {
                self.dispatch(&message);
            }
        }
    }

    fn dispatch(&self, message: &Message) -> Option<()> {
        let header = message.header();
        let (interface, member) = (header.interface()?.as_str(), header.member()?.as_str());
        match (interface, member) {
            (connection::MANAGER, "UnitRemoved") => {
                let (unit, _) = message.body().deserialize::<(String, OwnedObjectPath)>().ok()?;
                self.change(unit);
            }
            (connection::MANAGER, "JobRemoved") => {
                let (_, job, unit, result) =
                    message.body().deserialize::<(u32, OwnedObjectPath, String, String)>().ok()?;
                self.notify(&unit_path(&unit), UnitSignal::JobRemoved { job: job.to_string(), result });
            }
            (connection::PROPERTIES, "PropertiesChanged") => {
                let path = header.path()?.as_str();
                // Most units of a node are not ours; their properties are not parsed.
                let is_watched = self.watchers.lock().contains_key(path);
                let unit = if self.changes.receiver_count() > 0 { unit_name(path) } else { None };
                let service = unit.filter(|it| it.ends_with(".service"));
                if !is_watched && service.is_none() {
                    return None;
                }
                let (_, changed, _) =
                    message.body().deserialize::<(String, HashMap<String, OwnedVariant>, Vec<String>)>().ok()?;
                if let Some(unit) = service {
                    self.publish_changes(unit, &changed);
                }
                self.notify(path, UnitSignal::Properties(changed));
            }
            _ => {}
        }
        Some(())
    }

    /// For the subscribers of all units.
    fn publish_changes(&self, unit: String, changed: &HashMap<String, OwnedVariant>) {
        // A unit that is about to be restarted still has the text of its dead process.
        let has_process = changed.get("MainPID").and_then(|it| u32::try_from(&**it).ok()) != Some(0);
        if let Some(status) = text(changed, "StatusText").filter(|it| has_process && !it.is_empty()) {
            let (unit, text) = (unit.clone(), status.to_owned());
            // Fails without subscribers, which is fine.
            let _ = self.changes.send(Change::Status { unit, text });
        }
        if text(changed, "SubState") == Some(RESTARTING) {
            let _ = self.changes.send(Change::Restarting { unit: unit.clone() });
        }
        if text(changed, "ActiveState").is_some_and(|it| ActiveState::parse(it) == ActiveState::Failed) {
            self.change(unit);
        }
    }

    fn change(&self, unit: String) {
        // Fails without subscribers, which is fine.
        let _ = self.changes.send(Change::MayHaveEnded { unit });
    }

    fn notify(&self, path: &str, signal: UnitSignal) {
        if let Some(watcher) = self.watchers.lock().get(path) {
            let _ = watcher.send(signal);
        }
    }
}

impl SignalSubscription {
    pub async fn next(&mut self) -> UnitSignal {
        // The sender stays in the dispatcher's map until this is dropped.
        self.signals.recv().await.unwrap_or(UnitSignal::Connected { number: u64::MAX })
    }

    /// A signal that has already arrived, if any.
    pub fn queued(&mut self) -> Option<UnitSignal> {
        self.signals.try_recv().ok()
    }
}

impl Drop for SignalSubscription {
    fn drop(&mut self) {
        self.watchers.lock().remove(&self.path);
    }
}

pub fn text<'a>(properties: &'a HashMap<String, OwnedVariant>, name: &str) -> Option<&'a str> {
    properties.get(name).and_then(|it| <&str>::try_from(&**it).ok())
}

pub fn number(properties: &HashMap<String, OwnedVariant>, name: &str) -> Option<i32> {
    properties.get(name).and_then(|it| i32::try_from(&**it).ok())
}

#[cfg(test)]
mod tests {
    use zbus::Variant;

    use super::*;

    fn properties_changed(unit: &str, property: &str, value: &'static str) -> Message {
        let changed = HashMap::from([(property, Variant::new(value))]);
        let invalidated: Vec<String> = Vec::new();
        Message::signal(unit_path(unit).as_str(), connection::PROPERTIES, "PropertiesChanged")
            .build(&("org.freedesktop.systemd1.Unit", changed, invalidated))
            .unwrap()
    }

    /// The state that the watcher of a unit gets to know, without any subscriber to all units.
    fn watched(property: &str, value: &'static str) -> Option<String> {
        let dispatcher = Dispatcher::new();
        let mut watch = dispatcher.watch("a.service");
        dispatcher.dispatch(&properties_changed("a.service", property, value));
        match watch.queued()? {
            UnitSignal::Properties(changed) => text(&changed, property).map(str::to_owned),
            UnitSignal::JobRemoved { .. } | UnitSignal::Connected { .. } => None,
        }
    }

    #[test]
    fn a_watcher_gets_all_properties_though_nothing_subscribes_to_all_units() {
        assert_eq!(watched("ActiveState", "active").as_deref(), Some("active"));
        assert_eq!(watched("ActiveState", "failed").as_deref(), Some("failed"));
        assert_eq!(watched("StatusText", "engines=2").as_deref(), Some("engines=2"));
    }

    #[test]
    fn the_status_text_of_a_dead_process_is_ignored() {
        let dispatcher = Dispatcher::new();
        let mut changes = dispatcher.changes();
        let dispatch = |process: u32| {
            let properties =
                HashMap::from([("StatusText", Variant::new("engines=2")), ("MainPID", Variant::new(process))]);
            let signal = Message::signal(unit_path("a.service").as_str(), connection::PROPERTIES, "PropertiesChanged")
                .build(&("org.freedesktop.systemd1.Service", properties, Vec::<String>::new()));
            dispatcher.dispatch(&signal.unwrap());
        };
        dispatch(0);
        assert!(changes.try_recv().is_err());
        dispatch(7);
        let text = "engines=2".to_owned();
        assert_eq!(changes.try_recv().unwrap(), Change::Status { unit: "a.service".to_owned(), text });
    }

    #[test]
    fn subscribers_get_failures_and_status_texts_of_services_only() {
        let dispatcher = Dispatcher::new();
        let mut changes = dispatcher.changes();
        dispatcher.dispatch(&properties_changed("a.service", "ActiveState", "failed"));
        dispatcher.dispatch(&properties_changed("a.service", "StatusText", "well"));
        dispatcher.dispatch(&properties_changed("a.service", "ActiveState", "active"));
        dispatcher.dispatch(&properties_changed("a.mount", "ActiveState", "failed"));
        dispatcher.dispatch(&properties_changed("a.service", "SubState", "running"));
        dispatcher.dispatch(&properties_changed("a.service", "SubState", "auto-restart"));
        assert_eq!(changes.try_recv().unwrap(), Change::MayHaveEnded { unit: "a.service".to_owned() });
        assert_eq!(
            changes.try_recv().unwrap(),
            Change::Status { unit: "a.service".to_owned(), text: "well".to_owned() }
        );
        assert_eq!(changes.try_recv().unwrap(), Change::Restarting { unit: "a.service".to_owned() });
        assert!(changes.try_recv().is_err());
    }
}
