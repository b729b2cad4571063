//! The command line: the only module that reads the environment; it builds everything else.

mod allocator;
mod background;
mod controller;
mod crd;
mod credentials;
mod directories;
mod headroom;
mod install;
mod kubernetes;
mod log;
mod mountpoint_resources;
mod node;
mod pod_identity;
mod provisioning;
mod proxy;
mod systemd;

use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Parser, Subcommand, ValueEnum};
use s3csi_core::publish::InlineVolumes;
use tokio::signal::unix::{SignalKind, signal};

/// Mounts S3 buckets as Kubernetes volumes.
#[derive(Parser, Debug)]
#[command(name = "s3csi", version, propagate_version = true, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Run the node plugin: kubelet calls it to mount and unmount volumes.
    #[command(after_help = node::EXAMPLE)]
    Node(Box<node::NodeArgs>),

    /// Run the controller: assigns Mountpoint Pods to workloads (strategy pod) and provisions volumes. One or more per cluster.
    #[command(after_help = controller::EXAMPLE)]
    Controller(Box<controller::ControllerArgs>),

    /// Install the engine on the host, for strategy systemd.
    InstallEngine(install::InstallEngineArgs),

    /// Print the definition of attachments (a `CustomResourceDefinition`), for strategy pod: `s3csi crd | kubectl apply -f -`
    Crd(crd::CrdArgs),
}

/// How engines are run on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Strategy {
    /// Mountpoint Pods run the engines, one Pod for each group of Pods that share a volume. Needs `s3csi controller`.
    Pod,
    /// One unprivileged mounter process serves all volumes of the node.
    Daemon,
    /// systemd runs one engine per volume and Pod, as a transient unit.
    Systemd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Switch {
    On,
    Off,
}

impl From<Switch> for InlineVolumes {
    fn from(switch: Switch) -> Self {
        match switch {
            Switch::On => Self::Allowed,
            Switch::Off => Self::Refused,
        }
    }
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

/// Completes at the first SIGTERM or SIGINT.
fn shutdown_signal() -> anyhow::Result<impl Future<Output = ()> + Send> {
    let mut terminate = signal(SignalKind::terminate()).context("failed to listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("failed to listen for SIGINT")?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => tracing::info!("SIGTERM received, finishing the calls in flight"),
            _ = interrupt.recv() => tracing::info!("SIGINT received, finishing the calls in flight"),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }
}
