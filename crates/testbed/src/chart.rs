//! The Helm chart as people get it, rendered by the real Helm.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

use serde_json::Value;

use crate::environment::{self, MissingProgram};
use crate::process;

pub const RELEASE: &str = "s3";
pub const NAMESPACE: &str = "kube-system";

/// Helm thinks of a very old Kubernetes when it cannot ask one.
const KUBE_VERSION: &str = "1.33.0";

/// A value by its path, such as `node.logLevel`.
pub type Setting<'a> = (&'a str, Value);

#[derive(Debug, thiserror::Error)]
pub enum ChartError {
    #[error("Helm is missing")]
    Missing {
        #[source]
        cause: MissingProgram,
    },
    #[error("failed to run Helm")]
    Run {
        #[source]
        cause: io::Error,
    },
    /// What Helm complained about.
    #[error("{output}")]
    Refused { output: String },
}

pub fn directory() -> PathBuf {
    environment::workspace().join("charts/s3csi")
}

/// Helm, which finds nothing of the user who runs the tests.
pub fn helm() -> Result<Command, ChartError> {
    let program = environment::tool("helm").map_err(|cause| ChartError::Missing { cause })?;
    let mut helm = process::command(&program);
    helm.env("HOME", "/nonexistent");
    Ok(helm)
}

/// What it printed.
pub fn run(mut helm: Command) -> Result<String, ChartError> {
    let output = helm.output().map_err(|cause| ChartError::Run { cause })?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() {
        Ok(text(&output.stdout))
    } else {
        Err(ChartError::Refused { output: text(&output.stderr) })
    }
}

/// All objects of the chart with these values, as YAML.
pub fn render(settings: &[Setting<'_>]) -> Result<String, ChartError> {
    render_only(&[], settings)
}

/// Those of some templates; of all, if none is named.
pub fn render_only(templates: &[&str], settings: &[Setting<'_>]) -> Result<String, ChartError> {
    let mut helm = helm()?;
    helm.arg("template").arg(RELEASE).arg(directory());
    helm.args(["--namespace", NAMESPACE, "--kube-version", KUBE_VERSION]);
    helm.args(templates.iter().flat_map(|it| ["--show-only", it]));
    for (path, value) in settings {
        helm.arg("--set-json").arg(format!("{path}={value}"));
    }
    run(helm)
}

/// A stand-in for the chart before ours: what cannot be changed of it, and its definition of attachments where Helm never looks again.
pub fn write_earlier_chart(directory: &Path) -> io::Result<()> {
    let stored = environment::workspace().join("crates/testbed/tests/chart/earlier");
    for name in ["Chart.yaml", "values.yaml", "templates/objects.yaml"] {
        copy(&stored.join(name), &directory.join(name))?;
    }
    copy(&self::directory().join("files/attachments.yaml"), &directory.join("crds/attachments.yaml"))
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to.parent().unwrap_or(Path::new("/")))?;
    fs::copy(from, to).map(drop)
}
