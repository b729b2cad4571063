//! What csi-sanity reports about its tests, and how it is compared with what we expect.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

pub struct Report {
    specs: Vec<Spec>,
}

#[derive(Deserialize)]
struct Suite {
    #[serde(rename = "SpecReports")]
    specs: Vec<Spec>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Spec {
    container_hierarchy_texts: Option<Vec<String>>,
    leaf_node_text: String,
    state: String,
    failure: Option<Failure>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Failure {
    message: String,
}

impl Spec {
    fn name(&self) -> String {
        let containers = self.container_hierarchy_texts.iter().flatten();
        containers.chain([&self.leaf_node_text]).map(String::as_str).collect::<Vec<_>>().join(" / ")
    }
}

impl Report {
    pub fn read(file: &Path) -> Self {
        let text = std::fs::read_to_string(file).expect("csi-sanity wrote no report");
        let suites: Vec<Suite> = serde_json::from_str(&text).unwrap();
        let specs: Vec<Spec> = suites.into_iter().flat_map(|it| it.specs).collect();
        assert!(50 < specs.len(), "a run of {} tests is not the whole suite", specs.len());
        Self { specs }
    }

    #[track_caller]
    pub fn check_nothing_failed(&self) {
        let is_fine = |it: &&Spec| matches!(it.state.as_str(), "passed" | "skipped" | "pending");
        let describe = |it: &Spec| {
            format!("{} {}: {}", it.state, it.name(), it.failure.as_ref().map_or("", |it| it.message.as_str()))
        };
        let failed: Vec<String> = self.specs.iter().filter(|it| !is_fine(it)).map(describe).collect();
        assert!(failed.is_empty(), "{}", failed.join("\n"));
    }

    /// Exactly these passed.
    #[track_caller]
    pub fn check_passed(&self, expected: &[&str]) {
        let mut passed: Vec<String> = self.in_state("passed").map(Spec::name).collect();
        passed.sort();
        assert_eq!(passed, expected);
    }

    /// These passed, among others.
    #[track_caller]
    pub fn check_includes(&self, expected: &[&str]) {
        let passed: Vec<String> = self.in_state("passed").map(Spec::name).collect();
        for name in expected {
            assert!(passed.iter().any(|it| it == name), "{name} did not pass; these did: {passed:#?}");
        }
    }

    /// Exactly these, or those beneath them, or those with this label, were skipped.
    #[track_caller]
    pub fn check_skipped(&self, expected: &[&str]) {
        let mut unused: BTreeMap<&str, bool> = expected.iter().map(|it| (*it, true)).collect();
        let mut unexplained = Vec::new();
        for spec in self.in_state("skipped") {
            let name = spec.name();
            let is_meant = |it: &&&str| name.starts_with(**it) || (it.starts_with('[') && name.contains(**it));
            match expected.iter().find(is_meant) {
                Some(reason) => drop(unused.insert(reason, false)),
                None => unexplained.push(name),
            }
        }
        assert_eq!(unexplained, [""; 0], "skipped without a reason that we know");
        let unused: Vec<&str> = unused.into_iter().filter(|it| it.1).map(|it| it.0).collect();
        assert_eq!(unused, [""; 0], "no longer skipped; the list is out of date");
    }

    fn in_state(&self, state: &'static str) -> impl Iterator<Item = &Spec> {
        self.specs.iter().filter(move |it| it.state == state)
    }
}
