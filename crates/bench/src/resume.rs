//! The resume benchmark: how long a mount stands still when its engine dies, against the engine's own start; what our FUSE
//! front costs beside the one of the library; and what the ability to stage files costs those who write sequentially.

use std::fs;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rustix::fs::{AtFlags, CWD, StatxFlags};
use rustix::process::{Pid, Signal, kill_process};
use s3csi_driver::host::{Access, FuseOptions, Host as _, Kernel};
use s3csi_handoff::{self as handoff, MountRequest};

use crate::clients::{DiskCache, MountSettings, MountedFileSystem, S3FileSystem};
use crate::content::Content;
use crate::latency::{BareEngine, LIMIT, remove};
use crate::machine;
use crate::report::{MarkdownTable, Section};
use crate::run::{Options, Progress, Thoroughness};
use crate::scratch::{BUCKET, Scratch};
use crate::statistics::{Samples, figure_or_dash};
use crate::tree::TreeSize;
use crate::verdicts::Verdicts;
use crate::workload::{Better, Dataset, Measurement, Sizes};
use s3csi_s3_server::store::Store as _;
use s3csi_testbed::environment::product;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::plugin::Plugin;
use s3csi_testbed::process::{Process, command};
use s3csi_testbed::wait::wait_until;

const COLD_LIMIT_MILLISECONDS: f64 = 150.0;
const STANDBY_LIMIT_MILLISECONDS: f64 = 50.0;
const FRONT_LIMIT: f64 = 0.97;

/// What a standby needs to be prepared, several times over.
const REST: Duration = Duration::from_secs(1);

/// Ours and another variant of it, which are measured in turns.
struct Pair {
    title: &'static str,
    other: S3FileSystem,
    name_of_other: &'static str,
    /// Those that say something about it; a listing is short and noisy.
    tests: &'static [Measurement],
}

const FRONTS: Pair = Pair {
    title: "front",
    other: S3FileSystem::LibraryFront,
    name_of_other: "the library's",
    tests: &[
        Measurement::Write,
        Measurement::Read,
        Measurement::CreateSmall,
        Measurement::ReadSmall,
        Measurement::Random,
    ],
};

/// The fast path must not pay for files that are staged.
const STREAMING: Pair = Pair {
    title: "streaming",
    other: S3FileSystem::OursSequential,
    name_of_other: "sequential",
    tests: &[Measurement::Write, Measurement::Read],
};

struct Plan {
    kills: usize,
    rounds: usize,
    sizes: Sizes,
}

impl Plan {
    fn of(options: &Options) -> Self {
        // Not measured here.
        let tree = TreeSize { directories: 1, files: 1 };
        let (kills, rounds, sizes) = match options.thoroughness {
            Thoroughness::Quick => (
                3,
                1,
                Sizes { big_bytes: 16 << 20, small_files: 20, listed: 10, random: Duration::from_millis(300), tree },
            ),
            Thoroughness::Full => (
                40,
                7,
                Sizes { big_bytes: 1 << 30, small_files: 500, listed: 10, random: Duration::from_secs(5), tree },
            ),
        };
        Self { kills, rounds: options.repetitions.unwrap_or(rounds), sizes }
    }
}

pub fn measure(fixture: &Fixture, options: &Options, progress: &Progress) -> anyhow::Result<Section> {
    let plan = Plan::of(options);
    let programs = [
        machine::product_version("mount-s3")?,
        machine::product_version("s3csi-mounter")?,
        machine::tool_version("versitygw")?,
    ];
    let head = machine::describe(options, &programs);
    let scratch = Scratch::prepare(fixture)?;
    let ground = Dataset { scratch: &scratch, content: Content::new() };
    ground.prepare(&plan.sizes)?;
    let stalls = measure_stalls(fixture, &scratch, &plan, progress)?;
    let fronts = measure_pair(FRONTS, fixture, &ground, &plan, progress)?;
    let streaming = measure_pair(STREAMING, fixture, &ground, &plan, progress)?;
    let mut verdicts = Verdicts::new(["this run"]);
    verdicts.add("pause, cold: p50 below 150 ms", [stalls.cold.median()], |it| it < COLD_LIMIT_MILLISECONDS);
    verdicts.add("pause, standby: p50 below 50 ms", [stalls.standby.median()], |it| it < STANDBY_LIMIT_MILLISECONDS);
    for (test, ratio) in fronts.ratios() {
        verdicts.add(&format!("front ÷ library, {test:?}: at least 0.97"), [ratio], |it| FRONT_LIMIT <= it);
    }
    for (test, ratio) in streaming.ratios() {
        verdicts.add(&format!("default ÷ sequential, {test:?}: at least 0.97"), [ratio], |it| FRONT_LIMIT <= it);
    }
    let tables = [fronts.table(&plan.sizes), streaming.table(&plan.sizes)].map(|it| it.to_string()).join("\n");
    let text = format!("## Resume\n\n{head}\n{EXPLANATION}\n\n{}\n{tables}\n{verdicts}", stalls.table());
    Ok(Section { text, failures: Vec::new() })
}

const EXPLANATION: &str = "\
How long one `stat` takes that is asked right after `kill -9` of the engine, in milliseconds, with an engine that has to be started
first (*cold*) and with one that stands by; beside it *engine start*, an engine on a mount of its own until it answers. All of
them in turns. Then the same engine with our FUSE front and with the library's, and with the default options and with
`--writes sequential --metadata refuse` (nothing is staged), on fresh mounts, in turns; medians, and how many times better the
first is.";

#[derive(Default)]
struct Stalls {
    engine: Samples,
    cold: Samples,
    standby: Samples,
}

fn measure_stalls(fixture: &Fixture, scratch: &Scratch, plan: &Plan, progress: &Progress) -> anyhow::Result<Stalls> {
    let plugin = Plugin::new(fixture, scratch.store())?;
    let bare = BareEngine::prepare(fixture, &plugin, scratch.store())?;
    let host = Kernel::default();
    let at = fixture.create_directory("bare");
    let cold = Kept::start(fixture, scratch, "cold", &[])?;
    let standby = Kept::start(fixture, scratch, "standby", &["--standby", "on"])?;
    let mut stalls = Stalls::default();
    for round in 0..plan.kills {
        stalls.engine.add(milliseconds(bare.start(&host, &format!("bare-{round}"), &at)?));
        std::thread::sleep(REST);
        stalls.cold.add(milliseconds(cold.kill()?));
        stalls.standby.add(milliseconds(standby.kill()?));
    }
    progress.say(&format!(
        "pause: {} ms cold, {} ms with a standby; an engine starts in {} ms",
        figure_or_dash(stalls.cold.median()),
        figure_or_dash(stalls.standby.median()),
        figure_or_dash(stalls.engine.median())
    ));
    cold.stop(&host)?;
    standby.stop(&host)?;
    Ok(stalls)
}

impl Stalls {
    fn table(&self) -> MarkdownTable {
        let mut table = MarkdownTable::new(["pause, ms", "p50", "p90", "max", "p50 ÷ engine start"]);
        for (name, samples) in [("engine start", &self.engine), ("cold", &self.cold), ("standby", &self.standby)] {
            let ratio = samples.median().zip(self.engine.median()).map(|(one, other)| one / other);
            let figures = [samples.median(), samples.percentile(90), samples.maximum(), ratio];
            table.add([name.to_owned()].into_iter().chain(figures.map(figure_or_dash)));
        }
        table
    }
}

/// A mount that a mounter keeps.
struct Kept {
    mounter: Process,
    directory: PathBuf,
    _connection: UnixStream,
}

impl Kept {
    fn start(fixture: &Fixture, scratch: &Scratch, name: &str, arguments: &[&str]) -> anyhow::Result<Self> {
        let place = fixture.create_directory(&format!("mounter-{name}"));
        let directory = fixture.create_directory(&format!("mount-{name}"));
        let mut command = command(&product("s3csi-mounter")?);
        command.arg("--directory").arg(&place).arg("--engine").arg(product("mount-s3")?).args(arguments);
        let mounter = fixture.start(&format!("mounter-{name}"), &mut command)?;
        let socket = place.join("mount.sock");
        let is_there = || UnixStream::connect(&socket).is_ok();
        ensure!(wait_until(Instant::now() + LIMIT, is_there), "the mounter does not listen: {mounter}");
        let fuse =
            Kernel::default().mount_fuse(&directory, &FuseOptions { access: Access::ReadWrite, allow_other: true })?;
        let connection = handoff::connect(&socket, LIMIT)?;
        handoff::send(&connection, &request(scratch), fuse.as_fd())?;
        drop(fuse);
        let kept = Self { mounter, directory, _connection: connection };
        kept.ask().with_context(|| format!("the mounter said: {}", kept.mounter))?;
        Ok(kept)
    }

    /// Kills the engine and answers how long one question takes then.
    fn kill(&self) -> anyhow::Result<Duration> {
        let engine = self.engine().context("the mounter's log names no engine")?;
        kill_process(engine, Signal::KILL).context("failed to kill the engine")?;
        let start = Instant::now();
        self.ask()?;
        Ok(start.elapsed())
    }

    /// The engine that was started last to serve.
    fn engine(&self) -> Option<Pid> {
        let log = self.mounter.errors();
        let line = log.lines().rfind(|it| it.contains("\"engine started\""))?;
        let number = line.rsplit_once("pid=")?.1.trim_matches('"').parse().ok()?;
        Pid::from_raw(number)
    }

    fn ask(&self) -> anyhow::Result<()> {
        let path = self.directory.join("small");
        rustix::fs::statx(CWD, path, AtFlags::STATX_FORCE_SYNC, StatxFlags::BASIC_STATS).context("the mount fails")?;
        Ok(())
    }

    fn stop(self, host: &Kernel) -> anyhow::Result<()> {
        remove(host, &self.directory)?;
        self.mounter.signal(Signal::TERM);
        self.mounter.wait(LIMIT).context("the mounter does not end")?;
        Ok(())
    }
}

fn request(scratch: &Scratch) -> MountRequest {
    let store = scratch.store();
    let account = store.account();
    let args = ["--allow-delete", "--allow-overwrite", "--force-path-style"].map(str::to_owned).into_iter();
    let place = [format!("--endpoint-url={}", store.endpoint()), format!("--region={}", store.region())];
    MountRequest {
        bucket_name: BUCKET.to_owned(),
        args: args.chain(place).collect(),
        env: vec![
            format!("AWS_ACCESS_KEY_ID={}", account.access_key),
            format!("AWS_SECRET_ACCESS_KEY={}", account.secret_key),
            "AWS_EC2_METADATA_DISABLED=true".to_owned(),
        ],
        ..MountRequest::default()
    }
}

/// The figures of a pair, test by test.
struct PairFigures {
    pair: Pair,
    figures: Vec<(Measurement, [Samples; 2])>,
}

fn measure_pair(
    pair: Pair,
    fixture: &Fixture,
    ground: &Dataset<'_>,
    plan: &Plan,
    progress: &Progress,
) -> anyhow::Result<PairFigures> {
    let clients = [S3FileSystem::Ours, pair.other];
    let mut all = Vec::new();
    for test in pair.tests {
        let mut figures = [Samples::default(), Samples::default()];
        for round in 0..plan.rounds {
            // Each is the first one as often as the other.
            let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
            for index in order {
                let name = format!("{}-{test:?}-{index}-{round}", pair.title).to_lowercase();
                let endpoint = ground.scratch.store().endpoint();
                let mounting = MountSettings {
                    fixture,
                    scratch: ground.scratch,
                    endpoint: &endpoint,
                    name: &name,
                    disk_cache: DiskCache::Off,
                };
                let mounted = MountedFileSystem::start(clients[index], &mounting)?;
                let figure = ground.run(*test, &plan.sizes, &mounted, &name);
                mounted.stop()?;
                fs::remove_dir_all(ground.scratch.cache(&name)?).context("failed to remove the client's cache")?;
                figures[index].add(figure?);
            }
        }
        let [ours, other] = figures.each_ref().map(|it| figure_or_dash(it.median()));
        let what = test.title(&plan.sizes);
        progress.say(&format!("{}, {what}: {ours} ours, {other} {}", pair.title, pair.name_of_other));
        all.push((*test, figures));
    }
    Ok(PairFigures { pair, figures: all })
}

impl PairFigures {
    fn ratios(&self) -> impl Iterator<Item = (Measurement, Option<f64>)> {
        self.figures.iter().map(|(test, [ours, other])| {
            let medians = ours.median().zip(other.median());
            let ratio = medians.map(|(ours, other)| match test.better() {
                Better::Higher => ours / other,
                Better::Lower => other / ours,
            });
            (*test, ratio)
        })
    }

    fn table(&self, sizes: &Sizes) -> MarkdownTable {
        let mut table = MarkdownTable::new([self.pair.title, "ours", self.pair.name_of_other, "ratio"]);
        for ((test, figures), (_, ratio)) in self.figures.iter().zip(self.ratios()) {
            let figures = figures.each_ref().map(Samples::median).into_iter().chain([ratio]);
            table.add([test.title(sizes)].into_iter().chain(figures.map(figure_or_dash)));
        }
        table
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
