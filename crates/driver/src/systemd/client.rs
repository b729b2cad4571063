//! The calls to systemd. Each blocks its thread until the deadline at most.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use rustix::process::Signal;
use tokio::runtime::Handle;
use tokio::sync::broadcast;
use zbus::{OwnedObjectPath, Variant};

use super::connection::{MANAGER, MANAGER_PATH, ManagerConnection};
use super::error::{BusCallError, SystemdError, is_named};
use super::names::{recorded_command_in, unescape_argument, unit_path};
use super::service::{Limits, Service, ServiceOutcome, ServiceType, StartProgress, Started};
use super::signals::{Change, Dispatcher, UnitSignal};
use super::terminal::Terminal;
use super::{ActiveState, UnitCommand, UnitRow};

const UNIT_EXISTS: &str = "org.freedesktop.systemd1.UnitExists";
const NO_SUCH_UNIT: &str = "org.freedesktop.systemd1.NoSuchUnit";
const UNIT: &str = "org.freedesktop.systemd1.Unit";
const SERVICE: &str = "org.freedesktop.systemd1.Service";

/// After a failure the last lines may still be in the terminal.
const OUTPUT_GRACE: Duration = Duration::from_millis(400);

/// systemd ends a start at the service's own timeout; this much later the call fails.
const START_MARGIN: Duration = Duration::from_secs(5);

/// Where a service writes that is started again.
const NO_OUTPUT: &str = "/dev/null";

/// How long a unit may take to end after SIGHUP.
const HANGUP_TIMEOUT: Duration = Duration::from_secs(1);

/// One row of `ListUnitsByPatterns`.
type ListedUnit = (String, String, String, String, String, String, OwnedObjectPath, u32, String, OwnedObjectPath);

/// One command of `ExecStart` as it is read back.
type ReadCommand = (String, Vec<String>, bool, u64, u64, u64, u64, u32, i32, i32);

/// A client of systemd. Cheap to clone; all clones share one connection.
#[derive(Clone)]
pub struct Systemd {
    runtime: Handle,
    client: Client,
    ptmx: Arc<Path>,
}

#[derive(Clone)]
struct Client {
    connection: ManagerConnection,
    dispatcher: Dispatcher,
}

impl Systemd {
    /// Connects in the background. `ptmx` is where pseudoterminals of the host are opened.
    pub fn new(runtime: &Handle, socket: PathBuf, ptmx: &Path) -> Self {
        let dispatcher = Dispatcher::new();
        let connection = ManagerConnection::start(runtime, socket, dispatcher.clone());
        Self { runtime: runtime.clone(), client: Client { connection, dispatcher }, ptmx: ptmx.into() }
    }

    /// Starts a service, waits until it runs (a oneshot: has ended), and captures its output meanwhile.
    pub fn start(&self, service: &Service, deadline: Instant) -> Result<Started, SystemdError> {
        let failed = |cause| SystemdError::Terminal { ptmx: self.ptmx.to_path_buf(), cause };
        let mut terminal = Terminal::open(&self.ptmx).map_err(failed)?;
        let point_output_to = |file: &str| match &service.restart {
            Some(restart) => restart
                .point_to(Path::new(file))
                .map_err(|cause| SystemdError::OutputLink { path: restart.output.clone(), cause }),
            None => Ok(()),
        };
        point_output_to(terminal.path())?;
        let done =
            Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|it| failed(it.into()))?);
        let deadline = deadline.min(Instant::now() + service.start_timeout + START_MARGIN);

        let start = {
            let (client, service) = (self.client.clone(), service.clone());
            let (terminal, signal) = (terminal.path().to_owned(), DoneSignal(done.clone()));
            async move {
                let _signal = signal;
                client.start(&service, &terminal).await
            }
        };
        let starting = self.runtime.spawn(async move { tokio::time::timeout_at(deadline.into(), start).await });
        // Read while waiting, or a program with much output blocks.
        terminal.drain_until(&done, deadline).map_err(failed)?;
        let no_answer = SystemdError::NoAnswer { call: "StartTransientUnit" };
        let started = self.runtime.block_on(starting);
        // Another program may get the number of this terminal.
        point_output_to(NO_OUTPUT)?;
        let Ok(Ok(outcome)) = started else { return Err(no_answer) };
        let outcome = outcome?;
        let grace = match &outcome {
            ServiceOutcome::Done if service.service_type == ServiceType::Forking => Duration::ZERO,
            ServiceOutcome::Done | ServiceOutcome::Failed(_) => OUTPUT_GRACE,
        };
        Ok(Started { outcome, output: terminal.finish(grace) })
    }

    /// Stops a unit and waits until it has ended. A missing unit is success.
    pub fn stop(&self, unit: &str, deadline: Instant) -> Result<(), SystemdError> {
        self.wait("StopUnit", deadline, self.client.stop(unit))
    }

    /// Ends every process of a unit at once, without a chance to clean up. systemd does not start it again.
    pub fn kill(&self, unit: &str, deadline: Instant) -> Result<(), SystemdError> {
        self.wait("KillUnit", deadline, self.client.kill(unit))
    }

    /// Waits until a unit is unloaded or has failed. Returns whether it did before the deadline.
    pub fn wait_for_end(&self, unit: &str, deadline: Instant) -> Result<bool, SystemdError> {
        let ended = self.wait("GetUnit", deadline, self.client.wait_for_end(unit));
        match ended {
            Err(SystemdError::NoAnswer { .. }) => Ok(false),
            ended => ended.map(|()| true),
        }
    }

    /// Resets the failed state of a unit, so that systemd unloads it. A missing unit is success.
    pub fn reset_failed(&self, unit: &str, deadline: Instant) -> Result<(), SystemdError> {
        self.wait("ResetFailedUnit", deadline, async {
            unless_missing(self.client.connection.call::<_, ()>("ResetFailedUnit", unit, &(unit,)).await)
        })
    }

    /// All units whose name matches a glob pattern.
    pub fn list(&self, pattern: &str, deadline: Instant) -> Result<Vec<UnitRow>, SystemdError> {
        self.wait("ListUnitsByPatterns", deadline, self.client.list(pattern))
    }

    /// The command of a listed unit; `None` if it is gone meanwhile.
    pub fn command(&self, unit: &str, deadline: Instant) -> Result<Option<UnitCommand>, SystemdError> {
        self.wait("Get", deadline, self.client.command(unit))
    }

    /// Whether a started service got the arguments it was given. It may not if systemd was reloaded between the call and the
    /// start.
    pub fn has_its_arguments(&self, service: &Service, deadline: Instant) -> Result<bool, SystemdError> {
        if !service.is_fragile() {
            return Ok(true);
        }
        let commands = self.wait("Get", deadline, self.client.commands(&service.name))?;
        Ok(commands.first().is_some_and(|(_, command, ..)| *command == service.escaped_command()))
    }

    /// Subscribes to the changes of all units.
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

/// A start job that systemd has accepted.
struct StartJob {
    /// Unknown if the reply was lost with its connection.
    job: Option<String>,
    /// The number of the first connection that received signals about it.
    first_connection: u64,
}

/// Wakes the thread that reads the terminal, however the task ends.
struct DoneSignal(Arc<OwnedFd>);

impl Drop for DoneSignal {
    fn drop(&mut self) {
        // Written once, so it cannot be full.
        let _ = rustix::io::write(&*self.0, &1_u64.to_ne_bytes());
    }
}

impl Client {
    async fn start(&self, service: &Service, terminal: &str) -> Result<ServiceOutcome, SystemdError> {
        // Subscribed first, so that no signal is missed.
        let mut watch = self.dispatcher.watch(&service.name);
        let StartJob { job, first_connection } = self.request_start(service, terminal).await?;
        let mut seen = StartProgress::default();
        loop {
            match watch.next().await {
                UnitSignal::Properties(changed) => seen.update(&changed),
                UnitSignal::JobRemoved { job: ended, result } if job.as_ref().is_none_or(|it| *it == ended) => {
                    // A systemd that was reloaded meanwhile does not always repeat the state before it ends the job.
                    let is_unsure = result == "done" && service.service_type == ServiceType::Forking && !seen.is_up();
                    if is_unsure && self.row(&service.name).await?.is_some_and(|it| it.active == ActiveState::Active) {
                        return Ok(ServiceOutcome::Done);
                    }
                    return Ok(seen.decide(service.service_type, result));
                }
                // Another job: the unit is being stopped.
                UnitSignal::JobRemoved { .. } => {}
                UnitSignal::Connected { number } if number <= first_connection => {}
                UnitSignal::Connected { .. } => match self.row(&service.name).await? {
                    Some(UnitRow { has_job: true, .. }) => {}
                    Some(UnitRow { active: ActiveState::Active, .. }) => return Ok(ServiceOutcome::Done),
                    Some(_) | None => {
                        // Signals that arrived before it was unloaded tell why.
                        while let Some(signal) = watch.queued() {
                            match signal {
                                UnitSignal::Properties(changed) => seen.update(&changed),
                                UnitSignal::JobRemoved { result, .. } => {
                                    return Ok(seen.decide(service.service_type, result));
                                }
                                UnitSignal::Connected { .. } => {}
                            }
                        }
                        return Ok(seen.failed());
                    }
                },
            }
        }
    }

    /// Requests the start of a service.
    ///
    /// If the connection is lost, the request may have arrived or not. Repeating it under the same unique name tells.
    async fn request_start(&self, service: &Service, terminal: &str) -> Result<StartJob, SystemdError> {
        const CALL: &str = "StartTransientUnit";
        let auxiliary: Vec<(String, Vec<(String, Variant<'_>)>)> = Vec::new();
        let body = (service.name.as_str(), "fail", service.properties(terminal), auxiliary);
        let mut after = 0;
        loop {
            let live = self.connection.live(after).await?;
            match live.call::<_, OwnedObjectPath>(MANAGER_PATH, MANAGER, CALL, &body).await {
                Ok(job) => return Ok(StartJob { job: Some(job.to_string()), first_connection: live.number() }),
                Err(BusCallError::Lost) => after = live.number(),
                Err(BusCallError::Refused(cause)) if after > 0 && is_named(&cause, UNIT_EXISTS) => {
                    // The signals of its start may have been sent over the lost connection.
                    return Ok(StartJob { job: None, first_connection: after });
                }
                Err(BusCallError::Refused(cause)) => {
                    return Err(SystemdError::Refused { call: CALL, unit: service.name.clone(), cause });
                }
            }
        }
    }

    async fn stop(&self, unit: &str) -> Result<(), SystemdError> {
        let mut watch = self.dispatcher.watch(unit);
        let job = match self.connection.call::<_, OwnedObjectPath>("StopUnit", unit, &(unit, "replace")).await {
            Ok(job) => job.to_string(),
            Err(error) => return unless_missing(Err(error)),
        };
        loop {
            match watch.next().await {
                UnitSignal::JobRemoved { job: ended, .. } if ended == job => return Ok(()),
                UnitSignal::Connected { .. } => match self.row(unit).await? {
                    Some(row) if row.active.is_running() => {}
                    Some(_) | None => return Ok(()),
                },
                UnitSignal::JobRemoved { .. } | UnitSignal::Properties(_) => {}
            }
        }
    }

    /// systemd takes an end by SIGHUP for a clean one, so it does not restart the unit; a stopped process notices the signal when
    /// it continues. SIGKILL would be a reason to restart the unit, but not while it is being stopped.
    async fn kill(&self, unit: &str) -> Result<(), SystemdError> {
        self.signal(unit, Signal::HUP).await?;
        self.signal(unit, Signal::CONT).await?;
        if let Ok(ended) = tokio::time::timeout(HANGUP_TIMEOUT, self.wait_for_end(unit)).await {
            return ended;
        }
        unless_missing(
            self.connection.call::<_, OwnedObjectPath>("StopUnit", unit, &(unit, "replace")).await.map(drop),
        )?;
        self.signal(unit, Signal::KILL).await
    }

    /// Sends a signal to every process of a unit.
    async fn signal(&self, unit: &str, signal: Signal) -> Result<(), SystemdError> {
        unless_missing(self.connection.call::<_, ()>("KillUnit", unit, &(unit, "all", signal.as_raw())).await)
    }

    async fn wait_for_end(&self, unit: &str) -> Result<(), SystemdError> {
        let mut changes = self.dispatcher.changes();
        loop {
            match self.row(unit).await? {
                Some(row) if row.is_running() => {}
                Some(_) | None => return Ok(()),
            }
            // Changes of other units are ignored; missed changes are a reason to check.
            loop {
                match changes.recv().await {
                    Ok(Change::MayHaveEnded { unit: ended }) if ended == unit => break,
                    Ok(Change::MayHaveEnded { .. } | Change::Status { .. } | Change::Restarting { .. }) => {}
                    Ok(Change::Resync) | Err(_) => break,
                }
            }
        }
    }

    async fn list(&self, pattern: &str) -> Result<Vec<UnitRow>, SystemdError> {
        let (states, patterns): ([&str; 0], [&str; 1]) = ([], [pattern]);
        let body = (states.as_slice(), patterns.as_slice());
        let rows: Vec<ListedUnit> = self.connection.call("ListUnitsByPatterns", pattern, &body).await?;
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
        self.connection.property(&unit_path(unit), SERVICE, "ExecStart").await
    }

    async fn command(&self, unit: &str) -> Result<Option<UnitCommand>, SystemdError> {
        let path = unit_path(unit);
        let Some((_, command, ..)) = self.commands(unit).await?.into_iter().next() else { return Ok(None) };
        let mut environment: Vec<String> = self.connection.property(&path, SERVICE, "Environment").await?;
        let recorded = environment.iter().find_map(|it| recorded_command_in(it));
        environment.retain(|it| recorded_command_in(it).is_none());
        let started: u64 = self.connection.property(&path, UNIT, "InactiveExitTimestampMonotonic").await?;
        let limit = async |name| {
            let value: u64 = self.connection.property(&path, SERVICE, name).await?;
            // The largest number means that there is no limit.
            Ok::<_, SystemdError>(Some(value).filter(|it| *it != u64::MAX))
        };
        let limits = Limits {
            memory_bytes: limit("MemoryMax").await?,
            cpu_millis: limit("CPUQuotaPerSecUSec").await?.map(|it| it / 1000),
            tasks: limit("TasksMax").await?,
        };
        let command = recorded.unwrap_or_else(|| command.iter().map(|it| unescape_argument(it)).collect());
        Ok(Some(UnitCommand { command, environment, limits, started }))
    }
}

/// A missing unit counts as ended.
fn unless_missing<T: Default>(outcome: Result<T, SystemdError>) -> Result<T, SystemdError> {
    match outcome {
        Err(SystemdError::Refused { cause, .. }) if is_named(&cause, NO_SUCH_UNIT) => Ok(T::default()),
        outcome => outcome,
    }
}
