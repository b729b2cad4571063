//! What a volume is called: a key that is derived from the request's name, and a volume ID that carries what is needed to
//! delete the volume later.
//!
//! | volume ID | what it is |
//! |---|---|
//! | `csi-s3-<uuid>`, `team-csi-s3-<uuid>` | a bucket of its own, of that name |
//! | `shared/csi-s3-<uuid>` | a prefix in bucket `shared`, which is noted there under the key |
//! | `…@https://s3.example.com` | the same in another store than the driver's |
//!
//! The UUID is of version 8, made of the request's name; a random one (version 4) is of the driver before us.

use std::fmt;
use std::str::FromStr;

use sha2::{Digest as _, Sha256};

use crate::bucket::BucketName;
use crate::endpoint::EndpointUrl;

use super::Place;

/// As in the driver before us: what administrators look for among their buckets.
const BEGINNING: &str = "csi-s3-";

/// The CSI specification bounds all IDs.
const LONGEST_ID_BYTES: usize = 128;

/// `csi-s3-` and a UUID: the same for the same request, another for any other.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeKey(String);

/// The ID of a volume that was made on demand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProvisionedId {
    pub data: Data,
    /// `None`: the driver's own.
    pub endpoint: Option<EndpointUrl>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Data {
    Bucket {
        bucket: BucketName,
        key: VolumeKey,
    },
    Prefix {
        bucket: BucketName,
        key: VolumeKey,
    },
    /// A bucket that the driver before us made: there is no note about it.
    EarlierBucket(BucketName),
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("volume ID {0:?} is not one that this driver makes")]
pub struct ForeignId(pub String);

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the volume ID {0:?} would be longer than 128 bytes: choose a shorter endpointUrl or a shared bucket with a shorter name"
)]
pub struct LongId(pub String);

impl VolumeKey {
    pub fn of_request(name: &str) -> Self {
        // The first words keep these UUIDs apart from hashes of the same names for another purpose.
        let digest = Sha256::new().chain_update("s3csi volume\n").chain_update(name).finalize();
        let mut bytes = [0_u8; 16];
        bytes.copy_from_slice(&digest[..16]);
        bytes[6] = 0x80 | (bytes[6] & 0x0f);
        bytes[8] = 0x80 | (bytes[8] & 0x3f);
        let mut text = BEGINNING.to_owned();
        for (position, byte) in bytes.iter().enumerate() {
            use fmt::Write as _;
            let hyphen = if matches!(position, 4 | 6 | 8 | 10) { "-" } else { "" };
            // Writing to a String cannot fail.
            let _ = write!(text, "{hyphen}{byte:02x}");
        }
        Self(text)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        (uuid_version(text.strip_prefix(BEGINNING)?) == Some('8')).then(|| Self(text.to_owned()))
    }
}

impl fmt::Display for VolumeKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl ProvisionedId {
    pub fn new(place: &Place, key: &VolumeKey, endpoint: Option<&EndpointUrl>) -> Result<Self, LongId> {
        let (bucket, key) = (place.bucket().clone(), key.clone());
        let data = match place {
            Place::Bucket(_) => Data::Bucket { bucket, key },
            Place::Prefix { .. } => Data::Prefix { bucket, key },
        };
        let id = Self { data, endpoint: endpoint.cloned() };
        let text = id.to_string();
        if text.len() <= LONGEST_ID_BYTES { Ok(id) } else { Err(LongId(text)) }
    }

    pub const fn bucket(&self) -> &BucketName {
        match &self.data {
            Data::Bucket { bucket, .. } | Data::Prefix { bucket, .. } | Data::EarlierBucket(bucket) => bucket,
        }
    }
}

impl FromStr for ProvisionedId {
    type Err = ForeignId;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let foreign = || ForeignId(text.to_owned());
        let (data, endpoint) = match text.split_once('@') {
            Some((data, endpoint)) => {
                let url: EndpointUrl = endpoint.parse().map_err(|_| foreign())?;
                // Only what we write ourselves: one ID, one spelling.
                (data, Some(url).filter(|it| it.as_str() == endpoint).ok_or_else(foreign)?.into())
            }
            None => (text, None),
        };
        let data = parse_data(data).filter(|_| text.len() <= LONGEST_ID_BYTES).ok_or_else(foreign)?;
        let is_earlier_elsewhere = matches!(data, Data::EarlierBucket(_)) && endpoint.is_some();
        if is_earlier_elsewhere { Err(foreign()) } else { Ok(Self { data, endpoint }) }
    }
}

impl fmt::Display for ProvisionedId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.data {
            Data::Bucket { bucket, .. } | Data::EarlierBucket(bucket) => write!(formatter, "{bucket}")?,
            Data::Prefix { bucket, key } => write!(formatter, "{bucket}/{key}")?,
        }
        self.endpoint.as_ref().map_or(Ok(()), |it| write!(formatter, "@{it}"))
    }
}

fn parse_data(text: &str) -> Option<Data> {
    if let Some((bucket, key)) = text.split_once('/') {
        return Some(Data::Prefix { bucket: bucket.parse().ok()?, key: VolumeKey::parse(key)? });
    }
    let bucket: BucketName = text.parse().ok()?;
    let (_, uuid) = text.rsplit_once(BEGINNING)?;
    match uuid_version(uuid)? {
        '8' => Some(Data::Bucket { bucket, key: VolumeKey(format!("{BEGINNING}{uuid}")) }),
        // That driver had no other names.
        '4' if text.len() == BEGINNING.len() + uuid.len() => Some(Data::EarlierBucket(bucket)),
        _ => None,
    }
}

/// The version of a UUID in its usual spelling, in lower case.
fn uuid_version(text: &str) -> Option<char> {
    let is_hex = |it: char| it.is_ascii_digit() || ('a'..='f').contains(&it);
    let groups: Vec<&str> = text.split('-').collect();
    let lengths: Vec<usize> = groups.iter().map(|it| it.len()).collect();
    let is_uuid = lengths == [8, 4, 4, 4, 12] && groups.iter().all(|it| it.chars().all(is_hex));
    let is_usual_variant = is_uuid && groups[3].starts_with(['8', '9', 'a', 'b']);
    if is_usual_variant { groups[2].chars().next() } else { None }
}
