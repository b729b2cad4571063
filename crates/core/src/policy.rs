//! Which mount options a PV may set, which become something else and which the driver decides alone.

use std::collections::BTreeMap;

use crate::arguments::MountArguments;

/// What remains of a user's options after policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    pub arguments: MountArguments,
    /// Options that became variables of the engine's environment.
    pub environment: BTreeMap<String, String>,
    /// What was taken away, for one warning each.
    pub removed: Vec<Removed>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Removed {
    /// The option's name without its value, which may be none of the log's business.
    pub option: String,
    pub reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    #[error("mount option {option} is given more than once, with different values ({}); keep one of them", values.join(", "))]
    Conflict { option: String, values: Vec<String> },

    #[error("mount option --aws-max-attempts must be a number of at least 1, not {value:?}")]
    MaxAttempts { value: String },
}

/// The user agent shows the store's operators which driver and credentials they see; a PV cannot change it.
const USER_AGENT: &str = "--user-agent-prefix";

const MAX_ATTEMPTS: &str = "--aws-max-attempts";

/// Options a PV may not set, and why.
const BLOCKED: [(&str, &str); 15] = [
    ("--profile", "the driver chooses the credentials; set authenticationSource in volumeAttributes instead"),
    ("--endpoint-url", "the endpoint is a setting of the driver, so that no PV can send its keys elsewhere"),
    ("--cache-xz", "a cache in S3 Express One Zone is not available with S3-compatible stores"),
    ("--incremental-upload", "appending to objects is not available with S3-compatible stores"),
    ("--storage-class", "storage classes of AWS are not available with S3-compatible stores"),
    ("-o", "options inside another option would get past this policy; list each in mountOptions"),
    ("--ca-bundle", "whom to trust is a setting of the driver; the path would be read in the mounter's file system"),
    ("--log-directory", "the path would be written in the mounter's file system; the engine logs to its output"),
    (
        "--stage",
        "the path would be written in the mounter's file system; the driver gives each engine a directory of its own",
    ),
    ("--otlp-endpoint", "where metrics go is the driver's business; a PV could make the engine call any address"),
    ("--auto-unmount", "the driver unmounts; the engine cannot do it with the descriptor it is given"),
    ("--foreground", "the mounter decides how it starts the engine"),
    ("--help", "it would print a text instead of mounting"),
    ("--version", "it would print a text instead of mounting"),
    (USER_AGENT, "the driver always sets it"),
];

/// Engine options that happen to begin a blocked one's name and are allowed all the same.
const ALLOWED_BEGINNINGS: [&str; 1] = ["--cache"];

/// Options that may have several values at once.
const MULTIPLE: [&str; 1] = ["--bind"];

/// Applies the policy to a user's options. What it takes away is reported, what it cannot decide is an error.
pub fn apply(mut arguments: MountArguments, user_agent: &str) -> Result<Applied, PolicyError> {
    let removed = removed(&arguments);
    for Removed { option, .. } in &removed {
        arguments.remove(option);
    }
    refuse_conflicts(&arguments)?;

    let mut environment = BTreeMap::new();
    for value in arguments.remove(MAX_ATTEMPTS) {
        let value = value.unwrap_or_default();
        match value.parse::<u32>() {
            Ok(attempts @ 1..) => environment.insert("AWS_MAX_ATTEMPTS".to_owned(), attempts.to_string()),
            Ok(0) | Err(_) => return Err(PolicyError::MaxAttempts { value }),
        };
    }
    arguments.set(USER_AGENT, Some(user_agent));
    Ok(Applied { arguments, environment, removed })
}

/// Which of a user's options the policy takes away.
pub fn removed(arguments: &MountArguments) -> Vec<Removed> {
    let names = arguments.names().into_iter();
    names.filter_map(|option| blocked(&option).map(|reason| Removed { option, reason })).collect()
}

/// Why this option is blocked, if it is.
///
/// Parsers of command lines may accept the beginning of a name for the whole, other cases or underscores; an engine that
/// does must not become a way around the policy.
fn blocked(name: &str) -> Option<&'static str> {
    if ALLOWED_BEGINNINGS.contains(&name) {
        return None;
    }
    let alike = match name.strip_prefix("--") {
        Some(long) => format!("--{}", long.to_ascii_lowercase().replace('_', "-")),
        None => name.to_owned(),
    };
    let is_meant = |it: &str| it == alike || (alike.starts_with("--") && it.starts_with(&alike));
    BLOCKED.iter().find(|(it, _)| is_meant(it)).map(|(_, reason)| *reason)
}

/// The engine refuses an option given twice, or takes the last one, which after sorting is arbitrary.
fn refuse_conflicts(arguments: &MountArguments) -> Result<(), PolicyError> {
    for option in arguments.names() {
        let values: Vec<String> = arguments.values(&option).map(|it| it.unwrap_or("no value").to_owned()).collect();
        if 1 < values.len() && !MULTIPLE.contains(&option.as_str()) {
            return Err(PolicyError::Conflict { option, values });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const AGENT: &str = "s3-csi-driver/1 credential-source#driver";

    /// `expected`: what remains beside the user agent, or the error; then what was removed.
    #[track_caller]
    fn check(raw: &[&str], expected: Result<&[&str], &str>, expected_removed: &[&str]) {
        match apply(MountArguments::parse(raw).unwrap(), AGENT) {
            Ok(Applied { mut arguments, environment, removed }) => {
                assert_eq!(arguments.remove(USER_AGENT), [Some(AGENT.to_owned())]);
                let mut remaining = arguments.render();
                remaining.extend(environment.iter().map(|(key, value)| format!("{key}={value}")));
                assert_eq!(expected, Ok(&remaining.iter().map(String::as_str).collect::<Vec<_>>()[..]));
                assert_eq!(removed.iter().map(|it| it.option.as_str()).collect::<Vec<_>>(), expected_removed);
                assert!(removed.iter().all(|it| !it.reason.is_empty()));
            }
            Err(error) => assert_eq!(expected, Err(error.to_string().as_str())),
        }
    }

    #[test]
    fn blocked_options_are_removed_and_named() {
        check(
            &[
                "profile x",
                "endpoint-url=http://a",
                "cache-xz b",
                "incremental-upload",
                "storage-class=X",
                "-o ro",
                "uid 1",
            ],
            Ok(&["--uid=1"]),
            &["--cache-xz", "--endpoint-url", "--incremental-upload", "--profile", "--storage-class", "-o"],
        );
        check(
            &["ca-bundle=/etc/passwd", "-l /tmp", "auto-unmount", "user-agent-prefix=me"],
            Ok(&[]),
            &["--auto-unmount", "--ca-bundle", "--log-directory", "--user-agent-prefix"],
        );
    }

    #[test]
    fn a_blocked_option_given_twice_is_removed_twice() {
        check(&["endpoint-url=http://a", "endpoint-url http://b", "--endpoint-url"], Ok(&[]), &["--endpoint-url"]);
        check(&["-l/a", "--log-directory=/b"], Ok(&[]), &["--log-directory"]);
    }

    #[test]
    fn glued_abbreviated_and_respelled_options_do_not_get_past() {
        check(&["-oprofile=x", "-l/tmp", "-fd", "-dl/tmp"], Ok(&["-d"]), &["--log-directory", "-o"]);
        check(&["endpoint=http://a", "prof=x", "stor=y"], Ok(&[]), &["--endpoint", "--prof", "--stor"]);
        check(&["Endpoint-URL=http://a", "endpoint_url=http://b"], Ok(&[]), &["--Endpoint-URL", "--endpoint_url"]);
    }

    #[test]
    fn everything_else_is_left_to_the_engine() {
        let options =
            ["--allow-delete", "--bind=eth0", "--bind=eth1", "--cache=/c", "--prefix=a/", "--sse=AES256", "-d"];
        check(&options, Ok(&options), &[]);
    }

    #[test]
    fn the_number_of_attempts_becomes_a_variable() {
        check(&["aws-max-attempts 5", "uid 1"], Ok(&["--uid=1", "AWS_MAX_ATTEMPTS=5"]), &[]);
        check(
            &["aws-max-attempts 0"],
            Err("mount option --aws-max-attempts must be a number of at least 1, not \"0\""),
            &[],
        );
        check(
            &["aws-max-attempts"],
            Err("mount option --aws-max-attempts must be a number of at least 1, not \"\""),
            &[],
        );
    }

    #[test]
    fn different_values_of_one_option_are_an_error() {
        let conflict = "is given more than once, with different values";
        check(&["uid 1", "uid 2"], Err(&format!("mount option --uid {conflict} (1, 2); keep one of them")), &[]);
        check(
            &["-d", "debug=x"],
            Err(&format!("mount option --debug {conflict} (no value, x); keep one of them")),
            &[],
        );
        check(
            &["aws-max-attempts 1", "aws-max-attempts 2"],
            Err(&format!("mount option --aws-max-attempts {conflict} (1, 2); keep one of them")),
            &[],
        );
    }

    /// A blocked option in one of the many ways to write it.
    fn blocked_spellings() -> impl Strategy<Value = String> {
        let long = prop::sample::select(
            BLOCKED.iter().map(|(name, _)| *name).filter(|it| it.starts_with("--")).collect::<Vec<_>>(),
        );
        let long = (long, any::<bool>(), "( {0,2}|[ =][a-z/:]{0,5}| +x=y)", any::<bool>()).prop_map(
            |(name, is_dashed, value, is_padded)| {
                let name = if is_dashed { name } else { &name[2..] };
                if is_padded { format!(" {name}{value} ") } else { format!("{name}{value}") }
            },
        );
        prop_oneof![long, "-[df]{0,2}[ol][ =]?[a-z/,=]{0,5}"]
    }

    proptest! {
        #[test]
        fn no_blocked_option_survives(
            raw in prop::collection::vec(prop_oneof![blocked_spellings(), "(-d|uid=1|prefix a=b/|cache /c)"], 0..8),
        ) {
            let Applied { arguments, .. } = apply(MountArguments::parse(&raw).unwrap(), AGENT).unwrap();
            prop_assert_eq!(arguments.values(USER_AGENT).collect::<Vec<_>>(), [Some(AGENT)]);
            for (name, _) in BLOCKED {
                prop_assert!(name == USER_AGENT || !arguments.has(name), "{} in {:?}", name, arguments);
            }
            for option in arguments.render() {
                let name = option.split('=').next().unwrap();
                prop_assert!(["-d", "--uid", "--prefix", "--cache", USER_AGENT].contains(&name), "{}", option);
            }
        }

        #[test]
        fn policy_never_panics(raw in prop::collection::vec(any::<String>(), 0..4)) {
            if let Ok(arguments) = MountArguments::parse(raw) {
                let _ = apply(arguments, AGENT);
            }
        }
    }
}
