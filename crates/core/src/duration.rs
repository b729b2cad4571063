//! Durations in the format of Go, which charts pass on: `2m`, `1m30s`, `500ms`, `1.5h`.

use std::time::Duration;

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidDuration {
    #[error("{text:?} is not a duration such as 90s or 1m30s")]
    Format { text: String },

    #[error("{text:?} is not between 1ns and 24h")]
    Range { text: String },
}

/// Longer ones are as good as forever, and this one can be added to any time without overflow.
const MAX_SECONDS: f64 = 86_400.0;

pub fn parse(text: &str) -> Result<Duration, InvalidDuration> {
    let invalid = || InvalidDuration::Format { text: text.to_owned() };
    let mut rest = text;
    let mut seconds = 0.0;
    while !rest.is_empty() {
        let number_end = rest.find(|it: char| it.is_ascii_alphabetic()).ok_or_else(invalid)?;
        let (number, after) = rest.split_at(number_end);
        let unit_end = after.find(|it: char| !it.is_ascii_alphabetic()).unwrap_or(after.len());
        let (unit, after) = after.split_at(unit_end);
        let scale = match unit {
            "h" => 3600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 1e-3,
            "us" => 1e-6,
            "ns" => 1e-9,
            _ => return Err(invalid()),
        };
        seconds += number.parse::<f64>().map_err(|_| invalid())? * scale;
        rest = after;
    }
    let is_in_range = 0.0 < seconds && seconds <= MAX_SECONDS;
    if is_in_range {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err(InvalidDuration::Range { text: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        check("2m", Ok(120_000));
        check("1m30s", Ok(90_000));
        check("500ms", Ok(500));
        check("1.5h", Ok(5_400_000));
        check("24h", Ok(86_400_000));
        check("", Err("\"\" is not between 1ns and 24h"));
        check("0s", Err("\"0s\" is not between 1ns and 24h"));
        check("-1s", Err("\"-1s\" is not between 1ns and 24h"));
        check("25h", Err("\"25h\" is not between 1ns and 24h"));
        for text in ["2", "m", "2 m", "2x", "1m2", "infs", "NaNs"] {
            check(text, Err(&format!("{text:?} is not a duration such as 90s or 1m30s")));
        }
    }

    #[track_caller]
    fn check(text: &str, expected: Result<u128, &str>) {
        let parsed = parse(text).map(|it| it.as_millis()).map_err(|it| it.to_string());
        assert_eq!(parsed, expected.map_err(str::to_owned));
    }
}
