//! fsx, a program that many file systems are tested with: random operations on one file, compared with a model.

use std::fs;
use std::process::Command;

use s3csi_testbed::environment::tool;

use crate::on_both_servers;
use crate::world::World;

on_both_servers!(random_operations_give_the_bytes_of_a_local_file);

/// A few seconds each. `S3CSI_FSX_OPERATIONS` makes it longer.
const OPERATIONS: &str = "300";
const CONFIG: &str = "flen = 3000000\n\
    [opsize]\nmax = 200000\n\
    [weights]\nclose_open = 2\ntruncate = 5\nfsync = 1\nposix_fallocate = 0\npunch_hole = 0\ncopy_file_range = 0\nsendfile = 3\n";

fn random_operations_give_the_bytes_of_a_local_file(world: &World) {
    let config = world.fixture.path("fsx.toml");
    fs::write(&config, CONFIG).unwrap();
    let artefacts = world.fixture.create_directory("fsx");
    let mount = world.mount();
    let operations = std::env::var("S3CSI_FSX_OPERATIONS").unwrap_or_else(|_| OPERATIONS.to_owned());
    for seed in ["1", "2"] {
        let output = Command::new(tool("fsx").unwrap())
            .args(["-S", seed, "-N", &operations, "-f"])
            .arg(&config)
            .arg("-P")
            .arg(&artefacts)
            .arg(mount.path(&format!("file-{seed}")))
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "seed {seed}: {text}{}", String::from_utf8_lossy(&output.stderr));
    }
    mount.unmount();
}
