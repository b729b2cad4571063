//! Asking a file system whether it answers, without waiting for it longer than the caller wants to.
//!
//! statx(2) on a FUSE mount blocks for as long as its server is silent, and no signal a thread can send to itself ends
//! that. So each question runs on a thread of its own, which is left behind at the deadline and comes back by itself
//! when the connection is aborted.

use std::io;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Instant;

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::io::Errno;

use super::{Device, Probe};

/// How many questions may be unanswered at the same time: one for each volume of a crowded node whose engines all hang,
/// or start, at once. Beyond, a question waits for a free thread; a broken node does not collect them without limit.
const THREADS: usize = 512;

/// statx needs next to no stack.
const STACK_BYTES: usize = 64 * 1024;

/// The errors of a mount that is there but not served: what kubelet's own tools call a corrupted mount, and
/// `ECONNABORTED`, which a request in flight gets from an abort.
const DEAD: [Errno; 8] = [
    Errno::NOTCONN,
    Errno::CONNABORTED,
    Errno::STALE,
    Errno::IO,
    Errno::ACCESS,
    Errno::HOSTDOWN,
    Errno::AGAIN,
    Errno::NODEV,
];

#[derive(Clone, Debug, Default)]
pub(super) struct Prober {
    threads: Arc<Threads>,
}

#[derive(Debug, Default)]
struct Threads {
    asking: Mutex<usize>,
    one_ended: Condvar,
}

/// The right to run one thread; given back when dropped, on whichever thread that is.
struct Slot(Arc<Threads>);

impl Prober {
    pub(super) fn probe(&self, at: &Path, deadline: Instant) -> Probe {
        let Some(slot) = self.slot(deadline) else {
            return Probe::Unknown(io::Error::new(
                io::ErrorKind::ResourceBusy,
                format!("{THREADS} earlier probes still wait for their file systems"),
            ));
        };
        let (sender, answer) = mpsc::sync_channel(1);
        let path = at.to_owned();
        let thread = thread::Builder::new().name("probe".to_owned()).stack_size(STACK_BYTES).spawn(move || {
            let answer = ask(&path);
            drop(slot);
            // Nobody listens any more when the deadline has passed.
            drop(sender.send(answer));
        });
        if let Err(cause) = thread {
            return Probe::Unknown(cause);
        }
        match answer.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(answer) => answer,
            Err(mpsc::RecvTimeoutError::Timeout) => Probe::Hung,
            Err(mpsc::RecvTimeoutError::Disconnected) => Probe::Unknown(io::Error::other("the probe's thread ended")),
        }
    }

    /// How many questions wait for an answer right now.
    pub(super) fn asking(&self) -> usize {
        *self.threads.lock()
    }

    fn slot(&self, deadline: Instant) -> Option<Slot> {
        let patience = deadline.saturating_duration_since(Instant::now());
        let (mut asking, _) = self
            .threads
            .one_ended
            .wait_timeout_while(self.threads.lock(), patience, |it| THREADS <= *it)
            .unwrap_or_else(PoisonError::into_inner);
        if THREADS <= *asking {
            return None;
        }
        *asking += 1;
        Some(Slot(Arc::clone(&self.threads)))
    }
}

impl Threads {
    /// A number stays right whatever happened to the thread that changed it.
    fn lock(&self) -> MutexGuard<'_, usize> {
        self.asking.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        *self.0.lock() -= 1;
        self.0.one_ended.notify_one();
    }
}

fn ask(path: &Path) -> Probe {
    // Without FORCE_SYNC the kernel may answer from its cache for a server that is long gone.
    let flags = AtFlags::STATX_FORCE_SYNC | AtFlags::SYMLINK_NOFOLLOW;
    match statx(CWD, path, flags, StatxFlags::BASIC_STATS) {
        Ok(found) => Probe::Alive { device: Device { major: found.stx_dev_major, minor: found.stx_dev_minor } },
        Err(Errno::NOENT | Errno::NOTDIR) => Probe::Missing,
        Err(errno) if DEAD.contains(&errno) => Probe::Dead(errno.into()),
        Err(errno) => Probe::Unknown(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_directory_is_alive_and_its_absence_is_not_death() {
        let prober = Prober::default();
        let deadline = Instant::now() + Duration::from_secs(10);
        assert!(matches!(prober.probe(Path::new("/"), deadline), Probe::Alive { .. }));
        assert!(matches!(prober.probe(Path::new("/no/such/path"), deadline), Probe::Missing));
        assert!(matches!(prober.probe(Path::new("/proc/self/stat/nothing"), deadline), Probe::Missing));
        assert_eq!(prober.asking(), 0);
    }

    #[test]
    fn too_many_unanswered_questions_say_nothing_about_the_next_file_system() {
        let prober = Prober::default();
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut slots: Vec<Slot> = (0..THREADS).map(|_| prober.slot(deadline).unwrap()).collect();

        assert!(matches!(prober.probe(Path::new("/"), Instant::now()), Probe::Unknown(_)));
        assert_eq!(prober.asking(), THREADS);

        slots.pop();
        assert!(matches!(prober.probe(Path::new("/"), deadline), Probe::Alive { .. }));
        drop(slots);
        assert_eq!(prober.asking(), 0);
    }
}
