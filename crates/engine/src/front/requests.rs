//! The requests of the kernel, one by one: each calls the front and answers. Failures are logged here, and only here.
//! Whatever is missing (locks, fallocate) is answered "not supported" by the FUSE library.

use std::ffi::OsStr;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use fuser::{
    FileAttr, Filesystem, KernelConfig, ReplyAttr, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty,
    ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow,
};
use futures::executor::block_on;
use mountpoint_s3_client::ObjectClient;
use mountpoint_s3_fs::fs::Entry;
use time::OffsetDateTime;

use super::attributes::AttributeChange;
use super::listing::Detail;
use super::metadata::{Creator, MetadataMode, is_user_xattr};
use super::names::Name;
use super::writing::WriteRequest;
use super::{Delivery, Front, FsError, FsResult};
use crate::state::{InFlightGuard, RequestClass};

/// `FUSE_HANDLE_KILLPRIV_V2`: writing to a file, truncating and chown(2) clear its set-user-ID and set-group-ID bits here and not
/// in the kernel, which otherwise asks for `security.capability` before each write.
const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
/// `FUSE_PARALLEL_DIROPS`: names of one directory may be looked up at the same time. Otherwise the kernel sends one lookup after the
/// other, and each waits for the store.
const PARALLEL_DIROPS: u64 = 1 << 18;
/// Where the flags are in the answer to `FUSE_INIT`, behind its header and three numbers.
const INIT_FLAGS: usize = 28;
/// Block size in the answer to statfs(2).
const STATFS_BLOCK: u32 = 4096;

/// Answers with the value, or with the error after it was logged.
macro_rules! answer {
    ($front:expr, $operation:literal, $node:expr, $reply:expr, $outcome:expr, $value:pat => $success:expr) => {
        match $outcome {
            Ok($value) => $success,
            Err(error) => {
                $front.log($operation, $node, None, &error);
                $reply.error(error.errno);
            }
        }
    };
    ($front:expr, $operation:literal, $node:expr, $name:expr, $reply:expr, $outcome:expr, $value:pat => $success:expr) => {
        match $outcome {
            Ok($value) => $success,
            Err(error) => {
                $front.log($operation, $node, Some($name), &error);
                $reply.error(error.errno);
            }
        }
    };
}

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    fn log(&self, operation: &str, node: u64, name: Option<&OsStr>, error: &FsError) {
        let mut path = self.table.path(node);
        path.extend(name);
        let errno = error.errno;
        // To ask for a name that does not exist is what most programs do before they create it.
        if [libc::ENOENT, libc::ENODATA].contains(&errno) {
            tracing::debug!(operation, ?path, errno, "{error}");
        } else {
            tracing::warn!(operation, ?path, errno, "{error}");
        }
    }

    /// A name in a directory was changed, if the operation succeeded.
    fn note_change<T>(&self, directory: u64, outcome: &FsResult<T>) {
        if outcome.is_ok() {
            self.table.set_directory_time(directory, SystemTime::now());
        }
    }

    /// `S3Filesystem` talks of its own inodes, the kernel of our ids.
    fn on_inode<T>(&self, node: u64, operation: impl FnOnce(u64) -> FsResult<T>) -> FsResult<T> {
        operation(self.inode(node)?)
    }
}

/// The front as the FUSE library sees it. Others may hold it, too.
pub struct Requests<C: ObjectClient + Clone + Send + Sync + 'static>(pub Arc<Front<C>>);

impl<C: ObjectClient + Clone + Send + Sync + 'static> Deref for Requests<C> {
    type Target = Front<C>;

    fn deref(&self) -> &Front<C> {
        &self.0
    }
}

impl<C: ObjectClient + Clone + Send + Sync + 'static> Requests<C> {
    /// Records the request as in flight until the returned value is dropped, which is after it was answered.
    fn begin(&self, request: &Request<'_>, class: RequestClass, handle: u64) -> InFlightGuard<'_> {
        self.state.begin(request.unique(), handle, class)
    }

    /// Why an extended attribute is not supported, if so. Once the answer is ENOSYS, the kernel does not ask again.
    fn refused_xattr(&self, name: &OsStr) -> Option<i32> {
        match self.config.metadata {
            MetadataMode::Refuse => Some(libc::ENOSYS),
            MetadataMode::Ignore | MetadataMode::Store => (!is_user_xattr(name)).then_some(libc::ENOTSUP),
        }
    }
}

impl<C: ObjectClient + Clone + Send + Sync + 'static> Filesystem for Requests<C> {
    fn init(&self, _: &Request<'_>, config: &mut KernelConfig) -> Result<(), libc::c_int> {
        if self.config.metadata != MetadataMode::Refuse {
            // Kernels before 5.12 do not offer it and ask more often.
            let _ = config.add_capabilities(HANDLE_KILLPRIV_V2);
        }
        // The kernel has the answer of the mount's first engine, which may be an earlier version.
        let first = self.state.answer();
        if first.is_none_or(|it| has_flag(&it, PARALLEL_DIROPS)) {
            let _ = config.add_capabilities(PARALLEL_DIROPS);
        }
        block_on(self.files.init(config))
    }

    fn lookup(&self, request: &Request<'_>, parent: u64, name: &OsStr, reply: ReplyEntry) {
        let _in_flight = self.begin(request, RequestClass::Retryable, 0);
        answer!(self, "lookup", parent, name, reply, Front::lookup(self, parent, name), entry => reply.entry(&entry.ttl, &entry.attr, entry.generation));
    }

    fn forget(&self, _: &Request<'_>, node: u64, count: u64) {
        self.give_back(self.table.forget(node, count));
    }

    fn getattr(&self, request: &Request<'_>, node: u64, _: Option<u64>, reply: ReplyAttr) {
        let _in_flight = self.begin(request, RequestClass::Retryable, 0);
        let found = self.attributes(node);
        answer!(self, "getattr", node, reply, found, it => reply.attr(&it.ttl, &FileAttr { ino: node, ..it.attr }));
    }

    fn setattr(
        &self,
        request: &Request<'_>,
        node: u64,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        accessed: Option<TimeOrNow>,
        modified: Option<TimeOrNow>,
        _changed: Option<SystemTime>,
        handle: Option<u64>,
        _created: Option<SystemTime>,
        _changed_on_mac: Option<SystemTime>,
        _backed_up: Option<SystemTime>,
        flags: Option<u32>,
        reply: ReplyAttr,
    ) {
        let _in_flight = self.begin(request, RequestClass::Retryable, 0);
        let change = AttributeChange {
            size,
            mode,
            uid,
            gid,
            accessed: accessed.map(point_in_time),
            modified: modified.map(point_in_time),
        };
        let changed = self.set_attributes(node, handle, &change, flags);
        answer!(self, "setattr", node, reply, changed, it => reply.attr(&it.ttl, &FileAttr { ino: node, ..it.attr }));
    }

    fn mknod(
        &self,
        request: &Request<'_>,
        parent: u64,
        name: &OsStr,
        mode: u32,
        umask: u32,
        device: u32,
        reply: ReplyEntry,
    ) {
        let _in_flight = self.begin(request, RequestClass::Retryable, 0);
        let delivery = Delivery::of(request.unique());
        let entry = self.on_inode(parent, |inode| {
            if mode & libc::S_IFMT != libc::S_IFREG {
                return Err(FsError::new(libc::EPERM, "an object store has no pipes, sockets and devices".into()));
            }
            let entry =
                self.made(delivery, parent, name, block_on(self.files.mknod(inode, name, mode, umask, device)))?;
            self.note_new_file(entry.attr.ino, mode, Creator::of(request))?;
            Ok(Entry { attr: self.with_metadata(entry.attr.ino, entry.attr), ..entry })
        });
        self.note_change(parent, &entry);
        answer!(self, "mknod", parent, name, reply, entry, entry => reply.entry(&entry.ttl, &entry.attr, entry.generation));
    }

    fn mkdir(&self, request: &Request<'_>, parent: u64, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        let _in_flight = self.begin(request, RequestClass::Retryable, 0);
        let delivery = Delivery::of(request.unique());
        let entry = self.on_inode(parent, |inode| {
            let entry = self.made(delivery, parent, name, block_on(self.files.mkdir(inode, name, mode, umask)))?;
            self.ensure_marker(entry.attr.ino, self.marker_metadata(mode, Creator::of(request)))?;
            self.table.set_directory_time(entry.attr.ino, SystemTime::now());
            Ok(Entry { attr: self.with_metadata(entry.attr.ino, entry.attr), ..entry })
        });
        self.note_change(parent, &entry);
        answer!(self, "mkdir", parent, name, reply, entry, entry => reply.entry(&entry.ttl, &entry.attr, entry.generation));
    }

    fn symlink(&self, request: &Request<'_>, parent: u64, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let _in_flight = self.begin(request, RequestClass::Retryable, 0);
        let made = self.make_link(Delivery::of(request.unique()), Name { parent, name }, target, Creator::of(request));
        self.note_change(parent, &made);
        answer!(self, "symlink", parent, name, reply, made, entry => reply.entry(&entry.ttl, &entry.attr, entry.generation));
    }

    fn readlink(&self, request: &Request<'_>, node: u64, reply: ReplyData) {
        let _in_flight = self.begin(request, RequestClass::Retryable, 0);
        answer!(self, "readlink", node, reply, self.read_link(node), target => reply.data(&target));
    }

    fn link(&self, _: &Request<'_>, node: u64, _: u64, name: &OsStr, reply: ReplyEntry) {
        let refused: FsResult<()> = Err(FsError::new(libc::EPERM, "an object store has no hard links".into()));
        answer!(self, "link", node, name, reply, refused, () => reply.error(libc::EPERM));
    }

    fn unlink(&self, request: &Request<'_>, parent: u64, name: &OsStr, reply: ReplyEmpty) {
        let _in_flight = self.begin(request, RequestClass::Retryable, 0);
        let delivery = Delivery::of(request.unique());
        let removed = self.on_inode(parent, |inode| {
            self.remake(parent, name)?;
            self.unlink_name(delivery, parent, inode, name)
        });
        self.note_change(parent, &removed);
        answer!(self, "unlink", parent, name, reply, removed, () => reply.ok());
    }

    fn rmdir(&self, request: &Request<'_>, parent: u64, name: &OsStr, reply: ReplyEmpty) {
        let _in_flight = self.begin(request, RequestClass::Retryable, 0);
        let delivery = Delivery::of(request.unique());
        let removed = self.on_inode(parent, |inode| {
            self.remake(parent, name)?;
            self.remove_directory(delivery, parent, inode, name)
        });
        self.note_change(parent, &removed);
        answer!(self, "rmdir", parent, name, reply, removed, () => reply.ok());
    }

    fn rename(
        &self,
        request: &Request<'_>,
        parent: u64,
        name: &OsStr,
        new_parent: u64,
        new_name: &OsStr,
        flags: u32,
        reply: ReplyEmpty,
    ) {
        let _in_flight = self.begin(request, RequestClass::Retryable, 0);
        let delivery = Delivery::of(request.unique());
        let moved =
            Front::rename(self, delivery, Name { parent, name }, Name { parent: new_parent, name: new_name }, flags);
        self.note_change(parent, &moved);
        self.note_change(new_parent, &moved);
        answer!(self, "rename", parent, name, reply, moved, () => reply.ok());
    }

    fn open(&self, request: &Request<'_>, node: u64, flags: i32, reply: ReplyOpen) {
        let _in_flight = self.begin(request, RequestClass::Retryable, 0);
        let opened = Front::open(self, node, flags, request.pid(), request.unique());
        answer!(self, "open", node, reply, opened, it => reply.opened(it.number, it.flags));
    }

    fn read(
        &self,
        request: &Request<'_>,
        node: u64,
        handle: u64,
        offset: i64,
        size: u32,
        flags: i32,
        lock_owner: Option<u64>,
        reply: ReplyData,
    ) {
        let in_flight = self.begin(request, RequestClass::Failing, handle);
        let read = Front::read(self, handle, offset, size, flags, lock_owner);
        answer!(self, "read", node, reply, read, it => {
            reply.data(&it.data);
            drop(in_flight);
            self.read_cache.keep(it.keep);
        });
    }

    fn write(
        &self,
        request: &Request<'_>,
        node: u64,
        handle: u64,
        offset: i64,
        data: &[u8],
        write_flags: u32,
        flags: i32,
        lock_owner: Option<u64>,
        reply: ReplyWrite,
    ) {
        let _in_flight = self.begin(request, RequestClass::Write, handle);
        let delivery = Delivery::of(request.unique());
        let write = WriteRequest {
            unique: request.unique(),
            delivery,
            number: handle,
            offset,
            data,
            write_flags,
            flags,
            lock_owner,
        };
        let written = Front::write(self, &write);
        answer!(self, "write", node, reply, written, count => reply.written(count));
    }

    fn flush(&self, request: &Request<'_>, node: u64, handle: u64, lock_owner: u64, reply: ReplyEmpty) {
        let _in_flight = self.begin(request, RequestClass::Failing, handle);
        let flushed = Front::flush(self, handle, request.pid(), lock_owner);
        answer!(self, "flush", node, reply, flushed, () => reply.ok());
    }

    fn fsync(&self, request: &Request<'_>, node: u64, handle: u64, only_data: bool, reply: ReplyEmpty) {
        let _in_flight = self.begin(request, RequestClass::Failing, handle);
        answer!(self, "fsync", node, reply, Front::fsync(self, handle, only_data), () => reply.ok());
    }

    fn release(
        &self,
        request: &Request<'_>,
        node: u64,
        handle: u64,
        flags: i32,
        _: Option<u64>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        let _in_flight = self.begin(request, RequestClass::Release, handle);
        answer!(self, "release", node, reply, Front::release(self, handle, flags), () => reply.ok());
    }

    fn opendir(&self, request: &Request<'_>, node: u64, flags: i32, reply: ReplyOpen) {
        let _in_flight = self.begin(request, RequestClass::Retryable, 0);
        answer!(self, "opendir", node, reply, self.open_directory(node, flags), it => reply.opened(it.number, it.flags));
    }

    fn readdir(&self, request: &Request<'_>, node: u64, handle: u64, offset: i64, mut reply: ReplyDirectory) {
        let _in_flight = self.begin(request, RequestClass::Failing, handle);
        let listed =
            self.list(node, handle, offset, Detail::Names, |it| reply.add(it.ino, it.offset, it.attr.kind, &it.name));
        answer!(self, "readdir", node, reply, listed, () => reply.ok());
    }

    fn readdirplus(&self, request: &Request<'_>, node: u64, handle: u64, offset: i64, mut reply: ReplyDirectoryPlus) {
        let _in_flight = self.begin(request, RequestClass::Failing, handle);
        let listed = self.list(node, handle, offset, Detail::Entries, |it| {
            reply.add(it.ino, it.offset, &it.name, &it.ttl, &it.attr, it.generation)
        });
        answer!(self, "readdirplus", node, reply, listed, () => reply.ok());
    }

    fn releasedir(&self, request: &Request<'_>, node: u64, handle: u64, flags: i32, reply: ReplyEmpty) {
        let _in_flight = self.begin(request, RequestClass::Release, handle);
        answer!(self, "releasedir", node, reply, Front::release(self, handle, flags), () => reply.ok());
    }

    fn setxattr(
        &self,
        request: &Request<'_>,
        node: u64,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _: u32,
        reply: ReplyEmpty,
    ) {
        if let Some(errno) = self.refused_xattr(name) {
            return reply.error(errno);
        }
        let _in_flight = self.begin(request, RequestClass::Retryable, 0);
        let set = self.set_xattr(Delivery::of(request.unique()), node, name, value, flags);
        answer!(self, "setxattr", node, reply, set, () => reply.ok());
    }

    fn getxattr(&self, request: &Request<'_>, node: u64, name: &OsStr, size: u32, reply: ReplyXattr) {
        if let Some(errno) = self.refused_xattr(name) {
            return reply.error(errno);
        }
        let _in_flight = self.begin(request, RequestClass::Retryable, 0);
        answer!(self, "getxattr", node, reply, self.get_xattr(node, name), value => answer_xattr(reply, &value, size));
    }

    fn listxattr(&self, request: &Request<'_>, node: u64, size: u32, reply: ReplyXattr) {
        if self.config.metadata == MetadataMode::Refuse {
            return reply.error(libc::ENOSYS);
        }
        let _in_flight = self.begin(request, RequestClass::Retryable, 0);
        answer!(self, "listxattr", node, reply, self.list_xattrs(node), names => answer_xattr(reply, &names, size));
    }

    fn removexattr(&self, request: &Request<'_>, node: u64, name: &OsStr, reply: ReplyEmpty) {
        if let Some(errno) = self.refused_xattr(name) {
            return reply.error(errno);
        }
        let _in_flight = self.begin(request, RequestClass::Retryable, 0);
        let removed = self.remove_xattr(Delivery::of(request.unique()), node, name);
        answer!(self, "removexattr", node, reply, removed, () => reply.ok());
    }

    fn statfs(&self, request: &Request<'_>, node: u64, reply: ReplyStatfs) {
        let _in_flight = self.begin(request, RequestClass::Retryable, 0);
        let facts = block_on(self.files.statfs(node)).map_err(FsError::from);
        // A bucket has no size. Programs look whether there is room, and people at a table with sensible figures.
        let blocks = self.config.reported_size / u64::from(STATFS_BLOCK);
        answer!(self, "statfs", node, reply, facts, it => reply.statfs(
            blocks,
            blocks,
            blocks,
            it.total_inodes,
            it.free_inodes,
            STATFS_BLOCK,
            it.maximum_name_length,
            STATFS_BLOCK,
        ));
    }
}

/// Answers with the bytes, or with their number if that is what was asked for.
fn answer_xattr(reply: ReplyXattr, bytes: &[u8], size: u32) {
    let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    match size {
        0 => reply.size(length),
        _ if size < length => reply.error(libc::ERANGE),
        _ => reply.data(bytes),
    }
}

fn point_in_time(time: TimeOrNow) -> OffsetDateTime {
    match time {
        TimeOrNow::SpecificTime(time) => time.into(),
        TimeOrNow::Now => OffsetDateTime::now_utc(),
    }
}

/// Whether an answer to `FUSE_INIT` has this flag, one of the first 32.
fn has_flag(answer: &[u8], flag: u64) -> bool {
    let flags = answer.get(INIT_FLAGS..INIT_FLAGS + 4).map(|it| u32::from_ne_bytes([it[0], it[1], it[2], it[3]]));
    flags.is_some_and(|it| u64::from(it) & flag != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_an_answer_are_found_behind_its_header() {
        let mut answer = vec![0; INIT_FLAGS];
        assert!(!has_flag(&answer, PARALLEL_DIROPS), "too short");
        answer.extend([0, 0, 4, 0]);
        assert!(has_flag(&answer, PARALLEL_DIROPS) && !has_flag(&answer, 1));
    }
}
