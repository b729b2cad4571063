//! A directory of our own in which a test may mount, and the proof that nothing of it is left afterwards.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use s3csi_driver::host::Access;
use s3csi_driver::host::{Device, FuseOptions, Host as _, Kernel, Mount, Probe};

/// Long enough for a healthy answer on a machine that is busy with other tests.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Long enough to be sure that there is no answer: a healthy answer takes less than a millisecond.
pub const IMPATIENCE: Duration = Duration::from_millis(200);

pub const WRITABLE: FuseOptions = FuseOptions { access: Access::ReadWrite, allow_other: true };

pub struct World {
    pub kernel: Kernel,
    directory: tempfile::TempDir,
}

/// Run a test, and then see that it removed every mount and that no probe still waits.
pub fn check(test: impl FnOnce(&World)) {
    assert!(
        is_isolated(),
        "these tests mount and unmount, so give them a mount namespace: unshare --mount --propagation private"
    );
    // Without a control file system, so that both ways to abort are tested on any machine.
    let world = World { kernel: Kernel::with_fuse_control("/nowhere"), directory: tempfile::tempdir().unwrap() };
    test(&world);
    assert_eq!(world.mounts(), [], "mounts are left behind");
    wait_until("all probes came back", || world.kernel.probes_in_flight() == 0);
}

/// Whether somebody put us into a mount namespace of our own: one of the processes that started us lives in another.
/// (To ask for the namespace of process 1 is not allowed everywhere.)
fn is_isolated() -> bool {
    let namespace_of = |process: u32| fs::read_link(format!("/proc/{process}/ns/mnt")).ok();
    let ours = namespace_of(std::process::id()).unwrap();
    std::iter::successors(parent_of(std::process::id()), |it| parent_of(*it))
        .filter_map(namespace_of)
        .any(|theirs| theirs != ours)
}

fn parent_of(process: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let parent = status.lines().find_map(|it| it.strip_prefix("PPid:"))?.trim().parse().ok()?;
    (parent != 0).then_some(parent)
}

pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "waited in vain: {what}");
        std::thread::yield_now();
    }
}

impl World {
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A new empty directory.
    pub fn directory(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        self.kernel.create_directory(&path, 0o755).unwrap();
        path
    }

    /// A file system in memory, to bind from.
    pub fn tmpfs(&self, name: &str) -> PathBuf {
        let path = self.directory(name);
        mount("tmpfs", &path, "tmpfs", MountFlags::empty(), None).unwrap();
        path
    }

    pub fn mounts(&self) -> Vec<Mount> {
        self.kernel.mount_table().unwrap().beneath(self.directory.path()).cloned().collect()
    }

    pub fn mounted_at(&self, path: &Path) -> Mount {
        self.kernel.mount_table().unwrap().at(path).unwrap().clone()
    }

    /// As the table and the directory itself say it.
    pub fn device(&self, path: &Path) -> Device {
        let device = self.mounted_at(path).device;
        assert_eq!(self.kernel.mounted_at(path).unwrap(), Some(device));
        device
    }

    pub fn probe(&self, path: &Path, patience: Duration) -> Probe {
        self.kernel.probe(path, Instant::now() + patience)
    }

    pub fn errno_of_probe(&self, path: &Path) -> i32 {
        match self.probe(path, PATIENCE) {
            Probe::Dead(cause) => cause.raw_os_error().unwrap(),
            other => panic!("{} is {other}", path.display()),
        }
    }
}

impl Drop for World {
    /// Also after a failed test: a mount left in the directory would keep it from being removed.
    fn drop(&mut self) {
        if let Ok(table) = self.kernel.mount_table() {
            for mount in table.beneath(self.directory.path()).collect::<Vec<_>>().iter().rev() {
                let _ = unmount(&mount.at, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
            }
        }
    }
}
