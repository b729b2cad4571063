//! Runs what was asked for, and keeps the results.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use s3csi_s3_server::Transport;
use s3csi_s3_server::store::Store as _;

use super::file_systems::{ComparedFileSystem, ComparedMount};
use super::pjdfstest;
use super::results::{CompatibilityResults, GROUPS, ProgramGroup, unexplained};
use crate::environment::product;
use crate::fixture::Fixture;
use crate::peers::{rclone_version, s3fs_version};
use crate::programs::{STRESSOR_PREFIX, STRESSORS, ScriptEnd, run as run_script};
use crate::versitygw::Versitygw;

const BUCKET: &str = "compatibility";
/// Many times what the slowest program needs, which makes a thousand files: it hangs.
const PROGRAM_LIMIT: Duration = Duration::from_mins(10);
/// A line on a terminal.
const LONGEST_MESSAGE: usize = 160;

/// Which parts of a run are wanted.
pub struct Selection {
    /// A part of the name of a group, a program, or `pjdfstest`; none for everything.
    pub only: Option<String>,
}

impl Selection {
    fn selects(&self, names: &[&str]) -> bool {
        self.only.as_deref().is_none_or(|only| names.iter().any(|it| it.contains(only)))
    }
}

/// Runs the programs on all file systems and pjdfstest on ours, and adds the results to those in the file. Fails for results that
/// have no reason.
pub fn run(selection: &Selection, file: &Path) -> anyhow::Result<CompatibilityResults> {
    let mut results = match fs::read_to_string(file) {
        Ok(text) => serde_json::from_str(&text).with_context(|| format!("{} is damaged; remove it", file.display()))?,
        Err(_) => CompatibilityResults::default(),
    };
    let all = GROUPS.iter().flat_map(ProgramGroup::programs).map(|it| it.0);
    let names: std::collections::BTreeSet<&str> = all.collect();
    results.programs.retain(|name, _| names.contains(name.as_str()));
    results.versions = [machine_version("mount-s3")?, s3fs_version()?, rclone_version()?].join(", ");
    check_stressors()?;

    let fixture = Fixture::prepare("compatibility")?;
    let store = Versitygw::start(&fixture, Transport::Plain)?;
    store.create_bucket(BUCKET, store.account())?;
    let host = Comparison { fixture: &fixture, store: &store, selection };
    for file_system in [ComparedFileSystem::LocalDisk].into_iter().chain(ComparedFileSystem::ON_PAGE) {
        host.run_programs(file_system, &mut results)?;
        save(&results, file)?;
    }
    if selection.selects(&["pjdfstest"]) {
        host.run_pjdfstest(&mut results)?;
        save(&results, file)?;
    }
    drop(store);
    fixture.finish()?;
    Ok(results)
}

/// Says what is wrong with the results.
pub fn check(results: &CompatibilityResults) -> anyhow::Result<()> {
    let problems = unexplained(results);
    ensure!(
        problems.is_empty(),
        "{} results of {} do not agree with crates/testbed/src/compatibility/reasons.rs:\n{}",
        problems.len(),
        results.versions,
        problems.join("\n")
    );
    Ok(())
}

fn save(results: &CompatibilityResults, file: &Path) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(results)?;
    fs::write(file, text).with_context(|| format!("failed to write {}", file.display()))
}

fn machine_version(name: &str) -> anyhow::Result<String> {
    let output = Command::new(product(name)?).arg("--version").output().context("the engine does not start")?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Another version of stress-ng has other stressors, about which nothing is known.
fn check_stressors() -> anyhow::Result<()> {
    let output = Command::new("stress-ng")
        .args(["--class", "filesystem?"])
        .output()
        .context("stress-ng does not start; run: scripts/compatibility.sh")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    let listed = text.split_once("stressors:").map(|it| it.1).unwrap_or_default();
    let unknown: Vec<&str> = listed
        .split_whitespace()
        .filter(|it| STRESSORS.iter().all(|known| known.0.strip_prefix(STRESSOR_PREFIX) != Some(*it)))
        .collect();
    ensure!(!listed.is_empty(), "stress-ng lists no stressors: {text}");
    ensure!(unknown.is_empty(), "programs/stressors.rs does not say whether these stressors apply: {unknown:?}");
    Ok(())
}

struct Comparison<'a> {
    fixture: &'a Fixture,
    store: &'a Versitygw,
    selection: &'a Selection,
}

impl Comparison<'_> {
    fn run_programs(&self, file_system: ComparedFileSystem, results: &mut CompatibilityResults) -> anyhow::Result<()> {
        let is_control = file_system == ComparedFileSystem::LocalDisk;
        let mut mounts = 0;
        let mut mounted = self.mount(file_system, &mut mounts)?;
        let mut number = 0;
        let mut failed = 0;
        for group in GROUPS.iter().filter(|it| is_control || it.file_systems.contains(&file_system)) {
            for (name, script) in group.programs() {
                if !self.selection.selects(&[group.title, name]) {
                    continue;
                }
                number += 1;
                let end = self.run_program(&mounted, file_system, number, &script)?;
                if end != ScriptEnd::Succeeded && !mounted.is_alive() {
                    mounted.discard();
                    mounted = self.mount(file_system, &mut mounts)?;
                }
                let error = message(&end);
                if let Some(error) = &error {
                    failed += 1;
                    println!("{}: {name}: {error}", file_system.title());
                }
                if is_control {
                    ensure!(error.is_none(), "{name:?} fails on a local disk, so its script is wrong");
                } else {
                    let found = results.programs.entry(name.to_owned()).or_default();
                    found.insert(file_system.word().to_owned(), error);
                }
            }
        }
        println!("{}: {} of {number} programs work", file_system.title(), number - failed);
        mounted.stop()
    }

    fn mount(&self, file_system: ComparedFileSystem, mounts: &mut usize) -> anyhow::Result<ComparedMount<'_>> {
        *mounts += 1;
        ComparedMount::start(file_system, self.fixture, self.store, BUCKET, *mounts)
    }

    fn run_program(
        &self,
        mounted: &ComparedMount<'_>,
        file_system: ComparedFileSystem,
        number: usize,
        script: &str,
    ) -> anyhow::Result<ScriptEnd> {
        let name = format!("{}-{number}", file_system.word());
        let outside = self.fixture.create_directory(&format!("outside/{name}"));
        // A process of its own makes the directory: only that can be ended if the file system hangs.
        let made = run_script(&format!("mkdir {name}"), &mounted.directory, &outside, PROGRAM_LIMIT)?;
        if made != ScriptEnd::Succeeded {
            return Ok(made);
        }
        let end = run_script(script, &mounted.directory.join(&name), &outside, PROGRAM_LIMIT)?;
        let _ = fs::remove_dir_all(&outside);
        Ok(end)
    }

    fn run_pjdfstest(&self, results: &mut CompatibilityResults) -> anyhow::Result<()> {
        let mut mounts = 1000;
        let mounted = self.mount(ComparedFileSystem::Default, &mut mounts)?;
        let cases = pjdfstest::run(self.fixture, &mounted.directory, |_| true);
        mounted.stop()?;
        results.cases = cases?;
        if results.cases.is_empty() {
            bail!("pjdfstest has run no case");
        }
        Ok(())
    }
}

/// None for a success, or what a person may want to read of the failure.
fn message(end: &ScriptEnd) -> Option<String> {
    match end {
        ScriptEnd::Succeeded => None,
        ScriptEnd::TimedOut => Some(format!("did not end within {PROGRAM_LIMIT:?}")),
        ScriptEnd::Failed { errors } => {
            let line = errors.lines().map(str::trim).rfind(|it| !it.is_empty()).unwrap_or("wrong result");
            Some(line.chars().take(LONGEST_MESSAGE).collect())
        }
    }
}
