//! `s3csi controller`.

use std::net::SocketAddr;
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use s3csi_core::publish::SingleNodeVolumes;
use s3csi_core::stage::StageLimit;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::Instant;

use super::allocator::ensure_one_heap;
use super::headroom::HeadroomArgs;
use super::kubernetes::KubernetesArgs;
use super::log::LogArgs;
use super::mountpoint_resources::MountpointResourcesArgs;
use super::provisioning::ProvisioningArgs;
use super::{Strategy, Switch, shutdown_signal};
use crate::api::MetadataKeys;
use crate::controller::failpoints::{Failpoint, Failpoints};
use crate::controller::pod::PodSettings;
use crate::controller::{self, ControllerConfig, Health, LeaderElectionConfig, NewWorkloads};
use crate::csi::provisioning::ProvisioningServer;
use crate::metrics::ControllerMetrics;
use crate::{csi, health};

pub const EXAMPLE: &str = "\
Example, outside of a cluster:
  s3csi controller --kubeconfig ~/.kube/config --mountpoint-image ghcr.io/example/s3csi:1.0.0 --leader-election off

Example, dynamic provisioning only:
  AWS_ENDPOINT_URL=http://s3.example.com:8000 s3csi controller --strategy daemon --csi-endpoint unix:/csi/csi.sock";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LeaderElection {
    /// Only the holder of the Lease is active.
    On,
    /// This controller is always active. Several at once are safe, but do some work twice.
    Off,
}

#[derive(Args, Debug)]
pub struct ControllerArgs {
    #[command(flatten)]
    kubernetes: KubernetesArgs,

    #[command(flatten)]
    provisioning: ProvisioningArgs,

    #[command(flatten)]
    mountpoint_resources: MountpointResourcesArgs,

    #[command(flatten)]
    headroom: HeadroomArgs,

    /// How engines are run on the nodes. With strategies other than pod, the controller only serves the CSI socket.
    #[arg(long, env = "MOUNTER_KIND", value_enum, default_value = "pod")]
    strategy: Strategy,

    /// Earlier strategies whose mounts are served until their workloads end. With pod, Mountpoint Pods are looked after, and no
    /// new workload gets one.
    #[arg(long, value_enum, value_name = "STRATEGY,…", value_delimiter = ',')]
    draining: Vec<Strategy>,

    /// Name of the driver; labels, annotations and the API group of attachments derive from it.
    #[arg(long, env = "DRIVER_NAME", value_name = "NAME", default_value = "s3.csi.scality.com")]
    driver_name: String,

    /// Namespace of Mountpoint Pods.
    #[arg(long, env = "MOUNTPOINT_NAMESPACE", value_name = "NAMESPACE", default_value = "mount-s3")]
    mountpoint_namespace: String,

    /// Image of Mountpoint Pods, normally the controller's own.
    #[arg(long, env = "MOUNTPOINT_IMAGE", value_name = "IMAGE", default_value = "", hide_default_value = true)]
    mountpoint_image: String,

    /// Image pull policy of Mountpoint Pods [default: that of Kubernetes]
    #[arg(long, env = "MOUNTPOINT_IMAGE_PULL_POLICY", value_name = "POLICY")]
    mountpoint_image_pull_policy: Option<String>,

    /// Image pull secrets, in the namespace of Mountpoint Pods.
    #[arg(long, env = "MOUNTPOINT_IMAGE_PULL_SECRETS", value_name = "NAME,…", value_delimiter = ',')]
    mountpoint_image_pull_secrets: Vec<String>,

    /// Path of the mounter in the image.
    #[arg(long, env = "MOUNTPOINT_CONTAINER_COMMAND", value_name = "PATH", default_value = "/bin/s3csi-mounter")]
    mountpoint_container_command: String,

    /// Arguments of the mounter in Mountpoint Pods, separated by commas.
    #[arg(
        long,
        env = "MOUNTER_ARGUMENTS",
        value_name = "ARGUMENTS",
        value_delimiter = ',',
        allow_hyphen_values = true
    )]
    mounter_arguments: Vec<String>,

    /// Version of the engine in the image, for a label [default: the driver's own]
    #[arg(long, env = "MOUNTPOINT_VERSION", value_name = "VERSION")]
    mountpoint_version: Option<String>,

    /// Priority class of Mountpoint Pods.
    #[arg(long, env = "MOUNTPOINT_PRIORITY_CLASS_NAME", value_name = "NAME")]
    mountpoint_priority_class_name: Option<String>,

    /// ConfigMap in the namespace of Mountpoint Pods whose key ca-bundle.crt has CA certificates for engines to trust.
    #[arg(long, env = "TLS_CA_CERT_CONFIGMAP", value_name = "NAME")]
    tls_ca_cert_configmap: Option<String>,

    /// Size limit of the volume in which Mountpoint Pods stage files above 8 MiB that are edited in place; 0: no such volume.
    #[arg(long, env = "MOUNTPOINT_STAGE_SIZE_LIMIT", value_name = "QUANTITY", default_value = "1Gi")]
    mountpoint_stage_size_limit: StageLimit,

    /// Whether volumes in the specs of Pods get Mountpoint Pods; only with keys of their own.
    #[arg(long, env = "INLINE_VOLUMES", value_enum, default_value = "off")]
    inline_volumes: Switch,

    /// Whether controllers elect a leader.
    #[arg(long, value_enum, default_value = "on")]
    leader_election: LeaderElection,

    /// Name of the Lease.
    #[arg(long, value_name = "NAME", default_value = "s3-csi-controller")]
    lease_name: String,

    /// Namespace of the Lease [default: the Pod's own]
    #[arg(long, env = "POD_NAMESPACE", value_name = "NAMESPACE")]
    lease_namespace: Option<String>,

    /// Time after which a Lease that is not renewed expires.
    #[arg(long, value_name = "SECONDS", default_value = "15")]
    lease_duration: NonZeroU64,

    /// Name of this controller among several, for the Lease and in Events [default: the host's name and a number]
    #[arg(long, env = "POD_NAME", value_name = "NAME")]
    identity: Option<String>,

    /// Number of volumes that are reconciled concurrently.
    #[arg(long, value_name = "NUMBER", default_value = "32")]
    workers: NonZeroUsize,

    /// How many Mountpoint Pods of a node are replaced at the same time after an upgrade of the driver; 0: none, they keep
    /// their version as long as they are in use.
    #[arg(long, env = "UPGRADES_PER_NODE", value_name = "NUMBER", default_value = "1")]
    upgrades_per_node: usize,

    /// How many warm Mountpoint Pods each node has that runs the node plugin: they run an idle mounter, and the next volume of the node
    /// adopts one instead of waiting until its own has started.
    #[arg(long, env = "MOUNTPOINT_WARM_PODS", value_name = "NUMBER", default_value = "0")]
    mountpoint_warm_pods: usize,

    /// Address to serve /healthz, /readyz and /metrics on [default: not served]
    #[arg(long, value_name = "ADDRESS:PORT")]
    health_address: Option<SocketAddr>,

    #[command(flatten)]
    log: LogArgs,

    /// For tests of crashes: end right after the first call of this kind.
    #[arg(long, hide = true, value_enum, value_name = "STEP")]
    stop_after: Option<Failpoint>,
}

const VERSION: &str = env!("CARGO_PKG_VERSION");

impl ControllerArgs {
    #[expect(clippy::too_many_lines, reason = "each flag is named once where it is used")]
    pub fn run(self) -> anyhow::Result<()> {
        // No `..`: an unused flag does not compile.
        let Self {
            kubernetes,
            provisioning,
            mountpoint_resources,
            headroom,
            strategy,
            draining,
            driver_name,
            mountpoint_namespace,
            mountpoint_image,
            mountpoint_image_pull_policy,
            mountpoint_image_pull_secrets,
            mountpoint_container_command,
            mounter_arguments,
            mountpoint_version,
            mountpoint_priority_class_name,
            tls_ca_cert_configmap,
            mountpoint_stage_size_limit,
            inline_volumes,
            leader_election,
            lease_name,
            lease_namespace,
            lease_duration,
            identity,
            workers,
            upgrades_per_node,
            mountpoint_warm_pods,
            health_address,
            log,
            stop_after,
        } = self;
        log.start();
        if let Err(error) = ensure_one_heap() {
            tracing::warn!(%error, "each thread may keep a heap of its own");
        }
        let new_workloads = if strategy == Strategy::Pod { NewWorkloads::Attached } else { NewWorkloads::LeftAlone };
        let gives_pods = strategy == Strategy::Pod || draining.contains(&Strategy::Pod);
        check_purpose(gives_pods, &provisioning, &mountpoint_image)?;
        let identity = set(identity).map_or_else(own_name, Ok)?;

        let runtime = tokio::runtime::Runtime::new().context("failed to start the async runtime")?;
        runtime.block_on(async {
            let metrics = Arc::new(ControllerMetrics::new());
            let stopping = Stopping::new(shutdown_signal()?);
            let single_node = match new_workloads {
                NewWorkloads::Attached => SingleNodeVolumes::Enforced,
                NewWorkloads::LeftAlone => SingleNodeVolumes::Refused,
            };
            let volumes = provisioning.server(&driver_name, single_node)?;
            let socket = volumes.as_ref().map(|it| it.socket.clone());
            let health = gives_pods.then(|| Arc::new(Health::new(metrics.clone())));
            if let Some(address) = health_address {
                serve_health(address, metrics.clone(), health.clone(), socket).await?;
            }
            let volumes = serve_volumes(volumes, stopping.asked());
            let Some(health) = health else {
                return volumes.await;
            };
            let pods = async {
                let client = kubernetes.client(metrics.api()).await?;
                let election_config = (leader_election == LeaderElection::On).then(|| LeaderElectionConfig {
                    namespace: set(lease_namespace).unwrap_or_else(|| client.default_namespace().to_owned()),
                    lease: lease_name,
                    identity: identity.clone(),
                    duration: Duration::from_secs(lease_duration.get()),
                });
                let mut shutdown = std::pin::pin!(stopping.asked());
                let platform = tokio::select! {
                    platform = controller::platform(&client) => platform,
                    () = &mut shutdown => return Ok(()),
                };
                let settings = ControllerConfig {
                    pods: PodSettings {
                        keys: MetadataKeys::new(&driver_name),
                        namespace: mountpoint_namespace,
                        image: mountpoint_image,
                        image_pull_policy: set(mountpoint_image_pull_policy),
                        image_pull_secrets: without_empty(mountpoint_image_pull_secrets),
                        command: mountpoint_container_command,
                        mounter_arguments: without_empty(mounter_arguments),
                        priority_class: set(mountpoint_priority_class_name),
                        mountpoint_version: set(mountpoint_version).unwrap_or_else(|| VERSION.to_owned()),
                        driver_version: VERSION.to_owned(),
                        ca_config_map: set(tls_ca_cert_configmap),
                        default_resources: mountpoint_resources.defaults(),
                        stage: mountpoint_stage_size_limit,
                        platform,
                        headroom: headroom.settings(),
                    },
                    identity,
                    leader_election: election_config,
                    workers,
                    upgrades_per_node,
                    warm_pods: mountpoint_warm_pods,
                    new_workloads,
                    inline_volumes: inline_volumes.into(),
                    failpoints: Failpoints::stop_after(stop_after),
                };
                tracing::info!(
                    driver = driver_name,
                    version = VERSION,
                    identity = settings.identity,
                    "controller started"
                );
                controller::run(client, settings, health, shutdown).await;
                tracing::info!("stopped");
                Ok(())
            };
            // Each serves on while the other has nothing to do, elected or not; what fails takes the other one along.
            tokio::try_join!(pods, volumes).map(drop)
        })
    }
}

/// The chart passes an empty value for a list without entries.
fn without_empty(values: Vec<String>) -> Vec<String> {
    values.into_iter().filter(|it| !it.is_empty()).collect()
}

/// Without a purpose it would wait for ever and do nothing.
fn check_purpose(gives_pods: bool, provisioning: &ProvisioningArgs, image: &str) -> anyhow::Result<()> {
    anyhow::ensure!(
        gives_pods || provisioning.is_asked_for(),
        "with another strategy than pod there is nothing to do but to serve requests for volumes: set --csi-endpoint"
    );
    anyhow::ensure!(
        !gives_pods || !image.is_empty(),
        "the image of Mountpoint Pods is required: set MOUNTPOINT_IMAGE or --mountpoint-image"
    );
    Ok(())
}

async fn serve_volumes(
    volumes: Option<ProvisioningServer>,
    shutdown: impl Future<Output = ()> + Send,
) -> anyhow::Result<()> {
    match volumes {
        Some(volumes) => volumes.run(shutdown).await,
        None => Ok(()),
    }
}

/// For all tasks that must know when to stop.
struct Stopping(watch::Receiver<bool>);

impl Stopping {
    fn new(asked: impl Future<Output = ()> + Send + 'static) -> Self {
        let (told, stopping) = watch::channel(false);
        tokio::spawn(async move {
            asked.await;
            told.send_replace(true);
        });
        Self(stopping)
    }

    fn asked(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut stopping = self.0.clone();
        async move {
            let _ = stopping.wait_for(|it| *it).await;
        }
    }
}

/// Serves `/healthz` and `/metrics`. Healthy means that the reconciler works and the CSI socket answers, where they are enabled.
async fn serve_health(
    address: SocketAddr,
    metrics: Arc<ControllerMetrics>,
    health: Option<Arc<Health>>,
    socket: Option<PathBuf>,
) -> anyhow::Result<()> {
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("failed to listen on {address} for /healthz and /metrics"))?;
    let address = listener.local_addr().unwrap_or(address);
    tracing::info!(%address, "serving /healthz, /readyz and /metrics");
    let measured = health.clone();
    let show = move || {
        if let Some(health) = &measured {
            health.measure(Instant::now());
        }
        std::future::ready(metrics.render())
    };
    let ask = move |question| {
        let (health, socket) = (health.clone(), socket.clone());
        async move {
            if let Some(health) = health {
                health.check(question, Instant::now())?;
            }
            match socket {
                Some(socket) => csi::health::probe(socket).await,
                None => Ok(()),
            }
        }
    };
    tokio::spawn(health::serve(listener, show, ask));
    Ok(())
}

/// The chart sets the variables of unset values to the empty string.
fn set(text: Option<String>) -> Option<String> {
    text.filter(|it| !it.is_empty())
}

/// The host's name tells people which Pod it is, the number tells apart two processes on it.
fn own_name() -> anyhow::Result<String> {
    let host = rustix::system::uname();
    let host = host.nodename().to_str().context("the host's name is not valid text")?;
    Ok(format!("{host}-{}", std::process::id()))
}
