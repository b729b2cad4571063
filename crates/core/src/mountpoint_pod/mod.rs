//! What a PV says about the Mountpoint Pods that serve it: resources, service account, cache, staging. The controller, which creates the
//! Pod, and the node, which passes options to the engine, use the same rules.

mod defaults;

use std::collections::BTreeMap;

use crate::arguments::MountArguments;
use crate::names::hex_sha224;
use crate::quantity::Quantity;
use crate::stage::StageLimit;

pub use self::defaults::DefaultResources;

/// Keys of a PV's `volumeAttributes`.
pub mod context {
    pub const REQUESTS_CPU: &str = "mountpointContainerResourcesRequestsCpu";
    pub const REQUESTS_MEMORY: &str = "mountpointContainerResourcesRequestsMemory";
    pub const LIMITS_CPU: &str = crate::limits::context::CPU;
    pub const LIMITS_MEMORY: &str = crate::limits::context::MEMORY;
    pub const SERVICE_ACCOUNT: &str = "mountpointPodServiceAccountName";
    pub const CACHE: &str = "cache";
    pub const EMPTY_DIR_SIZE_LIMIT: &str = "cacheEmptyDirSizeLimit";
    pub const EMPTY_DIR_MEDIUM: &str = "cacheEmptyDirMedium";
    pub const EPHEMERAL_STORAGE_CLASS: &str = "cacheEphemeralStorageClassName";
    pub const EPHEMERAL_REQUEST: &str = "cacheEphemeralStorageResourceRequest";
    pub const STAGE_SIZE_LIMIT: &str = "mountpointStageSizeLimit";
}

/// Where the cache volume is in a Mountpoint Pod.
pub const CACHE_DIRECTORY: &str = "/local-cache";

/// Where the staging volume is in a Mountpoint Pod.
pub const STAGE_DIRECTORY: &str = "/local-stage";

const CACHE_OPTION: &str = "--cache";
const MAX_CACHE_SIZE_OPTION: &str = "--max-cache-size";

/// kubelet evicts a Pod that fills its emptyDir; the engine looks at its cache's size only now and then.
const CACHE_SHARE_PERCENT: u128 = 95;

/// What a Mountpoint Pod for a PV must have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodShape {
    pub requests: Resources,
    pub limits: Resources,
    /// In the namespace of the Mountpoint Pods; theirs is the default one without it.
    pub service_account: Option<String>,
    pub cache: Option<CacheVolume>,
    /// The limit of the staging volume; `None`: the driver's.
    pub stage: Option<StageLimit>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    pub cpu: Option<Quantity>,
    pub memory: Option<Quantity>,
}

/// What a Mountpoint Pod is created from, apart from its node and the source it serves: two Pods with equal templates can serve the
/// same volumes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodTemplate(String);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheVolume {
    EmptyDir { size_limit: Option<Quantity>, medium: Medium },
    Ephemeral { storage_class: String, request: Quantity },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    Disk,
    Memory,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPodShape {
    #[error("volume attribute {key} {value:?} is not a quantity such as 500m, 2 or 512Mi, greater than zero")]
    Quantity { key: &'static str, value: String },

    #[error("volume attribute {} {value:?} is not a size such as 1Gi, or 0 for none", context::STAGE_SIZE_LIMIT)]
    StageLimit { value: String },

    #[error("volume attribute {request} ({requested}) is greater than {limit} ({limited})")]
    RequestAboveLimit { request: &'static str, requested: String, limit: &'static str, limited: String },

    #[error("volume attribute {} {value:?} is not the name of a service account", context::SERVICE_ACCOUNT)]
    ServiceAccount { value: String },

    #[error("volume attribute {} {value:?} is not known: only \"emptyDir\" and \"ephemeral\" are", context::CACHE)]
    CacheKind { value: String },

    #[error(
        "a cache is requested twice, by mount option {CACHE_OPTION} and by volume attribute {}; remove the mount option",
        context::CACHE
    )]
    CacheTwice,

    #[error("volume attribute {} {value:?} is not known: only \"Memory\" is", context::EMPTY_DIR_MEDIUM)]
    Medium { value: String },

    #[error("volume attribute {key} is missing: a cache of kind \"ephemeral\" needs it")]
    Missing { key: &'static str },

    #[error(
        "mount option {MAX_CACHE_SIZE_OPTION} ({given} MiB) is greater than volume attribute {} ({limit})",
        context::EMPTY_DIR_SIZE_LIMIT
    )]
    CacheAboveLimit { given: u128, limit: String },
}

impl PodTemplate {
    /// The template of a Pod with this spec.
    pub fn of_spec(spec: &str) -> Self {
        Self(hex_sha224([spec]))
    }

    /// As it was written on a Pod. Text that is no template equals none.
    pub fn from_label(text: String) -> Self {
        Self(text)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl PodShape {
    /// Invalid mount options are reported elsewhere; here they count as absent.
    pub fn parse(attributes: &BTreeMap<String, String>, mount_options: &[String]) -> Result<Self, InvalidPodShape> {
        let arguments = MountArguments::parse(mount_options).unwrap_or_default();
        let read = |key: &'static str| attributes.get(key).map(String::as_str).filter(|it| !it.is_empty());
        let quantity = |key: &'static str| match read(key) {
            None => Ok(None),
            Some(text) => match text.parse::<Quantity>() {
                Ok(quantity) => Ok(Some(quantity)),
                Err(_) => Err(InvalidPodShape::Quantity { key, value: text.to_owned() }),
            },
        };
        let requests = Resources { cpu: quantity(context::REQUESTS_CPU)?, memory: quantity(context::REQUESTS_MEMORY)? };
        let limits = Resources { cpu: quantity(context::LIMITS_CPU)?, memory: quantity(context::LIMITS_MEMORY)? };
        let pairs = [
            (context::REQUESTS_CPU, &requests.cpu, context::LIMITS_CPU, &limits.cpu),
            (context::REQUESTS_MEMORY, &requests.memory, context::LIMITS_MEMORY, &limits.memory),
        ];
        for (request, requested, limit, limited) in pairs {
            if let (Some(requested), Some(limited)) = (requested, limited)
                && limited.thousandths() < requested.thousandths()
            {
                let (requested, limited) = (requested.to_string(), limited.to_string());
                return Err(InvalidPodShape::RequestAboveLimit { request, requested, limit, limited });
            }
        }

        let service_account = read(context::SERVICE_ACCOUNT).map(str::to_owned);
        if let Some(value) = service_account.as_ref().filter(|it| !is_object_name(it)) {
            return Err(InvalidPodShape::ServiceAccount { value: value.clone() });
        }

        let cache = match (read(context::CACHE), arguments.has(CACHE_OPTION)) {
            (Some(_), true) => return Err(InvalidPodShape::CacheTwice),
            (None, false) => None,
            // The path of the option means nothing in a Pod.
            (None, true) => Some(CacheVolume::EmptyDir { size_limit: None, medium: Medium::Disk }),
            (Some("emptyDir"), false) => Some(CacheVolume::EmptyDir {
                size_limit: quantity(context::EMPTY_DIR_SIZE_LIMIT)?,
                medium: match read(context::EMPTY_DIR_MEDIUM) {
                    None => Medium::Disk,
                    Some("Memory") => Medium::Memory,
                    Some(other) => return Err(InvalidPodShape::Medium { value: other.to_owned() }),
                },
            }),
            (Some("ephemeral"), false) => {
                let missing = |key| InvalidPodShape::Missing { key };
                Some(CacheVolume::Ephemeral {
                    storage_class: read(context::EPHEMERAL_STORAGE_CLASS)
                        .ok_or(missing(context::EPHEMERAL_STORAGE_CLASS))?
                        .to_owned(),
                    request: quantity(context::EPHEMERAL_REQUEST)?.ok_or(missing(context::EPHEMERAL_REQUEST))?,
                })
            }
            (Some(other), false) => return Err(InvalidPodShape::CacheKind { value: other.to_owned() }),
        };
        let invalid_stage = |value: &str| InvalidPodShape::StageLimit { value: value.to_owned() };
        let stage = read(context::STAGE_SIZE_LIMIT).map(|it| it.parse().map_err(|_| invalid_stage(it))).transpose()?;
        let shape = Self { requests, limits, service_account, cache, stage };
        shape.cache_size(&arguments)?;
        Ok(shape)
    }

    /// Gives an engine in such a Pod its cache, and a size that the volume can hold.
    pub fn set_cache_options(&self, arguments: &mut MountArguments) -> Result<(), InvalidPodShape> {
        if self.cache.is_some() {
            arguments.set(CACHE_OPTION, Some(CACHE_DIRECTORY));
        }
        if let Some(size) = self.cache_size(arguments)? {
            arguments.set(MAX_CACHE_SIZE_OPTION, Some(&size.to_string()));
        }
        Ok(())
    }

    /// In MiB, if the driver must say it. Memory and ephemeral volumes are file systems of their own: the engine sees how
    /// much room they have.
    fn cache_size(&self, arguments: &MountArguments) -> Result<Option<u128>, InvalidPodShape> {
        let Some(CacheVolume::EmptyDir { size_limit: Some(limit), medium: Medium::Disk }) = &self.cache else {
            return Ok(None);
        };
        let limit_mebibytes = limit.thousandths() / 1000 / (1 << 20);
        let most = limit.thousandths() * CACHE_SHARE_PERCENT / 100 / 1000 / (1 << 20);
        // The engine rejects what is not a number.
        match arguments.value(MAX_CACHE_SIZE_OPTION).map(str::parse::<u128>) {
            None => Ok(Some(most)),
            Some(Ok(given)) if limit_mebibytes < given => {
                Err(InvalidPodShape::CacheAboveLimit { given, limit: limit.to_string() })
            }
            Some(Ok(given)) => Ok(Some(given.min(most))),
            Some(Err(_)) => Ok(None),
        }
    }
}

/// Lower case letters, digits, `-` and `.`, as most names in Kubernetes.
fn is_object_name(text: &str) -> bool {
    let is_edge = |it: u8| it.is_ascii_lowercase() || it.is_ascii_digit();
    text.len() <= 253
        && text.split('.').all(|part| {
            let (Some(first), Some(last)) = (part.bytes().next(), part.bytes().last()) else {
                return false;
            };
            is_edge(first) && is_edge(last) && part.bytes().all(|it| is_edge(it) || it == b'-')
        })
}

#[cfg(test)]
mod tests;
