//! The calls: each blocks its thread, at most until its deadline.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use tokio::runtime::Handle;
use tokio::sync::broadcast;
use zbus::{OwnedObjectPath, Variant};

use super::error::{CallError, SystemdError, is_named};
use super::link::{Link, MANAGER, MANAGER_PATH};
use super::names::{command_noted_in, unescape_argument, unit_path};
use super::service::{Kind, Limits, Outcome, Seen, Service, Started};
use super::signals::{Change, Dispatcher, Signal};
use super::terminal::Terminal;
use super::{ActiveState, UnitCommand, UnitRow};

const UNIT_EXISTS: &str = "org.freedesktop.systemd1.UnitExists";
const NO_SUCH_UNIT: &str = "org.freedesktop.systemd1.NoSuchUnit";
const UNIT: &str = "org.freedesktop.systemd1.Unit";
const SERVICE: &str = "org.freedesktop.systemd1.Service";

/// After a failure the last lines may still be on their way through the terminal.
const LAST_LINES_WITHIN: Duration = Duration::from_millis(400);

/// systemd ends a start at the service's own limit; this much later we stop believing in an answer.
const START_MARGIN: Duration = Duration::from_secs(5);

/// One row of `ListUnitsByPatterns`.
type ListedUnit = (String, String, String, String, String, String, OwnedObjectPath, u32, String, OwnedObjectPath);

/// One command of `ExecStart` as it is read back.
type ReadCommand = (String, Vec<String>, bool, u64, u64, u64, u64, u32, i32, i32);

/// systemd. Cheap to clone; all clones use one connection.
#[derive(Clone)]
pub struct Systemd {
    runtime: Handle,
    client: Client,
    ptmx: Arc<Path>,
}

#[derive(Clone)]
struct Client {
    link: Link,
    dispatcher: Dispatcher,
}

impl Systemd {
    /// Connecting goes on behind the scenes, now and after every loss. `ptmx` is where pseudoterminals of the host are opened.
    pub fn new(runtime: &Handle, socket: PathBuf, ptmx: &Path) -> Self {
        let dispatcher = Dispatcher::new();
        let link = Link::start(runtime, socket, dispatcher.clone());
        Self { runtime: runtime.clone(), client: Client { link, dispatcher }, ptmx: ptmx.into() }
    }

    /// Starts a service, waits until it runs (or, a oneshot, has ended) and reads what it says meanwhile.
    pub fn start(&self, service: &Service, deadline: Instant) -> Result<Started, SystemdError> {
        let failed = |cause| SystemdError::Terminal { ptmx: self.ptmx.to_path_buf(), cause };
        let mut terminal = Terminal::open(&self.ptmx).map_err(failed)?;
        let done =
            Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|it| failed(it.into()))?);
        let deadline = deadline.min(Instant::now() + service.starts_within + START_MARGIN);

        let start = {
            let (client, service) = (self.client.clone(), service.clone());
            let (terminal, signal) = (terminal.path().to_owned(), DoneSignal(done.clone()));
            async move {
                let _signal = signal;
                client.start(&service, &terminal).await
            }
        };
        let starting = self.runtime.spawn(async move { tokio::time::timeout_at(deadline.into(), start).await });
        // Read while waiting, or a program that says much waits for us and we for it.
        terminal.drain_until(&done, deadline).map_err(failed)?;
        let no_answer = SystemdError::NoAnswer { call: "StartTransientUnit" };
        let Ok(Ok(outcome)) = self.runtime.block_on(starting) else { return Err(no_answer) };
        let outcome = outcome?;
        let grace = match &outcome {
            Outcome::Done if service.kind == Kind::Forking => Duration::ZERO,
            Outcome::Done | Outcome::Failed(_) => LAST_LINES_WITHIN,
        };
        Ok(Started { outcome, output: terminal.finish(grace) })
    }

    /// Stops a unit and waits until it has ended. One that does not exist is fine.
    pub fn stop(&self, unit: &str, deadline: Instant) -> Result<(), SystemdError> {
        self.wait("StopUnit", deadline, self.client.stop(unit))
    }

    /// Kills every process of a unit: for those that do not listen to a polite word.
    pub fn kill(&self, unit: &str, deadline: Instant) -> Result<(), SystemdError> {
        const SIGKILL: i32 = 9;
        self.wait("KillUnit", deadline, async {
            let killed = self.client.link.call::<_, ()>("KillUnit", unit, &(unit, "all", SIGKILL)).await;
            unless_missing(killed)
        })
    }

    /// Waits until a unit is gone or has failed; whether it did before the deadline.
    pub fn wait_for_end(&self, unit: &str, deadline: Instant) -> Result<bool, SystemdError> {
        let ended = self.wait("GetUnit", deadline, self.client.wait_for_end(unit));
        match ended {
            Err(SystemdError::NoAnswer { .. }) => Ok(false),
            ended => ended.map(|()| true),
        }
    }

    /// Makes systemd forget that a unit failed, and with it the unit. One that does not exist is fine.
    pub fn reset_failed(&self, unit: &str, deadline: Instant) -> Result<(), SystemdError> {
        self.wait("ResetFailedUnit", deadline, async {
            unless_missing(self.client.link.call::<_, ()>("ResetFailedUnit", unit, &(unit,)).await)
        })
    }

    /// All units with a name like this, `*` for anything.
    pub fn list(&self, pattern: &str, deadline: Instant) -> Result<Vec<UnitRow>, SystemdError> {
        self.wait("ListUnitsByPatterns", deadline, self.client.list(pattern))
    }

    /// What a listed unit runs; nothing if it is gone meanwhile.
    pub fn command(&self, unit: &str, deadline: Instant) -> Result<Option<UnitCommand>, SystemdError> {
        self.wait("Get", deadline, self.client.command(unit))
    }

    /// Whether a service that was started surely got the arguments it was given. It may have got others if systemd was reloaded
    /// between the question and the start.
    pub fn has_its_arguments(&self, service: &Service, deadline: Instant) -> Result<bool, SystemdError> {
        if !service.is_fragile() {
            return Ok(true);
        }
        let commands = self.wait("Get", deadline, self.client.commands(&service.name))?;
        Ok(commands.first().is_some_and(|(_, command, ..)| *command == service.escaped_command()))
    }

    /// What happens to all units from now on.
    pub fn changes(&self) -> broadcast::Receiver<Change> {
        self.client.dispatcher.changes()
    }

    pub fn runtime(&self) -> &Handle {
        &self.runtime
    }

    fn wait<T>(
        &self,
        call: &'static str,
        deadline: Instant,
        work: impl Future<Output = Result<T, SystemdError>>,
    ) -> Result<T, SystemdError> {
        let timed = async { tokio::time::timeout_at(deadline.into(), work).await };
        self.runtime.block_on(timed).unwrap_or(Err(SystemdError::NoAnswer { call }))
    }
}

/// A start that systemd has accepted.
struct Asked {
    /// Unknown if the answer was lost with its connection.
    job: Option<String>,
    /// Everything about it was said over connections later than this, or over this one.
    heard_since: u64,
}

/// Wakes the thread that reads the terminal, however the task ends.
struct DoneSignal(Arc<OwnedFd>);

impl Drop for DoneSignal {
    fn drop(&mut self) {
        // It cannot be full: it is written once.
        let _ = rustix::io::write(&*self.0, &1_u64.to_ne_bytes());
    }
}

impl Client {
    async fn start(&self, service: &Service, terminal: &str) -> Result<Outcome, SystemdError> {
        // Before the question, so that no answer is missed.
        let mut watch = self.dispatcher.watch(&service.name);
        let Asked { job, heard_since } = self.ask_for(service, terminal).await?;
        let mut seen = Seen::default();
        loop {
            match watch.next().await {
                Signal::Properties(changed) => seen.absorb(&changed),
                Signal::JobRemoved { job: ended, result } if job.as_ref().is_none_or(|it| *it == ended) => {
                    // A systemd that was reloaded meanwhile does not always repeat the state before it ends the job.
                    let is_unsure = result == "done" && service.kind == Kind::Forking && !seen.is_up();
                    if is_unsure && self.row(&service.name).await?.is_some_and(|it| it.active == ActiveState::Active) {
                        return Ok(Outcome::Done);
                    }
                    return Ok(seen.decide(service.kind, result));
                }
                // Another job: somebody stops it already.
                Signal::JobRemoved { .. } => {}
                Signal::Connected { number } if number <= heard_since => {}
                Signal::Connected { .. } => match self.row(&service.name).await? {
                    Some(UnitRow { has_job: true, .. }) => {}
                    Some(UnitRow { active: ActiveState::Active, .. }) => return Ok(Outcome::Done),
                    Some(_) | None => {
                        // What was heard before it vanished says why.
                        while let Some(signal) = watch.heard() {
                            match signal {
                                Signal::Properties(changed) => seen.absorb(&changed),
                                Signal::JobRemoved { result, .. } => return Ok(seen.decide(service.kind, result)),
                                Signal::Connected { .. } => {}
                            }
                        }
                        return Ok(seen.failed());
                    }
                },
            }
        }
    }

    /// Asks for a service.
    ///
    /// When the connection is lost with the question, it may have arrived or not. Asking again under the same name finds out: nobody
    /// else uses it.
    async fn ask_for(&self, service: &Service, terminal: &str) -> Result<Asked, SystemdError> {
        const CALL: &str = "StartTransientUnit";
        let auxiliary: Vec<(String, Vec<(String, Variant<'_>)>)> = Vec::new();
        let body = (service.name.as_str(), "fail", service.properties(terminal), auxiliary);
        let mut after = 0;
        loop {
            let live = self.link.live(after).await?;
            match live.call::<_, OwnedObjectPath>(MANAGER_PATH, MANAGER, CALL, &body).await {
                Ok(job) => return Ok(Asked { job: Some(job.to_string()), heard_since: live.number() }),
                Err(CallError::Lost) => after = live.number(),
                Err(CallError::Refused(cause)) if after > 0 && is_named(&cause, UNIT_EXISTS) => {
                    // The signals of its start may have been said to the lost connection.
                    return Ok(Asked { job: None, heard_since: after });
                }
                Err(CallError::Refused(cause)) => {
                    return Err(SystemdError::Refused { call: CALL, unit: service.name.clone(), cause });
                }
            }
        }
    }

    async fn stop(&self, unit: &str) -> Result<(), SystemdError> {
        let mut watch = self.dispatcher.watch(unit);
        let job = match self.link.call::<_, OwnedObjectPath>("StopUnit", unit, &(unit, "replace")).await {
            Ok(job) => job.to_string(),
            Err(error) => return unless_missing(Err(error)),
        };
        loop {
            match watch.next().await {
                Signal::JobRemoved { job: ended, .. } if ended == job => return Ok(()),
                Signal::Connected { .. } => match self.row(unit).await? {
                    Some(row) if row.active.is_running() => {}
                    Some(_) | None => return Ok(()),
                },
                Signal::JobRemoved { .. } | Signal::Properties(_) => {}
            }
        }
    }

    async fn wait_for_end(&self, unit: &str) -> Result<(), SystemdError> {
        let mut changes = self.dispatcher.changes();
        loop {
            match self.row(unit).await? {
                Some(row) if row.active.is_running() => {}
                Some(_) | None => return Ok(()),
            }
            // Other units' changes do not matter; having missed some is a reason to look.
            loop {
                match changes.recv().await {
                    Ok(Change::MayHaveEnded { unit: ended }) if ended == unit => break,
                    Ok(Change::MayHaveEnded { .. } | Change::Says { .. }) => {}
                    Ok(Change::LookAtAll) | Err(_) => break,
                }
            }
        }
    }

    async fn list(&self, pattern: &str) -> Result<Vec<UnitRow>, SystemdError> {
        let (states, patterns): ([&str; 0], [&str; 1]) = ([], [pattern]);
        let body = (states.as_slice(), patterns.as_slice());
        let rows: Vec<ListedUnit> = self.link.call("ListUnitsByPatterns", pattern, &body).await?;
        Ok(rows
            .into_iter()
            .map(|(name, _, _, active, _, _, _, job, _, _)| UnitRow {
                name,
                active: ActiveState::parse(&active),
                has_job: job != 0,
            })
            .collect())
    }

    async fn row(&self, unit: &str) -> Result<Option<UnitRow>, SystemdError> {
        Ok(self.list(unit).await?.pop())
    }

    async fn commands(&self, unit: &str) -> Result<Vec<ReadCommand>, SystemdError> {
        self.link.property(&unit_path(unit), SERVICE, "ExecStart").await
    }

    async fn command(&self, unit: &str) -> Result<Option<UnitCommand>, SystemdError> {
        let path = unit_path(unit);
        let Some((_, command, ..)) = self.commands(unit).await?.into_iter().next() else { return Ok(None) };
        let mut environment: Vec<String> = self.link.property(&path, SERVICE, "Environment").await?;
        let noted = environment.iter().find_map(|it| command_noted_in(it));
        environment.retain(|it| command_noted_in(it).is_none());
        let started: u64 = self.link.property(&path, UNIT, "InactiveExitTimestampMonotonic").await?;
        let limit = async |name| {
            let value: u64 = self.link.property(&path, SERVICE, name).await?;
            // The largest number means that there is no limit.
            Ok::<_, SystemdError>(Some(value).filter(|it| *it != u64::MAX))
        };
        let limits = Limits {
            memory_bytes: limit("MemoryMax").await?,
            cpu_millis: limit("CPUQuotaPerSecUSec").await?.map(|it| it / 1000),
            tasks: limit("TasksMax").await?,
        };
        let command = noted.unwrap_or_else(|| command.iter().map(|it| unescape_argument(it)).collect());
        Ok(Some(UnitCommand { command, environment, limits, started }))
    }
}

/// What is not there need not be ended.
fn unless_missing<T: Default>(outcome: Result<T, SystemdError>) -> Result<T, SystemdError> {
    match outcome {
        Err(SystemdError::Refused { cause, .. }) if is_named(&cause, NO_SUCH_UNIT) => Ok(T::default()),
        outcome => outcome,
    }
}
