//! Who is being served: counts engines and handshakes and says no when there are too many. Starts and ends nothing itself.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::Signal;

use crate::handoff::SourceName;
use crate::wake::Wake;

/// Peers that have connected but not sent their whole request yet. One thread each; a node sends its requests within
/// milliseconds, so further peers can wait in the socket's queue.
const MAX_HANDSHAKES: usize = 64;

/// The slots of a mounter.
#[derive(Debug)]
pub struct Slots {
    limit: NonZeroUsize,
    state: Mutex<State>,
    /// Told when a slot was given back.
    given_back: Condvar,
    wake: Arc<Wake>,
}

/// Why there is no slot for a request.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("source {source_name} is already served by a running engine")]
    SourceBusy { source_name: SourceName },

    #[error("this mounter already runs {running} of at most {limit} engines")]
    Full { running: usize, limit: usize },

    #[error("this mounter is ending")]
    Ending,
}

/// A connection that is being attended to. Counts as a handshake until told otherwise.
#[derive(Debug)]
pub struct Attendance {
    slots: Arc<Slots>,
    is_handshake: bool,
}

/// One engine, which is never taken for a later one of the same source.
#[derive(Debug)]
pub struct RunningEngine {
    source: Option<SourceName>,
    number: u64,
}

/// The right to run one engine; given back when dropped.
#[derive(Debug)]
pub struct Slot {
    slots: Arc<Slots>,
    source: Option<SourceName>,
}

#[derive(Debug)]
struct Running {
    number: u64,
    /// Missing until the engine was started, and on kernels that cannot name a process this way.
    process: Option<Arc<OwnedFd>>,
    /// Somebody asked for its end: it is not to be replaced.
    is_unwanted: bool,
}

#[derive(Debug, Default)]
struct State {
    running: BTreeMap<Option<SourceName>, Running>,
    /// The number of the next engine.
    next: u64,
    handshakes: usize,
    /// Connections after their handshake: engines that run, and ended ones that are being tidied up after.
    attended: usize,
    is_ending: bool,
    /// How often all engines were to be replaced.
    upgrades: u64,
}

impl Slots {
    pub fn new(limit: NonZeroUsize, wake: Arc<Wake>) -> Arc<Self> {
        Arc::new(Self { limit, state: Mutex::default(), given_back: Condvar::new(), wake })
    }

    pub fn reserve(self: &Arc<Self>, source: Option<SourceName>) -> Result<Slot, Refused> {
        let mut state = self.state();
        if state.is_ending {
            return Err(Refused::Ending);
        }
        if let Some(source_name) = &source
            && state.running.contains_key(&source)
        {
            return Err(Refused::SourceBusy { source_name: source_name.clone() });
        }
        let (running, limit) = (state.running.len(), self.limit.get());
        if limit <= running || state.running.contains_key(&source) {
            return Err(Refused::Full { running, limit });
        }
        let number = state.next;
        state.next += 1;
        state.running.insert(source.clone(), Running { number, process: None, is_unwanted: false });
        Ok(Slot { slots: Arc::clone(self), source })
    }

    /// Counts a new connection. Whether there is room for it is looked at before it is accepted.
    pub fn attend(self: &Arc<Self>) -> Attendance {
        self.state().handshakes += 1;
        Attendance { slots: Arc::clone(self), is_handshake: true }
    }

    /// The loop is woken when a handshake has ended, so it can wait for this.
    pub fn has_room_for_handshake(&self) -> bool {
        self.state().handshakes < MAX_HANDSHAKES
    }

    /// The engine that serves a source now.
    pub fn find(&self, source: Option<&SourceName>) -> Option<RunningEngine> {
        let source = source.cloned();
        let number = self.state().running.get(&source)?.number;
        Some(RunningEngine { source, number })
    }

    /// Whether the engine ended and its slot was given back in this time.
    pub fn wait_until_gone(&self, engine: &RunningEngine, time: Duration) -> bool {
        let is_there =
            |state: &mut State| state.running.get(&engine.source).is_some_and(|it| it.number == engine.number);
        let waited = self.given_back.wait_timeout_while(self.state(), time, is_there);
        let (_state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        !timeout.timed_out()
    }

    /// Ends the engine for good: no other one takes its place.
    pub fn kill(&self, engine: &RunningEngine) {
        let mut state = self.state();
        let running = state.running.get_mut(&engine.source).filter(|it| it.number == engine.number);
        let Some(running) = running else { return };
        running.is_unwanted = true;
        if let Some(process) = &running.process {
            // It may have ended just now, which is as well.
            let _ = rustix::process::pidfd_send_signal(process, Signal::KILL);
        }
    }

    /// Ends all engines for good.
    pub fn kill_all(&self) {
        for running in self.state().running.values_mut() {
            running.is_unwanted = true;
            if let Some(process) = &running.process {
                let _ = rustix::process::pidfd_send_signal(process, Signal::KILL);
            }
        }
    }

    /// All engines shall be replaced by others of the same program, which may be another version by now.
    pub fn upgrade(&self) {
        self.state().upgrades += 1;
    }

    pub fn running(&self) -> usize {
        self.state().running.len()
    }

    /// From now on nothing is started, unless an engine is running.
    pub fn end_if_idle(&self) -> bool {
        let mut state = self.state();
        state.is_ending |= state.running.is_empty();
        state.is_ending
    }

    /// Whether the node asked for the end when the last engine had ended.
    pub fn is_ending(&self) -> bool {
        self.state().is_ending
    }

    pub fn is_tidy(&self) -> bool {
        self.state().attended == 0
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change is a single step, so a panic elsewhere cannot have left it half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RunningEngine {
    /// The source it serves; nothing in a Mountpoint Pod, which has one.
    pub fn label(&self) -> &str {
        self.source.as_ref().map_or("", SourceName::as_str)
    }
}

impl Attendance {
    pub fn end_handshake(&mut self) {
        if self.is_handshake {
            self.is_handshake = false;
            let mut state = self.slots.state();
            state.handshakes -= 1;
            state.attended += 1;
            drop(state);
            self.slots.wake.wake();
        }
    }
}

impl Drop for Attendance {
    fn drop(&mut self) {
        self.end_handshake();
        self.slots.state().attended -= 1;
        self.slots.wake.wake();
    }
}

impl Slot {
    pub fn source(&self) -> Option<&SourceName> {
        self.source.as_ref()
    }

    /// From now on the engine can be killed.
    pub fn started(&self, process: Option<Arc<OwnedFd>>) {
        if let Some(running) = self.slots.state().running.get_mut(&self.source) {
            running.process = process;
        }
    }

    /// How often another engine was asked for.
    pub fn upgrades(&self) -> u64 {
        self.slots.state().upgrades
    }

    /// Whether the end of the engine was asked for.
    pub fn is_unwanted(&self) -> bool {
        self.slots.state().running.get(&self.source).is_some_and(|it| it.is_unwanted)
    }

    /// Gives the slot back; nobody can have it any more, because the end was asked for.
    pub fn end(self) {
        self.slots.state().is_ending = true;
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.slots.state().running.remove(&self.source);
        self.slots.given_back.notify_all();
        self.slots.wake.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_has_one_engine() {
        let slots = slots(3);
        let slot = slots.reserve(Some(source("a"))).unwrap();
        let _other = slots.reserve(Some(source("b"))).unwrap();
        let refused = slots.reserve(Some(source("a"))).unwrap_err();
        assert_eq!(refused.to_string(), "source a is already served by a running engine");
        drop(slot);
        slots.reserve(Some(source("a"))).unwrap();
    }

    #[test]
    fn a_mountpoint_pod_has_one_engine() {
        let slots = slots(1);
        let slot = slots.reserve(None).unwrap();
        let refused = slots.reserve(None).unwrap_err();
        assert_eq!(refused.to_string(), "this mounter already runs 1 of at most 1 engines");
        assert_eq!(slots.reserve(Some(source("a"))).unwrap_err(), Refused::Full { running: 1, limit: 1 });
        drop(slot);
        slots.reserve(None).unwrap();
    }

    #[test]
    fn an_ending_mounter_starts_nothing() {
        let slots = slots(1);
        let slot = slots.reserve(None).unwrap();
        assert!(!slots.end_if_idle());
        slot.end();
        assert!(slots.is_ending());
        assert_eq!(slots.running(), 0);
        assert_eq!(slots.reserve(None).unwrap_err(), Refused::Ending);
    }

    #[test]
    fn handshakes_are_bounded_and_counted_until_they_end() {
        let slots = slots(1);
        assert!(slots.has_room_for_handshake());
        let mut attended: Vec<Attendance> = (0..MAX_HANDSHAKES).map(|_| slots.attend()).collect();
        assert!(!slots.has_room_for_handshake());
        assert!(slots.is_tidy());
        attended[0].end_handshake();
        assert!(slots.has_room_for_handshake());
        assert!(!slots.is_tidy());
        attended.clear();
        assert!(slots.is_tidy());
        assert!(slots.has_room_for_handshake());
    }

    fn slots(limit: usize) -> Arc<Slots> {
        Slots::new(limit.try_into().unwrap(), Arc::new(Wake::new().unwrap()))
    }

    fn source(name: &str) -> SourceName {
        name.parse().unwrap()
    }
}
