//! The roles of the chart grant what the programs use, and nothing else. What they use is what the API server's audit log has.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::world::{CLUSTER, DRIVER, NAMESPACE, Volume, Workload, delete_pods, eventually, in_peace, objects};

/// `verb group/resource`, with the subresource, and the namespace if the right ends there.
type Right = String;

/// Rights that are only used on rare occasions, and on which.
const RARE: [(&str, &str, &str); 3] = [
    (
        "s3-csi-driver-sa",
        "get /pods mount-s3",
        "read past the cache, when a Mountpoint Pod seems to be gone while its source is there",
    ),
    ("s3-csi-driver-sa", "patch /pods/status", "the condition of a workload whose unit of version 1 has died"),
    (
        "s3-csi-driver-controller-sa",
        "create coordination.k8s.io/leases kube-system",
        "once per cluster, by the first controller",
    ),
];

#[test]
fn every_right_of_the_chart_is_used_and_none_is_missing() {
    let _peace = in_peace();
    // Everything the driver does for workloads: attach, share, tell, mount, retire, delete.
    Volume::new("rights").create();
    let workloads = [Workload::new("rights-1", "rights").start(), Workload::new("rights-2", "rights").start()];
    delete_pods(&workloads.each_ref());
    // As clouds mark new nodes until their drivers are there. The effect spares the Pods of other tests.
    let taint = format!("{DRIVER}/agent-not-ready");
    CLUSTER.kubectl(&["taint", "node", "node1", &format!("{taint}=:NoSchedule")]).unwrap();
    eventually("the node plugin has removed the taint", || {
        let taints = CLUSTER.kubectl(&["get", "node", "node1", "--output", "jsonpath={.spec.taints[*].key}"]);
        taints.is_ok_and(|it| !it.contains(&taint))
    });
    for account in ["s3-csi-driver-sa", "s3-csi-driver-controller-sa"] {
        let granted = granted(account);
        assert!(granted.len() > 1, "{account} may do nothing: {granted:?}");
        let rare: BTreeSet<Right> = RARE.iter().filter(|it| it.0 == account).map(|it| it.1.to_owned()).collect();
        assert!(rare.is_subset(&granted), "{account}: {rare:?} are listed as rare, but not granted");
        let mut used = BTreeSet::new();
        // The log is written a moment after the answer, and the end of a Mountpoint Pod takes some seconds.
        eventually(&format!("{account} has used every right: {granted:?}"), || {
            used = asked(account).0;
            granted.difference(&used).all(|it| rare.contains(it))
        });
        let (used, refused) = asked(account);
        assert_eq!(refused, BTreeSet::new(), "{account} was refused");
        let beyond: Vec<&Right> = used.iter().filter(|it| !granted.contains(*it) && !is_everybodys(it)).collect();
        assert_eq!(beyond, Vec::<&Right>::new(), "{account} has these rights from elsewhere");
    }
}

/// What any service account may do.
fn is_everybodys(right: &str) -> bool {
    right.contains("selfsubject")
}

/// All that the roles bound to an account of the release grant.
fn granted(account: &str) -> BTreeSet<Right> {
    let is_ours = |binding: &Value| {
        let subjects = binding["subjects"].as_array().into_iter().flatten();
        subjects
            .into_iter()
            .any(|it| it["kind"] == "ServiceAccount" && it["name"] == account && it["namespace"] == NAMESPACE)
    };
    let api = "/apis/rbac.authorization.k8s.io/v1";
    let bindings = ["clusterrolebindings", "rolebindings"].into_iter().flat_map(|it| objects(&format!("{api}/{it}")));
    let mut granted = BTreeSet::new();
    for binding in bindings.filter(is_ours) {
        let name = binding["roleRef"]["name"].as_str().unwrap();
        let namespace = binding["metadata"]["namespace"].as_str();
        let role = match namespace.filter(|_| binding["roleRef"]["kind"] == "Role") {
            Some(namespace) => CLUSTER.get(&format!("{api}/namespaces/{namespace}/roles/{name}")),
            None => CLUSTER.get(&format!("{api}/clusterroles/{name}")),
        };
        for rule in role.unwrap()["rules"].as_array().unwrap() {
            let list = |key: &str| rule[key].as_array().unwrap().iter().map(|it| it.as_str().unwrap().to_owned());
            for (group, resource) in
                list("apiGroups").flat_map(|group| list("resources").map(move |it| (group.clone(), it)))
            {
                granted.extend(list("verbs").map(|verb| right(&verb, &group, &resource, namespace)));
            }
        }
    }
    granted
}

fn right(verb: &str, group: &str, resource: &str, namespace: Option<&str>) -> Right {
    match namespace {
        Some(namespace) => format!("{verb} {group}/{resource} {namespace}"),
        None => format!("{verb} {group}/{resource}"),
    }
}

/// What an account has asked for until now, each as a right for the whole cluster and for one namespace if only that is granted; and
/// what it was refused.
fn asked(account: &str) -> (BTreeSet<Right>, BTreeSet<Right>) {
    let asker = format!("system:serviceaccount:{NAMESPACE}:{account}");
    let granted = granted(account);
    let (mut used, mut refused) = (BTreeSet::new(), BTreeSet::new());
    for event in CLUSTER.audit().into_iter().filter(|it| it.user.username == asker) {
        let Some(about) = event.object_ref else { continue };
        let resource = match about.subresource.as_str() {
            "" => about.resource.clone(),
            subresource => format!("{}/{subresource}", about.resource),
        };
        let everywhere = right(&event.verb, &about.api_group, &resource, None);
        let here = right(&event.verb, &about.api_group, &resource, Some(&about.namespace));
        let right = if granted.contains(&here) { here } else { everywhere };
        if event.response_status.is_some_and(|it| it.code == 403) {
            refused.insert(format!("{right} ({DRIVER})"));
        } else {
            used.insert(right);
        }
    }
    (used, refused)
}
