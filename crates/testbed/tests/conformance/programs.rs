//! Ordinary programs, run as users run them: the lists of the testbed.

use std::fs;
use std::path::Path;
use std::process::Output;

use s3csi_testbed::engine::EngineMount;
use s3csi_testbed::programs::{GOING_BACK, ORDINARY, REFUSED, run};

use crate::on_both_servers;
use crate::world::World;

on_both_servers!(
    ordinary_programs_work,
    programs_that_go_back_in_large_files_work,
    programs_that_go_back_in_large_files_work_with_staging,
    what_an_object_store_cannot_do_is_refused,
);

fn run_in(world: &World, directory: &Path, script: &str) -> Output {
    let outside = world.fixture.create_directory(&format!("outside-{}", directory.file_name().unwrap().display()));
    run(script, directory, &outside).unwrap()
}

#[track_caller]
fn check_works(world: &World, mount: EngineMount<'_>, programs: &[(&str, &str)]) {
    let mut failed = Vec::new();
    for (number, (name, script)) in programs.iter().enumerate() {
        let directory = mount.path(&format!("{number}"));
        fs::create_dir(&directory).unwrap();
        let output = run_in(world, &directory, script);
        if !output.status.success() {
            failed.push(format!("{name}: {}", String::from_utf8_lossy(&output.stderr)));
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
        let output = run_in(world, &directory, script);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && errors.starts_with(program), "{name}: {errors}");
    }
    mount.unmount();
}
