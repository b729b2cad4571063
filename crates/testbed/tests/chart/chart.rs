//! Helm, the chart, and what it renders.

use std::process::Command;

use s3csi_testbed::{chart, environment};
use serde_json::Value;

pub use s3csi_testbed::chart::{NAMESPACE, RELEASE, Setting, directory};

pub const STRATEGIES: [&str; 3] = ["pod", "systemd", "daemon"];

/// A file of the repository.
#[track_caller]
pub fn read(path: &str) -> String {
    std::fs::read_to_string(environment::workspace().join(path)).unwrap()
}

#[track_caller]
pub fn helm() -> Command {
    chart::helm().unwrap()
}

/// What it printed, or what it complained about.
pub fn run(helm: Command) -> Result<String, String> {
    chart::run(helm).map_err(|it| it.to_string())
}

/// All that the chart renders with these values.
pub fn render_text(settings: &[Setting<'_>]) -> Result<String, String> {
    chart::render(settings).map_err(|it| it.to_string())
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
