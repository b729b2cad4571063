//! The parameters of a `StorageClass`. Each is checked, and unknown ones are rejected by name: a parameter must not be
//! ignored silently.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use crate::bucket::{BucketName, InvalidBucketName};
use crate::endpoint::{EndpointUrl, InvalidEndpointUrl};
use crate::publish::AuthenticationSource;

use super::template::{InvalidPrefixTemplate, PrefixTemplate};

/// The names of parameters, as they arrive.
pub mod parameter {
    pub const BUCKET_NAME_PREFIX: &str = "bucketNamePrefix";
    pub const REGION: &str = "region";
    pub const BUCKET: &str = "bucket";
    pub const PREFIX_TEMPLATE: &str = "prefixTemplate";
    pub const ON_DELETE: &str = "onDelete";
    pub const ENDPOINT_URL: &str = "endpointUrl";
    pub const AUTHENTICATION_SOURCE: &str = "authenticationSource";

    /// Added by the external-provisioner with `--extra-create-metadata`.
    pub const CLAIM_NAME: &str = "csi.storage.k8s.io/pvc/name";
    pub const CLAIM_NAMESPACE: &str = "csi.storage.k8s.io/pvc/namespace";
    pub const VOLUME_NAME: &str = "csi.storage.k8s.io/pv/name";

    /// The external-provisioner resolves these itself and does not pass them on; others may.
    pub const PROVISIONER_SECRET: [&str; 2] =
        ["csi.storage.k8s.io/provisioner-secret-name", "csi.storage.k8s.io/provisioner-secret-namespace"];
    pub const NODE_PUBLISH_SECRET: [&str; 2] =
        ["csi.storage.k8s.io/node-publish-secret-name", "csi.storage.k8s.io/node-publish-secret-namespace"];

    /// The parameters of a `StorageClass`, for messages.
    pub const OWN: [&str; 7] =
        [BUCKET_NAME_PREFIX, REGION, BUCKET, PREFIX_TEMPLATE, ON_DELETE, ENDPOINT_URL, AUTHENTICATION_SOURCE];
}

/// What happens to the data when the volume is deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnDelete {
    /// The data and the bucket stay.
    Retain,
    /// A volume with data in it is not deleted; the error says so.
    #[default]
    DeleteIfEmpty,
    /// Everything is deleted, including versions and uploads in progress.
    DeleteAll,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("onDelete {0:?} is not known: use retain, delete-if-empty or delete-all")]
pub struct UnknownOnDelete(pub String);

/// Parameters that make sense together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameters {
    pub target: BucketMode,
    pub on_delete: OnDelete,
    pub endpoint: Option<EndpointUrl>,
    /// As in the class, if set.
    pub authentication_source: Option<AuthenticationSource>,
    pub claim_namespace: Option<String>,
    pub claim_name: Option<String>,
    pub volume_name: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BucketMode {
    Dedicated { name_prefix: String, region: Option<String> },
    Shared { bucket: BucketName, template: PrefixTemplate },
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidParameters {
    #[error("StorageClass parameter {name:?} is not known; known are {}", parameter::OWN.join(", "))]
    Unknown { name: String },

    #[error("{kind} secret name provided but namespace is missing")]
    NamespaceMissing { kind: &'static str },

    #[error("{kind} secret namespace provided but name is missing")]
    NameMissing { kind: &'static str },

    #[error(transparent)]
    OnDelete(UnknownOnDelete),

    #[error(transparent)]
    Endpoint(InvalidEndpointUrl),

    #[error("authenticationSource {value:?} is not known: only \"driver\", \"secret\" and \"pod\" are supported")]
    AuthenticationSource { value: String },

    #[error(
        "region {value:?} is not usable: it is a name of lower-case letters, digits and hyphens, such as eu-west-1"
    )]
    Region { value: String },

    #[error("bucketNamePrefix {value:?} is not a valid beginning of a bucket name")]
    BucketNamePrefix {
        value: String,
        #[source]
        cause: InvalidBucketName,
    },

    #[error("parameter bucket is not usable")]
    Bucket {
        #[source]
        cause: InvalidBucketName,
    },

    #[error(transparent)]
    Template(InvalidPrefixTemplate),

    #[error(
        "parameter bucket names a shared bucket, in which each volume needs a prefix: set prefixTemplate, for example to ${{pvc.namespace}}/${{pvc.name}}"
    )]
    SharedWithoutPrefix,

    #[error("prefixTemplate requires a shared bucket: set parameter bucket as well")]
    PrefixWithoutBucket,

    #[error("{name} is for buckets that are created for each volume; it has no meaning together with bucket")]
    OnlyForNewBuckets { name: &'static str },
}

impl OnDelete {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Retain => "retain",
            Self::DeleteIfEmpty => "delete-if-empty",
            Self::DeleteAll => "delete-all",
        }
    }
}

impl FromStr for OnDelete {
    type Err = UnknownOnDelete;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::Retain, Self::DeleteIfEmpty, Self::DeleteAll]
            .into_iter()
            .find(|it| it.as_str() == text)
            .ok_or_else(|| UnknownOnDelete(text.to_owned()))
    }
}

impl fmt::Display for OnDelete {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

impl Parameters {
    /// An empty value counts as unset: charts and templates produce them.
    pub fn parse(raw: &BTreeMap<String, String>) -> Result<Self, InvalidParameters> {
        refuse_unknown(raw)?;
        let value = |name: &str| raw.get(name).map(|it| it.trim()).filter(|it| !it.is_empty());
        let owned = |name: &str| value(name).map(str::to_owned);
        check_pair("provisioner", parameter::PROVISIONER_SECRET.map(value))?;
        check_pair("node-publish", parameter::NODE_PUBLISH_SECRET.map(value))?;
        let has_node_secret = value(parameter::NODE_PUBLISH_SECRET[0]).is_some();
        let authentication_source = match value(parameter::AUTHENTICATION_SOURCE) {
            None => has_node_secret.then_some(AuthenticationSource::Secret),
            Some(text) => {
                let unknown = || InvalidParameters::AuthenticationSource { value: text.to_owned() };
                Some(AuthenticationSource::parse(text).ok_or_else(unknown)?)
            }
        };
        let on_delete = value(parameter::ON_DELETE).map(str::parse).transpose();
        let endpoint = value(parameter::ENDPOINT_URL).map(str::parse).transpose();
        Ok(Self {
            target: BucketMode::parse(value)?,
            on_delete: on_delete.map_err(InvalidParameters::OnDelete)?.unwrap_or_default(),
            endpoint: endpoint.map_err(InvalidParameters::Endpoint)?,
            authentication_source,
            claim_namespace: owned(parameter::CLAIM_NAMESPACE),
            claim_name: owned(parameter::CLAIM_NAME),
            volume_name: owned(parameter::VOLUME_NAME),
        })
    }
}

impl BucketMode {
    fn parse<'a>(value: impl Fn(&str) -> Option<&'a str>) -> Result<Self, InvalidParameters> {
        let (name_prefix, region) = (value(parameter::BUCKET_NAME_PREFIX), value(parameter::REGION));
        match (value(parameter::BUCKET), value(parameter::PREFIX_TEMPLATE)) {
            (None, None) => {
                let region = region.map(parse_region).transpose()?;
                Ok(Self::Dedicated { name_prefix: parse_name_prefix(name_prefix.unwrap_or_default())?, region })
            }
            (None, Some(_)) => Err(InvalidParameters::PrefixWithoutBucket),
            (Some(_), None) => Err(InvalidParameters::SharedWithoutPrefix),
            (Some(bucket), Some(template)) => {
                let meaningless =
                    [(parameter::BUCKET_NAME_PREFIX, name_prefix), (parameter::REGION, region)].into_iter();
                if let Some((name, _)) = meaningless.clone().find(|(_, it)| it.is_some()) {
                    return Err(InvalidParameters::OnlyForNewBuckets { name });
                }
                Ok(Self::Shared {
                    bucket: bucket.parse().map_err(|cause| InvalidParameters::Bucket { cause })?,
                    template: PrefixTemplate::parse(template).map_err(InvalidParameters::Template)?,
                })
            }
        }
    }
}

fn refuse_unknown(raw: &BTreeMap<String, String>) -> Result<(), InvalidParameters> {
    let sent = [parameter::CLAIM_NAME, parameter::CLAIM_NAMESPACE, parameter::VOLUME_NAME];
    let is_known = |name: &&str| {
        parameter::OWN.contains(name)
            || sent.contains(name)
            || parameter::PROVISIONER_SECRET.contains(name)
            || parameter::NODE_PUBLISH_SECRET.contains(name)
    };
    match raw.keys().map(String::as_str).find(|it| !is_known(it)) {
        Some(name) => Err(InvalidParameters::Unknown { name: name.to_owned() }),
        None => Ok(()),
    }
}

fn check_pair(kind: &'static str, [name, namespace]: [Option<&str>; 2]) -> Result<(), InvalidParameters> {
    match (name, namespace) {
        (Some(_), None) => Err(InvalidParameters::NamespaceMissing { kind }),
        (None, Some(_)) => Err(InvalidParameters::NameMissing { kind }),
        (Some(_), Some(_)) | (None, None) => Ok(()),
    }
}

/// The whole name is this and 43 characters more; any of them shows whether it can be a bucket's.
fn parse_name_prefix(text: &str) -> Result<String, InvalidParameters> {
    let whole = format!("{text}{}", super::VolumeKey::of_request(""));
    match whole.parse::<BucketName>() {
        Ok(_) => Ok(text.to_owned()),
        Err(cause) => Err(InvalidParameters::BucketNamePrefix { value: text.to_owned(), cause }),
    }
}

fn parse_region(text: &str) -> Result<String, InvalidParameters> {
    let is_fine =
        text.len() <= 63 && text.chars().all(|it| it.is_ascii_lowercase() || it.is_ascii_digit() || "-_".contains(it));
    if is_fine { Ok(text.to_owned()) } else { Err(InvalidParameters::Region { value: text.to_owned() }) }
}
