//! The only place of the testbed that reads the environment: where programs, tools and logs are.

use std::path::{Path, PathBuf};
use std::time::Duration;

#[derive(Debug, thiserror::Error)]
pub enum MissingProgram {
    #[error("there is no program {path:?}; run: make build")]
    Product { path: PathBuf },
    #[error("there is no tool {path:?}; run: make tools")]
    Tool { path: PathBuf },
    #[error("there is no Kubernetes {path:?}; run: make kube")]
    Kube { path: PathBuf },
    #[error("there is no program {path:?}; run: scripts/peers.sh")]
    Peer { path: PathBuf },
    #[error("failed to find the path of this program")]
    Unknown {
        #[source]
        cause: std::io::Error,
    },
}

/// One of our own programs: from `S3CSI_BIN_DIR`, otherwise from where cargo put it beside the running program.
pub fn product(name: &str) -> Result<PathBuf, MissingProgram> {
    let directory = match std::env::var_os("S3CSI_BIN_DIR") {
        Some(directory) => PathBuf::from(directory),
        None => beside_us()?,
    };
    let path = directory.join(name);
    if path.is_file() { Ok(path) } else { Err(MissingProgram::Product { path }) }
}

/// A program that `make tools` builds.
pub fn tool(name: &str) -> Result<PathBuf, MissingProgram> {
    let path = tools().join(name);
    if path.is_file() { Ok(path) } else { Err(MissingProgram::Tool { path }) }
}

/// The program that is all of Kubernetes; `make kube` builds it.
pub fn kube() -> Result<PathBuf, MissingProgram> {
    let path = tools().join("kube");
    if path.is_file() { Ok(path) } else { Err(MissingProgram::Kube { path }) }
}

/// One of the file systems that ours is compared with; scripts/peers.sh installs them.
pub fn peer(name: &str) -> Result<PathBuf, MissingProgram> {
    let path = cache().join("s3csi/peers/bin").join(name);
    if path.is_file() { Ok(path) } else { Err(MissingProgram::Peer { path }) }
}

/// The Python with the packages that some programs of `make compatibility` need; scripts/compatibility.sh installs it.
pub fn compatibility_python() -> PathBuf {
    cache().join("s3csi/compatibility/python/bin/python")
}

/// Where logs are kept beyond the end of a test, if anywhere.
pub fn log_directory() -> Option<PathBuf> {
    std::env::var_os("S3CSI_LOG_DIR").filter(|it| !it.is_empty()).map(PathBuf::from)
}

/// Whether tests of generated files write them instead of comparing.
pub fn updates_generated_files() -> bool {
    std::env::var_os("UPDATE").is_some()
}

/// How many engines the stress test shall kill, if it was asked for more than usual.
pub fn soak_kills() -> Option<usize> {
    std::env::var("S3CSI_SOAK_KILLS").ok()?.parse().ok()
}

/// How often a volume shall be published and unpublished, if it was asked for more than usual.
pub fn soak_publishes() -> Option<u32> {
    std::env::var("S3CSI_SOAK_PUBLISHES").ok()?.parse().ok()
}

/// Where the whole kill matrix leaves its results, if it is to be run.
pub fn kill_matrix_results() -> Option<PathBuf> {
    std::env::var_os("S3CSI_KILL_MATRIX").map(PathBuf::from)
}

/// Which rows of the kill matrix are to be run, if not all.
pub fn kill_matrix_rows() -> Option<String> {
    std::env::var("S3CSI_KILL_MATRIX_ROWS").ok().filter(|it| !it.is_empty())
}

/// How long fsx shall run, if it was asked for more than usual.
pub fn fsx_time() -> Option<Duration> {
    let seconds = std::env::var("S3CSI_FSX_SECONDS").ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// How long the S3 server of a cluster shall stall, if it was asked for more than usual.
pub fn soak_stall() -> Option<Duration> {
    let seconds = std::env::var("S3CSI_SOAK_STALL_SECONDS").ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// Whether to wait until kubelet has got other tokens of service accounts, which takes ten minutes.
pub fn waits_for_tokens() -> bool {
    std::env::var_os("S3CSI_SOAK_TOKENS").is_some()
}

/// Names the directory that outlives a restart of the machine in a test of one.
pub const DISK: &str = "S3CSI_DISK";

/// Whether scripts/with-systemd.sh started us.
pub fn is_beside_systemd() -> bool {
    std::env::var_os("S3CSI_BESIDE_SYSTEMD").is_some()
}

pub fn disk() -> Option<PathBuf> {
    std::env::var_os(DISK).filter(|_| is_beside_systemd()).map(PathBuf::from)
}

/// The file that systemd logs to, beside systemd.
pub fn systemd_log() -> Option<PathBuf> {
    std::env::var_os("SYSTEMD_LOG").map(PathBuf::from)
}

/// What every child gets of our environment; the rest must not change what a test sees.
pub fn search_path() -> String {
    std::env::var("PATH").unwrap_or_else(|_| "/usr/sbin:/usr/bin:/sbin:/bin".to_owned())
}

/// The root of this repository, where the scripts are.
pub fn workspace() -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    workspace.canonicalize().unwrap_or(workspace)
}

fn tools() -> PathBuf {
    match std::env::var_os("S3CSI_TOOLS") {
        Some(directory) => PathBuf::from(directory),
        None => cache().join("s3csi/tools/bin"),
    }
}

fn beside_us() -> Result<PathBuf, MissingProgram> {
    let own = std::env::current_exe().map_err(|cause| MissingProgram::Unknown { cause })?;
    let directory = own.parent().unwrap_or(Path::new("/"));
    // Test programs lie in `deps`, one level below the products.
    let directory = if directory.ends_with("deps") { directory.parent().unwrap_or(directory) } else { directory };
    Ok(directory.to_owned())
}

fn cache() -> PathBuf {
    match std::env::var_os("XDG_CACHE_HOME").filter(|it| !it.is_empty()) {
        Some(cache) => PathBuf::from(cache),
        None => PathBuf::from(std::env::var_os("HOME").unwrap_or_else(|| "/root".into())).join(".cache"),
    }
}
