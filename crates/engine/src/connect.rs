//! From flags to a client that was seen to work.

use std::path::PathBuf;
use std::time::Duration;

use mountpoint_s3_client::config::{AddressingStyle, S3ClientAuthConfig, TlsConfig, TlsConfigValidationError};
use mountpoint_s3_client::instance_info::InstanceInfo;
use mountpoint_s3_client::user_agent::UserAgent;
use mountpoint_s3_client::{NewClientError, S3CrtClient};
use mountpoint_s3_fs::autoconfigure;
use mountpoint_s3_fs::memory::{CandidateSize, MINIMUM_MEM_LIMIT, PagedPool, effective_total_memory};
use mountpoint_s3_fs::s3::S3Path;
use mountpoint_s3_fs::s3::config::{ClientConfig, MemoryLimitSetting, PartConfig, Region, TargetThroughputSetting};

use crate::cli::{Arguments, Environment};
use crate::logging::crt::Witness;
use crate::probe::{self, ProbeError};

/// Measured: eight parallel readers are not faster with 1 or 4 GiB than with 512 MiB, but half as many files can be open for
/// writing (47 instead of 111). A node runs many mounts, so the library's own default of 95 % of its memory is out of the
/// question.
const MEMORY_TARGET: usize = 1 << 30;
/// Of a machine or container with less than that, leave something to others.
const LARGEST_SHARE_PERCENT: u64 = 95;
/// Blocks of the disk cache, which come from the same pool.
const CACHE_BLOCK: usize = 1 << 20;
/// How often unused memory is given back.
const POOL_MAINTENANCE: Duration = Duration::from_mins(1);

#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("the certificates in {path:?} cannot be used")]
    CaBundle {
        path: PathBuf,
        #[source]
        cause: TlsConfigValidationError,
    },

    #[error("{path:?} contains no usable certificates in PEM format")]
    NoCertificates { path: PathBuf },

    #[error(
        "this system has no certificate authorities to trust; install ca-certificates, or give a file with --ca-bundle"
    )]
    NoAuthorities,

    #[error("profile {profile:?} was not found; look into ~/.aws/config and ~/.aws/credentials")]
    NoProfile { profile: String },

    #[error("the memory target is too small")]
    Memory {
        #[source]
        cause: anyhow::Error,
    },

    #[error("cannot create the S3 client")]
    Client {
        #[source]
        cause: anyhow::Error,
    },

    #[error(transparent)]
    Probe(ProbeError),
}

pub struct Connected {
    pub client: S3CrtClient,
    pub pool: PagedPool,
    pub memory_target: usize,
    /// Where the bucket is.
    pub region: String,
    /// What the network of this machine can do, if the machine says so.
    pub network_gbps: Option<f64>,
    /// What shall be used of it.
    pub throughput_gbps: f64,
}

/// How much of the server has to be seen before the client is believed to work.
#[derive(Clone, Debug, PartialEq)]
pub enum Trial {
    /// Ask for one name in the bucket.
    Ask,
    /// The bucket was served before, in this region. Whether it can be reached now does not matter: it may be back later, and
    /// until then the applications hear of it.
    Believe { region: String, network_gbps: Option<f64> },
}

/// Makes a client that works.
pub fn connect(
    arguments: &Arguments,
    environment: &Environment,
    path: &S3Path,
    witness: &Witness,
    trial: &Trial,
) -> Result<Connected, ConnectError> {
    if let Some(bundle) = &arguments.ca_bundle {
        TlsConfig::new()
            .with_trust_store_path(bundle)
            .validate()
            .map_err(|cause| ConnectError::CaBundle { path: bundle.clone(), cause })?;
    }
    let memory = memory_limit(arguments);
    let instance = InstanceInfo::new();
    let region = match trial {
        Trial::Believe { region, .. } if arguments.region.is_none() => Region::new_inferred(region.clone()),
        Trial::Ask | Trial::Believe { .. } => autoconfigure::get_region(&instance, arguments.region.clone()),
    };
    let region_name = region.as_str().to_owned();
    let throughput = throughput(arguments, &instance, trial);
    let parts = |parts: &Arguments| part_config(parts).validate(memory).map_err(|cause| ConnectError::Memory { cause });

    let sizes = parts(arguments)?;
    let pool = PagedPool::config()
        .with_candidate_sizes([
            CandidateSize::prunable(CACHE_BLOCK),
            CandidateSize::prunable(sizes.read_size_bytes),
            CandidateSize::new(sizes.write_size_bytes),
        ])
        .with_memory_limit(memory.bytes())
        .with_maintenance_interval(POOL_MAINTENANCE)
        .build();
    let create = |region: Region, sizes: PartConfig| {
        let config = client_config(arguments, region, throughput, sizes);
        // The library's own check would retry for minutes without a word; ours follows.
        config.create_client(pool.clone(), None).map_err(|cause| explain(cause, arguments))
    };

    let server = arguments
        .endpoint_url
        .clone()
        .or_else(|| environment.endpoint_url.clone())
        .unwrap_or_else(|| format!("AWS in {region_name}"));
    let client = create(region, sizes)?;
    let network_gbps = match throughput {
        TargetThroughputSetting::Instance { gbps } => Some(gbps),
        TargetThroughputSetting::User { .. } | TargetThroughputSetting::Default => None,
    };
    let connected = |client, region| Connected {
        client,
        pool: pool.clone(),
        memory_target: memory.bytes(),
        region,
        network_gbps,
        throughput_gbps: throughput.value(),
    };
    if *trial != Trial::Ask {
        return Ok(connected(client, region_name));
    }
    match probe::check(&client, path, &server, witness) {
        Ok(()) => Ok(connected(client, region_name)),
        Err(ProbeError::OtherRegion { region, .. }) if arguments.region.is_none() => {
            tracing::warn!(region, "the bucket is in another region");
            let client = create(Region::new_inferred(region.clone()), parts(arguments)?)?;
            probe::check(&client, path, &server, witness).map_err(ConnectError::Probe)?;
            Ok(connected(client, region))
        }
        Err(error) => Err(ConnectError::Probe(error)),
    }
}

/// The library's words for these are riddles.
fn explain(cause: anyhow::Error, arguments: &Arguments) -> ConnectError {
    match (cause.downcast_ref::<NewClientError>(), &arguments.ca_bundle, &arguments.profile) {
        (Some(NewClientError::TlsConfigurationError(_)), Some(path), _) => {
            ConnectError::NoCertificates { path: path.clone() }
        }
        (Some(NewClientError::ProviderFailure(error)), None, _)
            if error.to_string().contains("TRUST_STORE_NOT_FOUND") =>
        {
            ConnectError::NoAuthorities
        }
        (Some(NewClientError::ProviderFailure(_)), _, Some(profile)) => {
            ConnectError::NoProfile { profile: profile.clone() }
        }
        _ => ConnectError::Client { cause },
    }
}

fn client_config(
    arguments: &Arguments,
    region: Region,
    throughput_target: TargetThroughputSetting,
    part_config: PartConfig,
) -> ClientConfig {
    let auth_config = match &arguments.profile {
        _ if arguments.no_sign_request => S3ClientAuthConfig::NoSigning,
        Some(profile) => S3ClientAuthConfig::Profile(profile.clone()),
        None => S3ClientAuthConfig::Default,
    };
    let mut user_agent = UserAgent::new(arguments.user_agent_prefix.clone());
    user_agent.key_value("s3csi", env!("CARGO_PKG_VERSION"));
    ClientConfig {
        region,
        endpoint_url: arguments.endpoint_url.clone(),
        addressing_style: if arguments.force_path_style { AddressingStyle::Path } else { AddressingStyle::Automatic },
        dual_stack: arguments.dual_stack,
        transfer_acceleration: arguments.transfer_acceleration,
        auth_config,
        requester_pays: arguments.requester_pays,
        expected_bucket_owner: arguments.expected_bucket_owner.clone(),
        throughput_target,
        bind: arguments.bind.clone(),
        part_config,
        user_agent,
        tls_config: arguments.ca_bundle.as_ref().map(|path| TlsConfig::new().with_trust_store_path(path)),
    }
}

fn memory_limit(arguments: &Arguments) -> MemoryLimitSetting {
    if let Some(bytes) = arguments.memory_target_bytes() {
        return MemoryLimitSetting::User(bytes);
    }
    let share = effective_total_memory() / 100 * LARGEST_SHARE_PERCENT;
    let share = usize::try_from(share).unwrap_or(usize::MAX);
    MemoryLimitSetting::Default(share.clamp(MINIMUM_MEM_LIMIT, MEMORY_TARGET))
}

fn part_config(arguments: &Arguments) -> PartConfig {
    let bytes = |size: Option<u64>| usize::try_from(size.unwrap_or(arguments.part_size)).unwrap_or(usize::MAX);
    PartConfig::with_read_write_sizes(bytes(arguments.read_part_size), bytes(arguments.write_part_size))
}

/// Asks the instance metadata service only if no flag says it, and only once for a mount: where there is none, it takes a while
/// until that is noticed.
fn throughput(arguments: &Arguments, instance: &InstanceInfo, trial: &Trial) -> TargetThroughputSetting {
    if let Some(gbps) = arguments.maximum_throughput_gbps {
        #[expect(clippy::cast_precision_loss, reason = "no network has 2^53 gigabits per second")]
        return TargetThroughputSetting::User { gbps: gbps as f64 };
    }
    if let Trial::Believe { network_gbps, .. } = trial {
        return network_gbps
            .map_or(TargetThroughputSetting::Default, |gbps| TargetThroughputSetting::Instance { gbps });
    }
    match autoconfigure::network_throughput(instance) {
        Ok(gbps) => TargetThroughputSetting::Instance { gbps },
        Err(error) => {
            tracing::debug!(%error, "network throughput not known, using the default");
            TargetThroughputSetting::Default
        }
    }
}
