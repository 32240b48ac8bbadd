//! Marks of unfinished work, switched-off tests, and names of places that only one machine has.
//! In: the tree. Out: findings. The marks are put together from pieces so that this file does not hold them.

use super::lexer::has_word;
use super::tree::{Finding, SourceTree};

/// Words of code that stand for something that is not there.
const CODE_MARKS: &[&str] = &["todo!", "unimplemented!"];
/// Words that no text holds.
const TEXT_MARKS: &[&str] = &[concat!("FIX", "ME")];
/// Beginnings of paths outside of the repository.
const OUTSIDE_PATHS: &[&str] =
    &[concat!("sha", "red/"), concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/")];

/// Checks every text file.
pub fn check(tree: &SourceTree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in &tree.files {
        let mut find = |line: usize, message: String| findings.push(Finding::new(&file.path, line, message));
        for (index, line) in file.code.lines().enumerate() {
            for mark in CODE_MARKS.iter().filter(|mark| has_word(line, mark)) {
                find(index + 1, format!("`{mark}` is unfinished work"));
            }
            if is_ignore_attribute(line) {
                find(index + 1, "an ignored test checks nothing: fix it or remove it".to_owned());
            }
        }
        for (index, line) in file.text.lines().enumerate() {
            for mark in TEXT_MARKS.iter().filter(|mark| has_word(line, mark)) {
                find(index + 1, format!("{mark} is unfinished work"));
            }
            for path in OUTSIDE_PATHS.iter().filter(|path| line.contains(**path)) {
                find(index + 1, format!("\"{path}\" is a place outside of the repository"));
            }
        }
    }
    findings
}

/// `#[ignore]`, `#[ignore = ""]`, and the same inside `cfg_attr`.
fn is_ignore_attribute(line: &str) -> bool {
    let line: String = line.chars().filter(|c| !c.is_whitespace()).collect();
    line.contains("#[ignore]")
        || line.contains("#[ignore=")
        || (line.contains("#[cfg_attr") && has_word(&line, "ignore"))
}

#[cfg(test)]
mod tests {
    use super::super::tree::test_tree;
    use super::*;

    fn count(path: &str, text: &str) -> usize {
        check(&test_tree(&[(path, text)])).len()
    }

    #[test]
    fn unfinished_code_is_found_but_not_in_prose() {
        for text in ["fn f() { todo!() }", "fn f() { unimplemented!(\"later\") }", "#[ignore]\nfn f() {}"] {
            assert_eq!(count("crates/wire/src/a.rs", text), 1, "{text}");
        }
        for text in ["#[ignore = \"slow\"]\nfn f() {}", "#[cfg_attr(miri, ignore)]\nfn f() {}"] {
            assert_eq!(count("crates/wire/src/a.rs", text), 1, "{text}");
        }
        assert_eq!(
            count("crates/wire/src/a.rs", "//! Nothing says todo!() here; answers ignore the order.\n"),
            0
        );
    }

    #[test]
    fn marks_and_outside_paths_are_found_in_every_kind_of_file() {
        for path in ["crates/wire/src/a.rs", "docs/TESTING.md", "Makefile"] {
            for mark in TEXT_MARKS.iter().chain(OUTSIDE_PATHS) {
                assert_eq!(count(path, &format!("// see {mark} there\n")), 1, "{mark} in {path}");
            }
        }
    }
}
