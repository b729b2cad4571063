//! The machine is shut down in order: units store what is being written while there is a network.

use std::fs;
use std::path::Path;
use std::process::{Child, Command};

use s3csi_s3_server::store::Store as _;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::systemd::{beside_systemd, journal, systemctl};
use s3csi_testbed::wait::wait_for;

use crate::world::{BUCKET, World, mount_units, only_unit, volume};

/// Where a unit file can be put that systemd finds.
const UNIT_FILES: &str = "/run/systemd/transient";

/// A shell that runs a script with arguments.
fn shell(script: &str, arguments: &[&Path]) -> Child {
    Command::new("bash").args(["-c", script, "shell"]).args(arguments).spawn().unwrap()
}

/// A network as systemd sees it: a service before `network.target`, which lists the running units when it is stopped.
fn start_network(running: &Path) {
    // systemd creates it for its first transient unit.
    fs::create_dir_all(UNIT_FILES).unwrap();
    fs::write(format!("{UNIT_FILES}/network.target"), "[Unit]\nDescription=Network\n").unwrap();
    let list = format!("ls /sys/fs/cgroup/system.slice >{0}.draft && mv {0}.draft {0}", running.display());
    let service = format!(
        "[Unit]\nBefore=network.target\n[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true\n\
         ExecStop=/bin/sh -c '{list}'\n"
    );
    fs::write(format!("{UNIT_FILES}/network-interfaces.service"), service).unwrap();
    systemctl(&["daemon-reload"]);
    systemctl(&["start", "network-interfaces.service", "network.target"]);
}

#[test]
fn a_shutdown_stores_what_is_being_written_before_the_network_ends() {
    const CHUNK: usize = 20 << 20;
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-shutdown");
        let world = World::start_beside_systemd(&fixture);
        let running = fixture.path("running");
        start_network(&running);
        world.store.put_object(BUCKET, "edited", b"one").unwrap();
        let target = world.publish(&volume(1).with_option("allow-overwrite"));
        let unit = only_unit();

        // A program that writes a large file, and one that does not close the file it has edited.
        let (wrote, finish) = (fixture.path("wrote"), fixture.path("finish"));
        let script = format!(
            "exec 3>\"$1\"; head --bytes {CHUNK} /dev/zero >&3; touch \"$2\"
             until [ -e \"$3\" ]; do sleep 0.05; done; head --bytes {CHUNK} /dev/zero >&3; exec 3>&-"
        );
        let mut writer = shell(&script, &[&target.join("large"), &wrote, &finish]);
        let edited = fixture.path("did-edit");
        let mut editor = shell(
            "exec 3>>\"$1\"; printf ' two' >&3; touch \"$2\"; while :; do sleep 0.1; done",
            &[&target.join("edited"), &edited],
        );
        wait_for("both have written", || wrote.exists() && edited.exists());
        assert_eq!(world.store.object(BUCKET, "large"), None);

        systemctl(&["start", "--no-block", "--job-mode=replace-irreversibly", "shutdown.target"]);
        wait_for("the unit is being stopped", || world.mounts().is_empty());
        assert!(!running.exists(), "the network ended first");
        fs::write(&finish, "").unwrap();
        assert!(writer.wait().unwrap().success());
        wait_for("the unit has ended", || mount_units().is_empty());
        assert!(journal().contains(&format!("{unit}: Deactivated successfully")), "{}", journal());
        assert_eq!(world.store.object(BUCKET, "large").map(|it| it.len()), Some(2 * CHUNK));
        assert_eq!(world.store.object(BUCKET, "edited").as_deref(), Some(b"one two".as_slice()));
        wait_for("the network ends", || running.exists());
        assert!(!fs::read_to_string(&running).unwrap().contains(&unit));

        editor.kill().unwrap();
        editor.wait().unwrap();
        world.unpublish(&volume(1));
        world.check_nothing_left();
    });
}
