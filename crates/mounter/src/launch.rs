//! Checks what a request wants an engine to be run with. Decides only; nothing is started or made here.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::handoff::MountRequest;

/// The checked command line and environment of an engine, but for what is only known when it starts.
#[derive(PartialEq, Eq)]
pub struct Launch(Kind);

#[derive(PartialEq, Eq)]
enum Kind {
    Requested {
        bucket: String,
        args: Vec<String>,
        env: Vec<(String, String)>,
        wants_cache: bool,
    },
    /// As we were started ourselves.
    Repeated {
        words: Vec<OsString>,
        keys: Option<PathBuf>,
    },
}

/// How an engine learns which descriptor its mount is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MountPoint {
    Argument,
    /// Beside its state and its leash.
    Variable,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidRequest {
    #[error("bucket name {bucket:?} {problem}")]
    Bucket { bucket: String, problem: &'static str },

    #[error("argument {argument:?} {problem}")]
    Argument { argument: String, problem: &'static str },

    /// Never quotes the entry: it may be a key.
    #[error("entry {number} of the environment {problem}")]
    Environment { number: usize, problem: &'static str },
}

/// ARNs and `s3://` URIs are bucket names for the engine as well, so the limit is not that of S3.
const MAX_BUCKET_BYTES: usize = 2048;

const CACHE: &str = "--cache";
const CA_BUNDLE: &str = "AWS_CA_BUNDLE";
const KEYS: &str = "AWS_SHARED_CREDENTIALS_FILE";
const FOREGROUND: &str = "--foreground";
const FOREGROUND_SHORT: &str = "-f";

impl TryFrom<MountRequest> for Launch {
    type Error = InvalidRequest;

    fn try_from(request: MountRequest) -> Result<Self, Self::Error> {
        let MountRequest { bucket_name, args, env, source: _ } = request;
        check_bucket(&bucket_name)?;
        for argument in &args {
            check_argument(argument)?;
        }
        let env = env.iter().enumerate().map(|(index, entry)| variable(index + 1, entry)).collect::<Result<_, _>>()?;
        let wants_cache = args.iter().any(|it| is_cache(it));
        let is_ours = |it: &str| is_cache(it) || it == FOREGROUND || it == FOREGROUND_SHORT;
        let mut args: Vec<String> = args.into_iter().filter(|it| !is_ours(it)).collect();
        args.sort_unstable();
        Ok(Self(Kind::Requested { bucket: bucket_name, args, env, wants_cache }))
    }
}

impl Launch {
    /// With these arguments and our own environment, which says that the keys are in this file.
    pub fn repeated(words: Vec<OsString>, keys: Option<PathBuf>) -> Self {
        Self(Kind::Repeated { words, keys })
    }

    /// The file with the keys, if there is one of its own.
    pub fn keys(&self) -> Option<&Path> {
        match &self.0 {
            Kind::Requested { env, .. } => env.iter().find(|(name, _)| name == KEYS).map(|(_, path)| Path::new(path)),
            Kind::Repeated { keys, .. } => keys.as_deref(),
        }
    }

    /// Says whom the engine trusts, unless the request does.
    pub fn trusting(mut self, ca_bundle: Option<&Path>) -> Self {
        if let Kind::Requested { env, .. } = &mut self.0
            && let Some(path) = ca_bundle
            && env.iter().all(|(name, _)| name != CA_BUNDLE)
        {
            env.push((CA_BUNDLE.to_owned(), path.display().to_string()));
        }
        self
    }

    pub fn wants_cache(&self) -> bool {
        match &self.0 {
            Kind::Requested { wants_cache, .. } => *wants_cache,
            Kind::Repeated { .. } => false,
        }
    }

    pub fn mount_point(&self) -> MountPoint {
        match &self.0 {
            Kind::Requested { .. } => MountPoint::Argument,
            Kind::Repeated { .. } => MountPoint::Variable,
        }
    }

    /// Gives the command its arguments and environment.
    pub fn prepare(&self, command: &mut Command, mount_point: &str, cache: Option<&Path>) {
        match &self.0 {
            Kind::Requested { env, .. } => {
                command.args(self.arguments(mount_point, cache)).env_clear();
                command.envs(env.iter().map(|(name, value)| (name, value)));
            }
            Kind::Repeated { words, .. } => {
                command.args(words);
            }
        }
    }

    /// Everything after the engine's own name.
    fn arguments(&self, mount_point: &str, cache: Option<&Path>) -> Vec<OsString> {
        let (bucket, mut args) = match &self.0 {
            Kind::Requested { bucket, args, .. } => (bucket, args.clone()),
            Kind::Repeated { words, .. } => return words.clone(),
        };
        if let Some(cache) = cache {
            args.push(format!("{CACHE}={}", cache.display()));
            args.sort_unstable();
        }
        let mut arguments = vec![bucket.into(), mount_point.into()];
        arguments.extend(args.into_iter().map(OsString::from));
        arguments.push(FOREGROUND.into());
        arguments
    }
}

fn check_bucket(bucket: &str) -> Result<(), InvalidRequest> {
    let invalid = |problem| {
        let bucket = bucket.chars().take(MAX_BUCKET_BYTES).collect();
        Err(InvalidRequest::Bucket { bucket, problem })
    };
    if bucket.is_empty() {
        return invalid("must not be empty");
    }
    if MAX_BUCKET_BYTES < bucket.len() {
        return invalid("is too long");
    }
    if bucket.starts_with('-') {
        return invalid("must not look like an argument");
    }
    if bucket.chars().any(|it| it.is_control() || it.is_whitespace()) {
        return invalid("must not contain white space or control characters");
    }
    Ok(())
}

/// Bucket and mount point are the only positional arguments. Another one would be taken for them, or be an error the user
/// cannot understand.
fn check_argument(argument: &str) -> Result<(), InvalidRequest> {
    let invalid = |problem| Err(InvalidRequest::Argument { argument: argument.to_owned(), problem });
    if argument.contains('\0') {
        return invalid("must not contain a zero byte");
    }
    let name = argument.split_once('=').map_or(argument, |(name, _)| name);
    if !name.starts_with('-') {
        return invalid("must start with a hyphen");
    }
    if name.trim_start_matches('-').is_empty() {
        return invalid("must have a name");
    }
    Ok(())
}

fn variable(number: usize, entry: &str) -> Result<(String, String), InvalidRequest> {
    let invalid = |problem| InvalidRequest::Environment { number, problem };
    let (name, value) = entry.split_once('=').ok_or_else(|| invalid("has no equals sign"))?;
    if name.is_empty() {
        return Err(invalid("has no name"));
    }
    if entry.contains('\0') {
        return Err(invalid("must not contain a zero byte"));
    }
    Ok((name.to_owned(), value.to_owned()))
}

fn is_cache(argument: &str) -> bool {
    argument.strip_prefix(CACHE).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_sorted_and_end_with_foreground() {
        check(&[], None, &["b", "/dev/fd/7", "--foreground"]);
        check(
            &["-d", "--sse=aws:kms", "--sse-kms-key-id=x", "--prefix=a b=c/"],
            None,
            &["b", "/dev/fd/7", "--prefix=a b=c/", "--sse-kms-key-id=x", "--sse=aws:kms", "-d", "--foreground"],
        );
        check(&["--foreground", "-f", "--foreground"], None, &["b", "/dev/fd/7", "--foreground"]);
    }

    #[test]
    fn the_path_of_the_cache_is_ours() {
        let expected = ["b", "/dev/fd/7", "--cache-block-size=1", "--cache=/c/1", "--foreground"];
        for cache in ["--cache", "--cache=/etc", "--cache="] {
            check(&["--cache-block-size=1", cache, "--cache=/usr"], Some("/c/1"), &expected);
        }
    }

    #[track_caller]
    fn check(args: &[&str], cache: Option<&str>, expected: &[&str]) {
        let launch = Launch::try_from(request("b", args, &[])).unwrap();
        assert_eq!(launch.wants_cache(), cache.is_some());
        assert_eq!(launch.arguments("/dev/fd/7", cache.map(Path::new)), expected);
    }

    #[test]
    fn refused_requests() {
        refuse("", &[], &[], "bucket name \"\" must not be empty");
        refuse("-x", &[], &[], "bucket name \"-x\" must not look like an argument");
        refuse("a b", &[], &[], "bucket name \"a b\" must not contain white space or control characters");
        refuse("a\0", &[], &[], "bucket name \"a\\0\" must not contain white space or control characters");
        refuse("b", &["/etc"], &[], "argument \"/etc\" must start with a hyphen");
        refuse("b", &[""], &[], "argument \"\" must start with a hyphen");
        refuse("b", &["--region", "x"], &[], "argument \"x\" must start with a hyphen");
        for nameless in ["-", "--", "---", "--=x"] {
            refuse("b", &[nameless], &[], &format!("argument {nameless:?} must have a name"));
        }
        refuse("b", &["--a\0"], &[], "argument \"--a\\0\" must not contain a zero byte");
        refuse("b", &[], &["A=b", "hunter2"], "entry 2 of the environment has no equals sign");
        refuse("b", &[], &["=hunter2"], "entry 1 of the environment has no name");
        refuse("b", &[], &["A=hunter2\0"], "entry 1 of the environment must not contain a zero byte");
    }

    #[track_caller]
    fn refuse(bucket: &str, args: &[&str], env: &[&str], expected: &str) {
        let Err(error) = Launch::try_from(request(bucket, args, env)) else { panic!("{bucket:?} was accepted") };
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn every_kind_of_bucket_name_is_the_engines_business() {
        for bucket in ["logs", "s3://logs/prefix/", "arn:aws:s3:eu-west-1:1:accesspoint/x"] {
            assert_eq!(Launch::try_from(request(bucket, &[], &[])).ok().unwrap().arguments("x", None)[0], bucket);
        }
    }

    #[test]
    fn values_of_the_environment_may_contain_equals_signs() {
        assert_eq!(environment(&["A=b=c", "D="], None), ["A=b=c", "D="]);
    }

    #[test]
    fn whom_engines_trust_is_said_unless_the_request_does() {
        assert_eq!(environment(&["A=b"], Some("/ca/bundle")), ["A=b", "AWS_CA_BUNDLE=/ca/bundle"]);
        assert_eq!(environment(&["AWS_CA_BUNDLE=/theirs"], Some("/ca/bundle")), ["AWS_CA_BUNDLE=/theirs"]);
        assert_eq!(environment(&["A=b"], None), ["A=b"]);
    }

    #[test]
    fn the_file_of_the_keys_is_where_the_request_says() {
        let keys = |env: &[&str]| Launch::try_from(request("b", &[], env)).ok().unwrap().keys().map(Path::to_owned);
        assert_eq!(keys(&["AWS_PROFILE=x", "AWS_SHARED_CREDENTIALS_FILE=/k/1"]), Some("/k/1".into()));
        assert_eq!(keys(&["AWS_PROFILE=x"]), None);
    }

    /// What an engine finds in its environment.
    fn environment(env: &[&str], ca_bundle: Option<&str>) -> Vec<String> {
        let launch = Launch::try_from(request("b", &[], env)).ok().unwrap().trusting(ca_bundle.map(Path::new));
        let mut command = Command::new("x");
        launch.prepare(&mut command, "y", None);
        let text = |it: &std::ffi::OsStr| it.to_str().unwrap().to_owned();
        command.get_envs().filter_map(|(name, value)| Some(format!("{}={}", text(name), text(value?)))).collect()
    }

    fn request(bucket: &str, args: &[&str], env: &[&str]) -> MountRequest {
        let owned = |list: &[&str]| list.iter().map(|&it| it.to_owned()).collect();
        MountRequest { bucket_name: bucket.to_owned(), args: owned(args), env: owned(env), source: None }
    }
}
