//! Extended attributes of users are stored with the object, as s3fs stores them.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use rustix::fs::{XattrFlags, fsetxattr, getxattr, listxattr, removexattr, setxattr};
use rustix::io::Errno;
use s3csi_s3_server::{Config, S3Operation};

use crate::on_both_servers;
use crate::world::{BUCKET, World, in_process_with, noise};

on_both_servers!(
    attributes_are_set_read_listed_and_removed,
    attributes_set_while_writing_go_along_with_the_file,
    attributes_survive_what_happens_to_a_file,
    attributes_of_a_large_file_survive_an_edit,
    attributes_that_s3fs_wrote_are_read,
    directories_have_attributes,
    attributes_have_a_limit,
    other_namespaces_are_not_supported,
    attributes_may_be_refused_or_ignored,
    programs_copy_attributes,
);

/// `{"user.colour":"Ymx1ZQ=="}`
const BLUE: &str = "%7B%22user.colour%22%3A%22Ymx1ZQ%3D%3D%22%7D";

fn set(path: &Path, name: &str, value: &[u8]) -> Result<(), Errno> {
    setxattr(path, name, value, XattrFlags::empty())
}

fn get(path: &Path, name: &str) -> Result<Vec<u8>, Errno> {
    let mut value = vec![0; 4096];
    let length = getxattr(path, name, &mut value[..])?;
    value.truncate(length);
    Ok(value)
}

fn names(path: &Path) -> Vec<String> {
    let mut list = vec![0_u8; 4096];
    let length = listxattr(path, &mut list[..]).unwrap();
    let names = list[..length].split(|it| *it == 0).filter(|it| !it.is_empty());
    names.map(|it| String::from_utf8(it.to_vec()).unwrap()).collect()
}

/// The metadata of an object, as another client sees it.
fn stored(world: &World, key: &str) -> Option<String> {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let head = runtime.block_on(world.client().head_object().bucket(BUCKET).key(key).send()).unwrap();
    head.metadata().and_then(|it| it.get("xattr").cloned())
}

fn attributes_are_set_read_listed_and_removed(world: &World) {
    world.put("file", b"content");
    let mount = world.mount();
    let file = mount.path("file");
    assert_eq!((names(&file), get(&file, "user.colour")), (vec![], Err(Errno::NODATA)));
    set(&file, "user.colour", b"blue").unwrap();
    assert_eq!(get(&file, "user.colour").unwrap(), b"blue");
    assert_eq!(getxattr(&file, "user.colour", &mut [0_u8; 2][..]), Err(Errno::RANGE));
    assert_eq!(stored(world, "file").as_deref(), Some(BLUE));
    set(&file, "user.binary", &[0, 255, b'"']).unwrap();
    set(&file, "user.empty", b"").unwrap();
    assert_eq!(setxattr(&file, "user.colour", b"red", XattrFlags::CREATE), Err(Errno::EXIST));
    assert_eq!(setxattr(&file, "user.size", b"big", XattrFlags::REPLACE), Err(Errno::NODATA));
    mount.unmount();
    let mount = world.mount();
    let file = mount.path("file");
    assert_eq!(names(&file), ["user.binary", "user.colour", "user.empty"]);
    assert_eq!((get(&file, "user.binary").unwrap(), get(&file, "user.empty").unwrap()), (vec![0, 255, b'"'], vec![]));
    removexattr(&file, "user.binary").unwrap();
    removexattr(&file, "user.empty").unwrap();
    assert_eq!(removexattr(&file, "user.empty"), Err(Errno::NODATA));
    assert_eq!(stored(world, "file").as_deref(), Some(BLUE));
    removexattr(&file, "user.colour").unwrap();
    assert_eq!(stored(world, "file"), None);
    world.check_object("file", b"content");
    mount.unmount();
}

fn attributes_set_while_writing_go_along_with_the_file(world: &World) {
    let mount = world.mount();
    for (name, size) in [("small", 10), ("large", 9 << 20)] {
        let content = noise(1, size);
        let mut file = File::create(mount.path(name)).unwrap();
        fsetxattr(&file, "user.colour", b"blue", XattrFlags::empty()).unwrap();
        assert_eq!(get(&mount.path(name), "user.colour").unwrap(), b"blue");
        file.write_all(&content).unwrap();
        file.set_permissions(fs::Permissions::from_mode(0o600)).unwrap();
        drop(file);
        world.check_object(name, &content);
        assert_eq!(stored(world, name).as_deref(), Some(BLUE), "{name}");
        assert_eq!(fs::metadata(mount.path(name)).unwrap().permissions().mode() & 0o777, 0o600);
    }
    mount.unmount();
}

fn attributes_survive_what_happens_to_a_file(world: &World) {
    world.put("file", b"content");
    let mount = world.mount();
    let file = mount.path("file");
    set(&file, "user.colour", b"blue").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o700)).unwrap();
    OpenOptions::new().append(true).open(&file).unwrap().write_all(b", more").unwrap();
    world.check_object("file", b"content, more");
    assert_eq!(stored(world, "file").as_deref(), Some(BLUE));
    fs::write(&file, "replaced").unwrap();
    assert_eq!(stored(world, "file").as_deref(), Some(BLUE));
    let renamed = mount.path("renamed");
    fs::rename(&file, &renamed).unwrap();
    assert_eq!(get(&renamed, "user.colour").unwrap(), b"blue");
    assert_eq!(stored(world, "renamed").as_deref(), Some(BLUE));
    fs::create_dir(mount.path("directory")).unwrap();
    fs::rename(&renamed, mount.path("directory/file")).unwrap();
    fs::rename(mount.path("directory"), mount.path("moved")).unwrap();
    assert_eq!(get(&mount.path("moved/file"), "user.colour").unwrap(), b"blue");
    // A new file of that name is another file.
    fs::remove_file(mount.path("moved/file")).unwrap();
    fs::write(mount.path("moved/file"), "new").unwrap();
    assert_eq!(names(&mount.path("moved/file")), Vec::<String>::new());
    assert_eq!(stored(world, "moved/file"), None);
    mount.unmount();
}

fn attributes_of_a_large_file_survive_an_edit(world: &World) {
    world.put("file", &noise(2, 20 << 20));
    let mount = world.mount();
    set(&mount.path("file"), "user.colour", b"blue").unwrap();
    let mut file = OpenOptions::new().append(true).open(mount.path("file")).unwrap();
    file.write_all(b"more").unwrap();
    fsetxattr(&file, "user.size", b"big", XattrFlags::empty()).unwrap();
    drop(file);
    assert_eq!(fs::metadata(mount.path("file")).unwrap().len(), (20 << 20) + 4);
    mount.unmount();
    let mount = world.mount();
    assert_eq!(names(&mount.path("file")), ["user.colour", "user.size"]);
    mount.unmount();
}

fn attributes_that_s3fs_wrote_are_read(world: &World) {
    let text = "%7B%22user.colour%22%3A%22Ymx1ZQ%3D%3D%22%2C%22system.posix_acl_access%22%3A%22AgAAAA%3D%3D%22%7D";
    let runtime = tokio::runtime::Runtime::new().unwrap();
    for (key, text) in [("file", text), ("odd", "of another program")] {
        let put = world.client().put_object().bucket(BUCKET).key(key).metadata("xattr", text);
        runtime.block_on(put.body(b"content".to_vec().into()).send()).unwrap();
    }
    let mount = world.mount();
    assert_eq!(names(&mount.path("file")), ["user.colour"]);
    assert_eq!(get(&mount.path("file"), "user.colour").unwrap(), b"blue");
    set(&mount.path("file"), "user.colour", b"red").unwrap();
    let kept = stored(world, "file").unwrap();
    assert!(kept.contains("system.posix_acl_access") && kept.contains("AgAAAA"), "{kept}");
    // What is not understood is not replaced.
    assert_eq!((names(&mount.path("odd")), set(&mount.path("odd"), "user.a", b"b")), (vec![], Err(Errno::IO)));
    assert_eq!(stored(world, "odd").as_deref(), Some("of another program"));
    mount.unmount();
}

fn directories_have_attributes(world: &World) {
    let mount = world.mount();
    fs::create_dir(mount.path("directory")).unwrap();
    set(&mount.path("directory"), "user.colour", b"blue").unwrap();
    mount.unmount();
    let mount = world.mount();
    assert_eq!(get(&mount.path("directory"), "user.colour").unwrap(), b"blue");
    set(&mount.path("directory"), "user.size", b"big").unwrap();
    assert_eq!(names(&mount.path("directory")), ["user.colour", "user.size"]);
    assert_eq!(set(mount.directory(), "user.colour", b"blue"), Err(Errno::NOTSUP));
    assert_eq!(names(mount.directory()), Vec::<String>::new());
    mount.unmount();
}

fn attributes_have_a_limit(world: &World) {
    world.put("file", b"content");
    let mount = world.mount();
    let file = mount.path("file");
    set(&file, "user.colour", b"blue").unwrap();
    assert_eq!(set(&file, "user.long", &[b'x'; 3000]), Err(Errno::NOSPC));
    set(&file, "user.long", &[b'x'; 1000]).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o700)).unwrap();
    std::os::unix::fs::chown(&file, Some(1234), Some(2345)).unwrap();
    assert_eq!(set(&file, "user.more", &[b'x'; 1000]), Err(Errno::NOSPC));
    assert_eq!(names(&file), ["user.colour", "user.long"]);
    mount.unmount();
}

fn other_namespaces_are_not_supported(world: &World) {
    world.put("file", b"content");
    let mount = world.mount();
    for name in ["security.other", "trusted.overlay.opaque", "system.posix_acl_access"] {
        assert_eq!(get(&mount.path("file"), name), Err(Errno::NOTSUP), "{name}");
        assert_eq!(set(&mount.path("file"), name, b"value"), Err(Errno::NOTSUP), "{name}");
    }
    set(&mount.path("file"), "user.colour", b"blue").unwrap();
    mount.unmount();
}

fn attributes_may_be_refused_or_ignored(world: &World) {
    world.put("file", b"content");
    let mount = world.engine().writable().argument("--metadata=refuse").mount();
    assert_eq!(set(&mount.path("file"), "user.colour", b"blue"), Err(Errno::NOTSUP));
    assert_eq!(get(&mount.path("file"), "user.colour"), Err(Errno::NOTSUP));
    mount.unmount();
    let mount = world.engine().writable().argument("--metadata=ignore").mount();
    set(&mount.path("file"), "user.colour", b"blue").unwrap();
    assert_eq!((get(&mount.path("file"), "user.colour"), names(&mount.path("file"))), (Err(Errno::NODATA), vec![]));
    mount.unmount();
    let mount = world.engine().mount();
    assert_eq!(set(&mount.path("file"), "user.colour", b"blue"), Err(Errno::PERM));
    mount.unmount();
    assert_eq!(stored(world, "file"), None);
}

fn programs_copy_attributes(world: &World) {
    world.put("file", b"content");
    let mount = world.mount();
    let script = "setfattr -n user.colour -v blue file; getfattr --only-values -n user.colour file | grep -qx blue; \
        cp -a file copy; getfattr --only-values -n user.colour copy | grep -qx blue; \
        tar --xattrs -cf archive.tar copy; rm copy; tar --xattrs -xf archive.tar; \
        getfattr --only-values -n user.colour copy | grep -qx blue; \
        rsync -aX copy synced; getfattr --only-values -n user.colour synced | grep -qx blue; \
        setfattr -x user.colour synced; test -z \"$(getfattr synced)\"";
    let mut shell = Command::new("bash");
    let output = shell.args(["-euo", "pipefail", "-c", script]).current_dir(mount.directory()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    mount.unmount();
}

#[test]
fn known_attributes_cost_no_request() {
    let world = in_process_with("known-xattrs", Config::default());
    world.put("file", b"content");
    let mount = world.engine().writable().argument("--metadata-ttl=60").mount();
    let file = mount.path("file");
    set(&file, "user.colour", b"blue").unwrap();
    assert_eq!(get(&file, "user.colour").unwrap(), b"blue");
    world.store.forget_requests();
    for _ in 0..10 {
        assert_eq!(get(&file, "user.colour").unwrap(), b"blue");
        assert_eq!(names(&file), ["user.colour"]);
        assert_eq!(get(&file, "security.capability"), Err(Errno::NOTSUP));
        assert_eq!(get(&file, "user.size"), Err(Errno::NODATA));
    }
    assert_eq!(world.store.requests().len(), 0);
    fs::write(mount.path("new"), "content").unwrap();
    world.store.forget_requests();
    assert_eq!(names(&mount.path("new")), Vec::<String>::new());
    assert_eq!(world.store.count(S3Operation::HeadObject), 0);
    mount.unmount();
}
