//! Mounts of version 1 of the driver: kept as they are, with keys that go on being refreshed.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, SystemTime};

use s3csi_s3_server::store::{Account, Store as _};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::systemd::beside_systemd;
use s3csi_testbed::wait::wait_for;

use crate::world::{BUCKET, World, mount_units, names_in, only_unit, volume};

const UNIT: &str = "mount-s3-v1.2.0-a1b2c3d4-e5f6-7890-abcd-ef1234567890.service";

/// What version 1 wrote for a volume, and the unit it started.
struct LegacyMount {
    target: PathBuf,
    config: PathBuf,
    credentials: PathBuf,
    profile: String,
}

impl LegacyMount {
    fn write(world: &World<'_>) -> Self {
        let volume = volume(1);
        let profile = format!("{}-{}-s3-csi", volume.pod_uid, volume.handle);
        let directory = world.plugin.credentials().parent().unwrap().to_owned();
        let file = |end: &str| directory.join(format!("{profile}-{end}"));
        let (config, credentials) = (file("config"), file("credentials"));
        fs::write(&config, format!("[profile {profile}]\n")).unwrap();
        fs::write(&credentials, text(&profile, world.store.account())).unwrap();
        Self { target: world.kubelet.target(&volume), config, credentials, profile }
    }

    fn mount(&self, world: &World<'_>) {
        fs::create_dir_all(&self.target).unwrap();
        let environment = [
            format!("AWS_ENDPOINT_URL={}", world.store.endpoint()),
            format!("AWS_REGION={}", world.store.region()),
            format!("AWS_PROFILE={}", self.profile),
            format!("AWS_CONFIG_FILE={}", self.config.display()),
            format!("AWS_SHARED_CREDENTIALS_FILE={}", self.credentials.display()),
        ];
        let mut run = Command::new("systemd-run");
        run.arg(format!("--unit={UNIT}")).args(["--quiet", "--property=Type=forking"]);
        run.args(environment.map(|it| format!("--setenv={it}")));
        run.arg(world.plugin.for_the_mounter("mount-s3").unwrap());
        run.args(["--allow-delete", "--allow-overwrite", "--force-path-style", BUCKET]).arg(&self.target);
        assert!(run.status().unwrap().success());
    }
}

fn text(profile: &str, account: &Account) -> String {
    let Account { access_key, secret_key } = account;
    format!("[{profile}]\naws_access_key_id={access_key}\naws_secret_access_key={secret_key}\n")
}

#[test]
fn credential_refresh_rewrites_the_files_of_version_1() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-v1");
        let mut world = World::prepare_beside_systemd(&fixture);
        let old = LegacyMount::write(&world);
        old.mount(&world);
        let rotated = Account::named("rotated");
        world.plugin.set_account(Some(rotated.clone()));
        world.start_node();
        for _ in 0..2 {
            world.publish(&volume(1));
        }
        assert_eq!(only_unit(), UNIT, "the mount is kept");
        assert_eq!(fs::read_to_string(&old.credentials).unwrap(), text(&old.profile, &rotated));
        assert_eq!(fs::read_to_string(&old.config).unwrap(), format!("[profile {}]\n", old.profile));
        assert_eq!(names_in(&world.plugin.credentials()), [""; 0], "files that no engine reads");

        world.unpublish(&volume(1));
        assert!(!old.credentials.exists() && !old.config.exists(), "keys go with their mount");
        world.check_nothing_left();
    });
}

#[test]
fn a_pod_of_version_1_gets_a_unit_of_ours_with_its_next_start() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-v1-next");
        let mut world = World::prepare_beside_systemd(&fixture);
        let old = LegacyMount::write(&world);
        old.mount(&world);
        world.start_node();
        world.check_serves(&world.publish(&volume(1)));
        world.unpublish(&volume(1));
        assert_eq!(mount_units(), [""; 0]);
        world.check_serves(&world.publish(&volume(1)));
        assert_ne!(only_unit(), UNIT);
        world.unpublish(&volume(1));
        world.check_nothing_left();
    });
}

#[test]
fn keys_of_version_1_that_no_unit_uses_are_removed() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-v1-keys");
        let mut world = World::prepare_beside_systemd(&fixture);
        let old = LegacyMount::write(&world);
        let yesterday = SystemTime::now() - Duration::from_hours(24);
        for file in [&old.config, &old.credentials] {
            fs::File::options().write(true).open(file).unwrap().set_modified(yesterday).unwrap();
        }
        world.start_node();
        wait_for("the keys are removed", || !old.credentials.exists() && !old.config.exists());
        world.node().wait_for_log("LeftoverCredentialsRemoved");
    });
}
