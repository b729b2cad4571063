//! [`FakeHost`]: an in-memory mount table with injected failures and a log of every call. For failures that the kernel does
//! not produce on demand; everything else is tested on the real one.

use std::collections::{BTreeSet, VecDeque};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;

use s3csi_core::mountinfo::OUR_SOURCE;

use super::{Access, Device, FuseOptions, Host, HostError, Mount, MountTable, Probe};

/// Behaves like a kernel whose FUSE mounts are all served, except for injected failures.
#[derive(Debug, Default)]
pub struct FakeHost {
    state: Mutex<State>,
}

/// One recorded call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    MountTable,
    MountFuse { at: PathBuf, options: FuseOptions },
    Bind { source: PathBuf, target: PathBuf, access: Access },
    BindBeneath { source: PathBuf, target: PathBuf, access: Access },
    BindOver { source: PathBuf, target: PathBuf, access: Access },
    Unmount { at: PathBuf },
    Detach { at: PathBuf },
    Abort { device: Device },
    SetReadAhead { device: Device },
    Probe { at: PathBuf },
    CreateDirectory { path: PathBuf, mode: u32 },
    RemoveDirectory { path: PathBuf },
}

/// The calls that failures can be injected into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    MountTable,
    MountFuse,
    Bind,
    BindBeneath,
    BindOver,
    Unmount,
    Detach,
    Abort,
    SetReadAhead,
    CreateDirectory,
    RemoveDirectory,
}

#[derive(Debug, Default)]
struct State {
    calls: Vec<Call>,
    mounts: Vec<Mount>,
    directories: BTreeSet<PathBuf>,
    failures: Vec<Failure>,
    probes: Vec<(PathBuf, VecDeque<Probe>)>,
    dead: BTreeSet<Device>,
    pinned: BTreeSet<PathBuf>,
    last_id: u32,
}

#[derive(Debug)]
struct Failure {
    operation: Operation,
    /// How many calls succeed first.
    after: usize,
    errno: Errno,
}

impl FakeHost {
    pub fn new() -> Self {
        Self::default()
    }

    /// Fail the `nth` next call of an operation (1 is the very next) once.
    pub fn fail(&self, operation: Operation, nth: usize, errno: Errno) {
        self.state().failures.push(Failure { operation, after: nth.saturating_sub(1), errno });
    }

    /// Queues the result of the next probe of a path, overriding the mount table.
    pub fn answer_probe(&self, at: impl Into<PathBuf>, answer: Probe) {
        let at = at.into();
        let mut state = self.state();
        match state.probes.iter_mut().find(|(path, _)| *path == at) {
            Some((_, answers)) => answers.push_back(answer),
            None => state.probes.push((at, VecDeque::from([answer]))),
        }
    }

    /// Kills the FUSE server of a device: its mounts stay, and probes of them return [`Probe::Dead`].
    pub fn kill(&self, device: Device) {
        self.state().dead.insert(device);
    }

    /// From now on the mount at a path stays although its removal succeeds.
    pub fn pin(&self, at: impl Into<PathBuf>) {
        self.state().pinned.insert(at.into());
    }

    /// Adds a mount that was not made through this host.
    pub fn add_mount(&self, mount: Mount) {
        self.state().mounts.push(mount);
    }

    /// All calls so far, in order.
    pub fn calls(&self) -> Vec<Call> {
        self.state().calls.clone()
    }

    pub fn mounts(&self) -> Vec<Mount> {
        self.state().mounts.clone()
    }

    pub fn directories(&self) -> Vec<PathBuf> {
        self.state().directories.iter().cloned().collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn called(&self, call: Call, operation: Operation) -> (MutexGuard<'_, State>, Option<io::Error>) {
        let mut state = self.state();
        state.calls.push(call);
        let failure = state.next_failure(operation);
        (state, failure)
    }

    fn remove_mount(&self, call: Call, operation: Operation, at: &Path) -> Result<(), HostError> {
        let (mut state, failure) = self.called(call, operation);
        match failure {
            Some(cause) if cause.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => {
                Err(HostError::Busy { at: at.to_owned() })
            }
            Some(cause) => Err(HostError::Unmount { at: at.to_owned(), cause }),
            None => {
                let is_pinned = state.pinned.contains(at);
                if let Some(index) = state.mounts.iter().rposition(|it| it.at == at).filter(|_| !is_pinned) {
                    state.mounts.remove(index);
                }
                Ok(())
            }
        }
    }
}

impl Host for FakeHost {
    fn mount_table(&self) -> Result<Arc<MountTable>, HostError> {
        match self.called(Call::MountTable, Operation::MountTable) {
            (_, Some(cause)) => Err(HostError::ReadTable { cause }),
            (state, None) => Ok(Arc::new(state.mounts.iter().cloned().collect())),
        }
    }

    fn resolve(&self, path: &Path) -> Result<PathBuf, HostError> {
        Ok(path.to_owned())
    }

    fn mount_fuse(&self, at: &Path, options: &FuseOptions) -> Result<OwnedFd, HostError> {
        let call = Call::MountFuse { at: at.to_owned(), options: *options };
        let (mut state, failure) = self.called(call, Operation::MountFuse);
        let failed = |cause| HostError::MountFuse { at: at.to_owned(), cause };
        if let Some(cause) = failure {
            return Err(failed(cause));
        }
        if !state.directories.contains(at) {
            return Err(HostError::OpenDirectory { path: at.to_owned(), cause: Errno::NOENT.into() });
        }
        if state.mounts.iter().any(|it| it.at == at) {
            return Err(HostError::Occupied { at: at.to_owned() });
        }
        // Any descriptor will do: it is never read.
        let descriptor = File::open("/dev/null").map_err(failed)?;
        let id = state.new_id();
        let is_read_only = options.access == Access::ReadOnly;
        state.mounts.push(Mount {
            id: id.into(),
            parent: 1,
            device: Device { major: 0, minor: id },
            root: PathBuf::from("/"),
            at: at.to_owned(),
            read_only: is_read_only,
            super_read_only: is_read_only,
            kind: "fuse".to_owned(),
            source: OUR_SOURCE.to_owned(),
        });
        Ok(descriptor.into())
    }

    fn bind(&self, source: &Path, target: &Path, access: Access) -> Result<(), HostError> {
        let call = Call::Bind { source: source.to_owned(), target: target.to_owned(), access };
        let (mut state, failure) = self.called(call, Operation::Bind);
        let failed = |cause| HostError::Bind { source_path: source.to_owned(), target: target.to_owned(), cause };
        if let Some(cause) = failure {
            return Err(failed(cause));
        }
        if !state.directories.contains(target) {
            return Err(HostError::OpenDirectory { path: target.to_owned(), cause: Errno::NOENT.into() });
        }
        if state.mounts.iter().any(|it| it.at == target) {
            return Err(HostError::Occupied { at: target.to_owned() });
        }
        let original = state.mounts.iter().rfind(|it| it.at == source).cloned();
        let original = original.ok_or_else(|| failed(Errno::NOENT.into()))?;
        let id = state.new_id();
        state.mounts.push(Mount {
            id: id.into(),
            at: target.to_owned(),
            read_only: original.read_only || access == Access::ReadOnly,
            ..original
        });
        Ok(())
    }

    fn bind_beneath(&self, source: &Path, target: &Path, access: Access) -> Result<(), HostError> {
        let call = Call::BindBeneath { source: source.to_owned(), target: target.to_owned(), access };
        let (mut state, failure) = self.called(call, Operation::BindBeneath);
        let failed = |cause| HostError::Bind { source_path: source.to_owned(), target: target.to_owned(), cause };
        if let Some(cause) = failure {
            return Err(failed(cause));
        }
        let original = state.mounts.iter().rfind(|it| it.at == source).cloned();
        let original = original.ok_or_else(|| failed(Errno::NOENT.into()))?;
        let top = state.mounts.iter().rposition(|it| it.at == target).ok_or_else(|| failed(Errno::INVAL.into()))?;
        let id = state.new_id();
        let read_only = original.read_only || access == Access::ReadOnly;
        state.mounts.insert(top, Mount { id: id.into(), at: target.to_owned(), read_only, ..original });
        Ok(())
    }

    fn bind_over(&self, source: &Path, target: &Path, access: Access) -> Result<(), HostError> {
        let call = Call::BindOver { source: source.to_owned(), target: target.to_owned(), access };
        let (mut state, failure) = self.called(call, Operation::BindOver);
        let failed = |cause| HostError::Bind { source_path: source.to_owned(), target: target.to_owned(), cause };
        if let Some(cause) = failure {
            return Err(failed(cause));
        }
        let original = state.mounts.iter().rfind(|it| it.at == source).cloned();
        let original = original.ok_or_else(|| failed(Errno::NOENT.into()))?;
        let top = state.mounts.iter().rfind(|it| it.at == target).map(|it| it.id);
        let parent = top.ok_or_else(|| failed(Errno::INVAL.into()))?;
        let id = state.new_id();
        let read_only = original.read_only || access == Access::ReadOnly;
        state.mounts.push(Mount { id: id.into(), parent, at: target.to_owned(), read_only, ..original });
        Ok(())
    }

    fn unmount(&self, at: &Path) -> Result<(), HostError> {
        self.remove_mount(Call::Unmount { at: at.to_owned() }, Operation::Unmount, at)
    }

    fn detach(&self, at: &Path) -> Result<(), HostError> {
        self.remove_mount(Call::Detach { at: at.to_owned() }, Operation::Detach, at)
    }

    fn abort(&self, device: Device) -> Result<(), HostError> {
        match self.called(Call::Abort { device }, Operation::Abort) {
            (_, Some(cause)) => Err(HostError::Abort { device, cause }),
            (mut state, None) => {
                state.dead.insert(device);
                Ok(())
            }
        }
    }

    fn set_read_ahead(&self, device: Device) -> Result<(), HostError> {
        let failure = self.called(Call::SetReadAhead { device }, Operation::SetReadAhead).1;
        failure.map_or(Ok(()), |cause| Err(HostError::ReadAhead { device, cause }))
    }

    fn probe(&self, at: &Path, _deadline: Instant) -> Probe {
        let mut state = self.state();
        state.calls.push(Call::Probe { at: at.to_owned() });
        let queued = state.probes.iter_mut().find(|(path, _)| path == at).and_then(|(_, it)| it.pop_front());
        if let Some(answer) = queued {
            return answer;
        }
        match state.mounts.iter().rfind(|it| it.at == at) {
            Some(mount) if state.dead.contains(&mount.device) => Probe::Dead(Errno::NOTCONN.into()),
            Some(mount) => Probe::Alive { device: mount.device },
            None if state.directories.contains(at) => Probe::Alive { device: Device { major: 254, minor: 0 } },
            None => Probe::Missing,
        }
    }

    fn create_directory(&self, path: &Path, mode: u32) -> Result<(), HostError> {
        let call = Call::CreateDirectory { path: path.to_owned(), mode };
        match self.called(call, Operation::CreateDirectory) {
            (_, Some(cause)) => Err(HostError::CreateDirectory { path: path.to_owned(), cause }),
            (mut state, None) => {
                state.directories.insert(path.to_owned());
                Ok(())
            }
        }
    }

    fn remove_directory(&self, path: &Path) -> Result<(), HostError> {
        let call = Call::RemoveDirectory { path: path.to_owned() };
        let (mut state, failure) = self.called(call, Operation::RemoveDirectory);
        if let Some(cause) = failure {
            return Err(HostError::RemoveDirectory { path: path.to_owned(), cause });
        }
        if state.mounts.iter().any(|it| it.at == path) {
            return Err(HostError::Busy { at: path.to_owned() });
        }
        state.directories.remove(path);
        Ok(())
    }
}

impl State {
    fn new_id(&mut self) -> u32 {
        self.last_id += 1;
        1000 + self.last_id
    }

    fn next_failure(&mut self, operation: Operation) -> Option<io::Error> {
        let mut due = None;
        for (index, failure) in self.failures.iter_mut().enumerate() {
            if failure.operation == operation {
                match failure.after.checked_sub(1) {
                    Some(after) => failure.after = after,
                    None => due = due.or(Some(index)),
                }
            }
        }
        due.map(|index| self.failures.remove(index).errno.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITABLE: FuseOptions = FuseOptions { access: Access::ReadWrite, allow_other: true };

    /// A host with one source and the directory of a target.
    fn with_source() -> (FakeHost, Device) {
        let fake = FakeHost::new();
        for path in ["/source", "/target"] {
            fake.create_directory(Path::new(path), 0o755).unwrap();
        }
        fake.mount_fuse(Path::new("/source"), &WRITABLE).unwrap();
        let device = fake.mounts()[0].device;
        (fake, device)
    }

    fn probe(fake: &FakeHost, at: &str) -> String {
        fake.probe(Path::new(at), Instant::now()).to_string()
    }

    #[test]
    fn without_injected_failures_it_behaves_like_a_kernel() {
        let (fake, device) = with_source();
        let (source, target) = (Path::new("/source"), Path::new("/target"));
        fake.bind(source, target, Access::ReadOnly).unwrap();
        assert!(matches!(fake.bind(source, target, Access::ReadOnly), Err(HostError::Occupied { .. })));
        assert!(fake.mount_table().unwrap().at(target).unwrap().read_only);
        assert_eq!(fake.mount_table().unwrap().of_device(device).count(), 2);
        assert!(matches!(fake.remove_directory(target), Err(HostError::Busy { .. })));
        for path in [target, source, source] {
            fake.unmount(path).unwrap();
            fake.remove_directory(path).unwrap();
        }
        assert_eq!((fake.mounts(), fake.directories()), (vec![], vec![]));
    }

    #[test]
    fn the_nth_call_fails_once_and_has_no_effect() {
        let (fake, _) = with_source();
        fake.fail(Operation::Bind, 2, Errno::IO);
        fake.fail(Operation::Unmount, 1, Errno::BUSY);
        let (source, target) = (Path::new("/source"), Path::new("/target"));
        fake.bind(source, target, Access::ReadWrite).unwrap();
        assert!(matches!(fake.unmount(target), Err(HostError::Busy { .. })));
        fake.unmount(target).unwrap();
        assert!(matches!(fake.bind(source, target, Access::ReadWrite), Err(HostError::Bind { .. })));
        fake.bind(source, target, Access::ReadWrite).unwrap();
        assert_eq!(fake.mounts().len(), 2);
        assert_eq!(
            fake.calls().last(),
            Some(&Call::Bind { source: source.to_owned(), target: target.to_owned(), access: Access::ReadWrite })
        );
    }

    #[test]
    fn queued_probe_results_come_before_the_table() {
        let (fake, device) = with_source();
        fake.answer_probe("/source", Probe::Hung);
        assert_eq!(probe(&fake, "/source"), "hung");
        assert_eq!(probe(&fake, "/source"), format!("alive as device {device}"));
        assert_eq!(probe(&fake, "/missing"), "missing");
        fake.abort(device).unwrap();
        assert!(probe(&fake, "/source").starts_with("dead"));
    }
}
