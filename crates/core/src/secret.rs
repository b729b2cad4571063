//! A value that must never be printed. It protects against logging by accident, not against reading memory.

use std::fmt;

/// Something that must not appear in a log, an error or a `Debug` output.
///
/// There is no `Display`, and `Debug` prints `<secret>`; only [`Secret::expose`] reads it, and that word is easy to
/// search for.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret<T>(T);

impl<T> Secret<T> {
    pub const fn new(value: T) -> Self {
        Self(value)
    }

    /// The value itself. The caller is responsible for where it goes.
    pub const fn expose(&self) -> &T {
        &self.0
    }
}

impl<T> From<T> for Secret<T> {
    fn from(value: T) -> Self {
        Self(value)
    }
}

impl<T> fmt::Debug for Secret<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("<secret>")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_never_printed() {
        let secret = Secret::new("hunter2".to_owned());
        assert_eq!(format!("{secret:?} {:#?}", Some(&secret)), "<secret> Some(\n    <secret>,\n)");
        assert_eq!(secret.expose(), "hunter2");
    }
}
