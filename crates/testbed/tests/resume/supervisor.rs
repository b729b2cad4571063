//! What the mounter does about engines that die, freeze or cannot be started, and when it gives up.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::Signal;
use s3csi_handoff::Answer;
use s3csi_testbed::environment::product;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::wait::wait_for;

use crate::world::{Options, World, check_errno, noise};

/// A program in place of the engine: the real one, until somebody puts a line in front of it.
pub fn replaceable_engine(fixture: &Fixture) -> PathBuf {
    let path = fixture.path("engine");
    write_engine(&path, "");
    path
}

pub fn write_engine(path: &Path, line: &str) {
    let engine = product("mount-s3").unwrap();
    let draft = path.with_extension("draft");
    fs::write(&draft, format!("#!/bin/sh\n{line}\nexec {} \"$@\"\n", engine.display())).unwrap();
    fs::set_permissions(&draft, fs::Permissions::from_mode(0o755)).unwrap();
    fs::rename(draft, path).unwrap();
}

#[test]
fn an_engine_that_stands_still_is_replaced() {
    let fixture = Fixture::new("resume-frozen");
    let world = World::new(&fixture);
    world.put("file", b"content");
    let mount = world.mount_with(&Options { mounter: &["--frozen-after", "2s"], ..Options::default() });
    let engine = mount.engine();
    mount.signal_engine(Signal::STOP);
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"content");
    let (cause, stall) = mount.resumed();
    assert!(cause.contains("heartbeat"), "{cause}");
    assert!(stall >= Duration::from_secs(1), "{stall:?}");
    assert_ne!(mount.engine(), engine);
    mount.unmount();
}

#[test]
fn a_mount_without_an_engine_is_given_up_after_a_while() {
    let fixture = Fixture::new("resume-broken");
    let world = World::new(&fixture);
    world.put("file", b"content");
    let engine = replaceable_engine(&fixture);
    let options = Options { mounter: &["--longest-outage", "2s"], program: Some(&engine), ..Options::default() };
    let mount = world.mount_with(&options);
    write_engine(&engine, "echo broken >&2; exit 3");
    let start = Instant::now();
    mount.signal_engine(Signal::KILL);
    let error = fs::metadata(mount.path("file")).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    let is_end = [Errno::CONNABORTED, Errno::NOTCONN].iter().any(|it| error.raw_os_error() == Some(it.raw_os_error()));
    assert!(is_end, "{error}");
    check_errno(fs::metadata(mount.path("file")), Errno::NOTCONN);
    mount.expect_lost();
}

#[test]
fn a_successor_that_fails_at_first_is_tried_again() {
    let fixture = Fixture::new("resume-retry");
    let world = World::new(&fixture);
    world.put("file", b"content");
    let engine = replaceable_engine(&fixture);
    let mount = world.mount_with(&Options { program: Some(&engine), ..Options::default() });
    write_engine(&engine, "echo not yet >&2; exit 3");
    mount.signal_engine(Signal::KILL);
    wait_for("a successor has failed", || mount.mounter().log_contains("not yet"));
    write_engine(&engine, "");
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"content");
    let (cause, _) = mount.resumed();
    assert_eq!(cause, "exited with code 3: not yet");
    mount.unmount();
}

#[test]
fn engines_that_crash_again_and_again_are_given_up() {
    let fixture = Fixture::new("resume-loop");
    let world = World::new(&fixture);
    let engine = replaceable_engine(&fixture);
    let options = Options { mounter: &["--longest-outage", "3s"], program: Some(&engine), ..Options::default() };
    let mount = world.mount_with(&options);
    // Each successor serves for a moment and then crashes.
    write_engine(&engine, "(sleep 0.7; kill -ABRT $$) >/dev/null 2>&1 &");
    mount.kill_engine();
    let mut resumed = 0;
    while let Answer::Resumed { cause, .. } = mount.answer() {
        assert!(cause.starts_with("killed by signal 6"), "{cause}");
        resumed += 1;
    }
    assert!(resumed > 0, "{}", mount.mounter());
    wait_for("the mount is dead", || {
        fs::metadata(mount.path("x")).is_err_and(|it| it.raw_os_error() == Some(Errno::NOTCONN.raw_os_error()))
    });
    mount.end();
}

#[test]
fn without_supervision_the_mount_dies_with_its_engine() {
    let fixture = Fixture::new("resume-off");
    let world = World::new(&fixture);
    let mount = world.mount_with(&Options { mounter: &["--keep", "off"], ..Options::default() });
    mount.signal_engine(Signal::KILL);
    wait_for("the mount is dead", || {
        fs::metadata(mount.path("x")).is_err_and(|it| it.raw_os_error() == Some(Errno::NOTCONN.raw_os_error()))
    });
    mount.expect_lost();
}

#[test]
fn an_engine_lives_on_without_its_mounter() {
    let fixture = Fixture::new("resume-mounter");
    let world = World::new(&fixture);
    world.put("file", b"content");
    let mount = world.mount();
    mount.kill_engine();
    mount.mounter().kill();
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"content");
    mount.abandon();
}

#[test]
fn an_engine_that_answers_no_request_is_replaced() {
    let fixture = Fixture::new("resume-stuck");
    let world = World::new(&fixture);
    world.put("trap", b"content");
    let mount = world.mount_with(&Options {
        mounter: &["--stuck-after", "2s"],
        environment: &["S3CSI_ENGINE_TRIALS=hang-on-lookup=trap"],
        ..Options::default()
    });
    assert_eq!(fs::read(mount.path("trap")).unwrap(), b"content");
    let (cause, _) = mount.resumed();
    assert_eq!(cause, "no request answered for 2 seconds");
    mount.unmount();
}

#[test]
fn an_engine_terminated_by_a_foreign_signal_is_replaced() {
    let fixture = Fixture::new("resume-term");
    let world = World::new(&fixture);
    let mount = world.mount();
    let mut file = File::create(mount.path("file")).unwrap();
    file.write_all(b"content").unwrap();
    mount.signal_engine(Signal::TERM);
    let (cause, _) = mount.resumed();
    assert_eq!(cause, "exited with code 0");
    file.sync_all().unwrap();
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"content");
    drop(file);
    mount.unmount();
}

#[test]
fn an_engine_that_stands_by_takes_over() {
    let fixture = Fixture::new("resume-standby");
    let world = World::new(&fixture);
    world.put("file", b"content");
    let mount = world.mount_with(&Options { mounter: &["--standby", "on"], ..Options::default() });
    let file = File::open(mount.path("file")).unwrap();
    for _ in 0..5 {
        wait_for("another engine stands by", || mount.engines().len() == 2);
        let [serving, standby] = mount.engines()[..] else { panic!("not two engines: {}", mount.mounter()) };
        mount.kill_engine();
        assert_ne!(mount.engine(), serving);
        assert_eq!(mount.engine(), standby);
        let mut content = [0; 7];
        file.read_exact_at(&mut content, 0).unwrap();
        assert_eq!(&content, b"content");
    }
    drop(file);
    mount.unmount();
}

#[test]
fn a_standby_that_dies_is_replaced_unnoticed() {
    let fixture = Fixture::new("resume-standby-dies");
    let world = World::new(&fixture);
    world.put("file", b"content");
    let mount = world.mount_with(&Options { mounter: &["--standby", "on"], ..Options::default() });
    wait_for("another engine stands by", || mount.engines().len() == 2);
    let [serving, standby] = mount.engines()[..] else { panic!("not two engines: {}", mount.mounter()) };
    rustix::process::kill_process(standby, Signal::KILL).unwrap();
    wait_for("a third engine stands by", || mount.engines().len() == 2 && !mount.engines().contains(&standby));
    assert_eq!(mount.engine(), serving);
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"content");
    mount.unmount();
}

#[test]
fn an_engine_that_the_kernel_killed_for_its_memory_is_replaced_and_the_report_says_so() {
    let fixture = Fixture::new("resume-oom");
    let world = World::new(&fixture);
    let content = noise(1, 200 << 20);
    world.put("file", &content);
    let group = MemoryGroup::new("resume-oom");
    let program = replaceable_engine(&fixture);
    write_engine(&program, &format!("echo $$ > {}", group.path.join("cgroup.procs").display()));
    let mount = world.mount_with(&Options { program: Some(&program), ..Options::default() });
    // The next engine is not to suffer the same.
    write_engine(&program, "");
    group.limit(48 << 20);
    // Reading ahead takes more memory than that.
    assert!(fs::read(mount.path("file")).unwrap() == content, "other bytes");
    let (cause, _) = mount.resumed();
    assert_eq!(cause, "killed by the kernel, out of memory (OOM)");
    mount.unmount();
}

#[test]
fn an_engine_is_more_likely_to_be_killed_for_memory_than_its_mounter() {
    let fixture = Fixture::new("resume-oom-score");
    let world = World::new(&fixture);
    let mount = world.mount();
    let score = |process: rustix::process::Pid| -> i32 {
        fs::read_to_string(format!("/proc/{process}/oom_score_adj")).unwrap().trim().parse().unwrap()
    };
    mount.kill_engine();
    assert!(score(mount.mounter().pid()) < score(mount.engine()));
    mount.unmount();
}

/// A memory cgroup of the test's own, removed when dropped.
struct MemoryGroup {
    path: PathBuf,
    limit_file: &'static str,
}

impl MemoryGroup {
    fn new(name: &str) -> Self {
        let (root, limit_file) = if Path::new("/sys/fs/cgroup/memory").is_dir() {
            (Path::new("/sys/fs/cgroup/memory"), "memory.limit_in_bytes")
        } else {
            (Path::new("/sys/fs/cgroup"), "memory.max")
        };
        let path = root.join(format!("s3csi-test-{name}-{}", std::process::id()));
        fs::create_dir(&path).unwrap_or_else(|error| panic!("no memory cgroup can be made here: {error}"));
        Self { path, limit_file }
    }

    fn limit(&self, bytes: usize) {
        fs::write(self.path.join(self.limit_file), bytes.to_string()).unwrap();
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        wait_for("the cgroup is empty", || fs::remove_dir(&self.path).is_ok());
    }
}
