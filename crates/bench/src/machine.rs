//! What the figures were measured on and with.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::run::{Options, Thoroughness};
use crate::statistics::mebibytes;
use s3csi_testbed::environment;

/// A list for the head of a section: date, source, machine, programs. To be asked for before the run, which is a load itself.
pub fn describe(options: &Options, programs: &[String]) -> String {
    let mut lines = Vec::new();
    if options.thoroughness == Thoroughness::Quick {
        lines.push("**A quick run, to try the harness: these figures mean nothing.**".to_owned());
    }
    let commit = said("git", &["describe", "--always", "--dirty"]);
    lines.push(format!("{}, commit {commit}", said("date", &["-u", "+%Y-%m-%d %H:%M UTC"])));
    lines.push(format!(
        "{} × {}, {:.0} GiB of memory, {}, Linux {}",
        std::thread::available_parallelism().map_or(0, usize::from),
        processor(),
        mebibytes(memory_kib("MemTotal:") << 10) / 1024.0,
        operating_system(),
        read("/proc/sys/kernel/osrelease").trim(),
    ));
    let load = read("/proc/loadavg");
    lines.push(format!("load average before the run: {}", load.split(' ').next().unwrap_or("unknown")));
    lines.push(programs.join(", "));
    format!("- {}\n", lines.join("\n- "))
}

/// What a program of ours calls itself.
pub fn product_version(name: &str) -> anyhow::Result<String> {
    Ok(first_line(&environment::product(name)?, "--version"))
}

/// versitygw as built from its module does not know its version; the directory it lies in does.
pub fn tool_version(name: &str) -> anyhow::Result<String> {
    let path = environment::tool(name)?.canonicalize()?;
    let directory = path.parent().and_then(Path::file_name).unwrap_or_default();
    let directory = directory.to_string_lossy();
    Ok(directory.rsplit_once('-').map_or(directory.to_string(), |(name, version)| format!("{name} {version}")))
}

/// All of Kubernetes is one program of ours, and knows the version of what it is made from.
pub fn kubernetes_version() -> anyhow::Result<String> {
    let program = environment::kube()?;
    let said = said(&program.to_string_lossy(), &["kube-apiserver", "--version"]);
    Ok(said)
}

/// `systemd 252 (252.38-1~deb12u1)`
pub fn systemd_version() -> String {
    first_line(Path::new("systemctl"), "--version")
}

/// A figure of `/proc/meminfo`.
pub fn memory_kib(field: &str) -> u64 {
    let text = read("/proc/meminfo");
    let value = text.lines().find_map(|it| it.strip_prefix(field));
    value.and_then(|it| it.trim().split(' ').next()?.parse().ok()).unwrap_or(0)
}

fn first_line(program: &Path, argument: &str) -> String {
    said(&program.to_string_lossy(), &[argument])
}

fn said(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().ok().filter(|it| it.status.success());
    let text = output.map(|it| String::from_utf8_lossy(&it.stdout).into_owned()).unwrap_or_default();
    text.lines().next().unwrap_or("unknown").trim().to_owned()
}

fn processor() -> String {
    let text = read("/proc/cpuinfo");
    let model = text.lines().find_map(|it| it.strip_prefix("model name")).and_then(|it| it.split_once(": "));
    model.map_or_else(|| "unknown processor".to_owned(), |(_, it)| it.trim().to_owned())
}

fn operating_system() -> String {
    let text = read("/etc/os-release");
    let name = text.lines().find_map(|it| it.strip_prefix("PRETTY_NAME="));
    name.map_or_else(|| "unknown system".to_owned(), |it| it.trim_matches('"').to_owned())
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}
