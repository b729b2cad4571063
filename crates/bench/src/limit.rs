//! The S3 client of the engine without a file system: what reading through a mount can reach at best.

use anyhow::{Context as _, ensure};
use futures::StreamExt as _;
use futures::executor::block_on;
use mountpoint_s3_client::config::{
    AddressingStyle, Allocator, CredentialsProvider, CredentialsProviderStaticOptions, EndpointConfig,
    S3ClientAuthConfig, S3ClientConfig, Uri,
};
use mountpoint_s3_client::types::{ClientBackpressureHandle as _, GetObjectParams, GetObjectResponse as _};
use mountpoint_s3_client::{ObjectClient as _, S3CrtClient};
use s3csi_s3_server::store::Store;

/// As the engine has it by default.
const GBPS: f64 = 10.0;
const WINDOW: usize = 64 << 20;

pub struct LimitClient(S3CrtClient);

impl LimitClient {
    pub fn new(store: &dyn Store, endpoint: &str) -> anyhow::Result<Self> {
        let allocator = Allocator::default();
        let account = store.account();
        let keys = CredentialsProviderStaticOptions {
            access_key_id: &account.access_key,
            secret_access_key: &account.secret_key,
            session_token: None,
        };
        let provider = CredentialsProvider::new_static(&allocator, keys).context("failed to take the keys")?;
        let uri = Uri::new_from_str(&allocator, endpoint).context("not an address")?;
        let endpoint = EndpointConfig::new(store.region()).addressing_style(AddressingStyle::Path).endpoint(uri);
        let config = S3ClientConfig::new()
            .auth_config(S3ClientAuthConfig::Provider(provider))
            .throughput_target_gbps(GBPS)
            .read_backpressure(true)
            .initial_read_window(WINDOW)
            .endpoint_config(endpoint);
        Ok(Self(S3CrtClient::new(config).context("failed to make a client")?))
    }

    /// Reads an object from beginning to end. `check` gets each piece and where it begins.
    pub fn read(
        &self,
        bucket: &str,
        key: &str,
        bytes: u64,
        check: impl Fn(u64, &[u8]) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        block_on(async {
            let response = self.0.get_object(bucket, key, &GetObjectParams::new()).await.context("failed to ask")?;
            let mut response = std::pin::pin!(response);
            let mut window = response.backpressure_handle().cloned();
            let mut read = 0;
            while let Some(part) = response.next().await {
                let part = part.context("failed to read")?;
                ensure!(part.offset == read, "a piece begins at {}, not at {read}", part.offset);
                check(part.offset, &part.data)?;
                read += part.data.len() as u64;
                if let Some(window) = &mut window {
                    window.increment_read_window(part.data.len());
                }
            }
            ensure!(read == bytes, "{read} of {bytes} bytes were read");
            Ok(())
        })
    }
}
