//! The stage of a test: a control plane, a controller, and names of the test's own, so that tests run side by side.

mod actors;
pub mod objects;
mod state;

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Namespace;
use kube::api::{ListParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use s3csi_driver::api::{self, MountpointS3PodAttachment};
use s3csi_testbed::chart;
use s3csi_testbed::cluster::ControlPlane;
use s3csi_testbed::environment::product;
use s3csi_testbed::process::Process;
use serde_json::json;

pub use objects::{Order, Workload};

/// The driver whose controller most tests share.
pub const DRIVER: &str = "s3.csi.scality.com";

const NAMESPACE: &str = "mount-s3";

/// As whom the shared controller works: with the rights that the chart grants.
pub const ACCOUNT: &str = "system:serviceaccount:kube-system:s3-csi-driver-controller-sa";

/// What the controller does takes milliseconds; a machine that compiles beside takes its time.
const SOON: Duration = Duration::from_secs(90);

const PAUSE: Duration = Duration::from_millis(50);

/// One for all tests that do not restart it.
pub static CONTROL_PLANE: LazyLock<ControlPlane> = LazyLock::new(|| ControlPlane::start("controller").unwrap());

static SHARED: LazyLock<Process> = LazyLock::new(|| {
    CONTROL_PLANE.apply(&chart::render(&[]).unwrap()).unwrap();
    let token = CONTROL_PLANE.kubectl(&["create", "token", "--namespace=kube-system", "s3-csi-driver-controller-sa"]);
    let kubeconfig = CONTROL_PLANE.kubeconfig().with_file_name("controller.kubeconfig");
    let admin = Kubeconfig::read_from(CONTROL_PLANE.kubeconfig()).unwrap();
    let cluster = admin.clusters[0].cluster.clone().unwrap();
    let text = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "context",
        "contexts": [{ "name": "context", "context": { "cluster": "cluster", "user": "user" } }],
        "clusters": [{ "name": "cluster", "cluster": {
            "server": cluster.server, "certificate-authority-data": cluster.certificate_authority_data,
        } }],
        "users": [{ "name": "user", "user": { "token": token.unwrap().trim() } }],
    });
    std::fs::write(&kubeconfig, text.to_string()).unwrap();
    let flags = ["--lease-namespace=kube-system", "--mountpoint-priority-class-name=mount-s3-critical"];
    start_controller(&CONTROL_PLANE, "controller", &kubeconfig, DRIVER, NAMESPACE, &flags)
});

/// Dropping it leaves its objects to the control plane's end.
pub struct World {
    pub name: String,
    pub client: Client,
    pub control_plane: &'static ControlPlane,
    pub driver: String,
    /// Of Mountpoint Pods.
    pub mountpoint_namespace: String,
}

impl World {
    /// With the controller that everybody uses.
    pub async fn shared(name: &str) -> Self {
        let world = Self::new(&CONTROL_PLANE, name, DRIVER, NAMESPACE).await;
        assert!(SHARED.is_running(), "the shared controller has ended; it said: {}", *SHARED);
        world
    }

    /// With a driver name of its own, and without a controller until the test starts one.
    pub async fn own(control_plane: &'static ControlPlane, name: &str) -> Self {
        let driver = format!("{name}.s3csi.test");
        let namespace = format!("mount-{name}");
        let world = Self::new(control_plane, name, &driver, &namespace).await;
        world.create_namespace(&namespace).await;
        control_plane.apply(&api::attachment_definition_yaml(&driver).unwrap()).unwrap();
        let attachments = world.attachment_api();
        eventually("attachments can be listed", async || {
            attachments.list(&ListParams::default()).await.is_ok().then_some(())
        })
        .await;
        world
    }

    async fn new(control_plane: &'static ControlPlane, name: &str, driver: &str, namespace: &str) -> Self {
        let world = Self {
            name: name.to_owned(),
            client: client(control_plane).await,
            control_plane,
            driver: driver.to_owned(),
            mountpoint_namespace: namespace.to_owned(),
        };
        world.create_namespace(name).await;
        world
    }

    /// As administrator.
    pub async fn own_client(control_plane: &ControlPlane) -> Client {
        client(control_plane).await
    }

    /// A controller for this world alone.
    pub fn start_controller(&self, flags: &[&str]) -> Process {
        let kubeconfig = self.control_plane.kubeconfig();
        let lease = format!("--lease-name={}", self.name);
        let mut all = vec!["--lease-namespace=default", &lease];
        all.extend(flags);
        start_controller(
            self.control_plane,
            "own-controller",
            &kubeconfig,
            &self.driver,
            &self.mountpoint_namespace,
            &all,
        )
    }

    pub fn attachment_api(&self) -> Api<MountpointS3PodAttachment> {
        api::attachments(self.client.clone(), &self.driver)
    }

    pub async fn create_namespace(&self, name: &str) {
        let namespace: Namespace = serde_json::from_value(json!({ "metadata": { "name": name } })).unwrap();
        Api::<Namespace>::all(self.client.clone()).create(&PostParams::default(), &namespace).await.unwrap();
    }

    /// Names that are unique in the cluster: nodes and PVs.
    pub fn unique(&self, name: &str) -> String {
        format!("{}.{name}", self.name)
    }
}

/// The answer, once there is one.
#[track_caller]
pub fn eventually<T>(what: &str, mut question: impl AsyncFnMut() -> Option<T>) -> impl Future<Output = T> {
    let deadline = Instant::now() + SOON;
    async move {
        loop {
            if let Some(answer) = question().await {
                return answer;
            }
            assert!(Instant::now() < deadline, "waited {SOON:?} in vain: {what}");
            tokio::time::sleep(PAUSE).await;
        }
    }
}

async fn client(control_plane: &ControlPlane) -> Client {
    let kubeconfig = Kubeconfig::read_from(control_plane.kubeconfig()).unwrap();
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    Client::try_from(config).unwrap()
}

fn start_controller(
    control_plane: &ControlPlane,
    name: &'static str,
    kubeconfig: &std::path::Path,
    driver: &str,
    namespace: &str,
    flags: &[&str],
) -> Process {
    let mut arguments = vec![
        "controller".to_owned(),
        format!("--kubeconfig={}", kubeconfig.display()),
        format!("--driver-name={driver}"),
        format!("--mountpoint-namespace={namespace}"),
        "--mountpoint-image=localhost/s3csi:test".to_owned(),
        "--mountpoint-image-pull-policy=Never".to_owned(),
        "-v=4".to_owned(),
    ];
    arguments.extend(flags.iter().map(|it| (*it).to_owned()));
    control_plane.run(name, &product("s3csi").unwrap(), &arguments).unwrap()
}
