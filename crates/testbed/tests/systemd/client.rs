//! The client of systemd's private socket, without volumes and engines.

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use s3csi_driver::systemd::{
    ActiveState, Change, Limits, PRIVATE_SOCKET, Service, ServiceOutcome, ServiceType, Systemd, SystemdError,
};
use s3csi_testbed::systemd::{beside_systemd, systemctl, units};
use s3csi_testbed::wait::wait_for;
use tokio::runtime::Runtime;

struct Bench {
    runtime: Runtime,
    systemd: Systemd,
}

impl Bench {
    fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let systemd = Systemd::new(runtime.handle(), PRIVATE_SOCKET.into(), Path::new("/dev/ptmx"));
        Self { runtime, systemd }
    }

    #[track_caller]
    fn start(&self, service: &Service) -> (ServiceOutcome, String) {
        let started = self.systemd.start(service, soon()).unwrap();
        (started.outcome, started.output)
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

fn service(name: &str, service_type: ServiceType, command: &[&str]) -> Service {
    Service {
        name: format!("{name}.service"),
        description: "a test".to_owned(),
        service_type,
        command: command.iter().map(|it| (*it).to_owned()).collect(),
        environment: Vec::new(),
        limits: Limits::default(),
        start_timeout: Duration::from_secs(20),
        restart: None,
    }
}

fn shell(name: &str, service_type: ServiceType, script: &str) -> Service {
    service(name, service_type, &["/bin/sh", "-c", script])
}

#[track_caller]
fn check_status(outcome: &ServiceOutcome, expected: i32) {
    match outcome {
        ServiceOutcome::Failed(ended) => assert_eq!(ended.status, Some(expected), "{ended}"),
        ServiceOutcome::Done => panic!("it was done"),
    }
}

#[test]
fn a_forking_service_is_up_when_its_first_process_has_ended_and_says_what_it_said() {
    beside_systemd(|| {
        let bench = Bench::new();
        let forking = shell("forking", ServiceType::Forking, "echo one; echo two >&2; sleep 1000 >/dev/null 2>&1 &");
        let (outcome, output) = bench.start(&forking);
        assert_eq!(outcome, ServiceOutcome::Done);
        assert_eq!(output, "one\ntwo\n");
        let rows = bench.systemd.list("forking.service", soon()).unwrap();
        assert_eq!(rows[0].active, ActiveState::Active);
        bench.systemd.stop("forking.service", soon()).unwrap();
        assert_eq!(bench.systemd.list("forking.service", soon()).unwrap(), []);
        // What is gone is fine.
        bench.systemd.stop("forking.service", soon()).unwrap();
        bench.systemd.kill("forking.service", soon()).unwrap();
        bench.systemd.reset_failed("forking.service", soon()).unwrap();
    });
}

#[test]
fn a_failed_start_is_reported_at_once_with_its_output_and_leaves_nothing() {
    beside_systemd(|| {
        let bench = Bench::new();
        let (outcome, output) = bench.start(&shell("fails", ServiceType::Forking, "echo no such bucket >&2; exit 1"));
        let ServiceOutcome::Failed(ended) = outcome else { panic!("it failed") };
        assert_eq!((ended.result.as_deref(), output.as_str()), (Some("exit-code"), "no such bucket\n"));
        // The first process exits successfully, but no process is left.
        let (outcome, _) = bench.start(&shell("empty", ServiceType::Forking, "exit 0"));
        assert_ne!(outcome, ServiceOutcome::Done);
        let (outcome, _) = bench.start(&service("missing", ServiceType::Oneshot, &["/no/such/program"]));
        check_status(&outcome, 203);
        let (outcome, output) = bench.start(&shell("oneshot", ServiceType::Oneshot, "echo busy; exit 32"));
        check_status(&outcome, 32);
        assert_eq!(output, "busy\n");
        let (outcome, output) = bench.start(&shell("good", ServiceType::Oneshot, "echo fine"));
        assert_eq!((outcome, output.as_str()), (ServiceOutcome::Done, "fine\n"));
        wait_for("all units are forgotten", || units("*.service").is_empty());
    });
}

#[test]
fn a_start_that_takes_too_long_is_ended_by_systemd() {
    beside_systemd(|| {
        let bench = Bench::new();
        let slow =
            Service { start_timeout: Duration::from_millis(300), ..shell("slow", ServiceType::Forking, "sleep 1000") };
        let (outcome, _) = bench.start(&slow);
        let ServiceOutcome::Failed(ended) = outcome else { panic!("it never started") };
        assert_eq!(ended.result.as_deref(), Some("timeout"));
    });
}

#[test]
fn much_output_does_not_block_a_start_and_is_bounded() {
    beside_systemd(|| {
        let bench = Bench::new();
        let (outcome, output) =
            bench.start(&shell("chatty", ServiceType::Oneshot, "head -c 400000 /dev/zero | tr '\\0' x"));
        assert_eq!(outcome, ServiceOutcome::Done);
        assert_eq!(output.len(), 64 << 10);
    });
}

#[test]
fn arguments_and_environment_arrive_as_they_were_given() {
    beside_systemd(|| {
        let bench = Bench::new();
        let odd = ["$HOME", "${PATH}", "$$", "a b", "%n %%", "'\"", "\\x", "é", ""];
        let mut command = vec!["/usr/bin/printf", "[%s]"];
        command.extend(odd);
        let printf = service("odd", ServiceType::Oneshot, &command);
        let (_, output) = bench.start(&printf);
        assert_eq!(output, odd.map(|it| format!("[{it}]")).concat());
        let environment = vec!["A=one two".to_owned(), "B=$A%n\"'".to_owned()];
        let shows = Service { environment, ..shell("shows", ServiceType::Oneshot, "echo \"$A|$B\"") };
        assert_eq!(bench.start(&shows).1, "one two|$A%n\"'\n");

        let stays = Service {
            limits: Limits { memory_bytes: Some(64 << 20), cpu_millis: Some(500), tasks: Some(20) },
            environment: vec!["A=1".to_owned()],
            ..service("stays", ServiceType::Forking, &["/bin/sh", "-c", "sleep 1000 & : $0", "$x"])
        };
        bench.start(&stays);
        let read = bench.systemd.command(&stays.name, soon()).unwrap().unwrap();
        assert_eq!((read.command, read.environment, read.limits), (stays.command, stays.environment, stays.limits));
        assert_eq!(systemctl(&["show", "--property=MemoryMax", "--value", &stays.name]).trim(), "67108864");
    });
}

#[test]
fn a_reload_changes_no_argument_that_is_read_back() {
    beside_systemd(|| {
        let bench = Bench::new();
        let odd = ["a;b", ";", "$;$", "\\;", "a\\", "${HOME}", "'x y';", "%n;", "a,_é"];
        let mut command = vec!["/bin/sh", "-c", "sleep 1000 >/dev/null 2>&1 & printf '[%s]' \"$@\"", "sh"];
        command.extend(odd);
        let stays = service("odd", ServiceType::Forking, &command);
        let printed = odd.map(|it| format!("[{it}]")).concat();
        assert_eq!(bench.start(&stays), (ServiceOutcome::Done, printed));
        assert!(bench.systemd.has_its_arguments(&stays, soon()).unwrap());
        for command in ["daemon-reload", "daemon-reexec", "daemon-reload"] {
            systemctl(&[command]);
            let read = bench.systemd.command(&stays.name, soon()).unwrap().unwrap();
            assert_eq!((read.command, read.environment), (stays.command.clone(), vec![]), "after {command}");
        }
    });
}

#[test]
fn the_end_of_a_unit_is_reported_at_once_and_a_reload_is_no_end() {
    beside_systemd(|| {
        let bench = Bench::new();
        let mut changes = bench.systemd.changes();
        bench.start(&shell("dies", ServiceType::Forking, "sleep 1000 &"));
        bench.systemd.kill("dies.service", soon()).unwrap();
        let mut next = || bench.runtime.block_on(changes.recv()).unwrap();
        while next() != (Change::MayHaveEnded { unit: "dies.service".to_owned() }) {}

        bench.start(&shell("lives", ServiceType::Forking, "sleep 1000 &"));
        systemctl(&["daemon-reload"]);
        assert!(!bench.systemd.wait_for_end("lives.service", Instant::now() + Duration::from_millis(200)).unwrap());
        assert_eq!(bench.systemd.list("lives.service", soon()).unwrap()[0].active, ActiveState::Active);
    });
}

#[test]
fn starts_survive_a_reexecution_and_reloads_of_systemd() {
    beside_systemd(|| {
        let bench = Arc::new(Bench::new());
        let starts: Vec<_> = (0..20)
            .map(|number| {
                let bench = bench.clone();
                // Without a semicolon: who uses one must ask whether the service has its arguments.
                let script = format!("echo {number} && sleep 0.3 && (sleep 1000 >/dev/null 2>&1 &)");
                thread::spawn(move || bench.start(&shell(&format!("s{number}"), ServiceType::Forking, &script)))
            })
            .collect();
        for command in ["daemon-reload", "daemon-reexec", "daemon-reload", "daemon-reexec"] {
            systemctl(&[command]);
        }
        for (number, start) in starts.into_iter().enumerate() {
            let (outcome, output) = start.join().unwrap();
            assert_eq!(outcome, ServiceOutcome::Done, "{number}");
            assert_eq!(output, format!("{number}\n"));
        }
        assert_eq!(units("s*.service").len(), 20);
    });
}

#[test]
fn two_hundred_starts_at_once_do_not_wait_for_each_other() {
    beside_systemd(|| {
        let bench = Arc::new(Bench::new());
        let starts: Vec<_> = (0..200)
            .map(|number| {
                let bench = bench.clone();
                thread::spawn(move || {
                    bench.start(&shell(&format!("s{number}"), ServiceType::Forking, "sleep 1000 &")).0
                })
            })
            .collect();
        for start in starts {
            assert_eq!(start.join().unwrap(), ServiceOutcome::Done);
        }
        assert_eq!(units("s*.service").len(), 200);
    });
}

#[test]
fn without_systemd_the_error_says_so() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let systemd = Systemd::new(runtime.handle(), "/no/systemd/here".into(), Path::new("/dev/ptmx"));
    let error = systemd.list("*", soon()).unwrap_err();
    assert!(matches!(error, SystemdError::Unreachable { cause: Some(_), .. }), "{error:?}");
}
