//! A second engine that is prepared and waits: as a standby, or to replace the present one on request.

use std::fmt::{self, Display};
use std::time::{Duration, Instant};

use super::keys::Fingerprint;
use super::pulse::Signs;
use super::{Engines, GO, Keeper, PREPARED, Standby, Successor, Verdict, death, pause};
use crate::engine::{Engine, Haste, Life, News};
use crate::log::{self, Chain};

/// How often is looked whether all files are stored.
pub const DRAIN_INTERVAL: Duration = Duration::from_millis(50);

/// How long a moment without any request is waited for.
const QUIET_TIME: Duration = Duration::from_secs(2);

/// How long after new keys did not work, or files were being written, they are tried again.
const KEYS_INTERVAL: Duration = Duration::from_secs(30);

/// A healthy process stands still within microseconds.
const STANDSTILL_TIME: Duration = Duration::from_secs(1);

pub struct Spare {
    engine: Engine,
    keys: Option<Fingerprint>,
    purpose: Purpose,
    progress: Progress,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// Takes over when the present engine dies.
    Standby,
    /// Takes over as soon as nothing would be lost.
    Replacement(Reason),
}

/// Why an engine that lives is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    Asked,
    NewKeys,
}

#[derive(Clone, Copy, Debug)]
enum Progress {
    Starting { since: Instant },
    Prepared { since: Instant },
}

impl Spare {
    fn new((engine, keys): Successor, purpose: Purpose) -> Self {
        Self { engine, keys, purpose, progress: Progress::Starting { since: Instant::now() } }
    }

    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    pub fn is_waiting_for_files(&self) -> bool {
        self.purpose != Purpose::Standby && matches!(self.progress, Progress::Prepared { .. })
    }

    /// The mount is its own now. If it is not prepared yet, it goes on as any other successor.
    pub fn promote(self) -> Successor {
        if matches!(self.progress, Progress::Prepared { .. }) {
            self.engine.say(GO);
        }
        (self.engine, self.keys)
    }

    /// Nobody needs it.
    pub fn dismiss(self) {
        self.engine.kill();
        self.engine.collect();
    }
}

impl Keeper<'_> {
    pub(super) fn attend_spare(&mut self, place: &mut Option<Spare>) {
        let Some(spare) = place else { return };
        if spare.engine.letters().contains(&PREPARED) {
            spare.progress = Progress::Prepared { since: Instant::now() };
        }
        let life = spare.engine.attend(&mut |News { stream, line }| (self.relay)(stream, line));
        if life == Life::Goes {
            return;
        }
        if let Some(Spare { engine, purpose, .. }) = place.take() {
            let cause = death::cause(&engine.collect(), false);
            self.regret(purpose, &cause);
        }
    }

    /// Starts, uses or gives up the second engine.
    pub(super) fn tend_spare(&mut self, engines: &mut Engines) {
        if let Some(reason) = self.reason_to_replace(engines) {
            // A standby is of the same kind as the present engine.
            engines.spare.take().into_iter().for_each(Spare::dismiss);
            let fields: [(&str, &dyn Display); 2] = [("source", &self.label()), ("reason", &reason)];
            log::info("another engine is prepared to take over", &fields);
            engines.spare = self.start_spare(Purpose::Replacement(reason));
        }
        match &engines.spare {
            None => self.ensure_standby(engines),
            Some(Spare { progress: Progress::Starting { since }, .. }) => {
                if since.elapsed() >= self.keeping.longest_outage {
                    self.give_up_spare(engines, "did not start in time");
                }
            }
            Some(Spare { purpose: Purpose::Standby, .. }) => {}
            Some(Spare { purpose: Purpose::Replacement(reason), progress: Progress::Prepared { since }, .. }) => {
                let (reason, since) = (*reason, *since);
                let is_late = since.elapsed() >= self.keeping.drain_time;
                if !self.switch(engines, reason, since) && is_late {
                    self.give_up_spare(engines, "files are being written");
                }
            }
        }
    }

    fn reason_to_replace(&mut self, engines: &Engines) -> Option<Reason> {
        let upgrades = self.post.slot.upgrades();
        if upgrades != self.upgrades {
            self.upgrades = upgrades;
            return Some(Reason::Asked);
        }
        let newest = match &engines.spare {
            Some(spare) if spare.purpose != Purpose::Standby => spare.keys,
            Some(_) | None => engines.keys,
        };
        let (found, newest) = self.keys.look().zip(newest)?;
        let must_wait = self.unusable_keys.is_some_and(|(keys, until)| keys == found && Instant::now() < until);
        (found != newest && !must_wait).then_some(Reason::NewKeys)
    }

    fn ensure_standby(&mut self, engines: &mut Engines) {
        if self.keeping.standby == Standby::Prepared && Instant::now() >= self.standby_not_before {
            engines.spare = self.start_spare(Purpose::Standby);
        }
    }

    fn start_spare(&mut self, purpose: Purpose) -> Option<Spare> {
        let haste = match purpose {
            Purpose::Replacement(Reason::NewKeys) => Haste::WhenSure,
            Purpose::Replacement(Reason::Asked) | Purpose::Standby => Haste::AtOnce,
        };
        match self.start_engine(haste)? {
            Ok(engine) => Some(Spare::new(engine, purpose)),
            Err(error) => {
                self.regret(purpose, &Chain(&error).to_string());
                None
            }
        }
    }

    /// Ends the present engine if nothing is lost by that. The spare one takes over as after any other death.
    fn switch(&mut self, engines: &Engines, reason: Reason, since: Instant) -> bool {
        let Some(kept) = &self.kept else { return false };
        // Whatever the engine is working on is sent again by the kernel, but not by every kernel: a quiet moment is better.
        let must_be_quiet = since.elapsed() < QUIET_TIME;
        let is_everything_safe = || {
            let signs = Signs::read(&kept.state);
            signs.unstored == 0 && !(must_be_quiet && signs.begun != signs.done)
        };
        // Once more when it stands still: it may have begun to write between the two.
        if !is_everything_safe() || !engines.current.pause(STANDSTILL_TIME) {
            return false;
        }
        if !is_everything_safe() {
            engines.current.resume();
            return false;
        }
        self.verdict = Some(Verdict { cause: reason.to_string(), is_planned: true });
        engines.current.kill();
        true
    }

    fn give_up_spare(&mut self, engines: &mut Engines, cause: &str) {
        if let Some(spare) = engines.spare.take() {
            let purpose = spare.purpose;
            spare.dismiss();
            self.regret(purpose, cause);
        }
    }

    fn regret(&mut self, purpose: Purpose, cause: &str) {
        match purpose {
            Purpose::Standby => {
                self.standby_failures = self.standby_failures.saturating_add(1);
                self.standby_not_before = Instant::now() + pause(self.standby_failures.saturating_add(4));
                log::warn("no engine stands by", &[("source", &self.label()), ("cause", &cause)]);
            }
            Purpose::Replacement(reason) => {
                if reason == Reason::NewKeys {
                    self.unusable_keys = self.keys.look().map(|it| (it, Instant::now() + KEYS_INTERVAL));
                }
                let fields: [(&str, &dyn Display); 3] =
                    [("source", &self.label()), ("reason", &reason), ("cause", &cause)];
                log::warn("engine not replaced", &fields);
            }
        }
    }
}

impl Display for Reason {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Asked => "on request",
            Self::NewKeys => "for its new keys",
        })
    }
}
