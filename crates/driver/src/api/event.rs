//! Events on workloads, as both the controller and the node write them.

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;

/// The API server takes no longer note.
const LONGEST_NOTE: usize = 1024;

/// And no longer name of who says it; those of nodes may be longer.
const LONGEST_INSTANCE: usize = 128;

/// What a workload is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Telling {
    pub kind: Kind,
    pub reason: &'static str,
    pub text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Normal,
    Warning,
}

/// A Pod that is told something.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Listener {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

/// Who tells it.
#[derive(Clone, Debug)]
pub struct Speaker {
    /// `<driver>/controller` or `<driver>/node`.
    pub component: String,
    /// Which one of several.
    pub instance: String,
}

pub fn event(speaker: &Speaker, listener: &Listener, Telling { kind, reason, text }: &Telling) -> Event {
    Event {
        metadata: ObjectMeta {
            generate_name: Some("s3csi-".to_owned()),
            namespace: Some(listener.namespace.clone()),
            ..ObjectMeta::default()
        },
        action: Some("Mount".to_owned()),
        event_time: Some(MicroTime(Timestamp::now())),
        note: Some(shortened(text)),
        reason: Some((*reason).to_owned()),
        regarding: Some(ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            name: Some(listener.name.clone()),
            namespace: Some(listener.namespace.clone()),
            uid: Some(listener.uid.clone()),
            ..ObjectReference::default()
        }),
        reporting_controller: Some(speaker.component.clone()),
        reporting_instance: Some(speaker.instance.chars().take(LONGEST_INSTANCE).collect()),
        type_: Some(format!("{kind:?}")),
        ..Event::default()
    }
}

fn shortened(text: &str) -> String {
    if text.len() <= LONGEST_NOTE {
        return text.to_owned();
    }
    let end = (0..=LONGEST_NOTE - '…'.len_utf8()).rev().find(|it| text.is_char_boundary(*it)).unwrap_or_default();
    format!("{}…", &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_as_long_as_the_api_server_takes() {
        assert_eq!(shortened("short"), "short");
        let long = shortened(&"ä".repeat(2000));
        assert!(long.len() <= LONGEST_NOTE && long.ends_with('…'));
    }
}
