//! What a request to create a volume means. It comes in as loose text and leaves as types, or as the first thing that is
//! wrong with it; nothing behind this door checks again.

use std::collections::BTreeMap;
use std::fmt;

use crate::arguments::{Arguments, InvalidArgument};
use crate::bucket::{BucketName, InvalidBucketName};
use crate::credentials::{InvalidKeys, Keys};
use crate::endpoint::EndpointUrl;
use crate::policy::{self, PolicyError};
use crate::publish::{
    AccessMode, AccessType, AuthenticationSource, Identity, InvalidPublish, RawCapability, context,
    refuse_root_as_owner, take_read_only,
};
use crate::secret::Secret;

use super::Place;
use super::context as provisioned;
use super::id::{LongId, ProvisionedId, VolumeKey};
use super::parameters::{InvalidParameters, Parameters, Target};
use super::record::Record;
use super::template::{InvalidTemplate, Variable};

/// A request as it arrives: nothing in it was checked.
#[derive(Clone, Debug)]
pub struct RawCreate<'a> {
    pub name: &'a str,
    pub capabilities: &'a [RawCapability<'a>],
    pub parameters: &'a BTreeMap<String, String>,
    pub secrets: &'a BTreeMap<String, Secret<String>>,
    pub required_bytes: i64,
    pub limit_bytes: i64,
    pub has_content_source: bool,
    pub has_mutable_parameters: bool,
}

/// A volume that somebody asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Create {
    pub id: ProvisionedId,
    pub place: Place,
    pub capacity: CapacityRange,
    /// What will be noted about it.
    pub record: Record,
    /// In whose name it is made.
    pub owner: Owner,
}

/// In whose name the store is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    pub identity: Identity,
    /// A Secret may name the region that requests are signed for.
    pub signing_region: Option<String>,
}

/// What the caller can live with; a limit of 0 is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CapacityRange {
    pub required_bytes: u64,
    pub limit_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidCreate {
    #[error("volume name is required")]
    NameMissing,

    #[error("volume capabilities are required")]
    CapabilitiesMissing,

    #[error("volume capability access mode is required")]
    AccessModeMissing,

    #[error(
        "access mode {mode} cannot be kept by a bucket: we only support ReadWriteMany (MULTI_NODE_MULTI_WRITER) and ReadOnlyMany (MULTI_NODE_READER_ONLY)"
    )]
    AccessMode { mode: String },

    #[error("a bucket is no block device: use volumeMode: Filesystem")]
    Block,

    #[error("mountOptions of the StorageClass are not understood")]
    MountOptions {
        #[source]
        cause: InvalidArgument,
    },

    #[error("mountOptions of the StorageClass cannot work")]
    UnusableOptions {
        #[source]
        cause: InvalidPublish,
    },

    #[error("mountOptions of the StorageClass contradict each other")]
    Conflict {
        #[source]
        cause: PolicyError,
    },

    #[error("mount option prefix and parameter prefixTemplate exclude each other; remove the mount option")]
    PrefixTwice,

    #[error("a volume cannot be made from a snapshot or another volume: remove dataSource from the claim")]
    ContentSource,

    #[error("volume attributes classes are not supported: remove volumeAttributesClassName from the claim")]
    MutableParameters,

    #[error("the capacity asked for makes no sense: {required_bytes} to {limit_bytes} bytes")]
    Capacity { required_bytes: i64, limit_bytes: i64 },

    #[error("the StorageClass is not usable")]
    Parameters {
        #[source]
        cause: InvalidParameters,
    },

    #[error("the StorageClass is not usable")]
    Template {
        #[source]
        cause: InvalidTemplate,
    },

    #[error("no bucket can be named after this volume")]
    BucketName {
        #[source]
        cause: InvalidBucketName,
    },

    #[error(
        "endpointUrl sends keys to another store, so it needs its own: set csi.storage.k8s.io/provisioner-secret-name and -namespace"
    )]
    EndpointWithoutSecret,

    #[error(
        "endpointUrl sends keys to another store, so its volumes cannot be mounted with the driver's: leave authenticationSource out, and name a node-publish secret"
    )]
    EndpointWithDriver,

    #[error("the volume cannot be named")]
    Id {
        #[source]
        cause: LongId,
    },

    /// The only variant that is about credentials.
    #[error("the provisioner secret is not usable: correct the Secret that the StorageClass names")]
    Secret {
        #[source]
        cause: InvalidKeys,
    },
}

/// Optional key of a provisioner secret, as in the driver before us.
const REGION: &str = "region";

impl Create {
    /// Checks in the order of the CSI contract; the first failure wins.
    pub fn parse(raw: &RawCreate<'_>) -> Result<Self, InvalidCreate> {
        let RawCreate { name, capabilities, parameters, secrets, .. } = *raw;
        if name.is_empty() {
            return Err(InvalidCreate::NameMissing);
        }
        if capabilities.is_empty() {
            return Err(InvalidCreate::CapabilitiesMissing);
        }
        let parameters = Parameters::parse(parameters).map_err(|cause| InvalidCreate::Parameters { cause })?;
        let is_shared = matches!(parameters.target, Target::Shared { .. });
        for capability in capabilities {
            check_capability(capability, is_shared)?;
        }
        if raw.has_content_source {
            return Err(InvalidCreate::ContentSource);
        }
        if raw.has_mutable_parameters {
            return Err(InvalidCreate::MutableParameters);
        }
        let capacity = CapacityRange::parse(raw.required_bytes, raw.limit_bytes)?;
        let owner = Owner::parse(secrets).map_err(|cause| InvalidCreate::Secret { cause })?;
        let authentication_source = authentication_source(&parameters, &owner.identity)?;

        let key = VolumeKey::of_request(name);
        let (place, region) = place(name, &key, &parameters)?;
        let id = ProvisionedId::new(&place, &key, parameters.endpoint.as_ref())
            .map_err(|cause| InvalidCreate::Id { cause })?;
        let claim = parameters.claim_namespace.as_ref().zip(parameters.claim_name.as_ref());
        let record = Record {
            volume: key,
            on_delete: parameters.on_delete,
            capacity_bytes: capacity.required_bytes,
            authentication_source,
            region,
            prefix: place.prefix().cloned(),
            claim: claim.map(|(namespace, name)| format!("{namespace}/{name}")),
        };
        Ok(Self { id, place, capacity, record, owner })
    }

    pub const fn endpoint(&self) -> Option<&EndpointUrl> {
        self.id.endpoint.as_ref()
    }

    /// What the node is told when it mounts the volume.
    pub fn volume_context(&self) -> BTreeMap<String, String> {
        let source = self.record.authentication_source;
        let mut context = BTreeMap::from([
            (provisioned::DYNAMIC_PROVISIONING.to_owned(), "true".to_owned()),
            (context::BUCKET_NAME.to_owned(), self.place.bucket().to_string()),
            (context::AUTHENTICATION_SOURCE.to_owned(), source.to_string()),
        ]);
        context.extend(self.place.prefix().map(|it| (context::PREFIX.to_owned(), it.to_string())));
        context.extend(self.endpoint().map(|it| (context::ENDPOINT_URL.to_owned(), it.to_string())));
        context
    }
}

impl Owner {
    /// No Secret means the driver's own keys; an unusable one never does.
    pub fn parse(secrets: &BTreeMap<String, Secret<String>>) -> Result<Self, InvalidKeys> {
        if secrets.is_empty() {
            return Ok(Self { identity: Identity::Driver, signing_region: None });
        }
        let keys = Keys::from_secret(secrets)?;
        let region = secrets.get(REGION).map(|it| it.expose().trim().to_owned()).filter(|it| !it.is_empty());
        Ok(Self { identity: Identity::Secret(keys), signing_region: region })
    }
}

impl CapacityRange {
    fn parse(required_bytes: i64, limit_bytes: i64) -> Result<Self, InvalidCreate> {
        let invalid = InvalidCreate::Capacity { required_bytes, limit_bytes };
        let (Ok(required), Ok(limit)) = (u64::try_from(required_bytes), u64::try_from(limit_bytes)) else {
            return Err(invalid);
        };
        if limit != 0 && limit < required {
            return Err(invalid);
        }
        Ok(Self { required_bytes: required, limit_bytes: limit })
    }

    pub const fn includes(self, bytes: u64) -> bool {
        self.required_bytes <= bytes && (self.limit_bytes == 0 || bytes <= self.limit_bytes)
    }
}

impl fmt::Display for CapacityRange {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.limit_bytes {
            0 => write!(formatter, "{} or more", self.required_bytes),
            limit => write!(formatter, "{} to {limit}", self.required_bytes),
        }
    }
}

/// Whether a volume can be used like this. `has_prefix`: the volume is a part of a bucket.
pub fn check_capability(capability: &RawCapability<'_>, has_prefix: bool) -> Result<(), InvalidCreate> {
    match &capability.access_mode {
        Some(AccessMode::MultiNodeMultiWriter | AccessMode::MultiNodeReaderOnly) => {}
        Some(AccessMode::Other(mode)) => return Err(InvalidCreate::AccessMode { mode: mode.clone() }),
        None => return Err(InvalidCreate::AccessModeMissing),
    }
    let flags = match capability.access_type {
        AccessType::Mount { mount_flags, .. } => mount_flags,
        AccessType::Block => return Err(InvalidCreate::Block),
        AccessType::Unset => [].as_slice(),
    };
    let mut arguments = Arguments::parse(flags).map_err(|cause| InvalidCreate::MountOptions { cause })?;
    let unusable = |cause| InvalidCreate::UnusableOptions { cause };
    refuse_root_as_owner(&arguments).map_err(unusable)?;
    take_read_only(&mut arguments).map_err(unusable)?;
    if has_prefix && arguments.has("--prefix") {
        return Err(InvalidCreate::PrefixTwice);
    }
    policy::apply(arguments, "").map_err(|cause| InvalidCreate::Conflict { cause })?;
    Ok(())
}

/// Whose keys mount the volume: what the class says, or those of a Secret where one made it. The provisioner does not tell
/// us of a Secret for mounting.
fn authentication_source(parameters: &Parameters, creator: &Identity) -> Result<AuthenticationSource, InvalidCreate> {
    let source = parameters.authentication_source.unwrap_or(creator.source());
    match (&parameters.endpoint, creator, source) {
        (Some(_), Identity::Driver, _) => Err(InvalidCreate::EndpointWithoutSecret),
        (Some(_), Identity::Secret(_), AuthenticationSource::Driver) => Err(InvalidCreate::EndpointWithDriver),
        (Some(_), Identity::Secret(_), AuthenticationSource::Secret) | (None, _, _) => Ok(source),
    }
}

fn place(name: &str, key: &VolumeKey, parameters: &Parameters) -> Result<(Place, Option<String>), InvalidCreate> {
    match &parameters.target {
        Target::NewBucket { name_prefix, region } => {
            let bucket: BucketName =
                format!("{name_prefix}{key}").parse().map_err(|cause| InvalidCreate::BucketName { cause })?;
            Ok((Place::Bucket(bucket), region.clone()))
        }
        Target::Shared { bucket, template } => {
            let value = |variable| match variable {
                Variable::ClaimNamespace => parameters.claim_namespace.as_deref(),
                Variable::ClaimName => parameters.claim_name.as_deref(),
                // The external-provisioner names the PV after the request, whether or not it says so.
                Variable::VolumeName => Some(parameters.volume_name.as_deref().unwrap_or(name)),
            };
            let prefix = template.render(value).map_err(|cause| InvalidCreate::Template { cause })?;
            Ok((Place::Prefix { bucket: bucket.clone(), prefix }, None))
        }
    }
}
