//! Every file of a crate's `tests/` belongs to a test binary: `Cargo.toml` names it, or one that it names declares the file as a module.
//! In: the tree. Out: findings at line 1 of a file whose tests would never run.

use super::tree::{Finding, SourceTree};

/// Checks the crates that list their test binaries themselves (`autotests = false`).
pub fn check(tree: &SourceTree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.rust_files() {
        let Some((package, name)) = file.path.strip_suffix(".rs").and_then(|path| path.split_once("/tests/"))
        else {
            continue;
        };
        let text_of = |path: String| tree.file(&path).map_or("", |found| found.text.as_str());
        let manifest = text_of(format!("{package}/Cargo.toml"));
        if name.contains('/') || !manifest.contains("autotests = false") {
            continue;
        }
        let is_included = binary_names(manifest).any(|binary| {
            let text = text_of(format!("{package}/tests/{binary}.rs"));
            binary == name || text.lines().any(|line| line == format!("mod {name};"))
        });
        if !is_included {
            findings.push(Finding::new(
                &file.path,
                1,
                "no test binary includes this file: its tests never run",
            ));
        }
    }
    findings
}

/// The test binaries that a manifest names.
fn binary_names(manifest: &str) -> impl Iterator<Item = &str> {
    let names = manifest.split("[[test]]\nname = \"").skip(1);
    names.filter_map(|rest| rest.split_once('"').map(|(name, _)| name))
}

#[cfg(test)]
mod tests {
    use super::super::tree::test_tree;
    use super::*;

    #[test]
    fn a_test_file_that_no_binary_includes_is_found() {
        let manifest = "autotests = false\n\n[[test]]\nname = \"suite\"\n\n[[test]]\nname = \"loom\"\n";
        let findings = check(&test_tree(&[
            ("crates/wire/Cargo.toml", manifest),
            ("crates/wire/tests/suite.rs", "//! Tests.\n\nmod corpus;\n"),
            ("crates/wire/tests/corpus.rs", "//! A module.\n"),
            ("crates/wire/tests/loom.rs", "//! A binary.\n\nmod models;\n"),
            ("crates/wire/tests/models.rs", "//! A module of it.\n"),
            ("crates/wire/tests/common/mod.rs", "//! Shared.\n"),
            ("crates/wire/tests/forgotten.rs", "//! Neither.\n"),
            ("crates/base/Cargo.toml", "[package]\n"),
            ("crates/base/tests/found_by_cargo.rs", "//! A binary.\n"),
        ]));
        let paths: Vec<&str> = findings.iter().map(|finding| finding.path.as_str()).collect();
        assert_eq!(paths, ["crates/wire/tests/forgotten.rs"]);
    }
}
