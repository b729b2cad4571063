//! Programs that need larger packages; `make compatibility` installs them. `$PYTHON` has numpy, h5py and pyarrow.

/// Name and script.
pub const LARGER: &[(&str, &str)] = &[
    (
        "nano",
        r#"echo one > f
python3 - <<'END'
import os, pty, select
pid, terminal = pty.fork()
if pid == 0:
    os.environ['TERM'] = 'xterm'
    os.execvp('nano', ['nano', '--ignorercfiles', 'f'])
def until(text):
    seen = b''
    while text not in seen:
        assert select.select([terminal], [], [], 60)[0], seen
        seen += os.read(terminal, 4096)
until(b'Exit')
os.write(terminal, b'two ')
os.write(terminal, b'\x0f')
until(b'Write')
os.write(terminal, b'\r')
until(b'Wrote')
os.write(terminal, b'\x18')
try:
    while os.read(terminal, 4096): pass
except OSError:
    pass
assert os.waitpid(pid, 0)[1] == 0
END
test "$(cat f)" = "two one""#,
    ),
    (
        "video file with its index moved to the front",
        r"python3 - <<'END'
import os
piece = os.urandom(1 << 20)
with open('v.mp4', 'wb') as f:
    f.write(b'\0\0\0\x20ftypisom' + bytes(20) + b'\0\0\0\0mdat')
    for _ in range(12): f.write(piece)
    end = f.tell()
    f.write(b'moov' * 1000)
    f.seek(32); f.write((end - 32).to_bytes(4, 'big'))
with open('v.mp4', 'r+b') as f:
    content = f.read()
    f.seek(32); f.write(content[end:]); f.write(content[32:end])
result = open('v.mp4', 'rb').read()
assert result[32:4032] == b'moov' * 1000 and result[4040:4040 + len(piece)] == piece and len(result) == len(content)
END",
    ),
    (
        "numpy.memmap",
        r#""$PYTHON" - <<'END'
import numpy
a = numpy.memmap('a', dtype='float64', mode='w+', shape=(2000, 1000))
a[:] = 1.5; a[1999, 999] = 7; a.flush(); del a
b = numpy.memmap('a', dtype='float64', mode='r+', shape=(2000, 1000))
assert b[0, 0] == 1.5 and b[1999, 999] == 7
b[5] = 3; b.flush(); del b
c = numpy.memmap('a', dtype='float64', mode='r', shape=(2000, 1000))
assert c[5].sum() == 3000 and c.sum() == 1.5 * (2000 * 1000 - 1001) + 7 + 3000
END"#,
    ),
    (
        "numpy.save and open_memmap",
        r#""$PYTHON" - <<'END'
import numpy
numpy.save('a.npy', numpy.arange(3000000))
m = numpy.lib.format.open_memmap('a.npy', mode='r+'); m[10] = -1; m.flush(); del m
assert numpy.load('a.npy')[9:12].tolist() == [9, -1, 11]
numpy.savez_compressed('z.npz', a=numpy.ones(1000), b=numpy.zeros(10))
assert numpy.load('z.npz')['a'].sum() == 1000
END"#,
    ),
    (
        "h5py",
        r#""$PYTHON" - <<'END'
import h5py, numpy
with h5py.File('a.h5', 'w') as f:
    d = f.create_dataset('d', (100, 1000), maxshape=(None, 1000), chunks=(10, 1000), compression='gzip')
    d[:] = numpy.arange(100000).reshape(100, 1000)
    f.attrs['unit'] = 'm'
with h5py.File('a.h5', 'r+') as f:
    f['d'].resize(200, axis=0); f['d'][100:] = 7; f.create_group('g')['x'] = [1, 2, 3]
with h5py.File('a.h5', 'a') as f:
    del f['g']
with h5py.File('a.h5') as f:
    assert f['d'].shape == (200, 1000) and f['d'][199, 0] == 7 and f['d'][99, 999] == 99999 and 'g' not in f
END"#,
    ),
    (
        "h5py, 40 MB",
        r#""$PYTHON" - <<'END'
import h5py, numpy
with h5py.File('a.h5', 'w') as f:
    for n in range(5): f.create_dataset('d%d' % n, data=numpy.full(1000000, n, dtype='float64'))
with h5py.File('a.h5', 'r+') as f: f['d2'][500000] = -1
with h5py.File('a.h5') as f: assert f['d2'][500000] == -1 and f['d4'][:].sum() == 4000000
END"#,
    ),
    (
        "pyarrow parquet",
        r#""$PYTHON" - <<'END'
import pyarrow, pyarrow.parquet as parquet
table = pyarrow.table({'year': [2024, 2025, 2026] * 100000, 'value': list(range(300000))})
parquet.write_table(table, 'a.parquet', row_group_size=10000)
assert parquet.read_table('a.parquet', columns=['value'])['value'][299999].as_py() == 299999
parquet.write_to_dataset(table, 'set', partition_cols=['year'])
assert parquet.read_table('set').num_rows == 300000
with parquet.ParquetWriter('b.parquet', table.schema) as writer:
    for _ in range(3): writer.write_table(table)
assert parquet.ParquetFile('b.parquet').metadata.num_rows == 900000
END"#,
    ),
    (
        "checkpoint as torch.save writes it, 24 MiB",
        r"python3 - <<'END'
import os, zipfile
def save(name, seed):
    with zipfile.ZipFile(name, 'w', zipfile.ZIP_STORED) as z:
        z.writestr('archive/data.pkl', b'pickle')
        for n in range(3): z.writestr('archive/data/%d' % n, bytes([seed + n]) * (8 << 20))
        z.writestr('archive/version', b'3\n')
save('checkpoint.pt', 1)
save('checkpoint.tmp', 50); os.replace('checkpoint.tmp', 'checkpoint.pt')
z = zipfile.ZipFile('checkpoint.pt'); assert z.testzip() is None and z.read('archive/data/2')[-1] == 52
END",
    ),
    (
        "npm install",
        r#"mkdir -p $OUTSIDE/tool $OUTSIDE/library $OUTSIDE/cache
echo '{"name":"library","version":"1.0.0","main":"index.js"}' > $OUTSIDE/library/package.json
echo 'module.exports = 42' > $OUTSIDE/library/index.js
echo '{"name":"tool","version":"1.0.0","bin":{"tool":"tool.js"}}' > $OUTSIDE/tool/package.json
printf '#!/usr/bin/env node\nconsole.log("ran")\n' > $OUTSIDE/tool/tool.js
(cd $OUTSIDE; npm pack --silent --cache $OUTSIDE/cache ./library ./tool > packed)
echo '{"name":"app","version":"1.0.0","private":true}' > package.json
npm install --silent --offline --no-audit --no-fund --cache $OUTSIDE/cache $OUTSIDE/library-1.0.0.tgz $OUTSIDE/tool-1.0.0.tgz
test $(node -p 'require("library")') = 42
test -L node_modules/.bin/tool; test "$(node_modules/.bin/tool)" = ran
npm uninstall --silent --offline --no-audit --no-fund --cache $OUTSIDE/cache tool
test ! -e node_modules/tool"#,
    ),
    (
        "cargo build",
        r#"cargo init --quiet --vcs none --name demo .
cargo build --quiet --offline
test "$(target/debug/demo)" = "Hello, world!"
printf 'fn main() { println!("changed"); }\n' > src/main.rs
cargo build --quiet --offline
test "$(target/debug/demo)" = changed
test -z "$(cargo build --offline 2>&1 | grep Compiling)"
cargo clean --quiet; test ! -e target"#,
    ),
    (
        "make -j, and again",
        r#"for n in 1 2 3 4; do printf 'int f%d(void) { return 0; }\n' $n > f$n.c; done
printf 'int main(void) { return 0; }\n' > m.c
printf 'm: m.o f1.o f2.o f3.o f4.o\n\tgcc -o $@ $^\n%%.o: %%.c\n\tgcc -c $<\n' > Makefile
make -s -j2; ./m
make -q
touch f2.c
test "$(make | grep -c 'gcc -c')" = 1
make -q"#,
    ),
    (
        "git gc",
        r#"export GIT_AUTHOR_NAME=n GIT_AUTHOR_EMAIL=e GIT_COMMITTER_NAME=n GIT_COMMITTER_EMAIL=e
git init -q r; cd r
for n in $(seq 15); do echo $n > f$((n % 4)); git add .; git commit -qm $n; done
git gc -q --prune=now; test -z "$(find .git/objects -type f -path '*/??/*')"
git repack -qad; git fsck --no-progress; test $(git log --oneline | wc -l) = 15; test -z "$(git status --short)""#,
    ),
    (
        "logrotate",
        r#"chmod 755 .; echo one > a.log
printf '%s/a.log {\n  rotate 2\n  create 0640 root root\n  missingok\n}\n' "$PWD" > $OUTSIDE/conf
logrotate -f -s $OUTSIDE/state $OUTSIDE/conf; echo two >> a.log; logrotate -f -s $OUTSIDE/state $OUTSIDE/conf
test "$(cat a.log.2)" = one; test "$(cat a.log.1)" = two; test $(stat -c %a:%s a.log) = 640:0"#,
    ),
    (
        "logrotate with copytruncate and compress",
        r#"chmod 755 .; exec 3>> a.log; echo one >&3
printf '%s/a.log {\n  rotate 2\n  copytruncate\n  compress\n}\n' "$PWD" > $OUTSIDE/conf
logrotate -f -s $OUTSIDE/state $OUTSIDE/conf; echo two >&3; exec 3>&-
test "$(cat a.log)" = two; test "$(zcat a.log.1.gz)" = one"#,
    ),
    (
        "postgres initdb",
        r#"bin=$(ls -d /usr/lib/postgresql/*/bin | tail -n 1); chown postgres .; chmod 700 .
as="setpriv --reuid=postgres --regid=postgres --clear-groups"
$as $bin/initdb -D "$PWD/data" --no-sync -A trust > /dev/null
$as $bin/pg_controldata "$PWD/data" | grep 'cluster state.*shut down' > /dev/null"#,
    ),
];
