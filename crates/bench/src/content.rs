//! What the benchmarks write and expect to read: blocks of noise, each with its number, so that a missing, mixed-up or
//! stale one is noticed whatever the order they are read in.

/// Also the size of a small file, and of a random read.
pub const BLOCK_BYTES: usize = 4096;
const STAMP_BYTES: usize = 8;

/// The size of one read or write of a big file.
pub const CHUNK_BYTES: usize = 1 << 20;
pub const BLOCKS_PER_CHUNK: u64 = (CHUNK_BYTES / BLOCK_BYTES) as u64;

/// One block of noise; numbered copies of it are the content of everything.
pub struct Content {
    block: Vec<u8>,
}

#[derive(Debug, thiserror::Error)]
#[error("block {number} holds other bytes than it should")]
pub struct ContentMismatch {
    number: u64,
}

impl Content {
    pub fn new() -> Self {
        let mut numbers = PseudoRandom::new();
        let block = std::iter::repeat_with(|| numbers.next().to_le_bytes()).flatten().take(BLOCK_BYTES).collect();
        Self { block }
    }

    /// The first `bytes` of a file whose blocks are numbered from `first` on.
    pub fn bytes(&self, first: u64, bytes: usize) -> Vec<u8> {
        let mut buffer = self.block.repeat(bytes.div_ceil(BLOCK_BYTES));
        stamp(&mut buffer, first);
        buffer.truncate(bytes);
        buffer
    }

    /// Whether these are the blocks from `first` on; the last one may be cut short.
    pub fn check(&self, first: u64, bytes: &[u8]) -> Result<(), ContentMismatch> {
        for (number, found) in (first..).zip(bytes.chunks(BLOCK_BYTES)) {
            let stamp = &number.to_le_bytes()[..found.len().min(STAMP_BYTES)];
            let noise = &self.block[stamp.len()..found.len()];
            if !found.starts_with(stamp) || &found[stamp.len()..] != noise {
                return Err(ContentMismatch { number });
            }
        }
        Ok(())
    }

    /// The same for bytes that begin anywhere in a file.
    pub fn check_at(&self, offset: u64, bytes: &[u8]) -> Result<(), ContentMismatch> {
        let block = BLOCK_BYTES as u64;
        let skipped = usize::try_from(offset % block).unwrap_or_default();
        let (head, rest) = bytes.split_at(if skipped == 0 { 0 } else { bytes.len().min(BLOCK_BYTES - skipped) });
        let number = offset / block;
        let expected = self.bytes(number, BLOCK_BYTES);
        if expected[skipped..skipped + head.len()] != *head {
            return Err(ContentMismatch { number });
        }
        self.check(offset.div_ceil(block), rest)
    }
}

/// Gives the blocks of a buffer their numbers.
pub fn stamp(buffer: &mut [u8], first: u64) {
    for (number, block) in (first..).zip(buffer.chunks_exact_mut(BLOCK_BYTES)) {
        block[..STAMP_BYTES].copy_from_slice(&number.to_le_bytes());
    }
}

/// Numbers that look random and are the same in every run (xorshift64).
pub struct PseudoRandom(u64);

impl PseudoRandom {
    pub fn new() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_is_recognised() {
        let content = Content::new();
        let bytes = content.bytes(5, 3 * BLOCK_BYTES + 100);
        content.check(5, &bytes).unwrap();
        content.check(6, &bytes[BLOCK_BYTES..]).unwrap();
    }

    #[test]
    fn content_is_recognised_from_anywhere() {
        let content = Content::new();
        let bytes = content.bytes(0, 3 * BLOCK_BYTES);
        for offset in [0, 1, 8, 4095, 4096, 5000, 3 * BLOCK_BYTES - 1] {
            content.check_at(offset as u64, &bytes[offset..]).unwrap();
        }
        content.check_at(5000, &bytes[5000..5100]).unwrap();
        assert!(content.check_at(5001, &bytes[5000..5100]).is_err());
    }

    #[test]
    fn one_wrong_byte_or_block_is_noticed() {
        let content = Content::new();
        let good = content.bytes(0, 4 * BLOCK_BYTES);
        let mut flipped = good.clone();
        flipped[2 * BLOCK_BYTES + 4000] ^= 1;
        assert_eq!(content.check(0, &flipped).unwrap_err().number, 2);
        assert_eq!(content.check(1, &good).unwrap_err().number, 1);
    }
}
