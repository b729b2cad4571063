//! Command lines that are accepted, and what is said about those that are not.

use std::path::Path;

use super::*;

fn parse(line: &str) -> Result<Arguments, String> {
    let words = std::iter::once("mount-s3").chain(line.split(' ').filter(|it| !it.is_empty())).map(OsString::from);
    Arguments::parse_from_command_line(words).map_err(|refusal| match refusal {
        ParseExit::Help(text) | ParseExit::Invalid(text) => text,
    })
}

fn accept(line: &str) -> Arguments {
    parse(line).unwrap_or_else(|refusal| panic!("{line}: {refusal}"))
}

fn check_refused(line: &str, expected: &str) {
    let refusal = parse(line).expect_err(line);
    assert!(refusal.contains(expected), "{line}: {refusal}");
    assert!(!refusal.contains('\n'), "{line}: not one line: {refusal}");
}

fn check_path(line: &str, bucket: &str, prefix: &str) {
    let path = accept(line).s3_path().unwrap();
    assert_eq!((path.bucket.as_str(), path.prefix.as_str()), (bucket, prefix), "{line}");
}

#[test]
fn the_whole_command_line_of_mount_s3_is_accepted() {
    let arguments = accept(
        "bucket /mnt --prefix p/ --region r --endpoint-url http://127.0.0.1:9000 --force-path-style --transfer-acceleration --dual-stack \
         --requester-pays --bucket-type general-purpose --expected-bucket-owner 111122223333 --storage-class COLD --sse aws:kms \
         --sse-kms-key-id arn:aws:kms:r:1:key/k --upload-checksums crc64nvme --infer-content-type --profile p --read-only --allow-delete \
         --allow-overwrite --incremental-upload --auto-unmount --allow-other --uid 1000 --gid 1000 --dir-mode 0700 --file-mode 600 \
         --maximum-throughput-gbps 25 --max-threads 4 --memory-target 512 --read-part-size 8388608 --write-part-size 16777216 \
         --ca-bundle /ca.pem --bind eth0 --bind eth1 --cache /cache --max-cache-size 100 --cache-xz shared --metadata-ttl indefinite \
         --negative-metadata-ttl 5 --user-agent-prefix s3csi/1 -f -l /logs -d --debug-crt --log-metrics \
         --otlp-endpoint http://collector:4318 --otlp-export-interval 10",
    );
    assert_eq!((arguments.dir_mode, arguments.file_mode), (Some(0o700), Some(0o600)));
    assert_eq!(arguments.bind.as_deref(), Some(&["eth0".to_owned(), "eth1".to_owned()][..]));
    assert_eq!(arguments.memory_target_bytes(), Some(512 << 20));
    assert!(matches!(arguments.metadata_ttl, Some(TimeToLive::Indefinite)));
    accept("bucket /mnt --no-sign-request --allow-root --no-log --part-size 5242880");
}

#[test]
fn what_is_not_said_is_safe() {
    let arguments = accept("bucket /mnt");
    assert_eq!(arguments.rename_mode, RenameMode::Auto);
    assert_eq!((arguments.max_threads, arguments.part_size), (16, 8 << 20));
    assert!(!arguments.allow_delete && !arguments.allow_overwrite && !arguments.allow_other && !arguments.foreground);
    assert_eq!(arguments.upload_checksums, None);
}

#[test]
fn a_bucket_is_a_name_an_address_or_an_arn() {
    check_path("logs /mnt", "logs", "");
    check_path("logs /mnt --prefix a/b/", "logs", "a/b/");
    check_path("s3://logs /mnt", "logs", "");
    check_path("s3://logs/a/ /mnt", "logs", "a/");
    check_path("s3://logs /mnt --prefix a/", "logs", "a/");
    check_path("arn:aws:s3:r:1:accesspoint/ap /mnt", "arn:aws:s3:r:1:accesspoint/ap", "");
    check_refused("s3://logs/a/ /mnt --prefix b/", "contains a prefix already");
    check_refused("s3://logs/a /mnt", "bucket \"s3://logs/a\"");
    check_refused("logs /mnt --prefix a", "--prefix \"a\"");
    check_refused("no /mnt", "3-255 characters");
    check_refused("~/mnt /mnt", "valid name");
    check_refused("s3://arn:aws:s3:::logs /mnt", "bucket");
}

#[test]
fn flags_that_exclude_each_other() {
    check_refused("bucket /mnt --allow-root --allow-other", "cannot be used with");
    check_refused("bucket /mnt --no-sign-request --profile p", "cannot be used with");
    check_refused("bucket /mnt --no-log --debug", "cannot be used with");
    check_refused("bucket /mnt --no-log -l /logs", "cannot be used with");
    check_refused("bucket /mnt --part-size 8388608 --read-part-size 8388608", "cannot be used with");
    check_refused("bucket /mnt --sse AES256 --sse-kms-key-id arn:aws:kms:r:1:key/k", "not with AES256");
    check_refused("bucket /dev/fd/3 --auto-unmount", "--auto-unmount cannot be used with /dev/fd/3");
}

#[test]
fn flags_that_need_another() {
    check_refused("bucket /mnt --max-cache-size 10", "--cache");
    check_refused("bucket /mnt --sse-kms-key-id arn:aws:kms:r:1:key/k", "--sse");
    check_refused("bucket /mnt --otlp-export-interval 10", "--otlp-endpoint");
}

#[test]
fn values_out_of_range() {
    check_refused("bucket /mnt --uid 0", "0 is not in 1..");
    check_refused("bucket /mnt --gid 0", "0 is not in 1..");
    check_refused("bucket /mnt --dir-mode 1777", "octal digits");
    check_refused("bucket /mnt --file-mode 8", "octal digits");
    check_refused("bucket /mnt --memory-target 511", "511 is not in 512..");
    check_refused("bucket /mnt --part-size 1000", "is not in 5242880..");
    check_refused("bucket /mnt --max-threads 0", "0 is not in 1..");
    check_refused("bucket /mnt --maximum-throughput-gbps 0", "0 is not in 1..");
    check_refused("bucket /mnt --endpoint-url store:9000", "must look like https://host");
    check_refused("bucket /mnt --sse none", "possible values");
    check_refused("bucket /mnt --sse aws:kms --sse-kms-key-id k", "ARN");
    check_refused("bucket /mnt --metadata-ttl soon", "TTL must be");
    check_refused("bucket /mnt --rename-mode maybe", "possible values: auto, copy, native, off");
    check_refused("bucket /mnt --foregrund", "a similar argument exists: '--foreground'");
    check_refused("bucket", "<DIRECTORY>");
    check_refused("", "<BUCKET>");
}

#[test]
fn the_form_of_fstab_means_the_same() {
    let arguments =
        accept("bucket /mnt -o rw,_netdev,nofail,x-systemd.automount,allow-other,allow-delete,uid=1000,prefix=a/");
    assert!(arguments.allow_other && arguments.allow_delete && !arguments.read_only);
    assert_eq!((arguments.uid, arguments.prefix.as_deref()), (Some(1000), Some("a/")));
    assert!(accept("bucket /mnt -o ro").read_only);
    assert_eq!(accept("bucket /mnt -o storage-class=a\\,b\\\\c").storage_class.as_deref(), Some("a,b\\c"));
    check_refused("bucket /mnt -o --allow-other", "without dashes");
    check_refused("bucket /mnt -o", "-o needs a list");
    check_refused("bucket /mnt -o nonsense", "nonsense");
    check_refused("bucket /mnt -o a\\", "single backslash");
}

#[test]
fn only_plain_numbers_are_descriptors() {
    for (path, expected) in [
        ("/dev/fd/3", Some(3)),
        ("/dev/fd/-1", None),
        ("/dev/fd/", None),
        ("/dev/fd/3/x", None),
        ("/mnt/fd/3", None),
        ("/dev/fd/+3", None),
    ] {
        assert_eq!(descriptor_of(Path::new(path)), expected, "{path}");
    }
}

#[test]
fn help_and_version_are_no_errors() {
    for line in ["--help", "-h", "--version", "-V"] {
        let words = ["mount-s3", line].map(OsString::from);
        assert!(matches!(Arguments::parse_from_command_line(words), Err(ParseExit::Help(_))), "{line}");
    }
}

#[test]
fn the_definition_is_consistent() {
    use clap::CommandFactory;
    Arguments::command().debug_assert();
}
