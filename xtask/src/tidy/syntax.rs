//! The Rust files of the crates as syntax trees, for the checks that need more than lines.
//! In: the tree. Out: [`RustSource`]s, and a finding for each file that does not parse.
//! Scope: `src` folders of crates; test files (`tests.rs`, `*_tests.rs`, folders `tests`) are left out.

use syn::spanned::Spanned;

use super::tree::{Finding, SourceTree};

/// One parsed source file of a crate.
pub struct RustSource {
    /// Relative to the repository's root.
    pub path: String,
    /// The crate's folder: `crates/wire`, `xtask`.
    pub package: String,
    /// The module path within the crate; empty for `lib.rs` and `main.rs`.
    pub module: Vec<String>,
    /// The parsed items.
    pub ast: syn::File,
}

/// Parses every source file of every crate.
pub fn parse(tree: &SourceTree, findings: &mut Vec<Finding>) -> Vec<RustSource> {
    let mut sources = Vec::new();
    for file in tree.rust_files().filter(|file| !file.is_test_code()) {
        let Some((package, inside)) = file.path.split_once("/src/") else { continue };
        match syn::parse_file(&file.text) {
            Ok(ast) => sources.push(RustSource {
                path: file.path.clone(),
                package: package.to_owned(),
                module: module_path(inside),
                ast,
            }),
            Err(error) => findings.push(Finding::new(
                &file.path,
                error.span().start().line,
                format!("the file does not parse: {error}"),
            )),
        }
    }
    sources
}

/// `hash/mod.rs` and `hash.rs` are the module `hash`, `lib.rs` is the root.
fn module_path(inside: &str) -> Vec<String> {
    let mut parts: Vec<String> = inside.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
    if parts.last().is_some_and(|last| matches!(last.as_str(), "mod" | "lib" | "main")) {
        parts.pop();
    }
    parts
}

/// Whether the item is compiled for tests only (`#[cfg(test)]`, `#[test]`, or `cfg(all(test, …))`).
pub fn is_test_only(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("test")
            || (attribute.path().is_ident("cfg")
                && attribute.meta.require_list().is_ok_and(|list| names_test(&list.tokens.to_string())))
    })
}

/// `test` as a condition that has to hold: not within `not(…)` or `any(…)`.
fn names_test(condition: &str) -> bool {
    let condition = condition.replace(' ', "");
    condition == "test"
        || (condition.starts_with("all(") && condition[4..].split([',', ')']).any(|c| c == "test"))
}

/// The line (from 1) on which the node begins.
pub fn line_of(node: &impl Spanned) -> usize {
    node.span().start().line
}

#[cfg(test)]
pub fn parse_test_tree(files: &[(&str, &str)]) -> Vec<RustSource> {
    let mut findings = Vec::new();
    let sources = parse(&super::tree::test_tree(files), &mut findings);
    assert_eq!(findings, []);
    sources
}

#[cfg(test)]
mod tests {
    use super::super::tree::test_tree;
    use super::*;

    #[test]
    fn files_map_to_module_paths() {
        let cases: [(&str, &[&str]); 5] = [
            ("lib.rs", &[]),
            ("main.rs", &[]),
            ("pdu.rs", &["pdu"]),
            ("hash/mod.rs", &["hash"]),
            ("hash/journal.rs", &["hash", "journal"]),
        ];
        for (inside, wanted) in cases {
            assert_eq!(module_path(inside), wanted, "{inside}");
        }
    }

    #[test]
    fn a_file_that_does_not_parse_is_found() {
        let mut findings = Vec::new();
        assert!(
            parse(&test_tree(&[("crates/wire/src/pdu.rs", "//! PDUs.\nfn (\n")]), &mut findings).is_empty()
        );
        assert_eq!((findings.len(), findings[0].line), (1, 2));
    }

    #[test]
    fn only_conditions_that_require_test_count() {
        for (condition, wanted) in
            [("test", true), ("all(test, unix)", true), ("not(test)", false), ("any(test, unix)", false)]
        {
            assert_eq!(names_test(condition), wanted, "{condition}");
        }
    }
}
