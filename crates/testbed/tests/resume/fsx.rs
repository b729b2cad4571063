//! fsx, random operations on one file that are compared with a model, while engines are killed.

use std::time::Duration;

use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::fsx;

use crate::stress::wait_a_moment;
use crate::world::{Options, World};

/// How long an engine may work: some hundred operations.
const PAUSE: Duration = Duration::from_millis(1500);

#[test]
fn random_operations_give_the_bytes_of_a_local_file_while_engines_die() {
    let fixture = Fixture::new("resume-fsx");
    let world = World::new(&fixture);
    let stage = format!("--stage={}", fixture.create_directory("stage").display());
    let kept = world.mount_with(&Options { engine: &[&stage], ..Options::default() });
    let kills = std::thread::scope(|scope| {
        let working = scope.spawn(|| fsx::check(&fixture, &kept.directory));
        let mut kills = 0_u64;
        while !working.is_finished() {
            // Different moments, the same ones in each run.
            wait_a_moment(PAUSE + Duration::from_millis(kills * 7919 % 900));
            kept.kill_engine();
            kills += 1;
        }
        working.join().unwrap();
        kills
    });
    println!("{kills} engines were killed");
    assert!(kills > 1, "no engine was killed meanwhile");
    kept.unmount();
}
