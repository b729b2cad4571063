//! Strategy `daemon`: one unprivileged mounter per node runs one engine per source. The name of a source is the hash of its
//! sharing key; its users are counted in the kernel's mount table only.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use s3csi_core::chain::Chain;
use s3csi_core::credentials::Keys;
use s3csi_core::publish::Publish;
use s3csi_handoff::MountRequest;

use crate::credentials;
use crate::host::{Host, SafeDir};
use crate::keyed_locks::KeyedLocks;
use crate::node::engine_config::{EngineConfig, fuse_options};
use crate::node::error::{PublishError, UnpublishError};
use crate::node::failpoints::Failpoint;
use crate::node::held_mounts::MounterAddress;
use crate::node::other_mounts::{self, OtherMounts, ServedTarget};
use crate::node::remediation::ORPHANED_SOURCE_REMOVED;
use crate::node::reporter::MountOutcome;
use crate::node::retire::RetireOutcome;
use crate::node::source::{self, Mounter, MounterKind, SourceManager, SourceSpec};
use crate::node::strategies::{PublishOutcome, PublishResult, mount_and_bind};
use crate::node::timing::{CallPhase, CallTimer};
use crate::node::{bind, engine_monitor};

/// The mounter writes its error file into a source's directory; other users have no access.
const SOURCE_DIRECTORY_MODE: u32 = 0o2770;

/// Where a failed mount is explained. The name of the mounter's Pod is not known here.
const LOG_HINT: &str = "kubectl logs <mounter pod>";

pub struct Daemon {
    pub manager: SourceManager,
    /// Name of this node.
    pub node: String,
    /// The directory in which sources are mounted.
    pub sources: PathBuf,
    pub mounter_dir: PathBuf,
    /// The same directory as the mounter sees it.
    pub mounter_view: PathBuf,
    pub engine_config: EngineConfig,
    /// One change per source at a time.
    pub locks: KeyedLocks,
    pub other_mounts: OtherMounts,
}

impl Daemon {
    pub fn publish(&self, publish: &Publish, deadline: Instant, timer: &CallTimer) -> PublishResult {
        let keys = &self.engine_config.keys(publish)?;
        let name = publish.sharing_key(&self.node).name();
        // Invalid options are refused before anything is created.
        let request = self.request(publish, &name)?;
        // A mount of another strategy or of version 1 stays until its workload ends. A target of ours whose source was
        // unmounted looks the same; it is bound to the next source.
        let is_ours = !self.other_mounts.has_keys(publish) && self.mounter_dir.join(&name).is_dir();
        let served = other_mounts::served_by(self.host(), &self.sources, is_source_name, publish, deadline)?;
        if let Some(ServedTarget { silence, .. }) = served.filter(|_| !is_ours) {
            timer
                .time(CallPhase::Credentials, || self.other_mounts.refresh(publish, keys))
                .map_err(|cause| PublishError::Credentials { bucket: publish.bucket.to_string(), cause })?;
            return match silence {
                Some(silence) => Err(PublishError::Silent { target: publish.target.path().to_owned(), silence }),
                None => Ok(PublishOutcome { mounted: MountOutcome::AlreadyMounted, source: None }),
            };
        }
        let busy = || PublishError::SourceBusy { bucket: publish.bucket.to_string() };
        let _held = self.locks.lock(&name, deadline).ok_or_else(busy)?;
        self.manager.failpoints.hit(Failpoint::Locked);
        let outcome = self.ensure(publish, keys, &name, request, deadline, timer);
        match &outcome {
            Ok(_) => self.manager.failpoints.hit(Failpoint::Bound),
            Err(_) => drop(self.tidy(&name)),
        }
        outcome.map(|mounted| PublishOutcome { mounted, source: Some(name.clone()) })
    }

    /// Ensures credentials, source and bind mount. The caller holds the source's lock and tidies up after an error.
    fn ensure(
        &self,
        publish: &Publish,
        keys: &Keys,
        name: &str,
        request: MountRequest,
        deadline: Instant,
        timer: &CallTimer,
    ) -> Result<MountOutcome, PublishError> {
        let bucket = || publish.bucket.to_string();
        let unusable =
            |cause| PublishError::MounterDirectory { bucket: bucket(), directory: self.mounter_dir.clone(), cause };
        let directory = SafeDir::open(&self.mounter_dir).map_err(unusable)?;
        let group = directory.group().map_err(unusable)?;
        let source_directory = directory.make_directory(name, SOURCE_DIRECTORY_MODE, Some(group)).map_err(unusable)?;
        self.manager.failpoints.hit(Failpoint::DirectoryCreated);
        timer
            .time(CallPhase::Credentials, || credentials::ensure(&source_directory, keys, group))
            .map_err(|cause| PublishError::Credentials { bucket: bucket(), cause })?;
        self.manager.failpoints.hit(Failpoint::CredentialsWritten);

        let path = self.sources.join(name);
        let spec = SourceSpec { name: name.to_owned(), path, options: fuse_options(publish), request };
        let mounter = Mounter { kind: MounterKind::Shared, directory, error_directory: source_directory, pod: None };
        mount_and_bind(&self.manager, publish, (&spec, &mounter), LOG_HINT.to_owned(), deadline, timer)
    }

    fn request(&self, publish: &Publish, name: &str) -> Result<MountRequest, PublishError> {
        let engine = self.engine_config.command(publish, &self.mounter_view.join(name))?;
        Ok(MountRequest {
            bucket_name: publish.bucket.to_string(),
            args: engine.arguments,
            env: engine.environment,
            source: Some(name.to_owned()),
            ..MountRequest::default()
        })
    }

    pub fn unpublish(
        &self,
        volume_id: &str,
        target: &Path,
        deadline: Instant,
        timer: &CallTimer,
    ) -> Result<(), UnpublishError> {
        let host = self.host();
        let failpoints = self.manager.failpoints;
        // A target without a parent directory has no mount either; then the plain path serves.
        let target = &host.resolve(target).unwrap_or_else(|_| target.to_owned());
        let table = host.mount_table().map_err(|cause| UnpublishError::Look { cause })?;
        let name = table.at(target).filter(|it| it.is_ours()).and_then(|mount| {
            let mut sources = table.of_device(mount.device).filter(|it| it.at.parent() == Some(&self.sources));
            sources.find_map(|it| it.at.file_name()?.to_str().map(str::to_owned))
        });
        match name {
            Some(name) => {
                let busy = || UnpublishError::SourceBusy { target: target.clone() };
                let _held = self.locks.lock(&name, deadline).ok_or_else(busy)?;
                failpoints.hit(Failpoint::Locked);
                timer.time(CallPhase::Unmount, || bind::remove(host, target, failpoints))?;
                timer.time(CallPhase::Retire, || self.retire(&name, deadline))?;
            }
            // Not mounted, or a bind mount of a source that is gone.
            None => timer.time(CallPhase::Unmount, || bind::remove(host, target, failpoints))?,
        }
        self.other_mounts.forget(target, volume_id);
        self.sweep();
        Ok(())
    }

    /// Removes a source without bind mounts. The caller holds its lock.
    fn retire(&self, name: &str, deadline: Instant) -> Result<RetireOutcome, UnpublishError> {
        let (host, failpoints) = (self.host(), self.manager.failpoints);
        let path = self.sources.join(name);
        let mut outcome = RetireOutcome::NotMounted;
        let table = host.mount_table().map_err(|cause| UnpublishError::Look { cause })?;
        if let Some(mount) = table.at(&path) {
            if !mount.is_ours() || !source::is_unused(&table, &path, mount.device) {
                return Ok(RetireOutcome::InUse);
            }
            source::unmount(host, &self.manager.held_mounts, &path)
                .map_err(|cause| UnpublishError::Unmount { target: path.clone(), cause })?;
            outcome = RetireOutcome::Unmounted;
            failpoints.hit(Failpoint::SourceUnmounted);
        }
        host.remove_directory(&path).map_err(|cause| UnpublishError::Remove { path: path.clone(), cause })?;
        failpoints.hit(Failpoint::SourceRemoved);
        let Ok(mounter) = SafeDir::open(&self.mounter_dir) else { return Ok(outcome) };
        engine_monitor::stop_engine(&mounter, name, deadline);
        failpoints.hit(Failpoint::EngineEnded);
        mounter.remove_tree(name).map_err(|cause| UnpublishError::Forget { source_name: name.to_owned(), cause })?;
        failpoints.hit(Failpoint::CredentialsRemoved);
        Ok(outcome)
    }

    /// Removes what a failed publish created, unless the source is in use. The caller holds its lock.
    fn tidy(&self, name: &str) -> Option<RetireOutcome> {
        match self.retire(name, Instant::now()) {
            Ok(outcome) => Some(outcome),
            Err(error) => {
                tracing::warn!(source = name, error = %Chain(&error), "source not removed; the next sweep retries");
                None
            }
        }
    }

    /// Removes every unused source: a crash may have left one.
    pub fn sweep(&self) {
        let names: BTreeSet<String> =
            source_names(&self.sources).into_iter().chain(source_names(&self.mounter_dir)).collect();
        for name in names {
            // A locked source is being worked on and is no leftover.
            let Some(_held) = self.locks.try_lock(&name) else { continue };
            let path = self.sources.join(&name);
            if self.tidy(&name) == Some(RetireOutcome::Unmounted) {
                self.manager.remediations.record(ORPHANED_SOURCE_REMOVED, &path, &name);
            } else if self.manager.held_mounts.find(&path).is_none()
                && let Ok(directory) = SafeDir::open(&self.mounter_dir)
            {
                self.manager.adopt(&name, &path, MounterAddress { directory, pod: None }, &name);
            }
        }
    }

    fn host(&self) -> &dyn Host {
        self.manager.host.as_ref()
    }
}

/// Directory entries that have the form of a source's name; others are not ours.
fn source_names(directory: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    entries.filter_map(|it| it.ok()?.file_name().into_string().ok()).filter(|it| is_source_name(it)).collect()
}

pub fn is_source_name(name: &str) -> bool {
    name.len() == 56 && name.bytes().all(|it| it.is_ascii_hexdigit())
}
