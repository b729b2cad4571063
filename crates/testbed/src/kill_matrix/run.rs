//! Runs a row of the matrix: all workloads at once on real mounts, while a part is ended again and again.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use s3csi_s3_server::store::Store;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use tonic::Status;

use super::disrupt::{MatrixWorld, disrupt};
use super::page::{self, RowFilter, row_name};
use super::work::{self, DIRECTORY, LISTED, READ, WorkResult, WorkRound};
use super::{Disruption, Expectation, MatrixStrategy, MatrixWorkload, Victim, measured_rows};
use crate::environment::{self, product};
use crate::fixture::Fixture;
use crate::wait::{SOON, wait_for, wait_for_some, wait_until};

/// How often a part is ended in a whole run. systemd starts a unit ten times in a minute.
const WHOLE_TIMES: u32 = 3;

/// Rounds that each workload ends between two disruptions: the one that it is in, and a whole one.
const ROUNDS: usize = 2;

/// Pods of the volume: three that share it, one that reads only, and for each round one that comes and one that goes.
const SHARING: [u32; 3] = [1, 2, 3];
const READ_ONLY: u32 = 4;
const PUBLISHED: u32 = 10;
const UNPUBLISHED: u32 = 20;
/// After all of it.
const LAST: u32 = 30;

/// Which row is run, and how often.
#[derive(Clone, Copy, Debug)]
pub struct RowPlan {
    pub strategy: MatrixStrategy,
    pub victim: Victim,
    pub disruption: Disruption,
    pub expectation: Expectation,
    pub times: u32,
}

/// What the application of one cell saw.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CellResult {
    pub median_ms: u64,
    pub longest_ms: u64,
    pub errors: u64,
    pub first_error: Option<String>,
}

/// Numbers of all Pods that a row may publish for.
pub fn pods(times: u32) -> Vec<u32> {
    let rounds = 0..times;
    let come_and_go = rounds.flat_map(|it| [PUBLISHED + it, UNPUBLISHED + it]);
    SHARING.into_iter().chain([READ_ONLY, LAST]).chain(come_and_go).collect()
}

/// Runs the rows of a strategy, each in a fixture of its own: few in every run; all of them, or those that were asked for, in
/// `make kill-matrix`, which also keeps the results. A row that fails does not keep the others from being run.
#[track_caller]
pub fn run_matrix(strategy: MatrixStrategy, run: impl Fn(&Fixture, RowPlan) -> BTreeMap<String, CellResult>) {
    let results = environment::kill_matrix_results();
    let wanted = environment::kill_matrix_rows().map(|it| RowFilter::parse(&it).unwrap());
    let times = if results.is_some() { WHOLE_TIMES } else { 1 };
    let mut failed = Vec::new();
    for (victim, disruption, expectation) in measured_rows(strategy, results.is_some()) {
        let name = row_name(strategy, victim, disruption);
        if wanted.as_ref().is_some_and(|it| !it.accepts(&name)) {
            continue;
        }
        let begun = Instant::now();
        let row = || {
            let fixture = Fixture::new(&format!("matrix-{}-{victim:?}-{disruption:?}", strategy.name()));
            run(&fixture, RowPlan { strategy, victim, disruption, expectation, times })
        };
        let Ok(found) = catch_unwind(AssertUnwindSafe(row)) else {
            if let Some(directory) = &results {
                page::keep(directory, &name, &BTreeMap::new()).unwrap();
            }
            failed.push(name);
            continue;
        };
        println!("{name}: {:.1} s", begun.elapsed().as_secs_f32());
        for (workload, result) in &found {
            println!("  {workload}: {} {}", result.text(), result.first_error.as_deref().unwrap_or_default());
        }
        if let Some(directory) = &results {
            page::keep(directory, &name, &found).unwrap();
        }
    }
    assert!(failed.is_empty(), "these rows failed; each has its own message above: {failed:?}");
}

/// Runs all cells of a row. Panics if an application sees what it must not see, or something is lost or left.
#[track_caller]
pub fn run_row(world: &mut dyn MatrixWorld<'_>, fixture: &Fixture, plan: RowPlan) -> BTreeMap<String, CellResult> {
    let bucket = world.volume(SHARING[0]).bucket;
    seed(world.store(), &bucket);
    let targets = publish_all(world, plan);
    let sub_path = bind(&targets[0].join(DIRECTORY), &fixture.create_directory("sub-path"));
    let device = fs::metadata(&targets[0]).unwrap().dev();
    let workers = start_workers(plan.strategy, &targets, &sub_path);
    let mut begun = Vec::new();
    let (mut publishing, mut unpublishing) = (CellSamples::default(), CellSamples::default());
    for round in 0..plan.times {
        begun.push(now());
        let (came, went) = (world.volume(PUBLISHED + round), world.volume(UNPUBLISHED + round));
        let clock = Instant::now();
        let publish = world.test_node().publish_in_background(&came);
        let unpublish = world.test_node().unpublish_in_background(&went);
        disrupt(world, plan.victim, plan.disruption);
        // kubelet repeats what failed.
        let node = world.test_node();
        let first = node.runtime.block_on(publish).unwrap().map(drop);
        publishing.pauses.push(repeat(clock, first, || node.try_publish(&came).map(drop)));
        let first = node.runtime.block_on(unpublish).unwrap();
        unpublishing.pauses.push(repeat(clock, first, || node.try_unpublish(&went)));
        if plan.expectation == Expectation::Lost {
            for pod in SHARING {
                repeat(clock, node.try_publish(&world.volume(pod)).map(drop), || {
                    node.try_publish(&world.volume(pod)).map(drop)
                });
            }
        }
        wait_for_rounds(&workers, ROUNDS);
    }
    if plan.expectation == Expectation::StoreErrors {
        for worker in &workers {
            wait_for("the workload goes on", || worker.has_ended() || worker.last_is_good());
        }
    }
    let mut samples =
        BTreeMap::from([(MatrixWorkload::Publishing, publishing), (MatrixWorkload::Unpublishing, unpublishing)]);
    for worker in workers {
        let (workload, rounds) = worker.finish();
        check_stored(world.store(), &bucket, &rounds);
        samples.entry(workload).or_default().add(&rounds, &begun);
    }
    let results: BTreeMap<_, _> = samples.into_iter().map(|(workload, it)| (workload, it.result())).collect();
    for (workload, result) in &results {
        check(plan, *workload, result);
    }
    if plan.expectation != Expectation::Lost {
        assert_eq!(fs::metadata(&targets[0]).unwrap().dev(), device, "{plan:?}: it is the same mount");
    }
    finish(world, plan, &sub_path);
    results.into_iter().map(|(workload, it)| (workload.name().to_owned(), it)).collect()
}

/// Those who come later find a volume that works, and nothing is left when all are gone.
#[track_caller]
fn finish(world: &mut dyn MatrixWorld<'_>, plan: RowPlan, sub_path: &Path) {
    let last = world.volume(LAST);
    let target = world.test_node().publish(&last);
    assert!(fs::read(target.join(READ)).unwrap() == work::read_content(), "{plan:?}: other bytes");
    run("umount", &["--lazy"], &[sub_path]);
    let mut pods = vec![READ_ONLY, LAST];
    pods.extend(SHARING.iter().filter(|_| plan.strategy != MatrixStrategy::Systemd));
    if plan.strategy == MatrixStrategy::Systemd {
        pods.push(SHARING[0]);
    }
    pods.extend((0..plan.times).map(|it| PUBLISHED + it));
    for pod in pods {
        world.test_node().unpublish(&world.volume(pod));
    }
    world.check_nothing_left();
}

fn seed(store: &dyn Store, bucket: &str) {
    let content = work::read_content();
    store.put_object(bucket, READ, &content).unwrap();
    store.put_object(bucket, &format!("{DIRECTORY}/{READ}"), &content).unwrap();
    for number in 0..LISTED {
        store.put_object(bucket, &format!("{DIRECTORY}/file-{number}"), b"x").unwrap();
    }
}

/// The targets of those that share the volume, and of the one that reads only.
#[track_caller]
fn publish_all(world: &dyn MatrixWorld<'_>, plan: RowPlan) -> Vec<PathBuf> {
    let is_shared = plan.strategy != MatrixStrategy::Systemd;
    let sharing = SHARING.iter().filter(|it| is_shared || **it == SHARING[0]);
    let mut targets: Vec<PathBuf> = sharing.map(|it| world.test_node().publish(&world.volume(*it))).collect();
    let mut read_only = world.volume(READ_ONLY);
    read_only.is_read_only = true;
    targets.push(world.test_node().publish(&read_only));
    for round in 0..plan.times {
        world.test_node().publish(&world.volume(UNPUBLISHED + round));
    }
    targets
}

fn start_workers(strategy: MatrixStrategy, targets: &[PathBuf], sub_path: &Path) -> Vec<Worker> {
    let mut workers = Vec::new();
    for workload in MatrixWorkload::ALL {
        let directories: Vec<&Path> = match workload {
            MatrixWorkload::Publishing | MatrixWorkload::Unpublishing => Vec::new(),
            _ if workload.missing(strategy).is_some() => Vec::new(),
            MatrixWorkload::Shared => targets[..SHARING.len()].iter().map(PathBuf::as_path).collect(),
            MatrixWorkload::ReadOnly => targets.last().map(PathBuf::as_path).into_iter().collect(),
            MatrixWorkload::SubPath => vec![sub_path],
            _ => vec![&targets[0]],
        };
        workers.extend(directories.into_iter().map(|it| Worker::start(workload, it)));
    }
    workers
}

/// kubelet's subPath: a bind mount of a directory of the volume.
fn bind(directory: &Path, at: &Path) -> PathBuf {
    run("mount", &["--bind"], &[directory, at]);
    at.to_owned()
}

#[track_caller]
fn run(program: &str, arguments: &[&str], paths: &[&Path]) {
    let output = Command::new(program).args(arguments).args(paths).output().unwrap();
    assert!(output.status.success(), "{program} {paths:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Repeats a call until it succeeds. Returns how long that took from the beginning.
#[track_caller]
fn repeat(clock: Instant, first: Result<(), Status>, call: impl Fn() -> Result<(), Status>) -> Duration {
    if let Err(status) = first {
        let mut last = status;
        let outcome = wait_for_some(Instant::now() + SOON, || call().map_err(|it| last = it).ok());
        assert!(outcome.is_some(), "the call fails: {last}");
    }
    clock.elapsed()
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[track_caller]
fn wait_for_rounds(workers: &[Worker], count: usize) {
    let until: Vec<usize> = workers.iter().map(|it| it.rounds().len() + count).collect();
    for (worker, until) in workers.iter().zip(until) {
        let is_done =
            || worker.workload == MatrixWorkload::Idle || worker.has_ended() || worker.rounds().len() >= until;
        let is_in_time = wait_until(Instant::now() + SOON, is_done);
        assert!(is_in_time, "{} hangs: {:?}", worker.workload.name(), worker.rounds().last());
    }
}

/// What was stored without an error is in the bucket as a whole; of what was not, either nothing or the whole is.
#[track_caller]
fn check_stored(store: &dyn Store, bucket: &str, rounds: &[WorkRound]) {
    let mut allowed: BTreeMap<&str, (Option<u64>, Vec<u64>)> = BTreeMap::new();
    for round in rounds {
        match &round.result {
            WorkResult::Stored { key, seed } => *allowed.entry(key).or_default() = (Some(*seed), Vec::new()),
            WorkResult::NotStored { key, seed, .. } => allowed.entry(key).or_default().1.push(*seed),
            WorkResult::Good | WorkResult::Failed(_) => {}
        }
    }
    for (key, (stored, failed)) in allowed {
        let is_big = key.starts_with("big");
        let found = store.object(bucket, key);
        let is_of = |seed: &u64| found.as_deref() == Some(work::written_content(*seed, is_big).as_slice());
        let is_absent = stored.is_none() && found.as_deref().is_none_or(<[u8]>::is_empty);
        let length = found.as_ref().map(bytes::Bytes::len);
        assert!(
            is_absent || stored.iter().chain(&failed).any(is_of),
            "{key} has {length:?} bytes; stored {stored:?}, failed {failed:?}"
        );
    }
}

#[track_caller]
fn check(plan: RowPlan, workload: MatrixWorkload, result: &CellResult) {
    let may_fail = match plan.expectation {
        Expectation::Pause => false,
        Expectation::WriterError => workload == MatrixWorkload::WritingBig,
        Expectation::StoreErrors | Expectation::Lost => true,
    };
    assert!(may_fail || result.errors == 0, "{plan:?}: {}: {result:?}", workload.name());
}

/// Samples of one cell.
#[derive(Default)]
struct CellSamples {
    pauses: Vec<Duration>,
    errors: Vec<String>,
}

impl CellSamples {
    /// The longest round after each disruption, and all errors.
    fn add(&mut self, rounds: &[WorkRound], begun: &[Duration]) {
        for (number, from) in begun.iter().enumerate() {
            let until = begun.get(number + 1);
            let is_meant = |it: &&WorkRound| *from < it.begun + it.took && until.is_none_or(|until| it.begun < *until);
            self.pauses.extend(rounds.iter().filter(is_meant).map(|it| it.took).max());
        }
        self.errors.extend(rounds.iter().filter_map(|it| it.error().map(str::to_owned)));
    }

    fn result(mut self) -> CellResult {
        self.pauses.sort();
        let milliseconds = |it: Option<&Duration>| it.map_or(0, |it| u64::try_from(it.as_millis()).unwrap_or(u64::MAX));
        CellResult {
            median_ms: milliseconds(self.pauses.get(self.pauses.len() / 2)),
            longest_ms: milliseconds(self.pauses.last()),
            errors: self.errors.len() as u64,
            first_error: self.errors.into_iter().next(),
        }
    }
}

/// A workload that runs.
struct Worker {
    workload: MatrixWorkload,
    process: std::sync::Mutex<Child>,
    files: TempDir,
}

impl Worker {
    #[track_caller]
    fn start(workload: MatrixWorkload, directory: &Path) -> Self {
        let files = tempfile::tempdir().unwrap();
        fs::write(files.path().join("expected"), work::read_content()).unwrap();
        let program = product("s3csi-testbed").unwrap();
        let mut command = work::command(&program, workload, directory, files.path());
        let process = command.stdin(Stdio::piped()).spawn().unwrap();
        let worker = Self { workload, process: std::sync::Mutex::new(process), files };
        wait_for("the workload begins", || !worker.rounds().is_empty());
        worker
    }

    fn rounds(&self) -> Vec<WorkRound> {
        WorkRound::parse(&fs::read_to_string(self.files.path().join("rounds")).unwrap_or_default())
    }

    fn last_is_good(&self) -> bool {
        self.rounds().last().is_some_and(|it| it.error().is_none())
    }

    /// A page fault that cannot be served ends a process by SIGBUS.
    fn has_ended(&self) -> bool {
        let mut process = self.process.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        matches!(process.try_wait(), Ok(Some(_)))
    }

    #[track_caller]
    fn finish(self) -> (MatrixWorkload, Vec<WorkRound>) {
        let has_ended_early = self.has_ended();
        drop(self.process.lock().unwrap_or_else(std::sync::PoisonError::into_inner).stdin.take());
        wait_for("the workload ends", || self.has_ended());
        let mut rounds = self.rounds();
        if has_ended_early {
            let result = WorkResult::Failed("ended by SIGBUS".to_owned());
            rounds.push(WorkRound { begun: now(), took: Duration::ZERO, result });
        }
        (self.workload, rounds)
    }
}
