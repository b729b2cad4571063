//! The controller of strategy `pod`: for each PV on each node observe → decide → apply → report.
//!
//! Watches feed a cache of facts and a queue of keys; each key is reconciled by one worker at a time. `s3csi_core::attachment`
//! decides; no state is kept that the API server does not have. If several controllers run, the holder of a Lease works and
//! the others stand by. Two that work at the same time do no harm, see there.

mod apply;
mod cache;
mod facts;
pub mod failpoints;
mod headroom;
pub mod headroom_pod;
mod health;
mod leader_election;
pub mod pod;
mod pool;
mod queue;
mod reconcile;
mod status;
mod uncached;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::CSINode;
use kube::{Api, Client};
use parking_lot::Mutex;
use s3csi_core::attachment::{Timestamp, Workload};
use s3csi_core::headroom::Reservation;
use s3csi_core::publish::InlineVolumes;
use s3csi_core::{Chain, WorkloadUid};
use tokio::task::JoinSet;

use self::apply::Apply;
use self::cache::{Cache, ReconcileKey, ReconcileKeys};
use self::failpoints::Failpoints;
use self::headroom::HeadroomReconciler;
pub use self::health::Health;
use self::leader_election::LeaderElection;
pub use self::leader_election::LeaderElectionConfig;
use self::pod::{Platform, PodSettings};
use self::pool::Pools;
use self::queue::{Priority, Queue};
use self::reconcile::{ReconcileOutcome, Reconciler, VolumeLocks};
use self::status::StatusReporter;
use crate::api;
use crate::api::watch::{FieldSelector, Watch, WatchHandler, WatchUpdate};

/// How often everything is reconciled without a change: watch events may be lost.
const RESYNC_INTERVAL: Duration = Duration::from_mins(2);

/// How many workloads get headroom Pods at the same time: a Deployment may create hundreds at once.
const HEADROOM_WORKERS: usize = 8;

/// Between two attempts to find out.
const PLATFORM_RETRY: Duration = Duration::from_secs(2);

/// Configuration of a controller.
#[derive(Clone, Debug)]
pub struct ControllerConfig {
    pub pods: PodSettings,
    /// Unique for each process.
    pub identity: String,
    /// `None`: work at once, without an election.
    pub leader_election: Option<LeaderElectionConfig>,
    pub workers: NonZeroUsize,
    /// How many Mountpoint Pods of a node are replaced at the same time after an upgrade of the driver.
    pub upgrades_per_node: usize,
    /// How many warm Mountpoint Pods each node has that runs the node plugin.
    pub warm_pods: usize,
    pub new_workloads: NewWorkloads,
    pub inline_volumes: InlineVolumes,
    pub failpoints: Failpoints,
}

impl ControllerConfig {
    fn reservation(&self) -> Reservation {
        match (&self.pods.headroom, self.new_workloads) {
            (Some(_), NewWorkloads::Attached) => Reservation::On,
            (None, _) | (_, NewWorkloads::LeftAlone) => Reservation::Off,
        }
    }
}

/// What happens to workloads without a Mountpoint Pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewWorkloads {
    Attached,
    /// Another strategy mounts them: existing Mountpoint Pods are kept until their workloads end.
    LeftAlone,
}

/// Works while it is the leader, until `shutdown` completes.
pub async fn run(client: Client, config: ControllerConfig, health: Arc<Health>, shutdown: impl Future<Output = ()>) {
    let mut shutdown = std::pin::pin!(shutdown);
    let Some(election_config) = config.leader_election.clone() else {
        tokio::select! {
            () = work(&client, &config, &health) => {}
            () = &mut shutdown => {}
        }
        return;
    };
    let mut election = LeaderElection::new(client.clone(), election_config);
    loop {
        let leader_since = tokio::select! {
            since = election.acquire(&health.election) => since,
            () = &mut shutdown => return,
        };
        tracing::info!(identity = config.identity, "became leader");
        // Dropping the future ends the work between any two calls, as a crash would.
        tokio::select! {
            () = work(&client, &config, &health) => {}
            () = election.renew(&health.election, leader_since) => {
                tracing::warn!(identity = config.identity, "lost the Lease, standing by");
            }
            () = &mut shutdown => {
                election.release().await;
                return;
            }
        }
        health.stop_leading();
    }
}

/// Whether the cluster assigns the users of Pods. Retried until the API server answers: nothing can be done before.
pub async fn platform(client: &Client) -> Platform {
    loop {
        let error = match api::call::call(client.list_api_groups()).await {
            Ok(groups) if groups.groups.iter().any(|it| it.name == "config.openshift.io") => {
                return Platform::OpenShift;
            }
            Ok(_) => return Platform::Kubernetes,
            Err(error) => error,
        };
        tracing::warn!(error = %Chain(&error), "failed to list API groups, retrying");
        tokio::time::sleep(PLATFORM_RETRY).await;
    }
}

/// Never returns. The cache is filled from scratch each time, so that nothing in it is older than our leadership.
async fn work(client: &Client, config: &ControllerConfig, health: &Arc<Health>) {
    let keys = &config.pods.keys;
    let (status, event_writer) = StatusReporter::new(client, keys.driver(), &config.identity, config.failpoints);
    let pool_queue = Arc::new(Queue::default());
    let pool_size = match config.new_workloads {
        NewWorkloads::Attached => config.warm_pods,
        NewWorkloads::LeftAlone => 0,
    };
    health.expect_nodes(0 < pool_size);
    let headroom_queue = Arc::new(Queue::default());
    let reconciler = Arc::new(Reconciler {
        cache: Mutex::new(
            Cache::new(keys.driver(), &config.pods.driver_version, config.upgrades_per_node)
                .with_new_workloads(config.new_workloads)
                .with_inline_volumes(config.inline_volumes)
                .with_pool_queue(pool_queue.clone())
                .with_headroom(config.reservation(), headroom_queue.clone()),
        ),
        single_node_volumes: VolumeLocks::default(),
        replacements: tokio::sync::Mutex::default(),
        apply: Apply::new(client, config.pods.clone(), config.failpoints),
        status,
    });
    let queue = Arc::new(Queue::default());
    health.start_leading(&queue);
    {
        let reconciler = reconciler.clone();
        health.count_with(move || reconciler.cache.lock().counts());
    }
    let mut tasks = JoinSet::new();
    tasks.spawn(event_writer);
    watch_all(&mut tasks, client, config, health, &reconciler, &queue);
    if 0 < pool_size {
        let driver = keys.driver().to_owned();
        tasks.spawn(watch_nodes(Api::all(client.clone()), driver, health.clone(), reconciler.clone()));
    }
    let queues = Queues { volumes: queue.clone(), pools: pool_queue.clone(), headroom: headroom_queue.clone() };
    tasks.spawn(resync_periodically(reconciler.clone(), queues));
    let headroom = HeadroomReconciler { client: client.clone(), reconciler: reconciler.clone(), queue: headroom_queue };
    let headroom = Arc::new(headroom);
    for _ in 0..HEADROOM_WORKERS {
        tasks.spawn(run_headroom(headroom.clone(), health.clone()));
    }
    let pools = Pools { reconciler: reconciler.clone(), queue: pool_queue, size: pool_size };
    tasks.spawn(run_pools(pools, health.clone()));
    for _ in 0..config.workers.get() {
        tasks.spawn(run_worker(reconciler.clone(), queue.clone(), health.clone()));
    }
    while let Some(ended) = tasks.join_next().await {
        // Only a panic ends one of them; the others are of no use without it.
        if let Err(error) = ended {
            tracing::error!(%error, "a controller task panicked, restarting all");
            return;
        }
    }
}

fn watch_all(
    tasks: &mut JoinSet<()>,
    client: &Client,
    config: &ControllerConfig,
    health: &Arc<Health>,
    reconciler: &Arc<Reconciler>,
    queue: &Arc<Queue<ReconcileKey>>,
) {
    macro_rules! watch {
        ($heartbeat:ident, $api:expr, $fact:expr, $update:expr) => {{
            let (health, reconciler, queue) = (health.clone(), reconciler.clone(), queue.clone());
            let api = $api;
            tasks.spawn(async move {
                let update = |update| {
                    enqueue(&queue, $update(&mut reconciler.cache.lock(), update), Priority::Normal);
                };
                let watch = Watch { api, selector: FieldSelector::All, heartbeat: &health.$heartbeat };
                watch.run($fact, update).await;
            });
        }};
    }
    let keys = config.pods.keys.clone();
    let driver = keys.driver().to_owned();
    let namespace = &config.pods.namespace;
    watch!(attachments, api::attachments(client.clone(), &driver), facts::attachment, Cache::update_attachments);
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    watch!(volumes, volumes, |it| facts::volume(&driver, it), Cache::update_volumes);
    let claims: Api<PersistentVolumeClaim> = Api::all(client.clone());
    watch!(claims, claims, facts::claim, Cache::update_claims);
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    watch!(pods, pods, |it| facts::own_pod(&keys, it), Cache::update_own_pods);
    let handler = WorkloadHandler { reconciler: reconciler.clone(), queue: queue.clone() };
    let driver = config.pods.keys.driver().to_owned();
    let fields = workload_selector(namespace, config.reservation());
    tasks.spawn(watch_workloads(Api::all(client.clone()), driver, fields, health.clone(), handler));
}

/// Pods that have ended need nothing any more, and those that are not scheduled nothing yet but room. The API server reports a Pod that
/// no longer matches the selector as deleted.
fn workload_selector(mountpoint_namespace: &str, reservation: Reservation) -> String {
    let living = format!("status.phase!=Succeeded,status.phase!=Failed,metadata.namespace!={mountpoint_namespace}");
    match reservation {
        Reservation::On => living,
        Reservation::Off => format!("spec.nodeName!=,{living}"),
    }
}

async fn watch_workloads(api: Api<Pod>, driver: String, fields: String, health: Arc<Health>, handler: WorkloadHandler) {
    // A workload that an attachment names and a later list does not is known to be gone, without waiting until it is stale.
    health.attachments.wait_until_listed().await;
    let watch = Watch { api, selector: FieldSelector::Required(fields), heartbeat: &health.workloads };
    watch.run(|it| facts::workload(&driver, it), handler).await;
}

async fn watch_nodes(api: Api<CSINode>, driver: String, health: Arc<Health>, reconciler: Arc<Reconciler>) {
    let watch = Watch { api, selector: FieldSelector::All, heartbeat: &health.nodes };
    let update = |update| {
        reconciler.cache.lock().update_nodes(update, now());
    };
    watch.run(|it| facts::node_registration(&driver, it), update).await;
}

async fn run_pools(pools: Pools, health: Arc<Health>) {
    // Before everything is listed, pools look empty and nodes without plugin.
    health.wait_until_listed().await;
    pools.run(now).await;
}

async fn run_headroom(headroom: Arc<HeadroomReconciler>, health: Arc<Health>) {
    // Before everything is listed, workloads look gone.
    health.wait_until_listed().await;
    headroom.run().await;
}

/// What is reconciled now and then without a change.
struct Queues {
    volumes: Arc<Queue<ReconcileKey>>,
    pools: Arc<Queue<String>>,
    headroom: Arc<Queue<WorkloadUid>>,
}

struct WorkloadHandler {
    reconciler: Arc<Reconciler>,
    queue: Arc<Queue<ReconcileKey>>,
}

impl WatchHandler<Workload> for WorkloadHandler {
    fn before_list(&mut self) {
        self.reconciler.cache.lock().expect_attached_workloads();
    }

    fn update(&mut self, update: WatchUpdate<Workload>) {
        let affected = self.reconciler.cache.lock().update_workloads(update, std::time::Instant::now());
        enqueue(&self.queue, affected, Priority::Normal);
    }
}

fn enqueue(queue: &Queue<ReconcileKey>, keys: ReconcileKeys, priority: Priority) {
    for key in keys {
        queue.add(key, Duration::ZERO, priority);
    }
}

/// Reconciles everything now and then: some decisions depend on time, and watch events may be lost.
async fn resync_periodically(reconciler: Arc<Reconciler>, queues: Queues) {
    loop {
        tokio::time::sleep(RESYNC_INTERVAL).await;
        let keys = {
            let mut cache = reconciler.cache.lock();
            cache.expire_gone(std::time::Instant::now());
            reconciler.status.events.forget_pods(|uid| uid.parse().is_ok_and(|uid| cache.workload(&uid).is_none()));
            cache.all_keys()
        };
        // New workloads do not wait until everything else was looked at.
        enqueue(&queues.volumes, keys, Priority::Low);
        for node in reconciler.cache.lock().pool_nodes() {
            queues.pools.add(node, Duration::ZERO, Priority::Low);
        }
        for workload in reconciler.cache.lock().headroom_workloads() {
            queues.headroom.add(workload, Duration::ZERO, Priority::Low);
        }
    }
}

async fn run_worker(reconciler: Arc<Reconciler>, queue: Arc<Queue<ReconcileKey>>, health: Arc<Health>) {
    // Before everything is listed, much would look unused.
    health.wait_until_listed().await;
    loop {
        let key = queue.next().await;
        let start = std::time::Instant::now();
        let outcome = reconciler.reconcile(&key, now()).await;
        health.metrics().reconciled(outcome.name(), start.elapsed());
        match outcome {
            ReconcileOutcome::Done { requeue_after } => queue.done(&key, requeue_after),
            ReconcileOutcome::Retry => {
                queue.failed(&key);
            }
        }
    }
}

fn now() -> Timestamp {
    Timestamp::from_unix_seconds(k8s_openapi::jiff::Timestamp::now().as_second())
}
