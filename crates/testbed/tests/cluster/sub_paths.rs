//! Parts of a volume (`subPath`), for each strategy: kubelet binds them from the published target by itself, and unmounts them before
//! the target.
//!
//! All strategies run the same engine, so they cannot differ in what it answers. When they seemed to, for a directory that was
//! removed while it was mounted, the difference was the time: until the attributes that the kernel had cached were out of date
//! kubelet's stat(2) of the bind succeeded, and the Pod ended; later the engine was asked, answered ENOENT, and kubelet took the bind
//! for no mount and tried to remove its directory for ever. The engine now answers with the last attributes and a link count of 0.

use serde_json::json;

use crate::world::{CLUSTER, NODE, Volume, Workload, delete_pods, eventually, mounts, pod};

/// Runs until it is asked to end, to be started again by kubelet.
const RESTARTS_ON_REQUEST: &str = "while [ ! -e /tmp/stop ]; do sleep 0.2; done; exit 0";

/// Files, directories and names that do not exist yet, writable and read-only, before and after the container was restarted; and a
/// directory that is removed while it is mounted.
pub fn check_sub_paths(strategy: &str, driver: &str) {
    let bucket = &format!("{strategy}-parts");
    Volume { driver, ..Volume::new(bucket) }.create();
    CLUSTER.put_object(bucket, "file", "a file\n").unwrap();
    CLUSTER.put_object(bucket, "directory/inside", "inside\n").unwrap();

    let parts = Workload::new(&format!("{strategy}-parts"), bucket)
        .script(RESTARTS_ON_REQUEST)
        .with_part(bucket, "/file", json!({ "subPath": "file" }))
        .with_part(bucket, "/directory", json!({ "subPath": "directory" }))
        .with_part(bucket, "/fixed", json!({ "subPath": "directory", "readOnly": true }))
        .with_part(bucket, "/missing", json!({ "subPath": "missing/deep" }));
    let removed = Workload::new(&format!("{strategy}-removed"), bucket).with_part(
        bucket,
        "/part",
        json!({ "subPath": "removed" }),
    );
    parts.create();
    removed.create();
    parts.wait_until_it_runs();
    removed.wait_until_it_runs();

    for round in 1..=2 {
        assert_eq!(parts.run("cat /file /directory/inside /fixed/inside"), "a file\ninside\ninside\n");
        parts.run(&format!("echo made > /missing/{round}; echo made > /directory/{round}"));
        for key in ["missing/deep", "directory"] {
            assert_eq!(CLUSTER.object(bucket, &format!("{key}/{round}")).as_deref(), Some(b"made\n".as_slice()));
        }
        assert_eq!(parts.run(&format!("cat /fixed/{round}")), "made\n");
        let refused = parts.try_to_run("echo new > /fixed/new").unwrap_err();
        assert!(refused.contains("Read-only file system"), "{refused}");
        if round == 1 {
            parts.run("touch /tmp/stop");
            eventually("the container was restarted", || {
                let status = &pod(&parts.name)["status"]["containerStatuses"][0];
                status["restartCount"].as_u64().is_some_and(|it| 0 < it) && status["ready"] == true
            });
        }
    }

    removed.run("echo content > /part/file; rm /part/file; rmdir /data/removed");
    assert_eq!(CLUSTER.object(bucket, "removed/"), None);
    let gone = removed.try_to_run("ls /part/file").unwrap_err();
    assert!(gone.contains("No such file") || gone.contains("Stale file handle"), "{gone}");
    let uids = [&parts, &removed].map(|it| pod(&it.name)["metadata"]["uid"].as_str().unwrap().to_owned());
    delete_pods(&[&parts, &removed]);
    for uid in uids {
        assert_eq!(mounts(NODE, &uid), Vec::<String>::new());
    }
}
