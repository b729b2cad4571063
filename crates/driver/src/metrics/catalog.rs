//! The catalogue of all metrics.

use prometheus_client::registry::Unit;

use super::{Description, MetricType, Program};

/// Every metric of every program.
pub const ALL: [&Description; 23] = [
    &API_REQUESTS,
    &PUBLISH_DURATION,
    &UNPUBLISH_DURATION,
    &MOUNTS,
    &TARGETS,
    &REPAIRS,
    &ENGINE_DEATHS,
    &ENGINE_STALLS,
    &CREDENTIALS_AGE,
    &CREDENTIALS_EXPIRY,
    &WORKLOAD_CREDENTIALS_EXPIRY,
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
    metric_type: MetricType::Counter,
    unit: None,
    labels: &["verb", "resource", "code"],
    of: Program::Both,
    help: "Requests to the API server by status code; `error` if there was no response",
};

pub const PUBLISH_DURATION: Description = Description {
    name: "s3csi_publish_duration",
    metric_type: MetricType::Histogram,
    unit: Some(Unit::Seconds),
    labels: &["phase", "code"],
    of: Program::Node,
    help: "Duration of NodePublishVolume by gRPC code: phase `total` and, if the call reached them, `assignment` (waiting for a running Mountpoint Pod), `credentials`, `source` (mount, engine start, first answer) and `bind`",
};

pub const UNPUBLISH_DURATION: Description = Description {
    name: "s3csi_unpublish_duration",
    metric_type: MetricType::Histogram,
    unit: Some(Unit::Seconds),
    labels: &["phase", "code"],
    of: Program::Node,
    help: "Duration of NodeUnpublishVolume by gRPC code: phase `total` and, if the call reached them, `unmount` and `retire` (of the source, strategy daemon)",
};

pub const MOUNTS: Description = Description {
    name: "s3csi_mounts",
    metric_type: MetricType::Gauge,
    unit: None,
    labels: &["strategy", "state"],
    of: Program::Node,
    help: "FUSE mounts of this driver on the node, checked when scraped: `alive` answered, `dead` has no engine, `hung` did not answer within 2 s, `unserved` waits for another mounter, `unknown` could not be probed",
};

pub const TARGETS: Description = Description {
    name: "s3csi_targets",
    metric_type: MetricType::Gauge,
    unit: None,
    labels: &[],
    of: Program::Node,
    help: "Mounts at target paths, from the kernel's mount table",
};

pub const REPAIRS: Description = Description {
    name: "s3csi_repairs",
    metric_type: MetricType::Counter,
    unit: None,
    labels: &["reason"],
    of: Program::Node,
    help: "Remediations that no call asked for, by the reason that is also logged",
};

pub const ENGINE_DEATHS: Description = Description {
    name: "s3csi_engine_deaths",
    metric_type: MetricType::Counter,
    unit: None,
    labels: &[],
    of: Program::Node,
    help: "Engines that ended while their volume was published and were not replaced on the same mount",
};

pub const ENGINE_STALLS: Description = Description {
    name: "s3csi_engine_stall",
    metric_type: MetricType::Histogram,
    unit: Some(Unit::Seconds),
    labels: &[],
    of: Program::Node,
    help: "How long applications waited while an engine that died or froze was replaced on the same mount; its count is the number of such engines. Only engines started since the plugin started",
};

pub const CREDENTIALS_AGE: Description = Description {
    name: "s3csi_credentials_age",
    metric_type: MetricType::Gauge,
    unit: Some(Unit::Seconds),
    labels: &[],
    of: Program::Node,
    help: "The longest time since the credentials of a published volume were refreshed. kubelet triggers a refresh about once a minute. Static keys have no expiry date",
};

pub const CREDENTIALS_EXPIRY: Description = Description {
    name: "s3csi_credentials_expiry_timestamp",
    metric_type: MetricType::Gauge,
    unit: Some(Unit::Seconds),
    labels: &[],
    of: Program::Node,
    help: "When the driver's temporary credentials expire, in seconds since 1970; 0 if they are static",
};

pub const WORKLOAD_CREDENTIALS_EXPIRY: Description = Description {
    name: "s3csi_workload_credentials_expiry_timestamp",
    metric_type: MetricType::Gauge,
    unit: Some(Unit::Seconds),
    labels: &[],
    of: Program::Node,
    help: "When the first of the keys expires that were issued for service accounts of workloads (`authenticationSource: pod`), in seconds since 1970; 0 if there are none",
};

pub const REGISTERED: Description = Description {
    name: "s3csi_registered",
    metric_type: MetricType::Gauge,
    unit: None,
    labels: &[],
    of: Program::Node,
    help: "1 once kubelet has acknowledged the registration of the driver",
};

pub const TAINTS_REMOVED: Description = Description {
    name: "s3csi_taints_removed",
    metric_type: MetricType::Counter,
    unit: None,
    labels: &[],
    of: Program::Node,
    help: "How often the start-up taint was removed from the node",
};

pub const EVENTS: Description = Description {
    name: "s3csi_events",
    metric_type: MetricType::Counter,
    unit: None,
    labels: &["outcome"],
    of: Program::Node,
    help: "Events on workloads: `written`, `dropped` (duplicate, or queue full) or `failed`",
};

pub const LEADER: Description = Description {
    name: "s3csi_leader",
    metric_type: MetricType::Gauge,
    unit: None,
    labels: &[],
    of: Program::Controller,
    help: "1 if this controller is the leader, 0 if it is on standby",
};

pub const RECONCILE_DURATION: Description = Description {
    name: "s3csi_reconcile_duration",
    metric_type: MetricType::Histogram,
    unit: Some(Unit::Seconds),
    labels: &["outcome"],
    of: Program::Controller,
    help: "Duration of reconciling one volume on one node: `done`, or `retry` after a failure or a conflict",
};

pub const QUEUE_DEPTH: Description = Description {
    name: "s3csi_queue_depth",
    metric_type: MetricType::Gauge,
    unit: None,
    labels: &["state"],
    of: Program::Controller,
    help: "Reconcile keys (volume and node) in the queue: `due` now, `later`, or `running`",
};

pub const QUEUE_AGE: Description = Description {
    name: "s3csi_queue_age",
    metric_type: MetricType::Gauge,
    unit: Some(Unit::Seconds),
    labels: &[],
    of: Program::Controller,
    help: "Waiting time of the reconcile key that has been due longest",
};

pub const ATTACHMENTS: Description = Description {
    name: "s3csi_attachments",
    metric_type: MetricType::Gauge,
    unit: None,
    labels: &["state"],
    of: Program::Controller,
    help: "Attachments: `ready` if all of their Mountpoint Pods run, otherwise `waiting`",
};

pub const ATTACHED_WORKLOADS: Description = Description {
    name: "s3csi_attached_workloads",
    metric_type: MetricType::Gauge,
    unit: None,
    labels: &[],
    of: Program::Controller,
    help: "Workloads in attachments",
};

pub const MOUNTPOINT_PODS: Description = Description {
    name: "s3csi_mountpoint_pods",
    metric_type: MetricType::Gauge,
    unit: None,
    labels: &["state"],
    of: Program::Controller,
    help: "Mountpoint Pods by phase, `ending` for those that are terminating or to be unmounted, `warm` for those that run and serve no source yet",
};

pub const WATCH_AGE: Description = Description {
    name: "s3csi_watch_age",
    metric_type: MetricType::Gauge,
    unit: Some(Unit::Seconds),
    labels: &["kind"],
    of: Program::Controller,
    help: "Time since the last watch event or bookmark for this kind of object; less than a minute if the watch is healthy. Leader only",
};

pub const WATCH_LISTED: Description = Description {
    name: "s3csi_watch_listed",
    metric_type: MetricType::Gauge,
    unit: None,
    labels: &["kind"],
    of: Program::Controller,
    help: "1 once all objects of this kind are listed. Leader only",
};
