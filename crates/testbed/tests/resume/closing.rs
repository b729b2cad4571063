//! Which close(2) stores a file that several processes have open. The same patterns in three worlds: the engine sees the processes
//! that use the mount; the kernel names them, but the engine cannot see them; or neither can, because the mount was made in
//! another PID namespace.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use s3csi_driver::host::Access;
use s3csi_s3_server::store::Store as _;
use s3csi_s3_server::{Config, S3Server};
use s3csi_testbed::engine::{EngineLauncher, ProcessVisibility};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::wait::{SOON, wait_until};

const BUCKET: &str = "closing";

/// When the file is in the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stored {
    /// When the last close has returned, which also reports errors.
    AtClose,
    /// Perhaps only a moment later, when no process has it open any more.
    Later,
}

use Stored::{AtClose, Later};

struct Pattern {
    name: &'static str,
    write: Writing,
    expected: &'static str,
    /// In each of the three worlds.
    stored: [Stored; 3],
}

enum Writing {
    /// By a shell; `$0` is the file.
    Shell(&'static str),
    /// By threads of this process.
    Threads(fn(&Path)),
}

use Writing::{Shell, Threads};

const PATTERNS: [Pattern; 15] = [
    Pattern {
        name: "a child closes what it inherited before anything is written",
        write: Shell(r#"exec 3> "$0"; (exec 3>&-); echo one >&3; exec 3>&-"#),
        expected: "one\n",
        stored: [AtClose, AtClose, Later],
    },
    Pattern {
        name: "a child closes what it inherited after something was written, and its parent goes on",
        write: Shell(r#"exec 3> "$0"; echo one >&3; (exec 3>&-); echo two >&3; exec 3>&-"#),
        expected: "one\ntwo\n",
        stored: [AtClose; 3],
    },
    Pattern {
        name: "a program runs between two writes",
        write: Shell(r#"exec 3> "$0"; echo one >&3; /bin/true; echo two >&3; exec 3>&-"#),
        expected: "one\ntwo\n",
        stored: [AtClose; 3],
    },
    Pattern {
        name: "a group of commands",
        write: Shell(r#"{ /bin/echo one; /bin/echo two; } > "$0""#),
        expected: "one\ntwo\n",
        stored: [AtClose; 3],
    },
    Pattern {
        name: "a loop",
        write: Shell(r#"for number in 1 2 3; do /bin/echo "$number"; done > "$0""#),
        expected: "1\n2\n3\n",
        stored: [AtClose; 3],
    },
    Pattern {
        name: "two children write in turn",
        write: Shell(r#"exec 3> "$0"; /bin/echo one >&3; /bin/echo two >&3; exec 3>&-"#),
        expected: "one\ntwo\n",
        stored: [AtClose, AtClose, Later],
    },
    Pattern {
        name: "a subshell with several commands writes last",
        write: Shell(r#"exec 3> "$0"; echo one >&3; (echo two; /bin/echo three) >&3; exec 3>&-"#),
        expected: "one\ntwo\nthree\n",
        stored: [AtClose; 3],
    },
    Pattern {
        name: "a thread opens and ends, another one writes and closes",
        write: Threads(|path| {
            let path = path.to_owned();
            let mut file = std::thread::spawn(move || File::create(path).unwrap()).join().unwrap();
            file.write_all(b"one\n").unwrap();
        }),
        expected: "one\n",
        stored: [Later, Later, AtClose],
    },
    Pattern {
        name: "one thread opens, another one writes and closes",
        write: Threads(|path| {
            let mut file = File::create(path).unwrap();
            std::thread::spawn(move || file.write_all(b"one\n").unwrap()).join().unwrap();
        }),
        expected: "one\n",
        stored: [AtClose, Later, AtClose],
    },
    Pattern { name: "one command", write: Shell(r#"/bin/echo one > "$0""#), expected: "one\n", stored: [AtClose; 3] },
    Pattern { name: "cat", write: Shell(r#"echo one | cat > "$0""#), expected: "one\n", stored: [AtClose; 3] },
    Pattern {
        name: "dd",
        write: Shell(r#"echo one | dd of="$0" status=none"#),
        expected: "one\n",
        stored: [AtClose; 3],
    },
    Pattern {
        name: "tee",
        write: Shell(r#"echo one | tee "$0" > /dev/null"#),
        expected: "one\n",
        stored: [AtClose; 3],
    },
    Pattern {
        name: "cp",
        write: Shell(r#"echo one > /tmp/s3csi-closing-$$; cp /tmp/s3csi-closing-$$ "$0" && rm /tmp/s3csi-closing-$$"#),
        expected: "one\n",
        stored: [AtClose; 3],
    },
    Pattern { name: "touch", write: Shell(r#"touch "$0""#), expected: "", stored: [Later; 3] },
];

#[test]
fn a_file_is_stored_whole_if_the_engine_sees_who_closes_it() {
    check(0, "closing-visible", |engine| engine.mount());
}

#[test]
fn a_file_is_stored_whole_if_only_the_kernel_knows_who_closes_it() {
    check(1, "closing-known", |engine| engine.processes(ProcessVisibility::Own).mount_by_descriptor(Access::ReadWrite));
}

#[test]
fn a_file_is_stored_whole_if_the_closing_process_is_unknown() {
    check(2, "closing-hidden", |engine| engine.processes(ProcessVisibility::Own).mount());
}

/// All patterns, so that one failure shows what the others do.
fn check(
    world: usize,
    name: &str,
    mount: impl for<'a> FnOnce(EngineLauncher<'a>) -> s3csi_testbed::engine::EngineMount<'a>,
) {
    let fixture = Fixture::new(name);
    let config = Config { buckets: vec![BUCKET.to_owned()], ..Config::default() };
    let store = S3Server::start_blocking(config).unwrap();
    let mount = mount(EngineLauncher::new(&fixture, &store, BUCKET).argument("--allow-delete"));
    let mut problems = Vec::new();
    for (number, pattern) in PATTERNS.iter().enumerate() {
        let key = format!("file-{number}");
        let problem = pattern.write(&mount.path(&key)).and_then(|()| pattern.look(world, &store, &key));
        problems.extend(problem.err().map(|it| format!("{}: {it}", pattern.name)));
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    mount.unmount();
}

impl Pattern {
    fn write(&self, path: &Path) -> Result<(), String> {
        let script = match self.write {
            Shell(script) => script,
            Threads(work) => {
                work(path);
                return Ok(());
            }
        };
        let output = Command::new("sh").arg("-ec").arg(script).arg(path).output().unwrap();
        let is_well = output.status.success() && output.stderr.is_empty();
        if is_well { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
    }

    fn look(&self, world: usize, store: &S3Server, key: &str) -> Result<(), String> {
        let is_stored = || store.object(BUCKET, key).is_some_and(|it| it == self.expected.as_bytes());
        let (is_in_time, time) = match self.stored[world] {
            AtClose => (is_stored(), "at close"),
            Later => (wait_until(Instant::now() + SOON, is_stored), "in time"),
        };
        let found = store.object(BUCKET, key).map(|it| String::from_utf8_lossy(&it).into_owned());
        if is_in_time { Ok(()) } else { Err(format!("not stored {time}; the bucket has {found:?}")) }
    }
}
