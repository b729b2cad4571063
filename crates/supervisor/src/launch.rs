//! Validates a mount request and builds the command line and environment of its engine. Starts nothing.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use s3csi_core::stage::{MAX_STAGE_SIZE_OPTION, STAGE_OPTION, max_stage_size};
use s3csi_handoff::{ERRORS_VARIABLE, JSON_ERRORS, MountRequest};

use crate::ca_bundle::CaBundle;

/// The validated command line and environment of an engine, except for what is only known when it starts.
#[derive(PartialEq, Eq)]
pub struct Launch(Origin);

#[derive(PartialEq, Eq)]
enum Origin {
    Request {
        bucket: String,
        args: Vec<String>,
        env: Vec<(String, String)>,
        wants_cache: bool,
        ca_bundle: Option<CaBundle>,
    },
    /// The arguments and environment of this process.
    OwnArguments { arguments: Vec<OsString>, credentials_file: Option<PathBuf> },
}

/// Directories on disk that engines of a mount get, whatever paths the request names. Without a staging directory here, that of the
/// request is used: the node plugin sends none that a volume names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineDirectories<'a> {
    pub cache: Option<&'a Path>,
    pub stage: Option<StageSpec<'a>>,
}

/// The staging directory, and how much of it an engine may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageSpec<'a> {
    pub path: &'a Path,
    pub mebibytes: u64,
}

/// How the FUSE descriptor is passed to an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MountPointPassing {
    Argument,
    /// Together with the descriptors of state and control channel.
    Variable,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidRequest {
    #[error("bucket name {bucket:?} {problem}")]
    Bucket { bucket: String, problem: &'static str },

    #[error("argument {argument:?} {problem}")]
    Argument { argument: String, problem: &'static str },

    /// Does not quote the entry, which may be a secret.
    #[error("entry {number} of the environment {problem}")]
    Environment { number: usize, problem: &'static str },
}

/// The engine accepts ARNs and `s3://` URIs, too, so this is not the limit of S3.
const MAX_BUCKET_BYTES: usize = 2048;

const CACHE: &str = "--cache";
const CA_BUNDLE: &str = "AWS_CA_BUNDLE";
const CREDENTIALS_FILE: &str = "AWS_SHARED_CREDENTIALS_FILE";
const FOREGROUND: &str = "--foreground";
const FOREGROUND_SHORT: &str = "-f";

impl TryFrom<MountRequest> for Launch {
    type Error = InvalidRequest;

    fn try_from(request: MountRequest) -> Result<Self, Self::Error> {
        let MountRequest { bucket_name, args, env, source: _, hold: _, resume: _, wait: _ } = request;
        check_bucket(&bucket_name)?;
        for argument in &args {
            check_argument(argument)?;
        }
        let env = env.iter().enumerate().map(|(index, entry)| variable(index + 1, entry)).collect::<Result<_, _>>()?;
        let wants_cache = args.iter().any(|it| is_option(it, CACHE));
        let is_managed = |it: &str| is_option(it, CACHE) || it == FOREGROUND || it == FOREGROUND_SHORT;
        let mut args: Vec<String> = args.into_iter().filter(|it| !is_managed(it)).collect();
        args.sort_unstable();
        Ok(Self(Origin::Request { bucket: bucket_name, args, env, wants_cache, ca_bundle: None }))
    }
}

impl Launch {
    /// With these arguments and the environment of this process, which names this credentials file.
    pub fn with_own_environment(arguments: Vec<OsString>, credentials_file: Option<PathBuf>) -> Self {
        Self(Origin::OwnArguments { arguments, credentials_file })
    }

    /// The credentials file of the engine, if it has one.
    pub fn credentials_file(&self) -> Option<&Path> {
        match &self.0 {
            Origin::Request { env, .. } => {
                env.iter().find(|(name, _)| name == CREDENTIALS_FILE).map(|(_, path)| Path::new(path))
            }
            Origin::OwnArguments { credentials_file, .. } => credentials_file.as_deref(),
        }
    }

    /// Sets the CA bundle, unless the request does.
    #[must_use]
    pub fn with_ca_bundle(mut self, given: Option<&CaBundle>) -> Self {
        if let Origin::Request { env, ca_bundle, .. } = &mut self.0
            && env.iter().all(|(name, _)| name != CA_BUNDLE)
        {
            *ca_bundle = given.cloned();
        }
        self
    }

    pub fn wants_cache(&self) -> bool {
        match &self.0 {
            Origin::Request { wants_cache, .. } => *wants_cache,
            Origin::OwnArguments { .. } => false,
        }
    }

    pub fn mount_point_passing(&self) -> MountPointPassing {
        match &self.0 {
            Origin::Request { .. } => MountPointPassing::Argument,
            Origin::OwnArguments { .. } => MountPointPassing::Variable,
        }
    }

    /// Sets arguments and environment of the command.
    pub fn prepare(&self, command: &mut Command, mount_point: &str, directories: EngineDirectories<'_>) {
        match &self.0 {
            Origin::Request { env, ca_bundle, .. } => {
                command.args(self.arguments(mount_point, directories)).env_clear();
                command.envs(env.iter().map(|(name, value)| (name, value)));
                if let Some(bundle) = ca_bundle {
                    command.env(CA_BUNDLE, bundle.prepare());
                }
                command.env(ERRORS_VARIABLE, JSON_ERRORS);
            }
            Origin::OwnArguments { arguments, .. } => {
                command.args(arguments);
            }
        }
    }

    /// Everything after the name of the program.
    fn arguments(&self, mount_point: &str, directories: EngineDirectories<'_>) -> Vec<OsString> {
        let (bucket, mut args) = match &self.0 {
            Origin::Request { bucket, args, .. } => (bucket, args.clone()),
            Origin::OwnArguments { arguments, .. } => return arguments.clone(),
        };
        args.extend(directories.cache.map(|it| format!("{CACHE}={}", it.display())));
        if let Some(StageSpec { path, mebibytes }) = directories.stage {
            let given = args.iter().find(|it| is_option(it, MAX_STAGE_SIZE_OPTION));
            let given = given.map(|it| it.split_once('=').map_or("", |(_, value)| value));
            if let Some(size) = max_stage_size(given, mebibytes) {
                args.retain(|it| !is_option(it, MAX_STAGE_SIZE_OPTION));
                args.push(format!("{MAX_STAGE_SIZE_OPTION}={size}"));
            }
            args.retain(|it| !is_option(it, STAGE_OPTION));
            args.push(format!("{STAGE_OPTION}={}", path.display()));
        }
        args.sort_unstable();
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

/// Bucket and mount point are the only positional arguments; a request must not add one.
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

fn is_option(argument: &str, name: &str) -> bool {
    argument.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
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
    fn the_path_of_the_cache_is_set_by_the_mounter() {
        let expected = ["b", "/dev/fd/7", "--cache-block-size=1", "--cache=/c/1", "--foreground"];
        for cache in ["--cache", "--cache=/etc", "--cache="] {
            check(&["--cache-block-size=1", cache, "--cache=/usr"], Some("/c/1"), &expected);
        }
    }

    #[track_caller]
    fn check(args: &[&str], cache: Option<&str>, expected: &[&str]) {
        let launch = Launch::try_from(request("b", args, &[])).unwrap();
        assert_eq!(launch.wants_cache(), cache.is_some());
        let directories = EngineDirectories { cache: cache.map(Path::new), stage: None };
        assert_eq!(launch.arguments("/dev/fd/7", directories), expected);
    }

    #[test]
    fn the_staging_directory_is_the_mounters_and_a_request_may_only_use_less_of_it() {
        check_stage(&[], &["--max-stage-size=100", "--stage=/s/1"]);
        check_stage(&["--stage=/etc", "--max-stage-size=20"], &["--max-stage-size=20", "--stage=/s/1"]);
        check_stage(&["--max-stage-size=101", "--stage"], &["--max-stage-size=100", "--stage=/s/1"]);
        check_stage(&["--max-stage-size=much"], &["--max-stage-size=much", "--stage=/s/1"]);
        // A mounter without a staging directory leaves both as they are.
        let given = ["--max-stage-size=101", "--stage=/theirs"];
        check(&given, None, &["b", "/dev/fd/7", given[0], given[1], "--foreground"]);
    }

    #[track_caller]
    fn check_stage(args: &[&str], expected: &[&str]) {
        let launch = Launch::try_from(request("b", args, &[])).ok().unwrap();
        let stage = Some(StageSpec { path: Path::new("/s/1"), mebibytes: 100 });
        let arguments = launch.arguments("x", EngineDirectories { cache: None, stage });
        assert_eq!(arguments[2..arguments.len() - 1], *expected);
    }

    #[test]
    fn refused_requests() {
        refuse("", &[], &[], "bucket name \"\" must not be empty");
        let longest = "b".repeat(MAX_BUCKET_BYTES);
        Launch::try_from(request(&longest, &[], &[])).unwrap();
        refuse(&format!("{longest}b"), &[], &[], &format!("bucket name {longest:?} is too long"));
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
    fn the_engine_decides_about_bucket_names() {
        for bucket in ["logs", "s3://logs/prefix/", "arn:aws:s3:eu-west-1:1:accesspoint/x"] {
            let launch = Launch::try_from(request(bucket, &[], &[])).ok().unwrap();
            assert_eq!(launch.arguments("x", EngineDirectories::default())[0], bucket);
        }
    }

    #[test]
    fn values_of_the_environment_may_contain_equals_signs() {
        assert_eq!(environment(&["A=b=c", "D="], None), ["A=b=c", "D="]);
    }

    #[test]
    fn the_ca_bundle_is_set_unless_the_request_does() {
        assert_eq!(environment(&["A=b"], Some("/ca/bundle")), ["A=b", "AWS_CA_BUNDLE=/ca/bundle"]);
        assert_eq!(environment(&["AWS_CA_BUNDLE=/theirs"], Some("/ca/bundle")), ["AWS_CA_BUNDLE=/theirs"]);
        assert_eq!(environment(&["A=b"], None), ["A=b"]);
    }

    #[test]
    fn the_request_names_the_credentials_file() {
        let file = |env: &[&str]| {
            Launch::try_from(request("b", &[], env)).ok().unwrap().credentials_file().map(Path::to_owned)
        };
        assert_eq!(file(&["AWS_PROFILE=x", "AWS_SHARED_CREDENTIALS_FILE=/k/1"]), Some("/k/1".into()));
        assert_eq!(file(&["AWS_PROFILE=x"]), None);
    }

    /// The environment of an engine.
    fn environment(env: &[&str], ca_bundle: Option<&str>) -> Vec<String> {
        // Nothing can be written there, so that the given file itself is set.
        let ca_bundle = ca_bundle.map(|it| CaBundle::new(it.into(), Path::new("/no/such/directory")));
        let launch = Launch::try_from(request("b", &[], env)).ok().unwrap().with_ca_bundle(ca_bundle.as_ref());
        let mut command = Command::new("x");
        launch.prepare(&mut command, "y", EngineDirectories::default());
        let text = |it: &std::ffi::OsStr| it.to_str().unwrap().to_owned();
        let requested = command.get_envs().filter(|(name, _)| *name != ERRORS_VARIABLE);
        requested.filter_map(|(name, value)| Some(format!("{}={}", text(name), text(value?)))).collect()
    }

    fn request(bucket: &str, args: &[&str], env: &[&str]) -> MountRequest {
        let owned = |list: &[&str]| list.iter().map(|&it| it.to_owned()).collect();
        MountRequest { bucket_name: bucket.to_owned(), args: owned(args), env: owned(env), ..MountRequest::default() }
    }
}
