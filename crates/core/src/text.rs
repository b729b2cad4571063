//! Text that others wrote (a store, an engine, an API server), made fit for a log line, an Event or a status.

/// One line of at most `max_bytes`, without control characters that a terminal would obey. Text that is cut ends with an ellipsis.
pub fn shortened(text: &str, max_bytes: usize) -> String {
    const ELLIPSIS: char = '…';
    let mut line = String::new();
    for part in text.lines().map(str::trim).filter(|it| !it.is_empty()) {
        let separator = if line.is_empty() { "" } else { "; " };
        for character in separator.chars().chain(part.chars().filter(|it| !it.is_control())) {
            line.push(character);
            if max_bytes < line.len() {
                line.truncate(line.floor_char_boundary(max_bytes.saturating_sub(ELLIPSIS.len_utf8())));
                line.push(ELLIPSIS);
                return line;
            }
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn check(text: &str, max_bytes: usize, expected: &str) {
        assert_eq!(shortened(text, max_bytes), expected);
    }

    #[test]
    fn text_becomes_one_line_that_is_cut_between_characters() {
        check("short", 5, "short");
        check("longer", 5, "lo…");
        check("äöü", 5, "ä…");
        check(" first\r\n\n\tsecond\n", 64, "first; second");
        check("\u{1b}[2Jred\0", 64, "[2Jred");
        check("\n", 64, "");
    }

    proptest! {
        #[test]
        fn shortened_text_fits_and_is_harmless(text in any::<String>(), max_bytes in 3_usize..64) {
            let line = shortened(&text, max_bytes);
            prop_assert!(line.len() <= max_bytes, "{line:?}");
            prop_assert!(!line.contains(char::is_control), "{line:?}");
            prop_assert_eq!(shortened(&line, max_bytes), line.trim());
        }
    }
}
