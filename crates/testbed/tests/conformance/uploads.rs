//! Every size with every checksum setting, and how many requests an upload costs.

use std::fs::{self, File};

use s3csi_s3_server::{Config, S3Operation};

use crate::on_both_servers;
use crate::world::{World, in_process_with, noise};

const MEBIBYTE: usize = 1024 * 1024;

/// Around the border between one request and a multipart upload, and more than one part.
const SIZES: [usize; 6] = [1, 4096, 5 * MEBIBYTE - 1, 5 * MEBIBYTE, 5 * MEBIBYTE + 1, 20 * MEBIBYTE];

on_both_servers!(
    every_size_arrives_with_crc32c,
    every_size_arrives_with_crc64nvme,
    every_size_arrives_without_checksums,
    an_empty_file_is_stored_with_crc32c,
    an_empty_file_is_stored_with_crc64nvme,
    an_empty_file_is_stored_without_checksums,
);

fn every_size_arrives_with_crc32c(world: &World) {
    check_sizes(world, "crc32c");
}

fn every_size_arrives_with_crc64nvme(world: &World) {
    check_sizes(world, "crc64nvme");
}

fn every_size_arrives_without_checksums(world: &World) {
    check_sizes(world, "off");
}

fn an_empty_file_is_stored_with_crc32c(world: &World) {
    check_empty(world, "crc32c");
}

fn an_empty_file_is_stored_with_crc64nvme(world: &World) {
    check_empty(world, "crc64nvme");
}

fn an_empty_file_is_stored_without_checksums(world: &World) {
    check_empty(world, "off");
}

#[track_caller]
fn check_sizes(world: &World, checksums: &str) {
    let mount = world.engine().writable().argument(format!("--upload-checksums={checksums}")).mount();
    for size in SIZES {
        let name = format!("{size}-bytes");
        let content = noise(size as u64, size);
        fs::write(mount.path(&name), &content).unwrap_or_else(|error| panic!("{name}: {error}"));
        world.check_object(&name, &content);
        assert!(fs::read(mount.path(&name)).unwrap() == content, "{name} is read differently");
    }
    mount.unmount();
}

#[track_caller]
fn check_empty(world: &World, checksums: &str) {
    let mount = world.engine().writable().argument(format!("--upload-checksums={checksums}")).mount();
    drop(File::create(mount.path("empty")).unwrap());
    world.check_object_soon("empty", b"");
    assert_eq!(fs::metadata(mount.path("empty")).unwrap().len(), 0);
    world.put("full", b"content");
    drop(File::create(mount.path("full")).unwrap());
    world.check_object_soon("full", b"");
    mount.unmount();
}

#[test]
fn a_small_file_costs_exactly_one_put() {
    check_requests(&[1, 4096, 5 * MEBIBYTE], [S3Operation::PutObject].as_slice());
}

#[test]
fn a_file_above_the_limit_is_a_multipart_upload() {
    let expected = [S3Operation::CreateMultipartUpload, S3Operation::UploadPart, S3Operation::CompleteMultipartUpload];
    check_requests(&[5 * MEBIBYTE + 1, 8 * MEBIBYTE], &expected);
}

#[track_caller]
fn check_requests(sizes: &[usize], expected: &[S3Operation]) {
    let world = in_process_with("requests", Config::default());
    let mount = world.mount();
    for size in sizes {
        world.store.forget_requests();
        fs::write(mount.path("file"), noise(1, *size)).unwrap();
        let requests = world.store.requests().into_iter().map(|it| it.operation);
        let is_look = |it: &S3Operation| matches!(it, S3Operation::HeadObject | S3Operation::ListObjectsV2);
        let writes: Vec<S3Operation> = requests.filter(|it| !is_look(it)).collect();
        assert_eq!(writes, expected, "{size} bytes");
    }
    mount.unmount();
}

#[test]
fn a_small_upload_carries_the_checksum_that_was_asked_for() {
    for (checksums, expected) in [("crc32c", Some("crc32c")), ("crc64nvme", Some("crc64nvme")), ("off", None)] {
        let world = in_process_with("checksum", Config::default());
        let mount = world.engine().writable().argument(format!("--upload-checksums={checksums}")).mount();
        fs::write(mount.path("file"), "content").unwrap();
        assert_eq!(world.store.checksum(crate::world::BUCKET, "file"), expected, "--upload-checksums={checksums}");
        mount.unmount();
    }
}
