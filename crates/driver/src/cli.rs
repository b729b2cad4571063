//! The command line: the only place that reads the environment, and the one that builds everything else.

mod around;
mod controller;
mod crd;
mod kubernetes;
mod provisioning;

use std::ffi::OsString;
use std::io::{self, IsTerminal as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use clap::{Args, Parser, Subcommand, ValueEnum};
use s3csi_core::credentials::Keys;
use s3csi_core::environment::DriverSettings;
use s3csi_core::limits;
use tokio::signal::unix::{SignalKind, signal};

use self::around::{Around, Whereabouts};
use self::kubernetes::KubernetesArgs;
use crate::csi::server::{Endpoint, Server};
use crate::host::Kernel;
use crate::install;
use crate::metrics::NodeMetrics;
use crate::node::assignment::Place;
use crate::node::locks::Locks;
use crate::node::orders::Orders;
use crate::node::repairs::Repairs;
use crate::node::steps::{Step, Steps};
use crate::node::strategies::daemon::Daemon;
use crate::node::strategies::pod::MountpointPods;
use crate::node::strategies::systemd::{Deaths, Keeping, Known, NoHeal, SystemdUnits};
use crate::node::{Layout, Node, strategies};
use crate::systemd::{Limits, PRIVATE_SOCKET, Systemd};

/// Mounts S3 buckets as Kubernetes volumes.
#[derive(Parser, Debug)]
#[command(name = "s3csi", version, propagate_version = true, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Serve one node: kubelet calls it to mount and unmount volumes.
    #[command(after_help = NODE_EXAMPLE)]
    Node(Box<NodeArgs>),

    /// Give each workload a Mountpoint Pod (strategy pod), and make volumes on demand. One or more run per cluster.
    #[command(after_help = controller::EXAMPLE)]
    Controller(Box<controller::ControllerArgs>),

    /// Put the engine on the host, for strategy systemd.
    InstallEngine(InstallEngineArgs),

    /// Print the definition of attachments, which strategy pod needs in the cluster: `s3csi crd | kubectl apply -f -`
    Crd(crd::CrdArgs),
}

const NODE_EXAMPLE: &str = "\
Credentials of the driver come from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and (optional) AWS_SESSION_TOKEN;
volumes with `authenticationSource: secret` bring their own.

Example:
  AWS_ENDPOINT_URL=http://s3.example.com:8000 s3csi node --node-id worker-1";

/// How engines are run on this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Strategy {
    /// Mountpoint Pods run the engines, one for each group of Pods that share a volume. Needs `s3csi controller`.
    Pod,
    /// One unprivileged mounter process serves all volumes of the node.
    Daemon,
    /// systemd runs one engine per volume and Pod, as a transient unit.
    Systemd,
}

impl Strategy {
    const fn name(self) -> &'static str {
        match self {
            Self::Pod => "pod",
            Self::Daemon => "daemon",
            Self::Systemd => "systemd",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Registration {
    /// Register with kubelet over a socket in `<kubelet path>/plugins_registry`.
    On,
    /// Somebody else registers the driver (for example the node-driver-registrar sidecar).
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Switch {
    On,
    Off,
}

#[derive(Args, Debug)]
struct NodeArgs {
    #[command(flatten)]
    kubernetes: KubernetesArgs,

    /// The CSI socket, `unix:/path` [default: `unix:<kubelet path>/plugins/<driver name>/csi.sock`]
    #[arg(long, env = "CSI_ENDPOINT", value_name = "URL")]
    endpoint: Option<Endpoint>,

    /// The CSI socket's path as kubelet sees it, if that is another one [default: the endpoint's path]
    #[arg(long, value_name = "PATH")]
    kubelet_endpoint: Option<PathBuf>,

    /// Name of this node in Kubernetes.
    #[arg(long, env = "CSI_NODE_NAME", value_name = "NAME", default_value = "", hide_default_value = true)]
    node_id: String,

    /// Name of the driver; labels, annotations and paths derive from it.
    #[arg(long, env = "DRIVER_NAME", value_name = "NAME", default_value = "s3.csi.scality.com")]
    driver_name: String,

    /// Kubelet's root directory.
    #[arg(long, env = "KUBELET_PATH", value_name = "DIRECTORY", default_value = "/var/lib/kubelet")]
    kubelet_path: PathBuf,

    /// How engines are run on this node.
    #[arg(long, env = "MOUNTER_KIND", value_enum, default_value = "pod")]
    strategy: Strategy,

    /// Strategy pod: the namespace of Mountpoint Pods.
    #[arg(long, env = "MOUNTPOINT_NAMESPACE", value_name = "NAME", default_value = "mount-s3")]
    mountpoint_namespace: String,

    /// Strategy daemon: the mounter's directory [default: `<kubelet path>/plugins/<driver name>/mounter`]
    #[arg(long, env = "MOUNTER_DIR", value_name = "DIRECTORY")]
    mounter_dir: Option<PathBuf>,

    /// The mounter's directory as the mounter sees it, if that is another path [default: --mounter-dir; strategy pod: /comm]
    #[arg(long, env = "MOUNTER_VIEW", value_name = "DIRECTORY")]
    mounter_view: Option<PathBuf>,

    /// Strategy systemd: the engine, as a path on the host.
    #[arg(long, env = "MOUNT_S3_PATH", value_name = "PATH", default_value = "/usr/bin/mount-s3")]
    mount_s3_path: PathBuf,

    /// Strategy systemd: the plugin's directory as a path on the host [default: `<kubelet path>/plugins/<driver name>`]
    #[arg(long, env = "HOST_PLUGIN_DIR", value_name = "DIRECTORY")]
    host_plugin_dir: Option<PathBuf>,

    /// Strategy systemd: where pseudoterminals of the host are opened; in a container, for example, /host/dev/ptmx.
    #[arg(long, env = "PTMX_PATH", value_name = "PATH", default_value = "/dev/ptmx")]
    ptmx_path: PathBuf,

    /// Strategy systemd: memory that one engine may use, for example 512Mi; volumes may say otherwise.
    #[arg(long, env = "ENGINE_MEMORY_LIMIT", value_name = "QUANTITY", value_parser = limits::parse_memory)]
    engine_memory_limit: Option<u64>,

    /// Strategy systemd: processor time that one engine may use, for example 500m or 2; volumes may say otherwise.
    #[arg(long, env = "ENGINE_CPU_LIMIT", value_name = "QUANTITY", value_parser = limits::parse_cpu)]
    engine_cpu_limit: Option<u64>,

    /// Strategy systemd: how many threads one engine may have; volumes may say otherwise.
    #[arg(long, env = "ENGINE_TASKS_LIMIT", value_name = "NUMBER")]
    engine_tasks_limit: Option<u64>,

    /// Strategy systemd: what happens when an engine dies. With `on`, its unit starts another one on the same mount, and
    /// applications see a pause; with `off`, the volume is mounted anew.
    #[arg(long, env = "ENGINE_KEEP_ALIVE", value_enum, default_value = "on")]
    engine_keep_alive: Switch,

    /// Whether to register with kubelet.
    #[arg(long, value_enum, default_value = "on")]
    registration: Registration,

    /// Where to serve /healthz and /metrics; without it there are none.
    #[arg(long, value_name = "ADDRESS:PORT")]
    health_address: Option<SocketAddr>,

    /// S3 endpoint of all volumes.
    #[arg(long, env = "AWS_ENDPOINT_URL", value_name = "URL")]
    s3_endpoint_url: Option<String>,

    /// Region for signing requests, unless a volume names another.
    #[arg(long, env = "AWS_REGION", value_name = "REGION")]
    s3_region: Option<String>,

    /// Kubernetes version for the user agent.
    #[arg(long, env = "KUBERNETES_VERSION", value_name = "VERSION")]
    kubernetes_version: Option<String>,

    /// Log lines as text or as JSON objects.
    #[arg(long, value_enum, default_value = "text")]
    log_format: LogFormat,

    /// Verbosity; from 4 on debug messages are shown.
    #[arg(long, short, value_name = "LEVEL", default_value_t = 2)]
    v: u8,

    /// For tests of crashes: end right after this step of the first call that gets there.
    #[arg(long, hide = true, value_enum, value_name = "STEP")]
    stop_after: Option<Step>,
}

impl Cli {
    pub fn run(self) -> ExitCode {
        let outcome = match self.command {
            Command::Node(node) => node.run(),
            Command::Controller(controller) => controller.run(),
            Command::InstallEngine(install) => install.run(),
            Command::Crd(crd) => crd.run(),
        };
        match outcome {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                // `{:#}` prints the chain of causes on one line and never a back trace.
                eprintln!("s3csi: {error:#}");
                ExitCode::FAILURE
            }
        }
    }
}

impl NodeArgs {
    #[expect(clippy::too_many_lines, reason = "each flag is handed on, once")]
    fn run(self) -> anyhow::Result<()> {
        // No `..`: a flag nobody uses does not compile.
        let Self {
            kubernetes,
            endpoint,
            kubelet_endpoint,
            node_id,
            driver_name,
            kubelet_path,
            strategy,
            mountpoint_namespace,
            mounter_dir,
            mounter_view,
            mount_s3_path,
            host_plugin_dir,
            ptmx_path,
            engine_memory_limit,
            engine_cpu_limit,
            engine_tasks_limit,
            engine_keep_alive,
            registration,
            health_address,
            s3_endpoint_url,
            s3_region,
            kubernetes_version,
            log_format,
            v,
            stop_after,
        } = self;
        start_log(log_format, v);

        let endpoint_url = s3_endpoint_url
            .filter(|it| !it.is_empty())
            .context("AWS_ENDPOINT_URL environment variable must be set (or --s3-endpoint-url), for example to http://s3.example.com:8000")?;
        anyhow::ensure!(!node_id.is_empty(), "node-id is required: set CSI_NODE_NAME or --node-id to this node's name");
        let layout = Layout::new(&kubelet_path, &driver_name);
        let csi_socket = endpoint.map_or_else(|| layout.csi_socket(), Endpoint::into_path);
        let mounter_dir = mounter_dir.unwrap_or_else(|| layout.mounter_dir());
        let host = Arc::new(Kernel::new());

        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .context("failed to start the async runtime")?;
        let settings = DriverSettings { endpoint_url: Some(endpoint_url), region: s3_region };
        let orders = Orders { settings, driver_keys: driver_keys()?, kubernetes_version };
        let steps = Steps::stop_after(stop_after);
        let metrics = Arc::new(NodeMetrics::new());
        let client = match (runtime.block_on(kubernetes.client(metrics.api())), strategy) {
            (Ok(client), _) => Some(client),
            (Err(error), Strategy::Pod) => return Err(error),
            (Err(error), Strategy::Daemon | Strategy::Systemd) => {
                tracing::info!(reason = format!("{error:#}"), "working without an API server");
                None
            }
        };
        let whereabouts = Whereabouts {
            node: node_id.clone(),
            driver_name: driver_name.clone(),
            kubelet: resolved_directory(&kubelet_path)?,
            sources: resolved_directory(&layout.sources())?,
            strategy: strategy.name(),
        };
        let around = Around::begin(&runtime, host.clone(), whereabouts, client.clone(), &metrics, registration);
        let strategy = match strategy {
            Strategy::Pod => {
                let client = client.context("strategy pod needs the API server")?;
                let place =
                    Place { node: node_id.clone(), namespace: mountpoint_namespace, driver_name: driver_name.clone() };
                let assignments = around.follow(&runtime, client, place);
                strategies::Strategy::Pod(Box::new(MountpointPods {
                    host: host.clone(),
                    assignments,
                    kubelet: kubelet_path,
                    sources: resolved_directory(&layout.sources())?,
                    view: mounter_view.unwrap_or_else(|| COMMUNICATION_DIRECTORY.into()),
                    orders,
                    locks: Locks::default(),
                    steps,
                    repairs: Repairs::of_sources(metrics.clone()),
                    teller: around.teller.clone(),
                }))
            }
            Strategy::Daemon => strategies::Strategy::Daemon(Box::new(Daemon {
                host: host.clone(),
                mounter_view: mounter_view.unwrap_or_else(|| mounter_dir.clone()),
                mounter_dir,
                sources: resolved_directory(&layout.sources())?,
                orders,
                node: node_id.clone(),
                locks: Locks::default(),
                steps,
                repairs: Repairs::of_sources(metrics.clone()),
                teller: around.teller.clone(),
            })),
            Strategy::Systemd => {
                let plugin = layout.plugin_directory();
                let places = resolved_directory(&plugin.join(CREDENTIALS_OF_UNITS))?;
                let units = Arc::new(SystemdUnits {
                    host: host.clone(),
                    systemd: Systemd::new(runtime.handle(), PRIVATE_SOCKET.into(), &ptmx_path),
                    engine: mount_s3_path,
                    kubelet: resolved_directory(&kubelet_path)?,
                    places_view: host_plugin_dir.unwrap_or(plugin).join(CREDENTIALS_OF_UNITS),
                    places,
                    orders,
                    limits: Limits {
                        memory_bytes: engine_memory_limit,
                        cpu_millis: engine_cpu_limit,
                        tasks: engine_tasks_limit,
                    },
                    keeping: match engine_keep_alive {
                        Switch::On => Keeping::InUnit,
                        Switch::Off => Keeping::Nobody,
                    },
                    locks: Locks::default(),
                    steps,
                    known: Known::default(),
                    repairs: Repairs::of_units(metrics.clone()),
                    teller: around.teller.clone(),
                    deaths: Deaths::default(),
                    heal: Arc::new(NoHeal),
                });
                runtime.spawn(units.clone().watch_forever());
                strategies::Strategy::Systemd(units)
            }
        };
        let server = Server {
            driver_name: driver_name.clone(),
            node_id,
            node: Arc::new(Node::new(strategy, around.teller.clone())),
            csi_socket: csi_socket.clone(),
            registration: (registration == Registration::On).then(|| crate::csi::registration::Registration {
                socket: layout.registration_socket(),
                driver_name,
                endpoint: kubelet_endpoint.unwrap_or(csi_socket),
                acknowledged: around.acknowledged.clone(),
                metrics,
            }),
            health_address,
            figures: Arc::new(around.figures()),
        };
        let outcome = runtime.block_on(async { server.run(asked_to_stop()?).await });
        // A call that is stuck in the kernel must not keep the process from ending.
        runtime.shutdown_timeout(std::time::Duration::from_secs(2));
        outcome
    }
}

/// Where Mountpoint Pods, also those of drivers before us, have the directory that they share with the node.
const COMMUNICATION_DIRECTORY: &str = "/comm";

/// In the plugin's directory: one directory with an engine's credentials per target.
const CREDENTIALS_OF_UNITS: &str = "systemd";

#[derive(Args, Debug)]
struct InstallEngineArgs {
    /// Where to put it; the directory is made if it is missing.
    #[arg(value_name = "DIRECTORY")]
    directory: PathBuf,

    /// The engine to install [default: the `mount-s3` beside this program]
    #[arg(long, value_name = "PATH")]
    from: Option<PathBuf>,
}

impl InstallEngineArgs {
    fn run(self) -> anyhow::Result<()> {
        let Self { directory, from } = self;
        let engine = match from {
            Some(engine) => engine,
            None => {
                std::env::current_exe().context("failed to find out where this program lies")?.with_file_name(ENGINE)
            }
        };
        let installed = install::engine(&engine, &directory, ENGINE)?;
        println!("installed {}", installed.display());
        Ok(())
    }
}

const ENGINE: &str = "mount-s3";

/// The directory as the mount table will spell it: kubelet's directory is a link on some nodes.
fn resolved_directory(path: &Path) -> anyhow::Result<PathBuf> {
    std::fs::create_dir_all(path).with_context(|| format!("failed to create {}", path.display()))?;
    path.canonicalize().with_context(|| format!("failed to resolve {}", path.display()))
}

/// Completes at the first SIGTERM or SIGINT.
fn asked_to_stop() -> anyhow::Result<impl Future<Output = ()> + Send> {
    let mut terminate = signal(SignalKind::terminate()).context("failed to listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("failed to listen for SIGINT")?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => tracing::info!("SIGTERM received, finishing the calls in flight"),
            _ = interrupt.recv() => tracing::info!("SIGINT received, finishing the calls in flight"),
        }
    })
}

/// The driver's own keys; absent when neither variable is set, an error when only one is.
fn driver_keys() -> anyhow::Result<Option<Keys>> {
    let read = |name: &str| match std::env::var_os(name).filter(|it| !it.is_empty()).map(OsString::into_string) {
        None => Ok(None),
        Some(Ok(value)) => Ok(Some(value)),
        Some(Err(_)) => Err(anyhow::anyhow!("environment variable {name} is not valid text")),
    };
    let (id, secret, token) = (read("AWS_ACCESS_KEY_ID")?, read("AWS_SECRET_ACCESS_KEY")?, read("AWS_SESSION_TOKEN")?);
    match (id, secret) {
        (None, None) => Ok(None),
        (Some(id), Some(secret)) => Ok(Some(
            Keys::driver(&id, &secret, token.as_deref())
                .context("the driver's credentials in the environment are unusable")?,
        )),
        (Some(_), None) => anyhow::bail!("AWS_ACCESS_KEY_ID is set but AWS_SECRET_ACCESS_KEY is not"),
        (None, Some(_)) => anyhow::bail!("AWS_SECRET_ACCESS_KEY is set but AWS_ACCESS_KEY_ID is not"),
    }
}

fn start_log(format: LogFormat, verbosity: u8) {
    let level = if verbosity >= 4 { "debug" } else { "info" };
    let filter = tracing_subscriber::EnvFilter::new(format!("warn,s3csi_driver={level}"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_target(false);
    match format {
        LogFormat::Text => log.with_ansi(io::stderr().is_terminal()).init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn paths_derive_from_the_driver_name() {
        let layout = Layout::new(Path::new("/var/lib/kubelet"), "s3.csi.example.com");
        assert_eq!(layout.csi_socket(), Path::new("/var/lib/kubelet/plugins/s3.csi.example.com/csi.sock"));
        assert_eq!(
            layout.registration_socket(),
            Path::new("/var/lib/kubelet/plugins_registry/s3csi@s3.csi.example.com-reg.sock")
        );
    }
}
