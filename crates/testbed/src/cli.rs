//! The command line of `s3csi-testbed`.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, Parser, Subcommand};

use s3csi_testbed::bench::{self, Options, Thoroughness};
use s3csi_testbed::cluster::ControlPlane;
use s3csi_testbed::demo::{self, Ending};
use s3csi_testbed::s3::{Config, S3Server, Transport};
use s3csi_testbed::store::{Account, Store as _};

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
    /// Measure, print tables and write them to a document.
    #[command(subcommand)]
    Bench(Bench),
    /// Serve S3 from memory until interrupted.
    S3(S3),
    /// Serve the Kubernetes API (etcd and an API server, no node) until interrupted.
    ControlPlane,
}

#[derive(Parser)]
struct Demo {
    /// Leave everything running until Ctrl-C and say how to look at it.
    #[arg(long)]
    keep: bool,
}

#[derive(Subcommand)]
enum Bench {
    /// Latency of publishing and memory of the node's processes, against the engine's own start.
    Publish(BenchArgs),
    /// Latency of publishing where systemd runs the engines; to be run by scripts/with-systemd.sh.
    Systemd(BenchArgs),
    /// Latency of publishing where each source has a Mountpoint Pod, against the engine's own start.
    Pod(BenchArgs),
    /// How soon workloads are given Mountpoint Pods, what the API server is asked, and the controller's memory.
    Controller(BenchArgs),
    /// Throughput, small files and listings, beside s3fs and rclone.
    Data(BenchArgs),
    /// The pause when an engine dies, against the engine's own start; our FUSE front against the library's.
    Resume(BenchArgs),
}

#[derive(Args)]
struct BenchArgs {
    /// Small sizes: for trying the harness; the figures mean nothing.
    #[arg(long)]
    quick: bool,
    /// How often everything is measured (publish, systemd, pod: 200, controller: 20, data: 3, resume: 7; fewer with --quick).
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..))]
    repetitions: Option<u16>,
    /// The document whose section is replaced.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
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
}

impl Cli {
    pub fn run(self) -> anyhow::Result<()> {
        match self.command {
            Command::Demo(Demo { keep }) => demo::run(if keep { Ending::Keep } else { Ending::CleanUp }),
            Command::Bench(Bench::Publish(it)) => bench::publish(&it.options()),
            Command::Bench(Bench::Systemd(it)) => bench::systemd(&it.options()),
            Command::Bench(Bench::Pod(it)) => bench::pod(&it.options()),
            Command::Bench(Bench::Controller(it)) => bench::controller(&it.options()),
            Command::Bench(Bench::Data(it)) => bench::data(&it.options()),
            Command::Bench(Bench::Resume(it)) => bench::resume(&it.options()),
            Command::S3(it) => it.run(),
            Command::ControlPlane => run_control_plane(),
        }
    }
}

impl BenchArgs {
    fn options(self) -> Options {
        // No `..`: a flag nobody uses does not compile.
        let Self { quick, repetitions, output } = self;
        let thoroughness = if quick { Thoroughness::Quick } else { Thoroughness::Full };
        Options { thoroughness, repetitions: repetitions.map(usize::from), output }
    }
}

impl S3 {
    fn run(self) -> anyhow::Result<()> {
        // No `..`: a flag nobody uses does not compile.
        let Self { port, access_key, secret_key, buckets, tls } = self;
        let transport = if tls { Transport::Tls } else { Transport::Plain };
        let accounts = vec![Account::new(&access_key, &secret_key)];
        let server = S3Server::start_blocking(Config { port, accounts, buckets, transport, ..Config::default() })?;
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
