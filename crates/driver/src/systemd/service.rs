//! A transient service, its D-Bus properties, and the outcome of its start.

use std::collections::HashMap;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fmt, fs, io};

use zbus::{OwnedVariant, Variant};

use super::ActiveState;
use super::names::{escape_argument, is_fragile, recorded_command};
use super::signals::{number, text};

/// A transient service: systemd unloads it when it ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    pub name: String,
    pub description: String,
    pub service_type: ServiceType,
    /// The program and its arguments, unescaped.
    pub command: Vec<String>,
    /// `KEY=VALUE`. Readable by every user of the node: no secrets.
    pub environment: Vec<String>,
    pub limits: Limits,
    /// systemd fails the start after this time.
    pub start_timeout: Duration,
    /// How systemd starts it again when it is killed, if it does.
    pub restart: Option<Restart>,
}

/// A service that systemd starts again when it is killed by a signal, with the descriptors that it stored. One that exits, with
/// whatever status, is not started again, nor is one that is ended by SIGHUP or SIGTERM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restart {
    /// systemd opens the output of a service again when it restarts it, and the terminal is gone by then. So it opens this
    /// symbolic link, which refers to the terminal during the first start only.
    pub output: PathBuf,
    /// The same link as the host sees it.
    pub output_on_host: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServiceType {
    /// Started when its first process has exited with 0; the remaining processes are the service.
    Forking,
    /// Started when its process has exited with 0.
    Oneshot,
}

/// Resource limits of a unit; `None` is unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    pub memory_bytes: Option<u64>,
    /// Thousandths of one processor.
    pub cpu_millis: Option<u64>,
    pub tasks: Option<u64>,
}

/// The outcome of a start, and the output until then.
#[derive(Debug)]
pub struct Started {
    pub outcome: ServiceOutcome,
    pub output: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServiceOutcome {
    /// A forking service runs; a oneshot has ended successfully.
    Done,
    Failed(Ended),
}

/// How a unit failed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// `failed`, `timeout`, `canceled`, …
    pub job: Option<String>,
    /// `exit-code`, `signal`, `timeout`, `resources`, …
    pub result: Option<String>,
    /// Exit status of the program, if known.
    pub status: Option<i32>,
}

/// A description is shown in one line of a table.
const LONGEST_DESCRIPTION: usize = 200;

/// An engine gets one minute for large files that are being written; after this time systemd kills it.
const STOP_TIMEOUT: Duration = Duration::from_secs(90);

/// The pause before a service that was killed is started again: systemd's default.
const RESTART_PAUSE: Duration = Duration::from_millis(100);

/// A service that was killed is not started again after this many starts in this time. systemd then closes the stored descriptors,
/// and callers get an error.
const START_LIMIT: u32 = 10;
const START_LIMIT_INTERVAL: Duration = Duration::from_mins(1);

/// More than a service stores.
const STORED_DESCRIPTORS: u32 = 4;

/// Stopped in reverse order: when the machine is shut down, engines store what is being written while there is a network.
const STARTED_AFTER: [&str; 2] = ["network.target", "network-online.target"];

impl Service {
    pub(super) fn properties(&self, terminal: &str) -> Vec<(&'static str, Variant<'static>)> {
        let Self { name: _, description, service_type, command, environment, limits, start_timeout, restart } = self;
        let description: String = description.chars().take(LONGEST_DESCRIPTION).collect();
        let escaped = self.escaped_command();
        let program = command.first().cloned().unwrap_or_default();
        let mut properties = vec![
            ("Description", Variant::new(description)),
            ("Type", Variant::new(service_type.to_string())),
            // The last field is whether to ignore a failure.
            ("ExecStart", Variant::new(vec![(program, escaped, false)])),
            // systemd unloads it as soon as it has ended, failed or not: nothing to clean up after a crash of the plugin.
            ("CollectMode", Variant::new("inactive-or-failed")),
            // The supervisor in the unit replaces an engine that was killed for its memory.
            ("OOMPolicy", Variant::new("continue")),
            ("TimeoutStartUSec", Variant::new(microseconds(*start_timeout))),
            ("TimeoutStopUSec", Variant::new(microseconds(STOP_TIMEOUT))),
        ];
        properties.extend(sandbox());
        properties.extend(match restart {
            Some(restart) => restart.properties(),
            None => vec![
                ("StandardOutput", Variant::new("tty")),
                ("StandardError", Variant::new("tty")),
                ("TTYPath", Variant::new(terminal.to_owned())),
            ],
        });
        if *service_type == ServiceType::Forking {
            // The supervisor in the unit reports replaced engines as status text.
            properties.push(("NotifyAccess", Variant::new("all")));
            properties.push(("After", Variant::new(STARTED_AFTER.map(str::to_owned).to_vec())));
        }
        let mut environment = environment.clone();
        if self.is_fragile() {
            environment.push(recorded_command(command));
        }
        if !environment.is_empty() {
            properties.push(("Environment", Variant::new(environment)));
        }
        let Limits { memory_bytes, cpu_millis, tasks } = *limits;
        properties.extend(memory_bytes.map(|it| ("MemoryMax", Variant::new(it))));
        properties.extend(cpu_millis.map(|it| ("CPUQuotaPerSecUSec", Variant::new(it.saturating_mul(1000)))));
        properties.extend(tasks.map(|it| ("TasksMax", Variant::new(it))));
        properties
    }

    /// Whether a reload of systemd may change the command.
    pub(super) fn is_fragile(&self) -> bool {
        self.command.iter().any(|it| is_fragile(it))
    }

    pub(super) fn escaped_command(&self) -> Vec<String> {
        self.command.iter().map(|it| escape_argument(it)).collect()
    }
}

impl Restart {
    fn properties(&self) -> Vec<(&'static str, Variant<'static>)> {
        let output = self.output_on_host.to_string_lossy().into_owned();
        vec![
            ("StandardOutputFile", Variant::new(output.clone())),
            ("StandardErrorFile", Variant::new(output)),
            ("Restart", Variant::new("on-abort")),
            ("RestartUSec", Variant::new(microseconds(RESTART_PAUSE))),
            ("StartLimitIntervalUSec", Variant::new(microseconds(START_LIMIT_INTERVAL))),
            ("StartLimitBurst", Variant::new(START_LIMIT)),
            ("FileDescriptorStoreMax", Variant::new(STORED_DESCRIPTORS)),
            // SIGTERM is for the main process. What is left when that was killed is killed at once, and then the service is
            // started again.
            ("KillMode", Variant::new("mixed")),
        ]
    }

    /// Lets the link refer to another file.
    pub(super) fn point_to(&self, file: &Path) -> io::Result<()> {
        let draft = self.output.with_extension("draft");
        match fs::remove_file(&draft) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        symlink(file, &draft)?;
        fs::rename(&draft, &self.output)
    }
}

/// Capabilities that a unit keeps, as bits: `CAP_SYS_ADMIN` to mount and unmount, `CAP_SYS_RESOURCE` to lower `oom_score_adj`.
const CAPABILITIES: u64 = 1 << 21 | 1 << 24;

/// What neither an engine nor umount needs, and what a tenant's store must not get hold of if it takes over an engine.
const DENIED_SYSTEM_CALLS: [&str; 8] =
    ["@clock", "@cpu-emulation", "@debug", "@module", "@obsolete", "@raw-io", "@reboot", "@swap"];

const ADDRESS_FAMILIES: [&str; 4] = ["AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"];

/// The sandbox of all units. Nothing in it makes systemd create a mount namespace (`ProtectSystem=`, `PrivateTmp=`, …): the mount
/// of an engine would stay in there. Engines hold keys, so there are no core dumps.
fn sandbox() -> Vec<(&'static str, Variant<'static>)> {
    let list = |names: &[&str]| names.iter().map(|it| (*it).to_owned()).collect::<Vec<String>>();
    let (allow, deny) = (true, false);
    vec![
        ("NoNewPrivileges", Variant::new(true)),
        ("CapabilityBoundingSet", Variant::new(CAPABILITIES)),
        ("SystemCallFilter", Variant::new((deny, list(&DENIED_SYSTEM_CALLS)))),
        ("SystemCallErrorNumber", Variant::new(EPERM)),
        ("SystemCallArchitectures", Variant::new(list(&["native"]))),
        ("RestrictAddressFamilies", Variant::new((allow, list(&ADDRESS_FAMILIES)))),
        // The namespaces that may be created, as flags: none.
        ("RestrictNamespaces", Variant::new(0_u64)),
        ("RestrictRealtime", Variant::new(true)),
        ("RestrictSUIDSGID", Variant::new(true)),
        ("LockPersonality", Variant::new(true)),
        ("MemoryDenyWriteExecute", Variant::new(true)),
        ("LimitCORE", Variant::new(0_u64)),
        ("LimitCORESoft", Variant::new(0_u64)),
    ]
}

/// What a denied system call returns; the default is to kill the process.
const EPERM: i32 = 1;

impl fmt::Display for ServiceType {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Forking => "forking",
            Self::Oneshot => "oneshot",
        })
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unknown = || "unknown".to_owned();
        write!(formatter, "{}", self.result.clone().or_else(|| self.job.clone()).unwrap_or_else(unknown))?;
        match self.status {
            Some(status) => write!(formatter, ", status {status}"),
            None => Ok(()),
        }
    }
}

fn microseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// The properties of a starting unit, collected from signals.
#[derive(Debug, Default)]
pub(super) struct StartProgress {
    active: Option<ActiveState>,
    ended: Ended,
}

impl StartProgress {
    pub fn update(&mut self, changed: &HashMap<String, OwnedVariant>) {
        if let Some(state) = text(changed, "ActiveState") {
            self.active = Some(ActiveState::parse(state));
        }
        if let Some(result) = text(changed, "Result").filter(|it| *it != "success") {
            self.ended.result = Some(result.to_owned());
        }
        // The code is 0 while the program runs.
        if number(changed, "ExecMainCode").is_some_and(|it| it != 0) {
            self.ended.status = number(changed, "ExecMainStatus");
        }
    }

    pub fn is_up(&self) -> bool {
        self.active == Some(ActiveState::Active)
    }

    /// The start job has ended. A new unit first reports `inactive`, so the state alone does not decide.
    pub fn decide(mut self, service_type: ServiceType, job: String) -> ServiceOutcome {
        let (is_done, is_up) = (job == "done", self.is_up());
        match service_type {
            ServiceType::Oneshot if is_done => ServiceOutcome::Done,
            ServiceType::Forking if is_done && is_up => ServiceOutcome::Done,
            ServiceType::Forking | ServiceType::Oneshot => {
                self.ended.job = Some(job);
                ServiceOutcome::Failed(self.ended)
            }
        }
    }

    pub fn failed(self) -> ServiceOutcome {
        ServiceOutcome::Failed(self.ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(pairs: &[(&str, Variant<'static>)]) -> HashMap<String, OwnedVariant> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), OwnedVariant::try_from(value.clone()).unwrap())).collect()
    }

    #[track_caller]
    fn check(service_type: ServiceType, states: &[&'static str], job: &str, is_done: bool) {
        let mut seen = StartProgress::default();
        for state in states {
            seen.update(&changed(&[("ActiveState", Variant::new(*state))]));
        }
        assert_eq!(
            seen.decide(service_type, job.to_owned()) == ServiceOutcome::Done,
            is_done,
            "{service_type} {states:?} {job}"
        );
    }

    #[test]
    fn a_start_succeeds_when_its_job_is_done_and_the_service_is_active() {
        check(ServiceType::Forking, &["inactive", "activating", "active"], "done", true);
        // The first process exited with 0 and left no other.
        check(ServiceType::Forking, &["inactive", "activating", "inactive"], "done", false);
        check(ServiceType::Forking, &["inactive", "activating", "failed"], "failed", false);
        check(ServiceType::Oneshot, &["inactive", "activating", "inactive"], "done", true);
        check(ServiceType::Oneshot, &["inactive", "activating", "failed"], "failed", false);
        check(ServiceType::Oneshot, &[], "timeout", false);
    }

    #[test]
    fn the_exit_status_is_reported() {
        let mut seen = StartProgress::default();
        seen.update(&changed(&[("ExecMainCode", Variant::new(0)), ("ExecMainStatus", Variant::new(0))]));
        seen.update(&changed(&[
            ("Result", Variant::new("exit-code")),
            ("ExecMainCode", Variant::new(1)),
            ("ExecMainStatus", Variant::new(32)),
        ]));
        let ServiceOutcome::Failed(ended) = seen.decide(ServiceType::Oneshot, "failed".to_owned()) else {
            panic!("it failed")
        };
        assert_eq!(ended.status, Some(32));
        assert_eq!(ended.to_string(), "exit-code, status 32");
    }
}
