//! The kernel's pages of files when the engine dies: kept if the object is the same one, dropped if it was replaced.

use std::fs;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::process::Signal;
use s3csi_s3_server::S3Operation;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::wait::wait_for;

use crate::world::{Options, World, noise};

const SIZE: usize = 1 << 20;

#[test]
fn pages_of_an_unchanged_file_are_kept() {
    let fixture = Fixture::new("pages-kept");
    let world = World::new(&fixture);
    let content = noise(1, SIZE);
    world.put("file", &content);
    let mount = world.mount();
    for _ in 0..2 {
        assert!(fs::read(mount.path("file")).unwrap() == content, "other bytes");
    }
    world.store.forget_requests();
    mount.kill_engine();
    assert!(fs::read(mount.path("file")).unwrap() == content, "other bytes");
    assert_eq!(world.store.count(S3Operation::GetObject), 0);
    mount.unmount();
}

/// Neither size nor time tells the two versions apart, only the `ETag`.
#[test]
fn pages_of_a_file_that_was_replaced_within_its_second_are_dropped() {
    for ttl in [&[][..], &["--metadata-ttl=60"]] {
        let fixture = Fixture::new("pages-replaced");
        let world = World::new(&fixture);
        let mount = world.mount_with(&Options { engine: ttl, ..Options::default() });
        let (old, new) = (noise(2, SIZE), noise(3, SIZE));
        let mut name = String::new();
        // Repeated if the second ended between the two.
        for attempt in 0.. {
            name = format!("file-{attempt}");
            wait_for("a second begins", || since_epoch().subsec_millis() < 300);
            let second = since_epoch().as_secs();
            world.put(&name, &old);
            assert!(fs::read(mount.path(&name)).unwrap() == old, "other bytes");
            assert!(fs::read(mount.path(&name)).unwrap() == old, "other bytes");
            mount.signal_engine(Signal::KILL);
            world.put(&name, &new);
            if since_epoch().as_secs() == second {
                break;
            }
            mount.resumed();
        }
        assert!(fs::read(mount.path(&name)).unwrap() == new, "{ttl:?}: the old version");
        mount.resumed();
        mount.unmount();
    }
}

fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap()
}
