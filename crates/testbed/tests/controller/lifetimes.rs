//! The API server goes away and comes back; the controller's health endpoints tell the truth.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::LazyLock;

use s3csi_testbed::cluster::ControlPlane;
use s3csi_testbed::process::Process;

use crate::world::objects::on;
use crate::world::{World, eventually};

/// For this test alone, because it is restarted.
static MORTAL: LazyLock<ControlPlane> = LazyLock::new(|| ControlPlane::start("controller-mortal").unwrap());

fn get(controller: &Process, path: &str) -> (u16, String) {
    controller.wait_for_log("serving /healthz");
    let log = controller.errors();
    let address = log.lines().find_map(|it| it.split("address=").nth(1)).unwrap().split(' ').next().unwrap().to_owned();
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: controller\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let status = text.split(' ').nth(1).unwrap().parse().unwrap();
    (status, text.split_once("\r\n\r\n").unwrap().1.to_owned())
}

#[tokio::test]
async fn a_restart_of_the_api_server_is_survived() {
    let world = World::own(&MORTAL, "mortal").await;
    let controller = world.start_controller(&["--leader-election=off", "--health-address=127.0.0.1:0"]);
    eventually("it is ready", async || (get(&controller, "/readyz").0 == 200).then_some(())).await;
    assert_eq!(get(&controller, "/healthz"), (200, "ok\n".to_owned()));
    assert_eq!(get(&controller, "/other").0, 404);
    world.volume("pv").await;
    let a = world.workload("a", on("node", &["pv"])).await;
    world.check(&[&a], &["attachment pv on node: mp(a)=a", "pod mp(a) of pv on node: Pending"]).await;

    MORTAL.kill_api_server();
    controller.wait_for_log("watch failed");
    MORTAL.start_api_server().unwrap();
    let world = world.connected_again().await;
    let b = world.workload("b", on("node", &["pv"])).await;
    world.check(&[&a, &b], &["attachment pv on node: mp(a)=a b", "pod mp(a) of pv on node: Pending"]).await;
    assert_eq!(get(&controller, "/healthz").0, 200);
    eventually("it is ready again", async || (get(&controller, "/readyz").0 == 200).then_some(())).await;
    assert!(controller.is_running());
}

#[tokio::test]
async fn a_controller_that_does_not_reach_the_api_server_is_not_ready_but_alive() {
    let world = World::own(&crate::world::CONTROL_PLANE, "unready").await;
    // The CustomResourceDefinition for this driver does not exist.
    let world = World { driver: "undefined.s3csi.test".to_owned(), ..world };
    let controller = world.start_controller(&["--leader-election=off", "--health-address=127.0.0.1:0"]);
    controller.wait_for_log("watch failed");
    assert_eq!(get(&controller, "/readyz"), (503, "attachments are not listed yet\n".to_owned()));
    assert_eq!(get(&controller, "/healthz").0, 200);
}
