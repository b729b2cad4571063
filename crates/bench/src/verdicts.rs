//! What we want to reach, and whether this run did.

use std::fmt;

use crate::report::MarkdownTable;
use crate::statistics::figure;

/// One line per target, one column per contestant.
pub struct Verdicts(MarkdownTable);

impl Verdicts {
    pub fn new<const N: usize>(contestants: [&str; N]) -> Self {
        Self(MarkdownTable::new(["target"].into_iter().chain(contestants)))
    }

    /// A figure that is missing is a target that was missed.
    pub fn add<const N: usize>(&mut self, target: &str, figures: [Option<f64>; N], is_met: impl Fn(f64) -> bool) {
        let verdicts = figures.map(|it| match it {
            Some(it) if is_met(it) => format!("{} PASS", figure(it)),
            Some(it) => format!("{} MISS", figure(it)),
            None => "– MISS".to_owned(),
        });
        self.0.add([target.to_owned()].into_iter().chain(verdicts));
    }
}

impl fmt::Display for Verdicts {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_measured_was_not_reached() {
        let mut verdicts = Verdicts::new(["a", "b", "c"]);
        verdicts.add("twice as fast", [Some(2.5), Some(1.5), None], |it| it >= 2.0);
        let text = verdicts.to_string();
        assert!(text.ends_with("| twice as fast | 2.50 PASS | 1.50 MISS | – MISS |\n"), "{text}");
    }
}
