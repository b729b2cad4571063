//! What the chart passes to the programs is understood by their own parsers.

use clap::{CommandFactory as _, Parser as _};
use s3csi_driver::cli::Cli;
use s3csi_testbed::environment::{product, tool};
use s3csi_testbed::process::command;
use serde_json::{Value, json};

use crate::chart::{STRATEGIES, Setting, containers, elements, render, text};
use crate::schema::Schema;

#[test]
fn rendered_arguments_are_parsed_by_the_real_parsers() {
    for strategy in STRATEGIES {
        check(&[("strategy", json!(strategy))]);
        let is_for_it = |path: &str| match (path, strategy) {
            // These make other objects, or are refused together with the strategy.
            ("strategy" | "controller.replicas", _) => false,
            (path, "systemd") => !path.starts_with("tls."),
            _ => true,
        };
        let values = Schema::read().values;
        let mut settings: Vec<Setting<'_>> = values
            .iter()
            .filter(|(path, _)| is_for_it(path))
            .map(|(path, value)| (path.as_str(), value.clone()))
            .collect();
        settings.push(("strategy", json!(strategy)));
        check(&settings);
    }
}

#[track_caller]
fn check(settings: &[Setting<'_>]) {
    let objects = render(settings);
    let mut programs = Vec::new();
    for container in objects.workloads().flat_map(containers) {
        if container["name"] == "csi-provisioner" {
            check_provisioner(&arguments(container)).unwrap();
            continue;
        }
        let program = text(&container["command"][0]);
        programs.push(program.to_owned());
        match program {
            "/bin/s3csi" => check_driver(container),
            "/bin/s3csi-mounter" => check_mounter(&arguments(container)).unwrap(),
            other => panic!("the image has no {other}"),
        }
    }
    assert!(programs.len() > 1 || settings.len() > 1, "no programs were rendered");
}

fn arguments(container: &Value) -> Vec<String> {
    elements(&container["args"]).map(|it| text(it).to_owned()).collect()
}

/// Variables are given as the flags they stand for, because a test has but one environment.
#[track_caller]
fn check_driver(container: &Value) {
    let mut line = vec!["s3csi".to_owned()];
    line.extend(arguments(container));
    let parser = Cli::command();
    let subcommand = parser.find_subcommand(&line[1]).unwrap_or_else(|| panic!("there is no command {}", line[1]));
    for variable in elements(&container["env"]) {
        let name = text(&variable["name"]);
        // Every process of a container can read its environment, and a change would need a restart.
        assert!(variable["valueFrom"]["secretKeyRef"].is_null(), "{name} brings a Secret into the environment");
        let flag = subcommand.get_arguments().find(|it| it.get_env().is_some_and(|it| it == name));
        let flag = flag.unwrap_or_else(|| panic!("`s3csi {}` does not read {name}", line[1])).get_long().unwrap();
        let value = variable["value"].as_str().unwrap_or("what-a-field-says");
        line.push(format!("--{flag}={value}"));
    }
    if let Err(error) = Cli::try_parse_from(&line) {
        panic!("{line:?}: {error}");
    }
}

/// A parser that came as far as to `--help` had no complaint about what stood before it.
fn check_mounter(arguments: &[String]) -> Result<(), String> {
    let output = command(&product("s3csi-mounter").unwrap()).args(arguments).arg("--help").output().unwrap();
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

/// Likewise one that came as far as to `--version`.
fn check_provisioner(arguments: &[String]) -> Result<(), String> {
    let output = command(&tool("csi-provisioner").unwrap()).args(arguments).arg("--version").output().unwrap();
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

#[test]
fn parsers_complain_before_they_help() {
    check_mounter(&["--limit=3".to_owned()]).unwrap();
    check_mounter(&["--limit=none".to_owned()]).unwrap_err();
    check_mounter(&["--no-such-flag".to_owned()]).unwrap_err();
    check_provisioner(&["--timeout=soon".to_owned()]).unwrap_err();
}

#[test]
fn probes_ask_where_the_programs_answer() {
    let objects = render(&[]);
    for (kind, name, port) in [("DaemonSet", "s3-csi-node", 9808), ("Deployment", "s3-csi-controller", 9809)] {
        let container = &objects.get(kind, name)["spec"]["template"]["spec"]["containers"][0];
        assert!(arguments(container).contains(&format!("--health-address=0.0.0.0:{port}")));
        assert_eq!(container["ports"][0]["containerPort"], port);
        let probes: &[&str] =
            if name == "s3-csi-controller" { &["livenessProbe", "readinessProbe"] } else { &["livenessProbe"] };
        for probe in probes {
            assert_eq!(container[probe]["httpGet"]["port"], container["ports"][0]["name"], "{name} {probe}");
        }
    }
}
