//! Volumes on demand: makes buckets, or takes parts of shared ones, and ends them as was agreed. Touches S3 and nothing else.
//!
//! Nothing is remembered here. What was made is noted in the store itself (`notes`), so that a call which is repeated, by
//! whomever and after whatever, finds what was done before and goes on from there.

mod bucket;
mod client;
mod contents;
pub mod error;
mod notes;
mod prefix;
pub mod steps;
mod store;

use std::time::Instant;

use s3csi_core::credentials::Keys;
use s3csi_core::endpoint::EndpointUrl;
use s3csi_core::environment::DriverSettings;
use s3csi_core::provision::{Create, Data, Owner, Place, ProvisionedId, Record};
use s3csi_core::publish::Identity;
use tokio::time::timeout_at;

use self::client::Connections;
pub use self::client::{Certificates, InvalidBundle};
use self::error::{CreateError, DeleteError, FindError};
use self::steps::Steps;
use self::store::Store;
use crate::node::locks::Locks;

/// One for all accounts: every call brings its keys, or means the driver's.
pub struct Provisioner {
    settings: DriverSettings,
    driver_keys: Option<Keys>,
    connections: Connections,
    /// One call per volume at a time.
    locks: Locks,
    steps: Steps,
}

/// What the store says about a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// Noted by us.
    Ours(Record),
    /// A bucket of the driver before us, which noted nothing.
    Earlier,
    Nothing,
}

impl Provisioner {
    pub fn new(
        settings: DriverSettings,
        driver_keys: Option<Keys>,
        certificates: &Certificates,
        steps: Steps,
    ) -> Result<Self, InvalidBundle> {
        let connections = Connections::new(certificates)?;
        Ok(Self { settings, driver_keys, connections, locks: Locks::default(), steps })
    }

    /// Makes the volume, or finds that it is there.
    pub async fn create(&self, create: &Create, deadline: Instant) -> Result<(), CreateError> {
        let id = create.id.to_string();
        let _held = self.locks.try_lock(&id).ok_or(CreateError::Busy)?;
        let store = self.store(&create.owner, create.endpoint()).ok_or(CreateError::NoKeys)?;
        // Boxed, because the library's calls are big.
        let work = Box::pin(async {
            match &create.place {
                Place::Bucket(bucket) => bucket::create(&store, bucket, create, self.steps).await,
                Place::Prefix { bucket, prefix } => prefix::create(&store, bucket, prefix, create, self.steps).await,
            }
        });
        within(deadline, work).await.unwrap_or(Err(CreateError::Late))
    }

    /// Ends the volume as was agreed when it was made. A volume that is not there has ended.
    pub async fn delete(&self, id: &ProvisionedId, owner: &Owner, deadline: Instant) -> Result<(), DeleteError> {
        let _held = self.locks.try_lock(&id.to_string()).ok_or(DeleteError::Busy)?;
        let store = self.store(owner, id.endpoint.as_ref()).ok_or(DeleteError::NoKeys)?;
        let work = Box::pin(async {
            match &id.data {
                Data::Bucket { bucket, key } => bucket::delete(&store, bucket, Some(key), self.steps).await,
                Data::EarlierBucket(bucket) => bucket::delete(&store, bucket, None, self.steps).await,
                Data::Prefix { bucket, key } => prefix::delete(&store, bucket, key, self.steps).await,
            }
        });
        within(deadline, work).await.unwrap_or(Err(DeleteError::Late))
    }

    /// For an ID that is none of ours: whether it names a bucket all the same, which then is somebody's.
    pub async fn refuse_foreign(&self, id: &str, owner: &Owner, deadline: Instant) -> Result<(), DeleteError> {
        let Ok(bucket) = id.parse() else {
            return Ok(());
        };
        let store = self.store(owner, None).ok_or(DeleteError::NoKeys)?;
        let exists = within(deadline, Box::pin(store.exists(&bucket))).await.unwrap_or(Ok(true));
        if exists.map_err(|cause| DeleteError::Look { cause })? {
            return Err(DeleteError::Foreign { bucket: bucket.to_string() });
        }
        Ok(())
    }

    pub async fn find(&self, id: &ProvisionedId, owner: &Owner, deadline: Instant) -> Result<Found, FindError> {
        let store = self.store(owner, id.endpoint.as_ref()).ok_or(FindError::NoKeys)?;
        let work = Box::pin(async {
            match &id.data {
                Data::Bucket { bucket, key } => bucket::find(&store, bucket, key).await,
                Data::EarlierBucket(bucket) => match store.exists(bucket).await {
                    Ok(true) => Ok(Found::Earlier),
                    Ok(false) => Ok(Found::Nothing),
                    Err(cause) => Err(FindError::Look { cause }),
                },
                Data::Prefix { bucket, key } => prefix::find(&store, bucket, key).await,
            }
        });
        within(deadline, work).await.unwrap_or(Err(FindError::Late))
    }

    /// The store in the name of the caller; `None` if it means the driver and the driver has no keys.
    fn store(&self, owner: &Owner, endpoint: Option<&EndpointUrl>) -> Option<Store> {
        let keys = match &owner.identity {
            Identity::Secret(keys) => keys,
            Identity::Driver => self.driver_keys.as_ref()?,
        };
        let endpoint = endpoint.map(EndpointUrl::as_str).or(self.settings.endpoint_url.as_deref());
        let region = owner.signing_region.as_deref().or(self.settings.region.as_deref()).filter(|it| !it.is_empty());
        Some(self.connections.store(keys, endpoint, region))
    }
}

/// `None` at the deadline. Whatever was asked of the store by then is found again by the next call.
async fn within<T>(deadline: Instant, work: impl Future<Output = T>) -> Option<T> {
    timeout_at(deadline.into(), work).await.ok()
}
