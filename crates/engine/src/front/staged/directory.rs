//! The staging directory: files on disk for staged files that are too large for the spool.
//!
//! Each mount has a subdirectory of its own, made when it is needed and recorded in the state memory. A file is named after its
//! slot, so that a successor finds it. Without a supervisor there is no successor, and files have no names.

use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

use crate::state::{Start, State};

const PREFIX: &str = "mount-s3-stage-";

/// Whether a later engine may continue with the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lifetime {
    Mount,
    Process,
}

/// Where large staged files are kept, and how much of them.
pub struct StageDirectory {
    mount_directory: Option<MountDirectory>,
    lifetime: Lifetime,
    limit: u64,
    used: AtomicU64,
    /// Bytes in files without a name, which are given up when staged files need the room.
    spare: AtomicU64,
    give_up_spare: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// A directory below which this mount has one of its own, made when the first file needs it.
struct MountDirectory {
    parent: PathBuf,
    state: State,
    /// What this engine made.
    own: Mutex<Option<PathBuf>>,
}

impl StageDirectory {
    /// No large files can be staged.
    pub fn none() -> Self {
        Self::new(None, Lifetime::Process, 0)
    }

    /// A directory of this mount below `parent`. `is_exclusive`: no other mount uses `parent`, so other subdirectories were left
    /// by mounts that ended abruptly.
    pub fn open(parent: &Path, is_exclusive: bool, limit: u64, state: &State, lifetime: Lifetime) -> io::Result<Self> {
        fs::create_dir_all(parent)?;
        if is_exclusive && state.start() == Start::First {
            remove_others(parent)?;
        }
        let mount_directory = MountDirectory { parent: parent.to_owned(), state: state.clone(), own: Mutex::default() };
        Ok(Self::new(Some(mount_directory), lifetime, limit))
    }

    fn new(mount_directory: Option<MountDirectory>, lifetime: Lifetime, limit: u64) -> Self {
        let (used, spare) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { mount_directory, lifetime, limit, used, spare, give_up_spare: OnceLock::new() }
    }

    pub fn is_available(&self) -> bool {
        self.mount_directory.is_some()
    }

    /// A new file for this slot.
    pub fn create(&self, id: u64, suffix: &str) -> io::Result<File> {
        let mount_directory = self.mount_directory()?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(0o600);
        if self.lifetime == Lifetime::Process
            && let Ok(file) = options.clone().custom_flags(libc::O_TMPFILE).open(&mount_directory.parent)
        {
            return Ok(file);
        }
        let directory = mount_directory.make()?;
        options.create(true).truncate(true).custom_flags(libc::O_NOFOLLOW);
        match options.open(file(&directory, id, suffix)) {
            // Another program removed the directory.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
                options.open(file(&directory, id, suffix))
            }
            opened => opened,
        }
    }

    /// A file without a name, for what can be fetched again. It is gone with its descriptor.
    pub fn create_unnamed(&self) -> io::Result<File> {
        let parent = &self.mount_directory()?.parent;
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(0o600).custom_flags(libc::O_TMPFILE);
        match options.open(parent) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                DirBuilder::new().recursive(true).mode(0o700).create(parent)?;
                options.open(parent)
            }
            opened => opened,
        }
    }

    /// What is called when a staged file needs the room of files without a name.
    pub fn on_room_wanted(&self, give_up: Box<dyn Fn() + Send + Sync>) {
        // There is one read cache.
        let _ = self.give_up_spare.set(give_up);
    }

    /// Reserves room that no staged file uses. Answers whether there is any.
    pub fn reserve_spare(&self, bytes: u64) -> bool {
        let left = self.limit.saturating_sub(self.used.load(Ordering::Acquire));
        let more = |spare: u64| spare.checked_add(bytes).filter(|it| *it <= left);
        self.spare.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
    }

    pub fn release_spare(&self, bytes: u64) {
        self.spare.fetch_sub(bytes, Ordering::AcqRel);
    }

    /// Whether files have names, so that a successor finds them.
    pub fn has_names(&self) -> bool {
        self.lifetime == Lifetime::Mount
    }

    /// Where the file of this slot is, for people who read logs.
    pub fn path(&self, id: u64) -> Option<PathBuf> {
        let mount_directory = self.mount_directory.as_ref()?;
        Some(mount_directory.find().map_or_else(|| mount_directory.parent.clone(), |own| file(&own, id, "")))
    }

    /// The file that a previous engine made for this slot.
    pub fn reopen(&self, id: u64, suffix: &str) -> io::Result<File> {
        let directory = self.mount_directory()?.find().ok_or(io::ErrorKind::NotFound)?;
        let path = file(&directory, id, suffix);
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(path)
    }

    pub fn remove(&self, id: u64, suffix: &str) {
        let Some(own) = self.mount_directory.as_ref().and_then(MountDirectory::find) else { return };
        let path = file(&own, id, suffix);
        if let Err(error) = fs::remove_file(&path) {
            tracing::warn!(%error, ?path, "cannot remove a staging file");
        }
    }

    /// Reserves room for that many bytes. Answers whether there is any.
    pub fn reserve(&self, bytes: u64) -> bool {
        let more = |used: u64| used.checked_add(bytes).filter(|it| *it <= self.limit);
        let is_reserved = self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok();
        let total = self.used.load(Ordering::Acquire).saturating_add(self.spare.load(Ordering::Acquire));
        if self.limit < total
            && let Some(give_up) = self.give_up_spare.get()
        {
            give_up();
        }
        is_reserved
    }

    /// Counts what a previous engine has reserved.
    pub fn count(&self, bytes: u64) {
        self.used.fetch_add(bytes, Ordering::AcqRel);
    }

    pub fn release(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::AcqRel);
    }

    /// The mount has ended.
    pub fn remove_all(&self) {
        let own = self.mount_directory.as_ref().and_then(MountDirectory::find);
        if let Some(path) = own
            && let Err(error) = fs::remove_dir_all(&path)
        {
            tracing::warn!(%error, ?path, "cannot remove the staging directory");
        }
    }

    fn mount_directory(&self) -> io::Result<&MountDirectory> {
        self.mount_directory.as_ref().ok_or_else(|| io::Error::other("no staging directory"))
    }
}

impl MountDirectory {
    /// The directory of this mount, if one of its engines made it. Looked up each time: an engine that is prepared while another one
    /// serves must find what that one makes later. A directory in the container of another mounter is not there.
    fn find(&self) -> Option<PathBuf> {
        self.found(self.own.lock().as_ref())
    }

    fn found(&self, own: Option<&PathBuf>) -> Option<PathBuf> {
        own.cloned().or_else(|| self.state.stage_directory()).filter(|it| it.is_dir())
    }

    /// The same, made if it is missing.
    fn make(&self) -> io::Result<PathBuf> {
        let mut own = self.own.lock();
        if let Some(path) = self.found(own.as_ref()) {
            return Ok(path);
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let path = self.parent.join(format!("{PREFIX}{}-{now:x}", std::process::id()));
        DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
        self.state.note_stage_directory(&path);
        *own = Some(path.clone());
        Ok(path)
    }
}

impl fmt::Debug for StageDirectory {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("StageDirectory").field("limit", &self.limit).finish_non_exhaustive()
    }
}

fn file(directory: &Path, id: u64, suffix: &str) -> PathBuf {
    directory.join(format!("{id:016x}{suffix}"))
}

fn remove_others(parent: &Path) -> io::Result<()> {
    for entry in fs::read_dir(parent)?.flatten() {
        if entry.file_name().to_string_lossy().starts_with(PREFIX) {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_successor_finds_the_files_of_the_mount_and_another_first_engine_removes_them() {
        let parent = tempfile::tempdir().unwrap();
        let state = State::private().unwrap();
        let open = |state: &State| StageDirectory::open(parent.path(), true, 10, state, Lifetime::Mount).unwrap();
        open(&state).create(7, "").unwrap();
        state.note_exchange(b"question", b"answer");
        assert!(open(&state).path(7).unwrap().exists());
        assert!(open(&state).reopen(7, "").is_ok());
        let other = State::private().unwrap();
        open(&other);
        assert!(open(&state).reopen(7, "").is_err());
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_directory_that_another_program_removed_is_made_again() {
        let parent = tempfile::tempdir().unwrap();
        let state = State::private().unwrap();
        let directory = StageDirectory::open(parent.path(), true, 10, &state, Lifetime::Mount).unwrap();
        directory.create(7, "").unwrap();
        fs::remove_dir_all(directory.path(7).unwrap().parent().unwrap()).unwrap();
        directory.create(8, "").unwrap();
        assert!(directory.reopen(8, "").is_ok() && directory.reopen(7, "").is_err());
    }

    #[test]
    fn an_engine_that_was_prepared_before_finds_the_files_and_one_in_another_container_begins_empty() {
        let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let state = State::private().unwrap();
        let open = |parent: &Path| StageDirectory::open(parent, true, 10, &state, Lifetime::Mount).unwrap();
        let first = open(here.path());
        state.note_exchange(b"question", b"answer");
        let prepared = open(here.path());
        first.create(7, "").unwrap();
        assert!(prepared.reopen(7, "").is_ok());
        first.remove_all();
        let moved = open(there.path());
        moved.create(8, "").unwrap();
        assert!(moved.reopen(8, "").is_ok());
        assert_eq!(fs::read_dir(there.path()).unwrap().count(), 1);
        moved.remove_all();
        assert_eq!(fs::read_dir(there.path()).unwrap().count(), 0);
    }

    #[test]
    fn without_a_supervisor_nothing_is_left_behind() {
        let parent = tempfile::tempdir().unwrap();
        let state = State::private().unwrap();
        let directory = StageDirectory::open(parent.path(), false, 10, &state, Lifetime::Process).unwrap();
        let _file = directory.create(7, "").unwrap();
        directory.remove_all();
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    }

    #[test]
    fn all_files_together_have_a_limit() {
        let directory = StageDirectory::new(None, Lifetime::Process, 10);
        assert!(directory.reserve(6) && !directory.reserve(5));
        directory.release(6);
        assert!(directory.reserve(10));
    }

    #[test]
    fn what_can_be_fetched_again_gives_way_to_staged_files() {
        let directory = Arc::new(StageDirectory::new(None, Lifetime::Process, 10));
        let weak = Arc::downgrade(&directory);
        directory.on_room_wanted(Box::new(move || {
            let directory = weak.upgrade().unwrap();
            directory.release_spare(directory.spare.load(Ordering::Acquire));
        }));
        assert!(directory.reserve(2) && directory.reserve_spare(5) && !directory.reserve_spare(4));
        assert!(directory.reserve(3));
        assert_eq!(directory.spare.load(Ordering::Acquire), 5, "there was room for both");
        assert!(directory.reserve(5) && !directory.reserve_spare(1));
        assert_eq!(directory.spare.load(Ordering::Acquire), 0);
    }

    #[test]
    fn files_without_a_name_are_never_seen() {
        let parent = tempfile::tempdir().unwrap();
        let state = State::private().unwrap();
        let directory = StageDirectory::open(parent.path(), true, 10, &state, Lifetime::Mount).unwrap();
        let _file = directory.create_unnamed().unwrap();
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
        assert!(StageDirectory::none().create_unnamed().is_err());
    }
}
