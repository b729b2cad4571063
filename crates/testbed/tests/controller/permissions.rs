//! The controller has the rights that the chart grants: enough for everything it does, and none that it does not use.

use std::collections::BTreeSet;

use k8s_openapi::api::rbac::v1::{ClusterRole, PolicyRule, Role};
use kube::Api;
use s3csi_testbed::cluster::CONTROLLER_ACCOUNT;

use crate::world::objects::on;
use crate::world::{CONTROL_PLANE, World, eventually};

/// `verb group/resource`, with the subresource.
type Right = String;

fn rights(rules: Option<Vec<PolicyRule>>) -> impl Iterator<Item = Right> {
    rules.into_iter().flatten().flat_map(|rule| {
        let groups = rule.api_groups.unwrap_or_default();
        let resources = rule.resources.unwrap_or_default();
        let mut rights = Vec::new();
        for (group, resource) in groups.iter().flat_map(|group| resources.iter().map(move |it| (group, it))) {
            rights.extend(rule.verbs.iter().map(|verb| format!("{verb} {group}/{resource}")));
        }
        rights
    })
}

async fn granted(world: &World) -> BTreeSet<Right> {
    let cluster: Api<ClusterRole> = Api::all(world.client.clone());
    let cluster = cluster.get("s3-csi-driver-controller-cluster-role").await.unwrap();
    let role = async |namespace: &str, name: &str| {
        let roles: Api<Role> = Api::namespaced(world.client.clone(), namespace);
        roles.get(name).await.unwrap().rules
    };
    let pods = role("mount-s3", "s3-csi-driver-controller-mountpoint-pods").await;
    let lease = role("kube-system", "s3-csi-driver-controller-lease").await;
    rights(cluster.rules).chain(rights(pods)).chain(rights(lease)).collect()
}

/// What the controller has asked for, and whether it was allowed to.
fn used() -> (BTreeSet<Right>, BTreeSet<Right>) {
    let mut allowed = BTreeSet::new();
    let mut forbidden = BTreeSet::new();
    for event in CONTROL_PLANE.audit().into_iter().filter(|it| it.user.username == CONTROLLER_ACCOUNT) {
        let Some(about) = event.object_ref else { continue };
        let subresource = if about.subresource.is_empty() { String::new() } else { format!("/{}", about.subresource) };
        let right = format!("{} {}/{}{subresource}", event.verb, about.api_group, about.resource);
        let is_forbidden = event.response_status.is_some_and(|it| it.code == 403);
        if is_forbidden {
            forbidden.insert(right)
        } else {
            allowed.insert(right)
        };
    }
    (allowed, forbidden)
}

#[tokio::test]
async fn every_right_is_used_and_none_is_missing() {
    let world = World::shared("permissions").await;
    world.volume("pv").await;
    // Everything a controller ever does: attach, share, tell, retire, delete.
    let a = world.workload("a", on("node", &["pv"])).await;
    let b = world.workload("b", on("node", &["pv"])).await;
    eventually("both are served", async || {
        let state = world.state(&[&a, &b]).await;
        state.iter().any(|it| it.ends_with("=a b")).then_some(())
    })
    .await;
    world.remove(&a).await;
    world.remove(&b).await;
    world.check(&[&a, &b], &[]).await;
    let granted = granted(&world).await;
    eventually("every right was used", async || {
        // The audit log is written a moment after the answer.
        let (used, _) = used();
        let unused: Vec<&Right> = granted.difference(&used).collect();
        unused.is_empty().then_some(())
    })
    .await;
    let (used, forbidden) = used();
    assert_eq!(forbidden, BTreeSet::new());
    assert_eq!(used.difference(&granted).collect::<Vec<_>>(), Vec::<&Right>::new());
}
