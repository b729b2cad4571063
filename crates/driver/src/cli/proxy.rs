//! The flags that say through which proxy stores and issuers of keys are reached, for node plugin and controller alike.

use anyhow::Context as _;
use clap::Args;
use s3csi_core::proxy::{NoProxy, ProxySettings, ProxyUrl};

#[derive(Args, Clone, Debug)]
#[expect(clippy::struct_field_names, reason = "the fields are named as the flags")]
pub struct ProxyArgs {
    /// URL of the proxy for https:// stores and security token services, such as `http://proxy.example.com:3128`. Not used for the
    /// API server of Kubernetes.
    #[arg(long, env = "S3_HTTPS_PROXY", value_name = "URL")]
    https_proxy: Option<String>,

    /// URL of the proxy for http:// stores.
    #[arg(long, env = "S3_HTTP_PROXY", value_name = "URL")]
    http_proxy: Option<String>,

    /// Hosts that are reached without a proxy: names (with all hosts of a domain), addresses and networks.
    #[arg(long, env = "S3_NO_PROXY", value_name = "HOST,…")]
    no_proxy: Option<String>,
}

impl ProxyArgs {
    pub fn settings(self) -> anyhow::Result<ProxySettings> {
        let Self { https_proxy, http_proxy, no_proxy } = self;
        let text = |it: Option<String>| it.filter(|it| !it.is_empty());
        let url = |flag: &'static str, it: Option<String>| {
            text(it).map(|it| it.parse::<ProxyUrl>().with_context(|| format!("{flag} is not usable"))).transpose()
        };
        Ok(ProxySettings {
            https: url("--https-proxy", https_proxy)?,
            http: url("--http-proxy", http_proxy)?,
            no_proxy: text(no_proxy).map(|it| it.parse::<NoProxy>().context("--no-proxy is not usable")).transpose()?,
        })
    }
}
