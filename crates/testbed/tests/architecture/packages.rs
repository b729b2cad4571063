//! Cargo's own view of the workspace: packages, what they depend on, their targets and licences.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;
use std::sync::LazyLock;

use serde_json::Value;

use crate::sources::workspace;

pub struct Packages {
    packages: BTreeMap<String, Package>,
    /// Package id to the ids it is built with; development and build dependencies are left out.
    edges: BTreeMap<String, Vec<String>>,
}

pub struct Package(Value);

/// Asked once for all rules.
pub fn all() -> &'static Packages {
    static PACKAGES: LazyLock<Packages> = LazyLock::new(Packages::load);
    &PACKAGES
}

impl Packages {
    fn load() -> Self {
        // Packages of other platforms were never downloaded and are never shipped.
        let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let output = Command::new(cargo)
            .args(["metadata", "--format-version=1", "--locked", "--offline", "--filter-platform", &platform])
            .current_dir(workspace())
            .output()
            .unwrap();
        assert!(output.status.success(), "cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr));
        let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();

        let edges =
            list(&metadata["resolve"]["nodes"]).map(|node| (text(&node["id"]), normal_dependencies(node))).collect();
        let packages = list(&metadata["packages"]).map(|it| (text(&it["id"]), Package(it.clone()))).collect();
        let mut all = Self { packages, edges };
        // Metadata also lists what only other platforms use; the resolved graph does not.
        all.packages.retain(|id, _| all.edges.contains_key(id));
        all
    }

    pub fn iter(&self) -> impl Iterator<Item = &Package> {
        self.packages.values()
    }

    /// Names of the packages that the named one itself asks for, without those for its tests.
    pub fn direct_dependencies(&self, name: &str) -> impl Iterator<Item = String> {
        self.edges[self.id(name)].iter().map(|id| self.packages[id].name())
    }

    /// Names of all packages that the named one is built with, itself excluded.
    pub fn dependency_tree(&self, name: &str) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        let mut waiting = vec![self.id(name)];
        while let Some(id) = waiting.pop() {
            for dependency in &self.edges[id] {
                if found.insert(self.packages[dependency].name()) {
                    waiting.push(dependency);
                }
            }
        }
        found
    }

    /// Root files of every target of ours: libraries, programs, tests.
    pub fn target_roots(&self) -> BTreeSet<String> {
        self.targets().map(root).collect()
    }

    /// Root files of our libraries and programs.
    pub fn shipped_roots(&self) -> BTreeSet<String> {
        self.targets().filter(|it| !is_test_program(it)).map(root).collect()
    }

    pub fn test_programs(&self) -> BTreeSet<String> {
        self.targets().filter(|it| is_test_program(it)).map(|it| text(&it["name"])).collect()
    }

    fn targets(&self) -> impl Iterator<Item = &Value> {
        self.iter().filter(|it| it.is_ours()).flat_map(|it| list(&it.0["targets"]))
    }

    fn id(&self, name: &str) -> &str {
        let found = self.packages.iter().find(|(_, it)| it.name() == name);
        let (id, _) = found.unwrap_or_else(|| panic!("the workspace has no package {name}"));
        id
    }
}

impl Package {
    pub fn is_ours(&self) -> bool {
        self.0["source"].is_null()
    }

    pub fn is_from_crates_io(&self) -> bool {
        self.0["source"] == "registry+https://github.com/rust-lang/crates.io-index"
    }

    pub fn name_and_version(&self) -> String {
        format!("{} {}", self.name(), text(&self.0["version"]))
    }

    pub fn licence(&self) -> &str {
        self.0["license"].as_str().unwrap_or("unknown")
    }

    pub fn is_allowed(&self, allowed: &BTreeSet<String>) -> bool {
        is_allowed(self.licence(), allowed)
    }

    fn name(&self) -> String {
        text(&self.0["name"])
    }
}

/// The quoted words of the `allow` list in the section `[licenses]` of deny.toml.
pub fn allowed_licences(deny: &str) -> BTreeSet<String> {
    let (_, section) = deny.split_once("[licenses]").unwrap();
    let (_, list) = section.split_once("allow = [").unwrap();
    let (list, _) = list.split_once("\n]").unwrap();
    let entries = list.lines().filter_map(|line| line.trim().strip_prefix('"')?.split_once('"'));
    entries.map(|(licence, _)| licence.to_owned()).collect()
}

/// Whether an SPDX expression can be fulfilled with allowed licences alone. The old spelling `A/B` means `A OR B`.
fn is_allowed(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ").replace(" WITH ", "_WITH_");
    let tokens: Vec<&str> = spaced.split_whitespace().collect();
    let mut position = 0;
    let is_allowed = any_of(&tokens, &mut position, allowed);
    assert_eq!(position, tokens.len(), "not a licence expression: {expression}");
    is_allowed
}

fn any_of(tokens: &[&str], position: &mut usize, allowed: &BTreeSet<String>) -> bool {
    let mut result = all_of(tokens, position, allowed);
    while tokens.get(*position) == Some(&"OR") {
        *position += 1;
        result |= all_of(tokens, position, allowed);
    }
    result
}

fn all_of(tokens: &[&str], position: &mut usize, allowed: &BTreeSet<String>) -> bool {
    let mut result = one(tokens, position, allowed);
    while tokens.get(*position) == Some(&"AND") {
        *position += 1;
        result &= one(tokens, position, allowed);
    }
    result
}

fn one(tokens: &[&str], position: &mut usize, allowed: &BTreeSet<String>) -> bool {
    let token = tokens.get(*position).copied().unwrap_or_default();
    *position += 1;
    if token != "(" {
        return allowed.contains(&token.replace("_WITH_", " WITH "));
    }
    let result = any_of(tokens, position, allowed);
    *position += 1;
    result
}

fn normal_dependencies(node: &Value) -> Vec<String> {
    let is_normal = |dependency: &&Value| list(&dependency["dep_kinds"]).any(|it| it["kind"].is_null());
    list(&node["deps"]).filter(is_normal).map(|it| text(&it["pkg"])).collect()
}

fn is_test_program(target: &Value) -> bool {
    list(&target["kind"]).any(|it| it == "test")
}

fn root(target: &Value) -> String {
    let path = text(&target["src_path"]);
    let root = format!("{}/", workspace().display());
    path.strip_prefix(&root).unwrap_or(&path).to_owned()
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}

mod tests {
    use super::*;

    #[track_caller]
    fn check(expression: &str, expected: bool) {
        let allowed = ["MIT", "Zlib", "Apache-2.0 WITH LLVM-exception"].map(String::from).into();
        assert_eq!(is_allowed(expression, &allowed), expected, "{expression}");
    }

    #[test]
    fn licence_expressions() {
        check("MIT", true);
        check("GPL-3.0", false);
        check("GPL-3.0 OR MIT", true);
        check("GPL-3.0/MIT", true);
        check("GPL-3.0 AND MIT", false);
        check("(GPL-3.0 OR MIT) AND Zlib", true);
        check("(GPL-3.0 OR MIT) AND ISC", false);
        check("Apache-2.0 WITH LLVM-exception OR ISC", true);
        check("Apache-2.0", false);
        check("unknown", false);
    }
}
