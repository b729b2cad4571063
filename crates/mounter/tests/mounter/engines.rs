//! How engines are started, and how their end is reported.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;

use rustix::process::Signal;
use s3csi_handoff::ERROR_FILE;
use s3csi_handoff::{Answer, MountRequest};

use crate::fixture::{
    ENGINE, Gate, Mounter, Pipe, eventually, exited, expect_closed, for_source, killed, link_of, open_files, scripted,
    send_signal,
};

#[test]
fn the_command_line_and_the_environment_are_those_of_the_request() {
    let mounter = Mounter::start(&["--keep", "off"]);
    let script = r#"printf '%s\n' "$@" >&2; tr '\0' '\n' < /proc/$$/environ >&2; readlink /proc/$$/fd/0 >&2; exit 1"#;
    let mut request = scripted(script);
    request.args = ["-d", "--prefix=a b/", "--foreground", "--allow-root"].map(str::to_owned).to_vec();
    request.env.push("AWS_REGION=there".to_owned());
    request.env.push("RUST_BACKTRACE=1".to_owned());

    let error = mounter.request(&request, Pipe::new().writer).failure();

    let (arguments, environment) = error.split_once("--foreground\n").unwrap();
    let lines: Vec<&str> = arguments.lines().collect();
    assert_eq!(lines[0], "bucket");
    assert!(lines[1].starts_with("/dev/fd/"), "{error}");
    assert_eq!(lines[2..], ["--allow-root", "--prefix=a b/", "-d"]);
    let script = format!("SCRIPT={script}");
    let expected = ["AWS_REGION=there", "RUST_BACKTRACE=0", "S3CSI_ENGINE_ERRORS=json", &script, "/dev/null"];
    assert_eq!(environment.lines().collect::<BTreeSet<_>>(), BTreeSet::from(expected));
}

#[test]
fn each_source_has_a_staging_directory_of_its_own_until_its_engine_has_exited() {
    let place = tempfile::tempdir().unwrap();
    let stage = place.path().join("stage");
    let flags = ["--limit", "2", "--stage-size-limit", "100Mi", "--stage-dir", stage.to_str().unwrap()];
    let mounter = Mounter::start(&flags);
    let script =
        r#"printf '%s\n' "$@" >&2; for it; do case $it in --stage=*) ls -d "${it#--stage=}" >&2;; esac; done; exit 1"#;
    let mut request = for_source(&mounter, scripted(script), "source-1");
    request.args = ["--stage=/etc", "--max-stage-size=9999"].map(str::to_owned).to_vec();

    let error = mounter.request(&request, Pipe::new().writer).failure();

    let own = stage.join("sources/source-1").display().to_string();
    let expected = ["--max-stage-size=95", &format!("--stage={own}"), "--foreground", &own];
    assert_eq!(error.lines().skip(2).collect::<Vec<_>>(), expected);
    assert!(!PathBuf::from(own).exists(), "left behind");
}

#[test]
fn an_engine_has_its_own_descriptor_and_no_other() {
    const COUNT: usize = 24;
    let mounter = Mounter::start(&["--limit", "100"]);
    let gate = Gate::new(&mounter, "gate");
    mounter.leaks_nothing(|| {
        let mut started: Vec<_> = std::thread::scope(|scope| {
            let (mounter, gate) = (&mounter, &gate);
            let start = move |number: usize| {
                let Pipe { reader, writer } = Pipe::new();
                let link = link_of(writer.as_fd());
                let request = for_source(mounter, gate.served(), &format!("source-{number}"));
                let mut client = mounter.request(&request, writer);
                client.expect(&Answer::Ready);
                (client, reader, link)
            };
            let threads: Vec<_> = (0..COUNT).map(|number| scope.spawn(move || start(number))).collect();
            threads.into_iter().map(|it| it.join().unwrap()).collect()
        });

        let ours: BTreeSet<&PathBuf> = started.iter().map(|(_, _, link)| link).collect();
        let mut found = BTreeSet::new();
        for engine in mounter.engines() {
            let held: Vec<PathBuf> = open_files(engine).into_iter().filter(|it| ours.contains(it)).collect();
            assert_eq!(held.len(), 1, "engine {engine}");
            found.extend(held);
        }
        assert_eq!(found.len(), COUNT, "each engine has another one");
        assert!(!mounter.descriptors().iter().any(|it| ours.contains(it)), "the mounter keeps no copy");

        for _ in 0..COUNT {
            gate.open();
        }
        for (client, reader, _) in &mut started {
            client.expect(&exited(0, ""));
            expect_closed(reader);
        }
    });
}

#[test]
fn an_engine_that_fails_is_quoted() {
    let mounter = Mounter::start(&[]);
    let failure = |script: &str| {
        let error = mounter.leaks_nothing(|| mounter.run(script).failure());
        let file = mounter.path(ERROR_FILE);
        assert_eq!(std::fs::read_to_string(&file).unwrap(), error);
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o7777, 0o600);
        error
    };
    assert_eq!(failure("echo The bucket does not exist >&2; exit 1"), "The bucket does not exist");
    let silent = "the engine exited with code 7 before it served the mount, without an error message";
    assert_eq!(failure("exit 7"), silent);
    assert_eq!(failure("kill -9 $$"), "the engine was killed by signal 9 before it served the mount");
}

#[test]
fn the_exit_of_an_engine_that_served_is_reported() {
    let mounter = Mounter::start(&[]);
    let check = |script: &str, expected: &Answer| {
        mounter.leaks_nothing(|| {
            let mut client = mounter.run(&format!("echo bucket is mounted at x; {script}"));
            client.expect(&Answer::Ready);
            client.expect(expected);
            client.expect_end();
        });
        assert!(!mounter.path(ERROR_FILE).exists(), "nothing failed to start");
    };
    check("exit 0", &exited(0, ""));
    check("echo oh no >&2; exit 3", &exited(3, "oh no"));
    check("kill -9 $$", &killed(Signal::KILL));
    // Some engine may print such a line again.
    check("echo bucket is mounted at x", &exited(0, ""));
}

#[test]
fn an_engine_that_leaves_in_peace_has_not_failed() {
    let mounter = Mounter::start(&[]);
    let mut client = mounter.run("echo bye >&2");
    client.expect(&exited(0, "bye"));
    client.expect_end();
    assert!(!mounter.path(ERROR_FILE).exists());
}

#[test]
fn only_the_last_words_are_kept() {
    let mounter = Mounter::start(&[]);
    let script =
        r#"awk 'BEGIN { for (i = 0; i < 200000; i++) print "noise number", i > "/dev/stderr" }'; echo end >&2; exit 1"#;
    let error = mounter.run(script).failure();
    assert!(error.len() <= 16 * 1024, "{}", error.len());
    assert!(error.starts_with("noise number "), "{}", &error[..40]);
    assert!(error.ends_with("noise number 199999\nend"));
    assert_eq!(std::fs::read_to_string(mounter.path(ERROR_FILE)).unwrap(), error);
    assert!(mounter.log().contains("noise number 0\n"), "everything is relayed");
}

#[test]
fn what_an_engine_says_is_relayed() {
    let mounter = Mounter::start(&["--limit", "2"]);
    mounter.run("echo to stdout; echo to stderr >&2; printf unfinished").expect(&exited(0, "to stderr"));
    assert_eq!(mounter.output(), "to stdout\nunfinished\n");
    assert!(mounter.log().lines().any(|it| it == "to stderr"));
    let request = for_source(&mounter, scripted("echo hello"), "source");
    mounter.request(&request, Pipe::new().writer).expect(&exited(0, ""));
    assert!(mounter.output().ends_with("\n[source] hello\n"), "{}", mounter.output());
}

#[test]
fn a_grandchild_does_not_hide_the_end_of_an_engine() {
    let mounter = Mounter::start(&[]);
    let gate = Gate::new(&mounter, "gate");
    let request = gate.guard(scripted(r#"(read -r _ < "$GATE") & echo gone >&2; exit 1"#));
    let pipe = Pipe::new();
    assert_eq!(mounter.request(&request, pipe.writer).failure(), "gone");
    gate.open();
    expect_closed(&pipe.reader);
}

#[test]
fn a_missing_engine_is_named() {
    let plain = tempfile::NamedTempFile::new().unwrap();
    check("/nowhere/mount-s3", "No such file or directory (os error 2)");
    check(plain.path().to_str().unwrap(), "Permission denied (os error 13)");
}

#[track_caller]
fn check(engine: &str, reason: &str) {
    let mounter = Mounter::start(&["--engine", engine]);
    let expected = format!("failed to start the engine {engine:?}: {reason}");
    for _ in 0..2 {
        let pipe = Pipe::new();
        let mut client = mounter.leaks_nothing(|| mounter.request(&scripted(""), pipe.writer));
        assert_eq!(client.failure(), expected);
        expect_closed(&pipe.reader);
        assert_eq!(std::fs::read_to_string(mounter.path(ERROR_FILE)).unwrap(), expected);
    }
}

#[test]
fn requests_that_could_mean_something_else_are_refused() {
    let mounter = Mounter::start(&[]);
    let check = |request: &MountRequest, expected: &str| {
        let pipe = Pipe::new();
        let error = mounter.leaks_nothing(|| mounter.request(request, pipe.writer).failure());
        assert_eq!(error, expected);
        assert_eq!(std::fs::read_to_string(mounter.path(ERROR_FILE)).unwrap(), expected);
        expect_closed(&pipe.reader);
    };
    let positional = MountRequest { args: vec!["/etc".into()], ..scripted("") };
    check(&positional, "argument \"/etc\" must start with a hyphen");
    let nameless = MountRequest { bucket_name: String::new(), ..scripted("") };
    check(&nameless, "bucket name \"\" must not be empty");
    let secret = MountRequest { env: vec!["hunter2".into()], ..scripted("") };
    check(&secret, "entry 1 of the environment has no equals sign");
    assert!(!mounter.log().contains("hunter2"), "{}", mounter.log());
}

#[test]
fn the_words_of_an_earlier_engine_are_removed() {
    let mounter = Mounter::start(&[]);
    let victim = mounter.beside("victim");
    std::fs::write(&victim, "precious").unwrap();
    symlink(&victim, mounter.path(ERROR_FILE)).unwrap();
    let gate = Gate::new(&mounter, "gate");
    let mut client = mounter.request(&gate.served(), Pipe::new().writer);
    client.expect(&Answer::Ready);
    assert!(std::fs::symlink_metadata(mounter.path(ERROR_FILE)).is_err(), "removed");
    symlink(&victim, mounter.path(ERROR_FILE)).unwrap();
    gate.open();
    client.expect(&exited(0, ""));
    mounter.run("exit 1").failure();
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
}

/// As drivers have always done it; `AWS_CA_BUNDLE` alone would replace the system's.
#[test]
fn engines_trust_the_given_certificates_and_those_of_the_system() {
    let place = tempfile::tempdir().unwrap();
    let bundle = place.path().join("private.crt");
    let mounter = Mounter::start(&["--keep", "off", "--ca-bundle", bundle.to_str().unwrap()]);
    let system = std::fs::read_to_string("/etc/ssl/certs/ca-certificates.crt").unwrap();
    for content in ["private\n", "private, changed\n"] {
        std::fs::write(&bundle, content).unwrap();
        let file = mounter.run(r#"echo "$AWS_CA_BUNDLE" >&2; exit 1"#).failure();
        assert_eq!(std::fs::read_to_string(file.trim()).unwrap(), format!("{system}\n{content}"));
    }
}

#[test]
fn every_engine_has_a_fresh_cache() {
    let mounter = Mounter::start(&["--limit", "2"]);
    let gate = Gate::new(&mounter, "gate");
    let script = r#"for it; do case "$it" in --cache=*) echo x > "${it#--cache=}/block"; echo "${it#--cache=}" >&2;; esac; done
        echo is mounted at; read -r _ < "$GATE""#;
    // The line above is no sign of readiness: it lacks the bucket's name and so the space before "is".
    let start = |name: &str| {
        let request = MountRequest { args: vec!["--cache=/etc".into()], ..gate.guard(scripted(script)) };
        mounter.request(&for_source(&mounter, request, name), Pipe::new().writer)
    };
    let (mut one, mut two) = (start("one"), start("two"));
    eventually("both engines have their caches", || mounter.output().matches("is mounted at").count() == 2);
    gate.open();
    gate.open();
    let path = |answer: Answer| match answer {
        Answer::Exited { code: Some(0), error, .. } => PathBuf::from(error),
        other => panic!("{other:?}"),
    };
    let (one, two) = (path(one.answer()), path(two.answer()));
    assert_ne!(one, two);
    for cache in [one, two] {
        assert!(cache.starts_with(mounter.cache_root()), "{cache:?}");
        eventually("the cache is removed", || !cache.exists());
    }
}

#[test]
fn an_engine_killed_from_outside_has_exited() {
    let mounter = Mounter::start(&[]);
    let gate = Gate::new(&mounter, "gate");
    let pipe = Pipe::new();
    let mut client = mounter.request(&gate.served(), pipe.writer);
    client.expect(&Answer::Ready);
    send_signal(mounter.engines()[0], Signal::KILL);
    client.expect(&killed(Signal::KILL));
    client.expect_end();
    expect_closed(&pipe.reader);
}

#[test]
fn the_stand_in_is_executable() {
    assert_eq!(std::fs::metadata(ENGINE).unwrap().permissions().mode() & 0o111, 0o111);
}
