//! Things that are picked by their names: what has the name, or which names there are.

use std::fmt;

/// A name that is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownName {
    /// Of what it should have been.
    kind: &'static str,
    name: String,
    /// Those that there are.
    known: String,
}

impl fmt::Display for UnknownName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let UnknownName { kind: what, name, known: names } = self;
        write!(f, "there is no {what} \"{name}\"; there are {names}")
    }
}

impl std::error::Error for UnknownName {}

/// The one of `all` that is called `text`.
///
/// # Errors
/// None is; the message names them all, and calls one of them a `what`.
pub fn find_by_name<T: Copy>(
    kind: &'static str,
    text: &str,
    all: &[T],
    name: fn(T) -> &'static str,
) -> Result<T, UnknownName> {
    all.iter().copied().find(|&one| name(one) == text).ok_or_else(|| {
        let names: Vec<&str> = all.iter().map(|&one| name(one)).collect();
        UnknownName { kind, name: text.to_owned(), known: names.join(", ") }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_found_or_all_names_are_listed() {
        let name = |one: u8| ["", "one", "two"][usize::from(one)];
        assert_eq!(find_by_name("number", "two", &[1, 2], name), Ok(2));
        let error = find_by_name("number", "three", &[1, 2], name).unwrap_err();
        assert_eq!(error.to_string(), "there is no number \"three\"; there are one, two");
    }
}
