//! s3fs and rclone, which benchmarks and `make compatibility` compare the engine with; scripts/peers.sh installs them.

use std::path::Path;
use std::process::Command;

use s3csi_s3_server::store::Store;

use crate::environment::{self, MissingProgram};
use crate::process::command;

/// `--vfs-cache-mode` of rclone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RcloneCache {
    Off,
    Full,
}

/// One mount of a peer.
#[derive(Clone, Copy)]
pub struct PeerMount<'a> {
    pub store: &'a dyn Store,
    /// The server's own, or one in front of it.
    pub endpoint: &'a str,
    pub bucket: &'a str,
    pub mount_point: &'a Path,
    /// For the peer's own files.
    pub cache: &'a Path,
}

/// s3fs in the foreground, with its defaults but for what the server needs.
pub fn s3fs(mount: &PeerMount<'_>) -> Result<Command, MissingProgram> {
    let PeerMount { store, endpoint, bucket, mount_point, cache } = mount;
    let account = store.account();
    let mut command = command(&environment::peer("s3fs")?);
    command.arg(bucket).arg(mount_point).arg("-f");
    command.arg("-o").arg(format!("url={endpoint},use_path_request_style,endpoint={}", store.region()));
    command.arg("-o").arg(format!("tmpdir={}", cache.display()));
    command.env("AWS_ACCESS_KEY_ID", &account.access_key).env("AWS_SECRET_ACCESS_KEY", &account.secret_key);
    Ok(command)
}

/// rclone in the foreground, with its defaults but for what the server, and a fair comparison, need.
pub fn rclone(mount: &PeerMount<'_>, mode: RcloneCache) -> Result<Command, MissingProgram> {
    let PeerMount { store, endpoint, bucket, mount_point, cache } = mount;
    let account = store.account();
    let mut command = command(&environment::peer("rclone")?);
    command.arg("mount").arg(format!(":s3:{bucket}")).arg(mount_point).arg("--cache-dir").arg(cache);
    // An empty name: no configuration file, not even the user's.
    command.args(["--config", ""]);
    let mode: &[&str] = match mode {
        RcloneCache::Full => &["--vfs-cache-mode", "full", "--vfs-write-back", "0s"],
        RcloneCache::Off => &["--vfs-cache-mode", "off"],
    };
    command.args(mode).env("HOME", cache);
    command.env("RCLONE_S3_PROVIDER", "Other").env("RCLONE_S3_ENDPOINT", endpoint);
    command.env("RCLONE_S3_REGION", store.region()).env("RCLONE_S3_FORCE_PATH_STYLE", "true");
    command.env("RCLONE_S3_ACCESS_KEY_ID", &account.access_key);
    command.env("RCLONE_S3_SECRET_ACCESS_KEY", &account.secret_key);
    Ok(command)
}

pub fn s3fs_version() -> Result<String, MissingProgram> {
    let line = first_line(&environment::peer("s3fs")?, "--version");
    // `Amazon Simple Storage Service File System V1.90 (commit:…) with …`
    let version = line.split_whitespace().find_map(|it| it.strip_prefix('V')).unwrap_or("of unknown version");
    Ok(format!("s3fs {version}"))
}

pub fn rclone_version() -> Result<String, MissingProgram> {
    Ok(first_line(&environment::peer("rclone")?, "version"))
}

fn first_line(program: &Path, argument: &str) -> String {
    let output = Command::new(program).arg(argument).output().ok().filter(|it| it.status.success());
    let text = output.map(|it| String::from_utf8_lossy(&it.stdout).into_owned()).unwrap_or_default();
    text.lines().next().unwrap_or("unknown").trim().to_owned()
}
