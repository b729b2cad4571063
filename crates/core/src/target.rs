//! The path kubelet asks us to mount at, and what it says about the workload. It is not looked up on disk.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::identifiers::{InvalidIdentifier, PvName, WorkloadUid};

/// `<kubelet>/pods/<workload UID>/volumes/kubernetes.io~csi/<PV name>/mount`, whatever kubelet's root is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TargetPath {
    path: PathBuf,
    workload: WorkloadUid,
    volume: PvName,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidTargetPath {
    #[error("target path {path:?} is not of the form /<kubelet>/pods/<uid>/volumes/kubernetes.io~csi/<pv name>/mount")]
    Shape { path: String },

    #[error("target path {path:?} must be absolute, without \"..\" and control characters")]
    Unsafe { path: String },

    #[error("target path {path:?} names no workload and volume")]
    Name {
        path: String,
        #[source]
        cause: InvalidIdentifier,
    },
}

impl TargetPath {
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The workload Pod this target belongs to.
    pub fn workload(&self) -> &WorkloadUid {
        &self.workload
    }

    /// The PV this target belongs to.
    pub fn volume(&self) -> &PvName {
        &self.volume
    }
}

impl FromStr for TargetPath {
    type Err = InvalidTargetPath;

    fn from_str(path: &str) -> Result<Self, Self::Err> {
        let is_relative = !path.starts_with('/') || path.split('/').any(|it| it == "." || it == "..");
        if is_relative || path.chars().any(char::is_control) {
            return Err(InvalidTargetPath::Unsafe { path: path.to_owned() });
        }
        let mut from_the_end = path.rsplit('/');
        let mut next = || from_the_end.next();
        let (Some("mount"), Some(volume), Some("kubernetes.io~csi"), Some("volumes"), Some(workload), Some("pods")) =
            (next(), next(), next(), next(), next(), next())
        else {
            return Err(InvalidTargetPath::Shape { path: path.to_owned() });
        };
        let named = |cause| InvalidTargetPath::Name { path: path.to_owned(), cause };
        Ok(Self {
            path: PathBuf::from(path),
            workload: workload.parse().map_err(named)?,
            volume: volume.parse().map_err(named)?,
        })
    }
}

impl AsRef<Path> for TargetPath {
    fn as_ref(&self) -> &Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn check(path: &str, expected: Option<(&str, &str)>) {
        let parsed = path.parse::<TargetPath>().ok();
        assert_eq!(parsed.as_ref().map(|it| (it.workload().as_str(), it.volume().as_str())), expected, "{path:?}");
        if let Some(target) = parsed {
            assert_eq!(target.path(), Path::new(path));
        }
    }

    #[test]
    fn kubelet_paths_name_the_workload_and_the_volume() {
        check(
            "/var/lib/kubelet/pods/46efe8aa-75d9-4b12-8fdd-0ce0c2cabd99/volumes/kubernetes.io~csi/s3-mp-csi-pv/mount",
            Some(("46efe8aa-75d9-4b12-8fdd-0ce0c2cabd99", "s3-mp-csi-pv")),
        );
        check(
            "/var/lib/kubelet/pods/uid/volumes/kubernetes.io~csi/s3-csi~driver/mount",
            Some(("uid", "s3-csi~driver")),
        );
        check("/other root/pods/uid/volumes/kubernetes.io~csi/pv/mount", Some(("uid", "pv")));
        check("/pods/uid/volumes/kubernetes.io~csi/pv/mount", Some(("uid", "pv")));
        check("/pods/pods/pods/uid/volumes/kubernetes.io~csi/pv/mount", Some(("uid", "pv")));
    }

    #[test]
    fn other_paths_are_refused() {
        for path in [
            "",
            "/",
            "/var/lib/kubelet/pods/uid/volumes/kubernetes.io~csi/pv",
            "/var/lib/kubelet/pods/uid/volumes/kubernetes.io~csi/pv/mount/",
            "/var/lib/kubelet/pods/uid/volumes/kubernetes.io~csi/pv/mount/more",
            "/var/lib/kubelet/pods/uid/volumes/kubernetes.io~csi/mount",
            "/var/lib/kubelet/pods/uid/volumes/kubernetes.io~csi//mount",
            "/var/lib/kubelet/pods//volumes/kubernetes.io~csi/pv/mount",
            "/var/lib/kubelet/pods/uid/volumes/kubernetesXio~csi/pv/mount",
            "/var/lib/kubelet/pods/uid/volumes/pv/mount",
            "/var/lib/kubelet/pods/uid/kubernetes.io~csi/pv/mount",
            "/var/lib/kubelet/uid/volumes/kubernetes.io~csi/pv/mount",
            "/var/lib/kubelet/pods/volumes/kubernetes.io~csi/pv/mount",
            "var/lib/kubelet/pods/uid/volumes/kubernetes.io~csi/pv/mount",
            "/var/lib/kubelet/pods/../volumes/kubernetes.io~csi/pv/mount",
            "/var/lib/kubelet/../pods/uid/volumes/kubernetes.io~csi/pv/mount",
            "/var/lib/kubelet/pods/uid/volumes/kubernetes.io~csi/../mount",
            "/var/lib/kubelet/pods/u\0id/volumes/kubernetes.io~csi/pv/mount",
            "/var/lib/kube\nlet/pods/uid/volumes/kubernetes.io~csi/pv/mount",
        ] {
            check(path, None);
        }
    }

    proptest! {
        #[test]
        fn parsing_never_panics(path in any::<String>()) {
            let _ = path.parse::<TargetPath>();
        }
    }
}
