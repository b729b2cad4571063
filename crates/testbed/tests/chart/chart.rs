//! Helm, the chart, and what it renders.

use std::path::PathBuf;
use std::process::Command;

use s3csi_testbed::{environment, process};
use serde_json::Value;

pub const STRATEGIES: [&str; 3] = ["pod", "systemd", "daemon"];

pub const RELEASE: &str = "s3";
pub const NAMESPACE: &str = "kube-system";

/// Helm thinks of a very old Kubernetes when it cannot ask one.
const KUBE_VERSION: &str = "1.33.0";

pub fn directory() -> PathBuf {
    environment::workspace().join("charts/s3csi")
}

/// A file of the repository.
#[track_caller]
pub fn read(path: &str) -> String {
    std::fs::read_to_string(environment::workspace().join(path)).unwrap()
}

/// Helm, which finds nothing of the user who runs the tests.
pub fn helm() -> Command {
    let mut helm = process::command(&environment::tool("helm").unwrap());
    helm.env("HOME", "/nonexistent");
    helm
}

/// What it printed, or what it complained about.
#[track_caller]
pub fn run(mut helm: Command) -> Result<String, String> {
    let output = helm.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

/// A value by its path, such as `node.logLevel`.
pub type Setting<'a> = (&'a str, Value);

/// All that the chart renders with these values.
#[track_caller]
pub fn render_text(settings: &[Setting<'_>]) -> Result<String, String> {
    let mut helm = helm();
    helm.arg("template").arg(RELEASE).arg(directory());
    helm.args(["--namespace", NAMESPACE, "--kube-version", KUBE_VERSION]);
    for (path, value) in settings {
        helm.arg("--set-json").arg(format!("{path}={value}"));
    }
    run(helm)
}

#[track_caller]
pub fn render(settings: &[Setting<'_>]) -> Objects {
    Objects::parse(&render_text(settings).unwrap())
}

#[track_caller]
pub fn render_strategy(strategy: &str) -> Objects {
    render(&[("strategy", strategy.into())])
}

pub struct Objects(pub Vec<Value>);

impl Objects {
    #[track_caller]
    pub fn parse(yaml: &str) -> Self {
        Self(documents(yaml))
    }

    pub fn of_kind(&self, kind: &str) -> impl Iterator<Item = &Value> {
        self.0.iter().filter(move |it| it["kind"] == kind)
    }

    #[track_caller]
    pub fn get(&self, kind: &str, name: &str) -> &Value {
        let found = self.of_kind(kind).find(|it| it["metadata"]["name"] == name);
        found.unwrap_or_else(|| panic!("there is no {kind} {name}"))
    }

    /// Everything that makes Pods.
    pub fn workloads(&self) -> impl Iterator<Item = &Value> {
        self.0.iter().filter(|it| it["spec"]["template"]["spec"].is_object())
    }
}

/// The documents of a YAML text that are not empty.
#[track_caller]
pub fn documents(yaml: &str) -> Vec<Value> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(yaml).unwrap();
    documents.into_iter().filter(|it| !it.is_null()).collect()
}

/// All containers of what makes Pods.
pub fn containers(workload: &Value) -> impl Iterator<Item = &Value> {
    let pod = &workload["spec"]["template"]["spec"];
    ["initContainers", "containers"].into_iter().flat_map(|it| elements(&pod[it]))
}

pub fn elements(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

#[track_caller]
pub fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is no text"))
}
