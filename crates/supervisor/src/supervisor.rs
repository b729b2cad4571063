//! Keeps a mount alive although its engine dies: holds the FUSE connection and the engine's state, and starts a successor.
//!
//! It knows nothing of FUSE requests or of the state but its first counters (see `heartbeat`). An engine without a control
//! channel (another `mount-s3`) is run without supervision, and its mount ends with it.

use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use s3csi_core::Chain;
use s3csi_handoff::Answer;

use crate::control::{GO, PREPARED, SERVING, SERVING_WITHOUT_RESEND};
use crate::engine::{self, CredentialCheck, Engine, EngineExit, Liveness, OutputLine, StartError, Stream};
use crate::exit_cause::{self, OomKills, SIGKILL};
use crate::heartbeat::{EngineFault, EngineHeartbeat, HeartbeatLimits, TICK};
use crate::log;
use crate::mount::{MountDescriptors, MountSpec, Resend, ServedMount, StartedEngine, TakeoverTrigger};
use crate::spare::{self, NextEngine, Spares, backoff, suspend_if_safe};

/// How the last engine of a mount exited.
#[derive(Debug)]
pub struct Outcome {
    pub exit: EngineExit,
    /// Whether an engine has reported that it serves the mount.
    pub was_ready: bool,
    /// The engine was ended so that another supervisor continues the mount.
    pub is_released: bool,
}

/// How an engine reports on stdout that it serves the mount. Other engines may not; then the node plugin finds out by itself.
const READY: &[u8] = b" is mounted at ";

/// An engine that exits by itself this soon after its start has the same problem as the one before.
const STEADY_AFTER: Duration = Duration::from_secs(10);

/// An engine that is killed this soon after its start will probably be killed again.
const SHORT_LIFE: Duration = Duration::from_millis(200);

/// How often OOM kills are counted, to explain the next death.
const OOM_INTERVAL: Duration = Duration::from_secs(5);

/// Why the supervisor killed an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
enum KillReason {
    /// It does not work.
    Fault(String),
    /// It was healthy, and another one is ready to take over.
    Replacement(String),
    /// Another supervisor continues the mount.
    Release,
}

/// What is known of the engines of the mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Started,
    /// One has used the control channel, so it can be replaced.
    Connected,
    /// One has served the mount.
    Served,
}

/// A time without an engine that serves the mount.
#[derive(Clone, Debug)]
struct Outage {
    since: Instant,
    cause: String,
    is_planned: bool,
}

/// The first engine must not serve before [`SupervisorHandle::go`].
#[derive(Clone, Copy, Debug)]
struct PendingTakeover {
    since: Instant,
    is_prepared: bool,
}

impl Default for PendingTakeover {
    fn default() -> Self {
        Self { since: Instant::now(), is_prepared: false }
    }
}

impl Outage {
    fn begin(cause: &str, is_planned: bool) -> Self {
        Self { since: Instant::now(), cause: cause.to_owned(), is_planned }
    }
}

struct Supervisor<'a> {
    mount: ServedMount<'a>,
    spares: Spares,
    report: &'a mut dyn FnMut(&Answer),
    relay: &'a mut dyn FnMut(Stream, &[u8]),
    was_ready: bool,
    stage: Stage,
    /// The node plugin waits for `held`.
    must_announce: bool,
    /// Another supervisor still serves the mount.
    pending_takeover: Option<PendingTakeover>,
    outage: Option<Outage>,
    release_requested: Option<Instant>,
    /// Engines in a row that failed early.
    failures: u32,
    /// When the current engine began to serve.
    serving_since: Option<Instant>,
    heartbeat: EngineHeartbeat,
    /// The OOM kills, and when they were counted.
    oom_kills: (OomKills, Instant),
    kill_reason: Option<KillReason>,
}

/// Runs the first engine and its successors until the mount is gone, released or cannot be kept alive. When it returns, all its
/// descriptors of the mount are closed.
pub fn run(
    spec: &MountSpec<'_>,
    descriptors: MountDescriptors,
    report: &mut dyn FnMut(&Answer),
    relay: &mut dyn FnMut(Stream, &[u8]),
) -> Result<Outcome, StartError> {
    let takeover = match descriptors {
        MountDescriptors::New { .. } => None,
        MountDescriptors::Resumed { takeover, .. } => Some(takeover),
    };
    let (mount, first) = ServedMount::start(spec, descriptors)?;
    let is_resumed = takeover.is_some();
    let mut supervisor = Supervisor {
        spares: Spares::new(&mount),
        mount,
        report,
        relay,
        was_ready: is_resumed,
        stage: if is_resumed { Stage::Served } else { Stage::Started },
        must_announce: spec.is_held && !is_resumed,
        pending_takeover: (takeover == Some(TakeoverTrigger::OnRequest)).then(PendingTakeover::default),
        outage: (takeover == Some(TakeoverTrigger::Immediate)).then(|| Outage::begin(spec.resume_cause, false)),
        release_requested: None,
        failures: 0,
        serving_since: None,
        heartbeat: EngineHeartbeat::new(),
        oom_kills: (OomKills::default(), Instant::now()),
        kill_reason: None,
    };
    Ok(supervisor.supervise(first))
}

impl Supervisor<'_> {
    fn supervise(&mut self, first: StartedEngine) -> Outcome {
        let mut current = first;
        self.on_started(&current.engine);
        let exit = loop {
            let all = std::iter::once(&current.engine).chain(self.spares.engine());
            engine::wait_for_activity(all, self.mount.spec.handle.wake(), self.interval());
            self.mount.spec.handle.clear_wake();
            let liveness = self.poll(&mut current.engine);
            self.spares.poll(&mut self.mount, self.relay);
            if liveness == Liveness::Running {
                self.tick(&current);
                continue;
            }
            let noticed = Instant::now();
            let exit = current.engine.reap();
            match self.find_successor(&exit, noticed) {
                Some(successor) => current = successor,
                None => break exit,
            }
            self.on_started(&current.engine);
        };
        self.spares.stop();
        let is_released = self.kill_reason == Some(KillReason::Release);
        Outcome { exit, was_ready: self.was_ready, is_released }
    }

    fn on_started(&mut self, engine: &Engine) {
        self.mount.spec.handle.set_process(engine.pidfd());
        log::info("engine started", &[("source", &self.mount.label()), ("pid", &engine.id())]);
        self.serving_since = None;
        self.kill_reason = None;
    }

    /// Handles messages, output and exit of the current engine.
    fn poll(&mut self, engine: &mut Engine) -> Liveness {
        for message in engine.receive() {
            self.on_message(message, engine);
        }
        engine.read_output(&mut |OutputLine { stream, line }| self.on_line(stream, line))
    }

    fn on_line(&mut self, stream: Stream, line: &[u8]) {
        (self.relay)(stream, line);
        let is_ready = stream == Stream::Stdout && line.windows(READY.len()).any(|it| it == READY);
        if is_ready && !self.was_ready {
            self.was_ready = true;
            match self.stage {
                // An engine without a control channel cannot be replaced.
                Stage::Started => {
                    self.mount.drop_resources();
                    (self.report)(&Answer::Ready);
                }
                // Its message was sent before, but may be read after.
                Stage::Connected => {}
                Stage::Served => (self.report)(&Answer::Ready),
            }
        }
    }

    fn on_message(&mut self, message: u8, engine: &Engine) {
        self.stage = self.stage.max(Stage::Connected);
        match message {
            PREPARED => match &mut self.pending_takeover {
                Some(pending) => {
                    pending.is_prepared = true;
                    (self.report)(&Answer::Prepared);
                }
                None => engine.send(GO),
            },
            SERVING => self.on_serving(engine),
            SERVING_WITHOUT_RESEND => {
                self.mount.resend = Resend::Never;
                self.on_serving(engine);
            }
            _ => {}
        }
    }

    fn on_serving(&mut self, engine: &Engine) {
        self.mount.share_resources();
        if std::mem::take(&mut self.must_announce) {
            (self.report)(&Answer::Held { request: None });
        }
        if self.was_ready && self.stage < Stage::Served {
            (self.report)(&Answer::Ready);
        }
        self.stage = Stage::Served;
        self.serving_since = Some(Instant::now());
        self.heartbeat = EngineHeartbeat::new();
        self.oom_kills = (OomKills::of(engine.id()), Instant::now());
        // The outage ends when the engine has been serving for a while.
        let Some(Outage { since, cause, is_planned }) = &self.outage else { return };
        let stall = since.elapsed();
        let stall_milliseconds = u64::try_from(stall.as_millis()).unwrap_or(u64::MAX);
        log::info("mount resumed", &[("source", &self.mount.label()), ("stall", &format_args!("{stall:?}"))]);
        let cause = cause.clone();
        (self.report)(&if *is_planned {
            Answer::Replaced { reason: cause, stall_milliseconds }
        } else {
            Answer::Resumed { cause, stall_milliseconds }
        });
    }

    /// The engine that continues after one has exited, if the mount needs one. How the last one exited does not matter: a user
    /// may have stopped it without knowing of us.
    fn find_successor(&mut self, exit: &EngineExit, noticed: Instant) -> Option<StartedEngine> {
        if self.stage < Stage::Served || self.pending_takeover.is_some() || !self.is_wanted() {
            return None;
        }
        self.on_exited(exit, noticed);
        self.spares.promote().or_else(|| self.start_successor())
    }

    fn is_wanted(&self) -> bool {
        !self.mount.spec.handle.is_stopped() && self.mount.is_connected()
    }

    fn on_exited(&mut self, exit: &EngineExit, noticed: Instant) {
        let has_oom_kills = self.oom_kills.0.have_increased();
        let (cause, is_planned) = match self.kill_reason.take() {
            Some(KillReason::Replacement(reason)) => (reason, true),
            Some(KillReason::Fault(cause)) => (cause, false),
            Some(KillReason::Release) | None => (exit_cause::describe(exit, has_oom_kills), false),
        };
        let is_own_fault = exit.status.as_ref().is_ok_and(|it| it.signal() != Some(SIGKILL));
        let lived = self.serving_since.map_or(Duration::ZERO, |it| noticed.duration_since(it));
        let is_same_problem = lived.is_zero() || (is_own_fault && lived < STEADY_AFTER);
        self.failures = if is_same_problem || lived < SHORT_LIFE { self.failures.saturating_add(1) } else { 0 };
        if is_planned {
            log::info("replacing engine", &[("source", &self.mount.label()), ("reason", &cause)]);
        } else {
            log::warn("engine died, starting another one", &[("source", &self.mount.label()), ("cause", &cause)]);
        }
        // The outage of a frozen engine began with its last heartbeat; that of engines with the same problem with the first one.
        let begun = self.outage.as_ref().filter(|_| is_same_problem).map(|it| it.since);
        let since = begun.or_else(|| self.heartbeat.silent_since()).unwrap_or(noticed);
        self.outage = Some(Outage { since, cause, is_planned });
    }

    /// `None` if the longest outage is over or the mount is gone.
    fn start_successor(&mut self) -> Option<StartedEngine> {
        loop {
            std::thread::sleep(backoff(self.failures).min(self.time_left()));
            if self.time_left().is_zero() || !self.is_wanted() {
                return None;
            }
            match self.mount.start_successor(CredentialCheck::Skip)? {
                Ok(successor) => return Some(successor),
                Err(error) => {
                    self.failures = self.failures.saturating_add(1);
                    log::warn("engine not started", &[("source", &self.mount.label()), ("error", &Chain(&error))]);
                }
            }
        }
    }

    fn time_left(&self) -> Duration {
        let outage = self.outage.as_ref().map_or(Duration::ZERO, |it| it.since.elapsed());
        self.mount.config.longest_outage.saturating_sub(outage)
    }

    fn interval(&self) -> Option<Duration> {
        let is_draining = self.spares.is_draining() || self.mount.spec.handle.is_release_requested();
        let interval = if is_draining { spare::DRAIN_INTERVAL } else { TICK };
        self.mount.is_resumable().then_some(interval)
    }

    fn tick(&mut self, current: &StartedEngine) {
        if let Some(pending) = self.pending_takeover {
            return self.await_takeover(pending, &current.engine);
        }
        if self.mount.spec.handle.is_release_requested() {
            return self.release(&current.engine);
        }
        let Some(serving_since) = self.serving_since else {
            if self.outage.is_some() && self.time_left().is_zero() {
                self.kill(&current.engine, "did not start in time".to_owned());
            }
            return;
        };
        if !self.mount.is_resumable() || self.kill_reason.is_some() {
            return;
        }
        self.release_requested = None;
        if self.outage.is_some() && serving_since.elapsed() >= STEADY_AFTER {
            self.outage = None;
            self.failures = 0;
        }
        if self.oom_kills.1.elapsed() >= OOM_INTERVAL {
            self.oom_kills = (OomKills::of(current.engine.id()), Instant::now());
        }
        match self.check_heartbeat() {
            Some(cause) => self.kill(&current.engine, cause),
            None => {
                if let Some(reason) = self.spares.advance(&mut self.mount, current) {
                    self.kill_reason = Some(KillReason::Replacement(reason.to_string()));
                    current.engine.kill();
                }
            }
        }
    }

    fn await_takeover(&mut self, pending: PendingTakeover, engine: &Engine) {
        if pending.is_prepared && self.mount.spec.handle.is_go_requested() {
            self.pending_takeover = None;
            self.outage = Some(Outage::begin("mounter replaced", true));
            engine.send(GO);
        } else if pending.since.elapsed() >= self.mount.config.drain_time + self.mount.config.longest_outage {
            self.kill(engine, "was not told to take over".to_owned());
        }
    }

    /// Ends the engine if nothing is lost by that.
    fn release(&mut self, engine: &Engine) {
        self.spares.stop();
        let requested = *self.release_requested.get_or_insert_with(Instant::now);
        let is_serving = self.serving_since.is_some();
        if self.kill_reason.is_some()
            || (is_serving && !suspend_if_safe(&self.mount, engine, requested, NextEngine::Elsewhere))
        {
            return;
        }
        if !self.mount.spec.handle.accept_release() {
            return engine.resume();
        }
        self.kill_reason = Some(KillReason::Release);
        engine.kill();
    }

    /// Why the engine must be killed, if it must.
    fn check_heartbeat(&mut self) -> Option<String> {
        let (frozen_after, stuck_after) = (self.mount.config.frozen_after, self.mount.config.stuck_after);
        let limits = HeartbeatLimits { frozen_after, stuck_after };
        let fault = self.heartbeat.observe(self.mount.counters(), self.mount.has_waiting_requests(), limits)?;
        Some(match fault {
            EngineFault::Frozen => format!("no heartbeat for {} seconds", frozen_after.as_secs_f32()),
            EngineFault::Stuck => format!("no request answered for {} seconds", stuck_after.as_secs_f32()),
        })
    }

    /// Kills an engine that does not work, once.
    fn kill(&mut self, engine: &Engine, cause: String) {
        if self.kill_reason.is_none() {
            log::warn("killing engine", &[("source", &self.mount.label()), ("cause", &cause)]);
            self.kill_reason = Some(KillReason::Fault(cause));
            engine.kill();
        }
    }
}
