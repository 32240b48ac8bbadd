//! Comments and documents avoid the phrases that make an engineer read a sentence twice.
//! In: the tree. Out: findings. The list holds pronouns in place of components and personification; it is no grammar.

use super::lexer::has_word;
use super::tree::{Finding, SourceTree};

/// Phrases in lower case. Each has a component or a standard term to take its place.
const PHRASES: &[&str] = &[
    "nobody",
    "whoever",
    "those who",
    "who asks",
    "who waits",
    "who comes",
    "what comes",
    "what goes",
    "what knows",
    "is told",
    "are told",
    "vouch",
    "vouches",
    "mended",
    "mends",
];

/// Checks comments of Rust files and lines of documents.
pub fn check(tree: &SourceTree) -> Vec<Finding> {
    let mut findings = Vec::new();
    // This directory's sources hold the phrases themselves.
    for file in tree.files.iter().filter(|file| !file.path.starts_with("xtask/src/tidy/")) {
        let is_document = file.path.ends_with(".md");
        if !is_document && !file.is_rust() {
            continue;
        }
        for (index, line) in file.text.lines().enumerate() {
            let prose = if is_document { line } else { comment_of(line) }.to_lowercase();
            for phrase in PHRASES.iter().filter(|phrase| has_word(&prose, phrase)) {
                let message = format!("\"{phrase}\": name the component or the standard term");
                findings.push(Finding::new(&file.path, index + 1, message));
            }
        }
    }
    findings
}

/// The comment that the line ends with; a URL in a string counts as one, which does no harm.
fn comment_of(line: &str) -> &str {
    line.find("//").map_or("", |at| &line[at..])
}

#[cfg(test)]
mod tests {
    use super::super::tree::test_tree;
    use super::*;

    fn count(path: &str, text: &str) -> usize {
        check(&test_tree(&[(path, text)])).len()
    }

    #[test]
    fn comments_and_documents_are_checked_and_code_is_not() {
        assert_eq!(count("crates/wire/src/a.rs", "//! Whoever connects is told.\n"), 2);
        assert_eq!(count("crates/wire/src/a.rs", "let nobody = 1; // the core that waits\n"), 0);
        assert_eq!(count("docs/A.md", "Those who wait.\n"), 1);
        assert_eq!(count("docs/A.md", "The leader flushes the batch.\n"), 0);
        assert_eq!(count("scripts/a", "# nobody\n"), 0);
    }
}
