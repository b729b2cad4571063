//! A node is switched off and on again with running workloads of each strategy.

use rustix::process::Pid;

use crate::strategies::{DAEMON, POD, SYSTEMD, install_daemon, install_systemd};
use crate::world::{
    CLUSTER, DRIVER, OTHER_NODE, Volume, Workload, alone, attachments, delete_pods, engines_of, eventually, mounts,
    objects, pod,
};

#[test]
fn after_a_reboot_everything_is_mounted_again_and_nothing_of_before_is_left() {
    let _daemon = install_daemon();
    install_systemd();
    let _alone = alone();
    let strategies = [&POD, &SYSTEMD, &DAEMON];
    let names = strategies.map(|it| format!("reboot-{}", it.strategy));
    let workloads = names.each_ref().map(|it| Workload::new(it, it).on(OTHER_NODE));
    for ((installed, name), workload) in strategies.iter().zip(&names).zip(&workloads) {
        Volume { driver: installed.driver, ..Volume::new(name) }.create();
        workload.create();
    }
    for workload in &workloads {
        workload.wait_until_it_runs();
        workload.run("echo before > /data/file");
    }
    let engines: Vec<Pid> = names.iter().flat_map(|it| engines_of(it)).collect();
    assert_eq!(engines.len(), workloads.len());
    let uids = names.each_ref().map(|it| pod(it)["metadata"]["uid"].as_str().unwrap().to_owned());

    CLUSTER.kill_node(2).unwrap();
    assert_eq!(names.iter().flat_map(|it| engines_of(it)).count(), 0, "all processes end with the node");
    CLUSTER.start_node(2).unwrap();
    for (workload, uid) in workloads.iter().zip(&uids) {
        eventually(&format!("{} runs with its volume", workload.name), || {
            workload.try_to_run("cat /data/file").is_ok_and(|it| it == "before\n")
        });
        workload.run("echo after > /data/file");
        assert_eq!(CLUSTER.object(&workload.name, "file").as_deref(), Some(b"after\n".as_slice()));
        let targets = mounts(OTHER_NODE, uid);
        assert_eq!(targets.iter().filter(|it| it.contains("mountpoint-s3")).count(), 1, "{targets:#?}");
        assert_eq!(pod(&workload.name)["metadata"]["uid"], uid.as_str(), "it is the same Pod");
    }
    let now: Vec<Pid> = names.iter().flat_map(|it| engines_of(it)).collect();
    assert_eq!(now.len(), workloads.len(), "one engine for each volume");

    delete_pods(&workloads.each_ref());
    eventually("nothing is left on the node", || {
        let pods = objects(&format!("/api/v1/namespaces/mount-s3/pods?labelSelector={DRIVER}/volume-name=reboot-pod"));
        let units =
            CLUSTER.run(OTHER_NODE, &["systemctl", "list-units", "--plain", "--no-legend", "mount-s3-*"]).unwrap();
        attachments("reboot-pod").is_empty()
            && pods.is_empty()
            && units.is_empty()
            && mounts(OTHER_NODE, "mountpoint-s3").is_empty()
            && names.iter().all(|it| engines_of(it).is_empty())
    });
}
