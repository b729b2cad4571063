//! What the chart makes: labels and selectors, rights, the definition of attachments, and how Pods reach into nodes.

use serde_json::{Value, json};

use crate::chart::{
    NAMESPACE, Objects, RELEASE, STRATEGIES, Setting, containers, documents, elements, read, render, render_strategy,
    text,
};

#[test]
fn a_fresh_install_is_found_by_the_documented_labels() {
    let objects = render_strategy("pod");
    let check = |kind: &str, name: &str, app: &str| {
        let pod = &objects.get(kind, name)["spec"]["template"]["metadata"]["labels"];
        assert_eq!(pod["app"], app);
    };
    check("DaemonSet", "s3-csi-node", "scality-s3-csi-node");
    check("Deployment", "s3-csi-controller", "s3-csi-controller");
}

#[test]
fn legacy_selectors_are_those_of_the_earlier_chart() {
    let objects = render(&[("legacySelectors", json!(true))]);
    let check = |kind: &str, name: &str| {
        let expected = json!({
            "app": name,
            "app.kubernetes.io/name": "scality-mountpoint-s3-csi-driver",
            "app.kubernetes.io/instance": RELEASE,
        });
        assert_eq!(objects.get(kind, name)["spec"]["selector"]["matchLabels"], expected);
    };
    check("DaemonSet", "s3-csi-node");
    check("Deployment", "s3-csi-controller");
}

#[test]
fn selectors_select_the_pods_they_are_for() {
    for strategy in STRATEGIES {
        for legacy in [true, false] {
            let labels = json!({"app": "mine"});
            let settings =
                [("strategy", json!(strategy)), ("legacySelectors", json!(legacy)), ("customLabels", labels)];
            for workload in render(&settings).workloads() {
                let selector = workload["spec"]["selector"]["matchLabels"].as_object().unwrap();
                let pod = &workload["spec"]["template"]["metadata"]["labels"];
                for (key, value) in selector {
                    assert_eq!(&pod[key], value, "{}", workload["metadata"]["name"]);
                }
            }
        }
    }
}

#[test]
fn names_are_those_of_the_earlier_chart() {
    let objects = render_strategy("pod");
    for (kind, name) in [
        ("CSIDriver", "s3.csi.scality.com"),
        ("CustomResourceDefinition", "mountpoints3podattachments.s3.csi.scality.com"),
        ("DaemonSet", "s3-csi-node"),
        ("Deployment", "s3-csi-controller"),
        ("Namespace", "mount-s3"),
        ("PriorityClass", "mount-s3-critical"),
        ("ServiceAccount", "s3-csi-driver-sa"),
        ("ServiceAccount", "s3-csi-driver-controller-sa"),
        ("ClusterRole", "s3-csi-driver-cluster-role"),
        ("ClusterRoleBinding", "mountpoint-s3-csi-node-binding"),
        ("ClusterRole", "s3-csi-driver-controller-cluster-role"),
        ("ClusterRoleBinding", "s3-csi-driver-controller-cluster-role-binding"),
        ("Role", "s3-csi-driver-node-mountpoint-pod-namespace-role"),
        ("RoleBinding", "s3-csi-driver-node-mountpoint-pod-namespace-role-binding"),
    ] {
        objects.get(kind, name);
    }
}

#[test]
fn what_belongs_to_one_strategy_is_not_in_another() {
    let kinds = |strategy: &str| {
        let objects = render_strategy(strategy);
        let mut kinds: Vec<String> =
            objects.0.iter().map(|it| format!("{} {}", text(&it["kind"]), text(&it["metadata"]["name"]))).collect();
        kinds.sort_unstable();
        kinds
    };
    let common = [
        "CSIDriver s3.csi.scality.com",
        "ClusterRole s3-csi-driver-cluster-role",
        "ClusterRoleBinding mountpoint-s3-csi-node-binding",
        "DaemonSet s3-csi-node",
        "ServiceAccount s3-csi-driver-sa",
        "ValidatingAdmissionPolicy s3-csi-driver-node",
        "ValidatingAdmissionPolicyBinding s3-csi-driver-node",
    ];
    assert_eq!(kinds("systemd"), common);
    let mut with_mounter = common.to_vec();
    with_mounter.insert(3, "DaemonSet s3-csi-mounter");
    assert_eq!(kinds("daemon"), with_mounter);
}

#[test]
fn drivers_beside_each_other_share_no_object() {
    let named = |settings: &[(&str, Value)]| -> Vec<String> {
        let objects = render(settings);
        let cluster_wide = objects.0.iter().filter(|it| it["metadata"]["namespace"].is_null());
        cluster_wide.map(|it| format!("{} {}", text(&it["kind"]), text(&it["metadata"]["name"]))).collect()
    };
    for strategy in STRATEGIES {
        let one = [("strategy", json!(strategy)), ("openshift.enabled", json!(true))];
        let other = [
            ("driverName", json!("s3.example.com")),
            ("mountpointPod.namespace", json!("mount-other")),
            ("mountpointPod.priorityClassName", json!("mount-other-critical")),
        ];
        let (mine, others) = (named(&one), named(&[one.as_slice(), &other].concat()));
        assert_eq!(mine.len(), others.len());
        assert!(mine.iter().all(|it| !others.contains(it)), "{strategy}: {mine:?} and {others:?}");
    }
}

#[test]
fn volumes_on_demand_add_a_sidecar_and_its_rights_to_every_strategy() {
    for strategy in STRATEGIES {
        let of_interest = |objects: &Objects| -> Vec<String> {
            let names = objects.0.iter().map(|it| text(&it["metadata"]["name"]).to_owned());
            names.filter(|it| it.contains("provisioner") || it == "s3-csi-controller").collect()
        };
        let without = render_strategy(strategy);
        assert!(!of_interest(&without).iter().any(|it| it.contains("provisioner")), "{strategy}");
        let settings = [("strategy", json!(strategy)), ("sidecars.csiProvisioner.enabled", json!(true))];
        let with = render(&settings);
        assert_eq!(of_interest(&with).iter().filter(|it| it.contains("provisioner")).count(), 4, "{strategy}");
        let pod = &with.get("Deployment", "s3-csi-controller")["spec"]["template"]["spec"];
        let names: Vec<&str> = elements(&pod["containers"]).map(|it| text(&it["name"])).collect();
        assert_eq!(names, ["s3-pod-reconciler", "csi-provisioner"], "{strategy}");
        // Both have the socket, and the same user, who alone may open it.
        for container in elements(&pod["containers"]) {
            assert_eq!(container["volumeMounts"][0], json!({"name": "socket-dir", "mountPath": "/csi"}), "{strategy}");
            assert_eq!(container["securityContext"]["runAsUser"], Value::Null, "{strategy}");
        }
        let secrets = |objects: &Objects| {
            let role = objects.get("ClusterRole", "s3-csi-driver-provisioner-cluster-role");
            elements(&role["rules"]).any(|it| it["resources"] == json!(["secrets"]))
        };
        // None unless they are named: the container that parses answers of stores has the same account.
        assert!(!secrets(&with), "{strategy}");
        let all = ("sidecars.csiProvisioner.secretNamespaces", json!(["*"]));
        assert!(secrets(&render(&[settings[0].clone(), settings[1].clone(), all])), "{strategy}");
        let namespaces = ("sidecars.csiProvisioner.secretNamespaces", json!(["team-a", "team-b"]));
        let few = render(&[settings[0].clone(), settings[1].clone(), namespaces]);
        assert!(!secrets(&few), "{strategy}");
        let roles = few.of_kind("Role").filter(|it| it["metadata"]["name"] == "s3-csi-driver-provisioner-secrets");
        let namespaces: Vec<&str> = roles.map(|it| text(&it["metadata"]["namespace"])).collect();
        assert_eq!(namespaces, ["team-a", "team-b"], "{strategy}");
    }
}

#[test]
fn no_role_grants_everything() {
    for strategy in STRATEGIES {
        let objects = render(&[
            ("strategy", json!(strategy)),
            ("openshift.enabled", json!(true)),
            ("sidecars.csiProvisioner.enabled", json!(true)),
        ]);
        for role in objects.of_kind("ClusterRole").chain(objects.of_kind("Role")) {
            for rule in elements(&role["rules"]) {
                for part in ["apiGroups", "resources", "verbs"] {
                    assert!(elements(&rule[part]).all(|it| it != "*"), "{} grants {rule}", role["metadata"]["name"]);
                }
            }
        }
    }
}

#[test]
fn the_controller_watches_nodes_only_for_warm_mountpoint_pods() {
    let check = |settings: &[Setting<'_>], expected: bool| {
        let role = render(settings).get("ClusterRole", "s3-csi-driver-controller-cluster-role").clone();
        let mut resources = elements(&role["rules"]).flat_map(|it| elements(&it["resources"]));
        assert_eq!(resources.any(|it| it == "csinodes"), expected, "{settings:?}");
    };
    check(&[], false);
    check(&[("mountpointPod.warm", json!(1))], true);
}

#[test]
fn rights_and_priority_classes_for_headroom_exist_only_with_it() {
    let patches_pods = |objects: &Objects| {
        let role = objects.get("ClusterRole", "s3-csi-driver-controller-cluster-role");
        let is_about_pods = |it: &&Value| elements(&it["resources"]).any(|it| it == "pods");
        elements(&role["rules"]).filter(is_about_pods).any(|it| elements(&it["verbs"]).any(|it| it == "patch"))
    };
    let classes = |objects: &Objects| -> Vec<String> {
        let of =
            |it: &Value| format!("{} {} {}", text(&it["metadata"]["name"]), it["value"], text(&it["preemptionPolicy"]));
        objects.of_kind("PriorityClass").map(of).collect()
    };
    let on = ("mountpointPod.reserveHeadroom", json!(true));
    let without = render_strategy("pod");
    assert!(!patches_pods(&without));
    assert_eq!(classes(&without), ["mount-s3-critical 1000000000 Never"]);
    let variable_of = |objects: &Objects, name: &str| variable(objects, "Deployment", "s3-csi-controller", name);
    assert_eq!(variable_of(&without, "RESERVE_HEADROOM"), Value::Null);

    let with = render(std::slice::from_ref(&on));
    assert!(patches_pods(&with));
    // Of the same value as other Mountpoint Pods: these must not take the room that was made for one.
    let expected = [
        "mount-s3-critical 1000000000 Never",
        "mount-s3-headroom -10 Never",
        "mount-s3-preempting 1000000000 PreemptLowerPriority",
    ];
    let mut found = classes(&with);
    found.sort_unstable();
    assert_eq!(found, expected);
    assert_eq!(variable_of(&with, "RESERVE_HEADROOM"), "on");
    assert_eq!(variable_of(&with, "MOUNTPOINT_HEADROOM_IMAGE"), Value::Null);
    for strategy in ["systemd", "daemon"] {
        let other = render(&[on.clone(), ("strategy", json!(strategy))]);
        assert_eq!(classes(&other), [""; 0], "{strategy}");
    }
}

#[test]
fn headroom_has_the_image_and_the_labels_of_the_values() {
    let objects = render(&[
        ("mountpointPod.reserveHeadroom", json!(true)),
        ("mountpointPod.headroomImage.repository", json!("registry.example.com/pause")),
        ("mountpointPod.headroomImage.tag", json!("3.10")),
        ("mountpointPod.headroomPodLabels", json!({"team": "storage", "example.com/kind": "headroom"})),
    ]);
    let variable = |name: &str| variable(&objects, "Deployment", "s3-csi-controller", name);
    assert_eq!(variable("MOUNTPOINT_HEADROOM_IMAGE"), "registry.example.com/pause:3.10");
    assert_eq!(variable("MOUNTPOINT_HEADROOM_IMAGE_PULL_POLICY"), "IfNotPresent");
    assert_eq!(variable("MOUNTPOINT_HEADROOM_POD_LABELS"), "example.com/kind=headroom,team=storage");
}

#[test]
fn the_definition_of_attachments_is_kept_and_follows_the_driver_s_name() {
    let name = "mountpoints3podattachments.s3.csi.scality.com";
    let objects = render_strategy("pod");
    let definition = objects.get("CustomResourceDefinition", name);
    assert_eq!(definition["metadata"]["annotations"], json!({"helm.sh/resource-policy": "keep"}));
    let [generated]: [Value; 1] = documents(&read("charts/s3csi/files/attachments.yaml")).try_into().unwrap();
    assert_eq!(definition["spec"], generated["spec"]);

    let objects = render(&[("cleanupCRDOnUninstall", json!(true)), ("driverName", json!("s3.example.com"))]);
    let definition = objects.get("CustomResourceDefinition", "mountpoints3podattachments.s3.example.com");
    assert_eq!(definition["metadata"]["annotations"], Value::Null);
    assert_eq!(definition["spec"]["group"], "s3.example.com");
    let role = objects.get("ClusterRole", "s3-csi-driver-cluster-role-s3.example.com");
    assert_eq!(role["rules"][2]["apiGroups"][0], "s3.example.com");
}

#[test]
fn mountpoint_pods_get_a_restricted_namespace_that_is_kept() {
    let objects = render_strategy("pod");
    let metadata = &objects.get("Namespace", "mount-s3")["metadata"];
    for mode in ["enforce", "warn", "audit"] {
        assert_eq!(metadata["labels"][format!("pod-security.kubernetes.io/{mode}")], "restricted");
    }
    assert_eq!(metadata["annotations"]["helm.sh/resource-policy"], "keep");
    let own = render(&[("mountpointPod.namespace", json!(NAMESPACE))]);
    assert_eq!(own.of_kind("Namespace").count(), 0, "the release's own namespace is not ours to make");
}

#[test]
fn certificates_are_where_engines_need_them() {
    let settings = |strategy: &str| {
        [
            ("strategy", json!(strategy)),
            ("tls.caCertConfigMap", json!("private-ca")),
            ("tls.caCertData", json!("line 1\nline 2\n")),
        ]
    };
    let namespaces = |objects: &Objects| -> Vec<String> {
        let maps = objects.of_kind("ConfigMap");
        maps.inspect(|it| assert_eq!(it["data"]["ca-bundle.crt"], "line 1\nline 2\n"))
            .map(|it| text(&it["metadata"]["namespace"]).to_owned())
            .collect()
    };
    assert_eq!(namespaces(&render(&settings("pod"))), [NAMESPACE, "mount-s3"]);
    let daemon = render(&settings("daemon"));
    assert_eq!(namespaces(&daemon), [NAMESPACE]);
    let mounter = &daemon.get("DaemonSet", "s3-csi-mounter")["spec"]["template"]["spec"];
    let certificates = mounter["volumes"].as_array().unwrap().iter().find(|it| it["name"] == "custom-ca-cert").unwrap();
    assert_eq!(certificates["configMap"]["name"], "private-ca");
}

/// Every further view of kubelet's directory would hold on to the mounts beneath it.
#[test]
fn a_node_plugin_has_time_to_wait_for_mounts_without_a_mounter() {
    let check = |longest_outage: &str, expected: u64| {
        for strategy in ["pod", "daemon"] {
            let settings = [("strategy", json!(strategy)), ("node.longestOutage", json!(longest_outage))];
            let objects = render(&settings);
            let plugin = &objects.get("DaemonSet", "s3-csi-node")["spec"]["template"]["spec"];
            assert_eq!(plugin["terminationGracePeriodSeconds"], expected, "{strategy}: {longest_outage}");
        }
    };
    check("2m", 150);
    check("1m30s", 120);
    check("0s", 30);
    check("1.5h", 5430);
}

#[test]
fn kubelet_s_directory_is_seen_once() {
    for strategy in STRATEGIES {
        let objects = render_strategy(strategy);
        for workload in objects.workloads() {
            let volumes = elements(&workload["spec"]["template"]["spec"]["volumes"]);
            let paths: Vec<&str> = volumes.filter_map(|it| it["hostPath"]["path"].as_str()).collect();
            let views = paths.iter().filter(|it| it.starts_with("/var/lib/kubelet")).count();
            let is_plugin = workload["metadata"]["name"] == "s3-csi-node";
            assert_eq!(views, usize::from(is_plugin), "{strategy}: {paths:?}");
        }
        let plugin = objects.get("DaemonSet", "s3-csi-node");
        let mount = &plugin["spec"]["template"]["spec"]["containers"][0]["volumeMounts"][0];
        let expected = if strategy == "systemd" { "HostToContainer" } else { "Bidirectional" };
        assert_eq!(mount["mountPropagation"], expected, "{strategy}");
        assert_eq!(mount["mountPath"], "/var/lib/kubelet", "{strategy}");
    }
}

#[test]
fn only_the_plugin_is_privileged() {
    for strategy in STRATEGIES {
        let objects = render_strategy(strategy);
        for workload in objects.workloads() {
            let pod = &workload["spec"]["template"]["spec"];
            assert_eq!(pod["hostNetwork"], Value::Null);
            assert_eq!(pod["hostIPC"], Value::Null);
            let is_plugin = workload["metadata"]["name"] == "s3-csi-node";
            let sees_processes = is_plugin && strategy != "systemd";
            assert_eq!(pod["hostPID"].as_bool().unwrap_or_default(), sees_processes, "{strategy}");
            for container in containers(workload) {
                let context = &container["securityContext"];
                let is_privileged = context["privileged"].as_bool().unwrap_or_default();
                assert_eq!(is_privileged, container["name"] == "s3-plugin", "{strategy}: {}", container["name"]);
                assert_eq!(context["readOnlyRootFilesystem"], true, "{strategy}: {}", container["name"]);
                if !is_privileged {
                    assert_eq!(context["allowPrivilegeEscalation"], false, "{strategy}: {}", container["name"]);
                }
            }
        }
    }
}

#[test]
fn scrapes_are_for_those_who_are_named() {
    let peers = json!([{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]);
    let enabled = ("networkPolicy.enabled", json!(true));
    let open = render(std::slice::from_ref(&enabled));
    let narrow = render(&[enabled, ("networkPolicy.scrapers", peers.clone())]);
    for (name, port) in [("s3-csi-node", 9808), ("s3-csi-controller", 9809)] {
        let rules = |objects: &Objects| objects.get("NetworkPolicy", name)["spec"]["ingress"].clone();
        assert_eq!(rules(&open), json!([{"ports": [{"port": port}]}]));
        assert_eq!(rules(&narrow), json!([{"ports": [{"port": port}], "from": peers}]));
    }
    assert_eq!(narrow.get("NetworkPolicy", "s3-csi-mountpoint-pods")["spec"]["ingress"], Value::Null);
}

#[test]
fn staged_files_have_a_volume_unless_its_limit_is_zero() {
    for (limit, is_on) in [(json!("2Gi"), true), (json!(""), false), (json!("0"), false), (json!(0), false)] {
        let daemon = render(&[("strategy", json!("daemon")), ("mounter.stageSizeLimit", limit.clone())]);
        let pod = &daemon.get("DaemonSet", "s3-csi-mounter")["spec"]["template"]["spec"];
        let has = |list: &Value, name: &str| elements(list).any(|it| it["name"] == name);
        assert_eq!(has(&pod["volumes"], "local-stage"), is_on, "{limit}");
        assert_eq!(has(&pod["containers"][0]["volumeMounts"], "local-stage"), is_on, "{limit}");
        let arguments = &pod["containers"][0]["args"];
        assert_eq!(elements(arguments).any(|it| it == "--stage-size-limit=2Gi"), is_on, "{limit}");
        assert_eq!(elements(arguments).any(|it| it == "--stage-dir=/local-stage"), is_on, "{limit}");

        let expected = if is_on { "2Gi" } else { "0" };
        let controller = render(&[("mountpointPod.stageSizeLimit", limit.clone())]);
        assert_eq!(variable(&controller, "Deployment", "s3-csi-controller", "MOUNTPOINT_STAGE_SIZE_LIMIT"), expected);
        let systemd = render(&[("strategy", json!("systemd")), ("systemd.stageSizeLimit", limit)]);
        assert_eq!(variable(&systemd, "DaemonSet", "s3-csi-node", "ENGINE_STAGE_SIZE_LIMIT"), expected);
    }
}

/// A variable of the first container of a workload; null if it has none.
fn variable(objects: &Objects, kind: &str, name: &str, variable: &str) -> Value {
    let container = &objects.get(kind, name)["spec"]["template"]["spec"]["containers"][0];
    let found = elements(&container["env"]).find(|it| it["name"] == variable);
    found.map_or(Value::Null, |it| it["value"].clone())
}

#[test]
fn volumes_without_their_secret_use_the_driver_s_keys_only_where_it_is_said() {
    for strategy in STRATEGIES {
        let namespaces =
            |settings: &[_]| variable(&render(settings), "DaemonSet", "s3-csi-node", "SECRET_FALLS_BACK_TO_DRIVER");
        let strategy = ("strategy", json!(strategy));
        assert_eq!(namespaces(std::slice::from_ref(&strategy)), Value::Null);
        assert_eq!(namespaces(&[strategy.clone(), ("legacy", Value::Null)]), Value::Null);
        let listed = ("legacy.secretFallsBackToDriver", json!(["old", "older"]));
        assert_eq!(namespaces(&[strategy, listed]), "old,older");
    }
}

/// RBAC cannot restrict it to the conditions of Pods on one node; the policy does.
#[test]
fn the_node_writes_conditions_of_workloads_only_under_the_admission_policy() {
    for (policy, strategy, expected) in [(true, "pod", true), (false, "pod", false), (true, "daemon", false)] {
        let objects = render(&[("node.admissionPolicy", json!(policy)), ("strategy", json!(strategy))]);
        let rules = &objects.get("ClusterRole", "s3-csi-driver-cluster-role")["rules"];
        let found = elements(rules).any(|it| elements(&it["resources"]).any(|it| it == "pods/status"));
        assert_eq!(found, expected, "admission policy: {policy}, strategy {strategy}");
    }
}
