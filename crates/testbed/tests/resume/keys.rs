//! Keys that change while a mount is used: the store does not accept the old ones from that moment on.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use s3csi_s3_server::store::{Account, Store as _};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::wait::wait_for;

use crate::world::{BUCKET, Options, SupervisedMount, World, noise};

const PROFILE: &str = "--profile=keys";

fn mount<'a>(world: &World<'a>, file: &Path) -> SupervisedMount<'a> {
    let variable = format!("AWS_SHARED_CREDENTIALS_FILE={}", file.display());
    world.mount_with(&Options { engine: &[PROFILE], environment: &[&variable], ..Options::default() })
}

/// As a node does it: never half.
fn write_keys(fixture: &Fixture, account: &Account) -> PathBuf {
    let (new, file) = (fixture.path("keys.new"), fixture.path("keys"));
    let Account { access_key, secret_key } = account;
    let text = format!("[keys]\naws_access_key_id={access_key}\naws_secret_access_key={secret_key}\n");
    fs::write(&new, text).unwrap();
    fs::rename(&new, &file).unwrap();
    file
}

fn rotated(world: &World<'_>, secret: &str) -> Account {
    Account::new(&world.store.account().access_key, secret)
}

#[test]
fn new_keys_are_used_at_once_and_open_files_live_on() {
    let fixture = Fixture::new("resume-keys");
    let world = World::new(&fixture);
    let content = noise(1, 30 << 20);
    world.put("file", &content);
    let mount = mount(&world, &write_keys(&fixture, world.store.account()));
    let mut reader = File::open(mount.path("file")).unwrap();
    let mut read = vec![0; 1000];
    reader.read_exact(&mut read).unwrap();
    let mut writer = File::create(mount.path("written")).unwrap();
    writer.write_all(b"one ").unwrap();

    let new = rotated(&world, "rotated-NeverPrintThis");
    world.store.add_account(&new).unwrap();
    write_keys(&fixture, &new);
    assert_eq!(mount.resumed().0, "replaced: credentials changed");
    reader.read_to_end(&mut read).unwrap();
    assert!(read == content, "other bytes");
    writer.write_all(b"two").unwrap();
    writer.sync_all().unwrap();
    assert_eq!(world.store.object(BUCKET, "written").unwrap(), b"one two"[..]);
    drop((reader, writer));
    mount.unmount();
}

#[test]
fn keys_that_do_not_work_replace_no_engine_and_corrected_ones_do() {
    let fixture = Fixture::new("resume-wrong-keys");
    let world = World::new(&fixture);
    world.put("file", b"content");
    let mount = mount(&world, &write_keys(&fixture, world.store.account()));
    let engine = mount.engine();
    write_keys(&fixture, &rotated(&world, "mistyped-NeverPrintThis"));
    wait_for("the new keys are refused", || mount.mounter().log_contains("engine not replaced"));
    assert!(mount.mounter().log_contains("credentials changed"), "{}", mount.mounter());
    assert_eq!(mount.engines(), [engine]);
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"content");

    let new = rotated(&world, "rotated-NeverPrintThis");
    world.store.add_account(&new).unwrap();
    write_keys(&fixture, &new);
    assert_eq!(mount.resumed().0, "replaced: credentials changed");
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"content");
    mount.unmount();
}
