//! Mode, owner, time and symbolic links are stored with the object.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, UNIX_EPOCH};

use rustix::io::Errno;

use crate::on_both_servers;
use crate::world::{World, check_errno};

on_both_servers!(
    attributes_are_stored,
    attributes_set_while_writing_go_along_with_the_file,
    attributes_survive_a_change_of_the_content,
    symbolic_links_are_stored,
    flags_win_over_stored_attributes,
    attributes_may_be_refused_or_ignored,
);

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

fn attributes_are_stored(world: &World) {
    world.put("file", b"content");
    let mount = world.mount();
    let time = UNIX_EPOCH + Duration::new(1_577_934_245, 678_901_234);
    fs::set_permissions(mount.path("file"), fs::Permissions::from_mode(0o640)).unwrap();
    fs::File::options().write(true).open(mount.path("file")).unwrap().set_modified(time).unwrap();
    std::os::unix::fs::chown(mount.path("file"), Some(1234), Some(2345)).unwrap();
    world.check_object("file", b"content");
    mount.unmount();
    let mount = world.mount();
    let found = fs::metadata(mount.path("file")).unwrap();
    assert_eq!((mode(&mount.path("file")), found.uid(), found.gid()), (0o640, 1234, 2345));
    assert_eq!(found.modified().unwrap(), time);
    assert_eq!(fs::read(mount.path("file")).unwrap(), b"content");
    mount.unmount();
}

fn attributes_set_while_writing_go_along_with_the_file(world: &World) {
    let mount = world.mount();
    let outside = world.fixture.path("outside");
    fs::write(&outside, "content").unwrap();
    fs::set_permissions(&outside, fs::Permissions::from_mode(0o751)).unwrap();
    let time = UNIX_EPOCH + Duration::from_secs(1_600_000_000);
    fs::File::options().write(true).open(&outside).unwrap().set_modified(time).unwrap();
    assert!(Command::new("cp").arg("-p").arg(&outside).arg(mount.path("file")).status().unwrap().success());
    world.check_object("file", b"content");
    mount.unmount();
    let mount = world.mount();
    assert_eq!(mode(&mount.path("file")), 0o751);
    assert_eq!(fs::metadata(mount.path("file")).unwrap().modified().unwrap(), time);
    mount.unmount();
}

fn attributes_survive_a_change_of_the_content(world: &World) {
    let mount = world.mount();
    fs::write(mount.path("script"), "one").unwrap();
    fs::set_permissions(mount.path("script"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(mount.path("script"), "two").unwrap();
    assert_eq!(mode(&mount.path("script")), 0o755);
    let mut append = fs::File::options().append(true).open(mount.path("script")).unwrap();
    std::io::Write::write_all(&mut append, b" three").unwrap();
    drop(append);
    fs::rename(mount.path("script"), mount.path("renamed")).unwrap();
    mount.unmount();
    let mount = world.mount();
    assert_eq!(mode(&mount.path("renamed")), 0o755);
    world.check_object("renamed", b"two three");
    mount.unmount();
}

fn symbolic_links_are_stored(world: &World) {
    let mount = world.mount();
    fs::write(mount.path("file"), "content").unwrap();
    symlink("file", mount.path("link")).unwrap();
    check_errno(symlink("other", mount.path("link")), &[Errno::EXIST]);
    mount.unmount();
    let mount = world.mount();
    assert!(fs::symlink_metadata(mount.path("link")).unwrap().is_symlink());
    assert_eq!(fs::read_link(mount.path("link")).unwrap(), Path::new("file"));
    assert_eq!(fs::read(mount.path("link")).unwrap(), b"content");
    fs::remove_file(mount.path("link")).unwrap();
    assert_eq!(world.keys(), ["file"]);
    mount.unmount();
}

fn flags_win_over_stored_attributes(world: &World) {
    let mount = world.mount();
    fs::write(mount.path("file"), "content").unwrap();
    fs::set_permissions(mount.path("file"), fs::Permissions::from_mode(0o700)).unwrap();
    mount.unmount();
    let mount = world.engine().argument("--file-mode=0444").argument("--uid=77").mount();
    assert_eq!(mode(&mount.path("file")), 0o444);
    assert_eq!(fs::metadata(mount.path("file")).unwrap().uid(), 77);
    mount.unmount();
}

fn attributes_may_be_refused_or_ignored(world: &World) {
    world.put("file", b"content");
    let executable = || fs::Permissions::from_mode(0o755);
    let mount = world.engine().writable().argument("--metadata=refuse").mount();
    check_errno(fs::set_permissions(mount.path("file"), executable()), &[Errno::PERM]);
    check_errno(symlink("file", mount.path("link")), &[Errno::PERM]);
    mount.unmount();
    let mount = world.engine().writable().argument("--metadata=ignore").mount();
    fs::set_permissions(mount.path("file"), executable()).unwrap();
    assert_eq!(mode(&mount.path("file")), 0o644);
    mount.unmount();
    assert_eq!(world.keys(), ["file"]);
}
