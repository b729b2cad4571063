//! Our FUSE front: answers the kernel with the file system of `mountpoint-s3-fs`, under ids and handles of our own.
//!
//! It owns node ids and handles (in `table`) so that a later engine can take over a mount that this one served. It decides
//! nothing about S3.

mod close_rule;
mod handles;
mod kernel;
mod listing;
mod opening;
mod slots;
mod table;

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;

use fuser::FileType;
use futures::executor::block_on;
use mountpoint_s3_client::ObjectClient;
use mountpoint_s3_fs::S3Filesystem;
use mountpoint_s3_fs::fs::{Entry, Error, ToErrno};

use handles::Handles;
use slots::Kind;
use table::{Table, TableError, Unneeded};

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
    handles: Handles,
    after_move: AfterMove,
}

/// Why an operation fails: a number for the kernel, words for the log.
struct Failure {
    errno: i32,
    reason: String,
}

type Outcome<T> = Result<T, Failure>;

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    pub fn new(files: S3Filesystem<C>, after_move: AfterMove) -> Self {
        Self { files, table: Table::new(), handles: Handles::default(), after_move }
    }

    /// Gives the entry our id. From here on the kernel holds a reference to it.
    fn remember(&self, parent: u64, name: &OsStr, mut entry: Entry) -> Outcome<Entry> {
        let inode = entry.attr.ino;
        entry.attr.ino = self
            .table
            .entry(parent, name.as_bytes(), kind_of(entry.attr.kind), inode)
            .inspect_err(|_| block_on(self.files.forget(inode, 1)))?;
        Ok(entry)
    }

    fn give_back(&self, unneeded: Vec<Unneeded>) {
        for Unneeded { inode, count } in unneeded {
            block_on(self.files.forget(inode, count));
        }
    }

    fn rename(&self, parent: u64, name: &OsStr, new_parent: u64, new_name: &OsStr, flags: u32) -> Outcome<()> {
        let (source, destination) = (self.table.inode(parent)?, self.table.inode(new_parent)?);
        block_on(self.files.rename(source, name, destination, new_name, flags.into()))?;
        self.give_back(self.table.renamed(parent, name.as_bytes(), new_parent, new_name.as_bytes())?);
        if self.after_move == AfterMove::LookAgain
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
