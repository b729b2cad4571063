//! The kill matrix with strategy `pod`, on a node without kubelet: the test starts the mounters of Mountpoint Pods.

use rustix::process::{Pid, Signal, kill_process};
use s3csi_s3_server::store::Store;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kill_matrix::run::{
    MOUNTER_ARGUMENTS, MatrixWorld, pods, run_matrix, run_row, wait_for_others, wait_while_stopped,
};
use s3csi_testbed::kill_matrix::{Disruption, MatrixStrategy, Victim};
use s3csi_testbed::kubelet::CsiVolume;
use s3csi_testbed::processes;
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

    /// Mounter and engine.
    fn container(&self) -> Vec<Pid> {
        [self.pod.mounter().pid()].into_iter().chain(self.world.engines_of(&self.pod)).collect()
    }

    fn start_mounter(&mut self) {
        self.pod = self.world.start_mounter(&self.pod, &MOUNTER_ARGUMENTS);
    }

    fn kill_container(&mut self) {
        for process in self.container() {
            let _ = kill_process(process, Signal::KILL);
        }
        self.world.kill_mounter(&self.pod);
    }

    fn stop(processes: &[Pid]) {
        for process in processes {
            processes::freeze(*process);
        }
        wait_while_stopped();
        for process in processes {
            let _ = kill_process(*process, Signal::CONT);
        }
    }

    fn disrupt_engine(&self, disruption: Disruption) {
        let engines = self.world.engines();
        match disruption {
            Disruption::Stop => engines.iter().for_each(|it| processes::freeze(*it)),
            Disruption::Restart => self.pod.mounter().signal(Signal::USR1),
            Disruption::Terminate => engines.iter().for_each(|it| kill_process(*it, Signal::TERM).unwrap()),
            _ => engines.iter().for_each(|it| kill_process(*it, Signal::KILL).unwrap()),
        }
        wait_for_others(&engines, || self.world.engines());
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

impl MatrixWorld for PodWorld<'_> {
    fn test_node(&self) -> &TestNode<'_> {
        &self.world
    }

    fn store(&self) -> &dyn Store {
        &self.world.store
    }

    fn volume(&self, pod: u32) -> CsiVolume {
        self.world.volume(pod)
    }

    fn disrupt(&mut self, victim: Victim, disruption: Disruption) {
        match (victim, disruption) {
            (Victim::Engine, _) => self.disrupt_engine(disruption),
            (Victim::Supervisor, Disruption::Stop) => Self::stop(&[self.pod.mounter().pid()]),
            (Victim::Container, Disruption::Kill) => {
                self.kill_container();
                self.start_mounter();
            }
            (Victim::Container, Disruption::Stop) => Self::stop(&self.container()),
            (Victim::Container, _) => self.move_to_another_pod(),
            (Victim::NodePlugin, Disruption::Kill) => {
                self.world.kill_node();
                self.world.start_node();
            }
            (Victim::NodePlugin, Disruption::Stop) => Self::stop(&[self.world.node().pid()]),
            (Victim::NodePlugin, _) => {
                self.world.stop_node();
                self.world.start_node();
            }
            (Victim::Both, Disruption::Kill) => {
                kill_process(self.world.node().pid(), Signal::KILL).unwrap();
                self.kill_container();
                self.world.kill_node();
                self.start_mounter();
                self.world.start_node();
            }
            (Victim::Both, Disruption::Stop) => {
                let all: Vec<Pid> = [self.world.node().pid()].into_iter().chain(self.container()).collect();
                Self::stop(&all);
            }
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
