//! The kill matrix with strategy `daemon`.

use rustix::process::{Pid, Signal};
use s3csi_s3_server::Transport;
use s3csi_s3_server::store::Store;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kill_matrix::disrupt::{
    MOUNTER_ARGUMENTS, MatrixWorld, signal, stop_for_a_while, wait_while_stopped,
};
use s3csi_testbed::kill_matrix::run::{run_matrix, run_row};
use s3csi_testbed::kill_matrix::{Disruption, MatrixStrategy, Victim};
use s3csi_testbed::kubelet::CsiVolume;
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

    /// Kubelet starts each of them again when it has ended.
    fn terminate_both(&mut self) {
        self.world.node().signal(Signal::TERM);
        self.world.mounter().signal(Signal::TERM);
        wait_for("one of them ends", || !self.world.node().is_running() || !self.world.mounter().is_running());
        if self.world.mounter().is_running() {
            self.world.wait_for_end_of_node();
            self.world.start_node();
            assert!(self.world.mounter().wait_for_end().success());
            self.start_container();
        } else {
            self.start_container();
            self.world.wait_for_end_of_node();
            self.world.start_node();
        }
    }
}

impl<'a> MatrixWorld<'a> for DaemonWorld<'a> {
    fn test_node(&self) -> &TestNode<'a> {
        &self.world
    }

    fn test_node_mut(&mut self) -> &mut TestNode<'a> {
        &mut self.world
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

    fn supervisors(&self) -> Vec<Pid> {
        vec![self.world.mounter().pid()]
    }

    fn engines(&self) -> Vec<Pid> {
        self.world.engine_processes()
    }

    fn kill_container(&mut self) {
        signal(&[self.supervisors(), self.engines()].concat(), Signal::KILL);
        self.world.kill_mounter();
    }

    fn start_container(&mut self) {
        self.world.start_mounter_with(&MOUNTER_ARGUMENTS);
    }

    fn disrupt(&mut self, victim: Victim, disruption: Disruption) {
        match (victim, disruption) {
            (Victim::Supervisor, Disruption::Kill) => {
                self.world.kill_mounter();
                self.start_container();
            }
            (Victim::Supervisor, Disruption::Terminate) => {
                assert!(self.world.mounter().terminate().success());
                self.start_container();
            }
            (Victim::Both, Disruption::Terminate) => self.terminate_both(),
            (Victim::S3Server, Disruption::Stop) => {
                stop_for_a_while(&[self.versitygw.as_ref().expect("the S3 server").process().pid()]);
            }
            (Victim::S3Server, Disruption::Kill) => {
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
