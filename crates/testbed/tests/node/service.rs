//! The plugin as a process: its sockets, its health, its log, its start and its end.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _, chown};
use std::path::Path;
use std::process::Output;

use rustix::process::{Signal, kill_process};
use s3csi_driver::csi::proto::{
    GetPluginCapabilitiesRequest, GetPluginInfoRequest, NodeGetInfoRequest, NodeGetVolumeStatsRequest, ProbeRequest,
};
use s3csi_s3_server::{Effect, Fault};
use s3csi_testbed::environment;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::{CsiVolume, Kubelet};
use s3csi_testbed::plugin::{DRIVER_NAME, MOUNTER_USER};
use s3csi_testbed::process::command;
use s3csi_testbed::processes;
use s3csi_testbed::wait::wait_for;
use tonic::Code;

use crate::world::{BUCKET, World, check_refused, pod, volume};

#[test]
fn no_program_that_holds_keys_leaves_a_core_dump_or_can_be_inspected() {
    let fixture = Fixture::new("service-core");
    let world = World::start(&fixture);
    world.publish(&volume(1));
    for process in [world.node().pid(), world.mounter().pid(), world.engine()] {
        let limits = fs::read_to_string(format!("/proc/{process}/limits")).unwrap();
        let core = limits.lines().find_map(|it| it.strip_prefix("Max core file size")).unwrap();
        assert_eq!(core.split_whitespace().collect::<Vec<_>>()[..2], ["0", "0"], "{limits}");
        // The mounter and its engines run as another user, to whom these files would belong.
        assert_eq!(fs::metadata(format!("/proc/{process}/environ")).unwrap().uid(), 0, "process {process}");
    }
    let score = |process| fs::read_to_string(format!("/proc/{process}/oom_score_adj")).unwrap().trim().parse::<i32>();
    assert!(score(world.mounter().pid()).unwrap() < score(world.engine()).unwrap());
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

/// The C library reads the variable before `main`, so the plugin starts itself once more with it.
#[test]
fn the_plugin_has_one_heap() {
    let fixture = Fixture::new("service-heap");
    let mut world = World::prepare(&fixture);
    world.start_node();
    let variables = fs::read_to_string(format!("/proc/{}/environ", world.node().pid())).unwrap();
    assert!(variables.split('\0').any(|it| it == "MALLOC_ARENA_MAX=1"));
}

#[test]
fn a_mounter_that_starts_before_the_node_plugin_waits_for_its_directory() {
    let fixture = Fixture::new("service-order");
    let world = World::prepare(&fixture);
    let directory = world.plugin.mounter_directory();
    // As kubelet creates it.
    chown(&directory, Some(0), Some(0)).unwrap();
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).unwrap();
    let plugin = &world.plugin;
    let log = || {
        ["mounter.out.log", "mounter.err.log"]
            .map(|it| fs::read_to_string(fixture.logs().join(it)))
            .map(Result::unwrap_or_default)
            .concat()
    };
    let (mounter, node) = std::thread::scope(|scope| {
        let mounter = scope.spawn(|| plugin.start_mounter().unwrap());
        wait_for("the mounter waits", || log().contains("waiting for the node plugin to grant access"));
        let group = MOUNTER_USER.to_string();
        let node = plugin.start_node_with(&["--mounter-group", &group]).unwrap();
        (mounter.join().unwrap(), node)
    });
    let target = world.publish(&volume(1));
    world.check_serves(&target);
    world.unpublish(&volume(1));
    world.check_nothing_left();
    assert!(node.terminate().success() && mounter.terminate().success());
}

#[test]
fn the_statistics_of_a_volume_tell_its_condition_and_never_hang() {
    let fixture = Fixture::new("service-stats");
    let world = World::start(&fixture);
    let target = world.publish(&volume(1));
    let mut node = world.kubelet.node();
    let mut condition = |path: &Path| {
        let volume_path = path.to_string_lossy().into_owned();
        let request =
            NodeGetVolumeStatsRequest { volume_id: "any".to_owned(), volume_path, staging_target_path: String::new() };
        let response = world.runtime.block_on(node.node_get_volume_stats(request))?.into_inner();
        assert_eq!(response.usage.len(), 1, "kubelet discards a response without usage");
        let condition = response.volume_condition.unwrap();
        Ok::<_, tonic::Status>((condition.abnormal, condition.message))
    };
    assert_eq!(condition(&target).unwrap(), (false, "mounted and served".to_owned()));
    assert_eq!(condition(Path::new("/nowhere")).unwrap_err().code(), Code::NotFound);
    let engine = world.engine();
    processes::freeze(engine);
    let (is_abnormal, message) = condition(&target).unwrap();
    assert!(is_abnormal && message.contains("does not answer"), "{message}");
    kill_process(engine, Signal::CONT).unwrap();
    world.unpublish(&volume(1));
    assert_eq!(condition(&target).unwrap_err().code(), Code::NotFound);
    world.check_nothing_left();
}

#[test]
fn the_plugin_says_who_it_is() {
    let fixture = Fixture::new("service-identity");
    let world = World::start(&fixture);
    let (mut identity, mut node) = (world.kubelet.identity(), world.kubelet.node());
    let run = &world.runtime;
    let info = run.block_on(identity.get_plugin_info(GetPluginInfoRequest {})).unwrap().into_inner();
    assert_eq!((info.name.as_str(), info.vendor_version.as_str()), (DRIVER_NAME, env!("CARGO_PKG_VERSION")));
    let probe = run.block_on(identity.probe(ProbeRequest {})).unwrap().into_inner();
    assert_eq!(probe.ready, Some(true));
    let capabilities = run.block_on(identity.get_plugin_capabilities(GetPluginCapabilitiesRequest {})).unwrap();
    assert_eq!(capabilities.into_inner().capabilities, []);
    let info = run.block_on(node.node_get_info(NodeGetInfoRequest {})).unwrap().into_inner();
    assert_eq!(info.node_id, "node-1");
    assert_eq!(info.accessible_topology, None);
}

#[test]
fn sockets_are_for_root_only_and_go_with_the_plugin() {
    let fixture = Fixture::new("service-sockets");
    let mut world = World::start(&fixture);
    let sockets = [world.plugin.csi_socket(), world.plugin.registration_socket()];
    for socket in &sockets {
        assert_eq!(fs::metadata(socket).unwrap().permissions().mode() & 0o777, 0o600, "{}", socket.display());
    }
    world.stop_node();
    for socket in &sockets {
        assert!(!socket.exists(), "{}", socket.display());
    }
}

#[test]
fn sockets_of_a_dead_plugin_are_replaced() {
    let fixture = Fixture::new("service-stale");
    let mut world = World::start(&fixture);
    world.kill_node();
    assert!(fs::symlink_metadata(world.plugin.csi_socket()).unwrap().file_type().is_socket());
    world.start_node();
    world.publish(&volume(1));
    world.unpublish(&volume(1));
}

#[test]
fn kubelet_registers_the_plugin_without_a_sidecar() {
    let fixture = Fixture::new("service-registration");
    let world = World::start(&fixture);
    let info = world.runtime.block_on(Kubelet::register(&world.plugin.registration_socket())).unwrap();
    assert_eq!((info.r#type.as_str(), info.name.as_str()), ("CSIPlugin", DRIVER_NAME));
    assert_eq!(Path::new(&info.endpoint), world.plugin.csi_socket());
    assert_eq!(info.supported_versions, ["1.0.0"]);
    world.node().wait_for_log("registered with kubelet");
}

#[test]
fn registration_can_be_left_to_a_sidecar() {
    let fixture = Fixture::new("service-no-registration");
    let mut world = World::prepare(&fixture);
    world.start_node_with(&["--registration", "off"]);
    // Written after the registration socket would have been created.
    world.node().wait_for_log("serving driver=");
    assert!(!world.plugin.registration_socket().exists());
}

#[test]
fn a_call_in_flight_is_finished_before_the_plugin_ends() {
    let fixture = Fixture::new("service-graceful");
    let mut world = World::start(&fixture);
    let frozen = world.store.inject(Fault::new(Effect::Frozen).bucket(BUCKET));
    let call = world.publish_in_background(&volume(1));
    wait_for("the call is under way", || 0 < frozen.hits());

    world.node().signal(Signal::TERM);
    world.node().wait_for_log("finishing the calls in flight");
    wait_for("the registration socket is gone", || !world.plugin.registration_socket().exists());
    assert!(world.node().is_running());
    frozen.release();
    let target = world.runtime.block_on(call).unwrap().unwrap();
    world.stop_node();

    // The mount is the next plugin's now.
    fs::write(target.join("file"), "x").unwrap();
    world.start_node();
    world.unpublish(&volume(1));
    world.check_nothing_left();
}

#[test]
fn health_is_that_of_the_csi_socket() {
    let fixture = Fixture::new("service-health");
    let mut world = World::prepare(&fixture);
    world.start_node_with(&["--health-address", "127.0.0.1:0"]);
    let healthy = world.get("/healthz");
    assert_eq!((healthy.status, healthy.body.as_str()), (200, "ok\n"));
    assert_eq!(world.get("/other").status, 404);
    fs::remove_file(world.plugin.csi_socket()).unwrap();
    let ill = world.get("/healthz");
    assert_eq!(ill.status, 503);
    assert!(ill.body.contains("the CSI socket cannot be reached"), "{}", ill.body);
}

#[test]
fn figures_are_served_for_prometheus() {
    let fixture = Fixture::new("service-metrics");
    let mut world = World::prepare(&fixture);
    world.start_node_with(&["--health-address", "127.0.0.1:0"]);
    let answer = world.get("/metrics");
    assert_eq!(answer.status, 200);
    let head = answer.head.to_lowercase();
    assert!(head.contains("content-type: application/openmetrics-text; version=1.0.0"), "{head}");
    assert!(answer.body.ends_with("# EOF\n"), "{}", answer.body);
    assert_eq!(world.figure("s3csi_engine_deaths_total"), 0);
}

#[test]
fn the_json_log_has_one_event_per_call() {
    let fixture = Fixture::new("service-json");
    let mut world = World::prepare(&fixture);
    world.start_mounter();
    world.start_node_with(&["--log-format", "json"]);
    world.publish(&volume(1));
    world.unpublish(&volume(1));
    let stranger = CsiVolume::new("no-such-bucket", "pv", &pod(2));
    check_refused(world.try_publish(&stranger), Code::NotFound, &[]);

    let log = world.node().errors();
    let events: Vec<serde_json::Value> = log.lines().map(|it| serde_json::from_str(it).unwrap()).collect();
    let calls: Vec<&serde_json::Value> = events.iter().filter(|it| it.get("method").is_some()).collect();
    let text = |event: &serde_json::Value, key: &str| event[key].as_str().unwrap_or_default().to_owned();
    let summary: Vec<_> = calls.iter().map(|it| [text(it, "level"), text(it, "method"), text(it, "code")]).collect();
    assert_eq!(
        summary,
        [
            ["INFO", "NodePublishVolume", ""],
            ["INFO", "NodeUnpublishVolume", ""],
            ["WARN", "NodePublishVolume", "NotFound"],
        ]
    );
    let expected = BTreeMap::from([
        ("volume", volume(1).handle),
        ("target", world.kubelet.target(&volume(1)).display().to_string()),
    ]);
    for (key, value) in expected {
        assert_eq!(text(calls[0], key), value);
    }
    assert!(calls[0]["seconds"].as_f64().is_some_and(|it| 0.0 < it));
    assert!(text(calls[2], "error").contains("no-such-bucket"));
}

/// Runs `s3csi` to its end.
fn run(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = command(&environment::product("s3csi").unwrap());
    command.args(arguments).envs(variables.iter().copied()).output().unwrap()
}

#[track_caller]
fn check_start_fails(arguments: &[&str], variables: &[(&str, &str)], words: &[&str]) {
    let output = run(arguments, variables);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    for word in words {
        assert!(text.contains(word), "{word:?} is missing in: {text}");
    }
    assert!(!text.contains("stack backtrace"), "{text}");
}

#[test]
fn a_plugin_that_cannot_start_says_what_to_set() {
    let name = ("CSI_NODE_NAME", "node-1");
    let url = ("AWS_ENDPOINT_URL", "http://127.0.0.1:1");
    let words = ["AWS_ENDPOINT_URL environment variable must be set", "--s3-endpoint-url"];
    check_start_fails(&["node"], &[name], &words);
    check_start_fails(&["node"], &[name, ("AWS_ENDPOINT_URL", "")], &words);
    let words = ["node-id is required", "CSI_NODE_NAME"];
    check_start_fails(&["node"], &[url], &words);
    check_start_fails(&["node", "--node-id", ""], &[url], &words);
    let words = ["AWS_ACCESS_KEY_ID is set but AWS_SECRET_ACCESS_KEY is not"];
    check_start_fails(&["node"], &[name, url, ("AWS_ACCESS_KEY_ID", "a")], &words);
    let keys = [("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "NeverPrintThis\n")];
    check_start_fails(&["node"], &[name, url, keys[0], keys[1]], &["AWS_SECRET_ACCESS_KEY is empty or not printable"]);
    check_start_fails(&["node", "--endpoint", "tcp://0.0.0.0:1"], &[name, url], &["must look like unix:/path"]);
    check_start_fails(&["node", "--strategy", "magic"], &[name, url], &["magic", "daemon"]);
    check_start_fails(&[], &[], &["Usage: s3csi"]);
}

#[test]
fn a_file_in_the_socket_s_place_is_not_replaced() {
    let fixture = Fixture::new("service-file");
    let path = fixture.path("csi.sock");
    fs::write(&path, "precious").unwrap();
    let endpoint = format!("unix:{}", path.display());
    let root = fixture.create_directory("kubelet");
    let place = ["--endpoint", &endpoint, "--kubelet-path", root.to_str().unwrap()];
    let arguments = [["node", "--strategy", "daemon", "--node-id", "n"].as_slice(), &place].concat();
    check_start_fails(&arguments, &[("AWS_ENDPOINT_URL", "http://127.0.0.1:1")], &["is not a socket", "--endpoint"]);
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
}

#[test]
fn help_and_version() {
    let help = run(&["node", "--help"], &[]);
    let text = String::from_utf8_lossy(&help.stdout).into_owned();
    assert!(help.status.success());
    for word in ["--node-id", "CSI_NODE_NAME", "AWS_ENDPOINT_URL", "--health-address", "Example:"] {
        assert!(text.contains(word), "{word:?} is missing in: {text}");
    }
    assert!(!text.contains("--stop-after"), "a switch for tests is not for users");
    let version = run(&["--version"], &[]);
    assert_eq!(String::from_utf8_lossy(&version.stdout), format!("s3csi {}\n", env!("CARGO_PKG_VERSION")));
}
