//! Reports what happens to mounts between kubelet's calls: Events on workloads, metrics, and the last engine event of each source
//! for conditions. Reporting never blocks and never fails a call; Events are dropped when the queue is full.
//!
//! The published volumes are remembered for reports only; no decision depends on them. After a restart kubelet's repeated calls fill
//! them again.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use kube::Client;
use parking_lot::Mutex;
use s3csi_core::publish::AuthenticationSource;
use tokio::sync::Notify;

use crate::api::recorder::{EventDetails, EventLimits, EventRecorder, EventType, PodReference, ReportingController};
use crate::metrics::NodeMetrics;

/// The reason of the Event for temporary credentials that were not renewed in time.
const DRIVER_CREDENTIALS_EXPIRED: &str = "DriverCredentialsExpired";
const DRIVER_CREDENTIALS_EXPIRED_NOTE: &str =
    "the driver's temporary credentials have expired and cannot be renewed; the log of the node plugin has the cause";

/// The same for those of a workload's own identity.
const WORKLOAD_CREDENTIALS_EXPIRED: &str = "WorkloadCredentialsExpired";
const WORKLOAD_CREDENTIALS_EXPIRED_NOTE: &str = "the temporary credentials of the Pod's service account have expired and were not \
    renewed; the log of the node plugin has the cause";

/// How often expired credentials of workloads are looked for.
const EXPIRY_PERIOD: Duration = Duration::from_secs(10);

pub struct Reporter {
    metrics: Arc<NodeMetrics>,
    recorder: EventRecorder,
    published: Mutex<BTreeMap<PathBuf, PublishedVolume>>,
    /// The last event of each mounted source.
    engine_events: Mutex<HashMap<String, EngineEvent>>,
    changed: Notify,
}

/// A volume of a workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedVolume {
    /// Unknown if the `CSIDriver` object does not set `podInfoOnMount`.
    pub workload: Option<PodReference>,
    /// Name of the PersistentVolume.
    pub volume: String,
    pub bucket: String,
    /// The name of its source; `None` if it has a unit of its own.
    pub source: Option<String>,
    /// Whose credentials it uses.
    pub authentication: AuthenticationSource,
    /// When its credentials were last written.
    pub refreshed: Instant,
    /// When the keys of the workload's own identity expire that it got last.
    pub expires: Option<SystemTime>,
}

/// How a publish left the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MountOutcome {
    /// It was mounted and answered.
    AlreadyMounted,
    Mounted,
    /// It replaced a dead mount of ours.
    Remounted,
}

/// What happened to the engine of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineEvent {
    /// It died or froze, and a new engine serves the same mount.
    Resumed { cause: String, stall: Duration },
    /// It was replaced on the same mount as planned.
    Replaced { reason: String, stall: Duration },
    /// It serves on, although another mounter should have taken over.
    NotMoved { cause: String },
    /// It ended and was not replaced.
    Died { error: String },
}

impl Reporter {
    /// Without an API server: metrics only.
    pub fn without_events(metrics: Arc<NodeMetrics>) -> Self {
        Self::with(metrics, EventRecorder::disabled())
    }

    /// The caller must spawn the returned task, which writes the Events.
    pub fn new(
        metrics: Arc<NodeMetrics>,
        client: Client,
        driver_name: &str,
        node: &str,
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let controller = ReportingController {
            name: format!("{driver_name}/node"),
            instance: node.to_owned(),
            limits: EventLimits::NODE,
        };
        let counted = metrics.clone();
        let (recorder, writer) = EventRecorder::new(client, controller, move |outcome| counted.event(outcome));
        (Self::with(metrics, recorder), writer)
    }

    fn with(metrics: Arc<NodeMetrics>, recorder: EventRecorder) -> Self {
        Self { metrics, recorder, published: Mutex::default(), engine_events: Mutex::default(), changed: Notify::new() }
    }

    /// A publish succeeded.
    pub fn published(&self, target: &Path, published: PublishedVolume, mounted: MountOutcome, served_by: &str) {
        let bucket = &published.bucket;
        let mounted_event = match mounted {
            MountOutcome::AlreadyMounted => None,
            MountOutcome::Mounted => {
                let note = format!("bucket {bucket:?} is mounted, served by {served_by}");
                Some((EventType::Normal, "VolumeMounted", note))
            }
            MountOutcome::Remounted => {
                let restart = published.workload.as_ref().map_or_else(String::new, |it| {
                    format!(": kubectl delete pod --namespace {} {}", it.namespace, it.name)
                });
                let note = format!(
                    "the mount of bucket {bucket:?} was dead and was mounted again, served by {served_by}; running containers \
                     without mountPropagation HostToContainer keep the dead mount until they are restarted{restart}"
                );
                Some((EventType::Warning, "VolumeRemounted", note))
            }
        };
        if let Some((severity, reason, note)) = mounted_event {
            self.record(&published, EventDetails { severity, reason, subject: published.volume.clone(), note });
        }
        if let (Some(source), MountOutcome::Mounted | MountOutcome::Remounted) = (&published.source, mounted) {
            self.engine_events.lock().retain(|it, event| it != source || !matches!(event, EngineEvent::Died { .. }));
        }
        if mounted != MountOutcome::AlreadyMounted {
            self.changed.notify_one();
        }
        self.published.lock().insert(target.to_owned(), published);
    }

    pub fn unpublished(&self, target: &Path) {
        self.published.lock().remove(target);
    }

    /// Records a warning about a source on all workloads that use it.
    pub fn warn_users(&self, source: &str, reason: &'static str, note: &str) {
        for user in self.users(source) {
            let (subject, note) = (user.volume.clone(), format!("bucket {:?}: {note}", user.bucket));
            self.record(&user, EventDetails { severity: EventType::Warning, reason, subject, note });
        }
    }

    fn users(&self, source: &str) -> Vec<PublishedVolume> {
        self.published.lock().values().filter(|it| it.source.as_deref() == Some(source)).cloned().collect()
    }

    /// Reports an engine event of a source to all workloads that use it.
    pub fn engine_event(&self, source: &str, event: EngineEvent) {
        self.count(&event);
        for user in self.users(source) {
            self.report_engine_event(&user, &event);
        }
        if let EngineEvent::Resumed { .. } | EngineEvent::Died { .. } = event {
            self.engine_events.lock().insert(source.to_owned(), event);
        }
        self.changed.notify_one();
    }

    /// Reports an engine event of a target with its own unit.
    pub fn target_engine_event(&self, target: &Path, event: &EngineEvent) {
        self.count(event);
        if let Some(user) = self.published.lock().get(target).cloned() {
            self.report_engine_event(&user, event);
        }
    }

    fn count(&self, event: &EngineEvent) {
        match event {
            EngineEvent::Resumed { stall, .. } => self.metrics.engine_resumed(*stall),
            EngineEvent::Died { .. } => self.metrics.engine_died(),
            EngineEvent::Replaced { .. } | EngineEvent::NotMoved { .. } => {}
        }
    }

    fn report_engine_event(&self, volume: &PublishedVolume, event: &EngineEvent) {
        let (severity, reason) = (event.severity(), event.reason());
        let (subject, note) = (volume.volume.clone(), event.note(&volume.bucket));
        self.record(volume, EventDetails { severity, reason, subject, note });
    }

    /// Records an Event about a target.
    pub fn report(&self, target: &Path, severity: EventType, reason: &'static str, text: &str) {
        self.report_about(target, "", severity, reason, text);
    }

    /// The same about a detail of it, such as a mount option: Events about different details do not repeat each other.
    pub fn report_about(&self, target: &Path, detail: &str, severity: EventType, reason: &'static str, text: &str) {
        let Some(volume) = self.published.lock().get(target).cloned() else { return };
        let subject = format!("{} {detail}", volume.volume);
        let note = format!("bucket {:?}: {text}", volume.bucket);
        self.record(&volume, EventDetails { severity, reason, subject, note });
    }

    fn record(&self, volume: &PublishedVolume, details: EventDetails) {
        if let Some(workload) = &volume.workload {
            self.recorder.record(workload, details);
        }
    }

    /// The last engine event of a mounted source.
    pub fn last_engine_event(&self, source: &str) -> Option<EngineEvent> {
        self.engine_events.lock().get(source).cloned()
    }

    /// The same for the source of a published target.
    pub fn last_event_of_target(&self, target: &Path) -> Option<EngineEvent> {
        let source = self.published.lock().get(target)?.source.clone()?;
        self.last_engine_event(&source)
    }

    /// The source is no longer mounted.
    pub fn forget(&self, source: &str) {
        self.engine_events.lock().remove(source);
    }

    /// Completes when the conditions of Mountpoint Pods may have changed.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// The driver's temporary credentials expire at this time. Records an Event on the workloads that use them once they have.
    pub fn driver_credentials(&self, expires: Option<SystemTime>) {
        let Some(expires) = expires else { return };
        self.metrics.credentials_expire(expires);
        if SystemTime::now() < expires {
            return;
        }
        let (severity, reason) = (EventType::Warning, DRIVER_CREDENTIALS_EXPIRED);
        let published: Vec<_> = self.published.lock().values().cloned().collect();
        for volume in published.iter().filter(|it| it.authentication == AuthenticationSource::Driver) {
            let note = format!("bucket {:?}: {DRIVER_CREDENTIALS_EXPIRED_NOTE}", volume.bucket);
            self.record(volume, EventDetails { severity, reason, subject: volume.volume.clone(), note });
        }
    }

    /// Reports keys of workloads that expired, because kubelet's calls brought no others, for the life of the program.
    pub async fn watch_expiry_forever(self: Arc<Self>) {
        let mut pace = tokio::time::interval(EXPIRY_PERIOD);
        loop {
            pace.tick().await;
            let now = SystemTime::now();
            let is_expired = |it: &&PublishedVolume| it.expires.is_some_and(|expires| expires <= now);
            let expired: Vec<_> = self.published.lock().values().filter(is_expired).cloned().collect();
            for volume in &expired {
                let (severity, reason) = (EventType::Warning, WORKLOAD_CREDENTIALS_EXPIRED);
                let note = format!("bucket {:?}: {WORKLOAD_CREDENTIALS_EXPIRED_NOTE}", volume.bucket);
                self.record(volume, EventDetails { severity, reason, subject: volume.volume.clone(), note });
            }
        }
    }

    /// Updates the metrics for the age and the expiry of credentials.
    pub fn measure(&self) {
        let first = self.published.lock().values().filter_map(|it| it.expires).min();
        self.metrics.workload_credentials_expire(first);
        let oldest = self.published.lock().values().map(|it| it.refreshed).min();
        self.metrics.credentials_aged(oldest.map_or(Duration::ZERO, |it| it.elapsed()));
    }
}

impl EngineEvent {
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Resumed { .. } => "EngineResumed",
            Self::Replaced { .. } => "EngineReplaced",
            Self::NotMoved { .. } => "MountNotMoved",
            Self::Died { .. } => "EngineDied",
        }
    }

    const fn severity(&self) -> EventType {
        match self {
            Self::Replaced { .. } => EventType::Normal,
            Self::Resumed { .. } | Self::NotMoved { .. } | Self::Died { .. } => EventType::Warning,
        }
    }

    fn note(&self, bucket: &str) -> String {
        match self {
            Self::Resumed { cause, stall } => format!(
                "the engine of bucket {bucket:?} died ({cause}); a new engine resumed the mount after {} ms, open files stay valid",
                stall.as_millis()
            ),
            Self::Replaced { reason, stall } => format!(
                "the engine of bucket {bucket:?} was replaced ({reason}); applications waited {} ms, open files stay valid",
                stall.as_millis()
            ),
            Self::NotMoved { cause } => format!(
                "the mount of bucket {bucket:?} was not moved to the new Mountpoint Pod ({cause}); the old one serves on, and it is \
                 tried again"
            ),
            Self::Died { error } => format!(
                "the engine of bucket {bucket:?} died and was not replaced: {error}; kubelet's next call mounts the volume again"
            ),
        }
    }
}
