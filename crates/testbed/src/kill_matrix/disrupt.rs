//! Ends or stops a part of a node, in the same way with every strategy that has it.

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use s3csi_s3_server::store::Store;

use super::{Disruption, Victim};
use crate::kubelet::CsiVolume;
use crate::test_node::TestNode;
use crate::wait::{wait_for, wait_until};

/// How long something stays stopped. Longer than `--frozen-after` in these tests.
const STOPPED: Duration = Duration::from_secs(3);

/// The arguments of a mounter in these tests: a frozen engine is replaced while the test looks.
pub const MOUNTER_ARGUMENTS: [&str; 2] = ["--frozen-after", "2s"];

/// A node whose parts can be ended.
pub trait MatrixWorld<'a> {
    fn test_node(&self) -> &TestNode<'a>;

    fn test_node_mut(&mut self) -> &mut TestNode<'a>;

    fn store(&self) -> &dyn Store;

    fn volume(&self, pod: u32) -> CsiVolume;

    /// Those of mounts that may be published or unpublished at this moment are among them.
    fn supervisors(&self) -> Vec<Pid>;

    /// The engines that serve.
    fn engines(&self) -> Vec<Pid>;

    /// How many of the supervisors and engines may end at any moment, with a volume that is unpublished.
    fn ending(&self) -> usize {
        0
    }

    /// Kills supervisors and engines together.
    fn kill_container(&mut self);

    /// Starts what [`Self::kill_container`] has killed, or waits until it was started again.
    fn start_container(&mut self);

    /// Ends or stops a part in a way that only this strategy has, and returns when it runs again.
    fn disrupt(&mut self, victim: Victim, disruption: Disruption);

    /// Nothing is published any more.
    fn check_nothing_left(&mut self);
}

/// Lets a stopped part stay stopped for a while.
pub fn wait_while_stopped() {
    let _ = wait_until(Instant::now() + STOPPED, || false);
}

pub fn stop_for_a_while(processes: &[Pid]) {
    signal(processes, Signal::STOP);
    wait_while_stopped();
    signal(processes, Signal::CONT);
}

/// Processes that have ended meanwhile, one with another or with a volume that is unpublished, are passed over.
pub fn signal(processes: &[Pid], signal: Signal) {
    for process in processes {
        let _ = kill_process(*process, signal);
    }
}

/// Waits until other processes have taken the place of these, but for some that may have ended for good.
#[track_caller]
pub fn wait_for_others(before: &[Pid], ending: usize, now: impl Fn() -> Vec<Pid>) {
    wait_for("other processes have taken over", || {
        let now = now();
        before.len() <= now.len() + ending && !now.iter().any(|it| before.contains(it))
    });
}

/// Ends or stops a part, and returns when it runs again.
#[track_caller]
pub fn disrupt<'a>(world: &mut dyn MatrixWorld<'a>, victim: Victim, disruption: Disruption) {
    let container = |world: &dyn MatrixWorld<'a>| [world.supervisors(), world.engines()].concat();
    match (victim, disruption) {
        (Victim::Engine, _) => disrupt_engines(world, disruption),
        (Victim::Supervisor, Disruption::Stop) => stop_for_a_while(&world.supervisors()),
        (Victim::Container, Disruption::Kill) => {
            world.kill_container();
            world.start_container();
        }
        (Victim::Container, Disruption::Stop) => stop_for_a_while(&container(world)),
        (Victim::NodePlugin, Disruption::Kill) => {
            world.test_node_mut().kill_node();
            world.test_node_mut().start_node();
        }
        (Victim::NodePlugin, Disruption::Stop) => stop_for_a_while(&[world.test_node().node().pid()]),
        (Victim::NodePlugin, _) => {
            world.test_node_mut().stop_node();
            world.test_node_mut().start_node();
        }
        (Victim::Both, Disruption::Kill) => {
            world.test_node().node().signal(Signal::KILL);
            world.kill_container();
            world.test_node_mut().kill_node();
            world.start_container();
            world.test_node_mut().start_node();
        }
        (Victim::Both, Disruption::Stop) => {
            stop_for_a_while(&[vec![world.test_node().node().pid()], container(world)].concat());
        }
        (victim, disruption) => world.disrupt(victim, disruption),
    }
}

#[track_caller]
fn disrupt_engines(world: &dyn MatrixWorld<'_>, disruption: Disruption) {
    let engines = world.engines();
    match disruption {
        Disruption::Stop => signal(&engines, Signal::STOP),
        Disruption::Terminate => signal(&engines, Signal::TERM),
        Disruption::Restart => signal(&world.supervisors(), Signal::USR1),
        _ => signal(&engines, Signal::KILL),
    }
    wait_for_others(&engines, world.ending(), || world.engines());
}
