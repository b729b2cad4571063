//! Large files that are edited in place have their copies in a volume of the Mountpoint Pod.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use s3csi_s3_server::store::Store as _;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::noise::noise;
use s3csi_testbed::wait::wait_for;

use crate::world::{BUCKET, World, names_in};

const SIZE: usize = 20 << 20;

/// Writes some bytes into the middle of the file, and compares the object.
#[track_caller]
fn edit(world: &World<'_>, path: &Path, content: &mut [u8], bytes: &[u8]) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    file.write_all_at(bytes, 15 << 20).unwrap();
    content[15 << 20..(15 << 20) + bytes.len()].copy_from_slice(bytes);
    drop(file);
    assert!(*world.store.object(BUCKET, "file").unwrap() == *content, "the object has other bytes");
}

#[test]
fn a_large_file_is_edited_before_and_after_its_mount_moved_to_another_pod() {
    let fixture = Fixture::new("pod-staging");
    let world = World::start(&fixture);
    let stages = ["stage-1", "stage-2"].map(|it| world.plugin.make_stage_directory(it).unwrap());
    let arguments = |number: usize| {
        let stage = format!("--stage-dir={}", stages[number].display());
        [stage, "--stage-size-limit=1Gi".to_owned()]
    };
    let start = arguments(0);
    let old = world.run_pod_with(1, &start.each_ref().map(String::as_str));
    world.assign(&old.name, &[1]);
    let mut content = noise(1, SIZE);
    world.store.put_object(BUCKET, "file", &content).unwrap();
    let target = world.publish(&world.volume(1));
    edit(&world, &target.join("file"), &mut content, b"first");

    let next = arguments(1);
    let new = world.run_successor(&old, &next.each_ref().map(String::as_str));
    world.node().wait_for_log("mount moved to another mounter");
    wait_for("the new Mountpoint Pod serves", || world.engines_of(&new).len() == 1 && world.engines().len() == 1);
    edit(&world, &target.join("file"), &mut content, b"second");
    assert_eq!(names_in(&stages[1]), ["source"]);

    world.unpublish(&world.volume(1));
    world.retire(&new);
    world.check_nothing_mounted();
    for stage in &stages {
        assert_eq!(names_in(stage), [""; 0], "{stage:?}");
    }
}
