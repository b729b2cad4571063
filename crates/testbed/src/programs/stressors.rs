//! fio with verification, and the stressors of stress-ng's class "filesystem".

/// Name and script: what was written is read and compared.
pub const FIO: &[(&str, &str)] = &[
    (
        "fio, sequential writes",
        "fio --output=$OUTSIDE/log --name=a --directory=. --rw=write --bs=256k --size=32m --verify=crc32c --end_fsync=1",
    ),
    (
        "fio, random writes",
        "fio --output=$OUTSIDE/log --name=a --directory=. --rw=randwrite --bs=4k --size=6m --verify=crc32c --end_fsync=1",
    ),
    (
        "fio, random writes in a staged file of 24 MiB",
        "fio --output=$OUTSIDE/log --name=a --directory=. --rw=randwrite --bs=64k --size=24m --verify=crc32c --end_fsync=1",
    ),
    (
        "fio, random reads and writes with fsync",
        "fio --output=$OUTSIDE/log --name=a --directory=. --rw=randrw --bs=16k --size=2m --verify=md5 --fsync=16",
    ),
    (
        "fio, mapped file",
        "fio --output=$OUTSIDE/log --name=a --directory=. --ioengine=mmap --rw=randwrite --bs=4k --size=4m --verify=crc32c",
    ),
    (
        "fio, four jobs and 40 files",
        "fio --output=$OUTSIDE/log --name=a --directory=. --rw=randwrite --bs=4k --size=1m --nrfiles=10 --numjobs=4 --verify=crc32c",
    ),
];

/// Why a stressor is not run, or none if it is.
pub type NotApplicable = Option<&'static str>;

const NOT_OURS: &str = "does not use the directory that it is given";
const PRIVILEGED: &str = "tests the kernel with mounts or devices of its own";
const NO_BLOCKS: &str = "needs an inode flag or a map of blocks, which FUSE does not pass on";

/// Every stressor of the class, as stress-ng 0.15 lists them.
pub const STRESSORS: &[(&str, NotApplicable)] = &[
    ("access", None),
    ("bind-mount", Some(PRIVILEGED)),
    ("binderfs", Some(PRIVILEGED)),
    ("chattr", Some(NO_BLOCKS)),
    ("chdir", None),
    ("chmod", None),
    ("chown", None),
    ("copy-file", None),
    ("dentry", None),
    ("dir", None),
    ("dirdeep", None),
    ("dirmany", None),
    ("dnotify", None),
    ("dup", Some(NOT_OURS)),
    ("eventfd", Some(NOT_OURS)),
    ("fallocate", Some("fallocate(2) is not supported")),
    ("fanotify", Some("watches all mounts of the machine")),
    ("fcntl", None),
    ("fiemap", Some(NO_BLOCKS)),
    ("file-ioctl", Some(NO_BLOCKS)),
    ("filename", None),
    ("flock", None),
    ("fpunch", Some("holes cannot be punched")),
    ("fsize", None),
    ("fstat", None),
    ("getdent", Some(NOT_OURS)),
    ("handle", Some(NOT_OURS)),
    ("hdd", None),
    ("inode-flags", Some(NO_BLOCKS)),
    ("inotify", None),
    ("io", Some("calls sync(2), which concerns all disks of the machine")),
    ("iomix", None),
    ("ioprio", Some(NOT_OURS)),
    ("lease", Some("the kernel grants no leases on FUSE")),
    ("link", Some("hard links are not supported")),
    ("locka", None),
    ("lockf", None),
    ("lockofd", None),
    ("mknod", Some("device files and named pipes are not supported")),
    ("open", None),
    ("procfs", Some(NOT_OURS)),
    ("rename", None),
    ("symlink", None),
    ("sync-file", None),
    ("touch", None),
    ("utime", None),
    ("verity", Some(NO_BLOCKS)),
    ("xattr", None),
];

/// Runs one stressor for some seconds. stress-ng reports one that it skips as a success.
pub fn stressor_script(name: &str) -> String {
    format!(
        "stress-ng --{name} 1 --timeout 5s --temp-path . --verify --no-rand-seed > $OUTSIDE/log 2>&1 || {{ cat $OUTSIDE/log >&2; exit 1; }}\n\
         if grep -i skipp $OUTSIDE/log >&2; then exit 1; fi"
    )
}
