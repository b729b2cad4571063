//! Identities of workloads in the real cluster: kubelet's own tokens are exchanged for keys. Two Deployments with two service accounts
//! mount one volume; each sees what its account has in the store, and goes on while its keys are renewed.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::process::Pid;
use s3csi_testbed::cluster::ClusterHost;
use s3csi_testbed::environment;
use s3csi_testbed::wait::wait_patiently_until;
use s3csi_testbed::workload_identity::{AUDIENCE, TEAMS, role};
use serde_json::{Value, json};

use crate::examples::{read, yaml_blocks};
use crate::world::{
    CLUSTER, NODE, PATIENCE, Volume, Workload, engines_of, eventually, in_peace, is_registered, objects, wait_for_pod,
    wait_for_rollout,
};

/// kubelet repeats its calls when a Pod is changed; the tests do that more often than this, from the moment in which both Deployments
/// run: on a busy machine that takes a minute or two.
const KEY_LIFETIME: Duration = Duration::from_mins(4);

const STRATEGIES: [&str; 3] = ["pod", "daemon", "systemd"];

/// kubelet gets another token when four fifths of the shortest lifetime that Kubernetes allows have passed.
const TOKEN_LIFETIME: Duration = Duration::from_mins(10);

/// What the store and its issuer print.
fn issuer_output() -> PathBuf {
    CLUSTER.directory().join("issuing-store")
}

/// The addresses of the store and of its security token service, which ask the API server about tokens.
static ISSUING_STORE: LazyLock<[String; 2]> = LazyLock::new(|| {
    let program = environment::product("s3csi-testbed").unwrap();
    let (api, output) = (CLUSTER.directory().join("api.sock"), issuer_output());
    let buckets = STRATEGIES.map(bucket).join(" ") + " team-data";
    let script = format!(
        "setsid {} issuing-store 10.200.0.1 {} {} {buckets} </dev/null >{} 2>&1 &",
        program.display(),
        api.display(),
        KEY_LIFETIME.as_secs(),
        output.display(),
    );
    CLUSTER.run(ClusterHost::ControlPlane, &["sh", "-c", &script]).unwrap();
    let mut said = String::new();
    eventually("the store and its issuer listen", || {
        said = fs::read_to_string(&output).unwrap_or_default();
        said.starts_with("ready ") && said.ends_with('\n')
    });
    let mut addresses = said.lines().next().unwrap().split_whitespace().skip(1).map(str::to_owned);
    [addresses.next().unwrap(), addresses.next().unwrap()]
});

fn bucket(strategy: &str) -> String {
    format!("{strategy}-identity")
}

fn driver(strategy: &str) -> String {
    format!("{strategy}-identity.s3csi.test")
}

fn install(strategy: &str) {
    let [store, issuer] = &*ISSUING_STORE;
    let mut settings = vec![
        format!("strategy={strategy}"),
        format!("s3.endpointUrl={store}"),
        "podIdentity.enabled=true".to_owned(),
        format!("podIdentity.audience={AUDIENCE}"),
        format!("podIdentity.expirationSeconds={}", TOKEN_LIFETIME.as_secs()),
        format!("podIdentity.stsEndpointUrl={issuer}"),
    ];
    if strategy == "pod" {
        settings.push("mountpointPod.namespace=mount-identity".to_owned());
        settings.push("mountpointPod.priorityClassName=mount-identity-critical".to_owned());
    }
    let arguments: Vec<&str> = settings.iter().flat_map(|it| ["--set", it]).collect();
    let _peace = in_peace();
    CLUSTER.install_driver(&format!("{strategy}-identity"), &driver(strategy), &arguments).unwrap();
    eventually("kubelet knows the driver", || is_registered(NODE, &driver(strategy)));
}

/// A Deployment of one Pod with the service account of a team.
struct TeamDeployment {
    name: String,
    object: Value,
}

impl TeamDeployment {
    fn new(strategy: &str, team: &str) -> Self {
        let name = format!("{strategy}-{team}");
        // Reads, lists and writes until it is deleted; errors are noted. What the test reads is renamed into place.
        let work = "while sleep 0.1; do round=$((round + 1)); { echo $round > /data/file-$((round % 10)) && ls /data > /tmp/names && \
                    cat /data/whose > /tmp/new && mv /tmp/new /tmp/whose; } 2>> /tmp/errors || echo failed >> /tmp/errors; \
                    echo $round > /tmp/new && mv /tmp/new /tmp/rounds; done &";
        let mut pod = Workload::new(&name, &bucket(strategy)).script(work).object;
        pod["spec"]["serviceAccountName"] = json!(team);
        let labels = json!({ "app": name });
        let object = json!({
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": { "name": name, "namespace": "default" },
            "spec": {
                "selector": { "matchLabels": labels },
                "template": { "metadata": { "labels": labels }, "spec": pod["spec"] },
            },
        });
        Self { name, object }
    }

    fn run(&self, script: &str) -> String {
        CLUSTER.kubectl(&["exec", &format!("deploy/{}", self.name), "--", "sh", "-ec", script]).unwrap()
    }

    /// kubelet looks at a Pod that was changed, and repeats its call for each volume, as it does every minute or so.
    fn publish_again(&self) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let change = format!("checked-at={}", now.as_millis());
        let selector = format!("--selector=app={}", self.name);
        CLUSTER.kubectl(&["annotate", "pods", "--overwrite", &selector, &change]).unwrap();
    }
}

/// When the tokens were issued with which the Pod of a Deployment has got keys.
fn tokens_of(deployment: &TeamDeployment) -> BTreeSet<String> {
    let said = fs::read_to_string(issuer_output()).unwrap();
    let of_pod = format!("token \"{}-", deployment.name);
    said.lines().filter(|it| it.starts_with(&of_pod)).map(str::to_owned).collect()
}

/// What engines that run in containers see of each other.
fn check_isolation(engines: &[Pid]) {
    let view = |engine: Pid, file: &str| PathBuf::from(format!("/proc/{engine}/{file}"));
    let [one, other] = engines else { panic!("engines: {engines:?}") };
    let keys = |it: Pid| fs::read_to_string(view(it, "root/comm/credentials/s3-csi-credentials")).unwrap();
    assert_ne!(keys(*one), keys(*other));
    let mut shared = Vec::new();
    for (mine, theirs) in [(*one, *other), (*other, *one)] {
        for namespace in ["ns/mnt", "ns/pid", "ns/ipc", "ns/net"] {
            let link = |it| fs::read_link(view(it, namespace)).unwrap();
            assert_ne!(link(mine), link(theirs), "{namespace} is shared");
        }
        // The directories of the node that its container has.
        let table = |it| fs::read_to_string(view(it, "mountinfo")).unwrap();
        let directories = |it| -> Vec<String> {
            let is_of_kubelet = |it: &&str| it.contains("empty-dir") || it.contains("/volumes/");
            table(it)
                .lines()
                .filter_map(|it| it.split(' ').nth(3).map(str::to_owned))
                .filter(|it| is_of_kubelet(&it.as_str()))
                .collect()
        };
        shared.extend(directories(mine).into_iter().filter(|it| directories(theirs).contains(it)));
        assert!(!view(mine, "root/var/run/secrets/kubernetes.io").exists(), "it has a token of the API server");
        assert!(!view(mine, "root/var/lib/kubelet").exists(), "it sees the directory of kubelet");
    }
    assert_eq!(shared, Vec::<String>::new());
}

/// The user of Mountpoint Pods cannot reach their directories from the node either.
fn check_directories_are_closed() {
    let find =
        "ls -d /var/lib/kubelet/pods/*/volumes/kubernetes.io~empty-dir/comm/credentials/s3-csi-credentials | head -1";
    let file = CLUSTER.run(NODE, &["sh", "-c", find]).unwrap().trim().to_owned();
    assert!(!file.is_empty());
    let refused = CLUSTER.run(NODE, &["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "cat", &file]);
    let error = refused.expect_err("any process of that user reads the keys").to_string();
    assert!(error.contains("Permission denied"), "{error}");
}

fn check(strategy: &str) {
    install(strategy);
    let (bucket, driver) = (bucket(strategy), driver(strategy));
    let accounts: Vec<Value> = TEAMS
        .iter()
        .map(|team| {
            json!({
                "apiVersion": "v1", "kind": "ServiceAccount",
                "metadata": {
                    "name": team, "namespace": "default", "annotations": { "eks.amazonaws.com/role-arn": role(team) },
                },
            })
        })
        .collect();
    CLUSTER.apply(&json!({ "apiVersion": "v1", "kind": "List", "items": accounts }).to_string()).unwrap();
    let attributes = [("authenticationSource", "pod")];
    Volume { driver: &driver, attributes: &attributes, ..Volume::new(&bucket) }.create_without_bucket();
    let deployments = TEAMS.map(|team| TeamDeployment::new(strategy, team));
    for deployment in &deployments {
        CLUSTER.apply(&deployment.object.to_string()).unwrap();
    }
    for (deployment, team) in deployments.iter().zip(TEAMS) {
        wait_for_rollout(&CLUSTER, "default", &format!("deployment/{}", deployment.name));
        assert_eq!(deployment.run("cat /data/whose"), team);
    }
    deployments[0].run("echo new > /data/red-only");
    assert!(!deployments[1].run("ls /data").contains("red-only"), "the other account sees the file");

    let engines = engines_of(&bucket);
    assert_eq!(engines.len(), 2, "two identities share an engine: {engines:?}");
    if strategy == "pod" {
        check_isolation(&engines);
        check_directories_are_closed();
        let path = format!("/apis/{driver}/v2/mountpoints3podattachments");
        let named = |key: &str| -> Vec<Value> { objects(&path).iter().map(|it| it["spec"][key].clone()).collect() };
        let mut accounts = named("workloadServiceAccountName");
        accounts.sort_by_key(ToString::to_string);
        assert_eq!(accounts, ["blue", "red"]);
        assert_eq!(named("workloadNamespace"), ["default", "default"]);
        // Kubernetes 1.35 keeps the tokens out of the attributes.
        let object = CLUSTER.get(&format!("/apis/storage.k8s.io/v1/csidrivers/{driver}")).unwrap();
        assert_eq!(object["spec"]["serviceAccountTokenInSecrets"], true);
    }

    let are_renewed = || {
        for deployment in &deployments {
            deployment.publish_again();
        }
        let now = engines_of(&bucket);
        now.len() == 2 && now.iter().all(|it| !engines.contains(it))
    };
    let deadline = Instant::now() + KEY_LIFETIME + PATIENCE;
    assert!(wait_patiently_until(deadline, are_renewed), "no engine has got other keys");
    if environment::waits_for_tokens() {
        let are_rotated = || {
            deployments.iter().for_each(TeamDeployment::publish_again);
            deployments.iter().all(|it| 1 < tokens_of(it).len())
        };
        let deadline = Instant::now() + TOKEN_LIFETIME + PATIENCE;
        assert!(wait_patiently_until(deadline, are_rotated), "no keys were issued for another token of kubelet's");
    }
    for (deployment, team) in deployments.iter().zip(TEAMS) {
        let before: u64 = deployment.run("cat /tmp/rounds").trim().parse().unwrap();
        eventually("the work goes on", || {
            deployment.run("cat /tmp/rounds").trim().parse::<u64>().is_ok_and(|it| before + 2 < it)
        });
        assert_eq!(deployment.run("cat /tmp/errors"), "", "errors while the keys were renewed");
        assert_eq!(deployment.run("cat /tmp/whose"), team);
    }
    let names: Vec<&str> = deployments.iter().map(|it| it.name.as_str()).collect();
    CLUSTER.kubectl(&[["delete", "deployment", "--cascade=foreground"].as_slice(), &names].concat()).unwrap();
    eventually("the engines are gone", || engines_of(&bucket).is_empty());
}

/// The example of the documents, with the names of this cluster.
fn check_documented_example(strategy: &str) {
    let document = read("docs/credentials.md");
    let example = yaml_blocks(&document).find(|it| it.contains("authenticationSource: pod")).unwrap();
    let example = example
        .replace("s3.csi.scality.com", &driver(strategy))
        .replace("arn:aws:iam::123456789012:role/robot", &role("red"));
    CLUSTER.apply(&example).unwrap();
    wait_for_pod(&CLUSTER, "default", "robot");
    eventually("the Pod has written its file with the keys of its role", || {
        CLUSTER
            .kubectl(&["exec", "robot", "--", "cat", "/data/hello.txt", "/data/whose"])
            .is_ok_and(|it| it == "hello\nred")
    });
    CLUSTER.kubectl(&["delete", "pod", "robot", "--grace-period=1"]).unwrap();
    CLUSTER.delete(&example).unwrap();
}

#[test]
fn identities_of_workloads_with_strategy_pod() {
    check("pod");
    check_documented_example("pod");
}

#[test]
fn identities_of_workloads_with_strategy_daemon() {
    check("daemon");
}

#[test]
fn identities_of_workloads_with_strategy_systemd() {
    check("systemd");
}
