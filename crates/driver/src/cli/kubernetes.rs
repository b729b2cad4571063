//! How the API server is reached.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use kube::client::ClientBuilder;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use crate::api::count::CountRequests;
use crate::metrics::ApiMetrics;

#[derive(Args, Debug)]
pub struct KubernetesArgs {
    /// How to reach the API server [default: as the Pod's service account]
    #[arg(long, env = "KUBECONFIG", value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

impl KubernetesArgs {
    /// A client whose requests are counted.
    pub async fn client(self, metrics: &ApiMetrics) -> anyhow::Result<Client> {
        let Self { kubeconfig } = self;
        let config = match kubeconfig {
            Some(path) => from_file(&path).await?,
            None => Config::incluster().context(
                "failed to reach the API server as the Pod's service account (outside of a cluster, name a file with --kubeconfig)",
            )?,
        };
        let builder = ClientBuilder::try_from(config).context("failed to prepare the connection to the API server")?;
        Ok(builder.with_layer(&CountRequests(metrics.clone())).build())
    }

    /// The same for programs that may run without an API server.
    pub async fn client_if_needed(self, metrics: &ApiMetrics, is_needed: bool) -> anyhow::Result<Option<Client>> {
        match self.client(metrics).await {
            Ok(client) => Ok(Some(client)),
            Err(error) if is_needed => Err(error),
            Err(error) => {
                tracing::info!(reason = format!("{error:#}"), "running without an API server");
                Ok(None)
            }
        }
    }
}

async fn from_file(path: &Path) -> anyhow::Result<Config> {
    let unusable = || format!("failed to use the kubeconfig {}", path.display());
    let kubeconfig = Kubeconfig::read_from(path).with_context(unusable)?;
    Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.with_context(unusable)
}
