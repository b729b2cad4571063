//! The kill matrix with strategy `systemd`. Each target has a unit, and all units are ended at once.

use rustix::process::{Pid, Signal, kill_process};
use s3csi_s3_server::store::Store;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kill_matrix::run::{MatrixWorld, run_matrix, run_row, wait_for_others, wait_while_stopped};
use s3csi_testbed::kill_matrix::{Disruption, MatrixStrategy, Victim};
use s3csi_testbed::kubelet::CsiVolume;
use s3csi_testbed::systemd::{beside_systemd, systemctl};
use s3csi_testbed::test_node::TestNode;
use s3csi_testbed::wait::wait_for;

use crate::world::{World, mount_units, volume};

struct SystemdWorld<'a>(World<'a>);

impl SystemdWorld<'_> {
    /// The engines that serve, one for each supervisor.
    fn serving(&self) -> Vec<Pid> {
        self.0.engines().into_iter().filter_map(|it| self.0.serving(it)).collect()
    }

    fn signal(processes: &[Pid], signal: Signal) {
        for process in processes {
            // That of a volume that is being unpublished may have ended.
            let _ = kill_process(*process, signal);
        }
    }

    fn stop(processes: &[Pid]) {
        Self::signal(processes, Signal::STOP);
        wait_while_stopped();
        Self::signal(processes, Signal::CONT);
    }

    /// Kills all processes of all units but those that come or go with a Pod at this moment.
    fn kill_units(&self, supervisors: &[Pid]) {
        for supervisor in supervisors {
            let serving = self.0.serving(*supervisor);
            Self::signal(&[*supervisor], Signal::KILL);
            Self::signal(serving.as_slice(), Signal::KILL);
        }
        wait_for("systemd has started the units again", || {
            let now = self.0.engines();
            !now.iter().any(|it| supervisors.contains(it)) && mount_units().len() <= self.serving().len()
        });
    }
}

impl MatrixWorld for SystemdWorld<'_> {
    fn test_node(&self) -> &TestNode<'_> {
        &self.0
    }

    fn store(&self) -> &dyn Store {
        &self.0.store
    }

    fn volume(&self, pod: u32) -> CsiVolume {
        volume(pod)
    }

    fn disrupt(&mut self, victim: Victim, disruption: Disruption) {
        let (supervisors, serving) = (self.0.engines(), self.serving());
        match (victim, disruption) {
            (Victim::Engine, _) => {
                match disruption {
                    Disruption::Stop => Self::signal(&serving, Signal::STOP),
                    Disruption::Restart => Self::signal(&supervisors, Signal::USR1),
                    Disruption::Terminate => Self::signal(&serving, Signal::TERM),
                    _ => Self::signal(&serving, Signal::KILL),
                }
                // One of them may have been unpublished meanwhile.
                wait_for_others(&serving[1..], || self.serving());
            }
            (Victim::Supervisor, Disruption::Kill) => {
                Self::signal(&supervisors, Signal::KILL);
                wait_for_others(&supervisors[1..], || self.0.engines());
            }
            (Victim::Supervisor, _) => Self::stop(&supervisors),
            (Victim::Container, Disruption::Kill) => self.kill_units(&supervisors),
            (Victim::Container, _) => Self::stop(&[supervisors, serving].concat()),
            (Victim::NodePlugin, Disruption::Kill) => {
                self.0.kill_node();
                self.0.start_node();
            }
            (Victim::NodePlugin, Disruption::Stop) => Self::stop(&[self.0.node().pid()]),
            (Victim::NodePlugin, _) => {
                self.0.stop_node();
                self.0.start_node();
            }
            (Victim::Both, Disruption::Kill) => {
                self.0.kill_node();
                self.kill_units(&supervisors);
                self.0.start_node();
            }
            (Victim::Both, _) => Self::stop(&[vec![self.0.node().pid()], supervisors, serving].concat()),
            (Victim::Systemd, _) => drop(systemctl(&["daemon-reexec"])),
            (victim, disruption) => panic!("{victim:?} cannot be disrupted by {disruption:?} here"),
        }
    }

    fn check_nothing_left(&mut self) {
        self.0.check_nothing_left();
    }
}

#[test]
fn kill_matrix() {
    beside_systemd(|| {
        run_matrix(MatrixStrategy::Systemd, |fixture: &Fixture, plan| {
            run_row(&mut SystemdWorld(World::start_beside_systemd(fixture)), fixture, plan)
        });
    });
}
