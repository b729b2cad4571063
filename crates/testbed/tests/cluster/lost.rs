//! Node plugin and mounter die at the same time, and the mount with them.

use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};
use s3csi_testbed::processes;

use crate::outliving::{mounter_of, server};
use crate::world::{
    CLUSTER, NAMESPACE, OTHER_NODE, Volume, Workload, alone, delete_pods, events, eventually, objects, pod,
};

const READ: &str = "cat /data/file";
const WRITE: &str = "echo written > /data/written";

/// The first process of the node plugin's container.
#[track_caller]
fn node_plugin() -> Pid {
    let selector = format!("labelSelector=app=scality-s3-csi-node&fieldSelector=spec.nodeName={}", OTHER_NODE.name());
    let pods = objects(&format!("/api/v1/namespaces/{NAMESPACE}/pods?{selector}"));
    let name = pods[0]["metadata"]["name"].as_str().unwrap();
    let found = processes::running("s3csi", Path::new(&format!("HOSTNAME={name}")));
    let [plugin] = found.as_slice() else { panic!("the node plugins of {name}: {found:?}") };
    *plugin
}

#[test]
fn running_containers_with_propagation_see_a_lost_volume_again_and_others_must_be_restarted() {
    const NAME: &str = "lost";
    let _alone = alone();
    Volume::new(NAME).create();
    CLUSTER.put_object(NAME, "file", "content\n").unwrap();
    let propagated =
        Workload::new("lost-propagated", NAME).mounted("mountPropagation", "HostToContainer").on(OTHER_NODE).start();
    let usual = Workload::new("lost-usual", NAME).on(OTHER_NODE).start();
    for workload in [&propagated, &usual] {
        assert_eq!(workload.run(READ), "content\n");
    }

    // The node plugin first: it would give the mount to the next mounter.
    let (plugin, mounter) = (node_plugin(), mounter_of(&server(NAME).0));
    kill_process(plugin, Signal::KILL).unwrap();
    kill_process(mounter, Signal::KILL).unwrap();
    eventually("the connection has ended", || usual.try_to_run(READ).is_err());
    for script in [READ, WRITE] {
        let error = usual.try_to_run(script).unwrap_err();
        assert!(error.contains("not connected"), "{script}: {error}");
    }
    for workload in [&propagated, &usual] {
        // kubelet publishes the volumes of a Pod that changes again; without a change it does so every minute.
        CLUSTER.kubectl(&["annotate", "pod", &workload.name, "test/changed=yes"]).unwrap();
    }
    eventually("a container with propagation sees the volume", || {
        propagated.try_to_run(READ).is_ok_and(|it| it == "content\n")
    });
    propagated.run(WRITE);
    assert_eq!(CLUSTER.object(NAME, "written").as_deref(), Some(b"written\n".as_slice()));
    let command = format!("kubectl delete pod --namespace default {}", usual.name);
    eventually("an Event has the command that restarts the other one", || {
        events(&usual.name, "VolumeRemounted").iter().any(|it| it.contains(&command))
    });
    let error = usual.try_to_run(READ).unwrap_err();
    assert!(error.contains("not connected"), "{error}");
    assert_eq!(pod(&propagated.name)["status"]["containerStatuses"][0]["restartCount"], 0);
    delete_pods(&[&propagated, &usual]);
}
