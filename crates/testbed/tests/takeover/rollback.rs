//! Back to the earlier driver: while ours does not start, and after it has mounted.

use s3csi_testbed::earlier_driver::EarlierMounter;

use crate::world::{Access, NAMESPACE, World};

#[test]
fn a_rollback_to_version_1_disturbs_nothing() {
    check("takeover-rollback-v1", EarlierMounter::Systemd);
}

#[test]
fn a_rollback_to_version_2_disturbs_nothing() {
    check("takeover-rollback-v2", EarlierMounter::Pod);
}

fn check(name: &str, mounter: EarlierMounter) {
    let world = World::start(name, mounter);
    let before = world.start_workload("before", Access::ReadWrite);

    // In the middle: the rollout has ended their plugin, and ours cannot start.
    let missing = ["--reset-values", "--take-ownership", "--set", "image.repository=localhost/s3csi,image.tag=missing"];
    world.helm_upgrade(&[&missing[..], &["--set", "image.pullPolicy=Never"]].concat());
    world.eventually("our plugin does not start", || {
        let pods = ["get", "pods", "--namespace", NAMESPACE, "--output", "jsonpath={..waiting.reason}"];
        world.cluster.kubectl(&pods).unwrap_or_default().contains("ErrImageNeverPull")
    });
    world.check_undisturbed(&before);
    world.roll_back();
    world.check_undisturbed(&before);

    // After the upgrade, with a workload that ours has mounted.
    world.upgrade(&[]);
    let of_ours = world.start_workload("of-ours", Access::ReadWrite);
    world.roll_back();
    let of_theirs = world.start_workload("of-theirs", Access::ReadWrite);
    let all = [&before, &of_ours, &of_theirs];
    for workload in all {
        world.check_undisturbed(workload);
        world.check_all_stored(workload);
    }

    // And forward again: what each of them mounted is looked after.
    world.upgrade(&[]);
    for workload in all {
        world.check_undisturbed(workload);
        world.delete_pod(workload);
    }
    world.check_nothing_left();
}
