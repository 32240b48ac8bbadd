//! Every Rust file opens with a header; every crate root has a `# Layout` that names its modules.
//! In: the tree. Out: findings at line 1 or at the module's line.

use super::tree::{Finding, SourceFile, SourceTree};

/// Checks headers and layouts.
pub fn check(tree: &SourceTree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.rust_files() {
        if !file.text.starts_with("//! ") {
            findings.push(Finding::new(&file.path, 1, "the file does not open with a `//!` header"));
        } else if is_crate_root(tree, file) {
            check_layout(file, &mut findings);
        }
    }
    findings
}

/// `lib.rs`, or `main.rs` of a package without one.
fn is_crate_root(tree: &SourceTree, file: &SourceFile) -> bool {
    match file.path.strip_suffix("src/main.rs") {
        Some(package) => tree.file(&format!("{package}src/lib.rs")).is_none(),
        None => file.path.ends_with("src/lib.rs"),
    }
}

fn check_layout(file: &SourceFile, findings: &mut Vec<Finding>) {
    let header: String =
        file.text.lines().take_while(|line| line.starts_with("//!")).collect::<Vec<_>>().join("\n");
    let modules: Vec<(usize, &str)> = file
        .code
        .lines()
        .enumerate()
        .filter_map(|(index, line)| Some((index + 1, declared_module(line)?)))
        .collect();
    let has_layout = header.contains("# Layout");
    if !has_layout && !modules.is_empty() {
        findings.push(Finding::new(&file.path, 1, "the crate's root has no `# Layout`"));
    }
    for (line, module) in modules {
        let named = ["", "mod@"].map(|kind| format!("`{kind}{module}`"));
        let named = [named[0].clone(), named[1].clone(), format!("`{module}.rs`"), format!("`{module}/`")];
        if has_layout && !named.iter().any(|name| header.contains(name)) {
            findings.push(Finding::new(
                &file.path,
                line,
                format!("the layout does not name the module `{module}`"),
            ));
        }
    }
}

/// The name in `mod name;`, whatever its visibility.
fn declared_module(line: &str) -> Option<&str> {
    let (before, name) = line.trim().strip_suffix(';')?.rsplit_once("mod ")?;
    let visibility = before.trim();
    let is_module = visibility.is_empty() || visibility.starts_with("pub");
    (is_module && name.chars().all(|c| c.is_alphanumeric() || c == '_') && name != "tests").then_some(name)
}

#[cfg(test)]
mod tests {
    use super::super::tree::test_tree;
    use super::*;

    fn messages(files: &[(&str, &str)]) -> Vec<String> {
        check(&test_tree(files)).into_iter().map(|finding| finding.message).collect()
    }

    #[test]
    fn a_file_without_a_header_is_found() {
        assert_eq!(
            messages(&[("crates/wire/src/pdu.rs", "use std::fmt;\n")]),
            ["the file does not open with a `//!` header"]
        );
        assert!(messages(&[("crates/wire/src/pdu.rs", "//! PDUs.\n")]).is_empty());
    }

    #[test]
    fn a_layout_names_every_module() {
        let root = "crates/wire/src/lib.rs";
        let good = "//! Bytes and types.\n//!\n//! # Layout\n//! - [`pdu`]: PDUs.\npub mod pdu;\n#[cfg(test)]\nmod tests;\n";
        assert!(messages(&[(root, good)]).is_empty());
        assert_eq!(
            messages(&[(root, &format!("{good}mod kv;\n"))]),
            ["the layout does not name the module `kv`"]
        );
        assert_eq!(
            messages(&[(root, "//! Bytes.\npub(crate) mod pdu;\n")]),
            ["the crate's root has no `# Layout`"]
        );
    }

    #[test]
    fn a_binary_beside_a_library_needs_no_layout() {
        let main = ("crates/octokv/src/main.rs", "//! The command line.\nmod serve;\n");
        assert_eq!(messages(&[main]), ["the crate's root has no `# Layout`"]);
        assert!(messages(&[("crates/octokv/src/lib.rs", "//! All of it.\n"), main]).is_empty());
    }
}
