//! Mount options as users write them, read into one shape: a multimap of option names to values.
//! What is allowed is decided by `policy`; what an option means is the engine's business.

use std::collections::BTreeSet;

/// The command-line options of one engine.
///
/// Two exactly equal options are one; the same option with different values is kept as given, in order, until policy
/// decides. An option is found under its long name, its short letter and without dashes (`-d`, `--debug`, `debug`).
/// Two sets are equal when they mean the same, whatever the order and the spelling.
#[derive(Clone, Debug, Default)]
pub struct MountArguments {
    entries: Vec<Entry>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("mount option {option:?} {problem}")]
pub struct InvalidArgument {
    pub option: String,
    pub problem: &'static str,
}

#[derive(Clone, Debug)]
struct Entry {
    /// With its dashes, as the user spelled it: `-d` or `--debug`.
    key: String,
    value: Option<String>,
}

/// Short letters of the engine's command line and the names they stand for. `-v` is here because users try it.
const SHORT_NAMES: [(&str, &str); 6] = [
    ("-d", "--debug"),
    ("-f", "--foreground"),
    ("-h", "--help"),
    ("-l", "--log-directory"),
    ("-v", "--version"),
    ("-V", "--version"),
];

/// Letters whose value may be glued to them: `-l/var/log`, `-oallow_other`.
const LETTERS_WITH_VALUE: [char; 2] = ['l', 'o'];

/// Decided by the process that starts the engine. In a PV they never had an effect, so they are dropped silently.
const DROPPED: [&str; 3] = ["--foreground", "--help", "--version"];

impl MountArguments {
    /// Reads one option per text: `name`, `name value`, `name=value`, with or without dashes, or a group of letters.
    ///
    /// Nothing that comes out of here can be taken for a positional argument or end the options (`--`).
    pub fn parse<S: AsRef<str>>(raw: impl IntoIterator<Item = S>) -> Result<Self, InvalidArgument> {
        let mut arguments = Self::default();
        for option in raw {
            arguments.parse_one(option.as_ref())?;
        }
        Ok(arguments)
    }

    pub fn has(&self, key: &str) -> bool {
        self.values(key).next().is_some()
    }

    /// The first value of an option; `None` also for one that is given without a value.
    pub fn value(&self, key: &str) -> Option<&str> {
        self.values(key).next().flatten()
    }

    /// Every value of an option, in the order given.
    pub fn values(&self, key: &str) -> impl Iterator<Item = Option<&str>> {
        let name = long_name(&dashed(key)).to_owned();
        self.entries.iter().filter(move |it| it.name() == name).map(|it| it.value.as_deref())
    }

    /// Replaces every occurrence of an option by this one.
    pub fn set(&mut self, key: &str, value: Option<&str>) {
        self.remove(key);
        self.push(&dashed(key), value);
    }

    pub fn set_if_absent(&mut self, key: &str, value: Option<&str>) {
        if !self.has(key) {
            self.push(&dashed(key), value);
        }
    }

    /// Removes every occurrence of an option, however spelled, and returns their values.
    pub fn remove(&mut self, key: &str) -> Vec<Option<String>> {
        let name = long_name(&dashed(key)).to_owned();
        self.entries.extract_if(.., |it| it.name() == name).map(|it| it.value).collect()
    }

    /// `key` or `key=value`, sorted.
    pub fn render(&self) -> Vec<String> {
        let mut rendered: Vec<String> = self.entries.iter().map(|it| joined(&it.key, it.value.as_deref())).collect();
        rendered.sort();
        rendered
    }

    /// Like [`MountArguments::render`], but under long names: equal for arguments that mean the same.
    pub fn normalised(&self) -> Vec<String> {
        let mut rendered: Vec<String> = self.entries.iter().map(|it| joined(it.name(), it.value.as_deref())).collect();
        rendered.sort();
        rendered
    }

    /// The distinct options by their long names, sorted.
    pub(crate) fn names(&self) -> BTreeSet<String> {
        self.entries.iter().map(|it| it.name().to_owned()).collect()
    }

    fn parse_one(&mut self, raw: &str) -> Result<(), InvalidArgument> {
        let invalid = |problem| InvalidArgument { option: raw.to_owned(), problem };
        let text = raw.trim_matches(' ');
        if text.is_empty() {
            return Err(invalid("is empty"));
        }
        if text.contains(char::is_control) {
            return Err(invalid("contains a control character"));
        }
        let is_group_of_letters = text.starts_with('-') && !text.starts_with("--");
        if is_group_of_letters { self.parse_letters(&text[1..]) } else { self.parse_long(text) }.map_err(invalid)
    }

    fn parse_long(&mut self, text: &str) -> Result<(), &'static str> {
        // Whichever comes first separates, once: `prefix a=b/` and `prefix=a b/` both keep their value whole.
        let (key, value) = match text.split_once([' ', '=']) {
            Some((key, value)) => (key, some_value(value)),
            None => (text, None),
        };
        let name = key.strip_prefix("--").unwrap_or(key);
        if name.is_empty() {
            return Err("has no name");
        }
        let is_letter_or_digit = |it: char| it.is_ascii_alphanumeric();
        if !name.starts_with(is_letter_or_digit)
            || !name.chars().all(|it| is_letter_or_digit(it) || it == '-' || it == '_')
        {
            return Err("is not an option: its name may only contain letters, digits and hyphens");
        }
        self.push(&format!("--{name}"), value);
        Ok(())
    }

    /// Takes a group like `-df` or `-dl/var/log` apart, as the engine would, so that nothing hides in it.
    fn parse_letters(&mut self, letters: &str) -> Result<(), &'static str> {
        let mut rest = letters.chars();
        if letters.is_empty() {
            return Err("has no name");
        }
        while let Some(letter) = rest.next() {
            if !letter.is_ascii_alphanumeric() {
                return Err("is not an option: after one hyphen only letters may follow");
            }
            let after = rest.as_str();
            let key = format!("-{letter}");
            let is_separated = after.starts_with([' ', '=']);
            if is_separated || LETTERS_WITH_VALUE.contains(&letter) {
                self.push(&key, some_value(after.strip_prefix([' ', '=']).unwrap_or(after)));
                return Ok(());
            }
            self.push(&key, None);
        }
        Ok(())
    }

    fn push(&mut self, key: &str, value: Option<&str>) {
        let name = long_name(key);
        let is_known = || self.entries.iter().any(|it| it.name() == name && it.value.as_deref() == value);
        if DROPPED.contains(&name) || is_known() {
            return;
        }
        self.entries.push(Entry { key: key.to_owned(), value: value.map(str::to_owned) });
    }
}

impl PartialEq for MountArguments {
    fn eq(&self, other: &Self) -> bool {
        self.normalised() == other.normalised()
    }
}

impl Eq for MountArguments {}

impl Entry {
    fn name(&self) -> &str {
        long_name(&self.key)
    }
}

fn long_name(key: &str) -> &str {
    SHORT_NAMES.iter().find(|(short, _)| *short == key).map_or(key, |(_, long)| long)
}

fn dashed(key: &str) -> String {
    if key.starts_with('-') { key.to_owned() } else { format!("--{key}") }
}

/// An option without a value and one with an empty value are the same.
fn some_value(value: &str) -> Option<&str> {
    Some(value.trim_matches(' ')).filter(|it| !it.is_empty())
}

fn joined(key: &str, value: Option<&str>) -> String {
    match value {
        Some(value) => format!("{key}={value}"),
        None => key.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn check(raw: &[&str], expected: Result<&[&str], &str>) {
        match MountArguments::parse(raw) {
            Ok(arguments) => {
                assert_eq!(expected, Ok(&arguments.render().iter().map(String::as_str).collect::<Vec<_>>()[..]));
            }
            Err(error) => assert_eq!(expected, Err(error.to_string().as_str())),
        }
    }

    #[test]
    fn one_option_each() {
        for (raw, expected) in [
            ("allow-delete", "--allow-delete"),
            ("--allow-delete", "--allow-delete"),
            ("  --allow-delete ", "--allow-delete"),
            ("region us-west-2", "--region=us-west-2"),
            ("region=us-west-2", "--region=us-west-2"),
            ("--region us-west-2", "--region=us-west-2"),
            ("--uid    1000", "--uid=1000"),
            ("sse=aws:kms", "--sse=aws:kms"),
            ("prefix kwk3-di/sub=vault/", "--prefix=kwk3-di/sub=vault/"),
            ("prefix=kwk3-di/sub vault/", "--prefix=kwk3-di/sub vault/"),
            ("prefix=a/b=c/", "--prefix=a/b=c/"),
            ("prefix backup files = production/", "--prefix=backup files = production/"),
            ("prefix = a/", "--prefix== a/"),
            ("prefix=", "--prefix"),
            ("prefix=--read-only", "--prefix=--read-only"),
            ("-d", "-d"),
            ("-l logs/", "-l=logs/"),
            ("-l=logs/", "-l=logs/"),
            ("-llogs/ x=y", "-l=logs/ x=y"),
            ("-oallow_other,ro", "-o=allow_other,ro"),
            ("-dl/logs", "-d|-l=/logs"),
            ("-x 5", "-x=5"),
        ] {
            check(&[raw], Ok(&expected.split('|').collect::<Vec<_>>()));
        }
    }

    #[test]
    fn options_are_sorted_by_their_rendered_text() {
        check(
            &["-d", "sse=aws:kms", "sse-kms-key-id=arn", "allow-delete"],
            Ok(&["--allow-delete", "--sse-kms-key-id=arn", "--sse=aws:kms", "-d"]),
        );
    }

    #[test]
    fn equal_options_are_one_and_different_values_are_kept() {
        check(&["uid 1", "--uid=1", "-d", "--debug"], Ok(&["--uid=1", "-d"]));
        check(&["uid 2", "uid 1", "uid"], Ok(&["--uid", "--uid=1", "--uid=2"]));
        let arguments = MountArguments::parse(["uid 2", "uid 1"]).unwrap();
        assert_eq!(arguments.values("uid").collect::<Vec<_>>(), [Some("2"), Some("1")]);
    }

    #[test]
    fn options_that_the_driver_decides_are_dropped() {
        check(&["foreground", "--foreground", "-f", "help", "-h", "--version", "-v", "-V", "foreground=true"], Ok(&[]));
        check(&["-fd"], Ok(&["-d"]));
    }

    #[test]
    fn what_is_no_option_is_refused_by_name() {
        let name = "is not an option: its name may only contain letters, digits and hyphens";
        let letters = "is not an option: after one hyphen only letters may follow";
        check(&["allow-delete", ""], Err("mount option \"\" is empty"));
        check(&["   "], Err("mount option \"   \" is empty"));
        check(&["--"], Err("mount option \"--\" has no name"));
        check(&["-- --profile=x"], Err("mount option \"-- --profile=x\" has no name"));
        check(&["=x"], Err("mount option \"=x\" has no name"));
        check(&["-"], Err("mount option \"-\" has no name"));
        check(&["-=x"], Err(&format!("mount option \"-=x\" {letters}")));
        check(&["-d/x"], Err(&format!("mount option \"-d/x\" {letters}")));
        check(&["---profile=x"], Err(&format!("mount option \"---profile=x\" {name}")));
        check(&["/dev/fd/3"], Err(&format!("mount option \"/dev/fd/3\" {name}")));
        check(&["prófile=x"], Err(&format!("mount option \"prófile=x\" {name}")));
        check(&["prefix=a\nb/"], Err("mount option \"prefix=a\\nb/\" contains a control character"));
        check(&["prefix=a\0b/"], Err("mount option \"prefix=a\\0b/\" contains a control character"));
        check(&["profile\tx"], Err("mount option \"profile\\tx\" contains a control character"));
    }

    #[test]
    fn options_are_found_however_spelled() {
        let mut arguments = MountArguments::parse(["-d", "--region=a", "region b"]).unwrap();
        for key in ["debug", "--debug", "-d", "region", "--region"] {
            assert!(arguments.has(key), "{key}");
        }
        assert!(!arguments.has("-r") && !arguments.has("uid"));
        assert_eq!(arguments.value("region"), Some("a"));
        assert_eq!(arguments.value("debug"), None);
        arguments.set("region", Some("c"));
        arguments.set_if_absent("--region", Some("d"));
        arguments.set_if_absent("uid", Some("1"));
        arguments.set_if_absent("debug", None);
        assert_eq!(arguments.render(), ["--region=c", "--uid=1", "-d"]);
        assert_eq!(arguments.remove("--debug"), [None]);
        assert_eq!(arguments.remove("region"), [Some("c".to_owned())]);
        assert_eq!(arguments.remove("region"), []);
        assert_eq!(arguments.render(), ["--uid=1"]);
    }

    #[test]
    fn a_user_agent_with_spaces_survives_a_round_trip() {
        let mut arguments = MountArguments::default();
        arguments.set("user-agent-prefix", Some("s3-csi-driver/1 credential-source#driver k8s/v1"));
        assert_eq!(MountArguments::parse(arguments.render()).unwrap(), arguments);
    }

    proptest! {
        #[test]
        fn parsing_never_panics(raw in prop::collection::vec(any::<String>(), 0..4)) {
            let _ = MountArguments::parse(raw);
        }

        #[test]
        fn rendering_is_stable(raw in prop::collection::vec("-{0,2}[a-fl o=]{0,6}[ =]?.{0,6}", 0..6)) {
            if let Ok(arguments) = MountArguments::parse(&raw) {
                let again = MountArguments::parse(arguments.render()).unwrap();
                prop_assert_eq!(again.render(), arguments.render());
                prop_assert_eq!(again, arguments);
            }
        }

        #[test]
        fn nothing_rendered_is_positional(raw in prop::collection::vec("[-a-f =/]{0,9}", 0..6)) {
            if let Ok(arguments) = MountArguments::parse(&raw) {
                for option in arguments.render() {
                    let name = option.split('=').next().unwrap().trim_start_matches('-');
                    prop_assert!(option.starts_with('-') && name.starts_with(char::is_alphabetic), "{}", option);
                }
            }
        }

        #[test]
        fn order_does_not_matter(raw in prop::collection::vec("(-d|debug|uid=[12]|prefix [a-c]/)", 0..6).prop_shuffle()) {
            let mut reversed = raw.clone();
            reversed.reverse();
            prop_assert_eq!(MountArguments::parse(raw).unwrap(), MountArguments::parse(reversed).unwrap());
        }
    }
}
