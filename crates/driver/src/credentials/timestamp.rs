//! Times as issuers of credentials write them: RFC 3339 in UTC.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

const SECONDS_PER_DAY: i64 = 86400;

/// `2030-01-31T23:59:59Z`, with or without a fraction of seconds. `None` for anything else, and for times before 1970.
pub fn parse(text: &str) -> Option<SystemTime> {
    let (date, time) = text.trim().split_once('T')?;
    let time = time.strip_suffix('Z').or_else(|| time.strip_suffix("+00:00"))?;
    let [year, month, day] = numbers(date, '-')?;
    let [hour, minute, second] = numbers(time.split('.').next()?, ':')?;
    let is_valid = (1970..=9999).contains(&year)
        && (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 24
        && minute < 60
        && second <= 60;
    if !is_valid {
        return None;
    }
    let seconds = days(year, month, day) * SECONDS_PER_DAY + hour * 3600 + minute * 60 + second;
    Some(UNIX_EPOCH + Duration::from_secs(seconds.try_into().ok()?))
}

fn numbers(text: &str, separator: char) -> Option<[i64; 3]> {
    let is_number = |it: &str| !it.is_empty() && it.len() <= 4 && it.bytes().all(|it| it.is_ascii_digit());
    let mut parts = text.split(separator).map(|it| if is_number(it) { it.parse().ok() } else { None });
    let numbers = [parts.next()??, parts.next()??, parts.next()??];
    parts.next().is_none().then_some(numbers)
}

/// Days since 1970-01-01. Years begin in March here, so that a leap day is the last one.
const fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let month = (month + 9) % 12;
    let day_of_year = (153 * month + 2) / 5 + day - 1;
    365 * year + year / 4 - year / 100 + year / 400 + day_of_year - 719_468
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
        for text in ["", "2026-11-18", "2026-11-18T03:00:00", "2026-13-18T03:00:00Z", "x-1-1T0:0:0Z", "1969-1-1T0:0:0Z"]
        {
            check(text, None);
        }
    }
}
