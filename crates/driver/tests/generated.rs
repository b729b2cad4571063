//! Generated files equal what their sources produce. `UPDATE=1 cargo test --release -p s3csi-driver --test generated` rewrites them.

use std::path::{Path, PathBuf};

#[test]
fn grpc_code_is_what_the_committed_protos_generate() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let descriptors = protox::compile(["csi.proto", "pluginregistration.proto"], [root.join("proto")]).unwrap();
    let out = tempfile::tempdir().unwrap();
    tonic_prost_build::configure()
        .out_dir(out.path())
        // The prose of the CSI specification is in the proto; repeating it would triple the file.
        .disable_comments(["."])
        .compile_fds(descriptors)
        .unwrap();
    for name in ["csi.v1.rs", "pluginregistration.rs"] {
        let generated = std::fs::read_to_string(out.path().join(name)).unwrap();
        check_file(&root.join("src/csi/generated").join(name), &generated);
    }
}

#[test]
fn the_definition_of_attachments_is_what_the_type_says() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../charts/s3csi/files/attachments.yaml");
    check_file(&file, &s3csi_driver::api::attachment_definition_yaml("s3.csi.scality.com").unwrap());
}

#[test]
fn the_reference_of_metrics_is_what_the_list_says() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/metrics.md");
    check_file(&file, &s3csi_driver::metrics::reference().unwrap());
}

fn check_file(path: &PathBuf, generated: &str) {
    if std::env::var_os("UPDATE").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, generated).unwrap();
    }
    let committed = std::fs::read_to_string(path).unwrap_or_default();
    assert!(committed == generated, "{} is out of date; run: make update-generated", path.display());
}
