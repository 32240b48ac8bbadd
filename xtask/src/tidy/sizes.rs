//! Long files fail unless listed with a reason; long functions are noted.
//! In: the tree. Out: findings.

use super::exceptions::Exceptions;
use super::lexer::{block_end, has_word};
use super::tree::{Finding, SourceTree};

/// More lines than this and a file has outgrown its header.
const FILE_LINES_MAX: usize = 600;
/// More lines than this and a function does more than one thing.
const FUNCTION_LINES_MAX: usize = 70;

/// Files that are too long and not listed.
pub fn long_files(tree: &SourceTree, exceptions: &Exceptions) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.rust_files() {
        let lines = file.text.lines().count();
        if lines > FILE_LINES_MAX && !exceptions.allows("length", &file.path) {
            let message = format!(
                "{lines} lines, more than {FILE_LINES_MAX}: split it by responsibility, or list it in xtask/tidy-exceptions.txt with a reason"
            );
            findings.push(Finding::new(&file.path, 0, message));
        }
    }
    findings
}

/// Functions that are too long, at the line of their `fn`.
pub fn long_functions(tree: &SourceTree) -> Vec<Finding> {
    let mut notes = Vec::new();
    for file in tree.rust_files() {
        let mut start = 0;
        for (index, line) in file.code.split_inclusive('\n').enumerate() {
            if has_word(line, "fn") {
                let at = start + line.find("fn").unwrap_or_default();
                let lines = block_end(&file.code, at).map_or(0, |last| last - index);
                if lines > FUNCTION_LINES_MAX {
                    let message = format!("a function of {lines} lines, more than {FUNCTION_LINES_MAX}");
                    notes.push(Finding::new(&file.path, index + 1, message));
                }
            }
            start += line.len();
        }
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::super::tree::test_tree;
    use super::*;

    fn long_file_count(files: &[(&str, &str)]) -> usize {
        let tree = test_tree(files);
        let exceptions = Exceptions::read(&tree, &mut Vec::new());
        long_files(&tree, &exceptions).len()
    }

    #[test]
    fn a_file_over_the_limit_fails_unless_listed() {
        let (fits, long_text) = ("//! x\n".repeat(600), "//! x\n".repeat(601));
        assert_eq!(long_file_count(&[("crates/wire/src/a.rs", &fits)]), 0);
        let file = ("crates/wire/src/a.rs", long_text.as_str());
        assert_eq!(long_file_count(&[file]), 1);
        assert_eq!(
            long_file_count(&[
                file,
                ("xtask/tidy-exceptions.txt", "length crates/wire/src/a.rs: one table\n")
            ]),
            0
        );
    }

    #[test]
    fn a_function_over_the_limit_is_noted_at_its_line() {
        let body =
            |lines: usize| format!("//! x\npub fn f(a: [u8; 3]) {{\n{}}}\n", "    g();\n".repeat(lines - 2));
        let notes = |text: &str| long_functions(&test_tree(&[("crates/wire/src/a.rs", text)]));
        assert!(notes(&body(70)).is_empty());
        assert_eq!(
            notes(&body(71)),
            [Finding::new("crates/wire/src/a.rs", 2, "a function of 71 lines, more than 70")]
        );
        assert!(notes(&format!("trait T {{\n    fn f();\n{}}}\n", "\n".repeat(100))).is_empty());
    }
}
