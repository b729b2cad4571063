//! Ordinary programs, run as users run them, on a volume with permission to delete and to overwrite.
//!
//! Each entry is a shell script that must succeed in an empty directory of the mount. `$OUTSIDE` is a directory on a local
//! disk. What an object store cannot do is listed as refused.

mod ordinary;

use std::io;
use std::path::Path;
use std::process::{Command, Output, Stdio};

pub use ordinary::ORDINARY;

/// Name and script: writers that go back after more than 8 MiB.
pub const GOING_BACK: &[(&str, &str)] = &[
    (
        "wave, 12 MiB",
        "python3 -c \"import wave\nw = wave.open('w', 'wb'); w.setnchannels(1); w.setsampwidth(2); w.setframerate(44100)\nfor _ in range(12): w.writeframes(bytes(1 << 20))\nw.close()\nassert wave.open('w').getnframes() == 6 << 20\"",
    ),
    (
        "seek back after 20 MiB",
        "python3 -c \"f = open('f', 'wb')\nfor n in range(20): f.write(bytes([n]) * (1 << 20))\nf.seek(5); f.write(b'header'); f.close()\nd = open('f', 'rb').read(); assert d[5:11] == b'header' and len(d) == 20 << 20 and d[-1] == 19\"",
    ),
    (
        "zip archive of checkpoints",
        "python3 -c \"import zipfile\nf = open('z', 'wb'); z = zipfile.ZipFile(f, 'w')\nfor n in range(3):\n e = z.open('data/%d' % n, 'w', force_zip64=True)\n for _ in range(5): e.write(bytes([n]) * (1 << 20))\n e.close()\nz.close(); f.close()\nz = zipfile.ZipFile('z'); assert z.testzip() is None and z.read('data/2')[-1] == 2\"",
    ),
    (
        "shorten after 12 MiB",
        "python3 -c \"f = open('f', 'wb')\nfor n in range(12): f.write(bytes([n]) * (1 << 20))\nf.flush(); f.truncate(10 << 20); f.close()\nd = open('f', 'rb').read(); assert len(d) == 10 << 20 and d[-1] == 9\"",
    ),
    (
        "dd backwards",
        "head -c 12000000 /dev/urandom > $OUTSIDE/a; for n in 11 10 9 8 7 6 5 4 3 2 1 0; do dd if=$OUTSIDE/a of=f bs=1000000 skip=$n seek=$n count=1 conv=notrunc status=none; done; cmp f $OUTSIDE/a",
    ),
    (
        "cp -p, 12 MB",
        "head -c 12000000 /dev/urandom > $OUTSIDE/a; cp -p $OUTSIDE/a f; cmp f $OUTSIDE/a; cp f g; cmp f g",
    ),
];

/// Name, script, and the program that reports the refusal.
pub const REFUSED: &[(&str, &str, &str)] = &[
    ("hard link", "echo 1 > f; ln f g", "ln: "),
    ("named pipe", "mkfifo p", "mkfifo: "),
    ("fallocate(2)", "fallocate -l 10000 f", "fallocate: "),
    ("punch a hole", "head -c 10000 /dev/zero > f; fallocate --punch-hole -o 0 -l 4096 f", "fallocate: "),
    ("other extended attributes", "echo 1 > f; setfattr -n trusted.a -v b f", "setfattr: "),
];

/// Runs a script in a directory of a mount.
pub fn run(script: &str, directory: &Path, outside: &Path) -> io::Result<Output> {
    Command::new("bash")
        .args(["-euo", "pipefail", "-c", script])
        .current_dir(directory)
        .env("OUTSIDE", outside)
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .stdin(Stdio::null())
        .output()
}
