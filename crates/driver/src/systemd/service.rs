//! What a transient service is, in our words and in systemd's, and how its start can end.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use zbus::{OwnedVariant, Variant};

use super::ActiveState;
use super::names::{escape_argument, is_fragile, noted_command};
use super::signals::{number, text};

/// A service that exists as long as it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    pub name: String,
    pub description: String,
    pub kind: Kind,
    /// The program and its arguments, as the program shall see them.
    pub command: Vec<String>,
    /// `KEY=VALUE`. Anybody on the node can read it: no secrets.
    pub environment: Vec<String>,
    pub limits: Limits,
    /// systemd gives up on the start after this time.
    pub starts_within: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Started when its first process has ended well; the ones that remain are the service.
    Forking,
    /// Started when its process has ended well; then it is gone.
    Oneshot,
}

/// What a unit may use. Nothing said, nothing limited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    pub memory_bytes: Option<u64>,
    /// Thousandths of one processor.
    pub cpu_millis: Option<u64>,
    pub tasks: Option<u64>,
}

/// How a start went, and what was said meanwhile.
#[derive(Debug)]
pub struct Started {
    pub outcome: Outcome,
    pub output: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A forking service runs; a oneshot has done its work.
    Done,
    Failed(Ended),
}

/// What is known about the end of a unit that failed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// `failed`, `timeout`, `canceled`, …
    pub job: Option<String>,
    /// `exit-code`, `signal`, `timeout`, `resources`, …
    pub result: Option<String>,
    /// Exit status of the program, where systemd tells it.
    pub status: Option<i32>,
}

/// systemd refuses more than these lengths anyway, and a description is for one line of a table.
const LONGEST_DESCRIPTION: usize = 200;

/// An engine with open files gets five seconds to finish them; after this time it is killed.
const STOPS_WITHIN: Duration = Duration::from_secs(15);

impl Service {
    pub(super) fn properties(&self, terminal: &str) -> Vec<(&'static str, Variant<'static>)> {
        let Self { name: _, description, kind, command, environment, limits, starts_within } = self;
        let description: String = description.chars().take(LONGEST_DESCRIPTION).collect();
        let escaped = self.escaped_command();
        let program = command.first().cloned().unwrap_or_default();
        let mut properties = vec![
            ("Description", Variant::new(description)),
            ("Type", Variant::new(kind.to_string())),
            ("StandardOutput", Variant::new("tty")),
            ("StandardError", Variant::new("tty")),
            ("TTYPath", Variant::new(terminal.to_owned())),
            // The last field: whether to ignore a failure.
            ("ExecStart", Variant::new(vec![(program, escaped, false)])),
            // Failed or not, systemd forgets it as soon as it has ended: nothing to clean up after a crash of ours.
            ("CollectMode", Variant::new("inactive-or-failed")),
            // An engine that keeps itself alive replaces a part of it that ran out of memory.
            ("OOMPolicy", Variant::new("continue")),
            ("TimeoutStartUSec", Variant::new(microseconds(*starts_within))),
            ("TimeoutStopUSec", Variant::new(microseconds(STOPS_WITHIN))),
        ];
        if *kind == Kind::Forking {
            // The process that keeps the engine alive says so when it had to.
            properties.push(("NotifyAccess", Variant::new("all")));
        }
        let mut environment = environment.clone();
        if self.is_fragile() {
            environment.push(noted_command(command));
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

    /// Whether a systemd that is reloaded changes the command before it runs it.
    pub(super) fn is_fragile(&self) -> bool {
        self.command.iter().any(|it| is_fragile(it))
    }

    pub(super) fn escaped_command(&self) -> Vec<String> {
        self.command.iter().map(|it| escape_argument(it)).collect()
    }
}

impl fmt::Display for Kind {
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

/// What the signals said about a unit so far.
#[derive(Debug, Default)]
pub(super) struct Seen {
    active: Option<ActiveState>,
    ended: Ended,
}

impl Seen {
    pub fn absorb(&mut self, changed: &HashMap<String, OwnedVariant>) {
        if let Some(state) = text(changed, "ActiveState") {
            self.active = Some(ActiveState::parse(state));
        }
        if let Some(result) = text(changed, "Result").filter(|it| *it != "success") {
            self.ended.result = Some(result.to_owned());
        }
        // A status without a code means that the program has not ended.
        if number(changed, "ExecMainCode").is_some_and(|it| it != 0) {
            self.ended.status = number(changed, "ExecMainStatus");
        }
    }

    pub fn is_up(&self) -> bool {
        self.active == Some(ActiveState::Active)
    }

    /// The job is over. The first state that a new unit reports is `inactive`, so the job decides and not the state alone.
    pub fn decide(mut self, kind: Kind, job: String) -> Outcome {
        let (is_done, is_up) = (job == "done", self.is_up());
        match kind {
            Kind::Oneshot if is_done => Outcome::Done,
            Kind::Forking if is_done && is_up => Outcome::Done,
            Kind::Forking | Kind::Oneshot => {
                self.ended.job = Some(job);
                Outcome::Failed(self.ended)
            }
        }
    }

    pub fn failed(self) -> Outcome {
        Outcome::Failed(self.ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(pairs: &[(&str, Variant<'static>)]) -> HashMap<String, OwnedVariant> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), OwnedVariant::try_from(value.clone()).unwrap())).collect()
    }

    #[track_caller]
    fn check(kind: Kind, states: &[&'static str], job: &str, is_done: bool) {
        let mut seen = Seen::default();
        for state in states {
            seen.absorb(&changed(&[("ActiveState", Variant::new(*state))]));
        }
        assert_eq!(seen.decide(kind, job.to_owned()) == Outcome::Done, is_done, "{kind} {states:?} {job}");
    }

    #[test]
    fn a_start_has_worked_when_its_job_is_done_and_the_service_is_up() {
        check(Kind::Forking, &["inactive", "activating", "active"], "done", true);
        // The first process ended well but left nobody behind.
        check(Kind::Forking, &["inactive", "activating", "inactive"], "done", false);
        check(Kind::Forking, &["inactive", "activating", "failed"], "failed", false);
        check(Kind::Oneshot, &["inactive", "activating", "inactive"], "done", true);
        check(Kind::Oneshot, &["inactive", "activating", "failed"], "failed", false);
        check(Kind::Oneshot, &[], "timeout", false);
    }

    #[test]
    fn the_end_of_a_program_is_told() {
        let mut seen = Seen::default();
        seen.absorb(&changed(&[("ExecMainCode", Variant::new(0)), ("ExecMainStatus", Variant::new(0))]));
        seen.absorb(&changed(&[
            ("Result", Variant::new("exit-code")),
            ("ExecMainCode", Variant::new(1)),
            ("ExecMainStatus", Variant::new(32)),
        ]));
        let Outcome::Failed(ended) = seen.decide(Kind::Oneshot, "failed".to_owned()) else { panic!("it failed") };
        assert_eq!(ended.status, Some(32));
        assert_eq!(ended.to_string(), "exit-code, status 32");
    }
}
