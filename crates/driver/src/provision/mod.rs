//! Dynamic provisioning: creates buckets, or prefixes of shared ones, and deletes them as their class says. Accesses S3 and
//! nothing else.
//!
//! No state is kept here. What was created is recorded in the store itself (`metadata`), so that a call that is repeated finds
//! what was done before and continues from there.

mod bucket;
mod client;
mod contents;
pub mod error;
pub mod failpoints;
mod metadata;
mod prefix;
mod store;

use std::sync::Arc;
use std::time::Instant;

use s3csi_core::endpoint::EndpointUrl;
use s3csi_core::environment::DriverSettings;
use s3csi_core::provision::{
    CreateRequest, ProvisionedId, ProvisionedVolume, StoreIdentity, VolumeLocation, VolumeRecord,
};
use tokio::time::timeout_at;

use self::client::S3Clients;
pub use self::client::{InvalidCaBundle, TrustedCertificates};
use self::error::{CreateError, CredentialsError, DeleteError, LookupError};
use self::failpoints::Failpoints;
use self::store::S3Store;
use crate::credentials::driver::DriverCredentials;
use crate::keyed_locks::KeyedLocks;

/// One for all accounts: every call has its own keys, or uses the driver's.
pub struct Provisioner {
    settings: DriverSettings,
    driver_credentials: Arc<DriverCredentials>,
    clients: S3Clients,
    /// One call per volume at a time.
    locks: KeyedLocks,
    failpoints: Failpoints,
}

/// Whether a volume exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VolumeLookup {
    Found(VolumeRecord),
    /// A bucket of Scality's driver, which stored no metadata.
    Legacy,
    NotFound,
}

impl Provisioner {
    pub fn new(
        settings: DriverSettings,
        driver_credentials: Arc<DriverCredentials>,
        certificates: &TrustedCertificates,
        failpoints: Failpoints,
    ) -> Result<Self, InvalidCaBundle> {
        let clients = S3Clients::new(certificates, &settings.proxy)?;
        Ok(Self { settings, driver_credentials, clients, locks: KeyedLocks::default(), failpoints })
    }

    /// Creates the volume, or finds that it exists.
    pub async fn create(&self, create: &CreateRequest, deadline: Instant) -> Result<(), CreateError> {
        let id = create.id.to_string();
        let _held = self.locks.try_lock(&id).ok_or(CreateError::Busy)?;
        let store = self.store(&create.identity, create.endpoint()).await.map_err(CreateError::Credentials)?;
        // Boxed, because the library's futures are big.
        let work = Box::pin(async {
            match &create.place {
                VolumeLocation::Bucket(bucket) => bucket::create(&store, bucket, create, self.failpoints).await,
                VolumeLocation::Prefix { bucket, prefix } => {
                    prefix::create(&store, bucket, prefix, create, self.failpoints).await
                }
            }
        });
        within(deadline, work).await.unwrap_or(Err(CreateError::DeadlineExceeded))
    }

    /// Deletes the volume as its metadata say. A volume that does not exist is deleted already.
    pub async fn delete(
        &self,
        id: &ProvisionedId,
        identity: &StoreIdentity,
        deadline: Instant,
    ) -> Result<(), DeleteError> {
        let _held = self.locks.try_lock(&id.to_string()).ok_or(DeleteError::Busy)?;
        let store = self.store(identity, id.endpoint.as_ref()).await.map_err(DeleteError::Credentials)?;
        let work = Box::pin(async {
            match &id.data {
                ProvisionedVolume::Bucket { bucket, key } => {
                    bucket::delete(&store, bucket, Some(key), self.failpoints).await
                }
                ProvisionedVolume::LegacyBucket(bucket) => bucket::delete(&store, bucket, None, self.failpoints).await,
                ProvisionedVolume::Prefix { bucket, key } => prefix::delete(&store, bucket, key, self.failpoints).await,
            }
        });
        within(deadline, work).await.unwrap_or(Err(DeleteError::DeadlineExceeded))
    }

    /// For an ID that is not ours: fails if it is the name of an existing bucket.
    pub async fn refuse_foreign(
        &self,
        id: &str,
        identity: &StoreIdentity,
        deadline: Instant,
    ) -> Result<(), DeleteError> {
        let Ok(bucket) = id.parse() else {
            return Ok(());
        };
        let store = self.store(identity, None).await.map_err(DeleteError::Credentials)?;
        let exists = within(deadline, Box::pin(store.exists(&bucket))).await.unwrap_or(Ok(true));
        if exists.map_err(|cause| DeleteError::Read { cause })? {
            return Err(DeleteError::Foreign { bucket: bucket.to_string() });
        }
        Ok(())
    }

    pub async fn lookup(
        &self,
        id: &ProvisionedId,
        identity: &StoreIdentity,
        deadline: Instant,
    ) -> Result<VolumeLookup, LookupError> {
        let store = self.store(identity, id.endpoint.as_ref()).await.map_err(LookupError::Credentials)?;
        let work = Box::pin(async {
            match &id.data {
                ProvisionedVolume::Bucket { bucket, key } => bucket::lookup(&store, bucket, key).await,
                ProvisionedVolume::LegacyBucket(bucket) => match store.exists(bucket).await {
                    Ok(true) => Ok(VolumeLookup::Legacy),
                    Ok(false) => Ok(VolumeLookup::NotFound),
                    Err(cause) => Err(LookupError::Read { cause }),
                },
                ProvisionedVolume::Prefix { bucket, key } => prefix::lookup(&store, bucket, key).await,
            }
        });
        within(deadline, work).await.unwrap_or(Err(LookupError::DeadlineExceeded))
    }

    /// The store with the caller's credentials. The driver's keys are only ever sent to the driver's endpoint: anyone who may
    /// create a PersistentVolume chooses the endpoint in a volume ID.
    async fn store(
        &self,
        identity: &StoreIdentity,
        endpoint: Option<&EndpointUrl>,
    ) -> Result<S3Store, CredentialsError> {
        let keys = match (&identity.keys, endpoint) {
            (Some(keys), _) => keys.clone(),
            (None, None) => {
                let current = self.driver_credentials.current().await;
                current.map_err(|cause| CredentialsError::Unusable { cause })?.ok_or(CredentialsError::Missing)?
            }
            (None, Some(endpoint)) => {
                return Err(CredentialsError::ForeignEndpoint { endpoint: endpoint.to_string() });
            }
        };
        let endpoint = endpoint.map(EndpointUrl::as_str).or(self.settings.endpoint_url.as_deref());
        let region = identity.signing_region.as_deref().or(self.settings.region.as_deref()).filter(|it| !it.is_empty());
        Ok(self.clients.store(&keys, identity.source(), endpoint, region))
    }
}

/// `None` at the deadline. The next call finds what was done by then.
async fn within<T>(deadline: Instant, work: impl Future<Output = T>) -> Option<T> {
    timeout_at(deadline.into(), work).await.ok()
}
