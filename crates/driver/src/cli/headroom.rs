//! Room for Mountpoint Pods.

use std::collections::BTreeMap;

use clap::Args;

use super::Switch;
use crate::api::is_label_value;
use crate::controller::headroom_pod::HeadroomSettings;

#[derive(Args, Debug)]
pub struct HeadroomArgs {
    /// Whether workloads may ask for room for their Mountpoint Pods, with the scheduling gate NAME/reserve-headroom-for-mppod, where
    /// NAME is that of the driver.
    #[arg(long, env = "RESERVE_HEADROOM", value_enum, default_value = "off")]
    reserve_headroom: Switch,

    /// Priority class of headroom Pods, which hold the room; lower than those of workloads.
    #[arg(long, env = "MOUNTPOINT_HEADROOM_PRIORITY_CLASS_NAME", value_name = "NAME")]
    mountpoint_headroom_priority_class_name: Option<String>,

    /// Priority class of Mountpoint Pods that room is reserved for; they preempt headroom Pods.
    #[arg(long, env = "MOUNTPOINT_PREEMPTING_PRIORITY_CLASS_NAME", value_name = "NAME")]
    mountpoint_preempting_priority_class_name: Option<String>,

    /// Image of headroom Pods, which waits by itself [default: that of Mountpoint Pods, with an idle mounter]
    #[arg(long, env = "MOUNTPOINT_HEADROOM_IMAGE", value_name = "IMAGE")]
    headroom_image: Option<String>,

    /// Image pull policy of that image [default: that of Kubernetes]
    #[arg(long, env = "MOUNTPOINT_HEADROOM_IMAGE_PULL_POLICY", value_name = "POLICY")]
    headroom_image_pull_policy: Option<String>,

    /// Further labels of headroom Pods.
    #[arg(
        long,
        env = "MOUNTPOINT_HEADROOM_POD_LABELS",
        value_name = "KEY=VALUE,…",
        value_delimiter = ',',
        value_parser = parse_label
    )]
    headroom_pod_labels: Vec<(String, String)>,
}

impl HeadroomArgs {
    /// `None` if it is off.
    pub fn settings(self) -> Option<HeadroomSettings> {
        let Self {
            reserve_headroom,
            mountpoint_headroom_priority_class_name,
            mountpoint_preempting_priority_class_name,
            headroom_image,
            headroom_image_pull_policy,
            headroom_pod_labels,
        } = self;
        let set = |text: Option<String>| text.filter(|it| !it.is_empty());
        match reserve_headroom {
            Switch::Off => None,
            Switch::On => Some(HeadroomSettings {
                priority_class: set(mountpoint_headroom_priority_class_name),
                preempting_priority_class: set(mountpoint_preempting_priority_class_name),
                image: set(headroom_image),
                image_pull_policy: set(headroom_image_pull_policy),
                labels: BTreeMap::from_iter(headroom_pod_labels),
            }),
        }
    }
}

fn parse_label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or_else(|| format!("{text:?} is not KEY=VALUE"))?;
    if key.is_empty() || !is_label_value(value) {
        return Err(format!("{text:?} is not a label that Kubernetes accepts"));
    }
    Ok((key.to_owned(), value.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_checked() {
        let check = |text: &str, expected: Result<(&str, &str), &str>| {
            let parsed = parse_label(text);
            let parsed = parsed.as_ref().map(|(key, value)| (key.as_str(), value.as_str())).map_err(String::as_str);
            assert_eq!(parsed, expected);
        };
        check("example.com/team=storage", Ok(("example.com/team", "storage")));
        check("team=", Ok(("team", "")));
        check("team", Err("\"team\" is not KEY=VALUE"));
        check("=storage", Err("\"=storage\" is not a label that Kubernetes accepts"));
        check("team=a b", Err("\"team=a b\" is not a label that Kubernetes accepts"));
    }
}
