//! Tokens of workloads: who asks for them, who may read service accounts.

use serde_json::{Value, json};

use crate::chart::{Objects, STRATEGIES, elements, render, render_strategy};

const DRIVER: &str = "s3.csi.scality.com";

fn reads_service_accounts(objects: &Objects) -> bool {
    let accounts = |it: &&Value| elements(&it["resources"]).any(|it| it == "serviceaccounts");
    let roles = objects.of_kind("ClusterRole").chain(objects.of_kind("Role"));
    let granted: Vec<&Value> = roles.flat_map(|it| elements(&it["rules"])).filter(accounts).collect();
    assert!(granted.iter().all(|it| it["verbs"] == json!(["get"])), "{granted:?}");
    !granted.is_empty()
}

#[test]
fn nothing_is_asked_for_and_nothing_granted_unless_it_is_enabled() {
    for strategy in STRATEGIES {
        let objects = render_strategy(strategy);
        assert_eq!(objects.get("CSIDriver", DRIVER)["spec"]["tokenRequests"], Value::Null, "{strategy}");
        assert!(!reads_service_accounts(&objects), "{strategy}");
        assert!(
            render(&[("strategy", json!(strategy)), ("podIdentity", Value::Null)]).of_kind("CSIDriver").count() == 1
        );
    }
}

#[test]
fn kubelet_sends_a_token_for_each_audience() {
    for strategy in STRATEGIES {
        let enabled = [("strategy", json!(strategy)), ("podIdentity.enabled", json!(true))];
        let requests = |more: &[(&'static str, Value)]| {
            let objects = render(&[enabled.as_slice(), more].concat());
            objects.get("CSIDriver", DRIVER)["spec"]["tokenRequests"].clone()
        };
        let token = |audience: &str, seconds: u32| json!({"audience": audience, "expirationSeconds": seconds});
        assert_eq!(requests(&[]), json!([token("sts.amazonaws.com", 3600)]), "{strategy}");
        let own = [("podIdentity.audience", json!("minio")), ("podIdentity.expirationSeconds", json!(10_000_000))];
        assert_eq!(requests(&own), json!([token("minio", 10_000_000)]), "{strategy}");
        let agent = ("podIdentity.agent.url", json!("http://169.254.170.23/v1/credentials"));
        let both = json!([token("sts.amazonaws.com", 3600), token("pods.eks.amazonaws.com", 3600)]);
        assert_eq!(requests(std::slice::from_ref(&agent)), both, "{strategy}");
        let same = ("podIdentity.agent.audience", json!("sts.amazonaws.com"));
        assert_eq!(requests(&[agent, same]), json!([token("sts.amazonaws.com", 3600)]), "{strategy}");
    }
}

#[test]
fn service_accounts_are_read_only_if_they_name_roles() {
    for strategy in STRATEGIES {
        let enabled = [("strategy", json!(strategy)), ("podIdentity.enabled", json!(true))];
        assert!(reads_service_accounts(&render(&enabled)), "{strategy}");
        let without = [enabled.as_slice(), &[("podIdentity.serviceAccountRoles", json!(false))]].concat();
        assert!(!reads_service_accounts(&render(&without)), "{strategy}");
    }
}

/// The certificates of a private CA reach the part that asks the security token service.
#[test]
fn the_token_service_may_have_a_private_certificate_authority() {
    for strategy in ["pod", "daemon"] {
        let settings = |is_enabled: bool| {
            let certificates = ("tls.caCertConfigMap", json!("private-ca"));
            [("strategy", json!(strategy)), ("podIdentity.enabled", json!(is_enabled)), certificates]
        };
        let bundle = |is_enabled: bool| {
            let objects = render(&settings(is_enabled));
            let pod = &objects.get("DaemonSet", "s3-csi-node")["spec"]["template"]["spec"];
            let is_mounted = elements(&pod["volumes"]).any(|it| it["configMap"]["name"] == "private-ca");
            let is_named = elements(&pod["containers"][0]["env"]).any(|it| it["name"] == "STS_CA_BUNDLE");
            (is_mounted, is_named)
        };
        assert_eq!((bundle(false), bundle(true)), ((false, false), (true, true)), "{strategy}");
    }
}
