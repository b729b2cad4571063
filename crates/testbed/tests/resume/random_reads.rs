//! Readers that jump while engines die: no error, no wrong byte, and the disk cache goes on.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use s3csi_s3_server::S3Operation;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::wait::{SOON, wait_until};

use crate::world::{Options, World, check_errno, noise};

const PAGE: usize = 4096;
const SIZE: usize = (16 << 20) - 777;
const READERS: usize = 6;
const KILLS: usize = 5;

/// Reads one page. The page cache does not answer.
fn read(file: &File, content: &[u8], number: u64) -> std::io::Result<()> {
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed)?;
    let start = usize::try_from(number).unwrap() % SIZE.div_ceil(PAGE) * PAGE;
    let expected = &content[start..SIZE.min(start + PAGE)];
    let mut found = vec![0; expected.len()];
    file.read_exact_at(&mut found, start as u64)?;
    assert!(found == expected, "other bytes at {start}");
    Ok(())
}

/// Large steps that come to every page.
fn number(seed: u64, step: u64) -> u64 {
    (seed * 1009 + step) * 1877
}

fn check(name: &str, options: &Options<'_>) {
    let fixture = Fixture::new(name);
    let world = World::new(&fixture);
    let content = noise(1, SIZE);
    world.put("file", &content);
    let mount = world.mount_with(options);
    let is_over = AtomicBool::new(false);
    let counts: [AtomicU64; READERS] = std::array::from_fn(|_| AtomicU64::new(0));
    thread::scope(|scope| {
        for (seed, count) in (0..).zip(&counts) {
            let (path, content, is_over) = (mount.path("file"), &content, &is_over);
            scope.spawn(move || {
                let file = File::open(path).unwrap();
                while !is_over.load(Ordering::SeqCst) {
                    read(&file, content, number(seed, count.load(Ordering::SeqCst))).unwrap();
                    count.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        for _ in 0..KILLS {
            let before = counts.each_ref().map(|it| it.load(Ordering::SeqCst));
            let goes_on = |(count, before): (&AtomicU64, &u64)| *before < count.load(Ordering::SeqCst);
            let all_go_on = wait_until(Instant::now() + SOON, || counts.iter().zip(&before).all(goes_on));
            if !all_go_on {
                is_over.store(true, Ordering::SeqCst);
                panic!("a reader has stopped: {before:?}, then {counts:?}");
            }
            mount.kill_engine();
        }
        is_over.store(true, Ordering::SeqCst);
    });
    mount.unmount();
}

#[test]
fn random_readers_do_not_notice_that_engines_die() {
    check("resume-random", &Options::default());
}

#[test]
fn random_readers_with_a_disk_cache_do_not_notice_either() {
    check("resume-random-cache", &Options { engine: &["--cache=x"], ..Options::default() });
}

#[test]
fn one_thread_is_enough() {
    check("resume-random-thread", &Options { engine: &["--max-threads=1"], ..Options::default() });
}

#[test]
fn blocks_of_a_version_that_was_replaced_meanwhile_are_not_shown() {
    for engine in [&[][..], &["--cache=x"]] {
        let fixture = Fixture::new("resume-random-replaced");
        let world = World::new(&fixture);
        let (old, new) = (noise(2, SIZE), noise(3, SIZE));
        world.put("file", &old);
        let mount = world.mount_with(&Options { engine, ..Options::default() });
        let before = File::open(mount.path("file")).unwrap();
        for step in 0..50 {
            read(&before, &old, number(1, step)).unwrap();
        }
        world.put("file", &new);
        mount.kill_engine();
        check_errno(read(&before, &old, number(1, 0)), rustix::io::Errno::STALE);
        let after = File::open(mount.path("file")).unwrap();
        for step in 0..50 {
            read(&after, &new, number(1, step)).unwrap();
        }
        drop((before, after));
        mount.unmount();
    }
}

#[test]
fn what_a_dead_engine_had_in_its_disk_cache_is_used_on() {
    let fixture = Fixture::new("resume-random-kept");
    let world = World::new(&fixture);
    let content = noise(4, SIZE);
    world.put("file", &content);
    let mount = world.mount_with(&Options { engine: &["--cache=x"], ..Options::default() });
    let file = File::open(mount.path("file")).unwrap();
    for step in 0..200 {
        read(&file, &content, number(2, step)).unwrap();
    }
    mount.kill_engine();
    world.store.forget_requests();
    for step in 0..199 {
        read(&file, &content, number(2, step)).unwrap();
    }
    // The last one was perhaps answered and not kept yet.
    assert!(world.store.count(S3Operation::GetObject) <= 1);
    drop(file);
    mount.unmount();
}
