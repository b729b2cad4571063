//! The S3 client of the engine without a file system: what a mount can reach at best, with this store and on this machine.

use anyhow::{Context as _, ensure};
use futures::StreamExt as _;
use futures::executor::block_on;
use mountpoint_s3_client::checksums::crc32c;
use mountpoint_s3_client::config::{
    AddressingStyle, Allocator, CredentialsProvider, CredentialsProviderStaticOptions, EndpointConfig,
    S3ClientAuthConfig, S3ClientConfig, Uri,
};
use mountpoint_s3_client::types::{
    ClientBackpressureHandle as _, GetObjectParams, GetObjectResponse as _, PutObjectSingleParams, UploadChecksum,
};
use mountpoint_s3_client::{ObjectClient as _, S3CrtClient};
use s3csi_s3_server::store::Store;

/// As the engine has it by default.
const GBPS: f64 = 10.0;
const WINDOW: usize = 64 << 20;
/// As many names as a store sends at once.
const PAGE: usize = 1000;

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

    /// Stores an object by one request, with the checksum that the engine sends by default.
    pub fn put(&self, bucket: &str, key: &str, content: Vec<u8>) -> anyhow::Result<()> {
        let checksum = UploadChecksum::Crc32c(crc32c::checksum(&content));
        let params = PutObjectSingleParams::new().checksum(Some(checksum));
        block_on(self.0.put_object_single(bucket, key, &params, content)).map(drop).context("failed to store")
    }

    /// How many names a directory has.
    pub fn list(&self, bucket: &str, prefix: &str) -> anyhow::Result<u64> {
        block_on(async {
            let (mut token, mut names) = (None::<String>, 0);
            loop {
                let page = self.0.list_objects(bucket, token.as_deref(), "/", PAGE, prefix).await;
                let page = page.context("failed to list")?;
                names += (page.objects.len() + page.common_prefixes.len()) as u64;
                token = page.next_continuation_token;
                if token.is_none() {
                    return Ok(names);
                }
            }
        })
    }
}
