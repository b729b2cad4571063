//! csi-sanity, the CSI project's own test suite for drivers: first against the node plugin's socket as it is, then with the
//! controller, so that real buckets and mounts are behind the answers. What is skipped is listed here, each with its reason.

mod forward;
mod relay;
mod report;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use s3csi_s3_server::store::Store as _;
use s3csi_s3_server::{Config, S3Server};
use s3csi_testbed::environment;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::plugin::Plugin;
use s3csi_testbed::process::command;
use s3csi_testbed::provisioning::Provisioning;

use crate::relay::Relay;
use crate::report::Report;

/// Our capabilities announce none of this, so csi-sanity leaves it out by itself.
const NOT_ANNOUNCED: [(&str, &str); 7] = [
    ("Node Service / NodePublishVolume / with single node multi writer capability", "SINGLE_NODE_MULTI_WRITER"),
    ("Node Service / NodeStageVolume", "STAGE_UNSTAGE_VOLUME"),
    ("Node Service / NodeUnstageVolume", "STAGE_UNSTAGE_VOLUME"),
    ("Node Service / NodeExpandVolume", "EXPAND_VOLUME"),
    ("Node Service / NodeGetVolumeHealth", "GET_VOLUME_HEALTH"),
    ("Node Service / NodeGetStorageHealth", "GET_STORAGE_HEALTH"),
    ("GroupController Service", "GROUP_CONTROLLER_SERVICE"),
];

/// The node announces no `CONTROLLER_SERVICE`. csi-sanity asks it all the same, so these are left out by their label.
const CONTROLLER_TESTS: &str = r"\[Controller Server\]";

/// Creates a volume with the Controller service first; the run with a controller has it.
const STATISTICS_TEST: &str = "should fail when volume does not exist on the specified path";

/// Of the Controller service we announce `CREATE_DELETE_VOLUME` only.
const NOT_ANNOUNCED_BY_THE_CONTROLLER: [(&str, &str); 19] = [
    ("DeleteSnapshot [Controller Server]", "CREATE_DELETE_SNAPSHOT"),
    ("CreateSnapshot [Controller Server]", "CREATE_DELETE_SNAPSHOT"),
    ("ListSnapshots [Controller Server]", "LIST_SNAPSHOTS"),
    ("GetSnapshot [Controller Server]", "GET_SNAPSHOT"),
    ("ModifyVolume [Controller Server]", "MODIFY_VOLUME"),
    ("ExpandVolume [Controller Server]", "EXPAND_VOLUME"),
    ("ControllerGetVolumeHealth [Controller Server]", "GET_VOLUME_HEALTH"),
    ("ControllerListVolumeHealth [Controller Server]", "LIST_VOLUME_HEALTH"),
    ("Controller Service [Controller Server] / GetCapacity", "GET_CAPACITY"),
    ("Controller Service [Controller Server] / ListVolumes", "LIST_VOLUMES"),
    ("Controller Service [Controller Server] / ControllerPublishVolume", "PUBLISH_UNPUBLISH_VOLUME"),
    ("Controller Service [Controller Server] / ControllerUnpublishVolume", "PUBLISH_UNPUBLISH_VOLUME"),
    ("Controller Service [Controller Server] / volume lifecycle", "PUBLISH_UNPUBLISH_VOLUME"),
    (
        "Controller Service [Controller Server] / CreateVolume / should create volume from an existing source snapshot",
        "CREATE_DELETE_SNAPSHOT",
    ),
    (
        "Controller Service [Controller Server] / CreateVolume / should fail when the volume source snapshot is not found",
        "CREATE_DELETE_SNAPSHOT",
    ),
    (
        "Controller Service [Controller Server] / CreateVolume / should create volume from an existing source volume",
        "CLONE_VOLUME",
    ),
    (
        "Controller Service [Controller Server] / CreateVolume / should fail when the volume source volume is not found",
        "CLONE_VOLUME",
    ),
    (
        "Controller Service [Controller Server] / CreateVolume / should create volume with a volume attribute class",
        "MODIFY_VOLUME",
    ),
    (
        "Controller Service [Controller Server] / CreateVolume / should not create volume with an invalid volume attribute class",
        "MODIFY_VOLUME",
    ),
];

/// Without a Controller service there is no volume to do this with; the second run has one.
const NEEDS_A_VOLUME: [&str; 3] = [
    "Node Service / NodeUnpublishVolume / should remove target path",
    "Node Service / should be idempotent",
    "Node Service / should work",
];

/// What csi-sanity tries with volumes on demand.
const ABOUT_CREATING_AND_DELETING: [&str; 15] = [
    "Controller Service [Controller Server] / ControllerGetCapabilities / should return appropriate capabilities",
    "Controller Service [Controller Server] / CreateVolume / should fail when no name is provided",
    "Controller Service [Controller Server] / CreateVolume / should fail when no volume capabilities are provided",
    "Controller Service [Controller Server] / CreateVolume / should fail when requesting to create a volume with already existing name and different capacity",
    "Controller Service [Controller Server] / CreateVolume / should not fail when creating volume with maximum-length name",
    "Controller Service [Controller Server] / CreateVolume / should not fail when requesting to create a volume with already existing name and same capacity",
    "Controller Service [Controller Server] / CreateVolume / should return appropriate values SingleNodeWriter NoCapacity",
    "Controller Service [Controller Server] / CreateVolume / should return appropriate values SingleNodeWriter WithCapacity 1Gi",
    "Controller Service [Controller Server] / DeleteVolume / should fail when no volume id is provided",
    "Controller Service [Controller Server] / DeleteVolume / should return appropriate values (no optional values added)",
    "Controller Service [Controller Server] / DeleteVolume / should succeed when an invalid volume id is used",
    "Controller Service [Controller Server] / ValidateVolumeCapabilities / should fail when no volume capabilities are provided",
    "Controller Service [Controller Server] / ValidateVolumeCapabilities / should fail when no volume id is provided",
    "Controller Service [Controller Server] / ValidateVolumeCapabilities / should fail when the requested volume does not exist",
    "Controller Service [Controller Server] / ValidateVolumeCapabilities / should return appropriate values (no optional values added)",
];

const LONGEST_RUN: Duration = Duration::from_mins(2);

#[test]
fn the_node_plugin_as_it_is() {
    let fixture = Fixture::new("sanity-plain");
    let store = S3Server::start_blocking(Config::default()).unwrap();
    let plugin = Plugin::new(&fixture, &store).unwrap();
    let node = plugin.start_node().unwrap();

    let make = script(&fixture, "make", "mkdir -p \"$1\" && echo \"$1\"");
    let report = run(&fixture, &plugin.csi_socket(), |it| {
        it.arg(format!("--ginkgo.skip={CONTROLLER_TESTS}|{STATISTICS_TEST}"));
        it.arg("-csi.mountdir").arg(fixture.path("mount"));
        // Given this without a command that checks, csi-sanity does not ask for a volume to unpublish.
        it.arg("-csi.createmountpathcmd").arg(&make);
    });
    report.check_nothing_failed();
    report.check_passed(&[
        "Identity Service / GetPluginCapabilities / should return appropriate capabilities",
        "Identity Service / GetPluginInfo / should return appropriate information",
        "Identity Service / Probe / should return appropriate information",
        "Node Service / NodeGetCapabilities / should return appropriate capabilities",
        "Node Service / NodeGetInfo / should return appropriate values",
        "Node Service / NodeGetVolumeStats / should fail when no volume id is provided",
        "Node Service / NodeGetVolumeStats / should fail when no volume path is provided",
        "Node Service / NodeGetVolumeStats / should fail when volume is not found",
        "Node Service / NodePublishVolume / should fail when no target path is provided",
        "Node Service / NodePublishVolume / should fail when no volume capability is provided",
        "Node Service / NodePublishVolume / should fail when no volume id is provided",
        "Node Service / NodeUnpublishVolume / should fail when no target path is provided",
        "Node Service / NodeUnpublishVolume / should fail when no volume id is provided",
    ]);
    let statistics = format!("Node Service / NodeGetVolumeStats / {STATISTICS_TEST}");
    let left_out = ["[Controller Server]", statistics.as_str()];
    let expected: Vec<&str> = NOT_ANNOUNCED.iter().map(|it| it.0).chain(NEEDS_A_VOLUME).chain(left_out).collect();
    report.check_skipped(&expected);

    assert!(node.terminate().success());
}

#[test]
fn node_plugin_and_controller() {
    let fixture = Fixture::new("sanity-volumes");
    let store = S3Server::start_blocking(Config::default()).unwrap();
    let plugin = Plugin::new(&fixture, &store).unwrap();
    let mounter = plugin.start_mounter().unwrap();
    let node = plugin.start_node().unwrap();
    let provisioning = Provisioning::new(&fixture, &store);
    let controller = provisioning.start();
    let relay = Relay::start(&fixture.path("relay.sock"), &plugin.csi_socket(), &provisioning.socket());

    // csi-sanity names the target itself: `target` in this directory. The relay turns that into kubelet's `mount`.
    let parent = plugin.kubelet_root().join("pods/11111111-aaaa-4aaa-8aaa-aaaaaaaaaaaa/volumes/kubernetes.io~csi/pv");
    let make = script(&fixture, "make", "mkdir -p \"$1\" && echo \"$1\"");
    let remove = script(&fixture, "remove", "rmdir \"$1\"");
    let check = script(
        &fixture,
        "check",
        "path=\"${1%/target}/mount\"; if [ -d \"$path\" ]; then echo directory; \
         elif [ -e \"$path\" ]; then echo other; else echo not_found; fi",
    );
    let report = run(&fixture, relay.socket(), |it| {
        it.arg("-csi.mountdir").arg(&parent).arg("-csi.createmountpathcmd").arg(&make);
        it.arg("-csi.removemountpathcmd").arg(&remove).arg("-csi.checkpathcmd").arg(&check);
    });
    report.check_nothing_failed();
    report.check_includes(&NEEDS_A_VOLUME);
    report.check_includes(&ABOUT_CREATING_AND_DELETING);
    let expected = NOT_ANNOUNCED.iter().chain(&NOT_ANNOUNCED_BY_THE_CONTROLLER).map(|it| it.0);
    report.check_skipped(&expected.collect::<Vec<&str>>());
    assert!(relay.mounted() > 10, "only {} publishes ended in a mount", relay.mounted());

    drop(relay);
    // csi-sanity deletes what it had made.
    assert_eq!(store.buckets(), Vec::new());
    assert!(controller.terminate().success());
    assert!(node.terminate().success());
    assert!(mounter.terminate().success());
}

/// Runs csi-sanity to its end.
fn run(fixture: &Fixture, endpoint: &Path, configure: impl FnOnce(&mut Command)) -> Report {
    let file = fixture.path("report.json");
    let mut sanity = command(&environment::tool("csi-sanity").unwrap());
    sanity.arg(format!("-csi.endpoint=unix:{}", endpoint.display()));
    sanity.arg(format!("--ginkgo.json-report={}", file.display()));
    sanity.args(["--ginkgo.no-color", "--ginkgo.v", "-csi.stagingdir"]).arg(fixture.path("staging"));
    configure(&mut sanity);
    let sanity = fixture.start("csi-sanity", &mut sanity).unwrap();
    let status = sanity.wait(LONGEST_RUN).expect("csi-sanity does not end");
    let report = Report::read(&file);
    report.check_nothing_failed();
    assert!(status.success(), "csi-sanity: {status}: {sanity}");
    report
}

fn script(fixture: &Fixture, name: &str, body: &str) -> PathBuf {
    let path = fixture.path(name);
    fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}
