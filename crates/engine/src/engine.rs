//! Puts the parts together: client, file system, front, session; then serves until the end.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use mountpoint_s3_client::ObjectClient;
use mountpoint_s3_fs::data_cache::{ExpressDataCache, ExpressDataCacheConfig, ManagedCacheDir};
use mountpoint_s3_fs::fuse::S3FuseFilesystem;
use mountpoint_s3_fs::metrics::{self, MetricsConfig, OtlpConfig};
use mountpoint_s3_fs::prefetch::{Prefetcher, PrefetcherBuilder};
use mountpoint_s3_fs::s3::S3Path;
use mountpoint_s3_fs::{Runtime, S3Filesystem, ServerSideEncryption, Superblock, SuperblockConfig};

use s3csi_core::FailureCode;
use s3csi_handoff::core_dumps;

use crate::cli::{Arguments, Environment};
use crate::client::{
    ClientUsage, Lister, MemoryBudget, MetadataCache, Moves, RemovedDirectories, SmallFilePrefetch, StoreClient,
    StoreTimeout, Watchdog, WatchdogLimits,
};
use crate::connect::{self, BucketCheck, S3ClientError};
use crate::front::{
    self, AfterRename, Bucket, Front, FrontConfig, FrontContext, HandleRecords, KeptFiles, RecordingMetablock, Requests,
};
use crate::pid_file::PidFileError;
use crate::session::{
    self, AllowedUsers, MountError, MountOptions, Resending, SessionError, Supervisor, SupervisorError, Takeover,
};
use crate::state::{MountedSource, Start, State, StateError};
use crate::trust::{TlsUse, TrustFile};
use crate::{background, logging, pid_file, settings};

#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error("cannot start logging")]
    Logging(#[source] logging::LoggingError),

    #[error("cannot collect metrics")]
    Metrics {
        #[source]
        cause: anyhow::Error,
    },

    #[error("{0}")]
    Bucket(String),

    #[error("cannot read the CA certificates")]
    Certificates {
        #[source]
        cause: io::Error,
    },

    #[error(transparent)]
    MountPoint(MountError),

    #[error("cannot mount bucket {bucket:?}")]
    Connect {
        bucket: String,
        #[source]
        cause: S3ClientError,
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

    #[error("cannot use the staging directory (--stage)")]
    Stage {
        #[source]
        cause: io::Error,
    },

    #[error("cannot connect to the supervisor")]
    Supervisor(#[source] SupervisorError),

    #[error("cannot use the state memory")]
    State(#[source] StateError),

    #[error("cannot serve the mount point")]
    Session(#[source] SessionError),

    #[error("cannot start the thread that stores files again")]
    Retries {
        #[source]
        cause: io::Error,
    },

    #[error("cannot start the thread that ends requests without an answer")]
    Watchdog {
        #[source]
        cause: io::Error,
    },

    #[error(transparent)]
    PidFile(PidFileError),

    #[error("cannot report that the mount works")]
    Report {
        #[source]
        cause: io::Error,
    },

    #[error("the FUSE session failed")]
    Ended {
        #[source]
        cause: anyhow::Error,
    },
}

impl EngineError {
    /// The code for the program that started us.
    pub fn code(&self) -> FailureCode {
        match self {
            Self::Connect { cause, .. } => cause.code(),
            Self::Bucket(_) => FailureCode::BadArguments,
            Self::Certificates { .. } => FailureCode::Certificate,
            Self::Logging(_)
            | Self::Metrics { .. }
            | Self::MountPoint(_)
            | Self::Cache { .. }
            | Self::SharedCache { .. }
            | Self::Stage { .. }
            | Self::Retries { .. }
            | Self::Watchdog { .. }
            | Self::Supervisor(_)
            | Self::State(_)
            | Self::Session(_)
            | Self::PidFile(_)
            | Self::Report { .. }
            | Self::Ended { .. } => FailureCode::Other,
        }
    }
}

/// Mounts, says so, and serves until the mount or the process is ended.
#[expect(clippy::too_many_lines, reason = "one start, step by step")]
pub fn run(arguments: &Arguments, environment: &Environment) -> Result<(), EngineError> {
    let connection_errors = logging::start(arguments, environment).map_err(EngineError::Logging)?;
    let _metrics = metrics::install(metrics_config(arguments)).map_err(|cause| EngineError::Metrics { cause })?;
    let additional = environment.additional_ca_bundle.as_deref();
    let trusted = TrustFile::new(arguments.ca_bundle.as_deref(), additional, TlsUse::of(arguments, environment))
        .map_err(|cause| EngineError::Certificates { cause })?;
    let with_trusted = trusted.as_ref().map(|it| Arguments { ca_bundle: Some(it.path()), ..arguments.clone() });
    let arguments = with_trusted.as_ref().unwrap_or(arguments);
    let path = arguments.s3_path().map_err(EngineError::Bucket)?;
    let mount_point = session::mount_point(arguments, environment).map_err(EngineError::MountPoint)?;

    let (supervisor, state) = open_state(environment)?;
    forbid_inspection(environment.oom_score);
    match_source(arguments, environment, &path, &state)?;
    let start = state.start();
    let check = match state.region() {
        Some(region)
            if start == Start::Resumed && !environment.supervisor.is_some_and(|it| it.must_check_credentials) =>
        {
            BucketCheck::Trust { region, network_gbps: state.network_gbps() }
        }
        Some(_) | None => BucketCheck::Probe,
    };

    let metadata = Arc::new(MetadataCache::new(&path.bucket));
    let connected = connect::connect(arguments, environment, &path, &connection_errors, &check, &metadata)
        .map_err(|cause| EngineError::Connect { bucket: path.bucket.to_string(), cause })?;
    state.note_network(&connected.region, connected.network_gbps);
    let runtime = Runtime::new(connected.client.event_loop_group());
    let raw = settings::raw_config(arguments, &path, &connected.client);
    let personality = settings::personality(arguments, &path, &connected.client);
    let moves = settings::moves(arguments.rename_mode, personality);
    let after_rename =
        if matches!(moves, Moves::Copy(_)) { AfterRename::Revalidate } else { AfterRename::KeepAttributes };
    let small_files = Arc::new(SmallFilePrefetch::default());
    let watchdog = start_watchdog(environment, connected.memory_target)?;
    let waiting = state.clone();
    let timeout = StoreTimeout::new(arguments.store_timeout, move || waiting.note_waiting());
    let removed = Arc::new(RemovedDirectories::default());
    let client = StoreClient {
        inner: connected.client,
        usage: ClientUsage::Names,
        order: settings::listing_order(personality),
        moves: Arc::new(moves),
        buffers: MemoryBudget::within_target(connected.memory_target),
        small_files: Arc::clone(&small_files),
        listings: settings::listings(arguments),
        metadata: Arc::clone(&metadata),
        watchdog,
        timeout: timeout.clone(),
        listing_check: Arc::default(),
        lister: Arc::new(Lister::new(raw.clone())),
        removed: Arc::clone(&removed),
        runtime: runtime.clone(),
    };

    let cache_directory = cache_directory(arguments, environment, start)?;
    let prefetcher = prefetcher(arguments, &path, &client, start)?;
    let mut config = settings::file_system_config(arguments, personality);
    settings::bound_read_window(&mut config.prefetcher_config, connected.throughput_gbps, connected.memory_target);
    let records = Arc::new(HandleRecords::default());
    let superblock_config = SuperblockConfig { cache_config: config.cache_config.clone(), s3_personality: personality };
    let bucket = Bucket::new(
        StoreClient { usage: ClientUsage::Objects, ..client.clone() },
        path.bucket.to_string(),
        path.prefix.to_string(),
        settings::upload_settings(arguments, &config),
        raw,
        client.listings.clone(),
        timeout.clone(),
    );
    let front_config = settings::front_config(arguments, &config);
    let metablock = Arc::new(Superblock::new(client.clone(), path, superblock_config));
    let superblock = RecordingMetablock::new(Arc::clone(&metablock), Arc::clone(&records));
    let files = S3Filesystem::new(client, prefetcher, connected.pool, runtime, superblock, config);

    let options = MountOptions {
        access: AllowedUsers::of(arguments),
        is_read_only: arguments.read_only,
        unmounts_itself: arguments.auto_unmount,
    };
    let most_threads = usize::try_from(arguments.max_threads).unwrap_or(usize::MAX);
    if environment.test_hooks.is_library_front {
        let takeover = Takeover { state: &state, supervisor: None, resumable: &(), resending: Resending::IfPossible };
        let files = S3FuseFilesystem::new(files, None);
        let (session, _stop) =
            session::start(files, mount_point, &options, most_threads, &takeover).map_err(EngineError::Session)?;
        report(arguments, environment)?;
        return session.join().map_err(|cause| EngineError::Ended { cause });
    }
    let directory =
        settings::stage_directory(arguments, environment, &state).map_err(|cause| EngineError::Stage { cause })?;
    let front_config = FrontConfig {
        after_rename,
        hang_on_lookup: environment.test_hooks.hang_on_lookup.clone().filter(|_| start == Start::First),
        ..front_config
    };
    let kept = cache_directory.as_ref().map(|it| KeptFiles::new(it.as_path_buf(), settings::kept_limit(arguments)));
    let context =
        FrontContext { small_files, records, metablock, bucket, stage: directory, kept, metadata, removed, timeout };
    let front = Arc::new(Front::new(files, &state, front_config, context));
    let resending = if environment.test_hooks.is_resending_off { Resending::Never } else { Resending::IfPossible };
    let takeover = Takeover { state: &state, supervisor: supervisor.as_ref(), resumable: &*front, resending };
    let requests = Requests(Arc::clone(&front));
    let (session, _stop) =
        session::start(requests, mount_point, &options, most_threads, &takeover).map_err(EngineError::Session)?;
    front.restore();
    front::start_retries(&front).map_err(|cause| EngineError::Retries { cause })?;
    match report(arguments, environment) {
        // The mount works; a closed stdout must not end it.
        Err(EngineError::Report { cause }) if supervisor.is_some() => {
            tracing::warn!(%cause, "cannot report on stdout that the mount is ready");
        }
        reported => reported?,
    }
    session.join().map_err(|cause| EngineError::Ended { cause })?;
    front.store_all();
    drop(cache_directory);
    tracing::info!("unmounted");
    Ok(())
}

/// Sets the `oom_score_adj` first: the files in our /proc directory belong to root afterwards.
fn forbid_inspection(oom_score: Option<i32>) {
    if let Some(score) = oom_score {
        // If it fails, the kernel chooses as among other processes.
        let _ = std::fs::write("/proc/self/oom_score_adj", score.to_string());
    }
    core_dumps::forbid_inspection();
}

fn open_state(environment: &Environment) -> Result<(Option<Supervisor>, State), EngineError> {
    match environment.supervisor {
        Some(descriptors) => Supervisor::connect(descriptors)
            .map(|(supervisor, state)| (Some(supervisor), state))
            .map_err(EngineError::Supervisor),
        None => Ok((None, State::private().map_err(EngineError::State)?)),
    }
}

/// A successor shows what the first engine of the mount showed.
fn match_source(
    arguments: &Arguments,
    environment: &Environment,
    path: &S3Path,
    state: &State,
) -> Result<(), EngineError> {
    let endpoint = arguments.endpoint_url.as_ref().or(environment.endpoint_url.as_ref());
    let (bucket, prefix) = (path.bucket.to_string(), path.prefix.as_str());
    let source = MountedSource { bucket: &bucket, prefix, endpoint: endpoint.map(String::as_str) };
    state.match_source(source).map_err(EngineError::State)
}

fn start_watchdog(environment: &Environment, memory_target: usize) -> Result<Watchdog, EngineError> {
    let limits = WatchdogLimits::new(memory_target);
    let longest_answer = environment.test_hooks.longest_answer.unwrap_or(limits.longest_answer);
    Watchdog::start(WatchdogLimits { longest_answer, ..limits }).map_err(|cause| EngineError::Watchdog { cause })
}

/// Supervisors wait for this line.
fn report(arguments: &Arguments, environment: &Environment) -> Result<(), EngineError> {
    // With --keep-alive the parent writes its own pid: it is the process to signal.
    let is_kept_by_ourselves = environment.supervisor.is_some_and(|it| it.fuse.is_some());
    if let Some(path) = environment.pid_file.as_ref().filter(|_| !is_kept_by_ourselves) {
        pid_file::write(path).map_err(EngineError::PidFile)?;
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

/// The library empties the directory now and when the returned value is dropped. A successor leaves it as it is: another
/// engine may still use it, and what is in it is as good as before.
fn cache_directory(
    arguments: &Arguments,
    environment: &Environment,
    start: Start,
) -> Result<Option<ManagedCacheDir>, EngineError> {
    let Some(path) = &arguments.cache else { return Ok(None) };
    let empties = start == Start::First && !environment.keeps_cache;
    let key = environment.cache_key.clone().unwrap_or_else(|| store_and_bucket(arguments, environment));
    ManagedCacheDir::new_from_parent_with_cache_key(path, Some(&key), empties)
        .map(Some)
        .map_err(|cause| EngineError::Cache { path: path.clone(), cause: Box::new(cause) })
}

/// Blocks are kept under the key and the `ETag` of their object, which two stores, or two buckets, may have in common.
fn store_and_bucket(arguments: &Arguments, environment: &Environment) -> OsString {
    let endpoint = arguments.endpoint_url.as_ref().or(environment.endpoint_url.as_ref());
    format!("{} {}", endpoint.map_or("", String::as_str), arguments.bucket).into()
}

/// What reads ahead of the application: from the server, or through a shared cache.
fn prefetcher<C>(
    arguments: &Arguments,
    path: &S3Path,
    client: &C,
    start: Start,
) -> Result<PrefetcherBuilder<C>, EngineError>
where
    C: ObjectClient + Clone + Send + Sync + 'static,
{
    Ok(match arguments.cache_xz.as_deref() {
        None => Prefetcher::default_builder(client.clone()),
        Some(bucket) => {
            let shared = shared_cache(arguments, path, client, bucket, start)?;
            Prefetcher::caching_builder(shared, client.clone())
        }
    })
}

fn shared_cache<C>(
    arguments: &Arguments,
    path: &S3Path,
    client: &C,
    bucket: &str,
    start: Start,
) -> Result<ExpressDataCache<C>, EngineError>
where
    C: ObjectClient + Clone + Send + Sync + 'static,
{
    let encryption = ServerSideEncryption::new(arguments.sse.clone(), arguments.sse_kms_key_id.clone());
    let config = ExpressDataCacheConfig::new(bucket, &path.bucket).sse(encryption);
    let cache = ExpressDataCache::new(client.clone(), config);
    if start == Start::First {
        futures::executor::block_on(cache.verify_cache_valid())
            .map_err(|cause| EngineError::SharedCache { bucket: bucket.to_owned(), cause: Box::new(cause) })?;
    }
    Ok(cache)
}
