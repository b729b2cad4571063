//! The second engine of a mount: prepared as a standby, or to replace the current one.

use std::fmt::{self, Display};
use std::time::{Duration, Instant};

use s3csi_core::Chain;

use crate::config::Standby;
use crate::control::{GO, PREPARED};
use crate::credentials_file::Fingerprint;
use crate::engine::{CredentialCheck, Engine, Liveness, OutputLine, Stream};
use crate::mount::{Resend, ServedMount, StartedEngine};
use crate::{exit_cause, log};

/// How often a replacement checks whether all files are stored.
pub const DRAIN_INTERVAL: Duration = Duration::from_millis(50);

/// How long a replacement waits for a moment without any request.
const QUIET_TIME: Duration = Duration::from_secs(2);

/// When a replacement for new credentials is tried again.
const CREDENTIALS_RETRY_INTERVAL: Duration = Duration::from_secs(30);

/// A healthy process stops within microseconds.
const SUSPEND_TIME: Duration = Duration::from_secs(1);

/// Failed standbys are restarted as slowly as the fifth successor in a row.
const STANDBY_PATIENCE: u32 = 4;

const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const LONGEST_BACKOFF: Duration = Duration::from_secs(2);

/// Why a healthy engine is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplacementReason {
    UpgradeRequested,
    CredentialsChanged,
}

/// Starts, uses and gives up the second engine of a mount.
pub struct Spares {
    spare: Option<Spare>,
    /// The upgrade requests that were handled.
    upgrades: u64,
    /// Credentials that did not work, and when they are tried again.
    rejected_credentials: Option<(Fingerprint, Instant)>,
    standby_failures: u32,
    standby_not_before: Instant,
}

struct Spare {
    engine: Engine,
    credentials: Option<Fingerprint>,
    purpose: Purpose,
    progress: Progress,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// Takes over when the current engine dies.
    Standby,
    /// Takes over as soon as nothing would be lost.
    Replacement(ReplacementReason),
}

#[derive(Clone, Copy, Debug)]
enum Progress {
    Starting { since: Instant },
    Prepared { since: Instant },
}

impl Spares {
    pub fn new(mount: &ServedMount<'_>) -> Self {
        Self {
            spare: None,
            upgrades: mount.spec.handle.upgrades(),
            rejected_credentials: None,
            standby_failures: 0,
            standby_not_before: Instant::now(),
        }
    }

    pub fn engine(&self) -> Option<&Engine> {
        self.spare.as_ref().map(|it| &it.engine)
    }

    pub fn is_draining(&self) -> bool {
        let is_draining = |it: &Spare| it.purpose != Purpose::Standby && it.is_prepared();
        self.spare.as_ref().is_some_and(is_draining)
    }

    /// Handles messages, output and exit of the spare engine.
    pub fn poll(&mut self, mount: &mut ServedMount<'_>, relay: &mut dyn FnMut(Stream, &[u8])) {
        let Some(spare) = &mut self.spare else { return };
        if spare.engine.receive().contains(&PREPARED) {
            spare.progress = Progress::Prepared { since: Instant::now() };
        }
        if spare.engine.read_output(&mut |OutputLine { stream, line }| relay(stream, line)) == Liveness::Running {
            return;
        }
        if let Some(Spare { engine, purpose, .. }) = self.spare.take() {
            let cause = exit_cause::describe(&engine.reap(), false);
            self.on_failed(mount, purpose, &cause);
        }
    }

    /// Takes the spare engine as the successor of one that died. It continues from where it is, prepared or not.
    pub fn promote(&mut self) -> Option<StartedEngine> {
        let spare = self.spare.take()?;
        if spare.is_prepared() {
            spare.engine.send(GO);
        }
        Some(StartedEngine { engine: spare.engine, credentials: spare.credentials })
    }

    /// Kills the spare engine, if there is one.
    pub fn stop(&mut self) {
        if let Some(spare) = self.spare.take() {
            spare.engine.kill();
            spare.engine.reap();
        }
    }

    /// Starts or gives up the spare engine. Returns the reason if it is to take over now: then the current engine was suspended
    /// and must be killed.
    pub fn advance(&mut self, mount: &mut ServedMount<'_>, current: &StartedEngine) -> Option<ReplacementReason> {
        if let Some(reason) = self.reason_to_replace(mount, current) {
            // A standby has the version and credentials of the current engine.
            self.stop();
            let fields: [(&str, &dyn Display); 2] = [("source", &mount.label()), ("reason", &reason)];
            log::info("preparing a replacement engine", &fields);
            self.start(mount, Purpose::Replacement(reason));
        }
        let Some(spare) = &self.spare else {
            self.ensure_standby(mount);
            return None;
        };
        match (spare.purpose, spare.progress) {
            (_, Progress::Starting { since }) => {
                if since.elapsed() >= mount.config.longest_outage {
                    self.give_up(mount, "did not start in time");
                }
                None
            }
            (Purpose::Standby, Progress::Prepared { .. }) => None,
            (Purpose::Replacement(reason), Progress::Prepared { since }) => {
                if suspend_if_safe(mount, &current.engine, since, NextEngine::Here) {
                    return Some(reason);
                }
                if since.elapsed() >= mount.config.drain_time {
                    let cause = busy_cause(mount);
                    self.give_up(mount, cause);
                }
                None
            }
        }
    }

    fn reason_to_replace(&mut self, mount: &mut ServedMount<'_>, current: &StartedEngine) -> Option<ReplacementReason> {
        let upgrades = mount.spec.handle.upgrades();
        if upgrades != self.upgrades {
            self.upgrades = upgrades;
            return Some(ReplacementReason::UpgradeRequested);
        }
        let newest = match &self.spare {
            Some(spare) if spare.purpose != Purpose::Standby => spare.credentials,
            Some(_) | None => current.credentials,
        };
        let (found, newest) = mount.credentials.fingerprint().zip(newest)?;
        let is_rejected = self.rejected_credentials.is_some_and(|(it, until)| it == found && Instant::now() < until);
        (found != newest && !is_rejected).then_some(ReplacementReason::CredentialsChanged)
    }

    fn ensure_standby(&mut self, mount: &mut ServedMount<'_>) {
        if mount.config.standby == Standby::Prepared && Instant::now() >= self.standby_not_before {
            self.start(mount, Purpose::Standby);
        }
    }

    fn start(&mut self, mount: &mut ServedMount<'_>, purpose: Purpose) {
        let check = match purpose {
            Purpose::Replacement(ReplacementReason::CredentialsChanged) => CredentialCheck::Require,
            Purpose::Replacement(ReplacementReason::UpgradeRequested) | Purpose::Standby => CredentialCheck::Skip,
        };
        match mount.start_successor(check) {
            Some(Ok(StartedEngine { engine, credentials })) => {
                let progress = Progress::Starting { since: Instant::now() };
                self.spare = Some(Spare { engine, credentials, purpose, progress });
            }
            Some(Err(error)) => self.on_failed(mount, purpose, &Chain(&error).to_string()),
            None => {}
        }
    }

    fn give_up(&mut self, mount: &mut ServedMount<'_>, cause: &str) {
        if let Some(purpose) = self.spare.as_ref().map(|it| it.purpose) {
            self.stop();
            self.on_failed(mount, purpose, cause);
        }
    }

    fn on_failed(&mut self, mount: &mut ServedMount<'_>, purpose: Purpose, cause: &str) {
        match purpose {
            Purpose::Standby => {
                self.standby_failures = self.standby_failures.saturating_add(1);
                let failures = self.standby_failures.saturating_add(STANDBY_PATIENCE);
                self.standby_not_before = Instant::now() + backoff(failures);
                log::warn("standby engine failed", &[("source", &mount.label()), ("cause", &cause)]);
            }
            Purpose::Replacement(reason) => {
                if reason == ReplacementReason::CredentialsChanged {
                    let retry_at = Instant::now() + CREDENTIALS_RETRY_INTERVAL;
                    self.rejected_credentials = mount.credentials.fingerprint().map(|it| (it, retry_at));
                }
                let fields: [(&str, &dyn Display); 3] =
                    [("source", &mount.label()), ("reason", &reason), ("cause", &cause)];
                log::warn("engine not replaced", &fields);
            }
        }
    }
}

impl Spare {
    fn is_prepared(&self) -> bool {
        matches!(self.progress, Progress::Prepared { .. })
    }
}

/// Where the engine that takes over runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextEngine {
    /// In this container.
    Here,
    /// In another one, without this one's staging directory.
    Elsewhere,
}

/// Suspends the current engine if killing it loses nothing.
pub fn suspend_if_safe(mount: &ServedMount<'_>, current: &Engine, prepared_since: Instant, next: NextEngine) -> bool {
    // Requests in flight would fail where the kernel does not send them again; elsewhere a quiet moment is better.
    let must_be_quiet = mount.resend == Resend::Never || prepared_since.elapsed() < QUIET_TIME;
    let is_safe = || {
        let counters = mount.counters();
        counters.unstored == 0
            && !(next == NextEngine::Elsewhere && counters.staged_on_disk != 0)
            && !(must_be_quiet && counters.begun != counters.done)
    };
    if !mount.is_resumable() || !is_safe() || !current.suspend(SUSPEND_TIME) {
        return false;
    }
    // It may have begun to write before it stopped.
    let is_still_safe = is_safe();
    if !is_still_safe {
        current.resume();
    }
    is_still_safe
}

/// Why an engine cannot be replaced or released.
pub fn busy_cause(mount: &ServedMount<'_>) -> &'static str {
    if 0 < mount.counters().unstored { "files are being written" } else { "requests are in flight" }
}

/// How long to wait before the next start after so many failures in a row.
pub fn backoff(failures: u32) -> Duration {
    match failures.checked_sub(2) {
        None => Duration::ZERO,
        Some(doublings) => FIRST_BACKOFF.saturating_mul(1 << doublings.min(10)).min(LONGEST_BACKOFF),
    }
}

impl Display for ReplacementReason {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::UpgradeRequested => "upgrade requested",
            Self::CredentialsChanged => "credentials changed",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_starts_are_immediate_and_later_ones_wait() {
        let times: Vec<u128> = (0..9).map(|it| backoff(it).as_millis()).collect();
        assert_eq!(times, [0, 0, 100, 200, 400, 800, 1600, 2000, 2000]);
        assert_eq!(backoff(u32::MAX), LONGEST_BACKOFF);
    }
}
