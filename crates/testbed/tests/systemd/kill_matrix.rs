//! The kill matrix with strategy `systemd`. Each target has a unit, and all units are ended at once.

use rustix::process::{Pid, Signal};
use s3csi_s3_server::store::Store;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kill_matrix::disrupt::{MatrixWorld, signal, wait_for_others};
use s3csi_testbed::kill_matrix::run::{run_matrix, run_row};
use s3csi_testbed::kill_matrix::{Disruption, MatrixStrategy, Victim};
use s3csi_testbed::kubelet::CsiVolume;
use s3csi_testbed::systemd::{beside_systemd, systemctl};
use s3csi_testbed::test_node::TestNode;
use s3csi_testbed::wait::wait_for;

use crate::world::{World, mount_units, volume};

struct SystemdWorld<'a> {
    world: World<'a>,
    /// Supervisors of the units that were killed last.
    killed: Vec<Pid>,
}

impl<'a> MatrixWorld<'a> for SystemdWorld<'a> {
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
        volume(pod)
    }

    fn supervisors(&self) -> Vec<Pid> {
        self.world.engines()
    }

    /// One for each supervisor.
    fn engines(&self) -> Vec<Pid> {
        self.supervisors().into_iter().filter_map(|it| self.world.serving(it)).collect()
    }

    /// Each volume has a unit of its own, and one is unpublished.
    fn ending(&self) -> usize {
        1
    }

    /// Kills all processes of all units but those that come or go with a Pod at this moment.
    fn kill_container(&mut self) {
        self.killed = self.supervisors();
        for supervisor in &self.killed {
            let serving = self.world.serving(*supervisor);
            signal(&[*supervisor], Signal::KILL);
            signal(serving.as_slice(), Signal::KILL);
        }
    }

    fn start_container(&mut self) {
        wait_for("systemd has started the units again", || {
            let now = self.supervisors();
            !now.iter().any(|it| self.killed.contains(it)) && mount_units().len() <= self.engines().len()
        });
    }

    fn disrupt(&mut self, victim: Victim, disruption: Disruption) {
        match (victim, disruption) {
            (Victim::Supervisor, Disruption::Kill) => {
                let supervisors = self.supervisors();
                signal(&supervisors, Signal::KILL);
                wait_for_others(&supervisors, self.ending(), || self.supervisors());
            }
            (Victim::Systemd, Disruption::Restart) => drop(systemctl(&["daemon-reexec"])),
            (victim, disruption) => panic!("{victim:?} cannot be disrupted by {disruption:?} here"),
        }
    }

    fn check_nothing_left(&mut self) {
        self.world.check_nothing_left();
    }
}

#[test]
fn kill_matrix() {
    beside_systemd(|| {
        run_matrix(MatrixStrategy::Systemd, |fixture: &Fixture, plan| {
            let mut world = SystemdWorld { world: World::start_beside_systemd(fixture), killed: Vec::new() };
            run_row(&mut world, fixture, plan)
        });
    });
}
