//! Volume IDs. Each contains a key that is derived from the name of the request, and everything that is needed to delete the
//! volume later.
//!
//! | volume ID | what it is |
//! |---|---|
//! | `csi-s3-<uuid>`, `team-csi-s3-<uuid>` | a bucket of its own, of that name |
//! | `shared/csi-s3-<uuid>` | a prefix in bucket `shared`; its metadata is stored there under the key |
//! | `…@https://s3.example.com` | the same in a store other than the driver's |
//!
//! The UUID has version 8 and is derived from the request's name; a random one (version 4) is of Scality's driver.

use std::fmt;
use std::str::FromStr;

use sha2::{Digest as _, Sha256};
use uuid::{Uuid, Variant};

use crate::bucket::BucketName;
use crate::endpoint::EndpointUrl;

use super::VolumeLocation;

/// As in Scality's driver, so that administrators find these buckets.
const KEY_PREFIX: &str = "csi-s3-";

/// Limit of the CSI specification.
const MAX_ID_BYTES: usize = 128;

/// `csi-s3-` and a UUID that is derived from the name of the request.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeKey(String);

/// The ID of a dynamically provisioned volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProvisionedId {
    pub data: ProvisionedVolume,
    /// `None`: the driver's.
    pub endpoint: Option<EndpointUrl>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProvisionedVolume {
    Bucket {
        bucket: BucketName,
        key: VolumeKey,
    },
    Prefix {
        bucket: BucketName,
        key: VolumeKey,
    },
    /// A bucket of Scality's driver, which stored no metadata.
    LegacyBucket(BucketName),
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("volume ID {0:?} was not created by this driver")]
pub struct UnknownVolumeId(pub String);

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the volume ID {0:?} would be longer than 128 bytes: choose a shorter endpointUrl or a shared bucket with a shorter name"
)]
pub struct VolumeIdTooLong(pub String);

impl VolumeKey {
    pub fn of_request(name: &str) -> Self {
        // The prefix separates these UUIDs from hashes of the same names for another purpose.
        let digest = Sha256::new().chain_update("s3csi volume\n").chain_update(name).finalize();
        let mut bytes = [0_u8; 16];
        bytes.copy_from_slice(&digest[..16]);
        Self(format!("{KEY_PREFIX}{}", uuid::Builder::from_custom_bytes(bytes).into_uuid()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        (uuid_version(text.strip_prefix(KEY_PREFIX)?) == Some(8)).then(|| Self(text.to_owned()))
    }
}

impl fmt::Display for VolumeKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl ProvisionedId {
    pub fn new(
        place: &VolumeLocation,
        key: &VolumeKey,
        endpoint: Option<&EndpointUrl>,
    ) -> Result<Self, VolumeIdTooLong> {
        let (bucket, key) = (place.bucket().clone(), key.clone());
        let data = match place {
            VolumeLocation::Bucket(_) => ProvisionedVolume::Bucket { bucket, key },
            VolumeLocation::Prefix { .. } => ProvisionedVolume::Prefix { bucket, key },
        };
        let id = Self { data, endpoint: endpoint.cloned() };
        let text = id.to_string();
        if text.len() <= MAX_ID_BYTES { Ok(id) } else { Err(VolumeIdTooLong(text)) }
    }

    pub const fn bucket(&self) -> &BucketName {
        match &self.data {
            ProvisionedVolume::Bucket { bucket, .. }
            | ProvisionedVolume::Prefix { bucket, .. }
            | ProvisionedVolume::LegacyBucket(bucket) => bucket,
        }
    }
}

impl FromStr for ProvisionedId {
    type Err = UnknownVolumeId;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let foreign = || UnknownVolumeId(text.to_owned());
        let (data, endpoint) = match text.split_once('@') {
            Some((data, endpoint)) => {
                let url: EndpointUrl = endpoint.parse().map_err(|_| foreign())?;
                // Only the canonical spelling.
                (data, Some(url).filter(|it| it.as_str() == endpoint).ok_or_else(foreign)?.into())
            }
            None => (text, None),
        };
        let data = parse_data(data).filter(|_| text.len() <= MAX_ID_BYTES).ok_or_else(foreign)?;
        let is_legacy_elsewhere = matches!(data, ProvisionedVolume::LegacyBucket(_)) && endpoint.is_some();
        if is_legacy_elsewhere { Err(foreign()) } else { Ok(Self { data, endpoint }) }
    }
}

impl fmt::Display for ProvisionedId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.data {
            ProvisionedVolume::Bucket { bucket, .. } | ProvisionedVolume::LegacyBucket(bucket) => {
                write!(formatter, "{bucket}")?;
            }
            ProvisionedVolume::Prefix { bucket, key } => write!(formatter, "{bucket}/{key}")?,
        }
        self.endpoint.as_ref().map_or(Ok(()), |it| write!(formatter, "@{it}"))
    }
}

fn parse_data(text: &str) -> Option<ProvisionedVolume> {
    if let Some((bucket, key)) = text.split_once('/') {
        return Some(ProvisionedVolume::Prefix { bucket: bucket.parse().ok()?, key: VolumeKey::parse(key)? });
    }
    let bucket: BucketName = text.parse().ok()?;
    let (_, uuid) = text.rsplit_once(KEY_PREFIX)?;
    match uuid_version(uuid)? {
        8 => Some(ProvisionedVolume::Bucket { bucket, key: VolumeKey(format!("{KEY_PREFIX}{uuid}")) }),
        // That driver created no other names.
        4 if text.len() == KEY_PREFIX.len() + uuid.len() => Some(ProvisionedVolume::LegacyBucket(bucket)),
        _ => None,
    }
}

/// The version of a UUID in canonical spelling: hyphenated, lower case.
fn uuid_version(text: &str) -> Option<usize> {
    let uuid = Uuid::try_parse(text).ok().filter(|it| it.to_string() == text)?;
    (uuid.get_variant() == Variant::RFC4122).then(|| uuid.get_version_num())
}
