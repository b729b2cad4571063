//! The stage of a test: a control plane, a controller, and names of the test's own, so that tests run side by side.

mod actors;
pub mod objects;
mod state;

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use kube::api::ListParams;
use kube::{Api, Client};
use s3csi_driver::api::{self, MountpointS3PodAttachment};
use s3csi_testbed::cluster::{Administrator, ControlPlane, ControllerOptions};
use s3csi_testbed::process::Process;

pub use objects::{Workload, WorkloadOptions};

/// The driver whose controller most tests share.
pub const DRIVER: &str = "s3.csi.scality.com";

const NAMESPACE: &str = "mount-s3";

/// What the controller does takes milliseconds; a machine that compiles beside takes its time.
const SOON: Duration = Duration::from_secs(90);

const PAUSE: Duration = Duration::from_millis(50);

/// One for all tests that do not restart it.
pub static CONTROL_PLANE: LazyLock<ControlPlane> = LazyLock::new(|| ControlPlane::start("controller").unwrap());

pub static SHARED: LazyLock<Process> = LazyLock::new(|| {
    let kubeconfig = CONTROL_PLANE.install_controller().unwrap();
    let flags = ["--lease-namespace=kube-system", "--mountpoint-priority-class-name=mount-s3-critical", "-v=4"];
    let order = ControllerOptions {
        name: "controller",
        kubeconfig: &kubeconfig,
        driver: DRIVER,
        namespace: NAMESPACE,
        flags: &flags,
    };
    CONTROL_PLANE.start_controller(&order).unwrap()
});

/// Dropping it leaves its objects to the control plane's end.
pub struct World {
    pub name: String,
    pub client: Client,
    pub administrator: Administrator,
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
        let administrator = Administrator::of(control_plane).await.unwrap();
        let world = Self {
            name: name.to_owned(),
            client: administrator.client().clone(),
            administrator,
            control_plane,
            driver: driver.to_owned(),
            mountpoint_namespace: namespace.to_owned(),
        };
        world.create_namespace(name).await;
        world
    }

    /// With new connections: those of before ended with the API server.
    pub async fn connected_again(self) -> Self {
        let administrator = Administrator::of(self.control_plane).await.unwrap();
        Self { client: administrator.client().clone(), administrator, ..self }
    }

    /// A controller for this world alone.
    pub fn start_controller(&self, flags: &[&str]) -> Process {
        let kubeconfig = self.control_plane.kubeconfig();
        let lease = format!("--lease-name={}", self.name);
        let mut all = vec!["--lease-namespace=default", &lease, "-v=4"];
        all.extend(flags);
        let order = ControllerOptions {
            name: "own-controller",
            kubeconfig: &kubeconfig,
            driver: &self.driver,
            namespace: &self.mountpoint_namespace,
            flags: &all,
        };
        self.control_plane.start_controller(&order).unwrap()
    }

    pub fn attachment_api(&self) -> Api<MountpointS3PodAttachment> {
        api::attachments(self.client.clone(), &self.driver)
    }

    pub async fn create_namespace(&self, name: &str) {
        self.administrator.create_namespace(name).await.unwrap();
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
