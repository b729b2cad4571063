//! A second engine that is prepared and waits: as a standby, or to replace the present one on request.

use std::time::{Duration, Instant};

use super::death;
use super::pulse::Signs;
use super::{Engines, GO, Keeper, PREPARED, Standby, pause};
use crate::engine::{Engine, Life, News};
use crate::log::{self, Chain};

/// How often is looked whether all files are stored.
pub const DRAIN_INTERVAL: Duration = Duration::from_millis(50);

/// How long a moment without any request is waited for.
const QUIET_TIME: Duration = Duration::from_secs(2);

/// A healthy process stands still within microseconds.
const STANDSTILL_TIME: Duration = Duration::from_secs(1);

pub struct Spare {
    engine: Engine,
    purpose: Purpose,
    progress: Progress,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// Takes over when the present engine dies.
    Standby,
    /// Takes over as soon as nothing would be lost.
    Upgrade,
}

#[derive(Clone, Copy, Debug)]
enum Progress {
    Starting { since: Instant },
    Prepared { since: Instant },
}

impl Spare {
    fn new(engine: Engine, purpose: Purpose) -> Self {
        Self { engine, purpose, progress: Progress::Starting { since: Instant::now() } }
    }

    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    pub fn is_waiting_for_files(&self) -> bool {
        self.purpose == Purpose::Upgrade && matches!(self.progress, Progress::Prepared { .. })
    }

    /// The mount is its own now. If it is not prepared yet, it goes on as any other successor.
    pub fn promote(self) -> Engine {
        if matches!(self.progress, Progress::Prepared { .. }) {
            self.engine.say(GO);
        }
        self.engine
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
        let upgrades = self.post.slot.upgrades();
        if upgrades != self.upgrades {
            self.upgrades = upgrades;
            // A standby is of the same kind as the present engine.
            engines.spare.take().into_iter().for_each(Spare::dismiss);
            log::info("another engine is prepared to take over", &[("source", &self.label())]);
            engines.spare = self.start_spare(Purpose::Upgrade);
        }
        match &engines.spare {
            None => self.ensure_standby(engines),
            Some(Spare { progress: Progress::Starting { since }, .. }) => {
                if since.elapsed() >= self.keeping.longest_outage {
                    self.give_up_spare(engines, "did not start in time");
                }
            }
            Some(Spare { purpose: Purpose::Standby, .. }) => {}
            Some(Spare { purpose: Purpose::Upgrade, progress: Progress::Prepared { since }, .. }) => {
                let since = *since;
                let is_late = since.elapsed() >= self.keeping.drain_time;
                if !self.switch(engines, since) && is_late {
                    self.give_up_spare(engines, "files are being written");
                }
            }
        }
    }

    fn ensure_standby(&mut self, engines: &mut Engines) {
        if self.keeping.standby == Standby::Prepared && Instant::now() >= self.standby_not_before {
            engines.spare = self.start_spare(Purpose::Standby);
        }
    }

    fn start_spare(&mut self, purpose: Purpose) -> Option<Spare> {
        match self.start_engine()? {
            Ok(engine) => Some(Spare::new(engine, purpose)),
            Err(error) => {
                self.regret(purpose, &Chain(&error).to_string());
                None
            }
        }
    }

    /// Ends the present engine if nothing is lost by that. The spare one takes over as after any other death.
    fn switch(&mut self, engines: &Engines, since: Instant) -> bool {
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
        self.verdict = Some("replaced on request".to_owned());
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
            Purpose::Upgrade => {
                log::warn("engine not replaced", &[("source", &self.label()), ("cause", &cause)]);
            }
        }
    }
}
