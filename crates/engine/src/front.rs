//! Our FUSE front: answers the kernel with the file system of `mountpoint-s3-fs`, under ids and handles of our own.
//!
//! It owns node ids and handles (in `table`) so that a later engine can take over a mount that this one served. It decides
//! nothing about S3.

mod close_rule;
mod handles;
mod kept;
mod kernel;
mod listing;
mod opening;
mod order;
mod resume;
mod table;

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use fuser::{FileAttr, FileType};
use futures::executor::block_on;
use mountpoint_s3_client::ObjectClient;
use mountpoint_s3_fs::S3Filesystem;
use mountpoint_s3_fs::fs::{Entry, Error, ToErrno};

use handles::Handles;
use resume::{Attempt, Resuming};
use table::{Found, Table, TableError, Unneeded};

use crate::client::Ahead;
use crate::session::Heir;
use crate::state::{Kind, Loss, NEW, Noted, State};

pub use kernel::Requests;
pub use opening::Observed;

/// What the front does after a file was moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterMove {
    /// The file is what it was, under another name.
    Nothing,
    /// The file is a copy, with another `ETag` perhaps: what is cached about it must not be believed.
    LookAgain,
}

pub struct Front<C: ObjectClient + Clone + Send + Sync + 'static> {
    files: S3Filesystem<C>,
    table: Table,
    state: State,
    handles: Handles,
    resuming: Resuming,
    habits: Habits,
    ahead: Arc<Ahead>,
}

/// How this mount differs from others.
#[derive(Clone, Debug)]
pub struct Habits {
    pub after_move: AfterMove,
    pub commits: Commits,
    /// Whoever looks for this name waits for ever; only tests set it.
    pub trap: Option<OsString>,
}

/// When something written is in the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Commits {
    /// When the upload of the whole file is completed.
    AtEnd,
    /// Whenever somebody closes or syncs the file.
    AtFlush,
}

/// Why an operation fails: a number for the kernel, words for the log.
struct Failure {
    errno: i32,
    reason: String,
}

type Outcome<T> = Result<T, Failure>;

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    /// The table must be loaded before the first request is served.
    pub fn new(files: S3Filesystem<C>, state: &State, habits: Habits, ahead: Arc<Ahead>) -> Self {
        Self {
            files,
            table: Table::new(state.clone()),
            state: state.clone(),
            handles: Handles::default(),
            resuming: Resuming::default(),
            habits,
            ahead,
        }
    }

    /// Gives the entry our id. From here on the kernel holds a reference to it.
    fn remember(&self, parent: u64, name: &OsStr, mut entry: Entry, flags: u32) -> Outcome<Entry> {
        let inode = entry.attr.ino;
        entry.attr.ino = self
            .table
            .entry(parent, name.as_bytes(), found(&entry.attr, flags))
            .inspect_err(|_| block_on(self.files.forget(inode, 1)))?;
        Ok(entry)
    }

    fn give_back(&self, unneeded: Vec<Unneeded>) {
        for Unneeded { inode, count } in unneeded {
            block_on(self.files.forget(inode, count));
        }
    }

    fn lookup(&self, parent: u64, name: &OsStr) -> Outcome<Entry> {
        while self.habits.trap.as_deref() == Some(name) {
            std::thread::park();
        }
        let directory = self.inode(parent)?;
        self.remake(parent, name)?;
        self.remember(parent, name, block_on(self.files.lookup(directory, name))?, 0)
    }

    /// Takes what mknod or mkdir has made. Sent again, it may find what an engine before this one had made.
    fn made(&self, attempt: Attempt, parent: u64, name: &OsStr, made: Result<Entry, Error>) -> Outcome<Entry> {
        match made {
            Err(error) if attempt == Attempt::Again && error.to_errno() == libc::EEXIST => {
                let entry = block_on(self.files.lookup(self.inode(parent)?, name))?;
                self.remember(parent, name, entry, NEW)
            }
            other => self.remember(parent, name, other?, NEW),
        }
    }

    /// Takes the outcome of unlink or rmdir. Sent again, it may find that it was done by an engine before this one.
    fn removed(&self, attempt: Attempt, parent: u64, name: &OsStr, removed: Result<(), Error>) -> Outcome<()> {
        match removed {
            Err(error) if attempt == Attempt::Again && error.to_errno() == libc::ENOENT => {}
            other => other?,
        }
        self.table.unlinked(parent, name.as_bytes());
        Ok(())
    }

    fn rename(&self, attempt: Attempt, from: (u64, &OsStr), to: (u64, &OsStr), flags: u32) -> Outcome<()> {
        let ((parent, name), (new_parent, new_name)) = (from, to);
        self.remake(parent, name)?;
        let (source, destination) = (self.inode(parent)?, self.inode(new_parent)?);
        match block_on(self.files.rename(source, name, destination, new_name, flags.into())) {
            Err(error) if attempt == Attempt::Again && error.to_errno() == libc::ENOENT => {
                // Done by an engine before this one, if the file is there.
                let moved = block_on(self.files.lookup(destination, new_name))?.attr.ino;
                block_on(self.files.forget(moved, 1));
            }
            other => other?,
        }
        self.give_back(self.table.renamed(parent, name.as_bytes(), new_parent, new_name.as_bytes())?);
        if self.habits.after_move == AfterMove::LookAgain
            && let Err(failure) = self.look_again(new_parent, destination, new_name)
        {
            // The move itself succeeded. At worst the file cannot be read until the cached attributes expire.
            tracing::debug!(%failure, "moved file could not be looked at again");
        }
        Ok(())
    }

    /// A copy may have another `ETag`, and the file system beneath then takes it for another file: an inode of its own. The
    /// kernel goes on to use the id it knows, so that must mean the new inode.
    fn look_again(&self, parent: u64, directory: u64, name: &OsStr) -> Outcome<()> {
        let remembered = block_on(self.files.lookup(directory, name))?.attr.ino;
        // Opening for direct I/O makes the file system beneath ask the server, whatever it remembers. It refuses to open an
        // inode that was replaced; then the next lookup finds the new one.
        let opened =
            block_on(self.files.open(remembered, (libc::O_RDONLY | libc::O_DIRECT).into(), std::process::id()));
        if let Ok(opened) = opened {
            block_on(self.files.release(remembered, opened.fh, libc::O_RDONLY, None, false))?;
        }
        block_on(self.files.forget(remembered, 1));
        let current = block_on(self.files.lookup(directory, name))?.attr.ino;
        self.give_back(vec![self.table.rebind(parent, name.as_bytes(), current)]);
        Ok(())
    }
}

impl<C: ObjectClient + Clone + Send + Sync + 'static> Heir for Front<C> {
    fn take_over(&self) {
        self.table.load();
    }

    fn write_off(&self, lost: &[Noted]) {
        for Noted { handle, loss, .. } in lost {
            match (loss, self.table.handle(*handle)) {
                (Loss::Write, Ok(slot)) => self.poison(*handle, slot),
                (Loss::Release, Ok(_)) => self.resuming.release_later(*handle),
                _ => {}
            }
        }
    }
}

/// What the table has to know of a name.
fn found(attributes: &FileAttr, flags: u32) -> Found {
    Found {
        kind: kind_of(attributes.kind),
        inode: attributes.ino,
        size: attributes.size,
        stamp: attributes.mtime.duration_since(UNIX_EPOCH).map_or(0, |it| it.as_secs()),
        flags,
    }
}

fn kind_of(kind: FileType) -> Kind {
    if kind == FileType::Directory { Kind::Directory } else { Kind::File }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { errno: error.to_errno(), reason: error.to_string() }
    }
}

impl From<TableError> for Failure {
    fn from(error: TableError) -> Self {
        let errno = match error {
            TableError::Stale => libc::ESTALE,
            TableError::Full => libc::ENFILE,
        };
        Self { errno, reason: error.to_string() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.reason)
    }
}
