//! The kill matrix with strategy `daemon`.

use rustix::process::{Pid, Signal, kill_process};
use s3csi_s3_server::Transport;
use s3csi_s3_server::store::Store;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kill_matrix::run::{
    MOUNTER_ARGUMENTS, MatrixWorld, run_matrix, run_row, wait_for_others, wait_while_stopped,
};
use s3csi_testbed::kill_matrix::{Disruption, MatrixStrategy, Victim};
use s3csi_testbed::kubelet::CsiVolume;
use s3csi_testbed::processes;
use s3csi_testbed::test_node::TestNode;
use s3csi_testbed::versitygw::Versitygw;
use s3csi_testbed::wait::wait_for;

use crate::world::{BUCKET, World, volume};

const STRATEGY: MatrixStrategy = MatrixStrategy::Daemon;

struct DaemonWorld<'a> {
    world: World<'a>,
    /// The S3 server, where that is what is killed: unlike ours it keeps its objects.
    versitygw: Option<Versitygw>,
    fixture: &'a Fixture,
}

impl<'a> DaemonWorld<'a> {
    fn start(fixture: &'a Fixture, victim: Victim) -> Self {
        let versitygw = (victim == Victim::S3Server).then(|| {
            let store = Versitygw::start(fixture, Transport::Plain).unwrap();
            store.create_bucket(BUCKET, store.account()).unwrap();
            store
        });
        let mut world = World::prepare_with(fixture, |settings| {
            if let Some(store) = &versitygw {
                settings.endpoint_url = store.endpoint();
                settings.account = Some(store.account().clone());
            }
        });
        world.start_mounter_with(&MOUNTER_ARGUMENTS);
        world.start_node();
        Self { world, versitygw, fixture }
    }

    fn start_mounter(&mut self) {
        self.world.start_mounter_with(&MOUNTER_ARGUMENTS);
    }

    /// Mounter and engines.
    fn container(&self) -> Vec<Pid> {
        [self.world.mounter().pid()].into_iter().chain(self.world.engine_processes()).collect()
    }

    fn kill_container(&mut self) {
        for process in self.container() {
            // One of them may have ended with another.
            let _ = kill_process(process, Signal::KILL);
        }
        self.world.kill_mounter();
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

    /// Kubelet starts each of them again when it has ended.
    fn terminate_both(&mut self) {
        self.world.node().signal(Signal::TERM);
        self.world.mounter().signal(Signal::TERM);
        wait_for("one of them ends", || !self.world.node().is_running() || !self.world.mounter().is_running());
        if self.world.mounter().is_running() {
            self.world.wait_for_end_of_node();
            self.world.start_node();
            assert!(self.world.mounter().wait_for_end().success());
            self.start_mounter();
        } else {
            self.start_mounter();
            self.world.wait_for_end_of_node();
            self.world.start_node();
        }
    }

    fn disrupt_engine(&self, disruption: Disruption) {
        let engines = self.world.engine_processes();
        match disruption {
            Disruption::Stop => engines.iter().for_each(|it| processes::freeze(*it)),
            Disruption::Restart => self.world.mounter().signal(Signal::USR1),
            Disruption::Terminate => engines.iter().for_each(|it| kill_process(*it, Signal::TERM).unwrap()),
            _ => engines.iter().for_each(|it| kill_process(*it, Signal::KILL).unwrap()),
        }
        wait_for_others(&engines, || self.world.engine_processes());
    }
}

impl MatrixWorld for DaemonWorld<'_> {
    fn test_node(&self) -> &TestNode<'_> {
        &self.world
    }

    fn store(&self) -> &dyn Store {
        match &self.versitygw {
            Some(store) => store,
            None => &self.world.store,
        }
    }

    fn volume(&self, pod: u32) -> CsiVolume {
        volume(pod)
    }

    fn disrupt(&mut self, victim: Victim, disruption: Disruption) {
        match (victim, disruption) {
            (Victim::Engine, _) => self.disrupt_engine(disruption),
            (Victim::Supervisor, Disruption::Kill) => {
                self.world.kill_mounter();
                self.start_mounter();
            }
            (Victim::Supervisor, Disruption::Stop) => Self::stop(&[self.world.mounter().pid()]),
            (Victim::Supervisor, _) => {
                assert!(self.world.mounter().terminate().success());
                self.start_mounter();
            }
            (Victim::Container, Disruption::Kill) => {
                self.kill_container();
                self.start_mounter();
            }
            (Victim::Container, _) => Self::stop(&self.container()),
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
            (Victim::Both, _) => self.terminate_both(),
            (Victim::S3Server, Disruption::Stop) => {
                Self::stop(&[self.versitygw.as_ref().expect("the S3 server").process().pid()]);
            }
            (Victim::S3Server, _) => {
                let store = self.versitygw.as_mut().expect("the S3 server");
                store.process().kill();
                wait_while_stopped();
                store.start_again(self.fixture).unwrap();
            }
            (victim, disruption) => panic!("{victim:?} cannot be disrupted by {disruption:?} here"),
        }
    }

    fn check_nothing_left(&mut self) {
        self.world.check_nothing_left();
    }
}

#[test]
fn kill_matrix() {
    run_matrix(STRATEGY, |fixture, plan| run_row(&mut DaemonWorld::start(fixture, plan.victim), fixture, plan));
}
