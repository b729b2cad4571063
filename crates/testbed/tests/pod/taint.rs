//! The start-up taint: it goes when kubelet knows the driver, whenever it is there, and nothing else goes with it.

use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::Kubelet;
use s3csi_testbed::plugin::{DRIVER_NAME, PluginStrategy};
use s3csi_testbed::wait::wait_for;

use crate::cluster::control_plane;
use crate::world::World;

const TAINT: &str = "s3.csi.scality.com/agent-not-ready";

impl World<'_> {
    fn taints(&self) -> Vec<String> {
        self.runtime.block_on(self.cluster.taints(&self.node_name))
    }

    fn create_node(&self, taints: &[&str]) {
        self.runtime.block_on(self.cluster.create_node(&self.node_name, taints));
    }

    fn add_taint(&self, taint: &str) {
        self.runtime.block_on(self.cluster.add_taint(&self.node_name, taint));
    }

    /// Kubelet finds the plugin and tells it so.
    fn register(&self) {
        self.runtime.block_on(Kubelet::register(&self.plugin.registration_socket())).unwrap();
    }

    #[track_caller]
    fn wait_for_taints(&self, expected: &[&str]) {
        wait_for(&format!("the node has the taints {expected:?}"), || self.taints() == expected);
    }
}

#[test]
fn the_taint_goes_once_kubelet_has_registered_the_driver() {
    let fixture = Fixture::new("pod-taint");
    let mut world = World::prepare(&fixture);
    world.create_node(&["a", TAINT, "b"]);
    world.start_node();
    world.node().wait_for_log("taint stays until kubelet has registered the driver");
    assert_eq!(world.taints(), ["a", "b", TAINT]);
    world.register();
    world.wait_for_taints(&["a", "b"]);
    world.node().wait_for_log("successfully removed taint");
}

#[test]
fn the_taint_goes_again_whenever_it_comes_back() {
    let fixture = Fixture::new("pod-taint-again");
    let mut world = World::prepare(&fixture);
    world.create_node(&[]);
    world.start_node();
    world.register();
    for _ in 0..3 {
        world.add_taint(TAINT);
        world.wait_for_taints(&[]);
    }
    // Also after another plugin has taken over, which kubelet has to register again.
    world.kill_node();
    world.add_taint(TAINT);
    world.start_node();
    world.node().wait_for_log("taint stays until kubelet has registered the driver");
    world.register();
    world.wait_for_taints(&[]);
}

#[test]
fn taints_that_others_add_meanwhile_are_not_lost() {
    let fixture = Fixture::new("pod-taint-race");
    let world = World::start(&fixture);
    world.create_node(&[]);
    world.register();
    let others: Vec<String> = (10..40).map(|it| format!("other-{it}")).collect();
    for other in &others {
        if !world.taints().iter().any(|it| it == TAINT) {
            world.add_taint(TAINT);
        }
        world.add_taint(other);
    }
    let others: Vec<&str> = others.iter().map(String::as_str).collect();
    world.wait_for_taints(&others);
}

#[test]
fn other_strategies_remove_it_too_and_trust_the_csinode_if_a_sidecar_registers() {
    let fixture = Fixture::new("pod-taint-daemon");
    let mut world = World::prepare(&fixture);
    world.plugin.set_strategy(PluginStrategy::Daemon);
    world.create_node(&[TAINT]);
    let kubeconfig = control_plane().kubeconfig();
    world.start_node_with(&["--registration", "off", "--kubeconfig", kubeconfig.to_str().unwrap()]);
    world.node().wait_for_log("taint stays until kubelet has registered the driver");
    world.runtime.block_on(world.cluster.write_csi_node(&world.node_name, &["other.example.com"]));
    // The plugin logs this each time it has read the CSINode in vain. The first reading from now on may have begun before.
    let readings = || world.node().errors().matches("taint stays until kubelet has registered the driver").count();
    let before = readings();
    wait_for("the plugin has read the CSINode", || before + 2 <= readings());
    assert_eq!(world.taints(), [TAINT]);
    world.runtime.block_on(world.cluster.write_csi_node(&world.node_name, &["other.example.com", DRIVER_NAME]));
    world.wait_for_taints(&[]);
}

#[test]
fn a_plugin_without_an_api_server_serves_all_the_same() {
    let fixture = Fixture::new("pod-taint-alone");
    let mut world = World::prepare(&fixture);
    let elsewhere = fixture.path("kubeconfig");
    let text = std::fs::read_to_string(control_plane().kubeconfig()).unwrap();
    let unreachable = text.replace(&control_plane().server(), "https://127.0.0.1:1");
    assert_ne!(unreachable, text);
    std::fs::write(&elsewhere, unreachable).unwrap();
    world.plugin.set_strategy(PluginStrategy::Daemon);
    let mounter = world.plugin.start_mounter().unwrap();
    world.start_node_with(&["--kubeconfig", elsewhere.to_str().unwrap()]);
    world.register();
    world.node().wait_for_log("watch failed, retrying");
    let target = world.publish(&world.volume(1));
    std::fs::write(target.join("file"), "x").unwrap();
    world.unpublish(&world.volume(1));
    world.stop_node();
    mounter.terminate();
}
