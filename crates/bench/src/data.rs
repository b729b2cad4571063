//! The data benchmark: our mount beside s3fs and rclone on the same server, directly and behind a longer way to it.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::Context as _;

use crate::clients::{DiskCache, MountSettings, MountedFileSystem, S3FileSystem};
use crate::content::Content;
use crate::delay::DelayProxy;
use crate::machine;
use crate::report::{MarkdownTable, Section};
use crate::run::{Options, Progress, Thoroughness};
use crate::scratch::Scratch;
use crate::statistics::{Samples, figure, figure_or_dash, mebibytes};
use crate::tree::{TreeSize, TreeWork};
use crate::verdicts::Verdicts;
use crate::workload::{Better, Dataset, Measurement, Sizes};
use s3csi_s3_server::store::Store as _;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::peers::{rclone_version, s3fs_version};

const ONE_WAY: Duration = Duration::from_millis(5);

/// What takes this long is measured once: its ratio is plain after one run.
const LONG: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Network {
    Direct,
    Delayed,
}

impl Network {
    const ALL: [Self; 2] = [Self::Direct, Self::Delayed];

    /// Thousands of files one after the other take too long at a distance.
    fn measurements(self) -> impl Iterator<Item = Measurement> {
        Measurement::ALL.into_iter().filter(move |it| self == Self::Direct || !matches!(it, Measurement::Tree(_)))
    }

    fn title(self) -> &'static str {
        match self {
            Self::Direct => "directly",
            Self::Delayed => "at 10 ms",
        }
    }

    fn sizes(self, thoroughness: Thoroughness) -> Sizes {
        let (small_files, small_files_delayed) = match thoroughness {
            Thoroughness::Quick => (20, 10),
            Thoroughness::Full => (1000, 100),
        };
        let small_files = if self == Self::Direct { small_files } else { small_files_delayed };
        match thoroughness {
            Thoroughness::Quick => Sizes {
                big_bytes: 16 << 20,
                small_files,
                listed: 100,
                random: Duration::from_millis(300),
                tree: TreeSize { directories: 4, files: 10 },
            },
            Thoroughness::Full => Sizes {
                big_bytes: 512 << 20,
                small_files,
                listed: 5000,
                random: Duration::from_secs(5),
                tree: TreeSize { directories: 100, files: 50 },
            },
        }
    }
}

pub fn measure(fixture: &Fixture, options: &Options, progress: &Progress) -> anyhow::Result<Section> {
    let repetitions = options.repetitions.unwrap_or(match options.thoroughness {
        Thoroughness::Quick => 1,
        Thoroughness::Full => 3,
    });
    let programs = [
        machine::product_version("mount-s3")?,
        s3fs_version()?,
        rclone_version()?,
        machine::tool_version("versitygw")?,
    ];
    let head = machine::describe(options, &programs);
    progress.say("starting versitygw and filling the bucket");
    let scratch = Scratch::prepare(fixture)?;
    let proxy = DelayProxy::start(scratch.server()?, ONE_WAY)?;
    let ground = Dataset { scratch: &scratch, content: Content::new() };
    ground.prepare(&Network::Direct.sizes(options.thoroughness))?;

    let mut results = Results::default();
    let mut tables = Vec::new();
    for network in Network::ALL {
        let endpoint = match network {
            Network::Direct => scratch.store().endpoint(),
            Network::Delayed => proxy.endpoint(),
        };
        let run = Run { fixture, ground: &ground, endpoint, network, sizes: network.sizes(options.thoroughness) };
        run.all(repetitions, options.only.as_deref().unwrap_or_default(), &mut results, progress);
        tables.push(results.describe(&run, round_trip(&run.endpoint)?));
    }
    let (tables, verdicts, noise) = (tables.join("\n"), results.verdicts(), results.noise());
    let text = format!("## Data\n\n{head}\n{EXPLANATION}\n\n{tables}\n{verdicts}\n{noise}\n");
    Ok(Section { text, failures: results.failures })
}

const EXPLANATION: &str = "\
Every figure is the median of some runs, each on a fresh mount, the clients in turns. The server is versitygw with its files
on tmpfs; caches and temporary files of the clients are on tmpfs, too. A write ends when the file is closed *and* its
object is on the server; everything that is read or stored is compared with what it should be. Options are the defaults but for
`--allow-delete --allow-overwrite` (mount-s3), `--metadata-ttl 60` (second column) and `--vfs-cache-mode off` or `full` with
`--vfs-write-back 0s` (rclone), and `--cache` (mount-s3) in the row that says so. A limit is what is possible with this server
on this machine: further reads of a file in tmpfs; for the disk cache a read through a FUSE mount whose bytes come from memory;
for a sequential write its parts as objects of their own, eight at once; and for everything else the requests that cannot be
avoided, both sent by the same client without a file system. How much of that a mount could reach at best shows the same client
while as many bytes pass through such a FUSE mount. s3fs and `rclone full` copy what they read to a local file and answer further
reads from there, which random reads show; `rclone full` also uploads after close, several files at once. Ratios say how many times
better ours is than the best of the others.";

/// One network's part of the benchmark.
struct Run<'a> {
    fixture: &'a Fixture,
    ground: &'a Dataset<'a>,
    endpoint: String,
    network: Network,
    sizes: Sizes,
}

#[derive(Default)]
struct Results {
    cells: BTreeMap<(Network, Measurement, &'static str), Cell>,
    limits: BTreeMap<(Network, Measurement), Samples>,
    /// Of a sequential read, while as many bytes pass through a FUSE mount that does nothing else.
    beside_floor: BTreeMap<Network, Samples>,
    failures: Vec<String>,
}

/// One client in one test.
#[derive(Default)]
struct Cell {
    figures: Samples,
    processor_seconds: Samples,
    peak_kib: u64,
    is_finished: bool,
}

impl Run<'_> {
    fn all(&self, repetitions: usize, only: &str, results: &mut Results, progress: &Progress) {
        let title = |test: Measurement| format!("{}, {}", self.network.title(), test.title(&self.sizes));
        for test in self.network.measurements().filter(|it| title(*it).contains(only)) {
            for repetition in 0..repetitions {
                let mut clients = S3FileSystem::ALL;
                // No client always runs right after the slowest.
                clients.rotate_left(repetition % S3FileSystem::ALL.len());
                for client in clients {
                    self.one(test, client, repetition, results);
                }
                self.limit(test, repetition, results);
                let figures = S3FileSystem::ALL.map(|it| {
                    let cell = results.cells.get(&(self.network, test, it.word()));
                    format!("{} {}", it.word(), figure_or_dash(cell.and_then(|it| it.figures.median())))
                });
                progress.say(&format!("{}: {}", title(test), figures.join(", ")));
            }
        }
    }

    fn one(&self, test: Measurement, client: S3FileSystem, repetition: usize, results: &mut Results) {
        let cell = results.cells.entry((self.network, test, client.word())).or_default();
        if cell.is_finished {
            return;
        }
        let name = format!("{:?}-{test:?}-{}-{repetition}", self.network, client.word()).to_lowercase();
        let start = Instant::now();
        if let Err(error) = self.measure(test, client, &name, cell) {
            cell.is_finished = true;
            let title = test.title(&self.sizes);
            let failure = format!("{} {}, {title}: {error:#}", client.title(), self.network.title());
            eprintln!("{failure}");
            results.failures.push(failure);
        } else if LONG < start.elapsed() {
            cell.is_finished = true;
        }
    }

    fn limit(&self, test: Measurement, repetition: usize, results: &mut Results) {
        let name = format!("{:?}-{test:?}-{repetition}", self.network).to_lowercase();
        match self.ground.limit(test, &self.sizes, &self.endpoint, &name) {
            Ok(Some(figure)) => results.limits.entry((self.network, test)).or_default().add(figure),
            Ok(None) => {}
            Err(error) => {
                let title = test.title(&self.sizes);
                results.failures.push(format!("limit {}, {title}: {error:#}", self.network.title()));
            }
        }
        if test == Measurement::Read {
            match self.ground.read_beside_floor(&self.sizes, &self.endpoint, &name) {
                Ok(figure) => results.beside_floor.entry(self.network).or_default().add(figure),
                Err(error) => results.failures.push(format!("floor {}: {error:#}", self.network.title())),
            }
        }
    }

    fn measure(&self, test: Measurement, client: S3FileSystem, name: &str, cell: &mut Cell) -> anyhow::Result<()> {
        let scratch = self.ground.scratch;
        let disk_cache = if test == Measurement::ReadCached { DiskCache::On } else { DiskCache::Off };
        let mounting = MountSettings { fixture: self.fixture, scratch, endpoint: &self.endpoint, name, disk_cache };
        let mounted = MountedFileSystem::start(client, &mounting)?;
        let before = mounted.usage()?;
        let figure = self.ground.run(test, &self.sizes, &mounted, name)?;
        let after = mounted.usage()?;
        mounted.stop()?;
        // The memory that it occupies is not everybody's.
        fs::remove_dir_all(scratch.cache(name)?).context("failed to remove the client's cache")?;
        cell.figures.add(figure);
        cell.processor_seconds.add(after.processor.saturating_sub(before.processor).as_secs_f64());
        cell.peak_kib = cell.peak_kib.max(after.peak_kib);
        Ok(())
    }
}

impl Results {
    fn figure(&self, network: Network, test: Measurement, client: S3FileSystem) -> Option<f64> {
        self.cells.get(&(network, test, client.word()))?.figures.median()
    }

    fn limit(&self, network: Network, test: Measurement) -> Option<f64> {
        self.limits.get(&(network, test))?.median()
    }

    /// The most memory that the client took in any of these tests, in MiB.
    fn peak(&self, network: Network, tests: &[Measurement], client: S3FileSystem) -> Option<f64> {
        let cells = tests.iter().filter_map(|test| self.cells.get(&(network, *test, client.word())));
        let peak = cells.map(|it| it.peak_kib).max()?;
        (peak > 0).then(|| mebibytes(peak << 10))
    }

    /// How many times better ours is than the best peer.
    fn advantage(&self, network: Network, test: Measurement, ours: S3FileSystem) -> Option<f64> {
        advantage(|client| self.figure(network, test, client), test.better(), ours)
    }

    /// How many times better the limit is than the best peer.
    fn advantage_of_limit(&self, network: Network, test: Measurement) -> Option<f64> {
        let figure = |client: S3FileSystem| match client {
            S3FileSystem::Ours => self.limit(network, test),
            peer => self.figure(network, test, peer),
        };
        advantage(figure, test.better(), S3FileSystem::Ours)
    }

    /// The same among those who, like us, have stored a file when it is closed.
    fn advantage_of_storing(&self, network: Network, test: Measurement, ours: S3FileSystem) -> Option<f64> {
        let figure = |client: S3FileSystem| client.stores_at_close().then(|| self.figure(network, test, client))?;
        advantage(figure, test.better(), ours)
    }

    fn describe(&self, run: &Run<'_>, round_trip: Duration) -> String {
        let network = run.network;
        let header = network.title().to_owned();
        let mut table = MarkdownTable::new(
            [header]
                .into_iter()
                .chain(S3FileSystem::ALL.map(|it| it.title().to_owned()))
                .chain(S3FileSystem::OURS.map(|it| format!("{} ÷ best peer", it.title())))
                .chain(["limit".to_owned()]),
        );
        let mut add = |title: String, better, figure: &dyn Fn(S3FileSystem) -> Option<f64>, limit: Option<f64>| {
            let figures = S3FileSystem::ALL.map(|it| figure_or_dash(figure(it)));
            let ratios = S3FileSystem::OURS.map(|it| figure_or_dash(advantage(figure, better, it)));
            table.add([title].into_iter().chain(figures).chain(ratios).chain([figure_or_dash(limit)]));
        };
        for test in network.measurements() {
            let limit = self.limit(network, test);
            add(test.title(&run.sizes), test.better(), &|client| self.figure(network, test, client), limit);
        }
        for (test, title) in [(Measurement::Write, "written"), (Measurement::Read, "read")] {
            let gibibytes = mebibytes(run.sizes.big_bytes) / 1024.0;
            let per_gibibyte = |client: S3FileSystem| {
                let cell = self.cells.get(&(network, test, client.word()))?;
                Some(cell.processor_seconds.median()? / gibibytes)
            };
            add(format!("processor s per GiB {title}"), Better::Lower, &per_gibibyte, None);
        }
        for (what, tests) in [("sequential read", &[Measurement::Read][..]), ("all rows", &Measurement::ALL)] {
            add(format!("peak memory, {what}, MiB"), Better::Lower, &|client| self.peak(network, tests, client), None);
        }
        let way = match network {
            Network::Direct => "Directly",
            Network::Delayed => "Behind a proxy that delays every byte",
        };
        format!("{way} (a request takes {} ms):\n\n{table}", figure(round_trip.as_secs_f64() * 1e3))
    }

    fn verdicts(&self) -> Verdicts {
        let mut verdicts = Verdicts::new(S3FileSystem::OURS.map(S3FileSystem::title));
        let (direct, delayed) = (Network::Direct, Network::Delayed);
        for (network, test, what, factor) in [
            (direct, Measurement::Read, "sequential read", 1.2),
            (delayed, Measurement::Read, "sequential read", 2.0),
            (direct, Measurement::Write, "sequential write", 2.0),
            (delayed, Measurement::Write, "sequential write", 2.5),
            (direct, Measurement::ReadAgain, "second read", 5.0),
            (direct, Measurement::ReadCached, "second read, disk cache, pages dropped", 3.0),
            (direct, Measurement::ReadParallel, "8 readers of one file", 1.0),
            (direct, Measurement::ReadSmallParallel, "read small files, 16 at once,", 1.0),
            (direct, Measurement::Random, "random reads, cold file", 1.0),
            (direct, Measurement::RandomAgain, "random reads, file read before", 10.0),
            (direct, Measurement::Tree(TreeWork::Find), "`find`", 1.0),
            (direct, Measurement::Tree(TreeWork::DiskUsage), "`du -s`", 1.0),
            (direct, Measurement::Tree(TreeWork::Copy), "`cp -r`", 1.0),
            (direct, Measurement::Tree(TreeWork::Archive), "`tar c`", 1.0),
            (direct, Measurement::Tree(TreeWork::Remove), "`rm -r`", 1.0),
            (direct, Measurement::List, "`ls -l`", 10.0),
            (delayed, Measurement::List, "`ls -l`", 10.0),
        ] {
            verdicts.add_limited(
                &format!("{what} {}: {factor} × the best peer", network.title()),
                S3FileSystem::OURS.map(|it| self.advantage(network, test, it)),
                self.advantage_of_limit(network, test),
                |it| factor <= it,
            );
        }
        let of_client = |figure: Option<f64>| Some(figure? / self.limit(direct, Measurement::Read)?);
        let beside_floor = of_client(self.beside_floor.get(&direct).and_then(Samples::median));
        verdicts.add(
            &format!(
                "sequential read {}: 0.8 × the same client without a file system (beside a mount that costs nothing: {} ×)",
                direct.title(),
                figure_or_dash(beside_floor),
            ),
            S3FileSystem::OURS.map(|it| of_client(self.figure(direct, Measurement::Read, it))),
            |it| 0.8 <= it,
        );
        verdicts.add(
            &format!("peak memory, sequential read {}: at most 128 MiB", direct.title()),
            S3FileSystem::OURS.map(|it| self.peak(direct, &[Measurement::Read], it)),
            |it| it <= 128.0,
        );
        verdicts.add(
            "create small files, 16 at once, directly: ahead of peers that store at close",
            S3FileSystem::OURS.map(|it| self.advantage_of_storing(direct, Measurement::CreateSmallParallel, it)),
            |it| 1.0 <= it,
        );
        for (test, what) in
            [(Measurement::CreateSmall, "create small files"), (Measurement::ReadSmall, "read small files")]
        {
            verdicts.add_limited(
                &format!("{what} {}: ahead of every peer", delayed.title()),
                S3FileSystem::OURS.map(|it| self.advantage(delayed, test, it)),
                self.advantage_of_limit(delayed, test),
                |it| 1.0 < it,
            );
            for network in Network::ALL {
                verdicts.add(
                    &format!("{what} {}: ahead of peers that store at close", network.title()),
                    S3FileSystem::OURS.map(|it| self.advantage_of_storing(network, test, it)),
                    |it| 1.0 <= it,
                );
            }
        }
        verdicts
    }

    /// How far to trust the figures.
    fn noise(&self) -> String {
        let mut spreads = Samples::default();
        self.cells.values().filter(|it| 1 < it.figures.count()).filter_map(|it| it.figures.spread()).for_each(|it| {
            spreads.add(it);
        });
        match (spreads.median(), spreads.maximum()) {
            (Some(median), Some(maximum)) => format!(
                "Between the runs of one figure, the best and the worst lie {:.0} % apart in the median, {:.0} % at most.",
                median * 100.0,
                maximum * 100.0
            ),
            _ => "Everything was measured once only.".to_owned(),
        }
    }
}

fn advantage(figure: impl Fn(S3FileSystem) -> Option<f64>, better: Better, ours: S3FileSystem) -> Option<f64> {
    let peers = S3FileSystem::PEERS.into_iter().filter_map(&figure);
    match better {
        Better::Higher => Some(figure(ours)? / peers.reduce(f64::max)?),
        Better::Lower => Some(peers.reduce(f64::min)? / figure(ours)?),
    }
}

/// How long the server takes to answer a question that costs it nothing; the median of some.
fn round_trip(endpoint: &str) -> anyhow::Result<Duration> {
    const QUESTIONS: usize = 21;
    let address: SocketAddr = endpoint.trim_start_matches("http://").parse().context("not an address")?;
    let ask = || {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        let start = Instant::now();
        stream.write_all(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")?;
        stream.read_exact(&mut [0])?;
        Ok::<_, std::io::Error>(start.elapsed())
    };
    let mut samples = Samples::default();
    for _ in 0..QUESTIONS {
        samples.add(ask().context("the server does not answer")?.as_secs_f64());
    }
    Ok(Duration::from_secs_f64(samples.median().unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(figures: [Option<f64>; 5], better: Better, expected: Option<f64>) {
        let figure = |client: S3FileSystem| figures[S3FileSystem::ALL.iter().position(|it| *it == client).unwrap()];
        assert_eq!(advantage(figure, better, S3FileSystem::Ours), expected);
    }

    #[test]
    fn an_advantage_is_above_one_whichever_way_is_better() {
        check([Some(400.0), None, Some(200.0), Some(100.0), None], Better::Higher, Some(2.0));
        check([Some(2.0), None, Some(8.0), Some(4.0), None], Better::Lower, Some(2.0));
    }

    #[test]
    fn there_is_none_without_ours_or_without_a_peer() {
        check([None, Some(1.0), Some(8.0), None, None], Better::Lower, None);
        check([Some(1.0), Some(1.0), None, None, None], Better::Lower, None);
    }
}
