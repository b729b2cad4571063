//! Directories on disk for the engines of targets: caches and staged files. Each target has its own, for root only.

use std::borrow::Cow;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::{fs, io};

use s3csi_core::publish::Publish;
use s3csi_core::stage::{MAX_STAGE_SIZE_OPTION, STAGE_OPTION, StageLimit, max_stage_size, usable_mebibytes};

/// The mount option whose path is replaced.
const CACHE_OPTION: &str = "--cache";

/// Engines run as root; no other user needs access.
const MODE: u32 = 0o700;

/// One cache directory per target that asks for a cache. The path in the mount option is ignored: engines run as root, and two
/// tenants that name the same directory would read each other's blocks.
pub struct CacheDirs {
    pub path: PathBuf,
    /// The same directory as the host sees it.
    pub host_view: PathBuf,
}

/// One staging directory per target, for large files that are edited in place.
pub struct StageDirs {
    pub path: PathBuf,
    /// The same directory as the host sees it.
    pub host_view: PathBuf,
    /// Of each directory. Without one, engines make a directory in `/var/tmp` themselves.
    pub limit: StageLimit,
}

impl CacheDirs {
    /// The same publish with a cache of its own in place of the path it names.
    pub fn redirect<'a>(&self, publish: &'a Publish, name: &str) -> Cow<'a, Publish> {
        if !publish.arguments.has(CACHE_OPTION) {
            return Cow::Borrowed(publish);
        }
        let mut publish = publish.clone();
        publish.arguments.set(CACHE_OPTION, Some(&self.host_view.join(name).to_string_lossy()));
        Cow::Owned(publish)
    }

    /// Makes the directory for a volume that asks for a cache.
    pub fn prepare(&self, publish: &Publish, name: &str) -> io::Result<()> {
        if publish.arguments.has(CACHE_OPTION) { create_empty(&self.path.join(name)) } else { Ok(()) }
    }

    pub fn remove(&self, name: &str) -> io::Result<()> {
        remove(&self.path.join(name))
    }
}

impl StageDirs {
    /// The arguments of an engine with a staging directory. Policy has removed a path that the volume named.
    pub fn with_stage(&self, mut arguments: Vec<String>, name: &str) -> Vec<String> {
        let Some(limit) = self.limit.size() else { return arguments };
        let given = |it: &String| it.strip_prefix(MAX_STAGE_SIZE_OPTION)?.strip_prefix('=').map(str::to_owned);
        let given = arguments.iter().find_map(given);
        if let Some(size) = max_stage_size(given.as_deref(), usable_mebibytes(limit)) {
            arguments.retain(|it| !it.starts_with(MAX_STAGE_SIZE_OPTION));
            arguments.push(format!("{MAX_STAGE_SIZE_OPTION}={size}"));
        }
        arguments.push(format!("{STAGE_OPTION}={}", self.host_view.join(name).display()));
        arguments
    }

    pub fn prepare(&self, name: &str) -> io::Result<()> {
        if self.limit.size().is_some() { create_empty(&self.path.join(name)) } else { Ok(()) }
    }

    pub fn remove(&self, name: &str) -> io::Result<()> {
        remove(&self.path.join(name))
    }
}

/// Only root reads what is in it, and nothing of an earlier mount is left.
fn create_empty(path: &Path) -> io::Result<()> {
    remove(path)?;
    fs::DirBuilder::new().recursive(true).mode(MODE).create(path)
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::os::unix::fs::PermissionsExt as _;

    use s3csi_core::publish::{AccessMode, AccessType, RawCapability, RawPublish, SecretFallback};

    use super::*;

    fn publish(mount_flags: &[&str]) -> Publish {
        let flags: Vec<String> = mount_flags.iter().map(|it| (*it).to_owned()).collect();
        let context = BTreeMap::from([("bucketName".to_owned(), "logs".to_owned())]);
        let uid = "46efe8aa-75d9-4b12-8fdd-0ce0c2cabd99";
        let target = format!("/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~csi/pv-1/mount");
        let access_type = AccessType::Mount { fs_type: "", mount_flags: &flags, volume_mount_group: "" };
        let raw = RawPublish {
            volume_id: "volume",
            target_path: &target,
            volume_context: &context,
            capability: Some(RawCapability { access_mode: Some(AccessMode::MultiNodeMultiWriter), access_type }),
            readonly: false,
            secrets: &BTreeMap::new(),
        };
        Publish::parse(&raw, &SecretFallback::default()).unwrap()
    }

    #[test]
    fn a_cache_is_a_directory_of_our_own_whatever_path_the_volume_names() {
        let caches = CacheDirs { path: "/plugin/cache".into(), host_view: "/host/cache".into() };
        let redirected = |flags: &[&str]| caches.redirect(&publish(flags), "mp-1").arguments.render();
        for path in ["/etc", "/var/cache/shared", "/host/cache/mp-2"] {
            let arguments = redirected(&[&format!("cache {path}"), "allow-delete"]);
            assert!(arguments.contains(&"--cache=/host/cache/mp-1".to_owned()), "{arguments:?}");
            assert!(!arguments.iter().any(|it| it.contains(path)), "{arguments:?}");
        }
        assert!(!redirected(&["allow-delete"]).iter().any(|it| it.contains("cache")));
    }

    #[test]
    fn a_cache_begins_empty_and_is_for_root_only() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("cache");
        let caches = CacheDirs { path: path.clone(), host_view: path.clone() };
        let volume = publish(&["cache /etc"]);
        caches.prepare(&volume, "mp-1").unwrap();
        fs::write(path.join("mp-1/block"), "of an earlier mount").unwrap();
        caches.prepare(&volume, "mp-1").unwrap();
        assert_eq!(fs::read_dir(path.join("mp-1")).unwrap().count(), 0);
        assert_eq!(fs::metadata(path.join("mp-1")).unwrap().permissions().mode() & 0o777, 0o700);
        caches.remove("mp-1").unwrap();
        caches.remove("mp-1").unwrap();
        assert!(!path.join("mp-1").exists());
    }

    #[test]
    fn a_volume_may_use_less_of_its_staging_directory_and_not_more() {
        let stages = |limit: &str| StageDirs {
            path: "/plugin/stage".into(),
            host_view: "/host/stage".into(),
            limit: limit.parse().unwrap(),
        };
        let arguments = |limit: &str, given: &[&str]| {
            let given = given.iter().map(|it| (*it).to_owned()).collect();
            stages(limit).with_stage(given, "mp-1")
        };
        assert_eq!(arguments("1Gi", &["-d"]), ["-d", "--max-stage-size=972", "--stage=/host/stage/mp-1"]);
        let less = arguments("1Gi", &["--max-stage-size=20"]);
        assert_eq!(less, ["--max-stage-size=20", "--stage=/host/stage/mp-1"]);
        let more = arguments("1Gi", &["--max-stage-size=2000"]);
        assert_eq!(more, ["--max-stage-size=972", "--stage=/host/stage/mp-1"]);
        assert_eq!(arguments("0", &["--max-stage-size=2000"]), ["--max-stage-size=2000"]);
    }
}
