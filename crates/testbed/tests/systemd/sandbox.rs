//! The sandbox of engines: what a store that takes over an engine could still do.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;

use s3csi_s3_server::store::Store as _;
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::noise::noise;
use s3csi_testbed::systemd::{beside_systemd, systemctl};
use s3csi_testbed::wait::wait_for;

use crate::world::{BUCKET, World, names_in, only_unit, volume};

/// Capabilities as bits.
const SYS_ADMIN: u64 = 1 << 21;
const SYS_RESOURCE: u64 = 1 << 24;

/// The value of a line of `/proc/<pid>/status` or `/proc/<pid>/limits`.
fn line<'a>(text: &'a str, name: &str) -> &'a str {
    text.lines().find_map(|it| it.strip_prefix(name)).map_or("", str::trim)
}

#[test]
fn an_engine_has_no_privileges_but_to_mount_and_leaves_no_core_dump() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-sandbox");
        let world = World::start_beside_systemd(&fixture);
        let target = world.publish(&volume(1));
        world.check_serves(&target);
        for engine in world.engines() {
            let status = fs::read_to_string(format!("/proc/{engine}/status")).unwrap();
            assert_eq!(line(&status, "NoNewPrivs:"), "1", "{status}");
            assert_eq!(line(&status, "Seccomp:"), "2", "{status}");
            // A machine may have fewer capabilities than a unit asks for.
            let bounding = u64::from_str_radix(line(&status, "CapBnd:"), 16).unwrap();
            assert_eq!(bounding & !(SYS_ADMIN | SYS_RESOURCE), 0, "{status}");
            assert_ne!(bounding & SYS_ADMIN, 0, "{status}");
            let limits = fs::read_to_string(format!("/proc/{engine}/limits")).unwrap();
            let core: Vec<&str> = line(&limits, "Max core file size").split_whitespace().collect();
            assert_eq!(&core[..2], ["0", "0"], "{limits}");
        }
        let show = systemctl(&["show", &only_unit()]);
        let property = |name: &str| line(&show, &format!("{name}="));
        assert_eq!(property("PrivateMounts"), "no", "the mount would stay in the unit's namespace");
        for name in
            ["NoNewPrivileges", "LockPersonality", "MemoryDenyWriteExecute", "RestrictRealtime", "RestrictSUIDSGID"]
        {
            assert_eq!(property(name), "yes", "{name}");
        }
        // None may be created.
        assert_eq!(property("RestrictNamespaces"), "yes");
        assert_eq!(property("SystemCallArchitectures"), "native");
        // systemd 252 prints the number.
        let error = property("SystemCallErrorNumber");
        assert!(["EPERM", "1"].contains(&error), "{error}");
        let mut families: Vec<&str> = property("RestrictAddressFamilies").split(' ').collect();
        families.sort_unstable();
        assert_eq!(families, ["AF_INET", "AF_INET6", "AF_NETLINK", "AF_UNIX"]);
        let denied = property("SystemCallFilter").strip_prefix('~').expect("a list of denied calls");
        let denied: Vec<&str> = denied.split(' ').collect();
        for call in ["ptrace", "reboot", "init_module", "swapon", "settimeofday", "iopl"] {
            assert!(denied.contains(&call), "{call} is not denied: {denied:?}");
        }
        assert!(!denied.contains(&"mount"), "an engine mounts: {denied:?}");
        world.unpublish(&volume(1));
        world.check_nothing_left();
    });
}

#[test]
fn a_cache_is_in_a_directory_of_our_own_for_root_only_and_gone_with_its_volume() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-cache");
        let world = World::start_beside_systemd(&fixture);
        let shared = fixture.create_directory("shared");
        let mut cached = volume(1);
        cached.mount_options.push(format!("cache {}", shared.display()));
        let target = world.publish(&cached);
        world.check_serves(&target);
        let show = systemctl(&["show", "--property=ExecStart", &only_unit()]);
        assert!(show.contains("--cache=") && show.contains("/systemd-cache/mp-"), "{show}");
        assert_eq!(fs::read_dir(&shared).unwrap().count(), 0, "the path that a tenant named is not touched");
        let cache = show.split_once("--cache=").unwrap().1.split([' ', ';']).next().unwrap();
        let mode = fs::metadata(cache).unwrap_or_else(|error| panic!("{cache}: {error}")).mode();
        assert_eq!(mode & 0o7777, 0o700, "{cache}");
        world.unpublish(&cached);
        wait_for("the cache is removed", || !Path::new(cache).exists());
        world.check_nothing_left();
    });
}

#[test]
fn a_large_file_is_staged_in_a_directory_of_our_own_for_root_only_and_gone_with_its_volume() {
    beside_systemd(|| {
        let fixture = Fixture::new("systemd-stage");
        let world = World::start_beside_systemd(&fixture);
        let mut content = noise(1, 20 << 20);
        world.store.put_object(BUCKET, "file", &content).unwrap();
        let volume = volume(1).with_option("max-stage-size 5000");
        let target = world.publish(&volume);
        let show = systemctl(&["show", "--property=ExecStart", &only_unit()]);
        assert!(show.contains("--stage=") && show.contains("/systemd-stage/mp-"), "{show}");
        assert!(show.contains("--max-stage-size=972"), "a volume gets no more than the driver allows: {show}");
        let stage = world.plugin.stages().join(&names_in(&world.plugin.stages())[0]);
        assert_eq!(fs::metadata(&stage).unwrap().mode() & 0o7777, 0o700, "{stage:?}");

        let file = File::options().read(true).write(true).open(target.join("file")).unwrap();
        file.write_all_at(b"edited", 15 << 20).unwrap();
        content[15 << 20..(15 << 20) + 6].copy_from_slice(b"edited");
        assert_eq!(names_in(&stage).len(), 1, "the engine has made its directory in it");
        drop(file);
        assert!(world.store.object(BUCKET, "file").unwrap() == content, "the object has other bytes");
        world.unpublish(&volume);
        world.check_nothing_left();
    });
}
