//! Tests beside a real systemd. Each such test runs twice: outside it starts a systemd of its own and itself once more within;
//! inside it does its work. So tests may restart, confuse and kill their systemd as they like.

use std::any::type_name;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::environment;

/// Runs the body of the calling test beside a systemd of its own.
#[track_caller]
pub fn beside_systemd<Body: FnOnce()>(body: Body) {
    if environment::is_beside_systemd() {
        body();
    } else {
        start(&test_name::<Body>(), None);
    }
}

/// A machine that is switched off in the middle: `before` and `after` run beside different systemds, with one disk, a directory
/// that stays. Nothing else does, no process and no mount.
#[track_caller]
pub fn over_a_restart_of_the_machine<Before, After>(before: Before, after: After)
where
    Before: FnOnce(&Path),
    After: FnOnce(&Path),
{
    match environment::disk() {
        Some(disk) if disk.join("switched-off").exists() => after(&disk),
        Some(disk) => {
            before(&disk);
            fs::write(disk.join("switched-off"), "").unwrap();
        }
        None => {
            let disk = tempfile::Builder::new().prefix("s3csi-disk-").tempdir_in("/tmp").unwrap();
            let name = test_name::<Before>();
            start(&name, Some(disk.path()));
            assert!(disk.path().join("switched-off").exists(), "the first half of {name} did not come to its end");
            start(&name, Some(disk.path()));
        }
    }
}

#[track_caller]
fn start(test: &str, disk: Option<&Path>) {
    let log = systemd_log(test);
    let mut command = Command::new(environment::workspace().join("scripts/with-systemd.sh"));
    command.arg(std::env::current_exe().unwrap()).args(["--exact", test, "--nocapture", "--test-threads=1"]);
    command.current_dir(environment::workspace()).env("SYSTEMD_LOG", log.path());
    if let Some(disk) = disk {
        command.env(environment::DISK, disk);
    }
    let output = command.output().unwrap();
    let said = [output.stdout, output.stderr].map(|it| String::from_utf8_lossy(&it).into_owned()).concat();
    let is_good = output.status.success() && said.contains("1 passed");
    assert!(
        is_good,
        "{test} failed beside systemd ({}):\n{said}\n---- log of systemd ----\n{}",
        output.status,
        fs::read_to_string(log.path()).unwrap_or_default()
    );
}

/// Kept where logs are kept, or gone with the test.
enum Log {
    Kept(PathBuf),
    Temporary(tempfile::NamedTempFile),
}

impl Log {
    fn path(&self) -> &Path {
        match self {
            Self::Kept(path) => path,
            Self::Temporary(file) => file.path(),
        }
    }
}

fn systemd_log(test: &str) -> Log {
    match environment::log_directory() {
        Some(directory) => {
            fs::create_dir_all(&directory).unwrap();
            Log::Kept(directory.join(format!("systemd-{}.log", test.replace("::", "-"))))
        }
        None => Log::Temporary(tempfile::Builder::new().prefix("systemd-log-").tempfile_in("/tmp").unwrap()),
    }
}

/// What systemd has logged since it came up: what stands for the journal here.
pub fn journal() -> String {
    environment::systemd_log().and_then(|it| fs::read_to_string(it).ok()).unwrap_or_default()
}

/// systemctl's answer, as an administrator would see it.
#[track_caller]
pub fn systemctl(arguments: &[&str]) -> String {
    let output = Command::new("systemctl").args(arguments).env("SYSTEMD_COLORS", "0").output().unwrap();
    assert!(output.status.success(), "systemctl {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Names of units that match, whatever their state.
#[track_caller]
pub fn units(pattern: &str) -> Vec<String> {
    let table = systemctl(&["list-units", "--all", "--plain", "--no-legend", pattern]);
    table.lines().filter_map(|it| it.split_whitespace().next().map(str::to_owned)).collect()
}

/// The test's name, as the test program knows it, from the type of a closure in it: `program::module::test::{{closure}}`.
fn test_name<Body>() -> String {
    let mut name = type_name::<Body>();
    while let Some(shorter) = name.strip_suffix("::{{closure}}") {
        name = shorter;
    }
    name.split_once("::").map_or(name, |(_, it)| it).to_owned()
}
