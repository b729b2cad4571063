//! Strategy `daemon` in a cluster: one Pod per node with the node plugin and a mounter for all volumes.

use std::sync::LazyLock;

use crate::world::{CLUSTER, Volume, Workload, eventually, wait_for_registration, wait_for_rollout};

const DRIVER: &str = "daemon.s3csi.test";

/// The driver is installed by the first test that needs it.
static DRIVER_IS_INSTALLED: LazyLock<()> = LazyLock::new(|| {
    CLUSTER.apply(include_str!("daemon.yaml")).unwrap();
    wait_for_rollout(&CLUSTER, "kube-system", "daemonset/s3csi-daemon");
    wait_for_registration(&CLUSTER, DRIVER);
});

#[test]
fn a_workload_with_a_static_volume_runs_and_its_file_is_in_the_bucket() {
    LazyLock::force(&DRIVER_IS_INSTALLED);
    Volume { name: "daemon-file", driver: DRIVER }.create();
    let writer = Workload {
        name: "daemon-file",
        claim: "daemon-file",
        group: None,
        script: "echo from the Pod > /data/greeting",
    };
    writer.create();
    writer.wait_until_it_runs();
    eventually("the file is in the bucket", || {
        CLUSTER.object("daemon-file", "greeting").is_some_and(|it| it == b"from the Pod\n")
    });
    assert_eq!(writer.run("cat /data/greeting"), "from the Pod\n");
    writer.delete();
}
