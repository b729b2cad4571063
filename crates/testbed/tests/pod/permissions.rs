//! The node plugin has the rights that the chart gives it: enough for everything it does, none that it does not use, and on other
//! nodes none at all.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Patch, PatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use s3csi_testbed::chart;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::Kubelet;
use s3csi_testbed::plugin::PluginStrategy;
use s3csi_testbed::wait::wait_for;
use serde_json::{Value, json};

use crate::cluster::{NAMESPACE, control_plane};
use crate::world::World;

const ACCOUNT: &str = "s3-csi-driver-sa";
const USER: &str = "system:serviceaccount:kube-system:s3-csi-driver-sa";

/// What the chart makes for the node plugin's account.
fn account() -> String {
    let templates = ["templates/node-account.yaml", "templates/node-admission.yaml"];
    chart::render_only(&templates, &[("podIdentity.enabled", json!(true))]).unwrap()
}

/// `verb group/resource`, with the subresource.
fn granted(yaml: &str) -> BTreeSet<String> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(yaml).unwrap();
    let texts = |list: &Value| -> Vec<String> {
        list.as_array().into_iter().flatten().map(|it| it.as_str().unwrap().to_owned()).collect()
    };
    let mut rights = BTreeSet::new();
    for rule in documents.iter().flat_map(|it| it["rules"].as_array().cloned().unwrap_or_default()) {
        for group in texts(&rule["apiGroups"]) {
            for resource in texts(&rule["resources"]) {
                rights.extend(texts(&rule["verbs"]).iter().map(|verb| format!("{verb} {group}/{resource}")));
            }
        }
    }
    assert!(rights.len() > 5, "{rights:?}");
    rights
}

/// What the plugin has asked for: allowed, and refused.
fn used() -> (BTreeSet<String>, BTreeSet<String>) {
    let (mut allowed, mut refused) = (BTreeSet::new(), BTreeSet::new());
    for event in control_plane().audit().into_iter().filter(|it| it.user.username == USER) {
        let Some(about) = event.object_ref else { continue };
        let subresource = if about.subresource.is_empty() { String::new() } else { format!("/{}", about.subresource) };
        let right = format!("{} {}/{}{subresource}", event.verb, about.api_group, about.resource);
        let code = event.response_status.map(|it| it.code);
        if code == Some(403) {
            refused.insert(right)
        } else {
            allowed.insert(right)
        };
    }
    (allowed, refused)
}

impl World<'_> {
    /// How a plugin in a Pod on this node reaches the API server: with a token that says which Pod, and so which node, it is for.
    fn kubeconfig_of_the_plugin(&self, path: PathBuf) -> PathBuf {
        let name = format!("s3-csi-{}", self.node_name);
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": name, "namespace": "kube-system" },
            "spec": {
                "nodeName": self.node_name, "serviceAccountName": ACCOUNT,
                "containers": [{ "name": "s3-plugin", "image": "localhost/s3csi:test" }],
            },
        });
        control_plane().apply(&pod.to_string()).unwrap();
        let bound = format!("--bound-object-name={name}");
        let token = ["create", "token", "--namespace=kube-system", ACCOUNT, "--bound-object-kind=Pod", &bound];
        let token = control_plane().kubectl(&token).unwrap();
        control_plane().write_kubeconfig(&path, token.trim()).unwrap();
        path
    }
}

#[test]
fn every_right_is_used_none_is_missing_and_other_nodes_are_out_of_reach() {
    let fixture = Fixture::new("pod-permissions");
    let mut world = World::prepare(&fixture);
    let yaml = account();
    control_plane().apply(&yaml).unwrap();
    let kubeconfig = world.kubeconfig_of_the_plugin(fixture.path("plugin.kubeconfig"));
    world.plugin.set_strategy(PluginStrategy::Pod { kubeconfig: kubeconfig.clone() });
    let taint = "s3.csi.scality.com/agent-not-ready";
    world.runtime.block_on(world.cluster.create_node(&world.node_name, &["other", taint]));

    // Everything a node plugin ever does.
    let _issuer = world.start_with_identities(&["default"], Duration::from_hours(1));
    world.runtime.block_on(Kubelet::register(&world.plugin.registration_socket())).unwrap();
    let pod = world.serve(&[1]);
    world.publish(&world.volume(1));
    world.unpublish(&world.volume(1));
    // No role is named, which the plugin finds out from the service account.
    world.try_publish(&world.identity_volume(1, "default")).unwrap_err();
    let elsewhere = world.pod_name(2);
    world.runtime.block_on(world.cluster.create_pod(&elsewhere, None));
    world.assign(&elsewhere, &[2]);
    assert!(world.try_publish_within(&world.volume(2), Duration::from_secs(3)).is_err());
    wait_for("the taint is gone", || world.runtime.block_on(world.cluster.taints(&world.node_name)) == ["other"]);
    let granted = granted(&yaml);
    let conditions = || used().0.contains("patch /pods/status") && used().0.contains("create events.k8s.io/events");
    wait_for("the condition and the Event are written", conditions);
    // The audit log has a watch when it ends.
    world.stop_node();
    wait_for("every right was used", || granted.is_subset(&used().0));
    let (allowed, refused) = used();
    assert_eq!(allowed.difference(&granted).collect::<Vec<_>>(), Vec::<&String>::new());
    assert_eq!(refused, BTreeSet::new());
    world.start_node();

    // And nothing else, even with its token.
    let other = format!("{}-other", world.node_name);
    world.runtime.block_on(world.cluster.create_node(&other, &[taint]));
    world.runtime.block_on(async {
        let config = Kubeconfig::read_from(&kubeconfig).unwrap();
        let config = Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await.unwrap();
        let client = Client::try_from(config).unwrap();
        let nodes: Api<Node> = Api::all(client.clone());
        let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
        let parameters = PatchParams::default();
        let no_taints = Patch::Merge(json!({ "spec": { "taints": null } }));
        let own = world.node_name.as_str();
        let refused = nodes.patch(&other, &parameters, &no_taints).await.unwrap_err().to_string();
        assert!(refused.contains("may change its own node only"), "{refused}");
        let refused = nodes.patch(own, &parameters, &no_taints).await.unwrap_err().to_string();
        assert!(refused.contains("may remove the taint s3.csi.scality.com/agent-not-ready only"), "{refused}");
        let label = Patch::Merge(json!({ "metadata": { "labels": { "a": "b" } } }));
        let refused = nodes.patch(own, &parameters, &label).await.unwrap_err().to_string();
        assert!(refused.contains("may change nothing but the taint"), "{refused}");
        // Whatever the field: these were not in a list of names once.
        for field in ["podCIDR", "podCIDRs", "providerID"] {
            let value = if field == "podCIDRs" { json!(["10.9.0.0/24"]) } else { json!("10.9.0.0/24") };
            let mut spec = json!({ "podCIDR": "10.9.0.0/24", "podCIDRs": ["10.9.0.0/24"] });
            spec[field] = value;
            let change = Patch::Merge(json!({ "spec": spec }));
            let refused = nodes.patch(own, &parameters, &change).await.unwrap_err().to_string();
            assert!(refused.contains("may change nothing but the taint"), "{field}: {refused}");
        }
        let condition =
            |kind: &str| Patch::Strategic(json!({ "status": { "conditions": [{ "type": kind, "status": "True" }] } }));
        let ours = condition("s3.csi.scality.com/Mounted");
        let refused = pods.patch_status(&elsewhere, &parameters, &ours).await.unwrap_err().to_string();
        assert!(refused.contains("may change Pods on its own node only"), "{refused}");
        let refused = pods.patch_status(&pod.name, &parameters, &condition("Ready")).await.unwrap_err().to_string();
        assert!(refused.contains("may write the conditions s3.csi.scality.com/Mounted and Movable only"), "{refused}");
        for change in [
            json!({ "metadata": { "labels": { "a": "b" } } }),
            json!({ "metadata": { "annotations": { "s3.csi.scality.com/needs-unmount": "true" } } }),
            json!({ "status": { "reason": "Evicted" } }),
            json!({ "status": { "message": "gone" } }),
        ] {
            let patch = Patch::Merge(change.clone());
            let refused = pods.patch_status(&pod.name, &parameters, &patch).await.unwrap_err().to_string();
            assert!(
                refused.contains("may write the conditions s3.csi.scality.com/Mounted and Movable only"),
                "{change}: {refused}"
            );
        }
        // A user's Pod on another node, and one on its own.
        let users: Api<Pod> = Api::namespaced(client, "default");
        let (theirs, own_user) = (format!("{other}-user"), format!("{own}-user"));
        for (name, node) in [(&theirs, other.as_str()), (&own_user, own)] {
            world.cluster.create_workload(name, node).await;
        }
        let refused = users.patch_status(&theirs, &parameters, &ours).await.unwrap_err().to_string();
        assert!(refused.contains("may change Pods on its own node only"), "{refused}");
        let refused = users.patch_status(&own_user, &parameters, &condition("Ready")).await.unwrap_err().to_string();
        assert!(refused.contains("may write the conditions s3.csi.scality.com/Mounted and Movable only"), "{refused}");
        users.patch_status(&own_user, &parameters, &ours).await.unwrap();
        for kind in ["s3.csi.scality.com/Mounted", "s3.csi.scality.com/Movable"] {
            pods.patch_status(&pod.name, &parameters, &condition(kind)).await.unwrap();
        }
    });
}
