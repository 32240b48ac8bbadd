//! Lookup by name, with the known names in the error.

/// A name that does not exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown {kind} \"{name}\"; known are {known}")]
pub struct UnknownName {
    /// Kind of the named item, for the message.
    kind: &'static str,
    name: String,
    /// The known names.
    known: String,
}

/// Finds the item of `all` with the name `text`.
///
/// # Errors
/// [`UnknownName`] with all names if there is none; `kind` names the items in the message.
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
        assert_eq!(error.to_string(), "unknown number \"three\"; known are one, two");
    }
}
