//! The node plugin keeps nothing of what it has served.

use std::fs;

use rustix::process::Pid;
use s3csi_testbed::environment;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::processes::resident_kilobytes;
use s3csi_testbed::wait::wait_for;

use crate::world::{World, volume};

/// Calls after which every cache and pool of the process has its size.
const FIRST: u32 = 10;

/// In every run; `make soak` asks for a thousand.
const USUAL: u32 = 20;

/// What an allocator may keep of freed memory.
const TOLERANCE_KILOBYTES: u64 = 8 << 10;

fn descriptors(process: Pid) -> usize {
    fs::read_dir(format!("/proc/{process}/fd")).unwrap().count()
}

#[test]
fn descriptors_and_memory_are_flat_over_many_publishes() {
    let fixture = Fixture::new("flat-publishes");
    let world = World::start(&fixture);
    let node = world.node().pid();
    let publish_and_unpublish = |count: u32| {
        for number in 0..count {
            let target = world.publish(&volume(number % 7));
            fs::write(target.join("file"), number.to_string()).unwrap();
            world.unpublish(&volume(number % 7));
        }
        world.check_nothing_left();
    };
    publish_and_unpublish(FIRST);
    let (open, memory) = (descriptors(node), resident_kilobytes(node));
    let count = environment::soak_publishes().unwrap_or(USUAL);
    publish_and_unpublish(count);
    wait_for("no descriptor is left", || descriptors(node) <= open);
    let now = resident_kilobytes(node);
    println!("{count} publishes: {memory} KiB before, {now} KiB after; {open} descriptors");
    assert!(now < memory + TOLERANCE_KILOBYTES, "{memory} KiB became {now} KiB");
}
