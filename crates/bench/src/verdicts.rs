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

    /// The same where it is known how much is possible: a target beyond that says so.
    pub fn add_limited<const N: usize>(
        &mut self,
        target: &str,
        figures: [Option<f64>; N],
        limit: Option<f64>,
        is_met: impl Fn(f64) -> bool,
    ) {
        let is_out_of_reach = limit.is_some_and(|it| !is_met(it));
        let limit = if is_out_of_reach { limit.map(figure) } else { None };
        let target = match limit {
            Some(limit) => format!("{target} (out of reach: the limit is {limit} ×)"),
            None => target.to_owned(),
        };
        self.add(&target, figures, is_met);
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

    #[test]
    fn a_target_beyond_the_limit_says_so() {
        for (limit, expected) in [
            (1.8, "| twice as fast (out of reach: the limit is 1.80 ×) | 1.50 MISS |\n"),
            (2.2, "| twice as fast | 1.50 MISS |\n"),
        ] {
            let mut verdicts = Verdicts::new(["a"]);
            verdicts.add_limited("twice as fast", [Some(1.5)], Some(limit), |it| it >= 2.0);
            let text = verdicts.to_string();
            assert!(text.ends_with(expected), "{text}");
        }
    }
}
