//! The command line of `s3csi-testbed`.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Parser, Subcommand};

use s3csi_s3_server::certificates::UNRESOLVABLE_HOST;
use s3csi_s3_server::store::{Account, Store as _};
use s3csi_s3_server::{Config, S3Server, Transport};
use s3csi_testbed::cluster::ControlPlane;
use s3csi_testbed::compatibility;
use s3csi_testbed::demo::{self, Ending};
use s3csi_testbed::forward_proxy::ForwardProxy;
use s3csi_testbed::kill_matrix::{page, work};
use s3csi_testbed::steady_reader;
use s3csi_testbed::workload_identity::IssuingStore;

/// Parts of the s3csi testbed, one by one. Never shipped.
#[derive(Parser)]
#[command(version)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// A tour of the product: real mounts, real processes, no cluster.
    Demo(Demo),
    /// Serve S3 from memory until interrupted.
    S3(S3),
    /// Serve the Kubernetes API (etcd and an API server, no node) until interrupted.
    ControlPlane,
    /// Serve S3 and a security token service for service accounts of a cluster; tests start it.
    #[command(hide = true)]
    IssuingStore(IssuingStoreArgs),
    /// Read a file all the time until the standard input is closed; tests start it.
    #[command(hide = true)]
    SteadyReader(SteadyReader),
    /// A workload of the kill matrix, until the standard input is closed; tests start it.
    #[command(hide = true)]
    SteadyWork(SteadyWork),
    /// Write the results of a run of the kill matrix to docs/reliability-matrix.md.
    KillMatrix(KillMatrix),
    /// Run ordinary programs and pjdfstest on our mount, on s3fs and on rclone; write docs/compatibility-programs.md.
    Compatibility(Compatibility),
}

#[derive(Parser)]
struct Compatibility {
    /// Run only the groups and programs whose name contains this (`pjdfstest` for its cases); the rest stays as it was measured
    /// before.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Keeps the results between runs.
    results: PathBuf,
    page: PathBuf,
}

#[derive(Parser)]
struct IssuingStoreArgs {
    address: Ipv4Addr,
    /// The socket of the API server.
    api: PathBuf,
    lifetime_seconds: u64,
    buckets: Vec<String>,
}

#[derive(Parser)]
struct SteadyWork {
    workload: usize,
    directory: PathBuf,
    /// Where rounds are noted.
    files: PathBuf,
}

#[derive(Parser)]
struct KillMatrix {
    /// The directory that the tests wrote their results to.
    results: PathBuf,
    page: PathBuf,
}

#[derive(Parser)]
struct SteadyReader {
    directory: PathBuf,
    name: String,
    /// Where the expected content is, and the report is written.
    files: PathBuf,
}

#[derive(Parser)]
struct Demo {
    /// Leave everything running until Ctrl-C and say how to look at it.
    #[arg(long)]
    keep: bool,
}

#[derive(Parser)]
struct S3 {
    /// Port on 127.0.0.1; 0 lets the kernel choose.
    #[arg(long, default_value_t = 0)]
    port: u16,
    #[arg(long, default_value = "testbed")]
    access_key: String,
    #[arg(long, default_value = "testbed-NeverPrintThis")]
    secret_key: String,
    /// A bucket that exists from the start; may be given several times.
    #[arg(long = "bucket", value_name = "NAME")]
    buckets: Vec<String>,
    /// Speak TLS; the certificate authority to trust is printed after the address.
    #[arg(long)]
    tls: bool,
    /// Serve a forward proxy at this address, which leads to the server under the name store.invalid:8443.
    #[arg(long, value_name = "ADDRESS:PORT")]
    proxy: Option<SocketAddr>,
}

impl Cli {
    pub fn run(self) -> anyhow::Result<()> {
        match self.command {
            Command::Demo(Demo { keep }) => demo::run(if keep { Ending::Keep } else { Ending::CleanUp }),
            Command::S3(it) => it.run(),
            Command::ControlPlane => run_control_plane(),
            Command::IssuingStore(it) => it.run(),
            Command::SteadyReader(SteadyReader { directory, name, files }) => {
                Ok(steady_reader::run(&directory, &name, &files)?)
            }
            Command::SteadyWork(SteadyWork { workload, directory, files }) => {
                Ok(work::run(workload, &directory, &files)?)
            }
            Command::KillMatrix(KillMatrix { results, page }) => Ok(page::update(&results, &page)?),
            Command::Compatibility(it) => it.run(),
        }
    }
}

impl IssuingStoreArgs {
    fn run(self) -> anyhow::Result<()> {
        let Self { address, api, lifetime_seconds, buckets } = self;
        let IssuingStore { store, issuer } =
            &IssuingStore::start(address, &api, &buckets, Duration::from_secs(lifetime_seconds))?;
        println!("ready http://{address}:{} http://{address}:{}", store.port(), issuer.port());
        wait_for_the_end()
    }
}

impl Compatibility {
    fn run(self) -> anyhow::Result<()> {
        // No `..`: a flag without a use does not compile.
        let Self { only, results, page } = self;
        let found = compatibility::run(&compatibility::Selection { only }, &results)?;
        std::fs::write(&page, compatibility::page::render(&found))
            .with_context(|| format!("failed to write {}", page.display()))?;
        compatibility::check(&found)
    }
}

impl S3 {
    fn run(self) -> anyhow::Result<()> {
        // No `..`: a flag without a use does not compile.
        let Self { port, access_key, secret_key, buckets, tls, proxy } = self;
        let transport = if tls { Transport::Tls } else { Transport::Plain };
        let accounts = vec![Account::new(&access_key, &secret_key)];
        let server = S3Server::start_blocking(Config { port, accounts, buckets, transport, ..Config::default() })?;
        let host = format!("{UNRESOLVABLE_HOST}:8443");
        let proxy = proxy.map(|it| ForwardProxy::start_at(it, &[(&host, server.port())])).transpose();
        let _proxy = proxy.context("failed to serve the proxy")?;
        println!("ready {}", server.endpoint());
        if let Some(authority) = server.authority_pem() {
            print!("{authority}");
        }
        wait_for_the_end()
    }
}

fn run_control_plane() -> anyhow::Result<()> {
    let control_plane = ControlPlane::start("control-plane")?;
    println!("ready {}", control_plane.server());
    println!("export KUBECONFIG={}", control_plane.kubeconfig().display());
    wait_for_the_end()
}

fn wait_for_the_end() -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("no runtime")?;
    runtime.block_on(the_end()).context("failed to wait for a signal")
}

async fn the_end() -> std::io::Result<()> {
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    tokio::select! {
        _ = terminate.recv() => Ok(()),
        result = tokio::signal::ctrl_c() => result,
    }
}
