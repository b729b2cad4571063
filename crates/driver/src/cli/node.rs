//! `s3csi node`: its flags, and how the node plugin is built for each strategy.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use kube::Client;
use s3csi_core::duration::{self, InvalidDuration};
use s3csi_core::environment::DriverSettings;
use s3csi_core::publish::SecretFallback;
use s3csi_handoff::COMMUNICATION_DIRECTORY;
use tokio::runtime::Runtime;

use super::allocator::ensure_one_heap;
use super::background::{BackgroundTasks, NodePaths};
use super::credentials::CredentialArgs;
use super::directories::{resolved_directory, share_directory};
use super::kubernetes::KubernetesArgs;
use super::log::LogArgs;
use super::pod_identity::PodIdentityArgs;
use super::proxy::ProxyArgs;
use super::systemd::SystemdArgs;
use super::{Strategy, Switch, shutdown_signal};
use crate::credentials::workload::WorkloadCredentials;
use crate::csi;
use crate::csi::server::{Endpoint, Server};
use crate::host::{Host, Kernel};
use crate::keyed_locks::KeyedLocks;
use crate::metrics::NodeMetrics;
use crate::node::assignment::AssignmentScope;
use crate::node::engine_config::EngineConfig;
use crate::node::failpoints::{Failpoint, Failpoints};
use crate::node::held_mounts::HeldMounts;
use crate::node::legacy_v1::LegacyProfiles;
use crate::node::other_mounts::OtherMounts;
use crate::node::remediation::Remediations;
use crate::node::source::SourceManager;
use crate::node::strategies::Strategies;
use crate::node::strategies::daemon::Daemon;
use crate::node::strategies::pod::MountpointPods;
use crate::node::strategies::systemd::{
    CacheDirs, CrashLimiter, CredentialDirs, EngineRecovery, Recovery, StageDirs, SystemdUnits, UnitCache, UnitMounts,
};
use crate::node::workload_condition::WorkloadConditions;
use crate::node::{Layout, Node, strategies};
use crate::systemd::{Limits, PRIVATE_SOCKET, Systemd};

pub const EXAMPLE: &str = "\
Without --credentials-directory, the driver's own keys are AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and (optional)
AWS_SESSION_TOKEN; volumes with `authenticationSource: secret` bring their own.

Example:
  AWS_ENDPOINT_URL=http://s3.example.com:8000 s3csi node --node-id worker-1";

/// In the plugin's directory: the credentials directories of strategy systemd.
const SYSTEMD_CREDENTIALS: &str = "systemd";

/// In the plugin's directory: the caches of strategy systemd.
const SYSTEMD_CACHE: &str = "systemd-cache";

/// In the plugin's directory: the staging directories of strategy systemd.
const SYSTEMD_STAGE: &str = "systemd-stage";

/// A call that is stuck in the kernel must not keep the process from ending.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// They only pass messages on, also on a node with a hundred processors: calls have threads of their own.
const ASYNC_WORKERS: usize = 2;

/// Calls come in bursts, and a thread that waits for the next one keeps the pages of its stack.
const CALL_THREAD_KEEP_ALIVE: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RegistrationMode {
    /// Register with kubelet over a socket in `<kubelet path>/plugins_registry`.
    On,
    /// Another process registers the driver (for example the node-driver-registrar sidecar).
    Off,
}

#[derive(Args, Debug)]
pub struct NodeArgs {
    #[command(flatten)]
    kubernetes: KubernetesArgs,

    /// URL of the CSI socket, `unix:/path` [default: `unix:<kubelet path>/plugins/<driver name>/csi.sock`]
    #[arg(long, env = "CSI_ENDPOINT", value_name = "URL")]
    endpoint: Option<Endpoint>,

    /// Path of the CSI socket as kubelet sees it, if it differs [default: the endpoint's path]
    #[arg(long, value_name = "PATH")]
    kubelet_endpoint: Option<PathBuf>,

    /// Name of this node in Kubernetes.
    #[arg(long, env = "CSI_NODE_NAME", value_name = "NAME", default_value = "", hide_default_value = true)]
    node_id: String,

    /// Name of the driver; labels, annotations and paths derive from it.
    #[arg(long, env = "DRIVER_NAME", value_name = "NAME", default_value = "s3.csi.scality.com")]
    driver_name: String,

    /// Root directory of kubelet.
    #[arg(long, env = "KUBELET_PATH", value_name = "DIRECTORY", default_value = "/var/lib/kubelet")]
    kubelet_path: PathBuf,

    /// How engines are run on this node.
    #[arg(long, env = "MOUNTER_KIND", value_enum, default_value = "pod")]
    strategy: Strategy,

    /// Earlier strategies whose mounts are served until their workloads end. Units of systemd run on without it.
    #[arg(long, value_enum, value_name = "STRATEGY,…", value_delimiter = ',')]
    draining: Vec<Strategy>,

    #[command(flatten)]
    mounter: MounterArgs,

    #[command(flatten)]
    systemd: SystemdArgs,

    /// Whether to register with kubelet.
    #[arg(long, value_enum, default_value = "on")]
    registration: RegistrationMode,

    /// Address to serve /healthz and /metrics on [default: not served]
    #[arg(long, value_name = "ADDRESS:PORT")]
    health_address: Option<SocketAddr>,

    /// S3 endpoint of all volumes.
    #[arg(long, env = "AWS_ENDPOINT_URL", value_name = "URL")]
    s3_endpoint_url: Option<String>,

    /// Region to sign requests for, unless a volume sets another.
    #[arg(long, env = "AWS_REGION", value_name = "REGION")]
    s3_region: Option<String>,

    #[command(flatten)]
    proxy: ProxyArgs,

    #[command(flatten)]
    credentials: CredentialArgs,

    #[command(flatten)]
    pod_identity: PodIdentityArgs,

    /// Namespaces of workloads whose volumes use the driver's keys if they say `authenticationSource: secret` and name no Secret, as
    /// volumes of earlier drivers do.
    #[arg(long, env = "SECRET_FALLS_BACK_TO_DRIVER", value_name = "NAMESPACE,…", value_delimiter = ',')]
    secret_falls_back_to_driver: Vec<String>,

    /// Whether volumes in the specs of Pods are mounted; only with keys of their own.
    #[arg(long, env = "INLINE_VOLUMES", value_enum, default_value = "off")]
    inline_volumes: Switch,

    /// Kubernetes version for the user agent.
    #[arg(long, env = "KUBERNETES_VERSION", value_name = "VERSION")]
    kubernetes_version: Option<String>,

    #[command(flatten)]
    log: LogArgs,

    /// For crash tests: abort the process at this failpoint.
    #[arg(long, hide = true, value_enum, value_name = "FAILPOINT")]
    stop_after: Option<Failpoint>,
}

#[derive(Args, Debug)]
struct MounterArgs {
    /// Strategy pod: the namespace of Mountpoint Pods.
    #[arg(long, env = "MOUNTPOINT_NAMESPACE", value_name = "NAME", default_value = "mount-s3")]
    mountpoint_namespace: String,

    /// Strategy daemon: the mounter's directory [default: `<kubelet path>/plugins/<driver name>/mounter`]
    #[arg(long, env = "MOUNTER_DIR", value_name = "DIRECTORY")]
    mounter_dir: Option<PathBuf>,

    /// Strategy daemon: the group of the mounter. Its directory is created for this group, so the mounter need not be root
    /// [default: the directory is left as it is]
    #[arg(long, env = "MOUNTER_GROUP", value_name = "GID")]
    mounter_group: Option<u32>,

    /// How long a mount whose mounter died waits for another one before it is aborted, such as `2m`; `0s`: not at all.
    #[arg(long, env = "LONGEST_OUTAGE", value_name = "DURATION", default_value = "2m", value_parser = longest_outage)]
    longest_outage: Duration,

    /// The mounter's directory as the mounter sees it, if it differs [default: --mounter-dir; strategy pod: /comm]
    #[arg(long, env = "MOUNTER_VIEW", value_name = "DIRECTORY")]
    mounter_view: Option<PathBuf>,
}

impl NodeArgs {
    #[expect(clippy::too_many_lines, reason = "each flag is named once where it is used")]
    pub fn run(self) -> anyhow::Result<()> {
        // No `..`: an unused flag does not compile.
        let Self {
            kubernetes,
            endpoint,
            kubelet_endpoint,
            node_id,
            driver_name,
            kubelet_path,
            strategy,
            mut draining,
            mounter,
            systemd,
            registration,
            health_address,
            s3_endpoint_url,
            s3_region,
            proxy,
            credentials,
            pod_identity,
            secret_falls_back_to_driver,
            inline_volumes,
            kubernetes_version,
            log,
            stop_after,
        } = self;
        log.start();
        if let Err(error) = ensure_one_heap() {
            tracing::warn!(%error, "each thread may keep a heap of its own");
        }
        let endpoint_url = s3_endpoint_url
            .filter(|it| !it.is_empty())
            .context("AWS_ENDPOINT_URL environment variable must be set (or --s3-endpoint-url), for example to http://s3.example.com:8000")?;
        anyhow::ensure!(!node_id.is_empty(), "node-id is required: set CSI_NODE_NAME or --node-id to this node's name");
        let settings = DriverSettings { endpoint_url: Some(endpoint_url), region: s3_region, proxy: proxy.settings()? };
        let sts_ca_bundle = credentials.sts_ca_bundle();
        let driver_credentials = Arc::new(credentials.driver_credentials(&settings)?);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .worker_threads(ASYNC_WORKERS)
            .thread_keep_alive(CALL_THREAD_KEEP_ALIVE)
            .build()
            .context("failed to start the async runtime")?;
        draining.retain(|it| *it != strategy && *it != Strategy::Systemd);
        let metrics = Arc::new(NodeMetrics::new());
        let needs_client =
            strategy == Strategy::Pod || draining.contains(&Strategy::Pod) || pod_identity.reads_service_accounts();
        let client = runtime.block_on(kubernetes.client_if_needed(metrics.api(), needs_client))?;
        let pod_identity = pod_identity.settings(&settings, sts_ca_bundle, client.as_ref())?;
        let engine_config = EngineConfig {
            settings,
            driver_credentials,
            workload_credentials: Arc::new(WorkloadCredentials::new(pod_identity)),
            kubernetes_version,
            ca_bundle: None,
            runtime: runtime.handle().clone(),
        };
        let builder = NodeBuilder {
            engine_config,
            layout: Layout::new(&kubelet_path, &driver_name),
            failpoints: Failpoints::stop_after(stop_after),
            host: Arc::new(Kernel::new()),
            node_id,
            driver_name,
            kubelet_path,
            metrics,
            held_mounts: HeldMounts::new(mounter.longest_outage),
            runtime,
        };
        let background = builder.start_background(client.clone(), strategy, registration)?;
        background.renew_credentials(&builder.runtime, &builder.engine_config.driver_credentials);
        let build = |strategy| match strategy {
            Strategy::Pod => builder.build_pod(&mounter, client.clone(), &background),
            Strategy::Daemon => builder.build_daemon(&mounter, &background),
            Strategy::Systemd => builder.build_systemd(&systemd, &background),
        };
        let strategies = Strategies {
            host: builder.host.clone(),
            sources: resolved_directory(&builder.layout.sources())?,
            present: build(strategy)?,
            draining: draining.into_iter().map(build).collect::<anyhow::Result<_>>()?,
        };
        let workload_credentials = builder.engine_config.workload_credentials.clone();
        let fallback = SecretFallback::in_namespaces(secret_falls_back_to_driver);
        let csi_socket = endpoint.map_or_else(|| builder.layout.csi_socket(), Endpoint::into_path);
        let kubelet_endpoint = kubelet_endpoint.unwrap_or_else(|| csi_socket.clone());
        let server = Server {
            driver_name: builder.driver_name.clone(),
            node_id: builder.node_id.clone(),
            node: Arc::new(
                Node::new(strategies, background.reporter.clone(), workload_credentials, fallback)
                    .with_inline_volumes(inline_volumes.into()),
            ),
            registration: builder.registration(registration, kubelet_endpoint, &background),
            csi_socket,
            health_address,
            metrics_page: Arc::new(background.metrics_page()),
        };
        let held_mounts = builder.held_mounts.clone();
        let outcome = builder.runtime.block_on(async {
            let signal = shutdown_signal()?;
            server
                .run(async move {
                    signal.await;
                    held_mounts.wait_until_served().await;
                })
                .await
        });
        builder.runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
        outcome
    }
}

/// What the strategies are built from.
struct NodeBuilder {
    runtime: Runtime,
    host: Arc<dyn Host>,
    layout: Layout,
    node_id: String,
    driver_name: String,
    kubelet_path: PathBuf,
    engine_config: EngineConfig,
    failpoints: Failpoints,
    metrics: Arc<NodeMetrics>,
    held_mounts: HeldMounts,
}

impl NodeBuilder {
    fn start_background(
        &self,
        client: Option<Client>,
        strategy: Strategy,
        registration: RegistrationMode,
    ) -> anyhow::Result<BackgroundTasks> {
        let paths = NodePaths {
            node: self.node_id.clone(),
            driver_name: self.driver_name.clone(),
            kubelet: resolved_directory(&self.kubelet_path)?,
            sources: resolved_directory(&self.layout.sources())?,
            strategy: strategy.name(),
        };
        let (host, held_mounts) = (self.host.clone(), &self.held_mounts);
        Ok(BackgroundTasks::start(&self.runtime, host, held_mounts, paths, client, &self.metrics, registration))
    }

    fn build_pod(
        &self,
        mounter: &MounterArgs,
        client: Option<Client>,
        background: &BackgroundTasks,
    ) -> anyhow::Result<strategies::Strategy> {
        let client = client.context("strategy pod needs the API server")?;
        let MounterArgs { mountpoint_namespace, mounter_dir: _, mounter_group: _, longest_outage: _, mounter_view } =
            mounter;
        let scope = AssignmentScope {
            node: self.node_id.clone(),
            namespace: mountpoint_namespace.clone(),
            driver_name: self.driver_name.clone(),
        };
        Ok(strategies::Strategy::Pod(Box::new(MountpointPods {
            manager: self.source_manager(background),
            workload_conditions: WorkloadConditions::new(client.clone(), self.runtime.handle(), &self.driver_name),
            assignments: background.watch_assignments(&self.runtime, client, scope),
            kubelet: self.kubelet_path.clone(),
            sources: resolved_directory(&self.layout.sources())?,
            view: mounter_view.clone().unwrap_or_else(|| COMMUNICATION_DIRECTORY.into()),
            engine_config: self.engine_config.clone(),
            locks: KeyedLocks::default(),
            other_mounts: self.other_mounts()?,
        })))
    }

    fn build_daemon(
        &self,
        mounter: &MounterArgs,
        background: &BackgroundTasks,
    ) -> anyhow::Result<strategies::Strategy> {
        let MounterArgs { mountpoint_namespace: _, mounter_dir, mounter_group, longest_outage: _, mounter_view } =
            mounter;
        let mounter_dir = mounter_dir.clone().unwrap_or_else(|| self.layout.mounter_dir());
        if let Some(group) = mounter_group {
            share_directory(&mounter_dir, *group)?;
        }
        Ok(strategies::Strategy::Daemon(Box::new(Daemon {
            manager: self.source_manager(background),
            node: self.node_id.clone(),
            sources: resolved_directory(&self.layout.sources())?,
            mounter_view: mounter_view.clone().unwrap_or_else(|| mounter_dir.clone()),
            mounter_dir,
            engine_config: self.engine_config.clone(),
            locks: KeyedLocks::default(),
            other_mounts: self.other_mounts()?,
        })))
    }

    fn other_mounts(&self) -> anyhow::Result<OtherMounts> {
        let directory = resolved_directory(&self.layout.plugin_directory())?;
        Ok(OtherMounts {
            unit_credentials: directory.join(SYSTEMD_CREDENTIALS),
            unit_caches: directory.join(SYSTEMD_CACHE),
            legacy: LegacyProfiles { host_view: directory.clone(), directory },
        })
    }

    fn build_systemd(
        &self,
        systemd: &SystemdArgs,
        background: &BackgroundTasks,
    ) -> anyhow::Result<strategies::Strategy> {
        let SystemdArgs {
            mount_s3_path,
            host_plugin_dir,
            ptmx_path,
            engine_memory_limit,
            engine_cpu_limit,
            engine_tasks_limit,
            engine_stage_size_limit,
            engine_keep_alive,
            engine_ca_bundle,
        } = systemd;
        let directory = self.layout.plugin_directory();
        let host_view = host_plugin_dir.clone().unwrap_or_else(|| directory.clone());
        let units = Arc::new(SystemdUnits {
            mounts: UnitMounts {
                host: self.host.clone(),
                systemd: Systemd::new(self.runtime.handle(), PRIVATE_SOCKET.into(), ptmx_path),
                kubelet: resolved_directory(&self.kubelet_path)?,
                units: UnitCache::default(),
                credentials: CredentialDirs {
                    path: resolved_directory(&directory.join(SYSTEMD_CREDENTIALS))?,
                    host_view: host_view.join(SYSTEMD_CREDENTIALS),
                },
                failpoints: self.failpoints,
            },
            caches: CacheDirs {
                path: resolved_directory(&directory.join(SYSTEMD_CACHE))?,
                host_view: host_view.join(SYSTEMD_CACHE),
            },
            stages: StageDirs {
                path: resolved_directory(&directory.join(SYSTEMD_STAGE))?,
                host_view: host_view.join(SYSTEMD_STAGE),
                limit: engine_stage_size_limit.clone(),
            },
            legacy: LegacyProfiles { directory: resolved_directory(&directory)?, host_view },
            engine: mount_s3_path.clone(),
            engine_config: EngineConfig {
                ca_bundle: engine_ca_bundle.clone().filter(|it| !it.as_os_str().is_empty()),
                ..self.engine_config.clone()
            },
            limits: Limits {
                memory_bytes: *engine_memory_limit,
                cpu_millis: *engine_cpu_limit,
                tasks: *engine_tasks_limit,
            },
            recovery: match engine_keep_alive {
                Switch::On => EngineRecovery::InPlace,
                Switch::Off => EngineRecovery::Remount,
            },
            locks: KeyedLocks::default(),
            failpoints: self.failpoints,
            remediations: Remediations::of_units(self.metrics.clone()),
            reporter: background.reporter.clone(),
            crashes: CrashLimiter::default(),
        });
        self.runtime.spawn(Recovery(units.clone()).run());
        Ok(strategies::Strategy::Systemd(units))
    }

    fn source_manager(&self, background: &BackgroundTasks) -> SourceManager {
        SourceManager {
            host: self.host.clone(),
            failpoints: self.failpoints,
            remediations: Remediations::of_sources(self.metrics.clone()),
            reporter: background.reporter.clone(),
            held_mounts: self.held_mounts.clone(),
        }
    }

    fn registration(
        &self,
        registration: RegistrationMode,
        endpoint: PathBuf,
        background: &BackgroundTasks,
    ) -> Option<csi::registration::Registration> {
        (registration == RegistrationMode::On).then(|| csi::registration::Registration {
            socket: self.layout.registration_socket(),
            driver_name: self.driver_name.clone(),
            endpoint,
            acknowledged: background.acknowledged.clone(),
            metrics: self.metrics.clone(),
        })
    }
}

/// Zero turns the hold of mounts off.
fn longest_outage(text: &str) -> Result<Duration, InvalidDuration> {
    if matches!(text, "0" | "0s") { Ok(Duration::ZERO) } else { duration::parse(text) }
}
