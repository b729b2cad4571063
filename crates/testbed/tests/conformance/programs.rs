//! Ordinary programs, run as users run them, on a volume with permission to delete and to overwrite.
//!
//! Each entry is a shell script that must succeed in an empty directory of the mount. `$OUTSIDE` is a directory on a local
//! disk. What an object store cannot do is listed as refused.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use crate::on_both_servers;
use crate::world::World;

on_both_servers!(ordinary_programs_work, what_an_object_store_cannot_do_is_refused);

const WORKS: &[(&str, &str)] = &[
    ("write and read", "echo one > f; test \"$(cat f)\" = one"),
    (
        "copy in and out",
        "head -c 3000000 /dev/urandom > $OUTSIDE/a; cp $OUTSIDE/a f; cmp f $OUTSIDE/a; cp f $OUTSIDE/b; cmp $OUTSIDE/a $OUTSIDE/b",
    ),
    ("overwrite", "echo one > f; echo two > f; test \"$(cat f)\" = two"),
    ("append with the shell", "echo one > f; echo two >> f; test \"$(cat f)\" = \"$(printf 'one\\ntwo')\""),
    (
        "append from a program",
        "python3 -c \"f = open('f', 'a'); f.write('a'); f.flush(); f.write('b'); f.close()\"; test \"$(cat f)\" = ab",
    ),
    (
        "edit in place (r+)",
        "echo 0123 > f; python3 -c \"f = open('f', 'r+'); f.seek(1); f.write('X'); f.close()\"; test \"$(cat f)\" = 0X23",
    ),
    (
        "dd conv=notrunc",
        "printf 0123456789 > f; printf AB | dd of=f bs=1 seek=4 conv=notrunc status=none; test \"$(cat f)\" = 0123AB6789",
    ),
    (
        "seek while writing",
        "python3 -c \"f = open('f', 'wb'); f.write(b'0' * 100000); f.seek(0); f.write(b'head'); f.close()\"; test \"$(head -c 5 f)\" = head0",
    ),
    ("truncate", "printf 0123456789 > f; truncate -s 4 f; test \"$(cat f)\" = 0123; truncate -s 0 f; test ! -s f"),
    (
        "ftruncate",
        "python3 -c \"f = open('f', 'wb'); f.write(b'0123456789'); f.flush(); f.truncate(3); f.close()\"; test \"$(cat f)\" = 012",
    ),
    ("read back (w+)", "python3 -c \"f = open('f', 'w+'); f.write('text'); f.seek(0); assert f.read() == 'text'\""),
    (
        "writable mmap",
        "head -c 8192 /dev/zero > f; python3 -c \"import mmap; f = open('f', 'r+b'); m = mmap.mmap(f.fileno(), 0); m[4096:4100] = b'edit'; m.flush(); m.close(); f.close()\"; test \"$(dd if=f bs=1 skip=4096 count=4 status=none)\" = edit",
    ),
    ("rename a file", "echo one > f; mv f g; test ! -e f; test \"$(cat g)\" = one"),
    ("replace by rename", "echo one > f; echo two > g; mv g f; test \"$(cat f)\" = two"),
    (
        "rename a directory",
        "mkdir -p d/e; echo one > d/f; echo two > d/e/g; mv d moved; test ! -e d; test \"$(cat moved/f)\" = one; test \"$(cat moved/e/g)\" = two",
    ),
    ("empty directories persist", "mkdir -p a/b; test -d a/b; rmdir a/b; test -d a; rmdir a; test ! -e a"),
    ("remove a tree", "mkdir -p d/e/f; echo 1 > d/1; echo 2 > d/e/2; echo 3 > d/e/f/3; rm -r d; test ! -e d"),
    (
        "find and du",
        "mkdir -p d/e; echo 1 > d/1; echo 2 > d/e/2; test $(find . -type f | wc -l) = 2; du -s . > /dev/null",
    ),
    ("df", "df --output=size . | tail -1 | grep '[1-9]' > /dev/null"),
    ("chmod", "echo 1 > f; chmod 600 f; test $(stat -c %a f) = 600; chmod 644 f; test $(stat -c %a f) = 644"),
    ("run a script", "printf '#!/bin/sh\\necho ran\\n' > f; chmod +x f; test \"$(./f)\" = ran"),
    ("chown", "echo 1 > f; chown 1234:2345 f; test $(stat -c %u:%g f) = 1234:2345"),
    ("touch", "touch f; test -e f; echo 1 > g; touch g; test \"$(cat g)\" = 1"),
    ("touch -d", "echo 1 > f; touch -d 2020-01-02T03:04:05Z f; test $(stat -c %Y f) = 1577934245"),
    ("symbolic link", "echo one > f; ln -s f l; test -L l; test $(readlink l) = f; test \"$(cat l)\" = one"),
    (
        "tar",
        "mkdir $OUTSIDE/t; echo one > $OUTSIDE/t/a; chmod 640 $OUTSIDE/t/a; touch -d 2021-01-01T00:00:00Z $OUTSIDE/t/a; ln -s a $OUTSIDE/t/l; tar -C $OUTSIDE -cf $OUTSIDE/t.tar t; tar xf $OUTSIDE/t.tar; test $(stat -c %a t/a) = 640; test $(stat -c %Y t/a) = 1609459200; test -L t/l; tar cf back.tar t; tar tf back.tar | grep t/a > /dev/null",
    ),
    (
        "rsync -a",
        "mkdir -p $OUTSIDE/r/d; echo one > $OUTSIDE/r/a; echo two > $OUTSIDE/r/d/b; chmod 600 $OUTSIDE/r/a; rsync -a $OUTSIDE/r/ r/; test \"$(cat r/d/b)\" = two; test $(stat -c %a r/a) = 600",
    ),
    (
        "rsync -a again",
        "mkdir -p $OUTSIDE/s; echo one > $OUTSIDE/s/a; touch -d 2021-01-01T00:00:00Z $OUTSIDE/s/a; rsync -a $OUTSIDE/s/ s/; sleep 1; test -z \"$(rsync -ai $OUTSIDE/s/ s/ | grep '^>f')\"",
    ),
    (
        "git clone",
        "git init -q $OUTSIDE/repo; cd $OUTSIDE/repo; echo one > a; git add a; git -c user.name=n -c user.email=e commit -qm one; cd - > /dev/null; git -c safe.directory='*' clone -q $OUTSIDE/repo clone; cd clone; git config user.name n; git config user.email e; echo two > b; git add b; git commit -qm two; git status --short > out; git gc -q; test $(git log --oneline | wc -l) = 2",
    ),
    (
        "sqlite",
        "sqlite3 db 'create table t(a); insert into t values(1); insert into t values(2);'; test $(sqlite3 db 'select sum(a) from t') = 3; test $(sqlite3 db 'pragma integrity_check') = ok",
    ),
    (
        "zip and unzip",
        "echo one > a; echo two > b; zip -q z.zip a b; echo three > c; zip -qu z.zip c; mkdir u; unzip -q z.zip -d u; test \"$(cat u/b)\" = two",
    ),
    ("python -m venv", "python3 -m venv --without-pip v; v/bin/python -c 'print(1)' > out; test $(cat out) = 1"),
    (
        "pip install --target",
        "mkdir -p $OUTSIDE/p/tiny-1.dist-info $OUTSIDE/p/tiny; echo 'x = 1' > $OUTSIDE/p/tiny/__init__.py; printf 'Metadata-Version: 2.1\\nName: tiny\\nVersion: 1\\n' > $OUTSIDE/p/tiny-1.dist-info/METADATA; printf 'Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n' > $OUTSIDE/p/tiny-1.dist-info/WHEEL; printf 'tiny/__init__.py,,\\ntiny-1.dist-info/METADATA,,\\ntiny-1.dist-info/WHEEL,,\\ntiny-1.dist-info/RECORD,,\\n' > $OUTSIDE/p/tiny-1.dist-info/RECORD; (cd $OUTSIDE/p; zip -qr ../tiny-1-py3-none-any.whl .); python3 -m pip install -q --no-index --disable-pip-version-check --root-user-action=ignore --target site $OUTSIDE/tiny-1-py3-none-any.whl; PYTHONPATH=site python3 -c 'import tiny; assert tiny.x == 1'",
    ),
    (
        "make and compile",
        "printf 'int main(void) { return 0; }\\n' > m.c; printf 'm: m.c\\n\\tgcc -o m m.c\\n' > Makefile; make -s; ./m",
    ),
    ("lock", "flock f true; flock -n f true"),
    (
        "save in an editor",
        "echo one > f; python3 -c \"import os; f = open('f.tmp', 'w'); f.write('two\\\\n'); f.flush(); os.fsync(f.fileno()); f.close(); os.rename('f.tmp', 'f')\"; test \"$(cat f)\" = two",
    ),
    (
        "remove an open file",
        "python3 -c \"import os; f = open('f', 'w+'); f.write('x'); os.unlink('f'); f.seek(0); assert f.read() == 'x'\"; test ! -e f",
    ),
    (
        "follow a log",
        "echo one > log; exec 3>> log; echo two >&3; test $(tail -n 1 log) = two; exec 3>&-; test $(wc -l < log) = 2",
    ),
];

const REFUSED: &[(&str, &str)] = &[("hard link", "echo 1 > f; ln f g"), ("named pipe", "mkfifo p")];

fn run(world: &World, directory: &Path, script: &str) -> Output {
    let outside = world.fixture.create_directory(&format!("outside-{}", directory.file_name().unwrap().display()));
    Command::new("bash")
        .args(["-euo", "pipefail", "-c", script])
        .current_dir(directory)
        .env("OUTSIDE", outside)
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .output()
        .unwrap()
}

fn ordinary_programs_work(world: &World) {
    let mount = world.mount();
    let mut failed = Vec::new();
    for (number, (name, script)) in WORKS.iter().enumerate() {
        let directory = mount.path(&format!("{number}"));
        fs::create_dir(&directory).unwrap();
        let output = run(world, &directory, script);
        if !output.status.success() {
            failed.push(format!("{name}: {}", String::from_utf8_lossy(&output.stderr)));
        }
    }
    assert!(failed.is_empty(), "{} of {} fail:\n{}", failed.len(), WORKS.len(), failed.join("\n"));
    mount.unmount();
}

fn what_an_object_store_cannot_do_is_refused(world: &World) {
    let mount = world.mount();
    for (number, (name, script)) in REFUSED.iter().enumerate() {
        let directory = mount.path(&format!("{number}"));
        fs::create_dir(&directory).unwrap();
        assert!(!run(world, &directory, script).status.success(), "{name}");
    }
    mount.unmount();
}
