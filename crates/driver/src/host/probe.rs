//! Probes a file system with a deadline.
//!
//! statx(2) on a FUSE mount blocks until the server answers, and cannot be interrupted from within the process. So each probe
//! runs on its own thread, which is abandoned at the deadline and ends when the server answers or the connection ends.
//!
//! A file system has one probe in flight at a time, whatever path it is probed at: further callers wait for the answer to the
//! same one. So a server that does not answer, or answers only some of its requests, costs one thread and not one per call. The
//! threads are bounded by the number of mounts, which only the node makes: however many servers hang, others can be probed.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::io::Errno;

use super::{Device, Probe};

/// Probes in flight at the same time whose file system is not known, so that they may be several of one file system. A further
/// one waits for a free thread.
const NAMELESS: usize = 64;

/// statx needs next to no stack.
const STACK_BYTES: usize = 64 * 1024;

/// A caller with less time than this learns nothing from the silence of a server: a healthy one on a node without free CPU
/// may need as long.
const SHORTEST_SILENCE: Duration = Duration::from_millis(100);

/// The errors of the kernel for a FUSE connection that has ended, and for a request that was in flight then. Every other error
/// is an answer of the server, which is therefore alive.
const DEAD: [Errno; 2] = [Errno::NOTCONN, Errno::CONNABORTED];

#[derive(Clone, Debug, Default)]
pub(super) struct Prober(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    in_flight: Mutex<InFlight>,
    released: Condvar,
}

#[derive(Debug, Default)]
struct InFlight {
    /// Probes of paths whose file system is not known.
    nameless: usize,
    by_device: HashMap<Device, Arc<Pending>>,
}

/// A probe whose answer several callers may wait for.
#[derive(Debug, Default)]
struct Pending {
    answer: Mutex<Option<Answer>>,
    answered: Condvar,
}

#[derive(Clone, Copy, Debug)]
enum Answer {
    Alive(Device),
    Dead(Errno),
    Missing,
    Unknown(Errno),
}

impl Prober {
    pub(super) fn probe(&self, at: &Path, deadline: Instant) -> Probe {
        let start = Instant::now();
        let (pending, is_joined) = match self.join_or_start(at, deadline) {
            Ok(pending) => pending,
            Err(cause) => return Probe::Unknown(cause),
        };
        let mut answer = pending.answer.lock();
        pending.answered.wait_while_until(&mut answer, |it| it.is_none(), deadline);
        match *answer {
            // Another path of the same file system is gone.
            Some(Answer::Missing) if is_joined => self.probe(at, deadline),
            Some(answer) => answer.into(),
            None if start.elapsed() < SHORTEST_SILENCE => {
                let message = "the deadline of the call was too near to wait for an answer";
                Probe::Unknown(io::Error::new(io::ErrorKind::TimedOut, message))
            }
            None => Probe::Hung,
        }
    }

    /// The number of probes in flight.
    pub(super) fn in_flight(&self) -> usize {
        let in_flight = self.0.in_flight.lock();
        in_flight.nameless + in_flight.by_device.len()
    }

    /// The probe of this file system that is in flight, or a new one; and whether it was in flight.
    fn join_or_start(&self, at: &Path, deadline: Instant) -> io::Result<(Arc<Pending>, bool)> {
        let device = device_of(at);
        let shared = &self.0;
        let mut in_flight = shared.in_flight.lock();
        loop {
            if let Some(pending) = device.and_then(|it| in_flight.by_device.get(&it)) {
                return Ok((pending.clone(), true));
            }
            if device.is_some() || in_flight.nameless < NAMELESS {
                break;
            }
            if shared.released.wait_until(&mut in_flight, deadline).timed_out() {
                let message = format!("{NAMELESS} earlier probes are still waiting for their file systems");
                return Err(io::Error::new(io::ErrorKind::ResourceBusy, message));
            }
        }
        let pending = Arc::new(Pending::default());
        let (path, slot) = (at.to_owned(), Slot { shared: shared.clone(), device, pending: pending.clone() });
        match device {
            Some(device) => drop(in_flight.by_device.insert(device, pending.clone())),
            None => in_flight.nameless += 1,
        }
        drop(in_flight);
        let probe = move || slot.answer(stat_root(&path));
        thread::Builder::new().name("probe".to_owned()).stack_size(STACK_BYTES).spawn(probe)?;
        Ok((pending, false))
    }
}

/// A thread in flight; leaves the map when dropped, on whichever thread that is.
struct Slot {
    shared: Arc<Shared>,
    device: Option<Device>,
    pending: Arc<Pending>,
}

impl Slot {
    /// Leaves the map first, so that a caller that probes again after this answer starts a new probe.
    fn answer(self, answer: Answer) {
        let pending = self.pending.clone();
        drop(self);
        *pending.answer.lock() = Some(answer);
        pending.answered.notify_all();
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut in_flight = self.shared.in_flight.lock();
        match self.device {
            Some(device) => drop(in_flight.by_device.remove(&device)),
            None => in_flight.nameless -= 1,
        }
        drop(in_flight);
        self.shared.released.notify_one();
    }
}

impl From<Answer> for Probe {
    fn from(answer: Answer) -> Self {
        match answer {
            Answer::Alive(device) => Self::Alive { device },
            Answer::Dead(errno) => Self::Dead(errno.into()),
            Answer::Missing => Self::Missing,
            Answer::Unknown(errno) => Self::Unknown(errno.into()),
        }
    }
}

/// The file system at a path. `DONT_SYNC`: the kernel knows the device of a mount, so the server gets no request.
fn device_of(path: &Path) -> Option<Device> {
    let flags = AtFlags::STATX_DONT_SYNC | AtFlags::SYMLINK_NOFOLLOW;
    let found = statx(CWD, path, flags, StatxFlags::empty()).ok()?;
    Some(Device { major: found.stx_dev_major, minor: found.stx_dev_minor })
}

fn stat_root(path: &Path) -> Answer {
    // Without FORCE_SYNC the kernel may answer from its cache although the server is gone.
    let flags = AtFlags::STATX_FORCE_SYNC | AtFlags::SYMLINK_NOFOLLOW;
    match statx(CWD, path, flags, StatxFlags::BASIC_STATS) {
        Ok(found) => Answer::Alive(Device { major: found.stx_dev_major, minor: found.stx_dev_minor }),
        Err(Errno::NOENT | Errno::NOTDIR) => Answer::Missing,
        Err(errno) if DEAD.contains(&errno) => Answer::Dead(errno),
        Err(errno) => Answer::Unknown(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_alive_and_a_missing_one_is_not_dead() {
        let prober = Prober::default();
        let deadline = Instant::now() + Duration::from_secs(10);
        assert!(matches!(prober.probe(Path::new("/"), deadline), Probe::Alive { .. }));
        assert!(matches!(prober.probe(Path::new("/no/such/path"), deadline), Probe::Missing));
        assert!(matches!(prober.probe(Path::new("/proc/self/stat/nothing"), deadline), Probe::Missing));
        assert_eq!(prober.in_flight(), 0);
    }

    #[test]
    fn probes_without_a_file_system_are_bounded_and_take_no_room_of_others() {
        let prober = Prober::default();
        let (nowhere, deadline) = (Path::new("/no/such/path"), Instant::now() + Duration::from_secs(10));
        prober.0.in_flight.lock().nameless = NAMELESS;
        assert!(matches!(prober.probe(nowhere, Instant::now()), Probe::Unknown(_)));
        assert!(matches!(prober.probe(Path::new("/"), deadline), Probe::Alive { .. }));
        assert_eq!(prober.in_flight(), NAMELESS);

        prober.0.in_flight.lock().nameless = NAMELESS - 1;
        assert!(matches!(prober.probe(nowhere, deadline), Probe::Missing));
        assert_eq!(prober.in_flight(), NAMELESS - 1);
    }

    #[test]
    fn a_deadline_that_has_passed_says_nothing_about_the_server() {
        let prober = Prober::default();
        let pending = Arc::new(Pending::default());
        let device = device_of(Path::new("/")).unwrap();
        prober.0.in_flight.lock().by_device.insert(device, pending.clone());
        assert!(matches!(prober.probe(Path::new("/"), Instant::now()), Probe::Unknown(_)));
        let silence = Instant::now() + SHORTEST_SILENCE + Duration::from_millis(1);
        assert!(matches!(prober.probe(Path::new("/"), silence), Probe::Hung));
    }

    #[test]
    fn a_file_system_has_one_probe_in_flight_and_its_answer_serves_all_callers() {
        let prober = Prober::default();
        let pending = Arc::new(Pending::default());
        let device = device_of(Path::new("/")).unwrap();
        prober.0.in_flight.lock().by_device.insert(device, pending.clone());
        let deadline = Instant::now() + Duration::from_mins(1);
        thread::scope(|scope| {
            let waiting: Vec<_> = (0..20).map(|_| scope.spawn(|| prober.probe(Path::new("/"), deadline))).collect();
            assert_eq!(prober.in_flight(), 1, "no thread was started for a file system with a probe in flight");
            *pending.answer.lock() = Some(Answer::Dead(Errno::NOTCONN));
            pending.answered.notify_all();
            for probe in waiting {
                assert!(matches!(probe.join().unwrap(), Probe::Dead(_)));
            }
        });
    }
}
