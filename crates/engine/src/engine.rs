//! Puts the parts together: client, file system, front, session; then serves until the end.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mountpoint_s3_client::ObjectClient;
use mountpoint_s3_fs::content_type::ContentTypeDetection;
use mountpoint_s3_fs::data_cache::{
    CacheLimit, DiskDataCache, DiskDataCacheConfig, ExpressDataCache, ExpressDataCacheConfig, ManagedCacheDir,
    MultilevelDataCache,
};
use mountpoint_s3_fs::fs::{CacheConfig, TimeToLive, UploadChecksumAlgorithm};
use mountpoint_s3_fs::fuse::S3FuseFilesystem;
use mountpoint_s3_fs::memory::PagedPool;
use mountpoint_s3_fs::metrics::{self, MetricsConfig, OtlpConfig};
use mountpoint_s3_fs::prefetch::{Prefetcher, PrefetcherBuilder, PrefetcherConfig};
use mountpoint_s3_fs::s3::{S3Path, S3Personality};
use mountpoint_s3_fs::{Runtime, S3Filesystem, S3FilesystemConfig, ServerSideEncryption, Superblock, SuperblockConfig};

use crate::cli::{Arguments, BucketType, Environment, RenameMode, UploadChecksums};
use crate::client::{Ahead, LISTING_BELIEVED, Listings, MemoryBudget, Moves, StoreClient};
use crate::connect::{self, ConnectError, Trial};
use crate::front::{AfterMove, Commits, Front, Habits, Observed, Requests};
use crate::session::{
    self, Access, Keeper, KeeperError, MountError, MountOptions, Resending, SessionError, Succession,
};
use crate::state::{State, StateError, Turn};
use crate::{background, logging};

/// Attributes are believed this long when data is cached: without it, every read would ask the server first.
const METADATA_TTL_WITH_CACHE: Duration = Duration::from_mins(1);
const CACHE_BLOCK: u64 = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error("cannot log")]
    Logging(#[source] logging::LoggingError),

    #[error("cannot collect metrics")]
    Metrics {
        #[source]
        cause: anyhow::Error,
    },

    #[error("{0}")]
    Bucket(String),

    #[error(transparent)]
    MountPoint(MountError),

    #[error("cannot mount bucket {bucket:?}")]
    Connect {
        bucket: String,
        #[source]
        cause: ConnectError,
    },

    #[error("the cache directory {path:?} cannot be used")]
    Cache {
        path: PathBuf,
        #[source]
        cause: Box<dyn std::error::Error + Send + Sync>,
    },

    #[error("the shared cache in bucket {bucket:?} cannot be used")]
    SharedCache {
        bucket: String,
        #[source]
        cause: Box<dyn std::error::Error + Send + Sync>,
    },

    #[error("cannot be kept")]
    Keeper(#[source] KeeperError),

    #[error("cannot remember what is open")]
    State(#[source] StateError),

    #[error("cannot serve the mount point")]
    Session(#[source] SessionError),

    #[error("cannot write the process id to {path:?}")]
    PidFile {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },

    #[error("cannot report that the mount works")]
    Report {
        #[source]
        cause: io::Error,
    },

    #[error("the mount ended badly")]
    Ended {
        #[source]
        cause: anyhow::Error,
    },
}

/// Mounts, says so, and serves until the mount or the process is ended.
pub fn run(arguments: &Arguments, environment: &Environment) -> Result<(), EngineError> {
    let witness = logging::start(arguments, environment).map_err(EngineError::Logging)?;
    let _metrics = metrics::install(metrics_config(arguments)).map_err(|cause| EngineError::Metrics { cause })?;
    let path = arguments.s3_path().map_err(EngineError::Bucket)?;
    let mount_point = session::mount_point(arguments, environment).map_err(EngineError::MountPoint)?;

    let (keeper, state) = match environment.keeper {
        Some(descriptors) => {
            Keeper::connect(descriptors).map(|(keeper, state)| (Some(keeper), state)).map_err(EngineError::Keeper)?
        }
        None => (None, State::private().map_err(EngineError::State)?),
    };
    let turn = state.turn();
    let trial = match state.region() {
        Some(region) if turn == Turn::Successor && !environment.keeper.is_some_and(|it| it.must_be_sure) => {
            Trial::Believe { region, network_gbps: state.network_gbps() }
        }
        Some(_) | None => Trial::Ask,
    };

    let connected = connect::connect(arguments, environment, &path, &witness, &trial)
        .map_err(|cause| EngineError::Connect { bucket: path.bucket.to_string(), cause })?;
    state.note_network(&connected.region, connected.network_gbps);
    let runtime = Runtime::new(connected.client.event_loop_group());
    let personality = personality(arguments, &path, &connected.client);
    let moves = moves(arguments.rename_mode, personality);
    let after_move = if matches!(moves, Moves::Copy(_)) { AfterMove::LookAgain } else { AfterMove::Nothing };
    let ahead = Arc::new(Ahead::default());
    let client = StoreClient {
        inner: connected.client,
        moves: Arc::new(moves),
        buffers: MemoryBudget::within_target(connected.memory_target),
        ahead: Arc::clone(&ahead),
        listings: listings(arguments),
    };

    let cache_directory = cache_directory(arguments, environment, turn)?;
    let caches = Caches { directory: cache_directory.as_ref(), turn };
    let prefetcher = prefetcher(arguments, &path, &client, &runtime, &connected.pool, caches)?;
    let mut config = file_system_config(arguments, personality);
    bound_read_window(&mut config.prefetcher_config, connected.throughput_gbps);
    let superblock_config = SuperblockConfig { cache_config: config.cache_config.clone(), s3_personality: personality };
    let superblock = Observed(Superblock::new(client.clone(), path, superblock_config));
    let files = S3Filesystem::new(client, prefetcher, connected.pool, runtime, superblock, config);

    let options = MountOptions {
        access: Access::of(arguments),
        is_read_only: arguments.read_only,
        unmounts_itself: arguments.auto_unmount,
    };
    let most_threads = usize::try_from(arguments.max_threads).unwrap_or(usize::MAX);
    let commits = if arguments.incremental_upload { Commits::AtFlush } else { Commits::AtEnd };
    if environment.trials.is_library_front {
        let succession = Succession { state: &state, keeper: None, heir: &(), resending: Resending::IfPossible };
        let files = S3FuseFilesystem::new(files, None);
        let (session, _stop) =
            session::start(files, mount_point, &options, most_threads, &succession).map_err(EngineError::Session)?;
        report(arguments, environment)?;
        return session.join().map_err(|cause| EngineError::Ended { cause });
    }
    let trap = environment.trials.trap.clone().filter(|_| turn == Turn::First);
    let front = Arc::new(Front::new(files, &state, Habits { after_move, commits, trap }, ahead));
    let resending = if environment.trials.is_resending_off { Resending::Never } else { Resending::IfPossible };
    let succession = Succession { state: &state, keeper: keeper.as_ref(), heir: &*front, resending };
    let requests = Requests(Arc::clone(&front));
    let (session, _stop) =
        session::start(requests, mount_point, &options, most_threads, &succession).map_err(EngineError::Session)?;
    front.restore();
    match report(arguments, environment) {
        // The mount works. Whoever wanted to know is gone, but those who use the mount are not.
        Err(EngineError::Report { cause }) if keeper.is_some() => {
            tracing::warn!(%cause, "nobody hears that the mount works");
        }
        reported => reported?,
    }
    session.join().map_err(|cause| EngineError::Ended { cause })?;
    drop(cache_directory);
    tracing::info!("the mount ended");
    Ok(())
}

/// Supervisors wait for this line.
fn report(arguments: &Arguments, environment: &Environment) -> Result<(), EngineError> {
    // Whoever keeps us alive is the one to signal.
    let is_kept_by_ourselves = environment.keeper.is_some_and(|it| it.fuse.is_some());
    if let Some(path) = environment.pid_file.as_ref().filter(|_| !is_kept_by_ourselves) {
        std::fs::write(path, std::process::id().to_string())
            .map_err(|cause| EngineError::PidFile { path: path.clone(), cause })?;
    }
    let line = format!("{} is mounted at {}\n", arguments.bucket, arguments.mount_point.display());
    let mut output = io::stdout().lock();
    output.write_all(line.as_bytes()).and_then(|()| output.flush()).map_err(|cause| EngineError::Report { cause })?;
    if environment.is_background_child {
        background::detach_streams().map_err(|cause| EngineError::Report { cause })?;
    }
    Ok(())
}

fn metrics_config(arguments: &Arguments) -> Option<MetricsConfig> {
    let endpoint = arguments.otlp_endpoint.as_deref()?;
    let config = OtlpConfig::new(endpoint);
    Some(MetricsConfig::Otlp(match arguments.otlp_export_interval {
        Some(seconds) => config.with_interval_secs(seconds),
        None => config,
    }))
}

fn personality(arguments: &Arguments, path: &S3Path, client: &mountpoint_s3_client::S3CrtClient) -> S3Personality {
    match arguments.bucket_type {
        Some(BucketType::GeneralPurpose) => S3Personality::Standard,
        Some(BucketType::Directory) => S3Personality::ExpressOneZone,
        None => S3Personality::infer_from_bucket(&path.bucket, &client.endpoint_config()),
    }
}

fn moves(mode: RenameMode, personality: S3Personality) -> Moves {
    match mode {
        RenameMode::Native => Moves::Native,
        RenameMode::Off => Moves::Refused,
        RenameMode::Auto if personality.supports_rename_object() => Moves::Native,
        RenameMode::Auto | RenameMode::Copy => Moves::by_copy(),
    }
}

/// What was looked at a moment ago is not asked again. The kernel looks a name up and opens or creates it right after, and the
/// library asks the server both times: a third of the time it takes to read or create a small file at a real distance.
/// A moment is what the kernel believes attributes for anyway (100 ms). `--metadata-ttl minimal` asks each time.
fn just_looked_at() -> CacheConfig {
    let usual = CacheConfig::new(TimeToLive::Minimal);
    CacheConfig {
        serve_lookup_from_cache: true,
        use_negative_cache: true,
        // What a listing says is not there was true when that was asked for.
        negative_cache_ttl: usual.file_ttl.saturating_sub(LISTING_BELIEVED),
        ..usual
    }
}

/// Whoever wants every look to ask the server gets no answers from listings either.
fn listings(arguments: &Arguments) -> Option<Arc<Listings>> {
    let asks_each_time = |it: TimeToLive| match it {
        TimeToLive::Minimal => true,
        TimeToLive::Duration(time) => time.is_zero(),
        TimeToLive::Indefinite => false,
    };
    let wishes = [arguments.metadata_ttl, arguments.negative_metadata_ttl];
    (!wishes.into_iter().flatten().any(asks_each_time)).then(Arc::default)
}

fn file_system_config(arguments: &Arguments, personality: S3Personality) -> S3FilesystemConfig {
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
/// the network carries in a tenth of a second bridges every distance, and memory that stays the same costs less than new one.
fn bound_read_window(config: &mut PrefetcherConfig, gbps: f64) {
    const OF_THE_LIBRARY: usize = 2 << 30;
    const NARROWEST: usize = 64 << 20;
    const PER_GBPS: f64 = 12_800_000.0;
    // Somebody has chosen another one by the library's own variable.
    if config.max_read_window_size == OF_THE_LIBRARY {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is bounded on the next line")]
        let window = (gbps * PER_GBPS) as usize;
        config.max_read_window_size = window.clamp(NARROWEST, OF_THE_LIBRARY);
    }
}

/// The library empties the directory now and when the returned value is dropped. A successor leaves it as it is: another
/// engine may still use it, and what is in it is as good as before.
fn cache_directory(
    arguments: &Arguments,
    environment: &Environment,
    turn: Turn,
) -> Result<Option<ManagedCacheDir>, EngineError> {
    let Some(path) = &arguments.cache else { return Ok(None) };
    let empties = turn == Turn::First && !environment.keeps_cache;
    ManagedCacheDir::new_from_parent_with_cache_key(path, environment.cache_key.as_deref(), empties)
        .map(Some)
        .map_err(|cause| EngineError::Cache { path: path.clone(), cause: Box::new(cause) })
}

/// Where read data is kept.
#[derive(Clone, Copy)]
struct Caches<'a> {
    directory: Option<&'a ManagedCacheDir>,
    turn: Turn,
}

/// What reads ahead of the application: from the server, through a disk cache, a shared cache or both.
fn prefetcher<C>(
    arguments: &Arguments,
    path: &S3Path,
    client: &C,
    runtime: &Runtime,
    pool: &PagedPool,
    caches: Caches<'_>,
) -> Result<PrefetcherBuilder<C>, EngineError>
where
    C: ObjectClient + Clone + Send + Sync + 'static,
{
    let disk = caches.directory.map(|directory| {
        let mebibytes = arguments.max_cache_size.map(|it| usize::try_from(it).unwrap_or(usize::MAX));
        let limit = mebibytes
            .map_or_else(CacheLimit::default, |it| CacheLimit::TotalSize { max_size: it.saturating_mul(1 << 20) });
        let config = DiskDataCacheConfig { cache_directory: directory.as_path_buf(), block_size: CACHE_BLOCK, limit };
        DiskDataCache::new(config, pool.clone())
    });
    let shared = arguments
        .cache_xz
        .as_deref()
        .map(|bucket| shared_cache(arguments, path, client, bucket, caches.turn))
        .transpose()?;
    let client = client.clone();
    Ok(match (disk, shared) {
        (None, None) => Prefetcher::default_builder(client),
        (Some(disk), None) => Prefetcher::caching_builder(disk, client),
        (None, Some(shared)) => Prefetcher::caching_builder(shared, client),
        (Some(disk), Some(shared)) => {
            Prefetcher::caching_builder(MultilevelDataCache::new(Arc::new(disk), shared, runtime.clone()), client)
        }
    })
}

fn shared_cache<C>(
    arguments: &Arguments,
    path: &S3Path,
    client: &C,
    bucket: &str,
    turn: Turn,
) -> Result<ExpressDataCache<C>, EngineError>
where
    C: ObjectClient + Clone + Send + Sync + 'static,
{
    let encryption = ServerSideEncryption::new(arguments.sse.clone(), arguments.sse_kms_key_id.clone());
    let config = ExpressDataCacheConfig::new(bucket, &path.bucket).sse(encryption);
    let cache = ExpressDataCache::new(client.clone(), config);
    if turn == Turn::First {
        futures::executor::block_on(cache.verify_cache_valid())
            .map_err(|cause| EngineError::SharedCache { bucket: bucket.to_owned(), cause: Box::new(cause) })?;
    }
    Ok(cache)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_much_is_read_ahead_as_the_network_carries_in_a_moment() {
        check(2 << 30, 10.0, 128_000_000);
        check(2 << 30, 100.0, 1_280_000_000);
        check(2 << 30, 1.0, 64 << 20);
        check(2 << 30, 1000.0, 2 << 30);
        // Somebody has chosen it.
        check(5 << 20, 10.0, 5 << 20);
    }

    #[track_caller]
    fn check(window: usize, gbps: f64, expected: usize) {
        let mut config = PrefetcherConfig { max_read_window_size: window, ..PrefetcherConfig::default() };
        bound_read_window(&mut config, gbps);
        assert_eq!(config.max_read_window_size, expected, "{gbps}");
    }
}
