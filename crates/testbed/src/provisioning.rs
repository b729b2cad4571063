//! `s3csi controller` as the external-provisioner sees it: a process with a CSI socket, and the calls to it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use s3csi_driver::csi::proto::controller_client::ControllerClient;
use s3csi_driver::csi::proto::identity_client::IdentityClient;
use s3csi_driver::csi::proto::volume_capability::access_mode::Mode;
use s3csi_driver::csi::proto::volume_capability::{AccessMode, AccessType, MountVolume};
use s3csi_driver::csi::proto::{CapacityRange, CreateVolumeRequest, DeleteVolumeRequest, Volume, VolumeCapability};
use tokio::runtime::Runtime;
use tonic::transport::Channel;
use tonic::{Request, Status};

use crate::environment;
use crate::fixture::Fixture;
use crate::kubelet::channel;
use crate::plugin::{PluginError, StoreSettings};
use crate::process::{Process, command};
use crate::wait::wait_for;
use s3csi_s3_server::store::{Account, Store};

/// What the external-provisioner waits for an answer in our chart.
const PATIENCE: Duration = Duration::from_mins(1);

/// A controller that makes volumes on demand, and nothing else. Starting is explicit: tests kill and restart it.
pub struct Provisioning<'a> {
    fixture: &'a Fixture,
    served: StoreSettings,
    authority: Option<PathBuf>,
    system_roots: Option<PathBuf>,
    strategy: &'static str,
    runtime: Runtime,
}

impl<'a> Provisioning<'a> {
    /// With the store's default account as the driver's.
    pub fn new(fixture: &'a Fixture, store: &dyn Store) -> Self {
        let served = StoreSettings {
            endpoint_url: store.endpoint(),
            region: store.region().to_owned(),
            account: Some(store.account().clone()),
        };
        let runtime = Runtime::new().expect("a runtime for the calls");
        Self { fixture, served, authority: None, system_roots: None, strategy: "daemon", runtime }
    }

    /// The driver's own keys from its next start on.
    pub fn set_account(&mut self, account: Option<Account>) {
        self.served.account = account;
    }

    pub fn endpoint(&self) -> &str {
        &self.served.endpoint_url
    }

    pub fn set_endpoint(&mut self, url: &str) {
        url.clone_into(&mut self.served.endpoint_url);
    }

    /// Whom the driver trusts from its next start on.
    pub fn set_authority(&mut self, bundle: PathBuf) {
        self.authority = Some(bundle);
    }

    /// What the driver takes for the certificates of its system from its next start on.
    pub fn set_system_roots(&mut self, bundle: PathBuf) {
        self.system_roots = Some(bundle);
    }

    /// Strategy `pod` from its next start on. Its API server is away, which volumes do not need.
    #[track_caller]
    pub fn set_strategy_pod(&mut self) {
        self.strategy = "pod";
        let text = r#"{"apiVersion": "v1", "kind": "Config", "current-context": "x",
            "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
            "clusters": [{"name": "x", "cluster": {"server": "http://127.0.0.1:1"}}],
            "users": [{"name": "x", "user": {}}]}"#;
        bundle(self.fixture, "kubeconfig", text);
    }

    pub fn socket(&self) -> PathBuf {
        self.fixture.path("controller").join("csi.sock")
    }

    pub fn start(&self) -> Process {
        self.start_with(&[])
    }

    /// Starts it and waits until it listens.
    #[track_caller]
    pub fn start_with(&self, arguments: &[&str]) -> Process {
        let process = self.spawn(arguments).unwrap_or_else(|error| panic!("{error}"));
        let socket = self.socket();
        wait_for("the controller listens", || {
            assert!(process.is_running(), "the controller ended: {process}");
            std::os::unix::net::UnixStream::connect(&socket).is_ok()
        });
        process
    }

    /// Starts it, whatever becomes of it.
    pub fn spawn(&self, arguments: &[&str]) -> Result<Process, PluginError> {
        let program = environment::product("s3csi").map_err(PluginError::Missing)?;
        let mut command = command(&program);
        command.args(["controller", "--strategy", self.strategy, "--v", "4"]).args(arguments);
        if self.strategy == "pod" {
            command.arg("--kubeconfig").arg(self.fixture.path("kubeconfig"));
            command.args(["--mountpoint-image", "localhost/s3csi:test"]);
        }
        if let Some(bundle) = &self.system_roots {
            command.env("SSL_CERT_FILE", bundle);
        }
        command.env("CSI_ENDPOINT", format!("unix:{}", self.socket().display()));
        command.env("AWS_ENDPOINT_URL", &self.served.endpoint_url).env("AWS_REGION", &self.served.region);
        if let Some(account) = &self.served.account {
            command.env("AWS_ACCESS_KEY_ID", &account.access_key).env("AWS_SECRET_ACCESS_KEY", &account.secret_key);
        }
        if let Some(bundle) = &self.authority {
            command.env("AWS_CA_BUNDLE", bundle);
        }
        self.fixture.start("controller", &mut command).map_err(PluginError::Start)
    }

    pub fn controller(&self) -> ControllerClient<Channel> {
        self.runtime.block_on(async { ControllerClient::new(channel(&self.socket())) })
    }

    pub fn identity(&self) -> IdentityClient<Channel> {
        self.runtime.block_on(async { IdentityClient::new(channel(&self.socket())) })
    }

    pub fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }

    pub fn create(&self, request: CreateVolumeRequest) -> Result<Volume, Status> {
        self.create_within(request, PATIENCE)
    }

    pub fn create_within(&self, request: CreateVolumeRequest, patience: Duration) -> Result<Volume, Status> {
        let mut controller = self.controller();
        self.block_on(async {
            let answer = controller.create_volume(patiently(request, patience)).await?;
            Ok(answer.into_inner().volume.unwrap_or_default())
        })
    }

    /// Several at once, in order.
    pub fn create_together(&self, requests: Vec<CreateVolumeRequest>) -> Vec<Result<Volume, Status>> {
        let controller = self.controller();
        let calls = requests.into_iter().map(|request| {
            let mut controller = controller.clone();
            async move {
                let answer = controller.create_volume(patiently(request, PATIENCE)).await?;
                Ok(answer.into_inner().volume.unwrap_or_default())
            }
        });
        self.block_on(futures::future::join_all(calls))
    }

    pub fn delete(&self, volume_id: &str) -> Result<(), Status> {
        self.delete_as(volume_id, &HashMap::new())
    }

    pub fn delete_as(&self, volume_id: &str, secrets: &HashMap<String, String>) -> Result<(), Status> {
        let request = DeleteVolumeRequest { volume_id: volume_id.to_owned(), secrets: secrets.clone() };
        let mut controller = self.controller();
        self.block_on(async { controller.delete_volume(patiently(request, PATIENCE)).await.map(drop) })
    }
}

impl Drop for Provisioning<'_> {
    /// A controller that was killed leaves its socket, which the next one would replace.
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.socket());
    }
}

fn patiently<T>(message: T, patience: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(patience);
    request
}

/// A request for a volume of any nodes and many writers, as the external-provisioner sends it.
pub fn request(name: &str, parameters: &[(&str, &str)]) -> CreateVolumeRequest {
    CreateVolumeRequest {
        name: name.to_owned(),
        capacity_range: Some(CapacityRange { required_bytes: 1 << 30, limit_bytes: 0 }),
        volume_capabilities: vec![capability(Mode::MultiNodeMultiWriter, &[])],
        parameters: parameters.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
        ..CreateVolumeRequest::default()
    }
}

pub fn capability(mode: Mode, mount_flags: &[&str]) -> VolumeCapability {
    let mount =
        MountVolume { mount_flags: mount_flags.iter().map(|it| (*it).to_owned()).collect(), ..MountVolume::default() };
    VolumeCapability {
        access_mode: Some(AccessMode { mode: mode.into() }),
        access_type: Some(AccessType::Mount(mount)),
    }
}

/// The Secret of an account, as a call carries it.
pub fn secret(account: &Account) -> HashMap<String, String> {
    HashMap::from([
        ("access_key_id".to_owned(), account.access_key.clone()),
        ("secret_access_key".to_owned(), account.secret_key.clone()),
    ])
}

/// Writes a text, such as a certificate, where a program finds it.
#[track_caller]
pub fn bundle(fixture: &Fixture, name: &str, pem: &str) -> PathBuf {
    let path: &Path = &fixture.path(name);
    std::fs::write(path, pem).unwrap_or_else(|error| panic!("failed to write {}: {error}", path.display()));
    path.to_owned()
}
