//! Read-only is enforced by the kernel, twice: on the source when the volume is read-only, on the bind when this workload is.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use s3csi_driver::csi::proto::volume_capability::access_mode::Mode;
use s3csi_s3_server::store::Store as _;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::CsiVolume;

use crate::world::{BUCKET, World, volume};

/// Reading works; every way to change something fails with EROFS.
#[track_caller]
fn check_read_only(path: &Path) {
    assert_eq!(fs::read_to_string(path.join("here.txt")).unwrap(), "content");
    let attempts = [
        ("write", fs::write(path.join("new.txt"), "x")),
        ("overwrite", fs::write(path.join("here.txt"), "x")),
        ("make a directory", fs::create_dir(path.join("directory"))),
        ("remove", fs::remove_file(path.join("here.txt"))),
        ("rename", fs::rename(path.join("here.txt"), path.join("there.txt"))),
    ];
    for (what, outcome) in attempts {
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::ReadOnlyFilesystem, "{what} at {}", path.display());
    }
}

fn check_whole_volume_is_read_only(name: &str, change: impl FnOnce(&mut CsiVolume)) {
    let fixture = Fixture::new(name);
    let world = World::start(&fixture);
    world.store.put_object(BUCKET, "here.txt", b"content").unwrap();
    let mut volume = volume(1);
    change(&mut volume);
    let target = world.publish(&volume);
    check_read_only(&target);
    check_read_only(&world.source());
    assert_eq!(world.store.keys(BUCKET), ["here.txt"]);
    world.unpublish(&volume);
    world.check_nothing_left();
}

#[test]
fn a_volume_for_many_readers_is_read_only_at_the_source_already() {
    check_whole_volume_is_read_only("read-only-mode", |it| it.mode = Mode::MultiNodeReaderOnly);
}

#[test]
fn a_volume_with_the_mount_option_is_read_only_at_the_source_already() {
    check_whole_volume_is_read_only("read-only-option", |it| it.mount_options.push("read-only".to_owned()));
}

#[test]
fn a_workload_that_only_reads_cannot_write_while_another_does() {
    let fixture = Fixture::new("read-only-workload");
    let world = World::start(&fixture);
    world.store.put_object(BUCKET, "here.txt", b"content").unwrap();
    let (reader, writer) = (CsiVolume { is_read_only: true, ..volume(1) }, volume(2));
    let (read, written) = (world.publish(&reader), world.publish(&writer));
    world.engine();

    check_read_only(&read);
    fs::write(written.join("new.txt"), "x").unwrap();
    assert_eq!(fs::read_to_string(read.join("new.txt")).unwrap(), "x");

    world.unpublish(&writer);
    check_read_only(&read);
    world.unpublish(&reader);
    world.check_nothing_left();
}

#[test]
fn a_workload_that_may_write_from_now_on_gets_another_bind() {
    let fixture = Fixture::new("read-only-change");
    let world = World::start(&fixture);
    world.store.put_object(BUCKET, "here.txt", b"content").unwrap();
    let reader = CsiVolume { is_read_only: true, ..volume(1) };
    check_read_only(&world.publish(&reader));
    fs::write(world.publish(&volume(1)).join("new.txt"), "x").unwrap();
    fs::remove_file(world.kubelet.target(&reader).join("new.txt")).unwrap();
    check_read_only(&world.publish(&reader));
    world.unpublish(&reader);
    world.check_nothing_left();
}
