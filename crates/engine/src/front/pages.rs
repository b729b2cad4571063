//! The kernel's page cache across opens: pages stay when a file is opened again and its object is the same one.

use mountpoint_s3_client::ObjectClient;

use super::Front;
use super::metablock::OpenedObject;
use super::open_files::Handle;
use super::table::{KernelPages, PageVersion};

/// The kernel bypasses the page cache for this handle (`FOPEN_DIRECT_IO` of the FUSE protocol).
pub const DIRECT_IO: u32 = 1;
/// The kernel keeps the pages that it has of the file (`FOPEN_KEEP_CACHE`).
const KEEP_CACHE: u32 = 2;

impl<C: ObjectClient + Clone + Send + Sync + 'static> Front<C> {
    /// Flags for the reply to an open, and what the first request with the handle confirms.
    pub(super) fn open_pages(
        &self,
        node: u64,
        number: u64,
        flags: i32,
        object: &OpenedObject,
    ) -> (u32, Option<PageVersion>) {
        if flags & (libc::O_ACCMODE | libc::O_TRUNC) != libc::O_RDONLY {
            self.table.forget_pages(node);
            return (0, None);
        }
        let version = PageVersion::of(&object.etag, object.size).filter(|_| flags & libc::O_DIRECT == 0);
        match version.map(|it| self.table.open_pages(node, number, it)) {
            Some(KernelPages::Keep) => (KEEP_CACHE, None),
            Some(KernelPages::Drop) => (0, version),
            None => (0, None),
        }
    }

    /// A request with this handle has arrived, so the kernel has finished the open.
    pub(super) fn confirm_pages(&self, number: u64, handle: &Handle) {
        if let Some(version) = handle.take_unconfirmed()
            && let Ok(slot) = self.table.handle(number)
        {
            self.table.confirm_pages(slot.owner.load(std::sync::atomic::Ordering::Relaxed), number, version);
        }
    }
}
