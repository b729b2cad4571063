//! The kill matrix with strategy `pod`, on a node without kubelet: the test starts the mounters of Mountpoint Pods.

use rustix::process::{Pid, Signal};
use s3csi_s3_server::store::Store;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kill_matrix::disrupt::{MOUNTER_ARGUMENTS, MatrixWorld, signal};
use s3csi_testbed::kill_matrix::run::{pods, run_matrix, run_row};
use s3csi_testbed::kill_matrix::{Disruption, MatrixStrategy, Victim};
use s3csi_testbed::kubelet::CsiVolume;
use s3csi_testbed::test_node::TestNode;
use s3csi_testbed::wait::wait_for;

use crate::world::{MountpointPod, World};

struct PodWorld<'a> {
    world: World<'a>,
    pod: MountpointPod,
}

impl<'a> PodWorld<'a> {
    fn start(fixture: &'a Fixture, times: u32) -> Self {
        let world = World::start(fixture);
        let pod = world.run_pod_with(1, &MOUNTER_ARGUMENTS);
        world.assign(&pod.name, &pods(times));
        Self { world, pod }
    }

    /// As the controller and kubelet do it: the next Mountpoint Pod runs before the first one has ended.
    fn move_to_another_pod(&mut self) {
        self.world.begin_deletion(&self.pod);
        let next = self.world.run_successor(&self.pod, &MOUNTER_ARGUMENTS);
        self.world.finish_deletion(&self.pod);
        wait_for("the next Mountpoint Pod serves", || self.world.engines_of(&next).len() == 1);
        self.pod = next;
    }
}

impl<'a> MatrixWorld<'a> for PodWorld<'a> {
    fn test_node(&self) -> &TestNode<'a> {
        &self.world
    }

    fn test_node_mut(&mut self) -> &mut TestNode<'a> {
        &mut self.world
    }

    fn store(&self) -> &dyn Store {
        &self.world.store
    }

    fn volume(&self, pod: u32) -> CsiVolume {
        self.world.volume(pod)
    }

    fn supervisors(&self) -> Vec<Pid> {
        vec![self.pod.mounter().pid()]
    }

    fn engines(&self) -> Vec<Pid> {
        self.world.engines_of(&self.pod)
    }

    fn kill_container(&mut self) {
        signal(&[self.supervisors(), self.engines()].concat(), Signal::KILL);
        self.world.kill_mounter(&self.pod);
    }

    fn start_container(&mut self) {
        self.pod = self.world.start_mounter(&self.pod, &MOUNTER_ARGUMENTS);
    }

    fn disrupt(&mut self, victim: Victim, disruption: Disruption) {
        match (victim, disruption) {
            (Victim::Container, Disruption::DeletePod) => self.move_to_another_pod(),
            (victim, disruption) => panic!("{victim:?} cannot be disrupted by {disruption:?} here"),
        }
    }

    fn check_nothing_left(&mut self) {
        self.world.retire(&self.pod);
        self.world.check_nothing_mounted();
    }
}

#[test]
fn kill_matrix() {
    run_matrix(MatrixStrategy::Pod, |fixture, plan| run_row(&mut PodWorld::start(fixture, plan.times), fixture, plan));
}
