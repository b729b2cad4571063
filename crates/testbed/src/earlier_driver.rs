//! The driver that Scality's 1.x and 2.x were forked from, built by `make tools` under our driver's name and under its own: clusters
//! that run it are upgraded to ours, and benchmarks run it beside ours. Its engine is ours; a stand-in of the testbed registers it with
//! kubelet.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::environment::{self, MissingProgram};

/// How the earlier driver runs engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EarlierMounter {
    /// Version 1: a transient unit per volume and workload.
    Systemd,
    /// The Mountpoint Pods of version 2, with attachments `v2beta`.
    Pod,
}

/// The name under which the earlier driver is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EarlierBuild {
    /// Ours, with the version of attachments and the names of Mountpoint Pods that Scality's fork has.
    Scality,
    /// Its own; the program is unchanged.
    Aws,
}

impl EarlierBuild {
    pub const fn driver_name(self) -> &'static str {
        match self {
            Self::Scality => "s3.csi.scality.com",
            Self::Aws => "s3.csi.aws.com",
        }
    }

    /// As `make tools` calls it.
    const fn tool(self) -> &'static str {
        match self {
            Self::Scality => "aws-s3-csi-driver",
            Self::Aws => "aws-s3-csi-driver-unchanged",
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum EarlierDriverError {
    #[error("the earlier driver is missing")]
    Missing {
        #[source]
        cause: MissingProgram,
    },
    #[error("failed to run scripts/earlier-driver-image.sh")]
    Run {
        #[source]
        cause: io::Error,
    },
    #[error("scripts/earlier-driver-image.sh: {output}")]
    Failed { output: String },
}

/// Its Helm chart.
fn chart(build: EarlierBuild) -> Result<PathBuf, EarlierDriverError> {
    let program = environment::tool(build.tool()).map_err(|cause| EarlierDriverError::Missing { cause })?;
    let program = program.canonicalize().unwrap_or(program);
    Ok(program.with_file_name("chart"))
}

/// Writes the archives of its image and of its sidecars'.
pub fn write_images(build: EarlierBuild, directory: &Path) -> Result<[PathBuf; 2], EarlierDriverError> {
    let program = environment::product("csi-sidecar").map_err(|cause| EarlierDriverError::Missing { cause })?;
    let mut script = Command::new(environment::workspace().join("scripts/earlier-driver-image.sh"));
    script.arg(program.parent().unwrap_or(Path::new("/"))).arg(build.tool()).arg(directory).stdin(Stdio::null());
    let made = script.output().map_err(|cause| EarlierDriverError::Run { cause })?;
    if !made.status.success() {
        return Err(EarlierDriverError::Failed { output: String::from_utf8_lossy(&made.stderr).into_owned() });
    }
    Ok(["driver.tar", "sidecar.tar"].map(|it| directory.join(it)))
}

/// Helm's arguments to install it as release `s3csi`. The Secret with its keys has to be there before, and its images loaded.
pub fn install_arguments(
    build: EarlierBuild,
    mounter: EarlierMounter,
    namespace: &str,
) -> Result<Vec<String>, EarlierDriverError> {
    let chart = chart(build)?.to_string_lossy().into_owned();
    let words = ["install", "s3csi", &chart, "--namespace", namespace].map(str::to_owned);
    let settings = settings(mounter).into_iter().flat_map(|it| ["--set".to_owned(), it]);
    Ok(words.into_iter().chain(settings).collect())
}

/// What its chart is installed with: our images, keys in the Secret that our chart reads, and a directory for its engine that belongs to
/// the node alone.
fn settings(mounter: EarlierMounter) -> Vec<String> {
    let mut settings = vec![
        "image.repository=localhost/aws-s3-csi-driver".to_owned(),
        "image.tag=v1.15.0".to_owned(),
        "image.pullPolicy=Never".to_owned(),
        "node.seLinuxOptions=null".to_owned(),
        "node.mountpointInstallPath=/var/lib/mountpoint-s3-csi/bin/".to_owned(),
        "awsAccessSecret.name=s3-secret".to_owned(),
        "awsAccessSecret.keyId=access_key_id".to_owned(),
        "awsAccessSecret.accessKey=secret_access_key".to_owned(),
    ];
    for sidecar in ["nodeDriverRegistrar", "livenessProbe"] {
        settings.push(format!("sidecars.{sidecar}.image.repository=localhost/csi-sidecar"));
        settings.push(format!("sidecars.{sidecar}.image.tag=test"));
        settings.push(format!("sidecars.{sidecar}.image.pullPolicy=Never"));
    }
    if mounter == EarlierMounter::Pod {
        settings.push("experimental.podMounter=true".to_owned());
    }
    settings
}
