//! What Prometheus sees of a controller.

use s3csi_driver::metrics::{ALL, Program};
use s3csi_testbed::http;
use s3csi_testbed::process::Process;

use crate::world::objects::on;
use crate::world::{World, eventually};

/// All series by name and labels, as they are written.
fn scrape(controller: &Process) -> Vec<String> {
    controller.wait_for_log("serving /healthz, /readyz and /metrics");
    let log = controller.errors();
    let address = log.lines().find_map(|it| it.split("address=").nth(1)).unwrap();
    let answer = http::get(address.split(' ').next().unwrap(), "/metrics");
    assert_eq!(answer.status, 200);
    assert!(answer.head.to_lowercase().contains("content-type: application/openmetrics-text"), "{}", answer.head);
    answer.body.lines().filter(|it| !it.starts_with('#')).map(str::to_owned).collect()
}

async fn wait_for_figures(controller: &Process, expected: &[&str]) -> Vec<String> {
    eventually(&format!("figures are {expected:?}"), async || {
        let shown = scrape(controller);
        expected.iter().all(|it| shown.iter().any(|line| line == it)).then_some(shown)
    })
    .await
}

#[tokio::test]
async fn figures_follow_what_happens_in_the_cluster() {
    let world = World::own(&crate::world::CONTROL_PLANE, "figures").await;
    let flags = ["--health-address=127.0.0.1:0"];
    let controller = world.start_controller(&flags);
    wait_for_figures(&controller, &["s3csi_leader 1", "s3csi_attachments{state=\"waiting\"} 0"]).await;
    // The next one stands by and says nothing about what it does not see.
    let other = world.start_controller(&flags);
    let shown = wait_for_figures(&other, &["s3csi_leader 0"]).await;
    assert!(
        !shown.iter().any(|it| it.starts_with("s3csi_attachments") || it.starts_with("s3csi_watch_age")),
        "{shown:?}"
    );

    world.volume("pv").await;
    let a = world.workload("a", on("node", &["pv"])).await;
    wait_for_figures(
        &controller,
        &[
            "s3csi_attachments{state=\"waiting\"} 1",
            "s3csi_mountpoint_pods{state=\"pending\"} 1",
            "s3csi_attached_workloads 1",
            "s3csi_queue_depth{state=\"running\"} 0",
        ],
    )
    .await;
    world.set_pod_phase(&a, "pv", "Running").await;
    wait_for_figures(
        &controller,
        &["s3csi_attachments{state=\"ready\"} 1", "s3csi_mountpoint_pods{state=\"running\"} 1"],
    )
    .await;
    let begins = [
        "s3csi_api_requests_total{verb=\"create\",resource=\"pods\",code=\"201\"} 1",
        "s3csi_api_requests_total{verb=\"patch\",resource=\"mountpoints3podattachments/status\",code=\"200\"}",
        "s3csi_reconcile_duration_seconds_count{outcome=\"done\"}",
        "s3csi_watch_age_seconds{kind=\"workloads\"}",
        "s3csi_watch_listed{kind=\"Mountpoint Pods\"} 1",
    ];
    let shown = eventually(&format!("figures begin with {begins:?}"), async || {
        let shown = scrape(&controller);
        begins.iter().all(|begin| shown.iter().any(|it| it.starts_with(begin))).then_some(shown)
    })
    .await;
    for description in ALL.iter().filter(|it| it.of != Program::Node) {
        for series in description.series() {
            assert!(shown.iter().any(|it| it.split(['{', ' ']).next() == Some(&series)), "{series} in {shown:?}");
        }
    }

    controller.kill();
    wait_for_figures(&other, &["s3csi_leader 1", "s3csi_attachments{state=\"ready\"} 1"]).await;
}
