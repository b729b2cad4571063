//! What the `ETag` of an object says of its content.
//!
//! An object stored by one request has the MD5 of its content, one stored in parts the MD5 of the MD5s of its parts and their number,
//! unless it is encrypted with a key of its own. Where it is something else, nothing here ever matches.

use std::fmt::Write as _;

use md5::{Digest as _, Md5};

/// Of an MD5, in bytes.
const LENGTH: usize = 16;

/// Whether this is the content of the object with this `ETag`.
pub fn is_content_of(content: &[u8], etag: &str) -> bool {
    is_digest_of(&digest(content), etag)
}

/// The digest of an object that is stored by one request.
pub fn digest(content: &[u8]) -> String {
    hex(&Md5::digest(content))
}

/// Whether the object with this `ETag` has the content of this digest.
pub fn is_digest_of(digest: &str, etag: &str) -> bool {
    etag.trim_matches('"').eq_ignore_ascii_case(digest)
}

/// The digest of an object that is stored in parts.
pub struct PartsDigest {
    part_size: usize,
    parts: Md5,
    count: usize,
    part: Md5,
    length: usize,
}

impl PartsDigest {
    /// Of content that is cut into parts of this size, the last one smaller.
    pub fn new(part_size: usize) -> Self {
        Self { part_size: part_size.max(1), parts: Md5::new(), count: 0, part: Md5::new(), length: 0 }
    }

    pub fn update(&mut self, mut content: &[u8]) {
        while !content.is_empty() {
            let (now, later) = content.split_at(content.len().min(self.part_size - self.length));
            self.part.update(now);
            self.length += now.len();
            content = later;
            if self.length == self.part_size {
                self.end_part();
            }
        }
    }

    pub fn finish(mut self) -> String {
        if 0 < self.length || self.count == 0 {
            self.end_part();
        }
        format!("{}-{}", hex(&self.parts.finalize()), self.count)
    }

    fn end_part(&mut self) {
        self.parts.update(self.part.finalize_reset());
        self.count += 1;
        self.length = 0;
    }
}

/// The digest of an object whose parts have these `ETag`s. None if they are no digests.
pub fn digest_of_parts<'a>(etags: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let (mut parts, mut count) = (Md5::new(), 0);
    for etag in etags {
        parts.update(bytes_of(etag.trim_matches('"'))?);
        count += 1;
    }
    Some(format!("{}-{count}", hex(&parts.finalize())))
}

fn bytes_of(digest: &str) -> Option<Vec<u8>> {
    let bytes = digest.as_bytes().chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok());
    bytes.collect::<Option<Vec<u8>>>().filter(|it| it.len() == LENGTH)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ETAG: &str = "\"900150983cd24fb0d6963f7d28e17f72\"";

    #[test]
    fn content_is_proven_by_its_digest() {
        assert!(is_content_of(b"abc", ETAG));
        assert!(is_content_of(b"abc", "900150983CD24FB0D6963F7D28E17F72"));
        assert!(!is_content_of(b"abd", ETAG));
        assert!(!is_content_of(b"abc", "\"900150983cd24fb0d6963f7d28e17f72-1\""));
        assert!(!is_content_of(b"abc", ""));
    }

    #[test]
    fn the_digest_of_parts_is_the_same_from_content_and_from_the_etags_of_the_parts() {
        for length in [0, 1, 9, 10, 11, 20, 25] {
            let content = vec![b'x'; length];
            let mut digest_by_content = PartsDigest::new(10);
            content.chunks(7).for_each(|it| digest_by_content.update(it));
            let parts = if content.is_empty() { vec![&content[..]] } else { content.chunks(10).collect() };
            let etags: Vec<String> = parts.into_iter().map(|it| format!("\"{}\"", digest(it))).collect();
            assert_eq!(digest_of_parts(etags.iter().map(String::as_str)), Some(digest_by_content.finish()), "{length}");
        }
    }

    #[test]
    fn etags_that_are_no_digests_have_no_digest() {
        assert_eq!(digest_of_parts([ETAG, "\"opaque\""]), None);
        assert_eq!(digest_of_parts(["\"9001\""]), None);
    }
}
