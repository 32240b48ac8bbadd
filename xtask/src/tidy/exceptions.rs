//! What `xtask/tidy-exceptions.txt` lets pass: one line each, `RULE PATH: REASON`.
//! In: that file. Out: an answer per rule and file, and findings for lines that are malformed or no longer needed.
//! Rules: `length` (a file over the limit), `calls` (banned calls in a crate).

use std::cell::Cell;

use super::tree::{Finding, SourceTree};

const EXCEPTIONS_PATH: &str = "xtask/tidy-exceptions.txt";
const RULES: &[&str] = &["length", "calls"];

struct Exception {
    line: usize,
    rule: String,
    path: String,
    used: Cell<bool>,
}

/// The list, which remembers what was needed.
#[derive(Default)]
pub struct Exceptions {
    list: Vec<Exception>,
}

impl Exceptions {
    /// Reads the list; a line without a known rule, a path or a reason is a finding.
    pub fn read(tree: &SourceTree, findings: &mut Vec<Finding>) -> Exceptions {
        let mut list = Vec::new();
        let text = tree.file(EXCEPTIONS_PATH).map_or("", |file| &file.text);
        for (index, line) in text.lines().enumerate() {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let parsed =
                line.split_once(": ").and_then(|(what, reason)| Some((what.split_once(' ')?, reason.trim())));
            match parsed {
                Some(((rule, path), reason)) if RULES.contains(&rule) && !reason.is_empty() => {
                    let (rule, path) = (rule.to_owned(), path.to_owned());
                    list.push(Exception { line: index + 1, rule, path, used: Cell::new(false) });
                }
                _ => findings.push(Finding::new(
                    EXCEPTIONS_PATH,
                    index + 1,
                    "not of the form `RULE PATH: REASON`",
                )),
            }
        }
        Exceptions { list }
    }

    /// Whether the rule may be broken by this file; called only when it is broken.
    pub fn allows(&self, rule: &str, path: &str) -> bool {
        let found = self.list.iter().find(|exception| exception.rule == rule && exception.path == path);
        found.inspect(|exception| exception.used.set(true)).is_some()
    }

    /// Exceptions that nothing needed: they would hide the next violation.
    pub fn unused(&self) -> Vec<Finding> {
        let unused = self.list.iter().filter(|exception| !exception.used.get());
        unused
            .map(|exception| {
                Finding::new(
                    EXCEPTIONS_PATH,
                    exception.line,
                    format!("{} no longer needs this", exception.path),
                )
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tree::test_tree;
    use super::*;

    #[test]
    fn a_malformed_line_is_found() {
        for line in ["length a.rs", "length a.rs: ", "beauty a.rs: reason", "a.rs: reason"] {
            let mut findings = Vec::new();
            Exceptions::read(&test_tree(&[(EXCEPTIONS_PATH, line)]), &mut findings);
            assert_eq!(findings.len(), 1, "{line}");
        }
    }

    #[test]
    fn an_exception_that_nothing_needs_is_found() {
        let tree = test_tree(&[(EXCEPTIONS_PATH, "# Why.\n\nlength a.rs: one table\n")]);
        let exceptions = Exceptions::read(&tree, &mut Vec::new());
        assert_eq!(exceptions.unused().len(), 1);
        assert!(exceptions.allows("length", "a.rs"));
        assert!(!exceptions.allows("calls", "a.rs"));
        assert!(exceptions.unused().is_empty());
    }
}
