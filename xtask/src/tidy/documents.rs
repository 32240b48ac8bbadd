//! The pages that must exist, links that must lead somewhere, and the list of decisions.
//! In: the tree. Out: findings. A link to another site is not followed.

use super::tree::{Finding, SourceFile, SourceTree};

/// Pages that other pages, code and users rely on.
const REQUIRED_PAGES: &[&str] = &[
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "SECURITY.md",
    "docs/README.md",
    "docs/USAGE.md",
    "docs/GLOSSARY.md",
    "docs/COMPATIBILITY.md",
    "docs/ARCHITECTURE.md",
    "docs/FORMATS.md",
    "docs/PROTOCOL.md",
    "docs/TESTING.md",
    "docs/BENCHMARKS.md",
    "docs/REPRODUCTION.md",
    "docs/ADMINISTRATION.md",
    "docs/decisions/README.md",
];

/// Checks pages, links and the list of decisions.
pub fn check(tree: &SourceTree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for page in REQUIRED_PAGES.iter().filter(|page| tree.file(page).is_none()) {
        findings.push(Finding::new(page, 0, "the page is missing"));
    }
    for file in &tree.files {
        if file.path.ends_with(".md") {
            check_links(tree, file, &mut findings);
        }
        check_mentions(tree, file, &mut findings);
    }
    let decisions = tree.file("docs/decisions/README.md").map_or("", |file| &file.text);
    for file in &tree.files {
        if let Some(name) = file.path.strip_prefix("docs/decisions/")
            && name != "README.md"
            && !decisions.contains(&format!("({name})"))
        {
            findings.push(Finding::new(&file.path, 0, "docs/decisions/README.md does not link to this page"));
        }
    }
    findings
}

/// Every `](target)` outside of fenced code leads to a file or directory, and its `#anchor` to a heading.
fn check_links(tree: &SourceTree, file: &SourceFile, findings: &mut Vec<Finding>) {
    for (number, line) in prose_lines(&file.text) {
        for target in line.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            let path = if path.is_empty() { file.path.clone() } else { resolve(&file.path, path) };
            if REQUIRED_PAGES.contains(&path.as_str()) && !tree.exists(&path) {
                continue; // Found once, as a missing page.
            }
            if !tree.exists(&path) {
                findings.push(Finding::new(
                    &file.path,
                    number,
                    format!("the link to {target} leads nowhere"),
                ));
            } else if !anchor.is_empty()
                && !tree.file(&path).is_some_and(|page| has_heading(&page.text, anchor))
            {
                findings.push(Finding::new(&file.path, number, format!("{path} has no heading #{anchor}")));
            }
        }
    }
}

/// Every page under docs/ that any text names is there (the required ones are looked for once).
fn check_mentions(tree: &SourceTree, file: &SourceFile, findings: &mut Vec<Finding>) {
    // This directory's tests name pages of test trees.
    if file.path.starts_with("xtask/src/tidy/") {
        return;
    }
    for (index, line) in file.text.lines().enumerate() {
        for (at, _) in line.match_indices("docs/") {
            let inside = line[..at].ends_with(|c: char| c.is_alphanumeric() || "/.-_".contains(c));
            let named = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
            let path: String = line[at..].chars().take_while(|&c| named(c)).collect();
            let path = path.trim_end_matches('.');
            if !inside && path.ends_with(".md") && !REQUIRED_PAGES.contains(&path) && !tree.exists(path) {
                findings.push(Finding::new(&file.path, index + 1, format!("{path} does not exist")));
            }
        }
    }
}

/// The lines (from 1) outside of fenced code.
fn prose_lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    text.lines().enumerate().filter_map(move |(index, line)| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        (!fenced && !fence).then_some((index + 1, line))
    })
}

/// A relative path as seen from the file's directory.
fn resolve(from: &str, path: &str) -> String {
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => _ = parts.pop(),
            _ => parts.push(part),
        }
    }
    parts.join("/")
}

/// Whether a heading of the page has this anchor: lower case, blanks as `-`, punctuation left out.
fn has_heading(text: &str, anchor: &str) -> bool {
    let slug = |heading: &str| -> String {
        let kept = heading.trim().chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
    };
    prose_lines(text)
        .filter(|(_, line)| line.starts_with('#'))
        .any(|(_, line)| slug(line.trim_start_matches('#')) == anchor)
}

#[cfg(test)]
mod tests {
    use super::super::tree::test_tree;
    use super::*;

    /// All required pages, then the given ones in their place or beside them.
    fn messages(files: &[(&str, &str)]) -> Vec<String> {
        let pages = REQUIRED_PAGES.iter().filter(|page| !files.iter().any(|(path, _)| path == *page));
        let all: Vec<(&str, &str)> = pages.map(|page| (*page, "")).chain(files.iter().copied()).collect();
        check(&test_tree(&all)).into_iter().map(|finding| finding.message).collect()
    }

    #[test]
    fn a_missing_page_is_found() {
        assert!(messages(&[]).is_empty());
        assert_eq!(check(&test_tree(&[])).len(), REQUIRED_PAGES.len());
    }

    #[test]
    fn links_lead_to_files_and_headings() {
        let table: &[(&str, &[&str])] = &[
            ("[a](docs/TESTING.md) and [b](docs)", &[]),
            ("[a](docs/GONE.md)", &["the link to docs/GONE.md leads nowhere", "docs/GONE.md does not exist"]),
            ("[a](https://example.org/x)", &[]),
            ("## What is promised?\n[a](#what-is-promised)", &[]),
            ("[a](#nothing)", &["README.md has no heading #nothing"]),
            ("```\n[a](gone.md)\n```", &[]),
        ];
        for (text, wanted) in table {
            assert_eq!(messages(&[("README.md", text)]), *wanted, "{text}");
        }
        assert!(messages(&[("docs/TESTING.md", "[a](../README.md)")]).is_empty());
    }

    #[test]
    fn a_page_named_in_code_exists() {
        let named = |page: &str| messages(&[("crates/wire/src/a.rs", &format!("//! Drawn in {page}.\n"))]);
        assert!(named("docs/FORMATS.md").is_empty());
        assert_eq!(named("docs/GONE.md"), ["docs/GONE.md does not exist"]);
    }

    #[test]
    fn every_decision_is_listed() {
        let page = ("docs/decisions/0001-x.md", "# X");
        assert_eq!(messages(&[page]), ["docs/decisions/README.md does not link to this page"]);
        assert!(messages(&[page, ("docs/decisions/README.md", "[x](0001-x.md)")]).is_empty());
    }
}
