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

/// What the name of a stressor begins with here; without it, some are called as other programs.
pub const STRESSOR_PREFIX: &str = "stress-ng ";

/// Every stressor of the class, as stress-ng 0.15 lists them.
pub const STRESSORS: &[(&str, NotApplicable)] = &[
    ("stress-ng access", None),
    ("stress-ng bind-mount", Some(PRIVILEGED)),
    ("stress-ng binderfs", Some(PRIVILEGED)),
    ("stress-ng chattr", Some(NO_BLOCKS)),
    ("stress-ng chdir", None),
    ("stress-ng chmod", None),
    ("stress-ng chown", None),
    ("stress-ng copy-file", None),
    ("stress-ng dentry", None),
    ("stress-ng dir", None),
    ("stress-ng dirdeep", None),
    ("stress-ng dirmany", None),
    ("stress-ng dnotify", None),
    ("stress-ng dup", Some(NOT_OURS)),
    ("stress-ng eventfd", Some(NOT_OURS)),
    ("stress-ng fallocate", Some("fallocate(2) is not supported")),
    ("stress-ng fanotify", Some("watches all mounts of the machine")),
    ("stress-ng fcntl", None),
    ("stress-ng fiemap", Some(NO_BLOCKS)),
    ("stress-ng file-ioctl", Some(NO_BLOCKS)),
    ("stress-ng filename", None),
    ("stress-ng flock", None),
    ("stress-ng fpunch", Some("holes cannot be punched")),
    ("stress-ng fsize", None),
    ("stress-ng fstat", None),
    ("stress-ng getdent", Some(NOT_OURS)),
    ("stress-ng handle", Some(NOT_OURS)),
    ("stress-ng hdd", None),
    ("stress-ng inode-flags", Some(NO_BLOCKS)),
    ("stress-ng inotify", None),
    ("stress-ng io", Some("calls sync(2), which concerns all disks of the machine")),
    ("stress-ng iomix", None),
    ("stress-ng ioprio", Some(NOT_OURS)),
    ("stress-ng lease", Some("the kernel grants no leases on FUSE")),
    ("stress-ng link", Some("hard links are not supported")),
    ("stress-ng locka", None),
    ("stress-ng lockf", None),
    ("stress-ng lockofd", None),
    ("stress-ng mknod", Some("device files and named pipes are not supported")),
    ("stress-ng open", None),
    ("stress-ng procfs", Some(NOT_OURS)),
    ("stress-ng rename", None),
    ("stress-ng symlink", None),
    ("stress-ng sync-file", None),
    ("stress-ng touch", None),
    ("stress-ng utime", None),
    ("stress-ng verity", Some(NO_BLOCKS)),
    ("stress-ng xattr", None),
];

/// Runs one stressor for some seconds. stress-ng reports one that it skips as a success.
pub fn stressor_script(name: &str) -> String {
    let name = name.trim_start_matches(STRESSOR_PREFIX);
    format!(
        "stress-ng --{name} 1 --timeout 5s --temp-path . --verify --no-rand-seed > $OUTSIDE/log 2>&1 || {{ cat $OUTSIDE/log >&2; exit 1; }}\n\
         if grep -i skipp $OUTSIDE/log >&2; then exit 1; fi"
    )
}
