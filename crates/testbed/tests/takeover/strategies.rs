//! The strategy of our driver changes while workloads read and write. What serves them stays until they end, new workloads use the
//! new strategy, and then nothing of the earlier one is left.

use serde_json::Value;

use crate::world::{Access, FIRST_KEYS, NAMESPACE, SECOND_KEYS, Workload, World};

/// Each direction once.
const WALK: [&str; 7] = ["pod", "systemd", "daemon", "pod", "daemon", "systemd", "pod"];

#[test]
fn workloads_outlive_every_change_of_the_strategy() {
    let world = World::start_ours("takeover-strategies", WALK[0]);
    let mut keys = [FIRST_KEYS, SECOND_KEYS].into_iter().cycle();
    let mut old = world.start_workload("walk-0", Access::ReadWrite);
    for (step, directions) in WALK.windows(2).enumerate() {
        let [from, to] = [directions[0], directions[1]];
        eprintln!("from strategy {from} to {to}");
        assert_eq!(strategy_of(&world, &old), from);
        let mount = world.mount_in_container(&old);
        let keys = keys.next().unwrap();
        change_strategy(&world, to, keys);
        let new = world.start_workload(&format!("walk-{}", step + 1), Access::ReadWrite);
        assert_eq!(strategy_of(&world, &new), to, "from {from} to {to}");

        world.check_undisturbed(&old);
        world.eventually(&format!("rotated keys reach the mount of strategy {from} under {to}"), || {
            has_key(&world, from, keys.0)
        });
        world.check_undisturbed(&old);
        assert_eq!(world.mount_in_container(&old), mount, "from {from} to {to}: nothing was mounted over it");
        world.check_all_stored(&old);

        world.delete_pod(&old);
        world.eventually(&format!("nothing of strategy {from} is left under {to}"), || {
            left(&world, from, &old).is_empty()
        });
        world.check_undisturbed(&new);
        old = new;
    }
    // Each upgrade has removed what earlier ones kept for workloads that were gone by then; so does this one.
    world.helm_upgrade(&["--reuse-values"]);
    world.eventually("the mounter is gone", || mounter(&world).is_null());
    world.check_undisturbed(&old);
    world.delete_pod(&old);
    world.check_nothing_left();
}

fn change_strategy(world: &World, strategy: &str, keys: (&str, &str)) {
    world.write_driver_keys(keys);
    world.helm_upgrade(&["--reuse-values", "--set", &format!("strategy={strategy}")]);
    world.wait_for_rollout("daemonset/s3-csi-node");
    if strategy == "pod" {
        world.wait_for_rollout("deployment/s3-csi-controller");
    }
    if strategy == "daemon" {
        world.wait_for_rollout("daemonset/s3-csi-mounter");
    }
}

fn mounter(world: &World) -> Value {
    let path = format!("/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/s3-csi-mounter");
    world.cluster.get(&path).unwrap_or_default()
}

/// By the name of the source that the workload's target shows.
fn strategy_of(world: &World, workload: &Workload) -> &'static str {
    let table = world.on_node("cat /proc/self/mountinfo");
    let mounts: Vec<Vec<&str>> = table.lines().map(|it| it.split(' ').collect()).collect();
    let target =
        mounts.iter().find(|it| it[4].contains(&format!("/pods/{}/", workload.uid)) && it[4].ends_with("/mount"));
    let device = target.unwrap_or_else(|| panic!("{} is not mounted\n{table}", workload.name))[2];
    let mut sources = mounts.iter().filter(|it| it[2] == device).filter_map(|it| it[4].split_once("/mnt/"));
    match sources.next() {
        Some((_, source)) if source.starts_with("mp-") => "pod",
        Some(_) => "daemon",
        None => "systemd",
    }
}

/// Where engines of a strategy read their keys.
fn key_directory(world: &World, strategy: &str) -> String {
    match strategy {
        "pod" => "/var/lib/kubelet/pods/*/volumes/kubernetes.io~empty-dir/comm/credentials".to_owned(),
        "daemon" => format!("/run/{}/*/credentials", world.driver()),
        _ => format!("{}/systemd/*", world.plugin_directory()),
    }
}

fn has_key(world: &World, strategy: &str, access_key: &str) -> bool {
    let find = format!("grep -rlw {access_key} {} 2>/dev/null || true", key_directory(world, strategy));
    !world.on_node(&find).is_empty()
}

/// What is left of a strategy whose only workload is gone.
fn left(world: &World, strategy: &str, workload: &Workload) -> Vec<String> {
    let lines = |script: &str| world.on_node(script).lines().map(str::to_owned).collect::<Vec<_>>();
    let mut found = lines(&format!("ls -d {} 2>/dev/null || true", key_directory(world, strategy)));
    let processes = world.on_node("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n'");
    found.extend(processes.lines().filter(|it| *it == workload.name).map(|it| format!("an engine of {it}")));
    let sources =
        |first: &str| lines(&format!("awk '{{ print $5 }}' /proc/self/mountinfo | grep '/mnt/{first}' || true"));
    match strategy {
        "pod" => {
            found.extend(sources("mp-"));
            found.extend(world.mountpoint_pods().into_iter().map(|(uid, _)| format!("Mountpoint Pod {uid}")));
            found.extend(world.attachments());
        }
        "daemon" => found.extend(sources("[0-9a-f]")),
        _ => found.extend(world.units()),
    }
    found
}
