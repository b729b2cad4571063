//! Private certificate authorities, a store that only a proxy reaches, and inline volumes, with each strategy.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Stdio};
use std::sync::LazyLock;

use s3csi_testbed::cluster::ClusterHost;
use s3csi_testbed::environment;
use serde_json::json;

use crate::strategies::{DAEMON, Installed, POD, SYSTEMD, install_daemon, install_systemd};
use crate::world::{CLUSTER, NODE, Volume, Workload, attachments, delete_pods, engines_of, eventually, is_registered};

/// The cluster's S3 server with TLS; its certificate is of the authority that the chart's `tls.caCertData` names.
const TLS_STORE: &str = "https://10.200.0.1:7443";

/// A store that listens on loopback beside the control plane. Nodes and Pods reach it through the proxy alone.
const HIDDEN_STORE: &str = "https://store.invalid:8443";
const PROXY: &str = "10.200.0.1:3128";

struct HiddenStore {
    /// It ends with the cluster.
    _process: Child,
    authority: String,
}

static HIDDEN: LazyLock<HiddenStore> = LazyLock::new(|| {
    let program = environment::product("s3csi-testbed").unwrap();
    let mut arguments = vec!["s3".to_owned(), "--tls".to_owned(), format!("--proxy={PROXY}")];
    arguments.extend([POD, SYSTEMD, DAEMON].iter().map(|it| format!("--bucket={}", hidden(it))));
    let mut command = CLUSTER.command_on(ClusterHost::ControlPlane);
    let mut process = command.arg(program).args(arguments).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.next().unwrap().starts_with("ready"));
    let mut authority = String::new();
    for line in lines {
        authority.push_str(&line);
        authority.push('\n');
        if line.starts_with("-----END") {
            break;
        }
    }
    HiddenStore { _process: process, authority }
});

fn hidden(installed: &Installed) -> String {
    format!("{}-hidden", installed.strategy)
}

#[test]
fn strategy_pod() {
    check(&POD);
}

#[test]
fn strategy_systemd() {
    install_systemd();
    check(&SYSTEMD);
}

#[test]
fn strategy_daemon() {
    let _daemon = install_daemon();
    check(&DAEMON);
}

fn check(installed: &Installed) {
    eventually("kubelet knows the driver", || is_registered(NODE, installed.driver));
    let name = |what: &str| format!("{}-{what}", installed.strategy);
    let (keys, trusted, hidden, inline) = (name("network-keys"), name("trusted"), hidden(installed), name("inline"));
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": keys, "namespace": "default" },
        "stringData": {
            "access_key_id": "testbed", "secret_access_key": "testbed-NeverPrintThis", "ca.crt": HIDDEN.authority,
        },
    });
    CLUSTER.apply(&secret.to_string()).unwrap();
    let volume = |name| Volume { driver: installed.driver, secret: Some(&keys), ..Volume::new(name) };
    Volume { attributes: &[("endpointUrl", TLS_STORE)], ..volume(&trusted) }.create();
    let proxy = format!("http://{PROXY}");
    let attributes = [("endpointUrl", HIDDEN_STORE), ("httpsProxy", proxy.as_str())];
    Volume { attributes: &attributes, ..volume(&hidden) }.create_without_bucket();
    CLUSTER.create_bucket(&inline).unwrap();

    let mut workload = Workload::new(&name("network"), &trusted).with_volume(&hidden, "/hidden");
    let csi = json!({
        "driver": installed.driver,
        "nodePublishSecretRef": { "name": keys },
        "volumeAttributes": {
            "bucketName": inline, "authenticationSource": "secret", "mountOptions": "allow-delete,allow-overwrite",
        },
    });
    let spec = &mut workload.object["spec"];
    spec["volumes"].as_array_mut().unwrap().push(json!({ "name": "inline", "csi": csi }));
    let mount = json!({ "name": "inline", "mountPath": "/inline" });
    spec["containers"][0]["volumeMounts"].as_array_mut().unwrap().push(mount);
    workload.create();
    workload.wait_until_it_runs();

    workload.run("echo trusted > /data/file; echo hidden > /hidden/file; echo inline > /inline/file");
    assert_eq!(workload.run("cat /data/file /hidden/file /inline/file"), "trusted\nhidden\ninline\n");
    assert_eq!(CLUSTER.object(&trusted, "file").unwrap(), b"trusted\n");
    assert_eq!(CLUSTER.object(&inline, "file").unwrap(), b"inline\n");
    let uid = crate::world::pod(&workload.name)["metadata"]["uid"].as_str().unwrap().to_owned();
    let handle = s3csi_core::names::inline_volume_name(&uid.parse().unwrap(), "inline");
    if installed.strategy == "pod" {
        assert_eq!(attachments(handle.as_str()).len(), 1);
    }
    delete_pods(&[&workload]);
    eventually("no engine is left", || [&trusted, &hidden, &inline].iter().all(|it| engines_of(it).is_empty()));
    eventually("no attachment is left", || installed.strategy != "pod" || attachments(handle.as_str()).is_empty());
}
