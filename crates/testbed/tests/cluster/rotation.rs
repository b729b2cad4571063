//! The keys of volumes are changed in their Secret, and the old ones are revoked, while workloads of each strategy read and write.

use s3csi_testbed::cluster::STORE_ADMINISTRATOR;
use serde_json::json;

use crate::strategies::{DAEMON, POD, SYSTEMD, install_daemon, install_systemd};
use crate::world::{CLUSTER, NODE, SteadyWorkload, Volume, engines_of, events, eventually};

const SECRET: &str = "rotated";

/// Keys of users of the cluster's S3 server.
const OLD: (&str, &str) = ("rotated-old", "rotated-old-NeverPrintThis");
const NEW: (&str, &str) = ("rotated-new", "rotated-new-NeverPrintThis");

/// A user with access to all buckets.
#[track_caller]
fn create_user((access_key, secret_key): (&str, &str)) {
    let user = ["create-user", "--access", access_key, "--secret", secret_key, "--role", "admin"];
    CLUSTER.administer_store(STORE_ADMINISTRATOR, &user).unwrap();
}

#[track_caller]
fn delete_user((access_key, _): (&str, &str)) {
    CLUSTER.administer_store(STORE_ADMINISTRATOR, &["delete-user", "--access", access_key]).unwrap();
}

/// Whether the store accepts keys of a user who may administer it.
fn is_accepted(keys: (&str, &str)) -> bool {
    CLUSTER.administer_store(keys, &["list-users"]).is_ok()
}

#[track_caller]
fn write_secret((access_key, secret_key): (&str, &str)) {
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": SECRET, "namespace": "default" },
        "stringData": { "access_key_id": access_key, "secret_access_key": secret_key },
    });
    CLUSTER.apply(&secret.to_string()).unwrap();
}

#[test]
fn workloads_do_not_notice_that_their_secret_is_rotated_and_the_old_keys_are_revoked() {
    let _daemon = install_daemon();
    install_systemd();
    create_user(OLD);
    create_user(NEW);
    write_secret(OLD);
    let strategies = [&POD, &DAEMON, &SYSTEMD];
    let names = strategies.map(|it| format!("rotated-{}", it.strategy));
    let mut workloads = Vec::new();
    for (installed, name) in strategies.iter().zip(&names) {
        let volume = Volume { driver: installed.driver, secret: Some(SECRET), ..Volume::new(name) };
        workloads.push(SteadyWorkload::start(&volume, NODE));
    }
    let engines = names.each_ref().map(|it| engines_of(it));

    write_secret(NEW);
    for name in &names {
        // kubelet publishes the volumes of a Pod that changes again and passes the Secret; without a change it does so every minute.
        CLUSTER.kubectl(&["annotate", "pod", name, "test/changed=yes"]).unwrap();
    }
    for (name, before) in names.iter().zip(&engines) {
        eventually("an engine with the new keys serves", || {
            let now = engines_of(name);
            now.len() == 1 && now != *before
        });
        eventually("an Event says why", || {
            events(name, "EngineReplaced").iter().any(|it| it.contains("credentials changed"))
        });
    }
    assert!(is_accepted(OLD), "until here the store accepts both");
    delete_user(OLD);
    assert!(is_accepted(NEW) && !is_accepted(OLD), "from now on only the new keys are of use");
    for workload in &workloads {
        workload.check_undisturbed("the rotation of its Secret");
    }
    for workload in workloads {
        workload.finish();
    }
    delete_user(NEW);
}
