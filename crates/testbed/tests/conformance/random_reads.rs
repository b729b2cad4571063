//! Reads that jump: every byte is right, a block is fetched once, and no handle sees two versions.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::thread;
use std::time::Instant;

use rustix::io::Errno;
use s3csi_s3_server::{Config, Effect, Fault, S3Operation, S3Server};
use s3csi_testbed::engine::EngineMount;
use s3csi_testbed::wait::{SOON, wait_for, wait_until};

use crate::world::{World, check_errno, in_process_with, noise, peak_memory};

const BLOCK: usize = 1 << 20;
const PAGE: usize = 4096;
const BLOCKS: usize = 24;
/// The last block is not a whole one, nor is the last page.
const SIZE: usize = BLOCKS * BLOCK - 12_345;

fn world(rule: &str) -> World<S3Server> {
    in_process_with(rule, Config::default())
}

/// Pages of the file in an order without a pattern, some of them more than once.
fn jumps(seed: u64, count: usize) -> impl Iterator<Item = usize> {
    let numbers = noise(seed, 8 * count);
    let pages = SIZE.div_ceil(PAGE) as u64;
    let page = move |it: &[u8; 8]| usize::try_from(u64::from_le_bytes(*it) % pages).unwrap();
    let jumps: Vec<usize> = numbers.as_chunks().0.iter().map(page).collect();
    jumps.into_iter()
}

/// Reads these pages. Everything that is read is compared.
fn read(file: &File, content: &[u8], pages: impl Iterator<Item = usize>) -> io::Result<()> {
    for page in pages {
        let start = page * PAGE;
        let expected = &content[start..content.len().min(start + PAGE)];
        let mut found = vec![0; expected.len()];
        file.read_exact_at(&mut found, start as u64)?;
        assert!(found == expected, "other bytes at {start}");
    }
    Ok(())
}

fn drop_pages(file: &File) {
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

#[test]
fn each_block_is_fetched_once() {
    let world = world("random-once");
    let content = noise(1, SIZE);
    world.put("file", &content);
    for arguments in [&[][..], &["--read-only"], &["--max-stage-size=0"]] {
        let mount = arguments.iter().fold(world.engine(), |engine, it| engine.argument(*it)).mount();
        let file = File::open(mount.path("file")).unwrap();
        world.store.forget_requests();
        read(&file, &content, jumps(2, 600)).unwrap();
        let gets = world.store.count(S3Operation::GetObject);
        if arguments == ["--max-stage-size=0"] {
            // A few blocks in memory only.
            assert!(gets < 600, "{gets} requests for 600 reads");
        } else {
            // The first read is where a sequential reader begins, perhaps.
            assert!(gets <= BLOCKS + 2, "{gets} requests for {BLOCKS} blocks {arguments:?}");
            drop_pages(&file);
            world.store.forget_requests();
            read(&file, &content, jumps(3, 600)).unwrap();
            assert_eq!(world.store.count(S3Operation::GetObject), 0, "{arguments:?}");
        }
        drop(file);
        mount.unmount();
    }
}

#[test]
fn the_rest_of_a_file_that_is_read_all_over_is_fetched_meanwhile() {
    let world = world("random-fill");
    let content = noise(1, SIZE);
    world.put("file", &content);
    let mount = world.mount();
    let file = File::open(mount.path("file")).unwrap();
    // One page of each of two thirds of the blocks, from the end on.
    let pages = (0..=BLOCKS * 2 / 3).map(|it| (BLOCKS - 1 - it) * BLOCK / PAGE);
    read(&file, &content, pages).unwrap();
    let served = || world.store.count(S3Operation::GetObject);
    // All blocks are in the file when a store that answers nothing is not asked any more.
    wait_for("the rest is fetched", || {
        let before = served();
        drop_pages(&file);
        read(&file, &content, jumps(2, 300)).unwrap();
        served() == before
    });
    let _fault = world.store.inject(Fault::new(Effect::Frozen).operation(S3Operation::GetObject));
    drop_pages(&file);
    read(&file, &content, jumps(3, 600)).unwrap();
    drop(file);
    mount.unmount();
}

/// More than may keep parts in memory.
#[test]
fn readers_of_different_parts_of_a_file_do_not_read_ahead_into_those_of_others() {
    const READERS: usize = 12;
    for arguments in [&[][..], &["--max-threads=1"], &["--max-stage-size=0"]] {
        let world = world("random-parts");
        let content = noise(5, READERS * 4 * BLOCK + 12_345);
        world.put("file", &content);
        let mount = arguments.iter().fold(world.engine(), |engine, it| engine.argument(*it)).mount();
        thread::scope(|scope| {
            for reader in 0..READERS {
                let (path, content) = (mount.path("file"), &content);
                scope.spawn(move || {
                    let file = File::open(path).unwrap();
                    let part = &content[reader * 4 * BLOCK..content.len().min((reader + 2) * 4 * BLOCK)];
                    // No power of two: reads begin and end anywhere.
                    for (number, expected) in part.chunks(300_001).enumerate() {
                        let mut found = vec![0; expected.len()];
                        let start = reader * 4 * BLOCK + number * 300_001;
                        file.read_exact_at(&mut found, start as u64).unwrap();
                        assert!(found == expected, "other bytes at {start}");
                    }
                });
            }
        });
        mount.unmount();
    }
}

#[test]
fn what_a_reader_in_order_has_fetched_last_is_in_memory() {
    let world = world("random-last-part");
    let content = noise(6, SIZE);
    world.put("file", &content);
    let mount = world.mount();
    let [other, file] = [(), ()].map(|()| File::open(mount.path("file")).unwrap());
    let last = BLOCKS - 1;
    read(&other, &content, std::iter::once(last * BLOCK / PAGE)).unwrap();
    let pages = |blocks: std::ops::Range<usize>| (blocks.start * BLOCK / PAGE)..(blocks.end * BLOCK / PAGE);
    read(&file, &content, pages(12..last)).unwrap();
    drop_pages(&file);
    let _fault = world.store.inject(Fault::new(Effect::Denied).operation(S3Operation::GetObject));
    read(&file, &content, pages(last - 3..last)).unwrap();
    drop((other, file));
    mount.unmount();
}

#[test]
fn many_readers_share_the_blocks_with_one_thread_and_with_many() {
    for threads in ["1", "16"] {
        let world = world("random-many");
        let content = noise(4, SIZE);
        world.put("file", &content);
        let mount = world.engine().writable().argument(format!("--max-threads={threads}")).mount();
        world.store.forget_requests();
        thread::scope(|scope| {
            for seed in 0..8 {
                let (path, content) = (mount.path("file"), &content);
                scope.spawn(move || {
                    let file = File::open(path).unwrap();
                    for round in 0..3 {
                        read(&file, content, jumps(10 + seed * 3 + round, 100)).unwrap();
                        drop_pages(&file);
                    }
                });
            }
        });
        let gets = world.store.count(S3Operation::GetObject);
        // Each of them may begin in order.
        assert!(gets <= BLOCKS + 2 * 8, "{gets} requests with {threads} threads");
        mount.unmount();
    }
}

#[test]
fn a_reader_that_goes_on_in_order_is_sequential_again() {
    let world = world("random-then-ordered");
    let content = noise(5, SIZE);
    world.put("file", &content);
    let mount = world.mount();
    let file = File::open(mount.path("file")).unwrap();
    read(&file, &content, jumps(6, 20)).unwrap();
    drop_pages(&file);
    world.store.forget_requests();
    let mut piece = vec![0; 100_000];
    for start in (9 * BLOCK..SIZE - piece.len()).step_by(piece.len()) {
        file.read_exact_at(&mut piece, start as u64).unwrap();
        assert!(piece == content[start..start + piece.len()], "other bytes at {start}");
    }
    drop(file);
    mount.unmount();
}

#[test]
fn a_file_that_others_replace_is_never_mixed() {
    let world = world("random-replaced");
    let (old, new) = (noise(7, SIZE), noise(8, SIZE));
    world.put("file", &old);
    let mount = world.engine().writable().argument("--metadata-ttl=minimal").mount();
    let before = File::open(mount.path("file")).unwrap();
    read(&before, &old, jumps(9, 10)).unwrap();
    world.put("file", &new);
    let after = File::open(mount.path("file")).unwrap();
    read(&after, &new, jumps(9, 200)).unwrap();
    // Blocks that are there are of the old version, others cannot be had any longer.
    match read(&before, &old, jumps(11, 200)) {
        Ok(()) => panic!("the old version was read from a server that does not have it"),
        Err(error) => check_errno::<()>(Err(error), &[Errno::STALE]),
    }
    read(&after, &new, jumps(12, 200)).unwrap();
    drop((before, after));
    mount.unmount();
}

#[test]
fn own_changes_right_after_random_reads_are_seen() {
    let world = world("random-own");
    let content = noise(13, SIZE);
    world.put("file", &content);
    let mount = world.mount();
    for round in 0..5 {
        let file = File::open(mount.path("file")).unwrap();
        let old = world.object("file").unwrap();
        read(&file, &old, jumps(14 + round, 50)).unwrap();
        drop(file);
        let content = noise(20 + round, SIZE);
        let mut file = OpenOptions::new().write(true).truncate(true).open(mount.path("file")).unwrap();
        file.write_all(&content).unwrap();
        file.sync_all().unwrap();
        drop(file);
        let file = File::open(mount.path("file")).unwrap();
        read(&file, &content, jumps(30 + round, 50)).unwrap();
        drop(file);
        let edited = OpenOptions::new().read(true).write(true).open(mount.path("file")).unwrap();
        edited.write_all_at(b"edited", 5 * BLOCK as u64 - 3).unwrap();
        let mut changed = content;
        changed[5 * BLOCK - 3..5 * BLOCK + 3].copy_from_slice(b"edited");
        read(&edited, &changed, jumps(40 + round, 50)).unwrap();
        drop(edited);
        wait_for("the edit is stored", || world.object("file").is_some_and(|it| it == changed));
    }
    mount.unmount();
}

#[test]
fn short_failures_are_not_seen_and_long_ones_are_errors() {
    let world = world("random-faults");
    let content = noise(15, SIZE);
    world.put("file", &content);
    let mount = world.mount();
    let gets = |effect| Fault::new(effect).operation(S3Operation::GetObject);
    for effect in [Effect::Unavailable, Effect::Dropped, Effect::Truncated { after: 300_000 }] {
        let file = File::open(mount.path("file")).unwrap();
        drop_pages(&file);
        let fault = world.store.inject(gets(effect).times(2));
        // Too few for the rest of the file to be fetched, too, beyond the end of this handle.
        read(&file, &content, jumps(16, 12)).unwrap();
        assert!(0 < fault.hits(), "{effect:?}: never met");
    }
    let file = File::open(mount.path("file")).unwrap();
    drop_pages(&file);
    let fault = world.store.inject(gets(Effect::Denied));
    check_errno(read(&file, &content, [20 * 256].into_iter()), &[Errno::IO, Errno::ACCESS, Errno::PERM]);
    fault.release();
    let is_back = wait_until(Instant::now() + SOON, || read(&file, &content, jumps(17, 20)).is_ok());
    assert!(is_back, "the file cannot be read again");
    drop(file);
    mount.unmount();
}

#[test]
fn an_answer_without_end_is_given_up_within_bounded_memory() {
    const MEMORY_TARGET: u64 = 512;
    for status in [206, 403] {
        let world = world("random-endless");
        let content = noise(18, SIZE);
        world.put("file", &content);
        let engine = world.engine().argument(format!("--memory-target={MEMORY_TARGET}"));
        let mount = engine.environment("S3CSI_ENGINE_TRIALS", "longest-answer=2").mount();
        let file = File::open(mount.path("file")).unwrap();
        let fault = world.store.inject(Fault::new(Effect::Endless { status }).operation(S3Operation::GetObject));
        check_errno(read(&file, &content, [20 * 256].into_iter()), &[Errno::IO]);
        assert!(0 < fault.hits(), "never met");
        let peak = peak_memory(&mount);
        println!("status {status}: {peak} MiB");
        assert!(peak < (MEMORY_TARGET + 256) * 2, "{peak} MiB");
        fault.release();
        let is_back = wait_until(Instant::now() + SOON, || read(&file, &content, jumps(19, 20)).is_ok());
        assert!(is_back, "the file cannot be read again");
        drop(file);
        mount.unmount();
    }
}

#[test]
fn random_and_parallel_readers_take_little_memory() {
    let world = world("read-memory");
    let content = noise(21, 192 << 20);
    world.put("file", &content);
    let check = |what: &str, most: u64, work: &dyn Fn(&EngineMount<'_>)| {
        let mount = world.mount();
        work(&mount);
        let peak = peak_memory(&mount);
        println!("{what}: {peak} MiB");
        assert!(peak <= most, "{what}: {peak} MiB");
        mount.unmount();
    };
    check("sequential", 128, &|mount| assert!(fs::read(mount.path("file")).unwrap() == content, "other bytes"));
    check("random", 128, &|mount| {
        let file = File::open(mount.path("file")).unwrap();
        read(&file, &content, jumps(22, 300)).unwrap();
    });
    // Each has a window, and all of them one budget.
    check("16 readers", 1024, &|mount| {
        thread::scope(|scope| {
            for _ in 0..16 {
                scope.spawn(|| assert!(fs::read(mount.path("file")).unwrap() == content, "other bytes"));
            }
        });
    });
}
