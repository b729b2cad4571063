//! The command line of `mount-s3`: the flags of AWS's mount-s3 with the same meaning, plus a few of our own.
//! It parses and checks; nothing here touches the network or mounts anything. Also the only place that reads the environment.

#![expect(clippy::doc_markdown, reason = "the comments on flags are the help text, and shown as they are")]

mod environment;
mod fstab;
mod value;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{Parser, ValueEnum};
use mountpoint_s3_fs::fs::TimeToLive;
use mountpoint_s3_fs::s3::{Bucket, Prefix, S3Path};
use s3csi_core::duration;

pub use environment::{
    BACKGROUND_CHILD, Environment, ErrorFormat, StoredDescriptors, SupervisorDescriptors, error_format,
};

const MINIMUM_MEMORY_TARGET_MIB: u64 = 512;
const MEBIBYTE: usize = 1 << 20;

/// Serve an S3 bucket as a file system.
///
/// Credentials come from the usual AWS places: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile in ~/.aws, or the
/// machine's role.
#[derive(Parser, Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag that is given or not")]
#[command(
    name = "mount-s3",
    version,
    max_term_width = 110,
    after_help = "Examples:\n  \
        mount-s3 my-bucket /mnt/bucket\n  \
        mount-s3 --endpoint-url https://s3.example.com --force-path-style my-bucket /mnt/bucket\n  \
        mount-s3 s3://my-bucket/logs/ /mnt/logs --read-only\n  \
        mount-s3 my-bucket /mnt/bucket -o allow-other,allow-delete      (the form of fstab)\n\n\
        Unmount with: umount /mnt/bucket"
)]
pub struct Arguments {
    /// Bucket to mount: a name, an s3://bucket/prefix/ address or an access point ARN
    #[arg(value_name = "BUCKET")]
    pub bucket: String,

    /// Existing empty directory, or /dev/fd/N for a FUSE descriptor that is mounted already
    #[arg(value_name = "DIRECTORY")]
    pub mount_point: PathBuf,

    /// Mount only the keys below this prefix; it must end in '/'
    #[arg(long, value_name = "PREFIX/", help_heading = BUCKET)]
    pub prefix: Option<String>,

    /// Region of the bucket [default: AWS_REGION, else the machine's own, else us-east-1]
    #[arg(long, help_heading = BUCKET)]
    pub region: Option<String>,

    /// Address of the S3 server [default: AWS_ENDPOINT_URL, else AWS in the region]
    #[arg(long, value_name = "URL", value_parser = value::endpoint, help_heading = BUCKET)]
    pub endpoint_url: Option<String>,

    /// Put the bucket into the path of requests instead of the host name
    #[arg(long, help_heading = BUCKET)]
    pub force_path_style: bool,

    /// Use S3 Transfer Acceleration; the bucket must have it enabled
    #[arg(long, help_heading = BUCKET)]
    pub transfer_acceleration: bool,

    /// Use dual-stack (IPv4 and IPv6) endpoints
    #[arg(long, help_heading = BUCKET)]
    pub dual_stack: bool,

    /// Send requests as requester-pays
    #[arg(long, help_heading = BUCKET)]
    pub requester_pays: bool,

    /// Bucket type, if it cannot be inferred from the name
    #[arg(long, value_enum, help_heading = BUCKET)]
    pub bucket_type: Option<BucketType>,

    /// Refuse the bucket if it belongs to another account
    #[arg(long, value_name = "ACCOUNT_ID", help_heading = BUCKET)]
    pub expected_bucket_owner: Option<String>,

    /// Trust these certificates (PEM) instead of the system's
    #[arg(long, value_name = "FILE", env = "AWS_CA_BUNDLE", help_heading = BUCKET)]
    pub ca_bundle: Option<PathBuf>,

    /// Send unsigned requests
    #[arg(long, conflicts_with = "profile", help_heading = CREDENTIALS)]
    pub no_sign_request: bool,

    /// Use this profile of the shared configuration files
    #[arg(long, help_heading = CREDENTIALS)]
    pub profile: Option<String>,

    /// Refuse all changes
    #[arg(long, help_heading = MOUNT)]
    pub read_only: bool,

    /// Allow deleting and renaming files
    #[arg(long, help_heading = MOUNT)]
    pub allow_delete: bool,

    /// Allow overwriting and modifying existing files
    #[arg(long, help_heading = MOUNT)]
    pub allow_overwrite: bool,

    /// Upload while a file is being written and allow appending; needs a server that supports it
    #[arg(long, help_heading = MOUNT)]
    pub incremental_upload: bool,

    /// How files are written
    #[arg(long, value_enum, default_value_t = WriteStrategy::Auto, help_heading = MOUNT)]
    pub writes: WriteStrategy,

    /// Directory for files that are edited in place and larger than 8 MiB; two mounts must not share it [default: a new
    /// directory in TMPDIR or /var/tmp]
    #[arg(long, value_name = "DIRECTORY", help_heading = MOUNT)]
    pub stage: Option<PathBuf>,

    /// Maximum size of all files in the staging directory
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = clap::value_parser!(u64).range(0..=1 << 40), help_heading = MOUNT)]
    pub max_stage_size: u64,

    /// How chmod, chown, touch and ln -s are handled
    #[arg(long, value_enum, default_value_t = MetadataStrategy::Store, help_heading = MOUNT)]
    pub metadata: MetadataStrategy,

    /// Size of the file system as df shows it
    #[arg(long, value_name = "GIB", default_value_t = 1 << 20, value_parser = clap::value_parser!(u64).range(1..=1 << 32), help_heading = MOUNT)]
    pub reported_size: u64,

    /// Directories with more objects than this are not renamed
    #[arg(long, value_name = "N", default_value_t = 10_000, help_heading = MOUNT)]
    pub max_rename_objects: u64,

    /// How `mv` of a file works
    #[arg(long, value_enum, default_value_t = RenameMode::Auto, help_heading = MOUNT)]
    pub rename_mode: RenameMode,

    /// Unmount when this process ends in any way
    #[arg(long, help_heading = MOUNT)]
    pub auto_unmount: bool,

    /// Serve in a child process and restart it when it dies: applications see a pause, open files survive. No effect with
    /// /dev/fd/N
    #[arg(long, help_heading = MOUNT)]
    pub keep_alive: bool,

    /// Allow root to access the mount
    #[arg(long, conflicts_with = "allow_other", help_heading = MOUNT)]
    pub allow_root: bool,

    /// Allow all users to access the mount
    #[arg(long, help_heading = MOUNT)]
    pub allow_other: bool,

    /// Owner of all files [default: this user]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..), help_heading = MOUNT)]
    pub uid: Option<u32>,

    /// Group of all files [default: this group]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..), help_heading = MOUNT)]
    pub gid: Option<u32>,

    /// Permissions of directories, octal [default: 0755]
    #[arg(long, value_name = "MODE", value_parser = value::permissions, help_heading = MOUNT)]
    pub dir_mode: Option<u16>,

    /// Permissions of files, octal [default: 0644]
    #[arg(long, value_name = "MODE", value_parser = value::permissions, help_heading = MOUNT)]
    pub file_mode: Option<u16>,

    /// Storage class of new objects
    #[arg(long, help_heading = UPLOAD)]
    pub storage_class: Option<String>,

    /// Encryption of new objects on the server
    #[arg(long, value_parser = ["aws:kms", "aws:kms:dsse", "AES256"], help_heading = UPLOAD)]
    pub sse: Option<String>,

    /// Key for the encryption with aws:kms or aws:kms:dsse
    #[arg(long, value_name = "ARN", requires = "sse", value_parser = value::kms_key, help_heading = UPLOAD)]
    pub sse_kms_key_id: Option<String>,

    /// Checksum sent with uploads [default: crc32c]
    #[arg(long, value_enum, help_heading = UPLOAD)]
    pub upload_checksums: Option<UploadChecksums>,

    /// Set the content type of new objects by their extension
    #[arg(long, help_heading = UPLOAD)]
    pub infer_content_type: bool,

    /// Target network throughput [default: that of the EC2 instance, else 10]
    #[arg(long, value_name = "GBPS", value_parser = clap::value_parser!(u64).range(1..), help_heading = RESOURCES)]
    pub maximum_throughput_gbps: Option<u64>,

    /// Maximum number of threads that serve FUSE requests
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=1024), help_heading = RESOURCES)]
    pub max_threads: u64,

    /// Memory target, not a hard limit [default: 1024, less on a smaller machine]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(MINIMUM_MEMORY_TARGET_MIB..), help_heading = RESOURCES)]
    pub memory_target: Option<u64>,

    /// Part size of uploads and downloads
    #[arg(long, value_name = "BYTES", default_value_t = 8 * MEBIBYTE as u64, value_parser = value::part_size(), conflicts_with_all = ["read_part_size", "write_part_size"], help_heading = RESOURCES)]
    pub part_size: u64,

    /// Part size of downloads [default: --part-size]
    #[arg(long, value_name = "BYTES", value_parser = value::part_size(), help_heading = RESOURCES)]
    pub read_part_size: Option<u64>,

    /// Part size of uploads [default: --part-size]
    #[arg(long, value_name = "BYTES", value_parser = value::part_size(), help_heading = RESOURCES)]
    pub write_part_size: Option<u64>,

    /// How long calls wait for a store that answers nothing before they fail with EIO; never less than the S3 client library
    /// waits, half a minute
    #[arg(long, value_name = "TIME", default_value = "15m", value_parser = duration::parse, help_heading = RESOURCES)]
    pub store_timeout: Duration,

    /// Network interface to use; may be given several times
    #[arg(long, value_name = "INTERFACE", help_heading = RESOURCES)]
    pub bind: Option<Vec<String>>,

    /// Cache read data in this directory; two mounts must not share it
    #[arg(long, value_name = "DIRECTORY", help_heading = CACHING)]
    pub cache: Option<PathBuf>,

    /// Maximum size of the cache directory [default: leave 5 % of the disk free]
    #[arg(long, value_name = "MIB", requires = "cache", value_parser = clap::value_parser!(u64).range(1..=1 << 40), help_heading = CACHING)]
    pub max_cache_size: Option<u64>,

    /// Cache read data in this S3 Express One Zone bucket, shared by several mounts
    #[arg(long, value_name = "BUCKET", help_heading = CACHING)]
    pub cache_xz: Option<String>,

    /// How long names and attributes are cached: SECONDS, indefinite or minimal (a request at each open)
    /// [default: a tenth of a second, 60 with a cache]
    #[arg(long, value_name = "TTL", help_heading = CACHING)]
    pub metadata_ttl: Option<TimeToLive>,

    /// How long missing names are cached [default: --metadata-ttl]
    #[arg(long, value_name = "TTL", help_heading = CACHING)]
    pub negative_metadata_ttl: Option<TimeToLive>,

    /// Stay in the foreground and log to the standard output, too
    #[arg(long, short, help_heading = LOGGING)]
    pub foreground: bool,

    /// Log into a new file in this directory instead of syslog
    #[arg(long, short, value_name = "DIRECTORY", help_heading = LOGGING)]
    pub log_directory: Option<PathBuf>,

    /// Log more
    #[arg(long, short, help_heading = LOGGING)]
    pub debug: bool,

    /// Log what the S3 client library does
    #[arg(long, help_heading = LOGGING)]
    pub debug_crt: bool,

    /// Log nothing
    #[arg(long, conflicts_with_all = ["log_directory", "debug", "debug_crt", "log_metrics"], help_heading = LOGGING)]
    pub no_log: bool,

    /// Log metrics every few seconds
    #[arg(long, help_heading = LOGGING)]
    pub log_metrics: bool,

    /// Push metrics to this OpenTelemetry collector
    #[arg(long, value_name = "URL", value_parser = value::endpoint, help_heading = LOGGING)]
    pub otlp_endpoint: Option<String>,

    /// Seconds between two pushes of metrics [default: 60]
    #[arg(long, value_name = "SECONDS", requires = "otlp_endpoint", value_parser = clap::value_parser!(u64).range(1..), help_heading = LOGGING)]
    pub otlp_export_interval: Option<u64>,

    /// Text in front of the user agent
    #[arg(long, value_name = "TEXT", help_heading = LOGGING)]
    pub user_agent_prefix: Option<String>,
}

const BUCKET: &str = "Bucket";
const CREDENTIALS: &str = "Credentials";
const MOUNT: &str = "Mount";
const UPLOAD: &str = "New objects";
const RESOURCES: &str = "Resources";
const CACHING: &str = "Caching";
const LOGGING: &str = "Process and logging";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BucketType {
    GeneralPurpose,
    Directory,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum UploadChecksums {
    Crc32c,
    Crc64nvme,
    Off,
}

/// How files are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WriteStrategy {
    /// Upload new files while they are written from beginning to end; stage a file locally when a program seeks, reads back,
    /// appends, truncates or edits it
    Auto,
    /// Stage every file locally and upload it at close
    Staged,
    /// Only new files, from beginning to end, as AWS's mount-s3; everything else is refused
    Sequential,
}

/// What becomes of attributes that programs set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MetadataStrategy {
    /// Refuse changes of stored files, as AWS's mount-s3
    Refuse,
    /// Accept changes without an effect
    Ignore,
    /// Store mode, owner, time, symbolic links and user xattrs as object metadata that s3fs and rclone read
    Store,
}

/// How a file is moved. Never in a way that can lose its content on a server that does not know the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RenameMode {
    /// RenameObject on directory buckets, else as `copy`
    Auto,
    /// Copy, compare, then delete the original; not atomic. Refused if the server proves to be unable to copy
    Copy,
    /// Always RenameObject; most S3-compatible servers take it for an empty upload and LOSE DATA
    Native,
    /// Refuse
    Off,
}

/// What the user typed cannot be served; or it was `--help` or `--version`.
#[derive(Debug)]
pub enum ParseExit {
    /// Text the user asked for.
    Help(String),
    /// One line that says what is wrong.
    Invalid(String),
}

impl Arguments {
    /// Reads the command line, program name first.
    pub fn parse_from_command_line(words: impl IntoIterator<Item = OsString>) -> Result<Self, ParseExit> {
        let words = fstab::expand(words.into_iter().collect()).map_err(ParseExit::Invalid)?;
        let mut arguments = Self::try_parse_from(words).map_err(|error| match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ParseExit::Help(error.render().to_string()),
            _ => ParseExit::Invalid(one_line(&error.render().to_string())),
        })?;
        // An empty variable means "not set", as it does for every other AWS tool.
        arguments.ca_bundle = arguments.ca_bundle.filter(|it| !it.as_os_str().is_empty());
        arguments.check().map_err(ParseExit::Invalid)?;
        Ok(arguments)
    }

    /// Bucket and prefix, from whichever of the two forms was used.
    pub fn s3_path(&self) -> Result<S3Path, String> {
        if !self.bucket.starts_with("s3://") {
            let bucket =
                Bucket::new(self.bucket.clone()).map_err(|error| format!("bucket {:?}: {error}", self.bucket))?;
            let prefix = Prefix::new(self.prefix.as_deref().unwrap_or_default())
                .map_err(|error| format!("--prefix {:?}: {error}", self.prefix.as_deref().unwrap_or_default()))?;
            return Ok(S3Path::new(bucket, prefix));
        }
        let path = S3Path::parse_s3_uri(&self.bucket).map_err(|error| format!("bucket {:?}: {error}", self.bucket))?;
        match &self.prefix {
            Some(prefix) if !path.prefix.as_str().is_empty() => {
                Err(format!("the bucket {:?} contains a prefix already, remove --prefix {prefix:?}", self.bucket))
            }
            Some(prefix) => {
                let prefix = Prefix::new(prefix).map_err(|error| format!("--prefix {prefix:?}: {error}"))?;
                Ok(S3Path::new(path.bucket, prefix))
            }
            None => Ok(path),
        }
    }

    pub fn memory_target_bytes(&self) -> Option<usize> {
        self.memory_target.map(|mebibytes| usize::try_from(mebibytes).unwrap_or(usize::MAX).saturating_mul(MEBIBYTE))
    }

    /// Rules between several flags that clap cannot express.
    fn check(&self) -> Result<(), String> {
        self.s3_path()?;
        if self.sse_kms_key_id.is_some() && self.sse.as_deref() == Some("AES256") {
            return Err("--sse-kms-key-id works with --sse aws:kms and --sse aws:kms:dsse, not with AES256".into());
        }
        if self.auto_unmount && value::descriptor(&self.mount_point).is_some() {
            return Err(format!(
                "--auto-unmount cannot be used with {}: the process that mounted the descriptor unmounts it",
                self.mount_point.display()
            ));
        }
        Ok(())
    }
}

/// The number N, if the mount point is `/dev/fd/N`.
pub fn descriptor_of(mount_point: &std::path::Path) -> Option<i32> {
    value::descriptor(mount_point)
}

/// clap explains in paragraphs; scripts and supervisors show one line.
fn one_line(explanation: &str) -> String {
    let lines = explanation.lines().map(str::trim).filter(|it| !it.is_empty());
    let useful = lines.take_while(|it| !it.starts_with("Usage:") && !it.starts_with("For more information"));
    // A typing mistake is more likely than a bucket whose name starts with dashes.
    let useful = useful.filter(|it| !it.starts_with("tip: to pass"));
    let sentence =
        useful.map(|it| it.trim_start_matches("error: ")).collect::<Vec<_>>().join("; ").replace(":; ", ": ");
    format!("{sentence} (see mount-s3 --help)")
}

#[cfg(test)]
mod tests;
