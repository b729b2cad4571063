//! The disk cache (`--cache`): what was read is read from it, it keeps its limit, and whatever happens to its directory, readers
//! get the right bytes.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags, mount as mount_file_system, unmount};
use s3csi_s3_server::{Config, S3Operation, S3Server};
use s3csi_testbed::engine::EngineMount;
use s3csi_testbed::wait::wait_for;

use crate::world::{World, in_process_with, noise};

const SIZE: usize = 5 << 20;

fn world(rule: &str) -> World<S3Server> {
    in_process_with(rule, Config::default())
}

fn mount<'a>(world: &'a World<S3Server>, cache: &Path, arguments: &[&str]) -> EngineMount<'a> {
    let engine = world.engine().writable().argument("--cache").argument(cache);
    arguments.iter().fold(engine, |engine, it| engine.argument(*it)).mount()
}

fn drop_pages(path: &Path) {
    rustix::fs::fadvise(File::open(path).unwrap(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

/// Reads the whole file, past the page cache. Answers how often the server was asked for content.
#[track_caller]
fn gets(world: &World<S3Server>, path: &Path, expected: &[u8]) -> usize {
    drop_pages(path);
    world.store.forget_requests();
    assert!(fs::read(path).unwrap() == expected, "other bytes");
    world.store.count(S3Operation::GetObject)
}

/// What the files below a directory take on disk.
fn usage(directory: &Path) -> u64 {
    let Ok(metadata) = fs::symlink_metadata(directory) else { return 0 };
    let own = metadata.blocks() * 512;
    let below = fs::read_dir(directory).into_iter().flatten().flatten();
    own + below.map(|it| usage(&it.path())).sum::<u64>()
}

/// The files of the cache.
fn cache_files(cache: &Path) -> Vec<PathBuf> {
    let directories = fs::read_dir(cache.join("mountpoint-cache")).unwrap().flatten();
    directories.flat_map(|it| fs::read_dir(it.path()).unwrap().flatten()).map(|it| it.path()).collect()
}

#[test]
fn what_was_read_in_order_or_at_random_is_read_from_disk() {
    let world = world("cached");
    let cache = world.fixture.create_directory("cache");
    let content = noise(1, SIZE + 777);
    world.put("file", &content);
    let mount = mount(&world, &cache, &[]);
    assert_ne!(gets(&world, &mount.path("file"), &content), 0);
    wait_for("the cache has the file", || gets(&world, &mount.path("file"), &content) == 0);
    let file = File::open(mount.path("file")).unwrap();
    for start in [SIZE + 700, 4_000_000, 17, 2_500_001] {
        drop_pages(&mount.path("file"));
        let expected = &content[start..content.len().min(start + 5000)];
        let mut found = vec![0; expected.len()];
        file.read_exact_at(&mut found, start as u64).unwrap();
        assert!(found == expected, "other bytes at {start}");
    }
    assert_eq!(world.store.count(S3Operation::GetObject), 0);
    drop(file);
    mount.unmount();
    assert_eq!(usage(&cache.join("mountpoint-cache")), 0, "it is removed with the mount");
}

#[test]
fn a_file_that_others_replaced_is_fetched_again() {
    let world = world("cached-replaced");
    let cache = world.fixture.create_directory("cache");
    let mount = mount(&world, &cache, &["--metadata-ttl=minimal"]);
    for seed in 2..5 {
        let content = noise(seed, SIZE);
        world.put("file", &content);
        assert_ne!(gets(&world, &mount.path("file"), &content), 0);
        wait_for("the cache has the file", || gets(&world, &mount.path("file"), &content) == 0);
    }
    mount.unmount();
}

#[test]
fn the_limit_is_kept_and_counts_what_is_there_already() {
    let world = world("cached-limit");
    let cache = world.fixture.create_directory("cache");
    let contents: Vec<Vec<u8>> = (10..16).map(|seed| noise(seed, SIZE)).collect();
    let name = |number: usize| format!("file-{number}");
    for (number, content) in contents.iter().enumerate() {
        world.put(&name(number), content);
    }
    // Headers and directories come on top.
    let most = (12 << 20) + (1 << 20);
    for round in 0..2 {
        let engine = world.engine().argument("--cache").argument(&cache).argument("--max-cache-size=12");
        // As after a move to the next engine of the mount.
        let mount = engine.environment("UNSTABLE_MOUNTPOINT_DISABLE_CACHE_CLEANUP", "1").mount();
        for (number, content) in contents.iter().enumerate() {
            assert!(fs::read(mount.path(&name(number))).unwrap() == *content, "other bytes");
            let used = usage(&cache);
            assert!(used <= most, "{used} bytes in round {round}");
        }
        let last = contents.len() - 1;
        wait_for("the last file is there", || gets(&world, &mount.path(&name(last)), &contents[last]) == 0);
        assert_ne!(gets(&world, &mount.path(&name(0)), &contents[0]), 0);
        mount.unmount();
    }
    assert_ne!(cache_files(&cache).len(), 0);
}

#[test]
fn a_file_larger_than_the_limit_is_cached_in_part() {
    let world = world("cached-large");
    let cache = world.fixture.create_directory("cache");
    let content = noise(17, 4 * SIZE);
    world.put("file", &content);
    let mount = mount(&world, &cache, &["--max-cache-size=5"]);
    for _ in 0..3 {
        assert_ne!(gets(&world, &mount.path("file"), &content), 0);
        let used = usage(&cache);
        assert!(used <= (5 << 20) + (1 << 20), "{used} bytes");
    }
    mount.unmount();
}

#[test]
fn a_full_disk_is_not_noticed_by_readers() {
    let world = world("cached-full");
    let disk = world.fixture.create_directory("disk");
    mount_file_system("tmpfs", &disk, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, Some(c"size=2m")).unwrap();
    let content = noise(18, SIZE);
    world.put("file", &content);
    for limit in [&[][..], &["--max-cache-size=100"]] {
        let mount = mount(&world, &disk, limit);
        for _ in 0..3 {
            assert_ne!(gets(&world, &mount.path("file"), &content), 0, "{limit:?}");
        }
        mount.unmount();
    }
    unmount(&disk, UnmountFlags::empty()).unwrap();
}

#[test]
fn a_directory_that_vanishes_is_made_again() {
    let world = world("cached-vanished");
    let cache = world.fixture.create_directory("cache");
    let content = noise(19, SIZE);
    let mount = mount(&world, &cache, &[]);
    for name in ["a", "b"] {
        world.put(name, &content);
        wait_for("the cache has the file", || gets(&world, &mount.path(name), &content) == 0);
        for directory in fs::read_dir(cache.join("mountpoint-cache")).unwrap().flatten() {
            fs::remove_dir_all(directory.path()).unwrap();
        }
    }
    wait_for("the cache has the file again", || gets(&world, &mount.path("a"), &content) == 0);
    mount.unmount();
}

#[test]
fn files_that_another_program_changed_are_not_believed() {
    let world = world("cached-changed");
    let cache = world.fixture.create_directory("cache");
    let content = noise(20, SIZE);
    world.put("file", &content);
    let mount = mount(&world, &cache, &[]);
    let changes: [fn(&File, &Path); 3] = [
        |file, _| file.set_len(1 << 20).unwrap(),
        |file, _| file.set_len(0).unwrap(),
        |_, path| fs::write(path, "something else").unwrap(),
    ];
    for change in changes {
        wait_for("the cache has the file", || gets(&world, &mount.path("file"), &content) == 0);
        let files = cache_files(&cache);
        assert_eq!(files.len(), 1);
        change(&File::options().write(true).open(&files[0]).unwrap(), &files[0]);
        gets(&world, &mount.path("file"), &content);
    }
    mount.unmount();
}

#[test]
fn the_cache_is_private() {
    let world = world("cached-private");
    let cache = world.fixture.create_directory("cache");
    let content = noise(22, SIZE);
    world.put("file", &content);
    let mount = mount(&world, &cache, &[]);
    gets(&world, &mount.path("file"), &content);
    wait_for("there is a file", || !cache_files(&cache).is_empty());
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!(mode(&cache.join("mountpoint-cache")), 0o700);
    for file in cache_files(&cache) {
        assert_eq!((mode(file.parent().unwrap()), mode(&file)), (0o700, 0o600));
    }
    mount.unmount();
}
