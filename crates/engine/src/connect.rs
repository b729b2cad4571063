//! From flags to a client that was seen to work.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mountpoint_s3_client::config::{
    AddressingStyle, Allocator, EndpointConfig, S3ClientAuthConfig, S3ClientConfig, TlsConfig,
    TlsConfigValidationError, Uri,
};
use mountpoint_s3_client::instance_info::InstanceInfo;
use mountpoint_s3_client::user_agent::UserAgent;
use mountpoint_s3_client::{NewClientError, OnTelemetry, S3CrtClient};
use mountpoint_s3_fs::autoconfigure;
use mountpoint_s3_fs::memory::{CandidateSize, PagedPool, effective_total_memory};
use mountpoint_s3_fs::s3::S3Path;
use mountpoint_s3_fs::s3::config::{MemoryLimitSetting, PartConfig, Region, TargetThroughputSetting};

use s3csi_core::FailureCode;

use crate::cli::{Arguments, Environment};
use crate::client::{Lister, MetadataCache};
use crate::logging::crt::ConnectionErrors;
use crate::probe::{self, ProbeError};
use crate::settings;

/// Measured: eight parallel readers are not faster with 1 or 4 GiB than with 512 MiB, but half as many files can be open for
/// writing (47 instead of 111). A node runs many mounts, so the library's own default of 95 % of its memory is out of the
/// question.
const MEMORY_TARGET: usize = 1 << 30;
/// Of a machine or container with less than that, leave something to others.
const LARGEST_SHARE_PERCENT: u64 = 95;
/// The library sets 128 MiB aside for everything but the content of files, of which an engine needs less than 30 MiB. With half
/// as much for content, a container of 128 MiB serves some readers and writers at once.
const SMALLEST_TARGET: usize = 192 << 20;
/// Blocks that random readers get.
const CACHE_BLOCK: usize = 1 << 20;
/// Applications do not expect transient errors of a file system. With backoff, ten attempts take about a minute.
const MAX_ATTEMPTS: NonZeroUsize = NonZeroUsize::new(10).unwrap();
/// How often unused memory is given back.
const POOL_MAINTENANCE: Duration = Duration::from_mins(1);

#[derive(Debug, thiserror::Error)]
pub enum S3ClientError {
    #[error("the certificates in {path:?} cannot be used")]
    CaBundle {
        path: PathBuf,
        #[source]
        cause: TlsConfigValidationError,
    },

    #[error("{path:?} contains no usable certificates in PEM format")]
    NoCertificates { path: PathBuf },

    #[error("the volume's CA certificates (attribute caBundle, or key ca.crt of its Secret) cannot be used")]
    NoVolumeCertificates,

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

impl S3ClientError {
    pub fn code(&self) -> FailureCode {
        match self {
            Self::CaBundle { .. } | Self::NoCertificates { .. } | Self::NoVolumeCertificates | Self::NoAuthorities => {
                FailureCode::Certificate
            }
            Self::NoProfile { .. } => FailureCode::NoCredentials,
            Self::Memory { .. } => FailureCode::BadArguments,
            Self::Client { .. } => FailureCode::Other,
            Self::Probe(error) => error.code(),
        }
    }
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
pub enum BucketCheck {
    /// Ask for one name in the bucket.
    Probe,
    /// The bucket was served before, in this region. Whether it can be reached now does not matter: it may be back later, and
    /// until then the applications hear of it.
    Trust { region: String, network_gbps: Option<f64> },
}

/// Makes a client that works.
pub fn connect(
    arguments: &Arguments,
    environment: &Environment,
    path: &S3Path,
    connection_errors: &ConnectionErrors,
    check: &BucketCheck,
    metadata: &Arc<MetadataCache>,
) -> Result<Connected, S3ClientError> {
    if let Some(bundle) = &arguments.ca_bundle {
        TlsConfig::new()
            .with_trust_store_path(bundle)
            .validate()
            .map_err(|cause| S3ClientError::CaBundle { path: bundle.clone(), cause })?;
    }
    let memory = memory_limit(arguments);
    let instance = InstanceInfo::new();
    let region = match check {
        BucketCheck::Trust { region, .. } if arguments.region.is_none() => Region::new_inferred(region.clone()),
        BucketCheck::Probe | BucketCheck::Trust { .. } => {
            autoconfigure::get_region(&instance, arguments.region.clone())
        }
    };
    let region_name = region.as_str().to_owned();
    let throughput = throughput(arguments, &instance, check);
    let parts =
        |parts: &Arguments| part_config(parts).validate(memory).map_err(|cause| S3ClientError::Memory { cause });

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
        let config = client_config(arguments, environment, &region, throughput, &sizes)?;
        let config = config.memory_pool(pool.clone()).telemetry_callback(Arc::clone(metadata) as Arc<dyn OnTelemetry>);
        S3CrtClient::new(config).map_err(|cause| explain(cause, arguments))
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
    if *check != BucketCheck::Probe {
        return Ok(connected(client, region_name));
    }
    let check = |client: &S3CrtClient| {
        let lister = Lister::new(settings::raw_config(arguments, path, client));
        probe::check(client, path, &server, connection_errors, lister)
    };
    match check(&client) {
        Ok(()) => Ok(connected(client, region_name)),
        Err(ProbeError::OtherRegion { region, .. }) if arguments.region.is_none() => {
            tracing::warn!(region, "the bucket is in another region");
            let client = create(Region::new_inferred(region.clone()), parts(arguments)?)?;
            check(&client).map_err(S3ClientError::Probe)?;
            Ok(connected(client, region))
        }
        Err(error) => Err(S3ClientError::Probe(error)),
    }
}

/// Explains errors whose message in the library does not name the flag.
fn explain(cause: NewClientError, arguments: &Arguments) -> S3ClientError {
    match (&cause, &arguments.ca_bundle, &arguments.profile) {
        (NewClientError::TlsConfigurationError(_), Some(path), _) if path.starts_with("/proc/self/fd") => {
            S3ClientError::NoVolumeCertificates
        }
        (NewClientError::TlsConfigurationError(_), Some(path), _) => {
            S3ClientError::NoCertificates { path: path.clone() }
        }
        (NewClientError::ProviderFailure(error), None, _) if error.to_string().contains("TRUST_STORE_NOT_FOUND") => {
            S3ClientError::NoAuthorities
        }
        (NewClientError::ProviderFailure(_), _, Some(profile)) => S3ClientError::NoProfile { profile: profile.clone() },
        _ => S3ClientError::Client { cause: cause.into() },
    }
}

/// The settings of AWS's mount-s3, and a look at the headers of responses.
fn client_config(
    arguments: &Arguments,
    environment: &Environment,
    region: &Region,
    throughput: TargetThroughputSetting,
    parts: &PartConfig,
) -> Result<S3ClientConfig, S3ClientError> {
    let auth_config = match &arguments.profile {
        _ if arguments.no_sign_request => S3ClientAuthConfig::NoSigning,
        Some(profile) => S3ClientAuthConfig::Profile(profile.clone()),
        None => S3ClientAuthConfig::Default,
    };
    let mut user_agent = UserAgent::new(arguments.user_agent_prefix.clone());
    user_agent.key_value("s3csi", env!("CARGO_PKG_VERSION"));
    let mut endpoint = EndpointConfig::new(region.as_str())
        .addressing_style(if arguments.force_path_style { AddressingStyle::Path } else { AddressingStyle::Automatic })
        .use_accelerate(arguments.transfer_acceleration)
        .use_dual_stack(arguments.dual_stack);
    if let Some(url) = &arguments.endpoint_url {
        let uri = Uri::new_from_str(&Allocator::default(), url).map_err(|cause| S3ClientError::Client {
            cause: anyhow::Error::new(cause).context("invalid endpoint URL"),
        })?;
        endpoint = endpoint.endpoint(uri);
    }
    let mut config = S3ClientConfig::new()
        .auth_config(auth_config)
        .throughput_target_gbps(throughput.value())
        .read_part_size(parts.read_size_bytes)
        .write_part_size(parts.write_size_bytes)
        .read_backpressure(true)
        .initial_read_window(parts.read_size_bytes)
        .user_agent(user_agent)
        .max_attempts(MAX_ATTEMPTS)
        .endpoint_config(endpoint);
    if let Some(interfaces) = &arguments.bind {
        config = config.network_interface_names(interfaces.clone());
    }
    if arguments.requester_pays {
        config = config.request_payer("requester");
    }
    if let Some(owner) = &arguments.expected_bucket_owner {
        config = config.bucket_owner(owner);
    }
    if let Some(path) = &arguments.ca_bundle {
        config = config.tls_config(TlsConfig::new().with_trust_store_path(path));
    }
    if let Some(threads) = environment.event_loop_threads {
        config = config.event_loop_threads(threads);
    }
    Ok(config)
}

fn memory_limit(arguments: &Arguments) -> MemoryLimitSetting {
    if let Some(bytes) = arguments.memory_target_bytes() {
        return MemoryLimitSetting::User(bytes);
    }
    MemoryLimitSetting::Default(memory_target(effective_total_memory()))
}

/// What an engine may use of so much memory.
fn memory_target(total: u64) -> usize {
    let share = total / 100 * LARGEST_SHARE_PERCENT;
    usize::try_from(share).unwrap_or(usize::MAX).clamp(SMALLEST_TARGET, MEMORY_TARGET)
}

fn part_config(arguments: &Arguments) -> PartConfig {
    let bytes = |size: Option<u64>| usize::try_from(size.unwrap_or(arguments.part_size)).unwrap_or(usize::MAX);
    PartConfig::with_read_write_sizes(bytes(arguments.read_part_size), bytes(arguments.write_part_size))
}

/// Asks the instance metadata service only if no flag says it, and only once for a mount: where there is none, it takes a while
/// until that is noticed.
fn throughput(arguments: &Arguments, instance: &InstanceInfo, check: &BucketCheck) -> TargetThroughputSetting {
    if let Some(gbps) = arguments.maximum_throughput_gbps {
        #[expect(clippy::cast_precision_loss, reason = "no network has 2^53 gigabits per second")]
        return TargetThroughputSetting::User { gbps: gbps as f64 };
    }
    if let BucketCheck::Trust { network_gbps, .. } = check {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_target_is_a_share_of_the_memory_within_bounds() {
        let mebibytes = |total: u64| memory_target(total << 20) >> 20;
        assert_eq!([64, 128, 256, 700, 2048, 65536].map(mebibytes), [192, 192, 243, 665, 1024, 1024]);
    }
}
