//! The list of all figures.

use prometheus_client::registry::Unit;

use super::{Description, Kind, Program};

/// Everything that any program of ours shows at `/metrics`.
pub const ALL: [&Description; 21] = [
    &API_REQUESTS,
    &PUBLISH_DURATION,
    &UNPUBLISH_DURATION,
    &MOUNTS,
    &TARGETS,
    &REPAIRS,
    &ENGINE_DEATHS,
    &ENGINE_STALLS,
    &CREDENTIALS_AGE,
    &REGISTERED,
    &TAINTS_REMOVED,
    &EVENTS,
    &LEADER,
    &RECONCILE_DURATION,
    &QUEUE_DEPTH,
    &QUEUE_AGE,
    &ATTACHMENTS,
    &ATTACHED_WORKLOADS,
    &MOUNTPOINT_PODS,
    &WATCH_AGE,
    &WATCH_LISTED,
];

pub const API_REQUESTS: Description = Description {
    name: "s3csi_api_requests",
    kind: Kind::Counter,
    unit: None,
    labels: &["verb", "resource", "code"],
    of: Program::Both,
    help: "Requests to the API server, by the status of the answer; code `error` had none",
};

pub const PUBLISH_DURATION: Description = Description {
    name: "s3csi_publish_duration",
    kind: Kind::Histogram,
    unit: Some(Unit::Seconds),
    labels: &["phase", "code"],
    of: Program::Node,
    help: "How long NodePublishVolume took, by its gRPC code: phase `total` and, as far as the call came to them, `assignment` (waiting for a running Mountpoint Pod), `credentials`, `source` (mount, engine start, first answer) and `bind`",
};

pub const UNPUBLISH_DURATION: Description = Description {
    name: "s3csi_unpublish_duration",
    kind: Kind::Histogram,
    unit: Some(Unit::Seconds),
    labels: &["phase", "code"],
    of: Program::Node,
    help: "How long NodeUnpublishVolume took, by its gRPC code: phase `total` and, as far as the call came to them, `unmount` and `retire` (the source, strategy daemon)",
};

pub const MOUNTS: Description = Description {
    name: "s3csi_mounts",
    kind: Kind::Gauge,
    unit: None,
    labels: &["strategy", "state"],
    of: Program::Node,
    help: "FUSE mounts of this driver on the node, looked at when scraped: `alive` answered, `dead` has no engine, `hung` did not answer in 2 s, `unknown` could not be asked",
};

pub const TARGETS: Description = Description {
    name: "s3csi_targets",
    kind: Kind::Gauge,
    unit: None,
    labels: &[],
    of: Program::Node,
    help: "Mounts at paths that kubelet asked for, as the kernel lists them",
};

pub const REPAIRS: Description = Description {
    name: "s3csi_repairs",
    kind: Kind::Counter,
    unit: None,
    labels: &["reason"],
    of: Program::Node,
    help: "What the node plugin put right without being asked, by the reason that is also in its log",
};

pub const ENGINE_DEATHS: Description = Description {
    name: "s3csi_engine_deaths",
    kind: Kind::Counter,
    unit: None,
    labels: &[],
    of: Program::Node,
    help: "Engines that ended while their volume was published and were not replaced on the same mount",
};

pub const ENGINE_STALLS: Description = Description {
    name: "s3csi_engine_stall",
    kind: Kind::Histogram,
    unit: Some(Unit::Seconds),
    labels: &[],
    of: Program::Node,
    help: "How long applications waited while an engine that died or froze was replaced on the same mount; its count is the number of such engines. Only those that were started since the plugin started",
};

pub const CREDENTIALS_AGE: Description = Description {
    name: "s3csi_credentials_age",
    kind: Kind::Gauge,
    unit: Some(Unit::Seconds),
    labels: &[],
    of: Program::Node,
    help: "Of all published volumes, the longest time since kubelet brought the keys. It does so about every minute, which is how rotated keys arrive. Keys do not say when they expire, so nothing here does",
};

pub const REGISTERED: Description = Description {
    name: "s3csi_registered",
    kind: Kind::Gauge,
    unit: None,
    labels: &[],
    of: Program::Node,
    help: "1 once kubelet has acknowledged the registration of the driver",
};

pub const TAINTS_REMOVED: Description = Description {
    name: "s3csi_taints_removed",
    kind: Kind::Counter,
    unit: None,
    labels: &[],
    of: Program::Node,
    help: "How often the start-up taint was removed from the node",
};

pub const EVENTS: Description = Description {
    name: "s3csi_events",
    kind: Kind::Counter,
    unit: None,
    labels: &["outcome"],
    of: Program::Node,
    help: "Events on workloads: `written`, `dropped` (told lately, or too many at once) or `failed`",
};

pub const LEADER: Description = Description {
    name: "s3csi_leader",
    kind: Kind::Gauge,
    unit: None,
    labels: &[],
    of: Program::Controller,
    help: "1 if this controller works, 0 if it stands by",
};

pub const RECONCILE_DURATION: Description = Description {
    name: "s3csi_reconcile_duration",
    kind: Kind::Histogram,
    unit: Some(Unit::Seconds),
    labels: &["outcome"],
    of: Program::Controller,
    help: "How long looks at one volume on one node took: `done`, or `retry` because something failed or somebody else was faster",
};

pub const QUEUE_DEPTH: Description = Description {
    name: "s3csi_queue_depth",
    kind: Kind::Gauge,
    unit: None,
    labels: &["state"],
    of: Program::Controller,
    help: "Volumes on nodes to be looked at: `due` now, `later`, or `running`",
};

pub const QUEUE_AGE: Description = Description {
    name: "s3csi_queue_age",
    kind: Kind::Gauge,
    unit: Some(Unit::Seconds),
    labels: &[],
    of: Program::Controller,
    help: "How long the volume that has been due longest has been waiting for a worker",
};

pub const ATTACHMENTS: Description = Description {
    name: "s3csi_attachments",
    kind: Kind::Gauge,
    unit: None,
    labels: &["state"],
    of: Program::Controller,
    help: "Attachments: `ready` if all of their Mountpoint Pods run, otherwise `waiting`",
};

pub const ATTACHED_WORKLOADS: Description = Description {
    name: "s3csi_attached_workloads",
    kind: Kind::Gauge,
    unit: None,
    labels: &[],
    of: Program::Controller,
    help: "Workloads in attachments",
};

pub const MOUNTPOINT_PODS: Description = Description {
    name: "s3csi_mountpoint_pods",
    kind: Kind::Gauge,
    unit: None,
    labels: &["state"],
    of: Program::Controller,
    help: "Mountpoint Pods by phase, `ending` for those that are terminating or to be unmounted",
};

pub const WATCH_AGE: Description = Description {
    name: "s3csi_watch_age",
    kind: Kind::Gauge,
    unit: Some(Unit::Seconds),
    labels: &["kind"],
    of: Program::Controller,
    help: "How long ago the API server last said something about this kind of objects; at least once a minute if all is well. Only of the controller that works",
};

pub const WATCH_LISTED: Description = Description {
    name: "s3csi_watch_listed",
    kind: Kind::Gauge,
    unit: None,
    labels: &["kind"],
    of: Program::Controller,
    help: "1 once all objects of this kind are known. Only of the controller that works",
};
