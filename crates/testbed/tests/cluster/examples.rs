//! Every example of the documents works as it is printed.

use s3csi_testbed::environment::workspace;
use serde_json::Value;

use crate::world::{CLUSTER, eventually, in_peace, wait_for_pod};

pub fn read(path: &str) -> String {
    std::fs::read_to_string(workspace().join(path)).unwrap()
}

pub fn yaml_blocks(document: &str) -> impl Iterator<Item = &str> {
    document.split("```yaml\n").skip(1).filter_map(|it| it.split_once("\n```")).map(|(block, _)| block)
}

/// Objects for a cluster; anything else is settings of the chart, which the chart's own tests try.
fn objects(example: &str) -> Option<Vec<Value>> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(example).unwrap();
    documents.iter().all(|it| it["kind"].is_string()).then_some(documents)
}

/// Applies an example, waits until all its Pods run, and takes everything away.
fn try_out(example: &str, look: impl FnOnce()) {
    let objects = objects(example).unwrap();
    for bucket in objects.iter().filter_map(|it| it["spec"]["csi"]["volumeAttributes"]["bucketName"].as_str()) {
        CLUSTER.create_bucket(bucket).unwrap();
    }
    CLUSTER.apply(example).unwrap();
    let pods = objects.iter().filter(|it| it["kind"] == "Pod").map(|it| {
        let metadata = &it["metadata"];
        (metadata["namespace"].as_str().unwrap_or("default"), metadata["name"].as_str().unwrap())
    });
    for (namespace, name) in pods.clone() {
        wait_for_pod(&CLUSTER, namespace, name);
    }
    look();
    for (namespace, name) in pods {
        CLUSTER.kubectl(&["delete", "pod", "--namespace", namespace, name, "--grace-period=1"]).unwrap();
    }
    CLUSTER.delete(example).unwrap();
}

#[test]
fn examples_of_the_documents_work() {
    let _peace = in_peace();
    let readme = read("README.md");
    let [first] = yaml_blocks(&readme).collect::<Vec<_>>().try_into().unwrap();
    assert_eq!(
        read("docs/examples/static-volume.yaml").trim_end(),
        first,
        "the README prints docs/examples/static-volume.yaml"
    );
    try_out(first, || {
        eventually("the Pod's file is in the bucket", || {
            CLUSTER.object("my-bucket", "hello.txt").is_some_and(|it| it == b"hello\n")
        });
        CLUSTER.put_object("my-bucket", "answer.txt", "an answer\n").unwrap();
        assert_eq!(CLUSTER.kubectl(&["exec", "my-app", "--", "cat", "/data/answer.txt"]).unwrap(), "an answer\n");
    });

    let mut documents: Vec<_> =
        std::fs::read_dir(workspace().join("docs")).unwrap().map(|it| it.unwrap().path()).collect();
    documents.retain(|it| it.extension().is_some_and(|it| it == "md"));
    documents.sort();
    let texts: Vec<String> = documents.iter().map(|it| std::fs::read_to_string(it).unwrap()).collect();
    // The driver of these tests does not exchange tokens; `identity` tries such examples.
    let is_tried = |it: &&str| objects(it).is_some() && !it.contains("authenticationSource: pod");
    let examples: Vec<&str> = texts.iter().flat_map(|it| yaml_blocks(it)).filter(is_tried).collect();
    assert!(examples.len() > 2, "only {} examples were found", examples.len());
    for example in examples {
        try_out(example, || {});
    }
}
