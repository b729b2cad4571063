//! Quantities as Kubernetes writes them: `500m`, `2`, `1.5Gi`, `1e3`.

use std::fmt;
use std::str::FromStr;

/// A quantity greater than zero. It is written as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quantity {
    text: String,
    thousandths: u128,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a quantity such as 500m, 2 or 512Mi, greater than zero")]
pub struct InvalidQuantity(String);

impl Quantity {
    /// Rounded up, as Kubernetes does.
    pub const fn thousandths(&self) -> u128 {
        self.thousandths
    }
}

impl FromStr for Quantity {
    type Err = InvalidQuantity;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match thousandths(text) {
            Some(thousandths) if 0 < thousandths => Ok(Self { text: text.to_owned(), thousandths }),
            Some(_) | None => Err(InvalidQuantity(text.to_owned())),
        }
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.text)
    }
}

fn thousandths(text: &str) -> Option<u128> {
    let end = text.find(|it: char| !it.is_ascii_digit() && it != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if number.len() > 18 || whole.len() + fraction.len() == 0 || fraction.contains('.') {
        return None;
    }
    let digits: u128 = format!("{whole}{fraction}").parse().ok()?;
    let (multiplier, divisor): (u128, u128) = match unit {
        "n" => (1, 1_000_000),
        "u" => (1, 1000),
        "m" => (1, 1),
        "" => (1000, 1),
        "k" => (1000_u128.pow(2), 1),
        "M" => (1000_u128.pow(3), 1),
        "G" => (1000_u128.pow(4), 1),
        "T" => (1000_u128.pow(5), 1),
        "P" => (1000_u128.pow(6), 1),
        "E" => (1000_u128.pow(7), 1),
        "Ki" => (1000 << 10, 1),
        "Mi" => (1000 << 20, 1),
        "Gi" => (1000 << 30, 1),
        "Ti" => (1000 << 40, 1),
        "Pi" => (1000 << 50, 1),
        "Ei" => (1000 << 60, 1),
        exponent => {
            let power: u32 = exponent.strip_prefix(['e', 'E'])?.parse().ok().filter(|it| *it <= 18)?;
            (1000 * 10_u128.pow(power), 1)
        }
    };
    let divisor = divisor * 10_u128.pow(u32::try_from(fraction.len()).ok()?);
    digits.checked_mul(multiplier).map(|it| it.div_ceil(divisor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expected: Option<u128>) {
        let quantity: Option<Quantity> = text.parse().ok();
        assert_eq!(quantity.as_ref().map(Quantity::thousandths), expected, "{text}");
        assert_eq!(quantity.map(|it| it.to_string()), expected.map(|_| text.to_owned()));
    }

    #[test]
    fn quantities() {
        check("2", Some(2000));
        check("500m", Some(500));
        check("1.5", Some(1500));
        check("0.5Gi", Some((1000 << 30) / 2));
        check("1e3", Some(1_000_000));
        check("1e18", Some(10_u128.pow(21)));
        check("1e19", None);
        check("12E", Some(12 * 1000_u128.pow(7)));
        check("1n", Some(1));
        for wrong in ["", "0", "0Mi", "Mi", ".", "-1", "1.2.3", "1 Gi", "1gi", "1e99", "1e", "9999999999999999999"] {
            check(wrong, None);
        }
    }
}
