//! Open files and directories: our handle numbers, and the handles of the file system beneath that they stand for.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Instant;

use bytes::Bytes;
use futures::executor::block_on;
use mountpoint_s3_client::ObjectClient;
use mountpoint_s3_fs::metablock::ReadWriteMode;

use super::close_rule::{CloseRule, Owners};
use super::order::ReadOrder;
use super::resume::{Attempt, not_open};
use super::table::NewHandle;
use super::{Commits, Failure, Front, Outcome, opening};
use crate::client::{Fetch, is_content_of};
use crate::state::{DIRTY, Kind, NEW, POISONED, Slot};

/// Tells the kernel to bypass the page cache for this handle (`FOPEN_DIRECT_IO` of the FUSE protocol).
const DIRECT_IO: u32 = 1;

pub struct Handle {
    pub inode: u64,
    /// The number the file system beneath uses.
    pub inner: u64,
    /// Only written files have uploads to complete.
    pub close_rule: Option<Arc<CloseRule>>,
    /// Held while something is written or stored, so that what is noted of it is one step.
    pub turn: Arc<Mutex<()>>,
    /// The upload was completed: the file system beneath takes nothing more.
    pub is_complete: AtomicBool,
    /// An engine before this one had it open, and nobody used it since.
    is_reopened: AtomicBool,
    /// A small file that was fetched while it was looked up.
    content: Mutex<Content>,
    order: ReadOrder,
}

enum Content {
    /// It must be read from the server.
    OnServer,
    OnItsWay {
        fetch: Fetch,
        etag: String,
    },
    Here(Bytes),
}

impl Handle {
    fn new(inode: u64, inner: u64, close_rule: Option<CloseRule>) -> Self {
        Self {
            inode,
            inner,
            close_rule: close_rule.map(Arc::new),
            turn: Arc::default(),
            is_complete: AtomicBool::new(false),
            is_reopened: AtomicBool::new(false),
            content: Mutex::new(Content::OnServer),
            order: ReadOrder::default(),
        }
    }

    /// The same handle for its users, another one for the file system beneath.
    pub fn opened_once_more(&self, inner: u64) -> Self {
        Self { close_rule: self.close_rule.clone(), turn: Arc::clone(&self.turn), ..Self::new(self.inode, inner, None) }
    }

    pub fn reopened(inode: u64, inner: u64, close_rule: Option<CloseRule>) -> Self {
        Self { is_reopened: AtomicBool::new(true), ..Self::new(inode, inner, close_rule) }
    }

    fn with_fetch(self, fetch: Option<Fetch>, etag: String) -> Self {
        let content = fetch.map_or(Content::OnServer, |fetch| Content::OnItsWay { fetch, etag });
        Self { content: Mutex::new(content), ..self }
    }

    /// The whole file, if it was fetched while it was looked up and is what was looked up.
    pub fn content(&self) -> Option<Bytes> {
        let mut content = self.content.lock().unwrap_or_else(PoisonError::into_inner);
        if let Content::OnItsWay { fetch, etag } = &mut *content {
            let fetched = block_on(fetch).filter(|it| is_content_of(it, etag));
            *content = fetched.map_or(Content::OnServer, Content::Here);
        }
        match &*content {
            Content::Here(bytes) => Some(bytes.clone()),
            Content::OnServer | Content::OnItsWay { .. } => None,
        }
    }

    /// Whether this is the first use after it was opened again.
    pub fn take_reopened(&self) -> bool {
        self.is_reopened.swap(false, Ordering::AcqRel)
    }
}

#[derive(Default)]
pub struct Handles(RwLock<HashMap<u64, Arc<Handle>>>);

impl Handles {
    pub fn insert(&self, number: u64, handle: Handle) -> Arc<Handle> {
        let handle = Arc::new(handle);
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(number, Arc::clone(&handle));
        handle
    }

    /// The handle, if this engine has opened it.
    pub fn get(&self, number: u64) -> Option<Arc<Handle>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(&number).cloned()
    }

    fn is_current(&self, number: u64, handle: &Arc<Handle>) -> bool {
        self.get(number).is_some_and(|it| Arc::ptr_eq(&it, handle))
    }

    fn remove(&self, number: u64) -> Option<Arc<Handle>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(&number)
    }
}

/// The answer to open(2): our handle number and flags for the kernel.
pub struct Opened {
    pub number: u64,
    pub flags: u32,
}

/// What has become of what was written through a handle of an engine before this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Inheritance {
    /// Nothing was written, or it can be written once more, or the handle is one of ours.
    None,
    Stored,
    Lost,
}

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    pub(super) fn open(&self, node: u64, flags: i32, pid: u32) -> Outcome<Opened> {
        let inode = self.inode(node)?;
        let inner = block_on(self.files.open(inode, flags.into(), CloseRule::opener()))?;
        let opening = opening::last();
        let (kind, close_rule) = match opening.mode {
            ReadWriteMode::Read => (Kind::ReadHandle, None),
            ReadWriteMode::Write => (Kind::WriteHandle, Some(CloseRule::for_process(pid))),
        };
        let direct_io = if close_rule.as_ref().is_some_and(CloseRule::needs_direct_io) { DIRECT_IO } else { 0 };
        let etag = if kind == Kind::ReadHandle { opening.etag.as_bytes() } else { &[] };
        let opener = close_rule.as_ref().map_or(0, CloseRule::process);
        let new = NewHandle { kind, open_flags: flags, opener, etag, flags: self.flags_of_new(kind) };
        let number = self.table.add_handle(node, new).inspect_err(|_| {
            // Nobody can use or close the inner handle then, so it is closed here.
            let _ = block_on(self.files.release(inode, inner.fh, flags, None, false));
        })?;
        let fetch = match opening.mode {
            ReadWriteMode::Read => self.ahead.opened(Instant::now(), &opening.key, &opening.etag, opening.size),
            ReadWriteMode::Write => None,
        };
        self.handles.insert(number, Handle::new(inode, inner.fh, close_rule).with_fetch(fetch, opening.etag));
        Ok(Opened { number, flags: inner.flags | direct_io })
    }

    pub(super) fn read(
        &self,
        number: u64,
        offset: i64,
        size: u32,
        flags: i32,
        lock_owner: Option<u64>,
    ) -> Outcome<Bytes> {
        let handle = self.handle(number)?;
        if let Some(content) = handle.content() {
            let start = usize::try_from(offset).unwrap_or(usize::MAX).min(content.len());
            let end = start.saturating_add(size as usize).min(content.len());
            return Ok(content.slice(start..end));
        }
        let _turn = handle.order.enter(u64::try_from(offset).unwrap_or_default(), size.into());
        Ok(block_on(self.files.read(handle.inode, handle.inner, offset, size, flags, lock_owner))?)
    }

    pub(super) fn write(&self, request: &WriteRequest<'_>) -> Outcome<u32> {
        let &WriteRequest { attempt, number, offset, data, write_flags, flags, lock_owner } = request;
        let slot = self.table.handle(number).map_err(|_| not_open())?;
        if slot.has(POISONED) {
            return Err(poisoned());
        }
        if attempt == Attempt::Again && self.has_kept(number, slot, offset, data) {
            // The engine before this one had taken it, but could not say so.
            return Ok(u32::try_from(data.len()).unwrap_or(u32::MAX));
        }
        self.in_turn(number, |handle| {
            if let Some(rule) = &handle.close_rule {
                rule.wrote(lock_owner);
                note_owners(slot, rule);
            }
            let again = self.write_once_more(number, slot, handle)?;
            let handle = again.as_deref().unwrap_or(handle);
            self.table.begin_writing(slot);
            let write = self.files.write(handle.inode, handle.inner, offset, data, write_flags, flags, lock_owner);
            let written = block_on(write)?;
            self.table.wrote(number, slot, &data[..data.len().min(written as usize)]);
            Ok(written)
        })
        .inspect_err(|_| self.poison(number, slot))
    }

    pub(super) fn flush(&self, number: u64, pid: u32, lock_owner: u64) -> Outcome<()> {
        let slot = self.table.handle(number).map_err(|_| not_open())?;
        match self.inheritance(number, slot) {
            Inheritance::None => {}
            Inheritance::Stored => return Ok(()),
            Inheritance::Lost => return Err(poisoned()),
        }
        let flushed = self.in_turn(number, |handle| {
            let closer = match &handle.close_rule {
                Some(rule) => rule.closer(pid, lock_owner, slot.count.load(Ordering::Acquire)),
                None => pid,
            };
            if let Some(rule) = &handle.close_rule {
                note_owners(slot, rule);
            }
            opening::take_finished();
            block_on(self.files.flush(handle.inode, handle.inner, lock_owner, closer))?;
            must_be_sound(slot)?;
            let is_complete = opening::take_finished();
            handle.is_complete.fetch_or(is_complete, Ordering::AcqRel);
            if is_complete || self.habits.commits == Commits::AtFlush {
                self.note_stored(slot);
            }
            Ok(())
        });
        if flushed.is_err() && slot.kind() == Kind::WriteHandle {
            self.poison(number, slot);
        }
        flushed
    }

    pub(super) fn fsync(&self, number: u64, only_data: bool) -> Outcome<()> {
        let slot = self.table.handle(number).map_err(|_| not_open())?;
        match self.inheritance(number, slot) {
            Inheritance::None => {}
            Inheritance::Stored => return Ok(()),
            Inheritance::Lost => return Err(poisoned()),
        }
        let synced = self.in_turn(number, |handle| {
            block_on(self.files.fsync(handle.inode, handle.inner, only_data))?;
            must_be_sound(slot)?;
            handle.is_complete.fetch_or(self.habits.commits == Commits::AtEnd, Ordering::AcqRel);
            self.note_stored(slot);
            Ok(())
        });
        if synced.is_err() && slot.kind() == Kind::WriteHandle {
            self.poison(number, slot);
        }
        synced
    }

    pub(super) fn open_directory(&self, node: u64, flags: i32) -> Outcome<Opened> {
        let inode = self.inode(node)?;
        self.remake_all();
        let inner = block_on(self.files.opendir(inode, flags))?;
        let new = NewHandle { kind: Kind::DirectoryHandle, open_flags: flags, opener: 0, etag: &[], flags: 0 };
        let number = self.table.add_handle(node, new).inspect_err(|_| {
            let _ = block_on(self.files.releasedir(inode, inner.fh, flags));
        })?;
        self.handles.insert(number, Handle::new(inode, inner.fh, None));
        Ok(Opened { number, flags: inner.flags })
    }

    /// The last user of the handle is gone.
    pub(super) fn release(&self, number: u64, flags: i32) -> Outcome<()> {
        let slot = self.table.handle(number).map_err(|_| not_open())?;
        let kind = slot.kind();
        let is_unfinished = kind == Kind::WriteHandle && self.inheritance(number, slot) == Inheritance::None;
        let reopened = if is_unfinished { self.handle(number).map(drop) } else { Ok(()) };
        // Whoever restores what engines before this one left must not take it for unfinished now.
        let _last = self.resuming.is_restoring.load(Ordering::Acquire).then(|| self.resuming.lock(number));
        let Some(handle) = self.handles.remove(number) else {
            self.give_back(self.table.drop_handle(number));
            return reopened;
        };
        let released = if kind == Kind::DirectoryHandle {
            block_on(self.files.releasedir(handle.inode, handle.inner, flags))
        } else {
            block_on(self.files.release(handle.inode, handle.inner, flags, None, false))
        };
        if kind == Kind::WriteHandle && released.is_ok() && !slot.has(POISONED) {
            self.note_stored(slot);
        }
        self.give_back(self.table.drop_handle(number));
        Ok(released?)
    }

    /// Carries out one step with the handle while no other one is.
    fn in_turn<T>(&self, number: u64, step: impl FnOnce(&Arc<Handle>) -> Outcome<T>) -> Outcome<T> {
        loop {
            let handle = self.handle(number)?;
            let _turn = handle.turn.lock().unwrap_or_else(PoisonError::into_inner);
            // While we waited, somebody may have opened it once more.
            if self.handles.is_current(number, &handle) {
                return step(&handle);
            }
        }
    }

    /// What is known of a handle without opening it again.
    fn inheritance(&self, number: u64, slot: &Slot) -> Inheritance {
        if self.handles.get(number).is_some() {
            return Inheritance::None;
        }
        match slot.kind() {
            Kind::WriteHandle if slot.has(POISONED) => Inheritance::Lost,
            Kind::WriteHandle if slot.has(DIRTY) || slot.count.load(Ordering::Acquire) == 0 => Inheritance::None,
            // Nobody waits for something that was only read.
            _ => Inheritance::Stored,
        }
    }

    fn note_stored(&self, slot: &Slot) {
        if slot.kind() == Kind::WriteHandle {
            self.table.end_writing(slot);
            self.table.stored(slot.owner.load(Ordering::Relaxed));
        }
    }

    /// What was written is lost, and so is a name that was not in the bucket yet.
    pub(super) fn poison(&self, number: u64, slot: &Slot) {
        slot.set(POISONED);
        self.table.end_writing(slot);
        self.table.stop_keeping(number, slot);
        self.table.clear(slot.owner.load(Ordering::Relaxed), NEW);
    }
}

/// A request to write, as the kernel makes it.
pub struct WriteRequest<'a> {
    pub attempt: Attempt,
    pub number: u64,
    pub offset: i64,
    pub data: &'a [u8],
    pub write_flags: u32,
    pub flags: i32,
    pub lock_owner: Option<u64>,
}

/// For an engine after this one.
fn note_owners(slot: &Slot, rule: &CloseRule) {
    let Owners { closed_before_writing, presumed } = rule.owners();
    slot.size.store(closed_before_writing.unwrap_or_default(), Ordering::Relaxed);
    slot.owner_of_locks.store(presumed.unwrap_or_default(), Ordering::Relaxed);
}

/// What an engine before this one noted.
pub fn noted_rule(slot: &Slot) -> CloseRule {
    let noted = |owner: u64| Some(owner).filter(|it| *it != 0);
    let owners = Owners {
        closed_before_writing: noted(slot.size.load(Ordering::Relaxed)),
        presumed: noted(slot.owner_of_locks.load(Ordering::Relaxed)),
    };
    CloseRule::recorded(u32::try_from(slot.stamp.load(Ordering::Relaxed)).unwrap_or_default(), owners)
}

/// Whatever the file system beneath says: after a failed write the application must hear of it once more, because many look
/// at the result of close only.
fn must_be_sound(slot: &Slot) -> Outcome<()> {
    if slot.has(POISONED) { Err(poisoned()) } else { Ok(()) }
}

fn poisoned() -> Failure {
    Failure { errno: libc::EIO, reason: "something written to this file earlier was lost".into() }
}
