//! Strategy `daemon`: one unprivileged mounter per node runs one engine per source. A source is named by its sharing
//! key; who uses it is counted nowhere but in the kernel's mount table.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use s3csi_core::credentials::Keys;
use s3csi_core::publish::Publish;
use s3csi_mounter::handoff::MountRequest;

use crate::credentials;
use crate::host::{Beneath, Host};
use crate::node::error::{PublishError, UnpublishError};
use crate::node::locks::Locks;
use crate::node::orders::{Orders, fuse_options};
use crate::node::phases::{Phase, Phases};
use crate::node::repairs::{ORPHANED_SOURCE_REMOVED, Repairs};
use crate::node::retire::Retired;
use crate::node::source::{self, Mounter, Source};
use crate::node::steps::{Step, Steps};
use crate::node::strategies::Done;
use crate::node::teller::{Mounted, Teller};
use crate::node::{bind, life_line};

/// The mounter writes `mount.err` into a source's directory; others see nothing of it.
const PLACE_MODE: u32 = 0o2770;

/// Where more is to be seen when a mount fails. What the mounter's Pod is called is not known here.
const MORE: &str = "kubectl logs <mounter pod>";

pub struct Daemon {
    pub host: Arc<dyn Host>,
    /// Name of this node.
    pub node: String,
    /// Sources are mounted in here, one directory each.
    pub sources: PathBuf,
    pub mounter_dir: PathBuf,
    /// The same directory as the mounter sees it.
    pub mounter_view: PathBuf,
    pub orders: Orders,
    /// One change per source at a time.
    pub locks: Locks,
    pub steps: Steps,
    pub repairs: Repairs,
    pub teller: Arc<Teller>,
}

impl Daemon {
    pub fn publish(&self, publish: &Publish, deadline: Instant, phases: &Phases) -> Result<Done, PublishError> {
        let bucket = || publish.bucket.to_string();
        let keys = self.orders.keys(publish)?;
        let name = publish.sharing_key(&self.node).name();
        // Wrong options are refused before anything is made for them.
        let request = self.request(publish, &name)?;
        let busy = || PublishError::SourceBusy { bucket: bucket() };
        let _held = self.locks.lock(&name, deadline).ok_or_else(busy)?;
        self.steps.done(Step::Locked);
        let outcome = self.ensure(publish, keys, &name, request, deadline, phases);
        match &outcome {
            Ok(_) => self.steps.done(Step::Bound),
            Err(_) => drop(self.tidy(&name)),
        }
        outcome.map(|mounted| Done { mounted, source: Some(name.clone()) })
    }

    /// Credentials, source and bind, each looked at first. The caller holds the source's lock and tidies up after an error.
    fn ensure(
        &self,
        publish: &Publish,
        keys: &Keys,
        name: &str,
        request: MountRequest,
        deadline: Instant,
        phases: &Phases,
    ) -> Result<Mounted, PublishError> {
        let bucket = || publish.bucket.to_string();
        let unusable =
            |cause| PublishError::MounterDirectory { bucket: bucket(), directory: self.mounter_dir.clone(), cause };
        let mounter = Beneath::open(&self.mounter_dir).map_err(unusable)?;
        let group = mounter.group().map_err(unusable)?;
        let place = mounter.make_directory(name, PLACE_MODE, Some(group)).map_err(unusable)?;
        self.steps.done(Step::PlaceMade);
        phases
            .time(Phase::Credentials, || credentials::ensure(&place, keys, group))
            .map_err(|cause| PublishError::Credentials { bucket: bucket(), cause })?;
        self.steps.done(Step::CredentialsWritten);

        let source = Source {
            path: self.sources.join(name),
            options: fuse_options(publish),
            request,
            mounter: Mounter::OfTheNode { directory: mounter },
            words: place,
            steps: self.steps,
            repairs: self.repairs.clone(),
            teller: self.teller.clone(),
            name: name.to_owned(),
        };
        let target = publish.target.path();
        let ensured = phases.time(Phase::Source, || source::ensure(&self.host, &source, deadline));
        let device = ensured.map_err(|cause| PublishError::Source {
            bucket: bucket(),
            target: target.to_owned(),
            hint: MORE.to_owned(),
            cause,
        })?;
        self.steps.done(Step::Served);
        phases.time(Phase::Bind, || {
            bind::ensure(self.host.as_ref(), &source.path, device, target, publish.access, deadline)
        })
    }

    /// What the mounter is told.
    fn request(&self, publish: &Publish, name: &str) -> Result<MountRequest, PublishError> {
        let order = self.orders.order(publish, &self.mounter_view.join(name))?;
        Ok(MountRequest {
            bucket_name: publish.bucket.to_string(),
            args: order.arguments,
            env: order.environment,
            source: Some(name.to_owned()),
        })
    }

    pub fn unpublish(&self, target: &Path, deadline: Instant, phases: &Phases) -> Result<(), UnpublishError> {
        let host = self.host.as_ref();
        let look = |cause| UnpublishError::Look { cause };
        // A target whose parent directory is gone has no mount either; the plain path then serves as well.
        let target = &host.resolve(target).unwrap_or_else(|_| target.to_owned());
        let table = host.mount_table().map_err(look)?;
        let name = table.at(target).filter(|it| it.is_ours()).and_then(|mount| {
            table
                .of_device(mount.device)
                .find(|it| it.at.parent() == Some(&self.sources))
                .and_then(|it| file_name(&it.at))
        });
        match name {
            Some(name) => {
                let busy = || UnpublishError::SourceBusy { target: target.clone() };
                let _held = self.locks.lock(&name, deadline).ok_or_else(busy)?;
                self.steps.done(Step::Locked);
                phases.time(Phase::Unmount, || bind::remove(host, target, self.steps))?;
                phases.time(Phase::Retire, || self.retire(&name, deadline))?;
            }
            // Not mounted, or mounted from a source that is gone already.
            None => phases.time(Phase::Unmount, || bind::remove(host, target, self.steps))?,
        }
        self.sweep();
        Ok(())
    }

    /// Takes a source away if no bind shows it any more. The caller holds its lock.
    fn retire(&self, name: &str, deadline: Instant) -> Result<Retired, UnpublishError> {
        let path = self.sources.join(name);
        let mut retired = Retired::Before;
        let table = self.host.mount_table().map_err(|cause| UnpublishError::Look { cause })?;
        if let Some(mount) = table.at(&path) {
            if !mount.is_ours() || !source::is_unused(&table, &path, mount.device) {
                return Ok(Retired::NotYet);
            }
            source::unmount(self.host.as_ref(), &path)
                .map_err(|cause| UnpublishError::Unmount { target: path.clone(), cause })?;
            retired = Retired::Now;
            self.steps.done(Step::SourceUnmounted);
        }
        self.host.remove_directory(&path).map_err(|cause| UnpublishError::Remove { path: path.clone(), cause })?;
        self.steps.done(Step::SourceRemoved);
        let forget = |cause| UnpublishError::Forget { source_name: name.to_owned(), cause };
        let Ok(mounter) = Beneath::open(&self.mounter_dir) else { return Ok(retired) };
        life_line::end(&mounter, name, deadline);
        self.steps.done(Step::EngineEnded);
        mounter.remove_tree(name).map_err(forget)?;
        self.steps.done(Step::CredentialsRemoved);
        Ok(retired)
    }

    /// After a failed publish: what was made for a source that nobody uses goes away again. The caller holds its lock.
    fn tidy(&self, name: &str) -> Option<Retired> {
        match self.retire(name, Instant::now()) {
            Ok(retired) => Some(retired),
            Err(error) => {
                tracing::warn!(source = name, error = %s3csi_core::chain::Chain(&error), "source not tidied up; the next sweep tries again");
                None
            }
        }
    }

    /// Takes away every source that nobody uses: a crash between two steps may have left one.
    pub fn sweep(&self) {
        for name in names_in(&self.sources).into_iter().chain(names_in(&self.mounter_dir)) {
            // Somebody is working on it: then it is not a leftover.
            let Some(_held) = self.locks.try_lock(&name) else { continue };
            if self.tidy(&name) == Some(Retired::Now) {
                self.repairs.done(ORPHANED_SOURCE_REMOVED, &self.sources.join(&name), &name);
            }
        }
    }
}

/// Directories that have the form of a source's name; anything else in there is not ours to touch.
fn names_in(directory: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    entries.filter_map(|it| it.ok()?.file_name().into_string().ok()).filter(|it| is_source_name(it)).collect()
}

fn is_source_name(name: &str) -> bool {
    name.len() == 56 && name.bytes().all(|it| it.is_ascii_hexdigit())
}

fn file_name(path: &Path) -> Option<String> {
    path.file_name()?.to_str().map(str::to_owned)
}
