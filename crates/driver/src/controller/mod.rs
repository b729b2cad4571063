//! The controller of strategy `pod`: for each PV on each node observe → decide → apply → report.
//!
//! Watches feed a cache of facts and a queue of units; workers take one unit each and look at it. What to do is decided by
//! `s3csi_core::attachment`; nothing is remembered that the API server does not know. If several controllers run, the
//! holder of a Lease works and the others wait. Even two that work at once do no harm, see there.

mod apply;
mod cache;
mod election;
mod facts;
mod fresh;
pub mod names;
pub mod pod;
mod queue;
mod reconcile;
mod report;
pub mod steps;
mod vitals;
mod watch;

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use kube::{Api, Client};
use s3csi_core::Chain;
use s3csi_core::attachment::Timestamp;
use tokio::task::JoinSet;

use self::apply::{Apply, lock};
use self::cache::{Affected, Cache, Unit};
pub use self::election::Candidacy;
use self::election::Election;
use self::pod::{Platform, PodSettings};
use self::queue::Queue;
use self::reconcile::{Outcome, Reconciler};
use self::report::Report;
use self::steps::Steps;
pub use self::vitals::Vitals;
use self::watch::Selection;
use crate::api;

/// How often everything is looked at, whether or not a watch told anything: what was lost is found again.
const LOOK_AT_ALL_EVERY: Duration = Duration::from_mins(2);

const PLATFORM_PAUSE: Duration = Duration::from_secs(2);

/// Everything a controller needs to know.
#[derive(Clone, Debug)]
pub struct Settings {
    pub pods: PodSettings,
    /// Of this process, different for each.
    pub identity: String,
    /// Without it we work at once, whoever else does.
    pub candidacy: Option<Candidacy>,
    pub workers: NonZeroUsize,
    pub steps: Steps,
}

/// Works, whenever elected, until `shutdown` completes.
pub async fn run(client: Client, settings: Settings, vitals: Arc<Vitals>, shutdown: impl Future<Output = ()>) {
    let mut shutdown = std::pin::pin!(shutdown);
    let Some(candidacy) = settings.candidacy.clone() else {
        tokio::select! {
            () = work(&client, &settings, &vitals) => {}
            () = &mut shutdown => {}
        }
        return;
    };
    let mut election = Election::new(client.clone(), candidacy);
    loop {
        tokio::select! {
            () = election.win(&vitals.election) => {}
            () = &mut shutdown => return,
        }
        tracing::info!(identity = settings.identity, "elected, working");
        // Dropping the work ends it between any two calls, as a crash would.
        tokio::select! {
            () = work(&client, &settings, &vitals) => {}
            () = election.hold(&vitals.election) => {
                tracing::warn!(identity = settings.identity, "lost the Lease, waiting for the next election");
            }
            () = &mut shutdown => {
                election.resign().await;
                return;
            }
        }
        vitals.rest();
    }
}

/// Whether the cluster chooses users of Pods itself. Asks until there is an answer: nothing can be done before.
pub async fn platform(client: &Client) -> Platform {
    loop {
        let error = match api::call::call(client.list_api_groups()).await {
            Ok(groups) if groups.groups.iter().any(|it| it.name == "config.openshift.io") => {
                return Platform::OpenShift;
            }
            Ok(_) => return Platform::Kubernetes,
            Err(error) => error,
        };
        tracing::warn!(error = %Chain(&error), "cannot tell what kind of cluster this is, asking again");
        tokio::time::sleep(PLATFORM_PAUSE).await;
    }
}

/// Never returns. The caches are filled anew each time, so that nothing in them is older than our leadership.
async fn work(client: &Client, settings: &Settings, vitals: &Arc<Vitals>) {
    let names = &settings.pods.names;
    let reconciler = Arc::new(Reconciler {
        cache: Mutex::new(Cache::new(names.driver(), &settings.pods.driver_version)),
        apply: Apply::new(client, settings.pods.clone(), settings.steps),
        report: Report::new(client, names.driver(), &settings.identity, settings.steps),
    });
    let queue = Arc::new(Queue::default());
    vitals.begin(&queue);
    {
        let reconciler = reconciler.clone();
        vitals.count_with(move || lock(&reconciler.cache).tally());
    }
    let mut tasks = JoinSet::new();
    follow_all(&mut tasks, client, settings, vitals, &reconciler, &queue);
    tasks.spawn(look_at_all_now_and_then(reconciler.clone(), queue.clone()));
    for _ in 0..settings.workers.get() {
        tasks.spawn(look_forever(reconciler.clone(), queue.clone(), vitals.clone()));
    }
    while let Some(ended) = tasks.join_next().await {
        // Only a panic ends one of them; without it the rest is worth nothing, so we start over.
        if let Err(error) = ended {
            tracing::error!(%error, "a task of the controller ended, starting over");
            return;
        }
    }
}

fn follow_all(
    tasks: &mut JoinSet<()>,
    client: &Client,
    settings: &Settings,
    vitals: &Arc<Vitals>,
    reconciler: &Arc<Reconciler>,
    queue: &Arc<Queue<Unit>>,
) {
    macro_rules! follow {
        ($pulse:ident, $api:expr, $fact:expr, $tell:expr) => {{
            let (vitals, reconciler, queue) = (vitals.clone(), reconciler.clone(), queue.clone());
            let api = $api;
            tasks.spawn(async move {
                let tell = |news| look_at(&queue, $tell(&mut lock(&reconciler.cache), news));
                watch::follow(api, Selection::default(), &vitals.$pulse, || {}, $fact, tell).await;
            });
        }};
    }
    let names = settings.pods.names.clone();
    let driver = names.driver().to_owned();
    let namespace = &settings.pods.namespace;
    follow!(attachments, api::attachments(client.clone(), &driver), facts::attachment, Cache::tell_attachments);
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    follow!(volumes, volumes, |it| facts::volume(&driver, it), Cache::tell_volumes);
    let claims: Api<PersistentVolumeClaim> = Api::all(client.clone());
    follow!(claims, claims, facts::claim, Cache::tell_claims);
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    follow!(pods, pods, |it| facts::started_pod(&names, it), Cache::tell_pods);
    tasks.spawn(follow_workloads(
        Api::all(client.clone()),
        namespace.clone(),
        vitals.clone(),
        reconciler.clone(),
        queue.clone(),
    ));
}

async fn follow_workloads(
    api: Api<Pod>,
    mountpoint_namespace: String,
    vitals: Arc<Vitals>,
    reconciler: Arc<Reconciler>,
    queue: Arc<Queue<Unit>>,
) {
    // Pods that nobody has scheduled need nothing yet, those that have ended nothing any more: leaving the selection is
    // told like a deletion.
    let fields = format!(
        "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed,metadata.namespace!={mountpoint_namespace}"
    );
    let selection = Selection { fields: Some(fields) };
    // Then a workload that an attachment names and this list does not is gone for sure, and nobody waits until it is stale.
    vitals.attachments.wait_until_listed().await;
    let begin = || lock(&reconciler.cache).expect_attached_workloads();
    let tell = |news| {
        let affected = lock(&reconciler.cache).tell_workloads(news, std::time::Instant::now());
        look_at(&queue, affected);
    };
    watch::follow(api, selection, &vitals.workloads, begin, facts::workload, tell).await;
}

fn look_at(queue: &Queue<Unit>, affected: Affected) {
    for unit in affected {
        queue.add(unit, Duration::ZERO);
    }
}

/// What no event told: time alone changes some answers, and events may be lost.
async fn look_at_all_now_and_then(reconciler: Arc<Reconciler>, queue: Arc<Queue<Unit>>) {
    loop {
        tokio::time::sleep(LOOK_AT_ALL_EVERY).await;
        let units = {
            let mut cache = lock(&reconciler.cache);
            cache.forget_gone(std::time::Instant::now());
            reconciler.report.forget(|uid| cache.workload(uid).is_none());
            cache.units()
        };
        look_at(&queue, units);
    }
}

async fn look_forever(reconciler: Arc<Reconciler>, queue: Arc<Queue<Unit>>, vitals: Arc<Vitals>) {
    // Before everything is known, much would look unused.
    vitals.wait_until_listed().await;
    loop {
        let unit = queue.next().await;
        let start = std::time::Instant::now();
        let outcome = reconciler.look_at(&unit, now()).await;
        vitals.metrics().reconciled(outcome.name(), start.elapsed());
        match outcome {
            Outcome::Done { look_again_in } => queue.done(&unit, look_again_in),
            Outcome::TryAgain => {
                queue.failed(&unit);
            }
        }
    }
}

fn now() -> Timestamp {
    Timestamp::from_unix_seconds(k8s_openapi::jiff::Timestamp::now().as_second())
}
