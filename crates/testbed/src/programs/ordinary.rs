//! Programs that every Debian machine for building s3csi has.

/// Name and script.
pub const ORDINARY: &[(&str, &str)] = &[
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
    (
        "vim",
        "echo one > f; touch -d 2020-01-02T03:04:05Z f; vim.tiny -u NONE -es -c '%s/one/two/' -c wq f < /dev/null; test \"$(cat f)\" = two; test \"$(ls -A)\" = f",
    ),
    (
        "vim with a backup",
        "echo one > f; touch -d 2020-01-02T03:04:05Z f; vim.tiny -u NONE -es -c 'set backup backupcopy=no backupskip=' -c '%s/one/two/' -c wq f < /dev/null; test \"$(cat f f~)\" = \"$(printf 'two\\none')\"",
    ),
    ("ed", "echo one > f; printf '1s/one/two/\\nw\\nq\\n' | ed -s f; test \"$(cat f)\" = two"),
    (
        "sed -i",
        "echo one > f; chmod 640 f; sed -i.bak s/one/two/ f; test \"$(cat f f.bak)\" = \"$(printf 'two\\none')\"; test $(stat -c %a f) = 640",
    ),
    ("perl -i", "echo one > f; perl -i -pe s/one/two/ f; test \"$(cat f)\" = two"),
    (
        "patch",
        "printf 'a\\nb\\n' > f; printf 'a\\nc\\n' > $OUTSIDE/g; diff -u f $OUTSIDE/g > p.diff || true; patch -s f p.diff; cmp f $OUTSIDE/g; patch -s -R -b f p.diff; test \"$(cat f)\" = \"$(printf 'a\\nb')\"",
    ),
    ("sort -o", "printf 'b\\na\\n' > f; sort -o f f; test \"$(head -n 1 f)\" = a"),
    (
        "split and cat",
        "head -c 300000 /dev/urandom > f; split -b 65536 f part.; cat part.* > g; cmp f g; test $(ls part.* | wc -l) = 5",
    ),
    (
        "gzip",
        "head -c 300000 /dev/zero > f; gzip f; test ! -e f; gzip -t f.gz; gunzip f.gz; test $(stat -c %s f) = 300000",
    ),
    ("xz", "head -c 300000 /dev/zero > f; xz -k f; rm f; xz -d f.xz; test $(stat -c %s f) = 300000; test ! -e f.xz"),
    (
        "install",
        "echo one > $OUTSIDE/f; install -D -m 750 $OUTSIDE/f a/b/g; test \"$(cat a/b/g)\" = one; test $(stat -c %a a/b/g) = 750",
    ),
    (
        "cp -a",
        "mkdir -p d/e; echo one > d/f; chmod 600 d/f; touch -d 2021-01-01T00:00:00Z d/f; ln -s ../f d/e/l; cp -a d copy; test $(stat -c %a:%Y copy/f) = 600:1609459200; test $(readlink copy/e/l) = ../f; diff -r d copy",
    ),
    (
        "cp -p over a file",
        "echo one > f; touch -d 2021-01-01T00:00:00Z f; echo longer > g; cp -p f g; test \"$(cat g)\" = one; test $(stat -c %Y g) = 1609459200",
    ),
    (
        "mktemp",
        "f=$(mktemp -p .); echo one > $f; test $(stat -c %a $f) = 600; d=$(mktemp -d -p .); echo two > $d/g; rm -r $d $f",
    ),
    ("here document", "cat > f <<END\none\ntwo\nEND\ncat >> f <<END\nthree\nEND\ntest $(wc -l < f) = 3"),
    (
        "read and write through one descriptor",
        "echo 0123 > f; exec 3<> f; read -n 2 a <&3; echo -n X >&3; exec 3>&-; test \"$(cat f)\" = 01X3",
    ),
    ("tee -a", "echo one > f; echo two | tee -a f g > /dev/null; test $(wc -l < f) = 2; test \"$(cat g)\" = two"),
    (
        "truncate by an amount",
        "echo -n 0123456789 > f; truncate -s +5 f; test $(stat -c %s f) = 15; truncate -s -10 f; test \"$(cat f)\" = 01234",
    ),
    ("umask", "umask 077; echo one > f; test $(stat -c %a f) = 600"),
    (
        "touch -r",
        "echo one > f; touch -d 2021-01-01T00:00:00Z f; echo two > g; touch -r f g; test $(stat -c %Y g) = 1609459200; test ! g -nt f",
    ),
    (
        "dpkg-deb",
        "mkdir -p $OUTSIDE/p/DEBIAN $OUTSIDE/p/usr/bin; printf 'Package: p\\nVersion: 1\\nArchitecture: all\\nMaintainer: m\\nDescription: d\\n' > $OUTSIDE/p/DEBIAN/control; printf '#!/bin/sh\\necho ran\\n' > $OUTSIDE/p/usr/bin/p; chmod 755 $OUTSIDE/p/usr/bin/p; ln -s p $OUTSIDE/p/usr/bin/q; dpkg-deb --root-owner-group -b $OUTSIDE/p p.deb > /dev/null; dpkg-deb -x p.deb x; test \"$(x/usr/bin/q)\" = ran",
    ),
    (
        "python zipfile",
        "python3 -c \"import zipfile, os\nz = zipfile.ZipFile('z', 'w'); z.writestr('a', os.urandom(100000)); z.close()\nz = zipfile.ZipFile('z', 'a'); z.writestr('b', 'two'); z.close()\nz = zipfile.ZipFile('z'); assert z.testzip() is None and z.read('b') == b'two'\"",
    ),
    (
        "a large python zipfile",
        "python3 -c \"import zipfile, os\nz = zipfile.ZipFile('z', 'w'); f = z.open('a', 'w', force_zip64=True); [f.write(os.urandom(1 << 20)) for _ in range(12)]; f.close(); z.close()\nz = zipfile.ZipFile('z'); assert z.testzip() is None\"",
    ),
    (
        "python tarfile",
        "python3 -c \"import tarfile, io\ndef add(mode, name):\n t = tarfile.open('t', mode); i = tarfile.TarInfo(name); i.size = 5; t.addfile(i, io.BytesIO(b'12345')); t.close()\nadd('w', 'a'); add('a', 'b')\nassert tarfile.open('t').getnames() == ['a', 'b']\"",
    ),
    (
        "python shelve and dbm",
        "python3 -c \"import shelve, dbm.dumb\nfor v in range(3):\n d = shelve.open('s'); d['k%d' % v] = v; d.close()\nd = shelve.open('s'); assert sorted(d) == ['k0', 'k1', 'k2']; d.close()\nd = dbm.dumb.open('d', 'c'); d['a'] = 'b'; d.close(); assert dbm.dumb.open('d')['a'] == b'b'\"",
    ),
    (
        "a mapped file that is made",
        "python3 -c \"import mmap\nf = open('f', 'w+b'); f.truncate(100000); m = mmap.mmap(f.fileno(), 0); m[99990:100000] = b'0123456789'; m.close(); f.close()\nassert open('f', 'rb').read()[99990:] == b'0123456789'\"",
    ),
    (
        "python tempfile and os.replace",
        "python3 -c \"import tempfile, os\nf = tempfile.NamedTemporaryFile('w', dir='.', delete=False); f.write('x'); f.close(); os.replace(f.name, 'g')\nt = tempfile.TemporaryFile(dir='.'); t.write(b'y'); t.seek(0); assert t.read() == b'y'; t.close()\nassert os.listdir('.') == ['g']\"",
    ),
    (
        "sqlite with a write-ahead log",
        "sqlite3 db 'pragma journal_mode=wal; create table t(a); insert into t values(1); insert into t values(2);' > /dev/null; sqlite3 db 'insert into t values(3)'; test $(sqlite3 db 'select sum(a) from t') = 6; test $(sqlite3 db 'pragma integrity_check') = ok",
    ),
    (
        "a static library",
        "printf 'int f(void) { return 0; }\\n' > f.c; printf 'int f(void); int main(void) { return f(); }\\n' > m.c; gcc -c f.c m.c; ar rcs libf.a f.o; ranlib libf.a; gcc -o m m.o -L. -lf; strip m; ./m",
    ),
    (
        "git branches, stash and worktree",
        "export GIT_AUTHOR_NAME=n GIT_AUTHOR_EMAIL=e GIT_COMMITTER_NAME=n GIT_COMMITTER_EMAIL=e; git init -q r; cd r; echo one > a; git add a; git commit -qm one; git checkout -qb other; echo two > b; git add b; git commit -qm two; git checkout -q -; git merge -q --no-ff -m merged other; echo three >> a; git stash -q; git stash pop -q; git commit -qam three; git worktree add -q ../w; test \"$(cat ../w/b)\" = two; git fsck --no-progress; test -z \"$(git status --short)\"",
    ),
    (
        "rsync in place",
        "head -c 200000 /dev/urandom > $OUTSIDE/a; rsync -a $OUTSIDE/a f; printf X | dd of=$OUTSIDE/a bs=1 seek=1000 conv=notrunc status=none; rsync -a --inplace --no-whole-file -I $OUTSIDE/a f; cmp f $OUTSIDE/a; echo more >> $OUTSIDE/a; rsync --append $OUTSIDE/a f; cmp f $OUTSIDE/a",
    ),
    (
        "rsync --delete",
        "mkdir -p $OUTSIDE/a d; echo one > $OUTSIDE/a/f; echo two > d/old; rsync -a --delete $OUTSIDE/a/ d/; test \"$(ls d)\" = f",
    ),
    ("find -delete", "mkdir -p d/e; touch d/a d/e/b; find d -delete; test ! -e d"),
    (
        "allocate space",
        "python3 -c \"import os; f = os.open('f', os.O_RDWR | os.O_CREAT); os.posix_fallocate(f, 0, 10000); os.close(f)\"; test $(stat -c %s f) = 10000",
    ),
    ("getfattr and setfattr", "echo 1 > f; setfattr -n user.a -v b f; test $(getfattr --only-values -n user.a f) = b"),
];
