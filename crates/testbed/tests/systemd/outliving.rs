//! A mount outlives its unit: when the supervisor or all processes of a unit are killed, systemd starts the unit again with the
//! descriptors that it kept, and applications see a pause.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Signal, kill_process};
use s3csi_s3_server::store::Store as _;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::steady_reader::SteadyReader;
use s3csi_testbed::systemd::{beside_systemd, journal, systemctl};
use s3csi_testbed::wait::wait_for;
use s3csi_testbed::world::device;

use crate::world::{BUCKET, World, mount_units, only_unit, volume};

/// So that a test can read the plugin's figures.
const HEALTH: [&str; 2] = ["--health-address", "127.0.0.1:0"];

/// Far more than are needed: most of them find no process.
const MOST_KILLS: usize = 3000;

/// Creates small files one after the other and notes every error. A process of its own: one with an open file in a mount that is not
/// served cannot start others.
struct SteadyWriter {
    process: Child,
    errors: PathBuf,
    written: PathBuf,
}

impl SteadyWriter {
    fn start(directory: &Path, files: &Path) -> Self {
        let (errors, written) = (files.join("writer-errors"), files.join("written"));
        let script = "number=0
            while IFS= read -r -t 0.01 _ || [ $? -gt 128 ]; do
              number=$((number + 1))
              { printf 'content %s' $number >\"$1/small-$number\"; } 2>>\"$2\" || echo \"$number failed\" >>\"$2\"
              echo $number >\"$3\"
            done";
        let mut command = Command::new("bash");
        command.args(["-c", script, "writer"]).args([directory, &errors, &written]);
        let process = command.stdin(Stdio::piped()).spawn().unwrap();
        let writer = Self { process, errors, written };
        writer.wait_for_files(3);
        writer
    }

    fn count(&self) -> usize {
        fs::read_to_string(&self.written).ok().and_then(|it| it.trim().parse().ok()).unwrap_or_default()
    }

    #[track_caller]
    fn wait_for_files(&self, more: usize) {
        let until = self.count() + more;
        wait_for("the writer gets on", || self.count() >= until);
    }

    /// Ends the writer, which must not have seen an error. Returns how many files it has written.
    #[track_caller]
    fn finish_without_errors(mut self) -> usize {
        drop(self.process.stdin.take());
        wait_for("the writer ends", || matches!(self.process.try_wait(), Ok(Some(_))));
        assert_eq!(fs::read_to_string(&self.errors).unwrap_or_default(), "");
        self.count()
    }
}

fn property(unit: &str, name: &str) -> String {
    systemctl(&["show", &format!("--property={name}"), "--value", unit]).trim().to_owned()
}

#[track_caller]
fn wait_for_restarts(unit: &str, count: u64) {
    wait_for("systemd has started the unit again", || {
        property(unit, "NRestarts") == count.to_string() && property(unit, "ActiveState") == "active"
    });
}

const KILLS: u64 = 3;

/// Kills three times while a reader and a writer work. The node counts at least so many pauses: it misses those that systemd
/// reports while the connection to it is lost.
#[track_caller]
fn check_pause(name: &str, least_counted: u64, kill: impl Fn(&World<'_>, &str)) {
    let fixture = Fixture::new(name);
    let mut world = World::prepare_beside_systemd(&fixture);
    world.start_node_with(&HEALTH);
    world.store.put_object(BUCKET, "read", b"content").unwrap();
    let target = world.publish(&volume(1));
    let (unit, mount) = (only_unit(), device(&target));
    assert_eq!(property(&unit, "NFileDescriptorStore"), "2");
    let reader = SteadyReader::start(&target, "read", b"content");
    let writer = SteadyWriter::start(&target, fixture.directory());
    for round in 1..=KILLS {
        let before = world.engine();
        kill(&world, &unit);
        wait_for_restarts(&unit, round);
        assert_ne!(world.engine(), before);
        reader.wait_for_rounds(3);
        writer.wait_for_files(3);
    }
    let report = reader.finish_without_errors();
    println!("{name}: longest pause {:?} in {} rounds", report.longest, report.rounds);
    let count = writer.finish_without_errors();
    for number in 1..=count {
        let stored = world.store.object(BUCKET, &format!("small-{number}"));
        assert_eq!(stored.as_deref(), Some(format!("content {number}").as_bytes()), "file {number} of {count}");
    }
    assert_eq!((only_unit(), device(&target)), (unit.clone(), mount));
    // Kubelet repeats its calls; nothing happens.
    world.publish(&volume(1));
    assert_eq!((only_unit(), device(&target)), (unit, mount));
    assert!(!world.node().log_contains("EngineRemounted"));
    let counted = || world.figure("s3csi_engine_stall_seconds_count");
    wait_for("the node counts the pauses", || counted() >= least_counted);
    assert!(counted() <= KILLS, "{} pauses were counted", counted());
    assert_eq!(world.figure("s3csi_engine_deaths_total"), 0);
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn a_killed_supervisor_is_a_pause() {
    beside_systemd(|| {
        check_pause("systemd-supervisor", KILLS, |world, _| kill_process(world.engine(), Signal::KILL).unwrap());
    });
}

#[test]
fn a_killed_unit_is_a_pause() {
    beside_systemd(|| {
        check_pause("systemd-unit", KILLS, |_, unit| drop(systemctl(&["kill", "--signal=KILL", unit])));
    });
}

#[test]
fn a_unit_outlives_a_reloaded_and_a_reexecuted_systemd() {
    beside_systemd(|| {
        check_pause("systemd-reexecuted", 0, |_, unit| {
            systemctl(&["daemon-reload"]);
            systemctl(&["daemon-reexec"]);
            systemctl(&["kill", "--signal=KILL", unit]);
        });
    });
}

#[test]
fn a_unit_that_is_killed_together_with_the_node_plugin_is_a_pause() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-both");
        let mut world = World::start_beside_systemd(&fixture);
        world.store.put_object(BUCKET, "read", b"content").unwrap();
        let target = world.publish(&volume(1));
        let (unit, mount) = (only_unit(), device(&target));
        let reader = SteadyReader::start(&target, "read", b"content");
        world.kill_node();
        systemctl(&["kill", "--signal=KILL", &unit]);
        world.start_node();
        world.publish(&volume(1));
        reader.wait_for_rounds(3);
        reader.finish_without_errors();
        assert_eq!((only_unit(), device(&target)), (unit, mount));
        world.unpublish(&volume(1));
        world.check_nothing_left();
    });
}

#[test]
fn a_volume_is_unpublished_while_its_unit_is_restarted() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-unpublished");
        let world = World::start_beside_systemd(&fixture);
        for signal in ["KILL", "TERM"] {
            let target = world.publish(&volume(1));
            systemctl(&["kill", &format!("--signal={signal}"), &only_unit()]);
            world.unpublish(&volume(1));
            assert!(!target.exists());
            world.check_nothing_left();
        }
    });
}

#[test]
fn a_unit_that_is_stopped_ends_and_stays_ended() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-stopped");
        let world = World::start_beside_systemd(&fixture);
        let target = world.publish(&volume(1));
        let unit = only_unit();
        systemctl(&["stop", &unit]);
        assert_eq!((mount_units(), world.mounts(), world.engines()), (vec![], vec![], vec![]));
        assert!(journal().contains(&format!("{unit}: Deactivated successfully")), "{}", journal());
        world.publish(&volume(1));
        world.check_serves(&target);
        world.unpublish(&volume(1));
        world.check_nothing_left();
    });
}

#[test]
fn a_unit_that_is_killed_too_often_fails_and_the_target_is_mounted_again() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-limit");
        let world = World::start_beside_systemd(&fixture);
        world.store.put_object(BUCKET, "read", b"content").unwrap();
        let target = world.publish(&volume(1));
        let unit = only_unit();
        let open = File::open(target.join("read")).unwrap();
        let mut kills = 0;
        while mount_units() == [unit.as_str()] {
            // It may end between the two commands.
            let _ = Command::new("systemctl").args(["kill", "--signal=KILL", &unit]).output().unwrap();
            kills += 1;
            assert!(kills < MOST_KILLS, "{}", journal());
        }
        let error = open.read_exact_at(&mut [0; 7], 0).unwrap_err();
        println!("ended after {kills} kills: {error}");
        drop(open);
        world.node().wait_for_log("EngineRemounted");
        world.publish(&volume(1));
        world.check_serves(&target);
        assert_ne!(only_unit(), unit);
        world.unpublish(&volume(1));
        world.check_nothing_left();
    });
}
