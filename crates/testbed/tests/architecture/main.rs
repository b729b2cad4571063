//! The house rules of docs/ARCHITECTURE.md, checked on the source text and on cargo's own view of the packages.
//! A rule here says who may depend on what and who may call what; what the code does is tested elsewhere.

mod homonyms;
mod packages;
mod prose;
mod sources;
mod walks;
mod words;

use packages::Package;
use sources::Source;

/// Fails with the rule, its reason and every place that breaks it.
#[track_caller]
fn check(rule: &str, violations: impl IntoIterator<Item = String>) {
    let violations: Vec<String> = violations.into_iter().collect();
    assert!(violations.is_empty(), "{rule}\n  {}\n", violations.join("\n  "));
}

/// Every place in the given files that mentions one of the paths, as `file:line mentions path`.
fn mentions<'a>(files: impl IntoIterator<Item = &'a Source>, paths: &[&str]) -> Vec<String> {
    let mut places = Vec::new();
    for file in files {
        for path in paths {
            places.extend(file.lines_that_mention(path).map(|line| format!("{}:{line} mentions {path}", file.path)));
        }
    }
    places
}

mod dependencies {
    use super::*;

    #[test]
    fn core_depends_on_nothing_that_does_io() {
        const ALLOWED: [&str; 3] = ["sha2", "thiserror", "uuid"];
        let packages = packages::all();
        let foreign = packages.direct_dependencies("s3csi-core").filter(|it| !ALLOWED.contains(&it.as_str()));
        check(
            "core is pure; it may depend on hashing and on derive macros only",
            foreign.map(|it| format!("s3csi-core depends on {it}")),
        );
    }

    #[test]
    fn mounter_stays_small() {
        const FORBIDDEN: [&str; 9] = ["async-", "aws", "hyper", "k8s", "kube", "mio", "mountpoint", "tokio", "tonic"];
        // 46 when this was written: half of them the command line's, nine the hash function of core. A runtime or a client
        // would double it.
        const LIMIT: usize = 50;
        let packages = packages::all();
        let tree = packages.dependency_tree("s3csi-mounter");
        let forbidden = tree.iter().filter(|it| FORBIDDEN.iter().any(|prefix| it.starts_with(prefix)));
        check(
            "the mounter runs beside the workload's keys without privileges: no async runtime, no Kubernetes, no gRPC, no AWS in it",
            forbidden.map(|it| format!("s3csi-mounter depends on {it}, perhaps through another package")),
        );
        assert!(
            tree.len() <= LIMIT,
            "the mounter's dependency tree has grown to {} packages, the limit is {LIMIT}: {tree:?}",
            tree.len()
        );
    }

    #[test]
    fn our_crates_depend_on_each_other_in_one_direction() {
        const ALLOWED: [(&str, &[&str]); 6] = [
            ("s3csi-core", &[]),
            ("s3csi-handoff", &["s3csi-core"]),
            ("s3csi-supervisor", &["s3csi-core", "s3csi-handoff"]),
            ("s3csi-mounter", &["s3csi-core", "s3csi-handoff", "s3csi-supervisor"]),
            ("s3csi-engine", &["s3csi-core", "s3csi-handoff", "s3csi-supervisor"]),
            ("s3csi-driver", &["s3csi-core", "s3csi-handoff"]),
        ];
        let packages = packages::all();
        for (package, allowed) in ALLOWED {
            let ours = packages.direct_dependencies(package).filter(|it| it.starts_with("s3csi-"));
            check(
                "handoff is what the programs agree on; no program depends on another program",
                ours.filter(|it| !allowed.contains(&it.as_str())).map(|it| format!("{package} depends on {it}")),
            );
        }
    }

    #[test]
    fn tls_has_one_library_beside_the_engine_s() {
        const FORBIDDEN: [&str; 4] = ["aws-lc-rs", "aws-lc-sys", "native-tls", "openssl-sys"];
        let packages = packages::all();
        let tree = packages.dependency_tree("s3csi-driver");
        check(
            "the driver speaks TLS by rustls with ring; a second library would bring a second trust store and a bigger image",
            FORBIDDEN.iter().filter(|it| tree.contains(**it)).map(|it| format!("s3csi-driver depends on {it}")),
        );
    }

    #[test]
    fn packages_come_from_the_public_registry_or_from_this_repository() {
        let packages = packages::all();
        check(
            "no dependency comes from a git repository or a private registry; a wrapper is preferred to a fork",
            packages.iter().filter(|it| !it.is_ours() && !it.is_from_crates_io()).map(Package::name_and_version),
        );
    }

    #[test]
    fn licences_are_allowed() {
        let allowed = packages::allowed_licences(&sources::read("deny.toml"));
        assert!(allowed.len() > 3, "deny.toml allows no licences, so this rule would check nothing");
        let packages = packages::all();
        check(
            "every dependency has a licence that deny.toml allows (add one there, with its reason)",
            packages
                .iter()
                .filter(|it| !it.is_allowed(&allowed))
                .map(|it| format!("{} is {:?}", it.name_and_version(), it.licence())),
        );
    }
}

mod rooms {
    use super::*;

    #[test]
    fn core_reads_no_file_network_clock_or_environment() {
        // Addresses are plain values, so `std::net` as such is fine; sockets and name resolution are not.
        const WORLD: [&str; 19] = [
            "std::env",
            "std::fs",
            "std::io",
            "std::os::fd",
            "std::os::linux",
            "std::os::unix::fs",
            "std::os::unix::io",
            "std::os::unix::net",
            "std::os::unix::process",
            "std::process",
            "std::thread",
            "SystemTime",
            "Instant",
            "TcpListener",
            "TcpStream",
            "ToSocketAddrs",
            "UdpSocket",
            "async",
            "tokio",
        ];
        let sources = sources::all();
        check("core is pure: facts come in as arguments", mentions(sources.beneath("crates/core/src"), &WORLD));
    }

    #[test]
    fn only_host_and_engine_mount() {
        const MOUNT_CALLS: [&str; 14] = [
            "rustix::mount",
            "libc::mount",
            "libc::umount",
            "libc::umount2",
            "nix::mount",
            "umount2",
            "fsopen",
            "fsmount",
            "move_mount",
            "open_tree",
            "mount_setattr",
            "pivot_root",
            "MountFlags",
            "UnmountFlags",
        ];
        let sources = sources::all();
        let others = sources
            .product()
            .filter(|it| !it.is_beneath("crates/driver/src/host") && !it.is_beneath("crates/engine/src"));
        check(
            "mount(2) and its family are called in crates/driver/src/host and by the engine only",
            mentions(others, &MOUNT_CALLS),
        );
    }

    #[test]
    fn only_csi_names_grpc_codes() {
        let sources = sources::all();
        let others = sources.product().filter(|it| !it.is_beneath("crates/driver/src/csi"));
        check(
            "an error gets its gRPC code in crates/driver/src/csi and nowhere else",
            mentions(others, &["tonic::Code", "tonic::Status", "Code::", "Status::"]),
        );
    }

    #[test]
    fn only_rooms_that_need_it_know_kubernetes() {
        // The node reads what concerns it; nothing else of the driver asks the API server.
        const ROOMS: [&str; 4] = [
            "crates/driver/src/api",
            "crates/driver/src/cli",
            "crates/driver/src/controller",
            "crates/driver/src/node",
        ];
        let sources = sources::all();
        let others = sources.product().filter(|it| !ROOMS.iter().any(|room| it.is_beneath(room)));
        check(
            "Kubernetes is asked by the controller and the node, described in api, connected to by cli",
            mentions(others, &["kube::", "k8s_openapi"]),
        );
    }

    #[test]
    fn only_provisioning_asks_s3() {
        let sources = sources::all();
        let driver = sources.beneath("crates/driver/src").filter(|it| !it.is_beneath("crates/driver/src/provision"));
        check(
            "in the driver, S3 is asked in crates/driver/src/provision only; mounts are the engine's",
            mentions(driver, &["aws_sdk_s3", "aws_smithy_http_client"]),
        );
    }

    #[test]
    fn only_the_command_line_reads_the_environment() {
        const READS: [&str; 6] =
            ["env::var", "env::var_os", "env::vars", "env::vars_os", "env::set_var", "env::remove_var"];
        let sources = sources::all();
        let others = || sources.product().filter(|it| !it.is_command_line());
        let mut places = mentions(others(), &READS);
        for file in others() {
            places.extend(
                file.arguments_with_environment()
                    .map(|line| format!("{}:{line} gives a flag an environment variable", file.path)),
            );
        }
        check("settings are read in cli/ or main.rs and handed on as values", places);
    }
}

mod source_files {
    use super::*;

    /// The only files that may say `unsafe`: where neither the kernel nor a library has a safe wrapper for what we need.
    const UNSAFE_FILES: [&str; 4] = [
        "crates/engine/src/client/values.rs",
        "crates/engine/src/session/descriptor.rs",
        "crates/engine/src/session/request_buffers.rs",
        "crates/engine/src/state/memory.rs",
    ];

    #[test]
    fn every_source_file_is_compiled() {
        let sources = sources::all();
        let reachable = sources.reachable_from(&packages::all().target_roots());
        check(
            "every .rs file is declared by a `mod` that leads to a target; a forgotten file looks tested and is not",
            sources.all().filter(|it| !reachable.contains(&it.path)).map(|it| it.path.clone()),
        );
    }

    #[test]
    fn every_test_program_has_a_stage() {
        let lists = sources::test_lists(&sources::read("Makefile"));
        let packages = packages::all();
        let programs = packages.test_programs();
        let is_listed_once = |program: &String| lists.iter().filter(|it| *it == program).count() == 1;
        check(
            "each test program is in exactly one of the Makefile's *_TESTS lists, or `make test` would not run it",
            programs.iter().filter(|it| !is_listed_once(it)).cloned(),
        );
        check(
            "the Makefile's *_TESTS lists name only what exists",
            lists.iter().filter(|it| !programs.contains(*it)).cloned(),
        );
    }

    #[test]
    fn crates_but_the_engine_forbid_unsafe_code() {
        let sources = sources::all();
        let roots = packages::all().shipped_roots();
        check(
            "crate roots start with #![forbid(unsafe_code)]; only the engine may name exceptions",
            roots
                .iter()
                .filter(|it| !it.starts_with("crates/engine/"))
                .filter(|it| !sources.get(it).code.contains("#![forbid(unsafe_code)]"))
                .cloned(),
        );
    }

    #[test]
    fn unsafe_code_stays_in_its_rooms() {
        let sources = sources::all();
        let others = sources.all().filter(|it| !UNSAFE_FILES.contains(&it.path.as_str()));
        check("`unsafe` is written in the files listed in this test only", mentions(others, &["unsafe"]));
        let stale = UNSAFE_FILES.iter().filter(|it| sources.get(it).lines_that_mention("unsafe").next().is_none());
        check("the list of files with unsafe code is no longer than needed", stale.map(ToString::to_string));
    }

    #[test]
    fn modules_with_children_are_mod_rs() {
        let sources = sources::all();
        check(
            "a module with children is foo/mod.rs, not foo.rs beside foo/",
            sources.all().filter(|it| sources.has_children_beside(it)).map(|it| it.path.clone()),
        );
    }

    #[test]
    fn public_types_of_different_meaning_have_different_names() {
        let sources = sources::all();
        let is_checked = |it: &&Source| it.path.contains("/src/") && !it.path.contains("/tests");
        let found = homonyms::find(sources.handwritten().filter(is_checked));
        let is_allowed = |name: &str| homonyms::ALLOWED.iter().any(|(it, _)| *it == name);
        check(
            "one word per thing and one thing per word: rename one of them, or add it to homonyms.rs with its reason",
            found
                .iter()
                .filter(|(name, _)| !is_allowed(name))
                .map(|(name, files)| format!("{name}: {}", files.join(", "))),
        );
        check(
            "the list of allowed homonyms is no longer than needed",
            homonyms::ALLOWED.iter().filter(|(it, _)| !found.contains_key(*it)).map(|(it, _)| (*it).to_owned()),
        );
    }

    #[test]
    fn files_are_short_enough_to_read() {
        const LIMIT: usize = 500;
        let sources = sources::all();
        let long = sources.handwritten().filter(|it| it.line_count() > LIMIT);
        check(
            "one concern per file, 500 lines at most",
            long.map(|it| format!("{} has {} lines", it.path, it.line_count())),
        );
    }

    #[test]
    fn files_say_what_they_are_for() {
        let sources = sources::all();
        let silent = sources.handwritten().filter(|it| !it.has_header());
        check("every file starts with `//!`: what it is for", silent.map(|it| it.path.clone()));
    }

    #[test]
    fn exceptions_are_visible() {
        let sources = sources::all();
        check(
            "a lint is silenced by #[expect(…, reason = …)], never by allow",
            mentions(sources.handwritten(), &["#[allow", "#![allow"]),
        );
    }

    #[test]
    fn nothing_is_postponed() {
        // Put together here, so that this file does not find itself.
        let words = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];
        let sources = sources::all();
        let mut places = Vec::new();
        for file in sources.handwritten() {
            for (number, line) in file.text.lines().enumerate() {
                places.extend(
                    words
                        .iter()
                        .filter(|it| line.contains(*it))
                        .map(|it| format!("{}:{} says {it}", file.path, number + 1)),
                );
            }
        }
        check("what is not done is an issue, not a comment", places);
    }
}

mod tests_of_the_house {
    use super::*;

    #[test]
    fn tests_are_neither_skipped_nor_expected_to_panic() {
        let sources = sources::all();
        check(
            "a test runs, and says itself what should go wrong",
            mentions(sources.all(), &["#[ignore", "should_panic"]),
        );
    }

    #[test]
    fn tests_wait_for_conditions_and_not_for_time() {
        let sources = sources::all();
        let places = sources.all().flat_map(|file| file.sleeps_in_tests().map(|line| format!("{}:{line}", file.path)));
        check(
            "a test never sleeps to let something happen; only a helper named wait_… or eventually… may, between two looks at a condition",
            places,
        );
    }
}

mod documents {
    use super::*;

    #[test]
    fn retired_words_stay_retired() {
        let architecture = sources::read("docs/ARCHITECTURE.md");
        let retired = words::retired(&architecture);
        assert!(retired.len() > 20, "ARCHITECTURE has no list of retired words, so this rule would check nothing");
        let sources = sources::all();
        // The rules themselves spell out what they look for.
        let is_checked = |it: &&Source| !it.is_beneath("crates/testbed/tests/architecture");
        let files = sources.handwritten().filter(is_checked);
        let in_code = files.flat_map(|it| words::uses(&it.path, &it.text, &it.code, &retired));
        let in_documents = words::documents().into_iter().flat_map(|(path, text)| {
            let text = words::without_the_list(&path, &text);
            words::uses(&path, &text, &text, &retired)
        });
        check("retired words are used nowhere; ARCHITECTURE says what to write instead", in_code.chain(in_documents));
    }

    #[test]
    fn walks_name_files_that_exist() {
        const LIMIT: usize = 25;
        let walks = walks::all(&sources::read("docs/ARCHITECTURE.md"));
        assert_eq!(walks.len(), 2, "ARCHITECTURE has two walks");
        let sources = sources::all();
        let missing = walks.iter().flat_map(|it| &it.files).filter(|it| !sources.has(it));
        check("each file of a walk exists", missing.cloned());
        check(
            "a walk passes some files, and at most 25",
            walks
                .iter()
                .filter(|it| it.files.len() < 5 || LIMIT < it.files.len())
                .map(|it| format!("{} has {}", it.title, it.files.len())),
        );
    }

    #[track_caller]
    fn check_says(document: &str, words: &[&str]) {
        let text = sources::read(document);
        check(
            &format!("{document} says what a newcomer looks for"),
            words.iter().filter(|it| !text.contains(*it)).map(|it| format!("missing: {it}")),
        );
    }

    #[test]
    fn the_readme_names_the_two_commands() {
        check_says("README.md", &["make demo", "make test"]);
    }

    #[test]
    fn the_changelog_is_open() {
        check_says("CHANGELOG.md", &["## [Unreleased]"]);
    }

    #[test]
    fn the_notice_names_what_is_linked_and_copied() {
        check_says("NOTICE", &["libfuse", "LGPL-2.1", "csi.proto", "pluginregistration.proto"]);
    }

    #[test]
    fn the_architecture_names_every_crate() {
        check_says(
            "docs/ARCHITECTURE.md",
            &[
                "crates/bench",
                "crates/core",
                "crates/driver",
                "crates/engine",
                "crates/handoff",
                "crates/mounter",
                "crates/s3-server",
                "crates/supervisor",
                "crates/testbed",
            ],
        );
    }
}
