//! What people see of mounts with kubectl: the condition of Mountpoint Pods and Events on workloads, each from what the node saw.

use std::fs;

use rustix::process::{Signal, kill_process};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::wait::wait_for;
use serde_json::json;

use crate::world::{MountpointPod, World};

impl World<'_> {
    /// `status reason: message` of the condition that the node writes.
    fn mounted(&self, pod: &MountpointPod) -> Option<String> {
        self.runtime.block_on(self.cluster.condition(&pod.name, "s3.csi.scality.com/Mounted"))
    }

    #[track_caller]
    fn wait_for_mounted(&self, pod: &MountpointPod, expected: &str) {
        wait_for(&format!("the Mountpoint Pod is {expected:?}"), || {
            self.mounted(pod).is_some_and(|it| it.contains(expected))
        });
    }

    /// `type reason: note` of each Event on a workload.
    fn events(&self, workload: u32) -> Vec<String> {
        self.runtime.block_on(self.cluster.events(&self.workload(workload)))
    }

    #[track_caller]
    fn wait_for_event(&self, workload: u32, expected: &str) {
        wait_for(&format!("workload {workload} has Event {expected:?}"), || {
            self.events(workload).iter().any(|it| it.contains(expected))
        });
    }
}

/// A mount is given up soon after its mounter died.
fn start(fixture: &Fixture) -> World<'_> {
    let mut world = World::prepare(fixture);
    world.start_node_with(&["--longest-outage", "1s"]);
    world
}

#[test]
fn a_mountpoint_pod_says_what_became_of_its_source() {
    let fixture = Fixture::new("pod-status");
    let world = start(&fixture);
    let pod = world.serve(&[1, 2]);
    let ready = json!({ "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }] });
    world.runtime.block_on(world.cluster.set_status(&pod.name, ready));
    assert_eq!(world.mounted(&pod), None, "nothing is mounted or reported as mounted");

    let target = world.publish(&world.volume(1));
    world.publish(&world.volume(2));
    world.wait_for_mounted(&pod, "True Serving");
    for workload in [1, 2] {
        world.wait_for_event(
            workload,
            &format!("Normal VolumeMounted: bucket \"bucket-1\" is mounted, served by Mountpoint Pod {}", pod.name),
        );
    }

    kill_process(world.engine(), Signal::KILL).unwrap();
    world.wait_for_mounted(&pod, "True EngineResumed: the engine died (");
    world.wait_for_event(2, "Warning EngineResumed: the engine of bucket \"bucket-1\" died (");
    fs::write(target.join("file"), "x").unwrap();

    world.kill_mounter(&pod);
    world.wait_for_mounted(&pod, "False EngineDied: its mounter ended");
    world.wait_for_event(
        1,
        "Warning EngineDied: the engine of bucket \"bucket-1\" died and was not replaced: its mounter ended",
    );

    // Kubelet's next call heals it.
    let pod = world.start_mounter(&pod, &[]);
    world.publish(&world.volume(1));
    world.wait_for_mounted(&pod, "True Serving");
    world.wait_for_event(1, "Warning VolumeRemounted: the mount of bucket \"bucket-1\" was dead");

    for workload in [1, 2] {
        world.unpublish(&world.volume(workload));
    }
    world.retire(&pod);
    world.wait_for_mounted(&pod, "False Unmounted");
    let kubelets = world.runtime.block_on(world.cluster.condition(&pod.name, "Ready"));
    assert_eq!(kubelets.as_deref(), Some("True : "), "kubelet's own conditions stay");
}

#[test]
fn changes_during_the_plugins_absence_are_seen_after_its_restart() {
    let fixture = Fixture::new("pod-status-restart");
    let mut world = World::start(&fixture);
    let pod = world.serve(&[1]);
    world.publish(&world.volume(1));
    world.wait_for_mounted(&pod, "True Serving");
    world.kill_node();
    world.kill_mounter(&pod);
    world.start_node();
    world.wait_for_mounted(&pod, "False EngineDied");
    let pod = world.start_mounter(&pod, &[]);
    world.publish(&world.volume(1));
    world.wait_for_mounted(&pod, "True Serving");
    world.unpublish(&world.volume(1));
}

#[test]
fn each_option_without_effect_has_its_event() {
    let fixture = Fixture::new("pod-status-options");
    let world = World::start(&fixture);
    let pod = world.serve(&[1]);
    let volume = world.volume(1).with_option("endpoint-url http://elsewhere.example").with_option("profile other");
    world.publish(&volume);
    for option in ["--endpoint-url", "--profile"] {
        world.wait_for_event(
            1,
            &format!("Warning MountOptionIgnored: bucket \"bucket-1\": mount option {option} has no effect: "),
        );
    }
    world.wait_for_event(1, "Normal VolumeMounted");
    world.unpublish(&volume);
    world.retire(&pod);
}

#[test]
fn a_volume_that_uses_the_driver_s_keys_for_lack_of_a_secret_has_its_event() {
    let fixture = Fixture::new("pod-status-fallback");
    let mut world = World::prepare(&fixture);
    world.start_node_with(&["--secret-falls-back-to-driver", "default"]);
    let pod = world.serve(&[1]);
    let mut volume = world.volume(1);
    volume.attributes.insert("authenticationSource".to_owned(), "secret".to_owned());
    let target = world.publish(&volume);
    fs::write(target.join("file"), "x").unwrap();
    world.wait_for_event(
        1,
        "Warning DriverKeysUsed: bucket \"bucket-1\": the volume says authenticationSource: secret, but names no Secret",
    );
    world.unpublish(&volume);
    world.retire(&pod);
}

#[test]
fn repeated_events_are_rate_limited() {
    let fixture = Fixture::new("pod-status-rate");
    let world = start(&fixture);
    let pod = world.serve(&[1]);
    let target = world.publish(&world.volume(1));
    for number in 1..=3 {
        kill_process(world.engine(), Signal::KILL).unwrap();
        let died = || world.node().errors().matches("a new engine resumed its mount").count();
        wait_for("the engine was replaced", || died() == number);
        fs::write(target.join(format!("file-{number}")), "x").unwrap();
    }
    world.wait_for_event(1, "EngineResumed");
    // The last word comes after all of the others.
    world.kill_mounter(&pod);
    world.wait_for_event(1, "EngineDied");
    let told = world.events(1);
    assert_eq!(told.iter().filter(|it| it.contains("EngineResumed")).count(), 1, "{told:?}");
    let pod = world.start_mounter(&pod, &[]);
    world.publish(&world.volume(1));
    world.unpublish(&world.volume(1));
    world.retire(&pod);
}
