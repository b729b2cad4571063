//! Every value means something, is documented, and is refused when it is wrong.

use std::collections::HashMap;

use s3csi_testbed::environment;
use serde_json::{Value, json};

use crate::chart::{self, Setting, directory, helm, read, render, render_text, text};
use crate::schema::Schema;

/// What must be set before these values can have a meaning.
const PREREQUISITES: [(&str, &str, &str); 35] = [
    ("mounter.", "strategy", "daemon"),
    ("systemd.", "strategy", "systemd"),
    ("initContainer.", "strategy", "systemd"),
    ("metrics.serviceMonitor.interval", "metrics.serviceMonitor.enabled", "true"),
    ("metrics.serviceMonitor.labels", "metrics.serviceMonitor.enabled", "true"),
    ("metrics.prometheusRule.labels", "metrics.prometheusRule.enabled", "true"),
    ("metrics.dashboard.labels", "metrics.dashboard.enabled", "true"),
    ("sidecars.csiProvisioner.image", "sidecars.csiProvisioner.enabled", "true"),
    ("sidecars.csiProvisioner.timeout", "sidecars.csiProvisioner.enabled", "true"),
    ("sidecars.csiProvisioner.logLevel", "sidecars.csiProvisioner.enabled", "true"),
    ("sidecars.csiProvisioner.secretNamespaces", "sidecars.csiProvisioner.enabled", "true"),
    ("sidecars.csiProvisioner.resources", "sidecars.csiProvisioner.enabled", "true"),
    ("volumeAdmission.allowedBuckets", "volumeAdmission.enabled", "true"),
    ("networkPolicy.scrapers", "networkPolicy.enabled", "true"),
    ("networkPolicy.egress", "networkPolicy.enabled", "true"),
    ("tls.caCertData", "tls.caCertConfigMap", "private-ca"),
    ("proxy.noProxy", "proxy.httpsProxy", "http://proxy.example.com:3128"),
    ("credentials.source", "credentials.webIdentity.roleArn", "arn:aws:iam::1:role/one"),
    ("credentials.profile.", "credentials.source", "profile"),
    ("credentials.profile.", "credentials.profile.secretName", "files"),
    ("credentials.instanceProfile.", "credentials.source", "instanceProfile"),
    ("credentials.webIdentity.", "credentials.source", "webIdentity"),
    ("credentials.webIdentity.", "credentials.webIdentity.roleArn", "arn:aws:iam::1:role/one"),
    ("credentials.container.", "credentials.source", "container"),
    ("podIdentity.audience", "podIdentity.enabled", "true"),
    ("podIdentity.expirationSeconds", "podIdentity.enabled", "true"),
    ("podIdentity.stsEndpointUrl", "podIdentity.enabled", "true"),
    ("podIdentity.serviceAccountRoles", "podIdentity.enabled", "true"),
    ("podIdentity.roleArn", "podIdentity.enabled", "true"),
    ("podIdentity.agent.", "podIdentity.enabled", "true"),
    ("podIdentity.agent.audience", "podIdentity.agent.url", "http://127.0.0.1/v1"),
    ("mountpointPod.preempting", "mountpointPod.reserveHeadroom", "true"),
    ("mountpointPod.headroom", "mountpointPod.reserveHeadroom", "true"),
    ("mountpointPod.headroomImage.tag", "mountpointPod.headroomImage.repository", "registry.example.com/pause"),
    ("mountpointPod.headroomImage.pullPolicy", "mountpointPod.headroomImage.repository", "registry.example.com/pause"),
];

fn prerequisites(path: &str) -> Vec<Setting<'static>> {
    let needed = PREREQUISITES.iter().filter(|(prefix, ..)| path.starts_with(prefix));
    needed.map(|(_, path, value)| (*path, serde_json::from_str(value).unwrap_or_else(|_| json!(value)))).collect()
}

#[test]
fn helm_finds_nothing_wrong_with_the_chart() {
    for strategy in chart::STRATEGIES {
        let mut helm = helm();
        helm.arg("lint").arg("--strict").arg(directory()).args(["--set", &format!("strategy={strategy}")]);
        let said = chart::run(helm).unwrap();
        assert!(said.contains("1 chart(s) linted, 0 chart(s) failed"), "{said}");
    }
}

#[test]
fn the_chart_has_the_version_of_the_programs() {
    let chart: Value = serde_saphyr::from_str(&read("charts/s3csi/Chart.yaml")).unwrap();
    assert_eq!(chart["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(chart["appVersion"], env!("CARGO_PKG_VERSION"));
}

#[test]
fn every_value_changes_what_is_rendered() {
    let mut without: HashMap<String, String> = HashMap::new();
    for (path, example) in Schema::read().values {
        let mut settings = prerequisites(&path);
        let before = without.entry(format!("{settings:?}")).or_insert_with(|| render_text(&settings).unwrap()).clone();
        settings.push((&path, example.clone()));
        let after = render_text(&settings).unwrap();
        assert!(before != after, "{path}={example} changes nothing");
    }
}

#[test]
fn every_value_is_in_the_values_file_with_a_comment() {
    let file = read("charts/s3csi/values.yaml");
    let documented = documented_values(&file);
    for (path, _) in Schema::read().values {
        assert!(documented.contains(&path), "values.yaml has no commented {path}");
    }
}

/// Paths of the keys in a values file that have a comment above them.
fn documented_values(file: &str) -> Vec<String> {
    let mut documented = Vec::new();
    let mut parents: Vec<(usize, &str)> = Vec::new();
    let mut is_commented = false;
    for line in file.lines() {
        let content = line.trim_start();
        let indent = line.len() - content.len();
        if let Some((key, _)) = content.split_once(':').filter(|_| !content.starts_with('#')) {
            parents.retain(|(depth, _)| *depth < indent);
            parents.push((indent, key));
            if is_commented {
                documented.push(parents.iter().map(|(_, key)| *key).collect::<Vec<_>>().join("."));
            }
        }
        is_commented = content.starts_with('#');
    }
    documented
}

#[test]
fn unknown_values_are_refused() {
    for path in Schema::read().closed {
        let separator = if path.is_empty() { "" } else { "." };
        let unknown = format!("{path}{separator}noSuchValue");
        let error = render_text(&[(&unknown, json!(1))]).unwrap_err();
        assert!(error.contains("additional properties 'noSuchValue' not allowed"), "{unknown}: {error}");
    }
}

#[test]
fn values_of_another_kind_are_refused() {
    for (path, example) in Schema::read().values {
        let wrong = if example.is_object() { json!("text") } else { json!({"an": "object"}) };
        let error = render_text(&[(&path, wrong)]).unwrap_err();
        assert!(error.contains("don't meet the specifications of the schema"), "{path}: {error}");
    }
}

#[test]
fn wrong_texts_are_refused() {
    let check = |path: &str, value: Value| {
        let error = render_text(&[(path, value.clone())]).expect_err(&format!("{path}={value} was accepted"));
        assert!(error.contains("don't meet the specifications of the schema"), "{path}: {error}");
    };
    check("strategy", json!("Pod"));
    check("image.pullPolicy", json!("Sometimes"));
    check("s3.endpointUrl", json!("s3.example.com"));
    check("node.kubeletPath", json!("var/lib/kubelet"));
    check("node.logFormat", json!("xml"));
    check("node.logLevel", json!(-1));
    check("mounter.limit", json!(0));
    check("systemd.memoryLimit", json!("much"));
    check("proxy.httpsProxy", json!("http://user:password@proxy.example.com"));
    check("proxy.httpProxy", json!("proxy.example.com:3128"));
    check("proxy.noProxy", json!("a\nb"));
    check("driverName", json!("Not A Name"));
    check("sidecars.csiProvisioner.timeout", json!("soon"));
    check("mountpointPod.namespace", json!("Not A Name"));
    check("mountpointPod.headroomPodLabels", json!({"team": "a b"}));
}

#[test]
fn what_cannot_work_together_is_refused() {
    let check = |settings: &[Setting<'_>], expected: &str| {
        let error = render_text(settings).unwrap_err();
        assert!(error.contains(expected), "{error}");
    };
    check(&[("tls.caCertData", json!("PEM"))], "tls.caCertData needs a name for its ConfigMap");
    let source = |it: &str| ("credentials.source", json!(it));
    check(&[source("webIdentity")], "set credentials.webIdentity.roleArn");
    check(&[source("profile")], "set credentials.profile.secretName");
}

/// All values that the chart scality-mountpoint-s3-csi-driver 2.2.0 has or honours.
const VALUES_OF_THE_EARLIER_CHART: &str = "crates/testbed/tests/chart/earlier-values.yaml";

#[test]
fn values_of_the_earlier_chart_are_accepted_and_mean_the_same() {
    let mut helm = helm();
    helm.arg("template").arg(chart::RELEASE).arg(directory()).args(["--kube-version", "1.33.0", "--values"]);
    helm.arg(environment::workspace().join(VALUES_OF_THE_EARLIER_CHART));
    helm.args(["--set", "image.repository=storage/s3csi", "--set", "image.tag="]);
    let objects = chart::Objects::parse(&chart::run(helm).unwrap());
    let node = &objects.get("DaemonSet", "s3-csi-node")["spec"]["template"]["spec"];
    let plugin = &node["containers"][0];
    let variable = |name: &str| chart::elements(&plugin["env"]).find(|it| it["name"] == name).unwrap().clone();
    assert_eq!(text(&plugin["image"]), concat!("registry.example.com/storage/s3csi:", env!("CARGO_PKG_VERSION")));
    assert_eq!(variable("AWS_ENDPOINT_URL")["value"], "http://s3.earlier.example:8000");
    assert_eq!(variable("AWS_REGION")["value"], "us-west-2");
    let secret = chart::elements(&node["volumes"]).find(|it| it["name"] == "credentials").unwrap();
    assert_eq!(secret["secret"]["secretName"], "s3-secret");
    assert_eq!(secret["secret"]["items"][0], json!({"key": "access_key_id", "path": "access_key_id"}));
    assert_eq!(variable("KUBELET_PATH")["value"], "/var/lib/kubelet");
    assert_eq!(node["imagePullSecrets"], json!([{"name": "registry-key"}]));
    assert_eq!(node["nodeSelector"], json!({"kubernetes.io/os": "linux", "disk": "fast"}));
    assert_eq!(plugin["securityContext"]["seLinuxOptions"]["type"], "super_t");
    assert_eq!(plugin["resources"]["limits"]["memory"], "256Mi");
}

#[test]
fn values_of_the_earlier_chart_that_mean_something_else_are_refused_with_a_sentence() {
    let check = |path: &str, value: Value, expected: &str| {
        let error = render_text(&[(path, value)]).unwrap_err();
        assert!(error.contains(expected), "{path}: {error}");
        assert!(!error.contains("additional properties"), "{path}: {error}");
    };
    let image = "ghcr.io/scality/mountpoint-s3-csi-driver";
    check("image.repository", json!(image), "set image.repository to the image of s3csi in your registry");
    check(
        "image.repository",
        json!("mirror.example.com/mountpoint-s3-csi-driver"),
        "is the image of the Scality driver",
    );
    check("image.tag", json!("2.2.0"), "image.tag 2.2.0 is a version of the Scality driver");
    check("experimental.podMounter", json!(false), "strategy=systemd in place of false");
    check("experimental.reserveHeadroomForMountpointPods", json!(true), "set mountpointPod.reserveHeadroom");
    check("node.mountpointInstallPath", json!("/opt/mountpoint-s3-csi/bin/"), "set systemd.engineDirectory");
    check("awsAccessSecret.name", json!("aws-secret"), "set s3CredentialSecret.name");
}

/// As somebody has it who uses the chart in an umbrella chart.
const VALUES_OF_VERSION_1: &str = "
enabled: true
global: {imageRegistry: registry.example.com}
image: {repository: ghcr.io/scality/mountpoint-s3-csi-driver, tag: 1.2.0}
node: {mountpointInstallPath: /opt/mountpoint-s3-csi/bin/, s3EndpointUrl: 'http://s3.example.com:8000'}
controller: {enable: true}
experimental: {podMounter: false}
";

#[test]
fn a_values_file_of_version_1_is_accepted_after_what_the_sentences_ask_for() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("values.yaml");
    std::fs::write(&file, VALUES_OF_VERSION_1).unwrap();
    let mut settings: Vec<&str> = Vec::new();
    let render = |settings: &[&str]| {
        let mut helm = helm();
        helm.arg("template").arg(chart::RELEASE).arg(directory()).args(["--kube-version", "1.33.0", "--values"]);
        helm.arg(&file).args(settings.iter().flat_map(|it| ["--set", it]));
        chart::run(helm)
    };
    for (sentence, setting) in [
        ("set image.repository to the image of s3csi", "image.repository=storage/s3csi"),
        ("set image.tag to the tag of your s3csi image", "image.tag=0.1.0"),
        ("remove it with --set experimental=null", "experimental=null"),
        ("remove it with --set node.mountpointInstallPath=null", "node.mountpointInstallPath=null"),
    ] {
        let error = render(&settings).unwrap_err();
        assert!(error.contains(sentence), "{error}");
        assert!(!error.contains("additional properties"), "{error}");
        settings.push(setting);
    }
    let objects = chart::Objects::parse(&render(&settings).unwrap());
    let plugin = &objects.get("DaemonSet", "s3-csi-node")["spec"]["template"]["spec"]["containers"][0];
    let endpoint = chart::elements(&plugin["env"]).find(|it| it["name"] == "AWS_ENDPOINT_URL").unwrap();
    assert_eq!(endpoint["value"], "http://s3.example.com:8000");
}

#[test]
fn values_of_the_earlier_chart_without_a_meaning_are_ignored() {
    let without = render_text(&[]).unwrap();
    let ignored = Schema::read().ignored;
    let is_refused = |path: &str| ["awsAccessSecret", "experimental", "node.mountpointInstallPath"].contains(&path);
    assert!(ignored.len() > 10, "{ignored:?}");
    for path in ignored.iter().filter(|it| !is_refused(it)) {
        assert!(render_text(&[(path, json!({"any": "thing"}))]).unwrap() == without, "{path} changes what is rendered");
    }
}

#[test]
fn the_older_names_of_endpoint_and_region_win() {
    let objects = render(&[
        ("s3.endpointUrl", json!("http://new.example")),
        ("node.s3EndpointUrl", json!("http://old.example")),
        ("node.s3Region", json!("old-1")),
    ]);
    let plugin = &objects.get("DaemonSet", "s3-csi-node")["spec"]["template"]["spec"]["containers"][0];
    let values: Vec<&str> = chart::elements(&plugin["env"])
        .filter(|it| text(&it["name"]).starts_with("AWS_") && it["value"].is_string())
        .map(|it| text(&it["value"]))
        .collect();
    assert_eq!(values, ["http://old.example", "old-1"]);
}
