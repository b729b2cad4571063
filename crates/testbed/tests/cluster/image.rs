//! The container image: what is in it, and that the same programs always give the same image.

use std::path::Path;
use std::process::Command;

use s3csi_testbed::image;
use serde_json::{Value, json};

/// What README.md promises.
const LARGEST_IMAGE: u64 = 20_000_000;

#[test]
fn the_same_programs_give_the_same_image_and_nothing_else_is_in_it() {
    let directory = tempfile::Builder::new().prefix("s3csi-test-").tempdir_in("/tmp").unwrap();
    let [one, other] = ["one.tar", "other.tar"].map(|it| directory.path().join(it));
    let digest = image::write(&one).unwrap();
    assert!(digest.starts_with("sha256:") && digest.len() == 71, "{digest}");
    assert_eq!(image::write(&other).unwrap(), digest);
    assert!(std::fs::read(&one).unwrap() == std::fs::read(&other).unwrap(), "the archives differ");

    let size = std::fs::metadata(&one).unwrap().len();
    assert!(size < LARGEST_IMAGE, "the documentation promises less than {LARGEST_IMAGE} bytes; the image has {size}");

    let layer = biggest_blob(&one);
    let files = run("sh", &["-c", "tar -xOf \"$0\" \"$1\" | tar -tz", one.to_str().unwrap(), &layer]);
    let mut files: Vec<&str> = files.lines().filter(|it| !it.ends_with('/')).collect();
    files.sort_unstable();
    let expected = [
        "./bin/mount-s3",
        "./bin/s3csi",
        "./bin/s3csi-mounter",
        "./etc/ssl/certs/ca-certificates.crt",
        "./licenses/LICENSE",
        "./licenses/NOTICE",
        "./licenses/third-party.txt",
    ];
    assert_eq!(files, expected);
    check_config(&one);
}

const DOCKERFILE: &str = include_str!("../../../../Dockerfile");

/// The labels of an image say what it is, whether `make image` or the Dockerfile built it.
fn check_config(archive: &Path) {
    let blob = |digest: &Value| {
        let name = format!("blobs/{}", digest.as_str().unwrap().replace(':', "/"));
        serde_json::from_str::<Value>(&run("tar", &["-xOf", archive.to_str().unwrap(), &name])).unwrap()
    };
    let index: Value = serde_json::from_str(&run("tar", &["-xOf", archive.to_str().unwrap(), "index.json"])).unwrap();
    let config = blob(&blob(&index["manifests"][0]["digest"])["config"]["digest"])["config"].clone();
    assert_eq!(config["Entrypoint"], json!(["/bin/s3csi"]));
    assert!(DOCKERFILE.contains(r#"ENTRYPOINT ["/bin/s3csi"]"#));
    assert!(DOCKERFILE.contains(&format!("ARG VERSION={}\n", env!("CARGO_PKG_VERSION"))));
    let labels = config["Labels"].as_object().unwrap();
    assert_eq!(labels["org.opencontainers.image.version"], env!("CARGO_PKG_VERSION"));
    for (name, value) in labels {
        let value = if name.ends_with(".version") { "${VERSION}" } else { value.as_str().unwrap() };
        assert!(DOCKERFILE.contains(&format!("{name}=\"{value}\"")), "the Dockerfile has no label {name}={value}");
    }
    assert_eq!(labels.len(), DOCKERFILE.matches("org.opencontainers.image.").count());
}

/// The name of the layer in the archive.
fn biggest_blob(archive: &Path) -> String {
    let table = run("tar", &["--list", "--verbose", "--file", archive.to_str().unwrap()]);
    let size_and_name = |line: &str| {
        let mut fields = line.split_whitespace();
        Some((fields.nth(2)?.parse::<u64>().ok()?, fields.next_back()?.to_owned()))
    };
    table.lines().filter_map(size_and_name).max().unwrap().1
}

#[track_caller]
fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}
