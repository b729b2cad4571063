//! `csi-sidecar`: stands for the node-driver-registrar and for the livenessprobe beside another CSI driver in a test cluster, with the
//! flags that its chart passes to them. Never shipped; our own driver needs no sidecar on the node.
#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser;
use s3csi_driver::csi::proto::GetPluginInfoRequest;
use s3csi_driver::csi::proto::identity_client::IdentityClient;
use s3csi_driver::csi::registration::plugin_info;
use s3csi_driver::csi::registration_proto::registration_server::{Registration, RegistrationServer};
use s3csi_driver::csi::registration_proto::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use s3csi_testbed::kubelet::channel;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

/// The driver's container may start later than this one.
const RETRY: Duration = Duration::from_millis(200);

/// Where kubelet looks for the health of the driver's container.
const HEALTH_PORT: u16 = 9808;

const REGISTRATION_DIRECTORY: &str = "/registration";
const SOCKET_PREFIX: &str = "csi-sidecar@";

/// Registers another driver with kubelet, or answers for its health.
#[derive(Parser)]
struct Cli {
    /// The driver's socket as this container sees it.
    #[arg(long)]
    csi_address: Option<PathBuf>,
    /// The driver's socket as kubelet sees it; without it, health is served instead.
    #[arg(long)]
    kubelet_registration_path: Option<PathBuf>,
    /// `kubelet-registration-probe` succeeds at once.
    #[arg(long)]
    mode: Option<String>,
}

#[tokio::main]
async fn main() -> ExitCode {
    match Cli::parse().run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("csi-sidecar: {error:#}");
            ExitCode::FAILURE
        }
    }
}

impl Cli {
    async fn run(self) -> anyhow::Result<()> {
        // No `..`: a flag without a use does not compile.
        let Self { csi_address, kubelet_registration_path, mode } = self;
        if mode.is_some() {
            return Ok(());
        }
        let driver = csi_address.context("--csi-address is missing")?;
        let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
        let work = async {
            match kubelet_registration_path {
                Some(endpoint) => register(&driver, endpoint).await,
                None => serve_health(&driver).await,
            }
        };
        tokio::select! {
            outcome = work => outcome,
            _ = terminate.recv() => remove_sockets(),
        }
    }
}

async fn register(driver: &Path, endpoint: PathBuf) -> anyhow::Result<()> {
    let name = driver_name(driver).await;
    // kubelet names the socket's path as the authority of its requests; with the `@` it is a valid one for our HTTP library.
    let socket = Path::new(REGISTRATION_DIRECTORY).join(format!("{SOCKET_PREFIX}{name}-reg.sock"));
    let _ = fs::remove_file(&socket);
    let listener = UnixListener::bind(&socket).with_context(|| format!("failed to listen at {}", socket.display()))?;
    println!("registering {name}");
    let service = RegistrationServer::new(Registrar { name, endpoint });
    let served = tonic::transport::Server::builder().add_service(service);
    served.serve_with_incoming(UnixListenerStream::new(listener)).await.context("failed to serve the registration")
}

/// Asked until the driver answers.
async fn driver_name(driver: &Path) -> String {
    loop {
        let answer = IdentityClient::new(channel(driver)).get_plugin_info(GetPluginInfoRequest {}).await;
        match answer {
            Ok(info) => return info.into_inner().name,
            Err(_) => tokio::time::sleep(RETRY).await,
        }
    }
}

async fn serve_health(driver: &Path) -> anyhow::Result<()> {
    let listener = TcpListener::bind(("0.0.0.0", HEALTH_PORT)).await.context("failed to listen")?;
    loop {
        let (mut connection, _) = listener.accept().await.context("failed to accept")?;
        let status = match UnixStream::connect(driver).await {
            Ok(_) => "200 OK",
            Err(_) => "500 Internal Server Error",
        };
        let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        // kubelet asks again if this one is lost.
        let _ = connection.write_all(answer.as_bytes()).await;
    }
}

/// As the real registrar does, so that kubelet forgets the driver.
fn remove_sockets() -> anyhow::Result<()> {
    let Ok(entries) = fs::read_dir(REGISTRATION_DIRECTORY) else { return Ok(()) };
    for entry in entries.flatten().filter(|it| it.file_name().to_string_lossy().starts_with(SOCKET_PREFIX)) {
        fs::remove_file(entry.path()).with_context(|| format!("failed to remove {}", entry.path().display()))?;
    }
    Ok(())
}

struct Registrar {
    name: String,
    endpoint: PathBuf,
}

#[tonic::async_trait]
impl Registration for Registrar {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(plugin_info(&self.name, &self.endpoint)))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        println!("kubelet says {:?}", request.into_inner());
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
