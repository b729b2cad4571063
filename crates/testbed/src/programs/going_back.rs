//! Writers that go back in a new file after more than 8 MiB.

/// Name and script.
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
