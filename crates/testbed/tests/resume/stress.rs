//! Many kinds of work at once while engines are killed at random moments: everything read is compared, and everything that was
//! closed without an error must be in the bucket at the end.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{Advice, AtFlags, CWD, StatxFlags};
use s3csi_s3_server::store::Store as _;
use s3csi_testbed::environment;
use s3csi_testbed::fixture::Fixture;

use crate::world::{BUCKET, Options, SupervisedMount, World, noise};

/// In each CI run; `make soak` asks for a hundred.
const USUAL_KILLS: usize = 8;

const SMALL_FILES: u64 = 60;
const BIG_FILES: u64 = 2;
const BIG_BYTES: usize = 24 << 20;
/// Smaller files are written on by the next engine.
const KEPT_BYTES: usize = 8 << 20;

/// What one kind of work has to say.
#[derive(Default)]
struct Report {
    rounds: usize,
    errors: Vec<String>,
    /// Files that could not be written, which is the right of a big file that was being written.
    failed_writes: usize,
    longest: Duration,
    /// What was written without an error.
    written: BTreeMap<String, u64>,
    /// What was edited and synced without an error.
    edited: BTreeMap<String, Vec<u8>>,
}

impl Report {
    /// One more round is done.
    fn count(&mut self, start: Instant) {
        self.rounds += 1;
        self.longest = self.longest.max(start.elapsed());
    }

    fn check<T>(&mut self, what: &str, result: io::Result<T>) -> Option<T> {
        result.inspect_err(|error| self.errors.push(format!("{what}: {error}"))).ok()
    }

    fn compare(&mut self, what: &str, found: &[u8], expected: &[u8]) {
        if found != expected {
            self.errors.push(format!("{what}: wrong bytes ({} instead of {})", found.len(), expected.len()));
        }
    }
}

type Work = fn(&Path, &AtomicBool) -> Report;

/// Ends the work also when the test fails: its threads are waited for.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[test]
fn nothing_but_big_files_being_written_notices_that_engines_die() {
    check("resume-stress", &[]);
}

#[test]
fn nothing_but_big_files_being_written_notices_that_a_standby_takes_over() {
    check("resume-stress-standby", &["--standby", "on"]);
}

fn check(name: &str, mounter: &[&str]) {
    let kills = environment::soak_kills().unwrap_or(USUAL_KILLS);
    let fixture = Fixture::new(name);
    let world = World::new(&fixture);
    for number in 0..SMALL_FILES {
        world.put(&format!("small/d{}/{number}", number % 7), &small(number));
    }
    for number in 0..BIG_FILES {
        world.put(&format!("big/{number}"), &big(number));
    }
    world.put("meta/stays", b"x");
    let stage = format!("--stage={}", fixture.create_directory("stage").display());
    let mount = world.mount_with(&Options { mounter, engine: &[&stage], ..Options::default() });

    world.put(EDITED, &edited_at_first(SMALL_EDITED));
    world.put(LARGE_EDITED, &edited_at_first(LARGE));
    let works: [(&str, Work); 12] = [
        ("small files", read_small),
        ("small files again", read_small),
        ("big files", read_big),
        ("held handle", hold),
        ("listing", list),
        ("writer", write),
        ("editor", edit),
        ("editor of a large file", edit_large),
        ("appender", append),
        ("writer that goes back", go_back),
        ("names", make_and_remove),
        ("probe", probe),
    ];
    let is_over = AtomicBool::new(false);
    let (reports, stalls) = std::thread::scope(|scope| {
        let running: Vec<_> =
            works.iter().map(|(name, work)| (*name, scope.spawn(|| work(&mount.directory, &is_over)))).collect();
        let stalls = {
            let _over = SetOnDrop(&is_over);
            kill_often(&mount, kills)
        };
        let reports: Vec<_> = running.into_iter().map(|(name, it)| (name, it.join().unwrap())).collect();
        (reports, stalls)
    });

    let mut stalls = stalls;
    stalls.sort();
    println!("{kills} kills, stalls: median {:?}, longest {:?}", stalls[stalls.len() / 2], stalls[stalls.len() - 1]);
    let mut problems = Vec::new();
    for (name, report) in &reports {
        println!(
            "{name}: {} rounds, {} failed writes, longest round {:?}",
            report.rounds, report.failed_writes, report.longest
        );
        assert!(report.rounds > 0, "{name} did nothing");
        problems.extend(report.errors.iter().map(|it| format!("{name}: {it}")));
        for (key, seed) in &report.written {
            if world.store.object(BUCKET, key).is_none_or(|it| it != written(*seed)) {
                problems.push(format!("{name}: {key} was closed without an error and is not in the bucket"));
            }
        }
        for (key, content) in &report.edited {
            if world.store.object(BUCKET, key).is_none_or(|it| it != *content) {
                problems.push(format!("{name}: what was synced to {key} is not in the bucket"));
            }
        }
    }
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
    mount.unmount();
}

/// Returns how long the mount was without an engine, each time.
fn kill_often(mount: &SupervisedMount<'_>, kills: usize) -> Vec<Duration> {
    let mut stalls = Vec::new();
    for number in 0..kills {
        // Different moments, the same ones in each run: 0.3 to 1.2 seconds after the last successor began to serve.
        let pause = Duration::from_millis(300 + (number as u64 * 7919) % 900);
        wait_a_moment(pause);
        stalls.push(mount.kill_engine().1);
    }
    wait_a_moment(Duration::from_secs(1));
    stalls
}

/// Time in which the applications work undisturbed; nothing is waited for.
pub fn wait_a_moment(time: Duration) {
    std::thread::sleep(time);
}

fn small(number: u64) -> Vec<u8> {
    noise(number + 1, 1000 + usize::try_from(number * 1717).unwrap())
}

fn big(number: u64) -> Vec<u8> {
    noise(number + 1000, BIG_BYTES)
}

fn written(seed: u64) -> Vec<u8> {
    let length = [0, 1, 5000, 300_000, 9 << 20][usize::try_from(seed % 5).unwrap()];
    noise(seed, length)
}

fn read_small(root: &Path, is_over: &AtomicBool) -> Report {
    let mut report = Report::default();
    while !is_over.load(Ordering::SeqCst) {
        let start = Instant::now();
        let number = (report.rounds as u64 * 17) % SMALL_FILES;
        let path = root.join(format!("small/d{}/{number}", number % 7));
        if let Some(content) = report.check("read", fs::read(path)) {
            report.compare("read", &content, &small(number));
        }
        report.count(start);
    }
    report
}

fn read_big(root: &Path, is_over: &AtomicBool) -> Report {
    let mut report = Report::default();
    let contents: Vec<Vec<u8>> = (0..BIG_FILES).map(big).collect();
    while !is_over.load(Ordering::SeqCst) {
        let start = Instant::now();
        let number = report.rounds % contents.len();
        let mut content = Vec::with_capacity(BIG_BYTES);
        let read = File::open(root.join(format!("big/{number}"))).and_then(|mut it| it.read_to_end(&mut content));
        if report.check("read", read).is_some() {
            report.compare("read", &content, &contents[number]);
        }
        report.count(start);
    }
    report
}

/// One handle for the whole time.
fn hold(root: &Path, is_over: &AtomicBool) -> Report {
    let mut report = Report::default();
    let content = big(0);
    let file = File::open(root.join("big/0")).unwrap();
    let mut piece = vec![0; 64 << 10];
    while !is_over.load(Ordering::SeqCst) {
        let start = Instant::now();
        let offset = (report.rounds * 7_654_321) % (BIG_BYTES - piece.len());
        // The engine is to be asked, not the page cache.
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        if report.check("read", file.read_exact_at(&mut piece, offset as u64)).is_some() {
            report.compare("read", &piece, &content[offset..offset + piece.len()]);
        }
        report.count(start);
    }
    report
}

fn list(root: &Path, is_over: &AtomicBool) -> Report {
    let mut report = Report::default();
    while !is_over.load(Ordering::SeqCst) {
        let start = Instant::now();
        let mut count = 0;
        for directory in 0..7 {
            let listed = fs::read_dir(root.join(format!("small/d{directory}")))
                .and_then(|entries| entries.map(|it| it.and_then(|it| it.metadata())).collect::<io::Result<Vec<_>>>());
            count += report.check("list", listed).map_or(0, |it| it.len());
        }
        if count != usize::try_from(SMALL_FILES).unwrap() {
            report.errors.push(format!("{count} files listed instead of {SMALL_FILES}"));
        }
        report.count(start);
    }
    report
}

/// Files of several sizes. A process of its own closes them, because only that shows how close went.
fn write(root: &Path, is_over: &AtomicBool) -> Report {
    let mut report = Report::default();
    while !is_over.load(Ordering::SeqCst) {
        let start = Instant::now();
        let seed = report.rounds as u64;
        let key = format!("written/{seed}");
        match write_one(&root.join(&key), seed) {
            // Empty files are stored a moment after they are closed; their loss is looked for at the end, too.
            Ok(()) => drop(report.written.insert(key, seed)),
            Err(_) if written(seed).len() > KEPT_BYTES => report.failed_writes += 1,
            Err(error) => report.errors.push(format!("write of {} bytes: {error}", written(seed).len())),
        }
        report.count(start);
    }
    report
}

fn write_one(path: &Path, seed: u64) -> Result<(), String> {
    let writer = (std::process::id(), std::thread::current().id());
    let source = PathBuf::from(format!("/tmp/s3csi-stress-{writer:?}-{seed}"));
    fs::create_dir_all(path.parent().unwrap()).map_err(|error| error.to_string())?;
    fs::write(&source, written(seed)).unwrap();
    let output = Command::new("sh")
        .args(["-c", r#"exec cat "$0" > "$1""#])
        .args([&source, path])
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    fs::remove_file(source).unwrap();
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

const EDITED: &str = "edited/file";
const LARGE_EDITED: &str = "edited/large";
const APPENDED: &str = "edited/log";
const SMALL_EDITED: usize = 200_000;
/// Such a file is staged on disk.
const LARGE: usize = 10 << 20;

fn edited_at_first(length: usize) -> Vec<u8> {
    noise(99, length)
}

fn edit(root: &Path, is_over: &AtomicBool) -> Report {
    edit_file(root, is_over, EDITED, SMALL_EDITED)
}

fn edit_large(root: &Path, is_over: &AtomicBool) -> Report {
    edit_file(root, is_over, LARGE_EDITED, LARGE)
}

/// One file that is changed in place, appended to and truncated; each round ends with fsync and is compared.
fn edit_file(root: &Path, is_over: &AtomicBool, key: &str, length: usize) -> Report {
    let mut report = Report::default();
    let mut model = edited_at_first(length);
    let shorter = length / 4 * 3;
    let path = root.join(key);
    while !is_over.load(Ordering::SeqCst) {
        let start = Instant::now();
        let round = report.rounds;
        let piece = noise(round as u64 + 500, 3000);
        let offset = (round * 7919) % (model.len() - piece.len());
        let edited = File::options().read(true).write(true).open(&path).and_then(|file| {
            file.write_all_at(&piece, offset as u64)?;
            file.write_all_at(&piece[..100], model.len() as u64)?;
            if round % 5 == 4 {
                file.set_len(shorter as u64)?;
            }
            file.sync_all()
        });
        model[offset..offset + piece.len()].copy_from_slice(&piece);
        model.extend_from_slice(&piece[..100]);
        if round % 5 == 4 {
            model.resize(shorter, 0);
        }
        report.check("edit", edited);
        if let Some(content) = report.check("read", fs::read(&path)) {
            report.compare("edited file", &content, &model);
        }
        report.count(start);
    }
    report.edited.insert(key.to_owned(), model);
    report
}

/// Lines at the end of one file, each of them synced.
fn append(root: &Path, is_over: &AtomicBool) -> Report {
    let mut report = Report::default();
    let mut model = Vec::new();
    let path = root.join(APPENDED);
    while !is_over.load(Ordering::SeqCst) {
        let start = Instant::now();
        let line = format!("line {}\n", report.rounds);
        let appended = File::options().append(true).create(true).open(&path).and_then(|mut file| {
            io::Write::write_all(&mut file, line.as_bytes())?;
            file.sync_all()
        });
        model.extend_from_slice(line.as_bytes());
        report.check("append", appended);
        report.count(start);
    }
    report.edited.insert(APPENDED.to_owned(), model);
    report
}

/// New files whose beginning is written last.
fn go_back(root: &Path, is_over: &AtomicBool) -> Report {
    let mut report = Report::default();
    while !is_over.load(Ordering::SeqCst) {
        let start = Instant::now();
        let key = format!("back/{}", report.rounds);
        let content = noise(report.rounds as u64 + 900, 50_000);
        let written = fs::create_dir_all(root.join("back")).and_then(|()| {
            let file = File::options().write(true).create(true).truncate(true).open(root.join(&key))?;
            file.write_all_at(&content[1000..], 1000)?;
            file.write_all_at(&content[..1000], 0)?;
            file.sync_all()
        });
        report.check("write", written);
        report.edited.insert(key, content);
        report.count(start);
    }
    report
}

fn make_and_remove(root: &Path, is_over: &AtomicBool) -> Report {
    let mut report = Report::default();
    let directory = root.join("meta");
    while !is_over.load(Ordering::SeqCst) {
        let start = Instant::now();
        let (file, sub) = (directory.join("file"), directory.join("sub"));
        report.check("mkdir", fs::create_dir(&sub));
        report.check("rmdir", fs::remove_dir(&sub));
        report.check("write", write_byte(&file));
        report.check("unlink", fs::remove_file(&file));
        report.count(start);
    }
    report
}

fn write_byte(path: &Path) -> io::Result<()> {
    let mut file = File::create(path)?;
    io::Write::write_all(&mut file, b"x")?;
    file.sync_all()
}

fn probe(root: &Path, is_over: &AtomicBool) -> Report {
    let mut report = Report::default();
    while !is_over.load(Ordering::SeqCst) {
        let start = Instant::now();
        let asked = rustix::fs::statx(CWD, root.join("big/1"), AtFlags::STATX_FORCE_SYNC, StatxFlags::BASIC_STATS);
        report.check("stat", asked.map_err(Into::into));
        report.count(start);
    }
    report
}
