//! One mount: what outlives its engines, and how another engine is started on it.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::MemfdFlags;

use crate::config::SupervisorConfig;
use crate::credentials_file::{CredentialsFile, Fingerprint};
use crate::engine::{CredentialCheck, Engine, Inherited, StartError};
use crate::handle::SupervisorHandle;
use crate::heartbeat::{EngineCounters, FuseConnection};
use crate::launch::{EngineDirectories, Launch};
use crate::oom;

/// One mount and how its engines are run.
#[derive(Clone, Copy)]
pub struct MountSpec<'a> {
    pub program: &'a Path,
    pub launch: &'a Launch,
    pub directories: EngineDirectories<'a>,
    /// Names the mount in log lines; empty if there is only one.
    pub label: &'a str,
    pub handle: &'a SupervisorHandle,
    /// Without it the mount ends with its engine.
    pub config: Option<SupervisorConfig>,
    /// Report `held` when an engine serves the mount for the first time.
    pub is_held: bool,
    /// Reported as the cause of the pause when a mount was resumed without its first supervisor.
    pub resume_cause: &'a str,
}

/// The descriptors of a mount that is to be served.
#[derive(Debug)]
pub enum MountDescriptors {
    /// No engine has served the mount yet.
    New { fuse: OwnedFd },
    /// Another supervisor has served the mount, or still does.
    Resumed { resources: MountResources, takeover: TakeoverTrigger },
}

/// When the first engine of a resumed mount takes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakeoverTrigger {
    /// The other supervisor is gone.
    Immediate,
    /// The other supervisor still serves the mount: see [`SupervisorHandle::go`].
    OnRequest,
}

/// What the kernel does with requests that an engine has read and not answered when it dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resend {
    /// It sends them again to the next engine.
    OnRequest,
    Never,
}

/// What outlives the engines of a mount.
#[derive(Debug)]
pub struct MountResources {
    pub fuse: OwnedFd,
    /// A memory file in which engines store what they know of the mount.
    pub state: OwnedFd,
}

impl MountResources {
    /// Whether the mount is still there.
    pub fn is_connected(&self) -> bool {
        FuseConnection::poll(&self.fuse).is_alive
    }
}

/// A mount with everything that outlives its engines.
pub struct ServedMount<'a> {
    pub spec: &'a MountSpec<'a>,
    pub config: SupervisorConfig,
    pub credentials: CredentialsFile,
    pub resend: Resend,
    /// Missing if the engine cannot be replaced: then a copy of the descriptor would make the mount hang when the engine dies.
    resources: Option<Arc<MountResources>>,
}

/// A started engine and the credentials it was started with.
pub struct StartedEngine {
    pub engine: Engine,
    pub credentials: Option<Fingerprint>,
}

impl<'a> ServedMount<'a> {
    /// Starts the first engine.
    pub fn start(spec: &'a MountSpec<'a>, descriptors: MountDescriptors) -> Result<(Self, StartedEngine), StartError> {
        let (fuse, state) = match (descriptors, spec.config) {
            (MountDescriptors::New { fuse }, None) => (fuse, None),
            (MountDescriptors::New { fuse }, Some(_)) => {
                let state = rustix::fs::memfd_create("engine state", MemfdFlags::CLOEXEC);
                (fuse, Some(state.map_err(|cause| StartError::Inherit { cause: cause.into() })?))
            }
            (MountDescriptors::Resumed { resources, .. }, Some(_)) => (resources.fuse, Some(resources.state)),
            (MountDescriptors::Resumed { .. }, None) => return Err(StartError::Unsupervised),
        };
        let mut mount = Self {
            spec,
            config: spec.config.unwrap_or(SupervisorConfig::OFF),
            credentials: CredentialsFile::at(spec.launch.credentials_file()),
            resend: Resend::OnRequest,
            resources: None,
        };
        // Read before the engine reads them: if they change between the two, one replacement too many is started.
        let credentials = mount.credentials.fingerprint();
        let check = CredentialCheck::Skip;
        let inherited = Inherited {
            fuse: fuse.as_fd(),
            state: state.as_ref().map(AsFd::as_fd),
            credential_check: check,
            oom_score: mount.config.engine_oom_score,
        };
        let engine = mount.spawn(inherited)?;
        mount.resources = state.map(|state| Arc::new(MountResources { fuse, state }));
        Ok((mount, StartedEngine { engine, credentials }))
    }

    /// Starts another engine. `None` if the mount cannot be resumed.
    pub fn start_successor(&mut self, credential_check: CredentialCheck) -> Option<Result<StartedEngine, StartError>> {
        let resources = self.resources.as_ref()?;
        let credentials = self.credentials.fingerprint();
        let inherited = Inherited {
            fuse: resources.fuse.as_fd(),
            state: Some(resources.state.as_fd()),
            credential_check,
            oom_score: self.config.engine_oom_score,
        };
        Some(self.spawn(inherited).map(|engine| StartedEngine { engine, credentials }))
    }

    fn spawn(&self, inherited: Inherited<'_>) -> Result<Engine, StartError> {
        let engine = Engine::start(self.spec.program, self.spec.launch, self.spec.directories, inherited)?;
        if let Some(score) = self.config.engine_oom_score {
            oom::set_oom_score(engine.id(), score);
        }
        Ok(engine)
    }

    /// From now on the mount ends with its engine.
    pub fn drop_resources(&mut self) {
        self.spec.handle.set_resources(None);
        self.resources = None;
    }

    /// From now on another supervisor could continue the mount.
    pub fn share_resources(&self) {
        self.spec.handle.set_resources(self.resources.clone());
    }

    pub fn is_resumable(&self) -> bool {
        self.resources.is_some()
    }

    /// Whether the mount is still there. Only known of one that can be resumed.
    pub fn is_connected(&self) -> bool {
        self.resources.as_ref().is_some_and(|it| it.is_connected())
    }

    pub fn has_waiting_requests(&self) -> bool {
        self.resources.as_ref().is_some_and(|it| FuseConnection::poll(&it.fuse).has_waiting_requests)
    }

    /// Zeros if the engine keeps no counters.
    pub fn counters(&self) -> EngineCounters {
        self.resources.as_ref().map(|it| EngineCounters::read(&it.state)).unwrap_or_default()
    }

    pub fn label(&self) -> &'a str {
        self.spec.label
    }
}

impl Drop for ServedMount<'_> {
    /// A copy that stays open would make the mount hang instead of fail.
    fn drop(&mut self) {
        self.drop_resources();
    }
}
