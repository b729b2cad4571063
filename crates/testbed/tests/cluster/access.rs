//! Who may read and write what, and the shapes in which Pods mount volumes.

use crate::world::{CLUSTER, NODE, OTHER_NODE, Volume, Workload, delete_pods, events, eventually, in_peace};

#[test]
fn files_go_from_the_pod_to_the_bucket_and_back() {
    Volume::new("there-and-back").create();
    let workload =
        Workload::new("there-and-back", "there-and-back").script("echo from the Pod > /data/greeting").start();
    eventually("the file is in the bucket", || {
        CLUSTER.object("there-and-back", "greeting").is_some_and(|it| it == b"from the Pod\n")
    });
    CLUSTER.put_object("there-and-back", "answer", "from the bucket\n").unwrap();
    assert_eq!(workload.run("cat /data/answer /data/greeting"), "from the bucket\nfrom the Pod\n");
    workload.delete();
}

#[test]
fn a_read_only_volume_refuses_writes_however_it_was_declared() {
    Volume { access_mode: "ReadOnlyMany", ..Volume::new("all-read-only") }.create();
    Volume::new("one-reads").create();
    for bucket in ["all-read-only", "one-reads"] {
        CLUSTER.put_object(bucket, "file", "content\n").unwrap();
    }
    let by_volume = Workload::new("by-volume", "all-read-only");
    let by_mount = Workload::new("by-mount", "one-reads").mounted("readOnly", true);
    let mut by_claim = Workload::new("by-claim", "one-reads");
    by_claim.object["spec"]["volumes"][0]["persistentVolumeClaim"]["readOnly"] = true.into();
    let writer = Workload::new("one-writes", "one-reads");
    let all = [&by_volume, &by_mount, &by_claim, &writer];
    for workload in all {
        workload.create();
    }
    for workload in all {
        workload.wait_until_it_runs();
    }
    for reader in [&by_volume, &by_mount, &by_claim] {
        assert_eq!(reader.run("cat /data/file"), "content\n");
        for change in ["echo new > /data/new", "rm /data/file", "mkdir /data/directory"] {
            let refused = reader.try_to_run(change).unwrap_err();
            assert!(refused.contains("Read-only file system"), "{}: {change}: {refused}", reader.name);
        }
    }
    writer.run("echo new > /data/new");
    delete_pods(&all);
}

#[test]
fn a_pod_that_is_not_root_writes_with_an_fs_group() {
    Volume::new("with-group").create();
    let workload =
        Workload::new("with-group", "with-group").secured("runAsUser", 1234).secured("fsGroup", 5678).start();
    assert_eq!(workload.run("id -u; echo hello > /data/file; stat -c '%g %a' /data/file"), "1234\n5678 660\n");
    eventually("the file is in the bucket", || CLUSTER.object("with-group", "file").is_some_and(|it| it == b"hello\n"));
    workload.delete();
}

/// `ReadWriteOnce`, which Kubernetes does not enforce for drivers without an attach operation.
#[test]
fn a_claim_for_one_node_is_served_on_one_node_at_a_time() {
    let _peace = in_peace();
    Volume { access_mode: "ReadWriteOnce", ..Volume::new("one-node") }.create();
    let first = Workload::new("one-node-first", "one-node").start();
    first.run("echo first > /data/first");
    let second = Workload::new("one-node-second", "one-node").on(OTHER_NODE);
    second.create();
    let refused =
        format!("the volume is ReadWriteOnce and in use on node {} by Pod default/{}", NODE.name(), first.name);
    eventually("the Pod on the second node is refused", || {
        events(&second.name, "VolumeNotServed").iter().any(|it| it.contains(&refused))
    });
    first.delete();
    second.wait_until_it_runs();
    assert_eq!(second.run("cat /data/first"), "first\n");
    second.delete();
}

#[test]
fn a_part_of_a_volume_is_mounted_by_sub_path() {
    Volume::new("parts").create();
    CLUSTER.put_object("parts", "some/part/file", "in the part\n").unwrap();
    let workload = Workload::new("parts", "parts").mounted("subPath", "some/part").start();
    assert_eq!(workload.run("cat /data/file; echo new > /data/new; ls /data"), "in the part\nfile\nnew\n");
    eventually("the new file is in the part", || CLUSTER.object("parts", "some/part/new").is_some());
    workload.delete();
}

#[test]
fn a_pod_has_two_volumes() {
    for name in ["first-of-two", "second-of-two"] {
        Volume::new(name).create();
    }
    let workload = Workload::new("two-volumes", "first-of-two").with_volume("second-of-two", "/more").start();
    workload.run("echo one > /data/file; cp /data/file /more/copy; echo two > /more/file");
    eventually("each file is in its bucket", || {
        CLUSTER.object("first-of-two", "file").is_some_and(|it| it == b"one\n")
            && CLUSTER.object("second-of-two", "copy").is_some_and(|it| it == b"one\n")
            && CLUSTER.object("second-of-two", "file").is_some_and(|it| it == b"two\n")
    });
    workload.delete();
}
