//! etcd and an API server without nodes: what tests of the controller build on.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;

use s3csi_testbed::cluster::ControlPlane;
use s3csi_testbed::environment::product;
use s3csi_testbed::processes::running;
use s3csi_testbed::wait::wait_for;

/// One for all tests that do not restart it.
static SHARED: LazyLock<ControlPlane> = LazyLock::new(|| ControlPlane::start("control-plane").unwrap());

const POD: &str = "\
apiVersion: v1
kind: Pod
metadata: {name: NAME, namespace: default}
spec:
  nodeName: node-1
  containers: [{name: main, image: none}]
";

fn pod(name: &str) -> String {
    POD.replace("NAME", name)
}

#[track_caller]
fn check_kubectl(control_plane: &ControlPlane, arguments: &[&str], expected: &str) {
    assert_eq!(control_plane.kubectl(arguments).unwrap().trim(), expected);
}

#[test]
fn objects_are_served_without_other_components() {
    SHARED.apply(&pod("made")).unwrap();
    check_kubectl(&SHARED, &["get", "pod", "made", "--output", "jsonpath={.spec.nodeName}"], "node-1");
}

#[test]
fn the_answer_of_the_api_server_is_the_error() {
    let error = SHARED.apply(&pod("Not_A_Name")).unwrap_err().to_string();
    assert!(error.contains("a lowercase RFC 1123 subdomain must consist of"), "{error}");
}

#[test]
fn the_audit_log_says_who_asked_for_what() {
    SHARED.apply(&pod("audited")).unwrap();
    wait_for("the request is in the audit log", || {
        SHARED.audit().iter().any(|it| {
            let about = it.object_ref.clone().unwrap_or_default();
            let is_made = it.response_status.as_ref().is_some_and(|it| it.code == 201);
            it.user.username == "admin" && it.verb == "patch" && about.name == "audited" && is_made
        })
    });
}

#[test]
fn objects_survive_a_restart_of_the_api_server() {
    let control_plane = ControlPlane::start("restart").unwrap();
    control_plane.apply(&pod("kept")).unwrap();
    control_plane.kill_api_server();
    assert!(control_plane.kubectl(&["get", "pods"]).is_err(), "it still answers");
    control_plane.restart_api_server().unwrap();
    check_kubectl(&control_plane, &["get", "pods", "--output", "name"], "pod/kept");
}

#[test]
fn nothing_is_left_of_a_control_plane_whose_owner_was_killed() {
    let (mut owner, directory) = start_owner();
    assert!(!running("kube", &directory).is_empty(), "it does not run");
    owner.kill().unwrap();
    owner.wait().unwrap();
    wait_for("programs and directory are gone", || running("kube", &directory).is_empty() && !directory.exists());
}

/// A program with a control plane of its own, and where that keeps its things.
fn start_owner() -> (Child, PathBuf) {
    let program = product("s3csi-testbed").unwrap();
    let mut owner = Command::new(program).arg("control-plane").stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(owner.stdout.take().unwrap()).lines().map_while(Result::ok);
    let kubeconfig = lines.into_iter().find_map(|it| it.strip_prefix("export KUBECONFIG=").map(PathBuf::from)).unwrap();
    let directory = kubeconfig.ancestors().nth(2).map(Path::to_owned).unwrap();
    (owner, directory)
}
