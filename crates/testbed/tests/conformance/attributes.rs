//! Mode, owner, time and symbolic links are stored with the object.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{
    DirBuilderExt as _, FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, symlink,
};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::io::Errno;
use s3csi_testbed::wait::{wait_for, wait_until};

use crate::on_both_servers;
use crate::world::{World, check_errno};

on_both_servers!(
    attributes_are_stored,
    attributes_set_while_writing_go_along_with_the_file,
    attributes_survive_a_change_of_the_content,
    symbolic_links_are_stored,
    flags_win_over_stored_attributes,
    attributes_may_be_refused_or_ignored,
    set_user_id_ends_with_a_change,
    directories_have_attributes,
    other_mounts_and_listings_show_attributes,
    changed_attributes_do_not_change_the_time_of_a_file,
    attributes_belong_to_one_file_of_a_name,
    the_time_of_a_written_file_stays,
    opening_a_file_does_not_change_its_time,
    what_a_program_makes_belongs_to_its_user,
    the_time_of_a_directory_changes_with_its_names,
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

fn set_user_id_ends_with_a_change(world: &World) {
    let mount = world.engine().writable().argument("--allow-other").mount();
    let set_ids = || fs::Permissions::from_mode(0o6777);
    for change in ["open(f, 'ab').write(b'x')", "os.truncate(f, 3)"] {
        fs::write(mount.path("file"), "content").unwrap();
        fs::set_permissions(mount.path("file"), set_ids()).unwrap();
        let script = format!("import os; os.setuid(1234); f = 'file'; {change}");
        let python = Command::new("python3").args(["-c", &script]).current_dir(mount.directory()).output().unwrap();
        assert!(python.status.success(), "{}", String::from_utf8_lossy(&python.stderr));
        assert_eq!(mode(&mount.path("file")), 0o777, "{change}");
    }
    fs::set_permissions(mount.path("file"), set_ids()).unwrap();
    fs::write(mount.path("file"), "root may keep them").unwrap();
    assert_eq!(mode(&mount.path("file")), 0o6777);
    std::os::unix::fs::chown(mount.path("file"), Some(77), None).unwrap();
    assert_eq!(mode(&mount.path("file")), 0o777);
    mount.unmount();
}

fn directories_have_attributes(world: &World) {
    let mount = world.mount();
    fs::DirBuilder::new().mode(0o700).create(mount.path("private")).unwrap();
    assert_eq!(mode(&mount.path("private")), 0o700);
    fs::create_dir_all(mount.path("outer/inner")).unwrap();
    fs::set_permissions(mount.path("outer/inner"), fs::Permissions::from_mode(0o750)).unwrap();
    fs::create_dir(mount.path("usual")).unwrap();
    fs::write(mount.path("usual/file"), "content").unwrap();
    mount.unmount();
    let mount = world.mount();
    fs::rename(mount.path("outer"), mount.path("renamed")).unwrap();
    for (name, expected) in [("private", 0o700), ("renamed/inner", 0o750), ("usual", 0o755)] {
        assert_eq!(mode(&mount.path(name)), expected, "{name}");
    }
    fs::remove_dir(mount.path("private")).unwrap();
    fs::create_dir(mount.path("private")).unwrap();
    assert_eq!(mode(&mount.path("private")), 0o755);
    mount.unmount();
}

fn other_mounts_and_listings_show_attributes(world: &World) {
    let (mount, other) = (world.mount(), world.mount());
    fs::create_dir(mount.path("d")).unwrap();
    for (name, mode) in [("a", 0o700), ("b", 0o755), ("c", 0o640)] {
        fs::write(mount.path("d").join(name), name).unwrap();
        fs::set_permissions(mount.path("d").join(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    symlink("a", mount.path("d/l")).unwrap();
    let expected = "-rwx------ a\n-rwxr-xr-x b\n-rw-r----- c\nlrwxrwxrwx l -> a\n";
    for mount in [&mount, &other] {
        let script = "ls -l | tail -n +2 | awk '{print $1, $9, $10, $11}' | sed 's/ *$//'";
        let list = Command::new("sh").args(["-c", script]).current_dir(mount.path("d")).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&list.stdout), expected);
    }
    other.unmount();
    mount.unmount();
}

fn changed_attributes_do_not_change_the_time_of_a_file(world: &World) {
    world.put("file", b"content");
    let mount = world.mount();
    let before = fs::metadata(mount.path("file")).unwrap().modified().unwrap();
    fs::set_permissions(mount.path("file"), fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(fs::metadata(mount.path("file")).unwrap().modified().unwrap(), before);
    mount.unmount();
    let mount = world.mount();
    assert_eq!(fs::metadata(mount.path("file")).unwrap().modified().unwrap(), before);
    fs::write(mount.path("file"), "changed").unwrap();
    assert!(before <= fs::metadata(mount.path("file")).unwrap().modified().unwrap());
    mount.unmount();
}

fn attributes_belong_to_one_file_of_a_name(world: &World) {
    let mount = world.mount();
    let create =
        |mode: u32| OpenOptions::new().write(true).create_new(true).mode(mode).open(mount.path("file")).unwrap();
    let file = create(0o600);
    fs::remove_file(mount.path("file")).unwrap();
    drop(file);
    drop(create(0o644));
    assert_eq!(mode(&mount.path("file")), 0o644);
    mount.unmount();
    let mount = world.mount();
    assert_eq!(mode(&mount.path("file")), 0o644);
    mount.unmount();
}

fn time(path: &Path) -> SystemTime {
    fs::metadata(path).unwrap().modified().unwrap()
}

/// The server, which has another time, is asked at least once.
const LONGER_THAN_CACHED: Duration = Duration::from_millis(300);

/// vim, git, rsync and make compare times.
fn the_time_of_a_written_file_stays(world: &World) {
    let mount = world.mount();
    let before = SystemTime::now();
    let path = mount.path("file");
    let large = vec![7; 9 << 20];
    let changes: [(&str, &dyn Fn()); 5] = [
        ("small", &|| fs::write(&path, "content").unwrap()),
        ("edited", &|| fs::OpenOptions::new().write(true).open(&path).unwrap().write_all_at(b"C", 0).unwrap()),
        ("large", &|| fs::write(&path, &large).unwrap()),
        ("shorter", &|| fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(5).unwrap()),
        ("chmod", &|| fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap()),
    ];
    let mut last = before;
    for (name, change) in changes {
        change();
        let written = time(&path);
        assert!(last <= written && written <= SystemTime::now(), "{name}: {written:?} after {last:?}");
        let has_changed = wait_until(Instant::now() + LONGER_THAN_CACHED, || time(&path) != written);
        assert!(!has_changed, "{name}: {:?} instead of {written:?}", time(&path));
        let listed = fs::read_dir(mount.directory()).unwrap().next().unwrap().unwrap().metadata().unwrap();
        assert_eq!(listed.modified().unwrap(), written, "{name}");
        last = written;
    }
    fs::write(mount.path("other"), "content").unwrap();
    let written = time(&mount.path("other"));
    fs::rename(mount.path("other"), mount.path("renamed")).unwrap();
    assert_eq!(time(&mount.path("renamed")), written);
    world.put("renamed", b"of another client");
    wait_for("the new object is seen", || fs::metadata(mount.path("renamed")).unwrap().len() == 17);
    assert_eq!(fs::metadata(mount.path("renamed")).unwrap().mtime_nsec(), 0);
    mount.unmount();
}

fn opening_a_file_does_not_change_its_time(world: &World) {
    world.put("file", b"content");
    let mount = world.mount();
    let before = time(&mount.path("file"));
    let file = OpenOptions::new().append(true).open(mount.path("file")).unwrap();
    assert_eq!(file.metadata().unwrap().modified().unwrap(), before);
    drop(file);
    assert_eq!(time(&mount.path("file")), before);
    let set = UNIX_EPOCH + Duration::from_secs(1_600_000_000);
    let mut file = OpenOptions::new().append(true).open(mount.path("file")).unwrap();
    file.set_modified(set).unwrap();
    assert_eq!(file.metadata().unwrap().modified().unwrap(), set);
    std::io::Write::write_all(&mut file, b"more").unwrap();
    drop(file);
    assert!(before <= time(&mount.path("file")));
    mount.unmount();
}

fn what_a_program_makes_belongs_to_its_user(world: &World) {
    let mount = world.engine().writable().argument("--allow-other").argument("--dir-mode=0777").mount();
    let script = "import os; os.setgid(2345); os.setuid(1234); f = os.open('file', os.O_CREAT | os.O_WRONLY, 0o600); os.write(f, b'x')\n\
        os.close(f); assert open('file').read() == 'x'; os.mkdir('private', 0o700); os.symlink('file', 'link')";
    let python = Command::new("python3").args(["-c", script]).current_dir(mount.directory()).output().unwrap();
    assert!(python.status.success(), "{}", String::from_utf8_lossy(&python.stderr));
    fs::write(mount.path("of-root"), "content").unwrap();
    mount.unmount();
    let mount = world.mount();
    let owner = |name: &str| {
        let found = fs::symlink_metadata(mount.path(name)).unwrap();
        (found.uid(), found.gid())
    };
    for name in ["file", "private", "link"] {
        assert_eq!(owner(name), (1234, 2345), "{name}");
    }
    assert_eq!(owner("of-root"), (0, 0));
    mount.unmount();
    let mount = world.engine().argument("--uid=77").mount();
    assert_eq!(fs::metadata(mount.path("file")).unwrap().uid(), 77);
    mount.unmount();
}

/// Python's import and file managers list a directory again only if its time has changed.
fn the_time_of_a_directory_changes_with_its_names(world: &World) {
    let mount = world.mount();
    let directory = mount.path("d");
    fs::create_dir(&directory).unwrap();
    fs::create_dir(mount.path("other")).unwrap();
    let changes: [(&str, &dyn Fn()); 5] = [
        ("create", &|| fs::write(directory.join("f"), "content").unwrap()),
        ("mkdir", &|| fs::create_dir(directory.join("sub")).unwrap()),
        ("symlink", &|| symlink("f", directory.join("l")).unwrap()),
        ("rename", &|| fs::rename(directory.join("f"), mount.path("other/f")).unwrap()),
        ("rmdir", &|| fs::remove_dir(directory.join("sub")).unwrap()),
    ];
    let start = SystemTime::now();
    let mut last = start;
    for (name, change) in changes {
        change();
        assert!(last < time(&directory), "{name}");
        last = time(&directory);
    }
    assert!(start < time(&mount.path("other")));
    let set = UNIX_EPOCH + Duration::from_secs(1_600_000_000);
    fs::File::open(&directory).unwrap().set_modified(set).unwrap();
    assert_eq!(time(&directory), set);
    fs::remove_file(directory.join("l")).unwrap();
    assert!(last <= time(&directory));
    mount.unmount();
}
