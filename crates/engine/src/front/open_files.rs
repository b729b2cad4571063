//! Open files and directories: maps our handle numbers to handles of `S3Filesystem` and to local copies.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use futures::executor::block_on;
use parking_lot::{Mutex, RwLock};

use super::close_rule::CloseRule;
use super::read_cache::CachedReader;
use super::read_order::ReadOrder;
use super::staged::StagedFile;
use super::table::PageVersion;
use crate::client::{Fetch, is_content_of};

pub struct Handle {
    pub inode: u64,
    /// The number `S3Filesystem` uses.
    pub inner: u64,
    /// Only written files have uploads to complete.
    pub close_rule: Option<Arc<CloseRule>>,
    /// Held while something is written or stored, so that what is noted of it is one step.
    pub turn: Arc<Mutex<()>>,
    /// The upload was completed: `S3Filesystem` takes nothing more.
    pub is_complete: AtomicBool,
    /// A previous engine opened it, and it was not used since.
    is_reopened: AtomicBool,
    /// A small file that was fetched while it was looked up.
    content: Mutex<Prefetched>,
    pub order: ReadOrder,
    /// Only files that are read have one.
    pub reader: Option<CachedReader>,
    /// Confirmed by the first request with this handle.
    unconfirmed: Mutex<Option<PageVersion>>,
}

enum Prefetched {
    /// It must be read from the server.
    OnServer,
    OnItsWay {
        fetch: Fetch,
        etag: String,
    },
    Here(Bytes),
}

impl Handle {
    pub fn new(inode: u64, inner: u64, close_rule: Option<CloseRule>) -> Self {
        Self {
            inode,
            inner,
            close_rule: close_rule.map(Arc::new),
            turn: Arc::default(),
            is_complete: AtomicBool::new(false),
            is_reopened: AtomicBool::new(false),
            content: Mutex::new(Prefetched::OnServer),
            order: ReadOrder::default(),
            reader: None,
            unconfirmed: Mutex::new(None),
        }
    }

    /// The same handle for its users, another one for `S3Filesystem`.
    pub fn opened_once_more(&self, inner: u64) -> Self {
        Self { close_rule: self.close_rule.clone(), turn: Arc::clone(&self.turn), ..Self::new(self.inode, inner, None) }
    }

    pub fn reopened(inode: u64, inner: u64, close_rule: Option<CloseRule>) -> Self {
        Self { is_reopened: AtomicBool::new(true), ..Self::new(inode, inner, close_rule) }
    }

    pub fn with_fetch(self, fetch: Option<Fetch>, etag: String) -> Self {
        let content = fetch.map_or(Prefetched::OnServer, |fetch| Prefetched::OnItsWay { fetch, etag });
        Self { content: Mutex::new(content), ..self }
    }

    pub fn with_reader(self, reader: Option<CachedReader>) -> Self {
        Self { reader, ..self }
    }

    pub fn with_unconfirmed(self, version: Option<PageVersion>) -> Self {
        Self { unconfirmed: Mutex::new(version), ..self }
    }

    /// The version of the kernel's pages, if this is the first request with the handle.
    pub fn take_unconfirmed(&self) -> Option<PageVersion> {
        self.unconfirmed.lock().take()
    }

    /// The whole file, if it was fetched while it was looked up and is what was looked up.
    pub fn content(&self) -> Option<Bytes> {
        let mut content = self.content.lock();
        if let Prefetched::OnItsWay { fetch, etag } = &mut *content {
            let fetched = block_on(fetch).filter(|it| is_content_of(it, etag));
            *content = fetched.map_or(Prefetched::OnServer, Prefetched::Here);
        }
        match &*content {
            Prefetched::Here(bytes) => Some(bytes.clone()),
            Prefetched::OnServer | Prefetched::OnItsWay { .. } => None,
        }
    }

    /// Whether this is the first use after it was opened again.
    pub fn take_reopened(&self) -> bool {
        self.is_reopened.swap(false, Ordering::AcqRel)
    }
}

/// What a handle of the kernel stands for.
#[derive(Clone)]
pub enum OpenFile {
    /// A handle of `S3Filesystem`.
    Direct(Arc<Handle>),
    /// The local copy of the file.
    Staged(Arc<StagedFile>),
}

#[derive(Default)]
pub struct Handles(RwLock<HashMap<u64, OpenFile>>);

impl Handles {
    pub fn insert(&self, number: u64, handle: Handle) -> Arc<Handle> {
        let handle = Arc::new(handle);
        self.0.write().insert(number, OpenFile::Direct(Arc::clone(&handle)));
        handle
    }

    pub fn insert_staged(&self, number: u64, file: Arc<StagedFile>) {
        self.0.write().insert(number, OpenFile::Staged(file));
    }

    /// The handle, if this engine has opened it.
    pub fn get(&self, number: u64) -> Option<OpenFile> {
        self.0.read().get(&number).cloned()
    }

    pub fn is_current(&self, number: u64, handle: &Arc<Handle>) -> bool {
        matches!(self.get(number), Some(OpenFile::Direct(it)) if Arc::ptr_eq(&it, handle))
    }

    pub fn remove(&self, number: u64) -> Option<OpenFile> {
        self.0.write().remove(&number)
    }
}
