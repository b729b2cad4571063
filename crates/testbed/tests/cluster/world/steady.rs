//! A Pod that reads, lists, creates and appends all the time, and what it saw.

use std::fmt::Write as _;
use std::io::Write as _;

use s3csi_testbed::cluster::ClusterHost;
use s3csi_testbed::steady_reader::ReaderReport;
use s3csi_testbed::steady_script::{self, APPENDED, SEED, SteadyAccess, created, steady_script};

use super::{CLUSTER, Volume, Workload, eventually};

/// Enough for sixteen bytes in each round of the longest test.
const SEED_LINES: usize = 20_000;

/// How many rounds prove that the workload goes on.
const ROUNDS: u64 = 5;

pub struct SteadyWorkload {
    pub workload: Workload,
    bucket: String,
    /// The line of the container's mount table: its device must not change.
    mount: String,
}

impl SteadyWorkload {
    /// A volume and a Pod of the same name on a node; returns when the Pod has done some rounds.
    #[track_caller]
    pub fn start(volume: &Volume<'_>, place: ClusterHost) -> Self {
        volume.create();
        CLUSTER.put_object(volume.name, SEED, &seed()).unwrap();
        Self::of(Workload::new(volume.name, volume.name).on(place), volume.name, SteadyAccess::CreateAndAppend)
    }

    /// A Pod of its own name for a volume that exists.
    #[track_caller]
    pub fn of(workload: Workload, bucket: &str, access: SteadyAccess) -> Self {
        let workload = workload.script(&steady_script("/data", access)).start();
        let mut steady = Self { workload, bucket: bucket.to_owned(), mount: String::new() };
        steady.mount = steady.mount_in_container();
        steady.wait_until_it_goes_on();
        steady
    }

    #[track_caller]
    pub fn report(&self) -> ReaderReport {
        let mut found = None;
        eventually(&format!("{} has done a round", self.workload.name), || {
            let printed = self.workload.try_to_run(steady_script::SHOW_REPORT).unwrap_or_default();
            found = ReaderReport::parse(&printed);
            found.is_some()
        });
        found.unwrap_or_default()
    }

    #[track_caller]
    pub fn wait_until_it_goes_on(&self) {
        let before = self.report().rounds;
        eventually(&format!("{} goes on", self.workload.name), || before + ROUNDS <= self.report().rounds);
    }

    /// It went on since, on the same mount, and has never seen an error.
    #[track_caller]
    pub fn check_undisturbed(&self, by: &str) {
        self.check_same_mount(by);
        assert_eq!(self.report().errors, Vec::<String>::new(), "{} during {by}", self.workload.name);
    }

    /// It went on since, on the same mount.
    #[track_caller]
    pub fn check_same_mount(&self, by: &str) {
        self.wait_until_it_goes_on();
        let ReaderReport { rounds, longest, errors } = self.report();
        let name = &self.workload.name;
        // Past the capturing of the test harness: these are figures for people.
        let _ = writeln!(
            std::io::stderr(),
            "{name}: {by}: {rounds} rounds, the longest took {longest:?}, {} errors",
            errors.len()
        );
        assert_eq!(self.mount_in_container(), self.mount, "{name} has the same mount after {by}");
    }

    /// Ends the workload. All that it has written is stored, and was read right through its open file.
    #[track_caller]
    pub fn finish(self) {
        self.workload.run(steady_script::STOP);
        let ReaderReport { rounds, errors, .. } = self.report();
        let held = self.workload.run(steady_script::SHOW_HELD);
        assert!(!held.is_empty() && seed().starts_with(&held), "{} read other bytes", self.workload.name);
        self.workload.delete();
        assert_eq!(errors, Vec::<String>::new(), "{}", self.workload.name);
        let object = |key: &str| CLUSTER.object(&self.bucket, key).map(|it| String::from_utf8(it).unwrap());
        let lost: Vec<u64> =
            (1..=rounds).filter(|it| object(&created(*it)).as_deref() != Some(format!("{it}\n").as_str())).collect();
        assert_eq!(lost, Vec::<u64>::new(), "of {rounds} rounds of {}", self.workload.name);
        let appended: String = (1..=rounds).fold(String::new(), |mut text, it| {
            let _ = writeln!(text, "{it}");
            text
        });
        assert_eq!(object(APPENDED), Some(appended), "{}", self.workload.name);
    }

    fn mount_in_container(&self) -> String {
        self.workload.run("grep ' /data ' /proc/self/mountinfo")
    }
}

pub fn seed() -> String {
    (0..SEED_LINES).fold(String::new(), |mut text, it| {
        let _ = writeln!(text, "line {it}");
        text
    })
}
