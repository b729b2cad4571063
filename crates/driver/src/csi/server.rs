//! The sockets: CSI and registration, from bind to graceful stop.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use rustix::fs::{Mode, fchmod};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;

use super::admission::Admission;
use super::health::{self, MetricsPage};
use super::identity::{IdentityService, Serves};
use super::node::NodeService;
use super::proto::identity_server::IdentityServer;
use super::proto::node_server::NodeServer;
use super::registration::Registration;
use super::registration_proto::registration_server::RegistrationServer;
use crate::node::Node;

/// Calls in flight get this long to finish after we were asked to stop; Kubernetes kills a Pod after 30 s by default.
pub(super) const GRACE: Duration = Duration::from_secs(20);

/// Connections that wait to be accepted: kubelet opens few.
const BACKLOG: i32 = 128;

/// The largest request we read; the driver we replace has the same bound.
pub(super) const MAX_REQUEST_BYTES: usize = 2 << 20;

pub struct Server {
    pub driver_name: String,
    pub node_id: String,
    pub node: Arc<Node>,
    pub csi_socket: PathBuf,
    pub registration: Option<Registration>,
    pub health_address: Option<SocketAddr>,
    pub metrics_page: Arc<MetricsPage>,
}

impl Server {
    /// Serves until `shutdown` completes and the calls in flight have ended.
    pub async fn run(self, shutdown: impl Future<Output = ()> + Send) -> anyhow::Result<()> {
        let Self { driver_name, node_id, node, csi_socket, registration, health_address, metrics_page } = self;
        let metrics = metrics_page.metrics().clone();
        let csi = listen_at(&csi_socket)?;
        let health = match health_address {
            Some(address) => {
                let listener = TcpListener::bind(address)
                    .await
                    .with_context(|| format!("failed to listen on {address} for /healthz and /metrics"))?;
                let address = listener.local_addr().unwrap_or(address);
                tracing::info!(%address, "serving /healthz and /metrics");
                Some(tokio::spawn(health::serve(listener, csi_socket.clone(), metrics_page)))
            }
            None => None,
        };
        let (stop, stopped) = watch::channel(());
        let serving = tokio::spawn(
            tonic::transport::Server::builder()
                .add_service(IdentityServer::new(IdentityService {
                    driver_name: driver_name.clone(),
                    serves: Serves::Node,
                }))
                .add_service(
                    NodeServer::new(NodeService {
                        node_id: node_id.clone(),
                        node: node.clone(),
                        metrics,
                        admission: Admission::default(),
                    })
                    .max_decoding_message_size(MAX_REQUEST_BYTES),
                )
                .serve_with_incoming_shutdown(UnixListenerStream::new(csi), ended(stopped.clone())),
        );
        // Registered only once the CSI socket answers: kubelet calls it at once.
        let registering = match registration {
            Some(registration) => {
                let socket = registration.socket.clone();
                let listener = listen_at(&socket)?;
                let server = tonic::transport::Server::builder()
                    .add_service(RegistrationServer::new(registration))
                    .serve_with_incoming_shutdown(UnixListenerStream::new(listener), ended(stopped));
                Some((socket, tokio::spawn(server)))
            }
            None => None,
        };
        let sweeping = tokio::spawn(node.clone().sweep_forever());
        tracing::info!(driver = %driver_name, node = %node_id, version = env!("CARGO_PKG_VERSION"), socket = ?csi_socket, "serving");

        shutdown.await;
        if let Some((socket, _)) = &registering {
            remove_socket(socket);
        }
        sweeping.abort();
        drop(stop);
        if let Ok(ended) = tokio::time::timeout(GRACE, serving).await {
            ended.context("the CSI server panicked")?.context("the CSI server failed")?;
        } else {
            tracing::warn!(grace = ?GRACE, "calls still in flight after the grace period, ending anyway");
        }
        if let Some((_, task)) = registering {
            task.abort();
        }
        if let Some(task) = health {
            task.abort();
        }
        remove_socket(&csi_socket);
        tracing::info!("stopped");
        Ok(())
    }
}

/// Completes when the sender is dropped.
async fn ended(mut stopped: watch::Receiver<()>) {
    while stopped.changed().await.is_ok() {}
}

/// `unix:/path`, `unix:///path`; `unix://relative` means `/relative`, as in the driver we replace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint(PathBuf);

impl Endpoint {
    pub fn into_path(self) -> PathBuf {
        self.0
    }
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("endpoint {0:?} must look like unix:/path/to/csi.sock")]
pub struct InvalidEndpoint(String);

impl FromStr for Endpoint {
    type Err = InvalidEndpoint;

    fn from_str(url: &str) -> Result<Self, Self::Err> {
        let invalid = || InvalidEndpoint(url.to_owned());
        let (scheme, rest) = url.split_once(':').ok_or_else(invalid)?;
        let path = rest.trim_start_matches('/');
        if !scheme.eq_ignore_ascii_case("unix") || path.is_empty() {
            return Err(invalid());
        }
        Ok(Self(Path::new("/").join(path)))
    }
}

/// Binds a socket that only root can connect to, replacing one that a dead process left.
pub(super) fn listen_at(path: &Path) -> anyhow::Result<UnixListener> {
    let directory = path.parent().context("the socket has no directory")?;
    fs::create_dir_all(directory)
        .with_context(|| format!("failed to create the socket's directory {}", directory.display()))?;
    match fs::symlink_metadata(path) {
        Ok(existing) if existing.file_type().is_socket() => {
            fs::remove_file(path).with_context(|| format!("failed to remove the stale socket {}", path.display()))?;
        }
        Ok(_) => {
            anyhow::bail!("{} exists and is not a socket; move it away or choose another --endpoint", path.display())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(|| format!("failed to look at {}", path.display())),
    }
    let open = || -> io::Result<UnixListener> {
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
        // The mode of an unbound socket becomes the mode of its file: there is no moment at which others can connect.
        fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
        bind(&socket, &SocketAddrUnix::new(path)?)?;
        listen(&socket, BACKLOG)?;
        UnixListener::from_std(socket.into())
    };
    open().with_context(|| format!("failed to listen on {}", path.display()))
}

pub(super) fn remove_socket(path: &Path) {
    if let Err(error) = fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(?path, %error, "socket not removed");
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn endpoints() {
        check("unix:/csi/csi.sock", Some("/csi/csi.sock"));
        check("unix:///csi/csi.sock", Some("/csi/csi.sock"));
        check("unix://tmp/csi.sock", Some("/tmp/csi.sock"));
        check("UNIX:/csi.sock", Some("/csi.sock"));
        check("tcp://127.0.0.1:1", None);
        check("/csi/csi.sock", None);
        check("unix:", None);
        check("", None);
    }

    fn check(url: &str, expected: Option<&str>) {
        assert_eq!(url.parse::<Endpoint>().ok().map(Endpoint::into_path), expected.map(PathBuf::from), "{url}");
    }

    #[tokio::test]
    async fn the_socket_is_for_root_only_and_replaces_a_stale_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a/csi.sock");
        drop(listen_at(&path).unwrap());
        let _listener = listen_at(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[tokio::test]
    async fn a_file_in_the_socket_s_place_is_not_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("csi.sock");
        fs::write(&path, "precious").unwrap();
        assert!(listen_at(&path).unwrap_err().to_string().contains("is not a socket"));
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }
}
