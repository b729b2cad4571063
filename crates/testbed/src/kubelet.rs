//! A kubelet stand-in: calls the real sockets with the requests kubelet would send. No kubelet logic beyond that.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use s3csi_driver::csi::proto::identity_client::IdentityClient;
use s3csi_driver::csi::proto::node_client::NodeClient;
use s3csi_driver::csi::proto::volume_capability::access_mode::Mode;
use s3csi_driver::csi::proto::volume_capability::{AccessMode, AccessType, MountVolume};
use s3csi_driver::csi::proto::{NodePublishVolumeRequest, NodeUnpublishVolumeRequest, VolumeCapability};
use s3csi_driver::csi::registration_proto::registration_client::RegistrationClient;
use s3csi_driver::csi::registration_proto::{InfoRequest, PluginInfo, RegistrationStatus};
use tokio::net::UnixStream;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

/// Kubelet gives a CSI call two minutes.
const CALL_DEADLINE: Duration = Duration::from_mins(2);

/// Talks to one node plugin. Cheap to clone; calls may run side by side.
#[derive(Clone)]
pub struct Kubelet {
    root: PathBuf,
    csi: Channel,
}

/// One volume of one Pod, as kubelet knows it.
#[derive(Clone, Debug)]
pub struct CsiVolume {
    pub bucket: String,
    /// Name of the `PersistentVolume`.
    pub pv: String,
    pub handle: String,
    pub pod_uid: String,
    pub attributes: HashMap<String, String>,
    pub mount_options: Vec<String>,
    pub fs_group: String,
    pub secrets: HashMap<String, String>,
    pub is_read_only: bool,
    pub mode: Mode,
}

impl CsiVolume {
    /// A volume for a Pod that reads and writes, with the driver's credentials.
    pub fn new(bucket: &str, pv: &str, pod_uid: &str) -> Self {
        Self {
            bucket: bucket.to_owned(),
            pv: pv.to_owned(),
            handle: format!("{pv}-handle"),
            pod_uid: pod_uid.to_owned(),
            attributes: HashMap::new(),
            mount_options: vec!["allow-delete".to_owned(), "allow-overwrite".to_owned()],
            fs_group: String::new(),
            secrets: HashMap::new(),
            is_read_only: false,
            mode: Mode::MultiNodeMultiWriter,
        }
    }

    #[must_use]
    pub fn with_option(mut self, option: &str) -> Self {
        self.mount_options.push(option.to_owned());
        self
    }

    /// With the keys of a Secret instead of the driver's.
    #[must_use]
    pub fn with_secret(mut self, access_key: &str, secret_key: &str) -> Self {
        self.attributes.insert("authenticationSource".to_owned(), "secret".to_owned());
        self.secrets.insert("access_key_id".to_owned(), access_key.to_owned());
        self.secrets.insert("secret_access_key".to_owned(), secret_key.to_owned());
        self
    }
}

impl CsiVolume {
    /// An inline volume of this name in the Pod's spec.
    pub fn inline(bucket: &str, name: &str, pod_uid: &str) -> Self {
        let handle = s3csi_core::names::inline_volume_name(&pod_uid.parse().expect("a UID"), name).to_string();
        Self {
            handle,
            mode: Mode::SingleNodeWriter,
            mount_options: Vec::new(),
            attributes: HashMap::from([("csi.storage.k8s.io/ephemeral".to_owned(), "true".to_owned())]),
            ..Self::new(bucket, name, pod_uid)
        }
    }

    #[must_use]
    pub fn with_attribute(mut self, name: &str, value: &str) -> Self {
        self.attributes.insert(name.to_owned(), value.to_owned());
        self
    }
}

impl Kubelet {
    /// `root` is kubelet's directory; connecting happens with the first call, so that the plugin may be restarted.
    pub fn new(root: &Path, csi_socket: &Path) -> Self {
        Self { root: root.to_owned(), csi: channel(csi_socket) }
    }

    pub fn node(&self) -> NodeClient<Channel> {
        NodeClient::new(self.csi.clone())
    }

    pub fn identity(&self) -> IdentityClient<Channel> {
        IdentityClient::new(self.csi.clone())
    }

    pub fn target(&self, volume: &CsiVolume) -> PathBuf {
        self.root.join(format!("pods/{}/volumes/kubernetes.io~csi/{}/mount", volume.pod_uid, volume.pv))
    }

    pub fn publish_request(&self, volume: &CsiVolume) -> NodePublishVolumeRequest {
        let mut context = volume.attributes.clone();
        for (key, value) in [
            ("bucketName", volume.bucket.as_str()),
            ("csi.storage.k8s.io/pod.uid", &volume.pod_uid),
            ("csi.storage.k8s.io/pod.name", "workload"),
            ("csi.storage.k8s.io/pod.namespace", "default"),
            ("csi.storage.k8s.io/serviceAccount.name", "default"),
            ("csi.storage.k8s.io/ephemeral", "false"),
        ] {
            context.entry(key.to_owned()).or_insert_with(|| value.to_owned());
        }
        NodePublishVolumeRequest {
            volume_id: volume.handle.clone(),
            target_path: self.target(volume).to_string_lossy().into_owned(),
            volume_capability: Some(VolumeCapability {
                access_mode: Some(AccessMode { mode: volume.mode.into() }),
                access_type: Some(AccessType::Mount(MountVolume {
                    fs_type: String::new(),
                    mount_flags: volume.mount_options.clone(),
                    volume_mount_group: volume.fs_group.clone(),
                })),
            }),
            readonly: volume.is_read_only,
            secrets: volume.secrets.clone(),
            volume_context: context,
            ..NodePublishVolumeRequest::default()
        }
    }

    /// Makes the directory above the target, as kubelet does, and publishes. Answers the target.
    pub async fn publish(&self, volume: &CsiVolume) -> Result<PathBuf, Status> {
        let target = self.target(volume);
        let parent = target.parent().unwrap_or(&self.root);
        std::fs::create_dir_all(parent)
            .map_err(|error| Status::internal(format!("kubelet: {}: {error}", parent.display())))?;
        self.send_publish(self.publish_request(volume)).await?;
        Ok(target)
    }

    pub async fn send_publish(&self, request: NodePublishVolumeRequest) -> Result<(), Status> {
        let mut request = tonic::Request::new(request);
        request.set_timeout(CALL_DEADLINE);
        self.node().node_publish_volume(request).await.map(drop)
    }

    pub async fn unpublish(&self, volume: &CsiVolume) -> Result<(), Status> {
        self.send_unpublish(&volume.handle, &self.target(volume)).await
    }

    pub async fn send_unpublish(&self, volume_id: &str, target: &Path) -> Result<(), Status> {
        let mut request = tonic::Request::new(NodeUnpublishVolumeRequest {
            volume_id: volume_id.to_owned(),
            target_path: target.to_string_lossy().into_owned(),
        });
        request.set_timeout(CALL_DEADLINE);
        self.node().node_unpublish_volume(request).await.map(drop)
    }

    /// What kubelet does with a socket it finds in `plugins_registry`.
    pub async fn register(socket: &Path) -> Result<PluginInfo, Status> {
        let mut client = RegistrationClient::new(channel(socket));
        let info = client.get_info(InfoRequest {}).await?.into_inner();
        client.notify_registration_status(RegistrationStatus { plugin_registered: true, error: String::new() }).await?;
        Ok(info)
    }
}

/// A connection that is made when it is needed, to whatever listens there by then.
pub fn channel(socket: &Path) -> Channel {
    let socket = socket.to_owned();
    // The URI is never resolved: the connector always takes the Unix socket.
    Endpoint::from_static("http://csi.sock").connect_with_connector_lazy(tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    }))
}
