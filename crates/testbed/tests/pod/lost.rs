//! Node plugin and mounter die at the same time, and the mount with them. Writes are refused until the volume is mounted again.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use s3csi_s3_server::store::Store as _;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::wait::wait_for;

use crate::world::{BUCKET, World};

/// A mount namespace with a copy of the volume's mount elsewhere, as a running container has it.
struct Container {
    process: Child,
    volume: PathBuf,
}

impl Container {
    /// `propagation` is `private`, or `slave` for `mountPropagation: HostToContainer`.
    fn start(fixture: &Fixture, target: &Path, propagation: &str) -> Self {
        let volume = fixture.create_directory(&format!("container-{propagation}"));
        let script =
            format!("mount --bind \"$1\" \"$2\" && mount --make-{propagation} \"$2\" && echo ready && read -r line");
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "slave", "sh", "-c", &script, "sh"]).arg(target).arg(&volume);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut ready = [0; 6];
        std::io::Read::read_exact(process.stdout.as_mut().unwrap(), &mut ready).unwrap();
        Self { process, volume }
    }

    fn run(&self, script: &str) -> Output {
        let namespace = format!("--mount=/proc/{}/ns/mnt", self.process.id());
        Command::new("nsenter").args([&namespace, "sh", "-c", script, "sh"]).arg(&self.volume).output().unwrap()
    }

    #[track_caller]
    fn check_works(&self) {
        let output = self.run("cat \"$1/kept\"");
        assert_eq!(output.stdout, b"x", "{output:?}");
    }

    #[track_caller]
    fn check_refuses(&self) {
        for script in ["cat \"$1/kept\"", "echo lost >\"$1/new\""] {
            let output = self.run(script);
            assert!(!output.status.success(), "{script}: {output:?}");
        }
    }

    fn end(mut self) {
        drop(self.process.stdin.take());
        self.process.wait().unwrap();
    }
}

#[track_caller]
fn mount(arguments: &[&str], path: &Path) {
    let output = Command::new("mount").args(arguments).arg(path).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn a_lost_mount_refuses_writes_until_it_is_mounted_again_and_the_event_names_what_to_restart() {
    let fixture = Fixture::new("lost");
    // As on a node, where kubelet's directory is on a shared mount.
    let shared = fixture.create_directory("kubelet");
    mount(&["--bind", shared.to_str().unwrap()], &shared);
    mount(&["--make-shared"], &shared);
    {
        let mut world = World::start(&fixture);
        let mut pod = world.serve(&[1]);
        let target = world.publish(&world.volume(1));
        fs::write(target.join("kept"), "x").unwrap();
        let (usual, propagated) =
            (Container::start(&fixture, &target, "private"), Container::start(&fixture, &target, "slave"));
        usual.check_works();
        propagated.check_works();

        let refused = |path: &Path| fs::write(path, "lost").unwrap_err();
        // The second time, the dead mount covers the first one.
        for after in ["after-1", "after-2"] {
            world.kill_node();
            world.kill_mounter(&pod);
            // The kernel aborts calls that wait while it ends the connection.
            let error = refused(&target.join("new")).kind();
            assert!(matches!(error, ErrorKind::NotConnected | ErrorKind::ConnectionAborted), "{error:?}");
            usual.check_refuses();
            propagated.check_refuses();

            pod = world.start_mounter(&pod, &[]);
            world.start_node();
            let error = refused(&target.join("new")).kind();
            assert_eq!(error, ErrorKind::NotConnected, "kubelet has not called yet");
            world.publish(&world.volume(1));
            assert_eq!(fs::read(target.join("kept")).unwrap(), b"x");
            fs::write(target.join(after), "y").unwrap();
            assert_eq!(world.store.object(BUCKET, after).as_deref(), Some(b"y".as_slice()));
            propagated.check_works();
            usual.check_refuses();
            let covered = world.mounts().iter().filter(|it| **it == target).count();
            assert_eq!(covered, 2, "the first dead mount, and the one that serves");
        }
        let expected = "until they are restarted: kubectl delete pod --namespace default workload";
        let events = || world.runtime.block_on(world.cluster.events(&world.workload(1)));
        wait_for("an Event names the Pod", || {
            events().iter().any(|it| it.contains("VolumeRemounted") && it.contains(expected))
        });
        assert_eq!(world.store.object(BUCKET, "new"), None);

        usual.end();
        propagated.end();
        // The directory beneath the mount is removed, so it was empty.
        world.unpublish(&world.volume(1));
        assert!(!target.exists());
        world.retire(&pod);
        wait_for("nothing but the shared mount is left", || world.mounts() == [shared.clone()]);
    }
    assert!(Command::new("umount").arg(&shared).status().unwrap().success());
}
