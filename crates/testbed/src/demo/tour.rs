//! The stations of the tour, in order. Each one checks what it claims.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use sha2::{Digest as _, Sha256};
use tokio::runtime::Runtime;

use super::screen::Screen;
use crate::environment;
use crate::fixture::Fixture;
use crate::kubelet::{CsiVolume, Kubelet};
use crate::plugin::{DRIVER_NAME, Plugin, StoreSettings};
use crate::process::{Process, command};
use crate::processes;
use crate::wait::{SOON, wait_for_some, wait_until};
use s3csi_s3_server::store::Account;

/// What happens after the last station.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    CleanUp,
    /// Everything stays up until Ctrl-C.
    Keep,
}

const BUCKET: &str = "demo-bucket";
const BIG_FILE_BYTES: usize = 256 << 20;
const CHUNK_BYTES: usize = 1 << 20;
/// How often the engine is killed.
const KILLS: usize = 10;
/// So that each engine has served for a while before it dies.
const ROUNDS_BETWEEN_KILLS: usize = 5;
/// The mounter takes its time with engines that die right after their start.
const TIME_BETWEEN_KILLS: Duration = Duration::from_millis(500);

pub fn walk(fixture: &Fixture, screen: &Screen, ending: Ending) -> anyhow::Result<()> {
    let runtime = Runtime::new().context("failed to start the async runtime")?;
    // Connections are made in the background of this runtime.
    let _entered = runtime.enter();
    let account = Account::named("demo");
    let mut parts = Parts::default();

    let mut endpoint = String::new();
    screen.step("S3 server", || {
        let (server, url) = start_store(fixture, &account)?;
        endpoint.clone_from(&url);
        parts.store = Some(server);
        Ok(format!("{url}, bucket {BUCKET}"))
    })?;
    let served = StoreSettings { endpoint_url: endpoint, region: "us-east-1".to_owned(), account: Some(account) };
    let plugin = Plugin::at(fixture, served)?;
    let kubelet = plugin.kubelet();
    screen.step("mounter", || {
        parts.mounter = Some(plugin.start_mounter()?);
        Ok("an unprivileged process (uid 1000) that will run the FUSE engines".to_owned())
    })?;
    screen.step("node plugin", || {
        parts.node = Some(plugin.start_node()?);
        let info = runtime.block_on(Kubelet::register(&plugin.registration_socket())).map_err(refused)?;
        ensure!(info.name == DRIVER_NAME, "registered as {:?}", info.name);
        Ok(format!("CSI socket answers, registers with kubelet as {}", info.name))
    })?;

    let first = CsiVolume::new(BUCKET, "demo-pv", "11111111-aaaa-4aaa-8aaa-aaaaaaaaaaaa");
    let second = CsiVolume::new(BUCKET, "demo-pv", "22222222-bbbb-4bbb-8bbb-bbbbbbbbbbbb");
    let target = kubelet.target(&first);
    screen.step("publish", || {
        runtime.block_on(kubelet.publish(&first)).map_err(refused)?;
        Ok(format!("NodePublishVolume: bucket {BUCKET} is a directory of Pod 1111…"))
    })?;
    screen.step("small files", || small_files(&target))?;
    let mut checksum = [0; 32];
    screen.step("write 256 MiB", || {
        let start = Instant::now();
        checksum = write_big(&target.join("big.bin"))?;
        Ok(format!("{}, sha256 {}…", speed(start.elapsed()), hex(&checksum)))
    })?;
    screen.step("read 256 MiB", || {
        let start = Instant::now();
        let read = read_big(&target.join("big.bin"))?;
        ensure!(read == checksum, "read back other bytes: sha256 {}", hex(&read));
        Ok(format!("{}, same checksum", speed(start.elapsed())))
    })?;
    let other = kubelet.target(&second);
    screen.step("share", || {
        runtime.block_on(kubelet.publish(&second)).map_err(refused)?;
        let text =
            fs::read_to_string(other.join("hello.txt")).context("the second Pod cannot read the first one's file")?;
        let engines = engines(fixture).len();
        ensure!(engines == 1, "{engines} engines run for one volume");
        Ok(format!("Pod 2222… reads {text:?} through the same engine; one process serves both"))
    })?;
    screen.step("kill -9 engine", || kill_ten_times(fixture, &other))?;
    screen.step("wrong key", || {
        let stranger = CsiVolume::new(BUCKET, "stranger-pv", "33333333-cccc-4ccc-8ccc-cccccccccccc")
            .with_secret("stranger", "wrongwrongwrongwrong");
        match runtime.block_on(kubelet.publish(&stranger)) {
            Ok(_) => bail!("a wrong key was accepted"),
            Err(status) => Ok(format!("refused: {:?}: {}", status.code(), status.message())),
        }
    })?;
    if ending == Ending::Keep {
        keep(&runtime, screen, &target)?;
    }
    screen.step("unpublish", || {
        for volume in [&first, &second] {
            runtime.block_on(kubelet.unpublish(volume)).map_err(refused)?;
        }
        let is_gone = wait_until(Instant::now() + SOON, || engines(fixture).is_empty());
        ensure!(is_gone, "the engine is still running");
        Ok("both Pods unmounted; with the last one the engine ended".to_owned())
    })?;
    screen.step("stop", || {
        parts.stop()?;
        Ok("node plugin, mounter and S3 server ended when asked to".to_owned())
    })
}

/// The running programs; killed when the tour ends early.
#[derive(Default)]
struct Parts {
    node: Option<Process>,
    mounter: Option<Process>,
    store: Option<Process>,
}

impl Parts {
    fn stop(&mut self) -> anyhow::Result<()> {
        for process in [self.node.take(), self.mounter.take(), self.store.take()].into_iter().flatten() {
            process.signal(rustix::process::Signal::TERM);
            let status = process.wait(SOON).with_context(|| format!("{} does not end", process.name()))?;
            ensure!(status.success(), "{} ended with {status}", process.name());
        }
        Ok(())
    }
}

fn start_store(fixture: &Fixture, account: &Account) -> anyhow::Result<(Process, String)> {
    let mut command = command(&environment::product("s3csi-testbed")?);
    command.args(["s3", "--bucket", BUCKET, "--access-key", &account.access_key, "--secret-key", &account.secret_key]);
    let server = fixture.start("s3", &mut command)?;
    let url = || server.output().lines().find_map(|it| it.strip_prefix("ready ").map(str::to_owned));
    let url = wait_for_some(Instant::now() + SOON, url).context("the S3 server does not start")?;
    Ok((server, url))
}

fn small_files(target: &Path) -> anyhow::Result<String> {
    fs::create_dir(target.join("notes")).context("failed to make a directory")?;
    for number in 0..20 {
        fs::write(target.join(format!("notes/{number}.txt")), format!("note {number}\n"))
            .context("failed to write a note")?;
    }
    fs::write(target.join("hello.txt"), "hello from S3").context("failed to write hello.txt")?;
    fs::rename(target.join("notes/0.txt"), target.join("notes/zero.txt")).context("failed to move a file")?;
    let listed = fs::read_dir(target.join("notes")).context("failed to list")?.count();
    ensure!(listed == 20, "{listed} of 20 files are listed");
    ensure!(fs::read_to_string(target.join("notes/zero.txt"))? == "note 0\n", "the moved file has other content");
    Ok("21 files written, one moved, all listed".to_owned())
}

fn write_big(path: &Path) -> anyhow::Result<[u8; 32]> {
    let mut file = File::create(path).context("failed to create the file")?;
    let mut sum = Sha256::new();
    let mut chunk = vec![0_u8; CHUNK_BYTES];
    for number in 0..BIG_FILE_BYTES / CHUNK_BYTES {
        // Every chunk differs, so that a mixed-up one is noticed.
        chunk[..8].copy_from_slice(&number.to_le_bytes());
        sum.update(&chunk);
        file.write_all(&chunk).context("failed to write")?;
    }
    file.sync_all().context("failed to store the file")?;
    Ok(sum.finalize().into())
}

fn read_big(path: &Path) -> anyhow::Result<[u8; 32]> {
    let mut file = File::open(path).context("failed to open the file")?;
    let mut sum = Sha256::new();
    let mut chunk = vec![0_u8; CHUNK_BYTES];
    loop {
        match file.read(&mut chunk).context("failed to read")? {
            0 => return Ok(sum.finalize().into()),
            count => sum.update(&chunk[..count]),
        }
    }
}

/// A reader goes on and on while engines die. It notices nothing but pauses.
fn kill_ten_times(fixture: &Fixture, target: &Path) -> anyhow::Result<String> {
    let expected = checksums(target)?;
    let (is_over, rounds) = (&AtomicBool::new(false), &AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut pauses = Vec::new();
            while !is_over.load(Ordering::SeqCst) {
                let start = Instant::now();
                let found = checksums(target)?;
                ensure!(found == expected, "other content than before");
                pauses.push(start.elapsed());
                rounds.fetch_add(1, Ordering::SeqCst);
            }
            pauses.sort_unstable_by(|one, other| other.cmp(one));
            pauses.truncate(KILLS);
            Ok(pauses)
        });
        let killed = (0..KILLS).try_for_each(|_| {
            kill_engine(fixture)?;
            let (before, start) = (rounds.load(Ordering::SeqCst), Instant::now());
            let has_read = || rounds.load(Ordering::SeqCst) > before + ROUNDS_BETWEEN_KILLS;
            let goes_on = || (has_read() && start.elapsed() > TIME_BETWEEN_KILLS) || reader.is_finished();
            ensure!(wait_until(Instant::now() + SOON, goes_on), "the reader does not go on");
            Ok(())
        });
        is_over.store(true, Ordering::SeqCst);
        let read = reader.join().map_err(|_| anyhow::anyhow!("the reader panicked"))?;
        killed?;
        let pauses: Vec<String> = read?.iter().map(|it| it.as_millis().to_string()).collect();
        Ok(format!(
            "killed {KILLS} times while a reader compared {} × {} files: 0 errors; its longest rounds: {} ms",
            rounds.load(Ordering::SeqCst),
            expected.len(),
            pauses.join(", ")
        ))
    })
}

/// Kills the engine and waits until its successor is there.
fn kill_engine(fixture: &Fixture) -> anyhow::Result<()> {
    let Some(&engine) = engines(fixture).first() else { bail!("no engine runs") };
    rustix::process::kill_process(engine, rustix::process::Signal::KILL).context("failed to kill the engine")?;
    let is_replaced = || engines(fixture).first().is_some_and(|it| *it != engine);
    ensure!(wait_until(Instant::now() + SOON, is_replaced), "no other engine took its place");
    Ok(())
}

/// The checksum of each note.
fn checksums(target: &Path) -> anyhow::Result<BTreeMap<OsString, [u8; 32]>> {
    let entries = fs::read_dir(target.join("notes")).context("failed to list")?;
    let sum = |entry: std::io::Result<fs::DirEntry>| {
        let entry = entry.context("failed to list")?;
        let content = fs::read(entry.path()).context("failed to read")?;
        Ok((entry.file_name(), Sha256::digest(content).into()))
    };
    entries.map(sum).collect()
}

fn keep(runtime: &Runtime, screen: &Screen, target: &Path) -> anyhow::Result<()> {
    screen.title("It stays up until Ctrl-C. In another terminal, look into the tour's mount namespace:");
    println!("    nsenter -t {} -m ls -l {}", std::process::id(), target.display());
    println!(
        "    nsenter -t {} -m sh -c 'date > {}/now.txt; cat {}/now.txt'",
        std::process::id(),
        target.display(),
        target.display()
    );
    println!();
    runtime.block_on(tokio::signal::ctrl_c()).context("failed to wait for Ctrl-C")?;
    println!();
    Ok(())
}

/// Engines of this tour, by the directory that their environment names.
fn engines(fixture: &Fixture) -> Vec<rustix::process::Pid> {
    processes::running("mount-s3", fixture.directory())
}

#[expect(clippy::needless_pass_by_value, reason = "made for map_err")]
fn refused(status: tonic::Status) -> anyhow::Error {
    anyhow::anyhow!("{:?}: {}", status.code(), status.message())
}

fn speed(took: Duration) -> String {
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    let mebibytes = BIG_FILE_BYTES as f64 / f64::from(1 << 20);
    format!("{:.0} MiB/s", mebibytes / took.as_secs_f64())
}

fn hex(sum: &[u8]) -> String {
    use std::fmt::Write as _;

    sum.iter().take(4).fold(String::new(), |mut text, it| {
        let _ = write!(text, "{it:02x}");
        text
    })
}
