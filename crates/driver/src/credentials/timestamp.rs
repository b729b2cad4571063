//! Times as issuers of credentials write them: RFC 3339.

use std::time::{SystemTime, UNIX_EPOCH};

use aws_smithy_types::DateTime;
use aws_smithy_types::date_time::Format;

/// `2030-01-31T23:59:59Z`, with or without a fraction of seconds. `None` for anything else, and for times before 1970.
pub fn parse(text: &str) -> Option<SystemTime> {
    let time = DateTime::from_str(text.trim(), Format::DateTimeWithOffset).ok()?;
    SystemTime::try_from(time).ok().filter(|it| *it >= UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expected: Option<u64>) {
        let seconds = parse(text).map(|it| it.duration_since(UNIX_EPOCH).unwrap().as_secs());
        assert_eq!(seconds, expected, "{text}");
    }

    #[test]
    fn times_are_read() {
        check("1970-01-01T00:00:00Z", Some(0));
        check("2000-02-29T12:00:01Z", Some(951_825_601));
        check("2026-11-18T03:00:00.123Z", Some(1_794_970_800));
        check("2026-11-18T03:00:00+00:00", Some(1_794_970_800));
        check("2026-11-18T04:00:00+01:00", Some(1_794_970_800));
        check(" 2026-11-18T03:00:00Z\n", Some(1_794_970_800));
        for text in ["", "2026-11-18", "2026-11-18T03:00:00", "2026-13-18T03:00:00Z", "x-1-1T0:0:0Z", "1969-1-1T0:0:0Z"]
        {
            check(text, None);
        }
    }
}
