//! Percentiles of what was measured, and how figures are written. No measuring here.

/// What was measured, in whatever unit.
#[derive(Clone, Debug, Default)]
pub struct Samples(Vec<f64>);

impl Samples {
    pub fn add(&mut self, value: f64) {
        let at = self.0.partition_point(|it| *it < value);
        self.0.insert(at, value);
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// By nearest rank: a value that was really measured, never a mean of two. Nothing if nothing was measured.
    pub fn percentile(&self, percent: usize) -> Option<f64> {
        let rank = (self.0.len() * percent).div_ceil(100).max(1);
        self.0.get(rank - 1).copied()
    }

    pub fn median(&self) -> Option<f64> {
        self.percentile(50)
    }

    pub fn minimum(&self) -> Option<f64> {
        self.0.first().copied()
    }

    pub fn maximum(&self) -> Option<f64> {
        self.0.last().copied()
    }

    /// How far the values lie apart, as a part of their median.
    pub fn spread(&self) -> Option<f64> {
        Some((self.maximum()? - self.minimum()?) / self.median()?)
    }
}

/// Three digits that count, whatever the size.
pub fn figure(value: f64) -> String {
    match value {
        value if value < 0.995 => format!("{value:.3}"),
        value if value < 9.95 => format!("{value:.2}"),
        value if value < 99.5 => format!("{value:.1}"),
        value => format!("{value:.0}"),
    }
}

/// A figure, or a dash if there is none.
pub fn figure_or_dash(value: Option<f64>) -> String {
    value.map_or_else(|| "–".to_owned(), figure)
}

#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
pub fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(values: &[f64], percent: usize, expected: Option<f64>) {
        let mut samples = Samples::default();
        for it in values {
            samples.add(*it);
        }
        assert_eq!(samples.percentile(percent), expected, "{percent} of {values:?}");
    }

    #[test]
    fn percentiles_are_measured_values() {
        check(&[], 50, None);
        check(&[7.0], 1, Some(7.0));
        check(&[7.0], 99, Some(7.0));
        check(&[4.0, 1.0, 3.0, 2.0], 50, Some(2.0));
        check(&[4.0, 1.0, 3.0, 2.0], 51, Some(3.0));
        check(&[4.0, 1.0, 3.0, 2.0], 99, Some(4.0));
        check(&[4.0, 1.0, 3.0, 2.0], 100, Some(4.0));
    }

    #[test]
    fn figures_have_three_digits() {
        for (value, expected) in [(0.0123, "0.012"), (1.234, "1.23"), (9.96, "10.0"), (99.6, "100"), (1234.5, "1234")] {
            assert_eq!(figure(value), expected);
        }
    }
}
