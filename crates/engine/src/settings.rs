//! What the flags mean for the file system, the client and the front.

use std::sync::Arc;
use std::time::Duration;

use mountpoint_s3_fs::content_type::ContentTypeDetection;
use mountpoint_s3_fs::fs::{CacheConfig, TimeToLive, UploadChecksumAlgorithm};
use mountpoint_s3_fs::memory::data_buffer_budget_for;
use mountpoint_s3_fs::prefetch::PrefetcherConfig;
use mountpoint_s3_fs::s3::{S3Path, S3Personality};
use mountpoint_s3_fs::{S3FilesystemConfig, ServerSideEncryption};

use crate::cli::{Arguments, BucketType, Environment, MetadataStrategy, RenameMode, UploadChecksums, WriteStrategy};
use crate::client::{ListingOrder, Listings, Moves, RawConfig, Signing};
use crate::front::{
    AfterRename, CommitPoint, DefaultAttributes, FrontConfig, KeptLimit, Lifetime, MetadataMode, Overrides,
    StageDirectory, UploadSettings, Writes,
};
use crate::state::State;

/// Attributes are cached this long when data is cached: without it, every read would ask the server first.
const METADATA_TTL_WITH_CACHE: Duration = Duration::from_mins(1);

/// Long enough from the lookup of a name that is not there to its creation, and much shorter than what exists is cached: others may
/// create it.
const JUST_NOT_THERE: Duration = Duration::from_millis(25);

pub fn personality(arguments: &Arguments, path: &S3Path, client: &mountpoint_s3_client::S3CrtClient) -> S3Personality {
    match arguments.bucket_type {
        Some(BucketType::GeneralPurpose) => S3Personality::Standard,
        Some(BucketType::Directory) => S3Personality::ExpressOneZone,
        None => S3Personality::infer_from_bucket(&path.bucket, &client.endpoint_config()),
    }
}

pub fn moves(mode: RenameMode, personality: S3Personality) -> Moves {
    match mode {
        RenameMode::Native => Moves::Native,
        RenameMode::Off => Moves::Refused,
        RenameMode::Auto if personality.supports_rename_object() => Moves::Native,
        RenameMode::Auto | RenameMode::Copy => Moves::by_copy(),
    }
}

pub fn listing_order(personality: S3Personality) -> ListingOrder {
    if personality.is_list_ordered() { ListingOrder::ByKey } else { ListingOrder::Any }
}

/// What was looked at a moment ago is not asked again. The kernel looks a name up and opens or creates it right after, and the
/// library asks the server both times: a third of the time it takes to read or create a small file at a real distance.
/// A moment is what the kernel believes attributes for anyway (100 ms). `--metadata-ttl minimal` asks each time.
fn just_looked_at() -> CacheConfig {
    let usual = CacheConfig::new(TimeToLive::Minimal);
    CacheConfig { serve_lookup_from_cache: true, use_negative_cache: true, negative_cache_ttl: JUST_NOT_THERE, ..usual }
}

/// Listings are not used as a negative cache if a TTL of zero asks for a request per lookup.
pub fn listings(arguments: &Arguments) -> Option<Arc<Listings>> {
    let asks_each_time = |it: TimeToLive| match it {
        TimeToLive::Minimal => true,
        TimeToLive::Duration(time) => time.is_zero(),
        TimeToLive::Indefinite => false,
    };
    let ttls = [arguments.metadata_ttl, arguments.negative_metadata_ttl];
    (!ttls.into_iter().flatten().any(asks_each_time)).then(Arc::default)
}

pub fn file_system_config(arguments: &Arguments, personality: S3Personality) -> S3FilesystemConfig {
    let usual = S3FilesystemConfig::default();
    let has_cache = arguments.cache.is_some() || arguments.cache_xz.is_some();
    let mut cache_config = match arguments.metadata_ttl {
        Some(ttl) => CacheConfig::new(ttl),
        None if has_cache => CacheConfig::new(TimeToLive::Duration(METADATA_TTL_WITH_CACHE)),
        None => just_looked_at(),
    };
    if let Some(ttl) = arguments.negative_metadata_ttl {
        cache_config = cache_config.with_negative_metadata_ttl(ttl);
    }
    S3FilesystemConfig {
        cache_config,
        uid: arguments.uid.unwrap_or(usual.uid),
        gid: arguments.gid.unwrap_or(usual.gid),
        dir_mode: arguments.dir_mode.unwrap_or(usual.dir_mode),
        file_mode: arguments.file_mode.unwrap_or(usual.file_mode),
        allow_delete: arguments.allow_delete,
        allow_overwrite: arguments.allow_overwrite,
        incremental_upload: arguments.incremental_upload,
        storage_class: arguments.storage_class.clone(),
        s3_personality: personality,
        server_side_encryption: ServerSideEncryption::new(arguments.sse.clone(), arguments.sse_kms_key_id.clone()),
        upload_checksum_algorithm: match arguments.upload_checksums {
            Some(UploadChecksums::Crc32c) => Some(UploadChecksumAlgorithm::Crc32c),
            Some(UploadChecksums::Crc64nvme) => Some(UploadChecksumAlgorithm::Crc64nvme),
            Some(UploadChecksums::Off) => None,
            None => personality.supports_additional_checksums().then_some(UploadChecksumAlgorithm::Crc32c),
        },
        content_type_detection: if arguments.infer_content_type {
            ContentTypeDetection::Auto
        } else {
            ContentTypeDetection::Disabled
        },
        read_only: arguments.read_only,
        ..usual
    }
}

/// How far the library reads ahead of one reader. It would go on until the memory is used up, which makes nothing quicker: what
/// the network carries in a twentieth of a second bridges every distance, and it is most of the memory of a sequential read.
/// Two readers must fit into the memory for content.
pub fn bound_read_window(config: &mut PrefetcherConfig, gbps: f64, memory_target: usize) {
    const OF_THE_LIBRARY: usize = 2 << 30;
    const NARROWEST: usize = 64 << 20;
    const PER_GBPS: f64 = 6_400_000.0;
    /// The library rounds up to parts.
    const SMALLEST: usize = 8 << 20;
    // The user has set the library's own environment variable.
    if config.max_read_window_size == OF_THE_LIBRARY {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is bounded on the next line")]
        let window = (gbps * PER_GBPS) as usize;
        let most = (data_buffer_budget_for(memory_target) / 2).max(SMALLEST);
        config.max_read_window_size = window.clamp(NARROWEST, OF_THE_LIBRARY).min(most);
    }
}

/// How files are written. A read-only mount has no writes, and incremental uploads append by themselves.
fn writes(arguments: &Arguments) -> Writes {
    match arguments.writes {
        _ if arguments.read_only || arguments.incremental_upload => Writes::Sequential,
        WriteStrategy::Auto => Writes::Auto,
        WriteStrategy::Staged => Writes::Staged,
        WriteStrategy::Sequential => Writes::Sequential,
    }
}

/// For requests that the client library has no method for.
pub fn raw_config(arguments: &Arguments, path: &S3Path, client: &mountpoint_s3_client::S3CrtClient) -> RawConfig {
    let prefix = arguments.user_agent_prefix.as_ref().map(|it| format!("{it} ")).unwrap_or_default();
    let mut headers = vec![("User-Agent".to_owned(), format!("{prefix}s3csi/{}", env!("CARGO_PKG_VERSION")))];
    if arguments.requester_pays {
        headers.push(("x-amz-request-payer".to_owned(), "requester".to_owned()));
    }
    if let Some(owner) = &arguments.expected_bucket_owner {
        headers.push(("x-amz-expected-bucket-owner".to_owned(), owner.clone()));
    }
    RawConfig {
        events: client.event_loop_group(),
        endpoints: client.endpoint_config(),
        bucket: path.bucket.to_string(),
        signing: match &arguments.profile {
            _ if arguments.no_sign_request => Signing::None,
            Some(profile) => Signing::Profile(profile.clone()),
            None => Signing::Default,
        },
        ca_bundle: arguments.ca_bundle.clone(),
        interfaces: arguments.bind.clone(),
        headers,
    }
}

fn metadata(arguments: &Arguments) -> MetadataMode {
    match arguments.metadata {
        MetadataStrategy::Refuse => MetadataMode::Refuse,
        MetadataStrategy::Ignore => MetadataMode::Ignore,
        MetadataStrategy::Store => MetadataMode::Store,
    }
}

/// Flags win over what is stored.
fn overrides(arguments: &Arguments) -> Overrides {
    Overrides {
        uid: arguments.uid.is_some(),
        gid: arguments.gid.is_some(),
        file_mode: arguments.file_mode.is_some(),
        dir_mode: arguments.dir_mode.is_some(),
    }
}

/// What the front does, as far as flags say it.
pub fn front_config(arguments: &Arguments, config: &S3FilesystemConfig) -> FrontConfig {
    FrontConfig {
        after_rename: AfterRename::Revalidate,
        commit_point: if arguments.incremental_upload { CommitPoint::Flush } else { CommitPoint::Close },
        writes: writes(arguments),
        allow_delete: arguments.allow_delete,
        allow_overwrite: arguments.allow_overwrite,
        attributes: default_attributes(config),
        metadata: metadata(arguments),
        overrides: overrides(arguments),
        reported_size: arguments.reported_size << 30,
        max_rename_objects: usize::try_from(arguments.max_rename_objects).unwrap_or(usize::MAX),
        hang_on_lookup: None,
    }
}

fn default_attributes(config: &S3FilesystemConfig) -> DefaultAttributes {
    DefaultAttributes { uid: config.uid, gid: config.gid, file_mode: config.file_mode, dir_mode: config.dir_mode }
}

pub fn upload_settings(arguments: &Arguments, config: &S3FilesystemConfig) -> UploadSettings {
    UploadSettings {
        checksum: config.upload_checksum_algorithm,
        storage_class: arguments.storage_class.clone(),
        encryption: arguments.sse.clone(),
        encryption_key: arguments.sse_kms_key_id.clone(),
        content_type: config.content_type_detection,
    }
}

/// How much of the cache directory may be used.
pub fn kept_limit(arguments: &Arguments) -> KeptLimit {
    arguments.max_cache_size.map_or(KeptLimit::FreeSpace, |mebibytes| KeptLimit::Bytes(mebibytes << 20))
}

/// The staging directory. Without `--stage` one is made if that is possible: small files are staged in memory anyway. A mount
/// that stages no files uses it for random reads.
pub fn stage_directory(
    arguments: &Arguments,
    environment: &Environment,
    state: &State,
) -> Result<StageDirectory, std::io::Error> {
    if arguments.max_stage_size == 0 {
        return Ok(StageDirectory::none());
    }
    let limit = arguments.max_stage_size << 20;
    let lifetime = if environment.supervisor.is_some() { Lifetime::Mount } else { Lifetime::Process };
    match &arguments.stage {
        Some(path) if writes(arguments) != Writes::Sequential => {
            StageDirectory::open(path, true, limit, state, lifetime)
        }
        given => {
            let path = given.as_ref().unwrap_or(&environment.temporary_directory);
            Ok(StageDirectory::open(path, given.is_some(), limit, state, lifetime).unwrap_or_else(|error| {
                tracing::info!(%error, "no staging directory; only files of up to 8 MiB can be edited in place");
                StageDirectory::none()
            }))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_much_is_read_ahead_as_the_network_carries_in_a_moment() {
        let large = 16 << 30;
        check(2 << 30, 10.0, large, 64 << 20);
        check(2 << 30, 100.0, large, 640_000_000);
        check(2 << 30, 1.0, large, 64 << 20);
        check(2 << 30, 1000.0, large, 2 << 30);
        // Set by the user.
        check(5 << 20, 10.0, large, 5 << 20);
    }

    #[test]
    fn two_readers_fit_into_a_small_container() {
        check(2 << 30, 10.0, 512 << 20, 64 << 20);
        check(2 << 30, 100.0, 512 << 20, 192 << 20);
        check(2 << 30, 10.0, 192 << 20, 32 << 20);
        check(2 << 30, 10.0, 100 << 20, 8 << 20);
    }

    #[track_caller]
    fn check(window: usize, gbps: f64, memory_target: usize, expected: usize) {
        let mut config = PrefetcherConfig { max_read_window_size: window, ..PrefetcherConfig::default() };
        bound_read_window(&mut config, gbps, memory_target);
        assert_eq!(config.max_read_window_size, expected, "{gbps}");
    }
}
