//! How other threads stop, replace or hand over the engine of a mount.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::EventfdFlags;
use rustix::process::Signal;

use crate::heartbeat::EngineCounters;
use crate::mount::MountResources;

/// Controls the engine of one mount. Clones control the same one.
#[derive(Clone, Debug)]
pub struct SupervisorHandle(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    control: Mutex<Control>,
    /// Readable when something was requested.
    wake: OwnedFd,
}

#[derive(Debug, Default)]
struct Control {
    /// Missing until the engine was started, and on kernels without pidfd.
    process: Option<Arc<OwnedFd>>,
    /// Missing unless another supervisor could continue the mount.
    resources: Option<Arc<MountResources>>,
    is_stopped: bool,
    is_release_requested: bool,
    is_go_requested: bool,
    upgrades: u64,
}

impl SupervisorHandle {
    pub fn new() -> io::Result<Self> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(Shared { control: Mutex::default(), wake })))
    }

    /// Kills the engine; no other one takes its place.
    pub fn stop(&self) {
        self.request(|it| {
            it.is_stopped = true;
            it.signal(Signal::KILL);
        });
    }

    /// Asks the engine to store what it can and to exit; no other one takes its place.
    pub fn finish(&self) {
        self.request(|it| {
            it.is_stopped = true;
            it.signal(Signal::TERM);
        });
    }

    /// Replaces the engine by a new process of the program, which may be of another version by now.
    pub fn upgrade(&self) {
        self.request(|it| it.upgrades += 1);
    }

    /// Ends the engine as soon as no data is lost by that; another supervisor continues the mount.
    pub fn release(&self) {
        self.request(|it| it.is_release_requested = true);
    }

    /// Withdraws the request to release. Returns whether the engine serves on.
    pub fn cancel_release(&self) -> bool {
        let mut control = self.lock();
        control.is_release_requested = false;
        !control.is_stopped
    }

    /// Lets an engine take over that was started while another supervisor served the mount.
    pub fn go(&self) {
        self.request(|it| it.is_go_requested = true);
    }

    /// What another supervisor needs to continue the mount, if an engine serves it.
    pub fn resources(&self) -> Option<Arc<MountResources>> {
        self.lock().resources.clone()
    }

    /// Whether files are being written that would be lost if another supervisor continued the mount now.
    pub fn has_unstored_data(&self) -> bool {
        let Some(resources) = self.resources() else { return false };
        let counters = EngineCounters::read(&resources.state);
        counters.unstored != 0 || counters.staged_on_disk != 0
    }

    /// Whether files are being written that would be lost if the engine ended now.
    pub fn has_data_at_risk(&self) -> bool {
        self.resources().is_some_and(|it| EngineCounters::read(&it.state).unstored != 0)
    }

    /// Whether the mount is not to be served any longer.
    pub fn is_stopped(&self) -> bool {
        self.lock().is_stopped
    }

    pub(crate) fn set_process(&self, process: Option<Arc<OwnedFd>>) {
        let mut control = self.lock();
        control.process = process;
        if control.is_stopped {
            control.signal(Signal::KILL);
        }
    }

    pub(crate) fn set_resources(&self, resources: Option<Arc<MountResources>>) {
        self.lock().resources = resources;
    }

    /// Whether the engine is to be ended without a successor, unless the request was withdrawn. The caller kills it.
    pub(crate) fn accept_release(&self) -> bool {
        let mut control = self.lock();
        control.is_stopped |= control.is_release_requested;
        control.is_release_requested
    }

    pub(crate) fn is_release_requested(&self) -> bool {
        self.lock().is_release_requested
    }

    pub(crate) fn is_go_requested(&self) -> bool {
        self.lock().is_go_requested
    }

    /// How often a replacement was requested.
    pub(crate) fn upgrades(&self) -> u64 {
        self.lock().upgrades
    }

    /// Readable when something was requested since [`SupervisorHandle::clear_wake`].
    pub(crate) fn wake(&self) -> BorrowedFd<'_> {
        self.0.wake.as_fd()
    }

    pub(crate) fn clear_wake(&self) {
        let _ = rustix::io::read(&self.0.wake, &mut [0; 8]);
    }

    fn request(&self, change: impl FnOnce(&mut Control)) {
        change(&mut self.lock());
        // It can only fail because the supervisor has not read billions of earlier ones.
        let _ = rustix::io::write(&self.0.wake, &1_u64.to_ne_bytes());
    }

    fn lock(&self) -> MutexGuard<'_, Control> {
        // Every change is a single step, so a panic elsewhere cannot have left it half done. No `parking_lot` here: its five
        // packages do not fit into the mounter's small tree.
        self.0.control.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Control {
    fn signal(&self, signal: Signal) {
        if let Some(process) = &self.process {
            // ESRCH: it has just exited.
            let _ = rustix::process::pidfd_send_signal(process, signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_control_the_same_engine() {
        let handle = SupervisorHandle::new().unwrap();
        assert!(!handle.has_unstored_data(), "nothing is mounted yet");
        let other = handle.clone();
        other.upgrade();
        assert_eq!((handle.upgrades(), handle.is_stopped()), (1, false));
        other.stop();
        assert!(handle.is_stopped());
    }

    #[test]
    fn a_release_can_be_withdrawn_until_it_is_accepted() {
        let handle = SupervisorHandle::new().unwrap();
        assert!(!handle.accept_release());
        handle.release();
        assert!(handle.cancel_release());
        assert!(!handle.accept_release());
        handle.release();
        assert!(handle.accept_release());
        assert!(!handle.cancel_release());
        assert!(handle.is_stopped());
    }

    #[test]
    fn requests_wake_the_supervisor() {
        let handle = SupervisorHandle::new().unwrap();
        let mut byte = [0; 8];
        assert!(rustix::io::read(handle.wake(), &mut byte).is_err());
        assert!(!handle.is_go_requested());
        handle.go();
        assert!(handle.is_go_requested());
        assert!(rustix::io::read(handle.wake(), &mut byte).is_ok());
        handle.release();
        assert!(handle.is_release_requested());
        handle.clear_wake();
        assert!(rustix::io::read(handle.wake(), &mut byte).is_err());
    }
}
