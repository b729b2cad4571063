//! The kernel kills a whole container for its memory: applications see a pause, and an Event says which setting to raise.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use rustix::process::Pid;
use serde_json::Value;

use crate::outliving::{finish, mounter_of, server};
use crate::world::{NODE, SteadyWorkload, Volume, engines_of, events, eventually, wait_for_serving_pod};

const ATTRIBUTE: &str = "mountpointContainerResourcesLimitsMemory";
const LIMIT: &str = "512Mi";

/// More than the limit, so that the kernel has to kill; and little enough for the machine if there were no limit.
const ALLOCATED_KILOBYTES: &str = "1048576";

/// The directory of the memory cgroup that a process is in, in the hierarchy of version 1 or 2.
#[track_caller]
fn memory_cgroup(process: Pid) -> PathBuf {
    let cgroups = fs::read_to_string(format!("/proc/{process}/cgroup")).unwrap();
    let find = |is_wanted: &dyn Fn(&str) -> bool| {
        cgroups.lines().find_map(|it| {
            let (_, rest) = it.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            is_wanted(controllers).then(|| path.trim_start_matches('/').to_owned())
        })
    };
    let mount_of = |is_wanted: &dyn Fn(&str, &str) -> bool| {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let found = mounts.lines().find_map(|it| {
            let fields: Vec<&str> = it.split(' ').collect();
            is_wanted(fields.get(2)?, fields.get(3)?).then(|| PathBuf::from(fields[1]))
        });
        found.unwrap_or_else(|| panic!("no mount of the memory cgroups: {mounts}"))
    };
    let has_memory = |it: &str| it.split(',').any(|it| it == "memory");
    match find(&has_memory) {
        Some(path) => mount_of(&|kind, options| kind == "cgroup" && has_memory(options)).join(path),
        None => mount_of(&|kind, _| kind == "cgroup2").join(find(&str::is_empty).unwrap()),
    }
}

fn set_oom_score(process: Pid, score: i32) {
    fs::write(format!("/proc/{process}/oom_score_adj"), score.to_string()).unwrap();
}

/// Allocates memory in the cgroup of a container until the kernel has killed all that is in it. With cgroup v2 it kills them together
/// (`memory.oom.group`, which kubelet sets). With version 1 it kills one process at a time: the first process of the container comes
/// first here, and the others end with it.
fn exhaust_memory(mounter: Pid, engines: &[Pid]) -> Output {
    set_oom_score(mounter, 1000);
    for engine in engines {
        set_oom_score(*engine, 0);
    }
    let cgroup = memory_cgroup(mounter);
    assert!(
        cgroup.to_string_lossy().contains("pod"),
        "the cgroup of a container is below that of its Pod: {}",
        cgroup.display()
    );
    // tail(1) keeps what may be the last line, which never ends here. Without the limit of the cgroup, it would get an error.
    let script = r#"echo $$ >"$0"; echo 0 >/proc/self/oom_score_adj; ulimit -v "$1"; exec tail -n 1 /dev/zero"#;
    let procs = cgroup.join("cgroup.procs");
    Command::new("sh").args(["-ec", script]).arg(procs).arg(ALLOCATED_KILOBYTES).output().unwrap()
}

/// How a container of a Pod ended before the one that runs.
fn last_end(pod: &Value) -> &Value {
    &pod["status"]["containerStatuses"][0]["lastState"]["terminated"]["reason"]
}

#[test]
fn the_container_of_a_mountpoint_pod_is_killed_for_its_memory() {
    const NAME: &str = "out-of-memory";
    let volume = Volume { attributes: &[(ATTRIBUTE, LIMIT)], ..Volume::new(NAME) };
    let workload = SteadyWorkload::start(&volume, NODE);
    let (pod, uid) = server(NAME);
    let engines = engines_of(NAME);
    let output = exhaust_memory(mounter_of(&pod), &engines);
    assert!(!output.status.success(), "the memory is limited: {output:?}");
    eventually("another engine serves", || {
        let now = engines_of(NAME);
        now.len() == 1 && now != engines
    });
    workload.check_undisturbed("an OOM kill of the whole container");
    assert_eq!(server(NAME), (pod.clone(), uid), "the Pod stays, with another container");
    let serving = wait_for_serving_pod(NAME);
    assert_eq!(*last_end(&serving), "OOMKilled", "{:#}", serving["status"]["containerStatuses"]);
    eventually("an Event names the limit and the setting that raises it", || {
        let said = events(NAME, "MountpointPodOutOfMemory");
        said.iter().any(|it| [pod.as_str(), LIMIT, ATTRIBUTE].iter().all(|word| it.contains(word)))
    });
    finish(workload, NAME);
}
