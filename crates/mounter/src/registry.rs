//! Keeps track of running engines and open connections, and enforces their limits. Starts and ends nothing itself.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use s3csi_handoff::{MountRequest, SourceName};
use s3csi_supervisor::SupervisorHandle;

use crate::subscribers::Subscribers;
use crate::wake::Wake;

/// Connections whose request is not complete yet, with one thread each. A node plugin sends a request within milliseconds, so
/// further peers can wait in the queue of the socket.
const MAX_HANDSHAKES: usize = 64;

/// The engines and connections of a mounter.
#[derive(Debug)]
pub struct EngineRegistry {
    limit: NonZeroUsize,
    state: Mutex<State>,
    /// Notified when an engine was removed.
    removed: Condvar,
    wake: Arc<Wake>,
}

/// Why no engine may be started for a request.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejected {
    #[error("source {source_name} is already served by a running engine")]
    SourceBusy { source_name: SourceName },

    #[error("this mounter already runs {running} of at most {limit} engines")]
    Full { running: usize, limit: usize },

    #[error("this mounter is shutting down")]
    ShuttingDown,
}

/// An open connection. Counts as a handshake until its request is complete.
#[derive(Debug)]
pub struct ConnectionGuard {
    registry: Arc<EngineRegistry>,
    is_handshake: bool,
}

/// Identifies an engine; differs from that of a later one of the same source.
#[derive(Debug)]
pub struct EngineId {
    source: Option<SourceName>,
    number: u64,
}

/// What other connections may do with a registered engine.
#[derive(Debug)]
pub struct EngineEntry {
    pub handle: SupervisorHandle,
    pub subscribers: Subscribers,
    pub request: MountRequest,
}

/// The right to run one engine; ends when dropped.
#[derive(Debug)]
pub struct EngineRegistration {
    registry: Arc<EngineRegistry>,
    source: Option<SourceName>,
    engine: Arc<EngineEntry>,
}

#[derive(Debug)]
struct Running {
    number: u64,
    engine: Arc<EngineEntry>,
}

#[derive(Debug, Default)]
struct State {
    running: BTreeMap<Option<SourceName>, Running>,
    /// The number of the next engine.
    next: u64,
    handshakes: usize,
    /// Connections after their handshake: running engines, and exited ones that are being cleaned up.
    connections: usize,
    is_stopping: bool,
    is_shutting_down: bool,
}

impl EngineRegistry {
    pub fn new(limit: NonZeroUsize, wake: Arc<Wake>) -> Arc<Self> {
        Arc::new(Self { limit, state: Mutex::default(), removed: Condvar::new(), wake })
    }

    pub fn register(
        self: &Arc<Self>,
        source: Option<SourceName>,
        engine: EngineEntry,
    ) -> Result<EngineRegistration, Rejected> {
        let mut state = self.state();
        if state.is_stopping || state.is_shutting_down {
            return Err(Rejected::ShuttingDown);
        }
        if let Some(source_name) = &source
            && state.running.contains_key(&source)
        {
            return Err(Rejected::SourceBusy { source_name: source_name.clone() });
        }
        let (running, limit) = (state.running.len(), self.limit.get());
        if limit <= running || state.running.contains_key(&source) {
            return Err(Rejected::Full { running, limit });
        }
        let number = state.next;
        state.next += 1;
        let engine = Arc::new(engine);
        state.running.insert(source.clone(), Running { number, engine: Arc::clone(&engine) });
        Ok(EngineRegistration { registry: Arc::clone(self), source, engine })
    }

    /// Counts a new connection. The caller has checked that there is room for it.
    pub fn add_connection(self: &Arc<Self>) -> ConnectionGuard {
        self.state().handshakes += 1;
        ConnectionGuard { registry: Arc::clone(self), is_handshake: true }
    }

    /// The accept loop is woken when a handshake has ended, so it can wait for this.
    pub fn has_room_for_handshake(&self) -> bool {
        self.state().handshakes < MAX_HANDSHAKES
    }

    /// The engine that currently serves a source.
    pub fn find(&self, source: Option<&SourceName>) -> Option<EngineId> {
        let source = source.cloned();
        let number = self.state().running.get(&source)?.number;
        Some(EngineId { source, number })
    }

    /// Whether the engine exited and was removed within this time.
    pub fn wait_until_removed(&self, engine: &EngineId, time: Duration) -> bool {
        let is_there =
            |state: &mut State| state.running.get(&engine.source).is_some_and(|it| it.number == engine.number);
        let waited = self.removed.wait_timeout_while(self.state(), time, is_there);
        let (_state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        !timeout.timed_out()
    }

    /// Kills the engine; no other one takes its place.
    pub fn kill(&self, engine: &EngineId) {
        if let Some(entry) = self.entry(engine) {
            entry.handle.stop();
        }
    }

    /// `None` if the engine has exited.
    pub fn entry(&self, engine: &EngineId) -> Option<Arc<EngineEntry>> {
        let state = self.state();
        let running = state.running.get(&engine.source).filter(|it| it.number == engine.number);
        running.map(|it| Arc::clone(&it.engine))
    }

    /// Replaces all engines by new processes of the program, which may be of another version by now.
    pub fn upgrade_all(&self) {
        self.state().running.values().for_each(|it| it.engine.handle.upgrade());
    }

    /// From now on no engine is started: its mount would only have to wait for the next mounter again.
    pub fn reject_mounts(&self) {
        self.state().is_stopping = true;
    }

    /// Lets other mounters continue the mounts whose descriptors a node plugin holds, and returns how many there are. `None` while
    /// one of them has data that would be lost: this mounter has to store it before the next one starts, and the others would
    /// wait for that without an engine. Likewise while the node plugin is gone: it holds them again when it has restarted.
    pub fn release_held(&self) -> Option<usize> {
        let state = self.state();
        let held: Vec<_> = state.running.values().map(|it| &it.engine).filter(|it| it.request.hold).collect();
        if held.iter().any(|it| it.handle.has_unstored_data() || !it.subscribers.is_connected()) {
            return None;
        }
        for engine in &held {
            engine.handle.release();
        }
        Some(held.len())
    }

    pub fn running(&self) -> usize {
        self.state().running.len()
    }

    /// Starts to shut down, unless an engine is running.
    pub fn shut_down_if_idle(&self) -> bool {
        let mut state = self.state();
        state.is_shutting_down |= state.running.is_empty();
        state.is_shutting_down
    }

    pub fn is_shutting_down(&self) -> bool {
        self.state().is_shutting_down
    }

    /// Whether all exited engines are cleaned up.
    pub fn is_clean(&self) -> bool {
        self.state().connections == 0
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change is a single step, so a panic elsewhere cannot have left it half done. No `parking_lot` here: its five
        // packages do not fit into the mounter's small tree.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl EngineId {
    /// The source it serves; empty in a Mountpoint Pod, which has only one.
    pub fn label(&self) -> &str {
        self.source.as_ref().map_or("", SourceName::as_str)
    }
}

impl ConnectionGuard {
    pub fn end_handshake(&mut self) {
        if self.is_handshake {
            self.is_handshake = false;
            let mut state = self.registry.state();
            state.handshakes -= 1;
            state.connections += 1;
            drop(state);
            self.registry.wake.wake();
        }
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.end_handshake();
        self.registry.state().connections -= 1;
        self.registry.wake.wake();
    }
}

impl EngineRegistration {
    pub fn source(&self) -> Option<&SourceName> {
        self.source.as_ref()
    }

    pub fn engine(&self) -> &Arc<EngineEntry> {
        &self.engine
    }

    /// The name of the source in log lines.
    pub fn label(&self) -> &str {
        self.source.as_ref().map_or("", SourceName::as_str)
    }

    /// Removes the engine and shuts the mounter down.
    pub fn shut_down(self) {
        self.registry.state().is_shutting_down = true;
    }
}

impl Drop for EngineRegistration {
    fn drop(&mut self) {
        self.registry.state().running.remove(&self.source);
        self.registry.removed.notify_all();
        self.registry.wake.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_has_one_engine() {
        let registry = registry(3);
        let registration = registry.register(Some(source("a")), entry()).unwrap();
        let _other = registry.register(Some(source("b")), entry()).unwrap();
        let rejected = registry.register(Some(source("a")), entry()).unwrap_err();
        assert_eq!(rejected.to_string(), "source a is already served by a running engine");
        drop(registration);
        registry.register(Some(source("a")), entry()).unwrap();
    }

    #[test]
    fn a_mountpoint_pod_has_one_engine() {
        let registry = registry(1);
        let registration = registry.register(None, entry()).unwrap();
        let rejected = registry.register(None, entry()).unwrap_err();
        assert_eq!(rejected.to_string(), "this mounter already runs 1 of at most 1 engines");
        assert_eq!(registry.register(Some(source("a")), entry()).unwrap_err(), Rejected::Full { running: 1, limit: 1 });
        drop(registration);
        registry.register(None, entry()).unwrap();
    }

    #[test]
    fn a_mounter_that_shuts_down_starts_nothing() {
        let registry = registry(1);
        let registration = registry.register(None, entry()).unwrap();
        assert!(!registry.shut_down_if_idle());
        registration.shut_down();
        assert!(registry.is_shutting_down());
        assert_eq!(registry.running(), 0);
        assert_eq!(registry.register(None, entry()).unwrap_err(), Rejected::ShuttingDown);
    }

    #[test]
    fn a_stopping_mounter_serves_its_mounts_and_accepts_no_new_ones() {
        let registry = registry(2);
        let registration = registry.register(Some(source("a")), entry()).unwrap();
        registry.reject_mounts();
        assert_eq!(registry.register(Some(source("b")), entry()).unwrap_err(), Rejected::ShuttingDown);
        assert!(!registry.shut_down_if_idle());
        drop(registration);
        assert!(registry.shut_down_if_idle());
    }

    #[test]
    fn handshakes_are_bounded_and_counted_until_they_end() {
        let registry = registry(1);
        assert!(registry.has_room_for_handshake());
        let mut connections: Vec<ConnectionGuard> = (0..MAX_HANDSHAKES).map(|_| registry.add_connection()).collect();
        assert!(!registry.has_room_for_handshake());
        assert!(registry.is_clean());
        connections[0].end_handshake();
        assert!(registry.has_room_for_handshake());
        assert!(!registry.is_clean());
        connections.clear();
        assert!(registry.is_clean());
        assert!(registry.has_room_for_handshake());
    }

    fn registry(limit: usize) -> Arc<EngineRegistry> {
        EngineRegistry::new(limit.try_into().unwrap(), Arc::new(Wake::new().unwrap()))
    }

    fn entry() -> EngineEntry {
        let (stream, _) = std::os::unix::net::UnixStream::pair().unwrap();
        EngineEntry {
            handle: SupervisorHandle::new().unwrap(),
            subscribers: Subscribers::new(stream),
            request: MountRequest::default(),
        }
    }

    fn source(name: &str) -> SourceName {
        name.parse().unwrap()
    }
}
