//! A short text in shared memory that is written once and then read by others.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

#[repr(C)]
pub struct Record<const LENGTH: usize> {
    /// Stored last, so that a text is there as a whole or not at all.
    length: AtomicU32,
    bytes: [AtomicU8; LENGTH],
}

impl<const LENGTH: usize> Record<LENGTH> {
    /// A longer text is not noted at all.
    pub fn set(&self, text: &[u8]) {
        let Some(length) = u32::try_from(text.len()).ok().filter(|_| text.len() <= LENGTH) else { return };
        for (target, byte) in self.bytes.iter().zip(text) {
            target.store(*byte, Ordering::Relaxed);
        }
        self.length.store(length, Ordering::Release);
    }

    pub fn get(&self) -> Option<Vec<u8>> {
        let length = self.length.load(Ordering::Acquire) as usize;
        (length > 0).then(|| self.bytes.iter().take(length).map(|it| it.load(Ordering::Relaxed)).collect())
    }
}
