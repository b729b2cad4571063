//! The output of an engine in bounded memory: lines to relay, and the tail for error messages.

use std::collections::VecDeque;

/// A longer line is relayed in pieces.
const MAX_LINE_BYTES: usize = 8 * 1024;

/// Enough for an error message with its causes.
pub const MAX_TAIL_BYTES: usize = 16 * 1024;

/// Splits a stream of bytes into lines.
#[derive(Debug, Default)]
pub struct Lines {
    unfinished: Vec<u8>,
}

/// Keeps the last bytes of a stream.
#[derive(Debug, Default)]
pub struct Tail {
    bytes: VecDeque<u8>,
    is_cut: bool,
}

impl Lines {
    /// Calls `emit` for each line that is now complete, without its end.
    pub fn push(&mut self, bytes: &[u8], emit: &mut dyn FnMut(&[u8])) {
        for part in bytes.split_inclusive(|&it| it == b'\n') {
            let (text, is_complete) = match part.strip_suffix(b"\n") {
                Some(text) => (text, true),
                None => (part, false),
            };
            let mut rest = text;
            while MAX_LINE_BYTES < self.unfinished.len() + rest.len() {
                let (head, more) = rest.split_at(MAX_LINE_BYTES - self.unfinished.len());
                self.unfinished.extend_from_slice(head);
                emit(&self.unfinished);
                self.unfinished.clear();
                rest = more;
            }
            self.unfinished.extend_from_slice(rest);
            if is_complete {
                emit(&self.unfinished);
                self.unfinished.clear();
            }
        }
    }

    /// Emits the last line of a stream that has ended without a line break.
    pub fn finish(&mut self, emit: &mut dyn FnMut(&[u8])) {
        if !self.unfinished.is_empty() {
            emit(&self.unfinished);
            self.unfinished.clear();
        }
    }
}

impl Tail {
    pub fn push(&mut self, bytes: &[u8]) {
        let newest = &bytes[bytes.len().saturating_sub(MAX_TAIL_BYTES)..];
        let surplus = (self.bytes.len() + newest.len()).saturating_sub(MAX_TAIL_BYTES);
        self.is_cut |= 0 < surplus || newest.len() < bytes.len();
        self.bytes.drain(..surplus);
        self.bytes.extend(newest);
    }

    /// The text without surrounding white space. After a cut it starts with a whole line, if there is one.
    pub fn into_text(self) -> String {
        let bytes: Vec<u8> = self.bytes.into();
        let text = printable(String::from_utf8_lossy(&bytes).trim());
        // Invalid bytes have become longer.
        let start = text.ceil_char_boundary(text.len().saturating_sub(MAX_TAIL_BYTES));
        match text[start..].split_once('\n') {
            Some((_, whole_lines)) if self.is_cut || 0 < start => whole_lines.to_owned(),
            _ => text[start..].to_owned(),
        }
    }
}

/// Bounds a text of arbitrary length for answers and files.
pub fn shorten(text: &str) -> String {
    let mut text = printable(text);
    text.truncate(text.floor_char_boundary(MAX_TAIL_BYTES));
    text
}

/// Replaces control characters, which JSON would escape to many times their length.
fn printable(text: &str) -> String {
    let is_plain = |it: char| it == '\n' || it == '\t' || !it.is_control();
    text.chars().map(|it| if is_plain(it) { it } else { char::REPLACEMENT_CHARACTER }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_at_their_ends_however_they_arrive() {
        check(&[b"a\nb\n"], &["a", "b"]);
        check(&[b"a", b"b\nc"], &["ab", "c"]);
        check(&[b"\n\nx"], &["", "", "x"]);
        check(&[], &[]);
    }

    #[test]
    fn a_long_line_comes_in_pieces() {
        let long = "x".repeat(MAX_LINE_BYTES);
        check(&[long.as_bytes(), b"\n"], &[&long]);
        check(&[long.as_bytes(), b"y\nz\n"], &[&long, "y", "z"]);
        check(&[format!("{long}{long}y\nz").as_bytes()], &[&long, &long, "y", "z"]);
    }

    #[track_caller]
    fn check(parts: &[&[u8]], expected: &[&str]) {
        let mut found = Vec::new();
        let mut emit = |line: &[u8]| found.push(String::from_utf8(line.to_vec()).unwrap());
        let mut lines = Lines::default();
        for part in parts {
            lines.push(part, &mut emit);
        }
        lines.finish(&mut emit);
        assert_eq!(found, expected);
    }

    #[test]
    fn a_tail_is_bounded_and_starts_with_a_whole_line() {
        let mut tail = Tail::default();
        for number in 0..100_000 {
            tail.push(format!("line {number}\n").as_bytes());
            assert!(tail.bytes.len() <= MAX_TAIL_BYTES);
        }
        let text = tail.into_text();
        assert!(text.starts_with("line 9"), "{}", &text[..20]);
        assert!(text.ends_with("line 99999"));
        assert!(MAX_TAIL_BYTES - 20 < text.len(), "{} bytes", text.len());
    }

    #[test]
    fn a_short_text_is_kept_whole() {
        let mut tail = Tail::default();
        tail.push(b"Error: one\n  caused by: tw");
        tail.push(b"o\n\n");
        assert_eq!(tail.into_text(), "Error: one\n  caused by: two");
    }

    #[test]
    fn one_endless_line_keeps_its_end() {
        let mut tail = Tail::default();
        tail.push(&vec![b'x'; 3 * MAX_TAIL_BYTES]);
        tail.push(b"end");
        let text = tail.into_text();
        assert_eq!(text.len(), MAX_TAIL_BYTES);
        assert!(text.ends_with("xend"));
    }

    #[test]
    fn bytes_that_are_not_text_do_not_exceed_the_bound() {
        let mut tail = Tail::default();
        tail.push(&vec![0xff; MAX_TAIL_BYTES - 4]);
        tail.push(b"end");
        let text = tail.into_text();
        assert!(text.len() <= MAX_TAIL_BYTES);
        assert!(text.ends_with("\u{fffd}end"));
    }

    #[test]
    fn texts_are_shortened_between_characters() {
        assert_eq!(shorten("ä\u{1b}[0m\n\tx"), "ä\u{fffd}[0m\n\tx");
        let text = format!("x{}", "ä".repeat(MAX_TAIL_BYTES));
        assert_eq!(shorten(&text).len(), MAX_TAIL_BYTES - 1);
    }
}
