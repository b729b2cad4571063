//! Node plugin and mounter die at the same time, and the mount with them. Writes are refused until the volume is mounted again.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use s3csi_s3_server::store::Store as _;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::wait::wait_for;

use crate::world::{BUCKET, World};

/// A mount namespace with the volume, as a running container has it.
struct Container(Child);

impl Container {
    /// `propagation` is `private`, or `slave` for `mountPropagation: HostToContainer`.
    fn start(propagation: &str) -> Self {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", propagation, "sh", "-c", "echo ready; read -r line"]);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut ready = [0; 6];
        std::io::Read::read_exact(process.stdout.as_mut().unwrap(), &mut ready).unwrap();
        Self(process)
    }

    fn run(&self, script: &str, target: &Path) -> Output {
        let namespace = format!("--mount=/proc/{}/ns/mnt", self.0.id());
        Command::new("nsenter").args([&namespace, "sh", "-c", script, "sh"]).arg(target).output().unwrap()
    }

    #[track_caller]
    fn check_works(&self, target: &Path) {
        let output = self.run("cat \"$1/kept\"", target);
        assert_eq!(output.stdout, b"x", "{output:?}");
    }

    #[track_caller]
    fn check_refuses(&self, target: &Path) {
        for script in ["cat \"$1/kept\"", "echo lost >\"$1/new\""] {
            let output = self.run(script, target);
            assert!(!output.status.success(), "{script}: {output:?}");
        }
    }

    fn end(mut self) {
        drop(self.0.stdin.take());
        self.0.wait().unwrap();
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
        let pod = world.serve(&[1]);
        let target = world.publish(&world.volume(1));
        fs::write(target.join("kept"), "x").unwrap();
        let (usual, propagated) = (Container::start("private"), Container::start("slave"));
        usual.check_works(&target);

        world.kill_node();
        world.kill_mounter(&pod);
        let refused = |path: &Path| fs::write(path, "lost").unwrap_err();
        assert_eq!(refused(&target.join("new")).kind(), std::io::ErrorKind::NotConnected);
        usual.check_refuses(&target);
        propagated.check_refuses(&target);

        let pod = world.start_mounter(&pod, &[]);
        world.start_node();
        assert_eq!(refused(&target.join("new")).kind(), std::io::ErrorKind::NotConnected, "kubelet has not called yet");
        world.publish(&world.volume(1));
        assert_eq!(fs::read(target.join("kept")).unwrap(), b"x");
        fs::write(target.join("after"), "y").unwrap();
        assert_eq!(world.store.object(BUCKET, "after").as_deref(), Some(b"y".as_slice()));
        propagated.check_works(&target);
        usual.check_refuses(&target);
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
