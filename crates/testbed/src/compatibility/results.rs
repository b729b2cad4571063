//! What a run found, and whether it is what it should be.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::file_systems::ComparedFileSystem;
use super::pjdfstest::CaseOutcome;
use super::reasons::{CASE_REASONS, PROGRAM_REASONS, reason_for_case};
use crate::programs::{FIO, GOING_BACK, LARGER, ORDINARY, REFUSED, STRESSORS, stressor_script};

/// A list of programs, and who runs it.
pub struct ProgramGroup {
    pub title: &'static str,
    pub file_systems: &'static [ComparedFileSystem],
    list: fn() -> Vec<(&'static str, String)>,
}

const OURS: &[ComparedFileSystem] = &[ComparedFileSystem::Default];

/// In the order of the page.
pub const GROUPS: &[ProgramGroup] = &[
    ProgramGroup { title: "Ordinary programs", file_systems: &ComparedFileSystem::ON_PAGE, list: || owned(ORDINARY) },
    ProgramGroup {
        title: "Writers that go back after more than 8 MiB",
        file_systems: &ComparedFileSystem::ON_PAGE,
        list: || owned(GOING_BACK),
    },
    ProgramGroup { title: "Larger programs", file_systems: &ComparedFileSystem::ON_PAGE, list: || owned(LARGER) },
    ProgramGroup {
        title: "What an object store does not offer",
        file_systems: &ComparedFileSystem::ON_PAGE,
        list: || REFUSED.iter().map(|(name, script, _)| (*name, (*script).to_owned())).collect(),
    },
    ProgramGroup { title: "fio with verification", file_systems: &ComparedFileSystem::ON_PAGE, list: || owned(FIO) },
    ProgramGroup {
        title: "Stressors of stress-ng",
        file_systems: OURS,
        list: || {
            let applicable = STRESSORS.iter().filter(|it| it.1.is_none());
            applicable.map(|(name, _)| (*name, stressor_script(name))).collect()
        },
    },
];

impl ProgramGroup {
    /// Name and script of each.
    pub fn programs(&self) -> Vec<(&'static str, String)> {
        (self.list)()
    }
}

fn owned(list: &[(&'static str, &'static str)]) -> Vec<(&'static str, String)> {
    list.iter().map(|(name, script)| (*name, (*script).to_owned())).collect()
}

/// The results of all runs so far; each run replaces what it measured.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompatibilityResults {
    /// Versions of the programs that were compared.
    pub versions: String,
    /// By the name of a program and the word of a file system: none if it works, or what it said.
    pub programs: BTreeMap<String, BTreeMap<String, Option<String>>>,
    /// By the name of a case.
    pub cases: BTreeMap<String, CaseOutcome>,
}

impl CompatibilityResults {
    pub fn works(&self, program: &str, file_system: ComparedFileSystem) -> Option<bool> {
        Some(self.programs.get(program)?.get(file_system.word())?.is_none())
    }

    /// Every case that failed, by its reason.
    pub fn failed_cases(&self) -> BTreeMap<&'static str, Vec<&str>> {
        let mut failed: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (name, _) in self.cases.iter().filter(|(_, outcome)| matches!(outcome, CaseOutcome::Failed(_))) {
            failed.entry(reason_for_case(name).unwrap_or("unknown")).or_default().push(name);
        }
        failed
    }
}

/// What is wrong with the results: failures of the engine without a reason, and reasons that explain nothing.
pub fn unexplained(results: &CompatibilityResults) -> Vec<String> {
    let mut problems = Vec::new();
    for (program, found) in &results.programs {
        let reason = PROGRAM_REASONS.iter().find(|it| it.0 == program);
        match (found.get(ComparedFileSystem::Default.word()), reason) {
            (Some(Some(error)), None) => problems.push(format!("{program:?} fails without a reason: {error}")),
            (Some(None), Some(_)) => problems.push(format!("{program:?} works, but there is a reason why it does not")),
            _ => {}
        }
    }
    for (name, outcome) in &results.cases {
        if let CaseOutcome::Failed(message) = outcome
            && reason_for_case(name).is_none()
        {
            problems.push(format!("case {name} of pjdfstest fails without a reason: {message}"));
        }
    }
    if !results.cases.is_empty() {
        let used: BTreeSet<&str> = results.failed_cases().into_keys().collect();
        let unused = CASE_REASONS.iter().filter(|it| !used.contains(it.reason));
        problems.extend(unused.map(|it| format!("no case of pjdfstest fails because: {}", it.reason)));
    }
    problems
}
