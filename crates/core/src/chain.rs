//! One line for an error and everything that caused it. The errors themselves never print their source.

use std::error::Error;
use std::fmt;

/// Shows an error and its causes, joined by `: `, outermost first.
pub struct Chain<'a>(pub &'a dyn Error);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.0)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            write!(formatter, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

impl fmt::Debug for Chain<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Layer {
        text: &'static str,
        #[source]
        cause: Option<Box<Layer>>,
    }

    #[test]
    fn causes_are_joined_outermost_first() {
        let root = Layer { text: "root", cause: None };
        assert_eq!(Chain(&root).to_string(), "root");
        let middle = Layer { text: "middle", cause: Some(Box::new(root)) };
        let top = Layer { text: "top", cause: Some(Box::new(middle)) };
        assert_eq!(Chain(&top).to_string(), "top: middle: root");
    }
}
