//! Ordinary programs, run as users run them: the lists of the testbed.

use std::fs;
use std::path::Path;
use std::time::Duration;

use s3csi_testbed::engine::EngineMount;
use s3csi_testbed::programs::{GOING_BACK, ORDINARY, REFUSED, ScriptEnd, run};

use crate::on_both_servers;
use crate::world::World;

on_both_servers!(
    ordinary_programs_work,
    programs_that_go_back_in_large_files_work,
    programs_that_go_back_in_large_files_work_with_staging,
    what_an_object_store_cannot_do_is_refused,
);

/// Each takes a second or two; on a busy machine ten.
const LIMIT: Duration = Duration::from_mins(3);

fn run_in(world: &World, directory: &Path, script: &str) -> ScriptEnd {
    let outside = world.fixture.create_directory(&format!("outside-{}", directory.file_name().unwrap().display()));
    run(script, directory, &outside, LIMIT).unwrap()
}

#[track_caller]
fn check_works(world: &World, mount: EngineMount<'_>, programs: &[(&str, &str)]) {
    let mut failed = Vec::new();
    for (number, (name, script)) in programs.iter().enumerate() {
        let directory = mount.path(&format!("{number}"));
        fs::create_dir(&directory).unwrap();
        match run_in(world, &directory, script) {
            ScriptEnd::Succeeded => {}
            ScriptEnd::Failed { errors } => failed.push(format!("{name}: {errors}")),
            ScriptEnd::TimedOut => failed.push(format!("{name}: did not end within {LIMIT:?}")),
        }
    }
    assert!(failed.is_empty(), "{} of {} fail:\n{}", failed.len(), programs.len(), failed.join("\n"));
    mount.unmount();
}

fn ordinary_programs_work(world: &World) {
    check_works(world, world.mount(), ORDINARY);
}

fn programs_that_go_back_in_large_files_work(world: &World) {
    let stage = world.fixture.create_directory("stage");
    let mount = world.engine().writable().argument("--stage").argument(&stage).mount();
    check_works(world, mount, GOING_BACK);
}

fn programs_that_go_back_in_large_files_work_with_staging(world: &World) {
    let stage = world.fixture.create_directory("stage");
    let mount = world.engine().writable().argument("--writes=staged").argument("--stage").argument(&stage).mount();
    check_works(world, mount, GOING_BACK);
}

fn what_an_object_store_cannot_do_is_refused(world: &World) {
    let mount = world.mount();
    for (number, (name, script, program)) in REFUSED.iter().enumerate() {
        let directory = mount.path(&format!("{number}"));
        fs::create_dir(&directory).unwrap();
        match run_in(world, &directory, script) {
            ScriptEnd::Failed { errors } => assert!(errors.starts_with(program), "{name}: {errors}"),
            other => panic!("{name}: {other:?}"),
        }
    }
    mount.unmount();
}
