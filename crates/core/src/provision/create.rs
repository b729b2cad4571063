//! Parses a request to create a volume into checked types, or reports the first problem.

use std::collections::BTreeMap;
use std::fmt;

use crate::arguments::{InvalidArgument, MountArguments};
use crate::bucket::{BucketName, InvalidBucketName};
use crate::credentials::{InvalidKeys, Keys};
use crate::endpoint::EndpointUrl;
use crate::policy::{self, PolicyError};
use crate::publish::{
    AccessMode, AccessType, AuthenticationSource, InvalidPublish, RawCapability, context, refuse_reserved_prefix,
    refuse_root_as_owner, take_read_only,
};
use crate::secret::Secret;

use super::VolumeLocation;
use super::context as provisioned;
use super::id::{ProvisionedId, VolumeIdTooLong, VolumeKey};
use super::parameters::{BucketMode, InvalidParameters, Parameters};
use super::record::{self, VolumeRecord};
use super::template::{InvalidPrefixTemplate, TemplateVariable};

/// A request as received, unchecked.
#[derive(Clone, Debug)]
pub struct RawCreateRequest<'a> {
    pub name: &'a str,
    pub capabilities: &'a [RawCapability<'a>],
    pub parameters: &'a BTreeMap<String, String>,
    pub secrets: &'a BTreeMap<String, Secret<String>>,
    pub required_bytes: i64,
    pub limit_bytes: i64,
    pub has_content_source: bool,
    pub has_mutable_parameters: bool,
}

/// A checked request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreateRequest {
    pub id: ProvisionedId,
    pub place: VolumeLocation,
    pub capacity: CapacityRange,
    /// The metadata to store.
    pub record: VolumeRecord,
    /// The credentials to create it with.
    pub identity: StoreIdentity,
}

/// The credentials for requests to the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreIdentity {
    /// `None`: the driver's.
    pub keys: Option<Keys>,
    /// A Secret may name the region for signatures.
    pub signing_region: Option<String>,
}

/// The capacities that the caller accepts; a limit of 0 is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CapacityRange {
    pub required_bytes: u64,
    pub limit_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidCreateRequest {
    #[error("volume name is required")]
    NameMissing,

    #[error("volume capabilities are required")]
    CapabilitiesMissing,

    #[error("volume capability access mode is required")]
    AccessModeMissing,

    #[error(
        "access mode {mode} cannot be enforced: use ReadWriteMany (MULTI_NODE_MULTI_WRITER), ReadOnlyMany (MULTI_NODE_READER_ONLY), or with strategy pod ReadWriteOnce or ReadWriteOncePod"
    )]
    AccessMode { mode: String },

    #[error("a bucket is not a block device: use volumeMode: Filesystem")]
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

    #[error("a volume cannot be created from a snapshot or another volume: remove dataSource from the claim")]
    ContentSource,

    #[error("volume attributes classes are not supported: remove volumeAttributesClassName from the claim")]
    MutableParameters,

    #[error("the requested capacity is invalid: {required_bytes} to {limit_bytes} bytes")]
    Capacity { required_bytes: i64, limit_bytes: i64 },

    #[error("the StorageClass is not usable")]
    Parameters {
        #[source]
        cause: InvalidParameters,
    },

    #[error("the StorageClass is not usable")]
    Template {
        #[source]
        cause: InvalidPrefixTemplate,
    },

    #[error("no bucket can be named after this volume")]
    BucketName {
        #[source]
        cause: InvalidBucketName,
    },

    #[error(
        "endpointUrl names another store, which needs keys of its own: set csi.storage.k8s.io/provisioner-secret-name and -namespace"
    )]
    EndpointWithoutSecret,

    #[error(
        "endpointUrl names another store, whose volumes cannot be mounted with the driver's keys: remove authenticationSource, and name a node-publish secret"
    )]
    EndpointWithDriver,

    #[error("the volume cannot be named")]
    Id {
        #[source]
        cause: VolumeIdTooLong,
    },

    /// The only variant that is about credentials.
    #[error("the provisioner secret is not usable: correct the Secret that the StorageClass names")]
    Secret {
        #[source]
        cause: InvalidKeys,
    },
}

/// Optional key of a provisioner secret, as in Scality's driver.
const REGION: &str = "region";

impl CreateRequest {
    /// Checks in the order of the CSI contract; the first failure wins.
    pub fn parse(raw: &RawCreateRequest<'_>) -> Result<Self, InvalidCreateRequest> {
        let RawCreateRequest { name, capabilities, parameters, secrets, .. } = *raw;
        if name.is_empty() {
            return Err(InvalidCreateRequest::NameMissing);
        }
        if capabilities.is_empty() {
            return Err(InvalidCreateRequest::CapabilitiesMissing);
        }
        let parameters = Parameters::parse(parameters).map_err(|cause| InvalidCreateRequest::Parameters { cause })?;
        let is_shared = matches!(parameters.target, BucketMode::Shared { .. });
        for capability in capabilities {
            check_capability(capability, is_shared)?;
        }
        if raw.has_content_source {
            return Err(InvalidCreateRequest::ContentSource);
        }
        if raw.has_mutable_parameters {
            return Err(InvalidCreateRequest::MutableParameters);
        }
        let capacity = CapacityRange::parse(raw.required_bytes, raw.limit_bytes)?;
        let identity = StoreIdentity::parse(secrets).map_err(|cause| InvalidCreateRequest::Secret { cause })?;
        let authentication_source = authentication_source(&parameters, &identity)?;

        let key = VolumeKey::of_request(name);
        let (place, region) = place(name, &key, &parameters)?;
        let id = ProvisionedId::new(&place, &key, parameters.endpoint.as_ref())
            .map_err(|cause| InvalidCreateRequest::Id { cause })?;
        let claim = parameters.claim_namespace.as_ref().zip(parameters.claim_name.as_ref());
        let record = VolumeRecord {
            volume: key,
            on_delete: parameters.on_delete,
            capacity_bytes: capacity.required_bytes,
            authentication_source,
            provisioned_with: identity.source(),
            region,
            prefix: place.prefix().cloned(),
            claim: claim.map(|(namespace, name)| record::claim_text(namespace, name)),
        };
        Ok(Self { id, place, capacity, record, identity })
    }

    pub const fn endpoint(&self) -> Option<&EndpointUrl> {
        self.id.endpoint.as_ref()
    }

    /// What the node receives when it mounts the volume.
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

impl StoreIdentity {
    /// No Secret means the driver's keys; an unusable one never does.
    pub fn parse(secrets: &BTreeMap<String, Secret<String>>) -> Result<Self, InvalidKeys> {
        if secrets.is_empty() {
            return Ok(Self { keys: None, signing_region: None });
        }
        let keys = Keys::from_secret(secrets)?;
        let region = secrets.get(REGION).map(|it| it.expose().trim()).filter(|it| !it.is_empty());
        if !region.is_none_or(is_signing_region) {
            return Err(InvalidKeys::Malformed { names: vec![REGION] });
        }
        Ok(Self { keys: Some(keys), signing_region: region.map(str::to_owned) })
    }

    pub const fn source(&self) -> AuthenticationSource {
        match self.keys {
            None => AuthenticationSource::Driver,
            Some(_) => AuthenticationSource::Secret,
        }
    }
}

/// Whether a text can be the region of signatures, which are sent as headers.
pub fn is_signing_region(text: &str) -> bool {
    !text.is_empty() && text.len() <= 63 && text.chars().all(|it| it.is_ascii_alphanumeric() || "-_.".contains(it))
}

impl CapacityRange {
    fn parse(required_bytes: i64, limit_bytes: i64) -> Result<Self, InvalidCreateRequest> {
        let invalid = InvalidCreateRequest::Capacity { required_bytes, limit_bytes };
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

/// Whether a volume can be used with this capability. `has_prefix`: it is a prefix of a shared bucket.
pub fn check_capability(capability: &RawCapability<'_>, has_prefix: bool) -> Result<(), InvalidCreateRequest> {
    match &capability.access_mode {
        Some(
            AccessMode::MultiNodeMultiWriter
            | AccessMode::MultiNodeReaderOnly
            | AccessMode::SingleNodeMultiWriter
            | AccessMode::SingleNodeSingleWriter,
        ) => {}
        Some(AccessMode::Other(mode)) => return Err(InvalidCreateRequest::AccessMode { mode: mode.clone() }),
        None => return Err(InvalidCreateRequest::AccessModeMissing),
    }
    let flags = match capability.access_type {
        AccessType::Mount { mount_flags, .. } => mount_flags,
        AccessType::Block => return Err(InvalidCreateRequest::Block),
        AccessType::Unset => [].as_slice(),
    };
    let mut arguments = MountArguments::parse(flags).map_err(|cause| InvalidCreateRequest::MountOptions { cause })?;
    let unusable = |cause| InvalidCreateRequest::UnusableOptions { cause };
    refuse_root_as_owner(&arguments).map_err(unusable)?;
    take_read_only(&mut arguments).map_err(unusable)?;
    if has_prefix && arguments.has("--prefix") {
        return Err(InvalidCreateRequest::PrefixTwice);
    }
    refuse_reserved_prefix(&arguments).map_err(unusable)?;
    policy::apply(arguments, "").map_err(|cause| InvalidCreateRequest::Conflict { cause })?;
    Ok(())
}

/// Which keys mount the volume: what the class says, or those of a Secret if it was created with one. The provisioner does not
/// pass on the node-publish secret.
fn authentication_source(
    parameters: &Parameters,
    creator: &StoreIdentity,
) -> Result<AuthenticationSource, InvalidCreateRequest> {
    let source = parameters.authentication_source.unwrap_or(creator.source());
    match (&parameters.endpoint, &creator.keys, source) {
        (Some(_), None, _) => Err(InvalidCreateRequest::EndpointWithoutSecret),
        (Some(_), Some(_), AuthenticationSource::Driver) => Err(InvalidCreateRequest::EndpointWithDriver),
        (Some(_), Some(_), AuthenticationSource::Secret | AuthenticationSource::Pod) | (None, _, _) => Ok(source),
    }
}

fn place(
    name: &str,
    key: &VolumeKey,
    parameters: &Parameters,
) -> Result<(VolumeLocation, Option<String>), InvalidCreateRequest> {
    match &parameters.target {
        BucketMode::Dedicated { name_prefix, region } => {
            let bucket: BucketName =
                format!("{name_prefix}{key}").parse().map_err(|cause| InvalidCreateRequest::BucketName { cause })?;
            Ok((VolumeLocation::Bucket(bucket), region.clone()))
        }
        BucketMode::Shared { bucket, template } => {
            let value = |variable| match variable {
                TemplateVariable::ClaimNamespace => parameters.claim_namespace.as_deref(),
                TemplateVariable::ClaimName => parameters.claim_name.as_deref(),
                // The external-provisioner names the PV after the request.
                TemplateVariable::VolumeName => Some(parameters.volume_name.as_deref().unwrap_or(name)),
            };
            let prefix = template.render(value).map_err(|cause| InvalidCreateRequest::Template { cause })?;
            Ok((VolumeLocation::Prefix { bucket: bucket.clone(), prefix }, None))
        }
    }
}
