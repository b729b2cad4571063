//! Why a program, or a case of pjdfstest, does not work on a volume. Each reason must explain something, and each failure must have
//! one: `make compatibility` fails otherwise.

/// Programs that fail with the default options, and why.
pub const PROGRAM_REASONS: &[(&str, &str)] = &[
    ("hard link", "there is one name for an object; refused with `EPERM`"),
    ("named pipe", "there is no object for it; refused with `EPERM`"),
    ("fallocate(2)", "there is nothing to reserve; `posix_fallocate` works"),
    ("punch a hole", "an object has no holes"),
    ("other extended attributes", "only `user.*` is stored"),
    ("stress-ng utime", "the stressor compares access times, which are not kept"),
];

/// Cases that fail for one reason.
pub struct CaseReason {
    /// Names of cases; `*` stands for any text.
    pub patterns: &'static [&'static str],
    pub reason: &'static str,
}

/// The first that matches counts.
pub const CASE_REASONS: &[CaseReason] = &[
    CaseReason {
        patterns: &[
            "*::fifo",
            "*::block",
            "*::char",
            "*::socket",
            "mkfifo::*",
            "mknod::*",
            "open::fifo_nonblock_wronly",
            "open::socket_error",
        ],
        reason: "there are no named pipes, sockets and device files; the case makes one first",
    },
    CaseReason {
        patterns: &[
            "link::*::regular",
            "rename::preserve_metadata::regular",
            "rename::to_multiply_linked::regular",
            "unlink::*_ctime_*::regular",
        ],
        reason: "there are no hard links; the case makes one",
    },
    CaseReason { patterns: &["utimensat::*"], reason: "access times are not kept: each read would be a write" },
    CaseReason {
        patterns: &["chmod::update_ctime::*"],
        reason: "the time of the last change of attributes is that of the store, in whole seconds, or that of the content",
    },
    CaseReason {
        patterns: &["open::open_trunc"],
        reason: "an empty file is stored a moment after it was closed, and has its new time then",
    },
    CaseReason { patterns: &["rename::updates_link_parent"], reason: "the link count of a directory is always 2" },
];

/// Why a case of pjdfstest fails.
pub fn reason_for_case(name: &str) -> Option<&'static str> {
    let found = CASE_REASONS.iter().find(|it| it.patterns.iter().any(|pattern| matches(pattern, name)));
    found.map(|it| it.reason)
}

fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((start, rest)) => name
            .strip_prefix(start)
            .is_some_and(|name| (0..=name.len()).any(|at| name.is_char_boundary(at) && matches(rest, &name[at..]))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(pattern: &str, name: &str, expected: bool) {
        assert_eq!(matches(pattern, name), expected, "{pattern} and {name}");
    }

    #[test]
    fn patterns_match_whole_names() {
        check("chmod::*::fifo", "chmod::change_perm::fifo", true);
        check("chmod::*::fifo", "chmod::change_perm::fifos", false);
        check("*::fifo*", "chmod::change_perm::fifo", true);
        check("mkfifo::*", "mkfifo::x", true);
        check("mkfifo", "mkfifo::x", false);
    }
}
