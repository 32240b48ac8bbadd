//! Puts the checks together: reads the tree once, runs every check on it, prints what was found; then, unless told
//! otherwise, runs rustfmt and clippy.
//! In: the workspace's files and `cargo metadata`. Out: findings, sorted by place.
//! Invariant: a check reads only its argument, a [`SourceTree`] or the packages; only this file and `tree` touch the disk
//! or start a process.
//! Tests: beside each check, violations in small trees that it must find.
//!
//! # Layout
//! - [`tree`]: the files of the repository in memory, and findings.
//! - [`lexer`]: Rust source with comments and literals blanked, so that words mean code.
//! - [`crate_deps`]: which crate may depend on which.
//! - [`headers`]: every file says what it is; every crate root names its modules.
//! - [`forbidden_apis`]: `unsafe` and banned calls stay where they belong.
//! - [`sizes`]: long files and long functions.
//! - [`unfinished`]: marks of unfinished work, and places outside the repository.
//! - [`documents`]: the pages that must exist, and links that must resolve.
//! - [`syntax`]: the sources of the crates as syntax trees.
//! - [`error_docs`]: `# Errors` on every public function that returns a `Result`.
//! - [`type_names`]: no type name twice in a crate.
//! - [`module_cycles`]: no circles between the files of a crate.
//! - [`test_files`]: every file of `tests/` belongs to a test binary.
//! - [`prose`]: phrases that comments and documents avoid.
//! - [`commits`]: subjects and bodies of new commits.
//! - [`exceptions`]: what `xtask/tidy-exceptions.txt` lets pass, each with a reason.

mod commits;
mod crate_deps;
mod documents;
mod error_docs;
mod exceptions;
mod forbidden_apis;
mod headers;
mod lexer;
mod module_cycles;
mod prose;
mod sizes;
mod syntax;
mod test_files;
mod tree;
mod type_names;
mod unfinished;

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use exceptions::Exceptions;
use tree::{Finding, SourceTree};

/// Runs every check from the workspace's root; `true` when nothing is wrong.
///
/// # Errors
/// If the tree cannot be read, or cargo cannot be started.
pub fn run(with_cargo: bool) -> Result<bool> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask has no parent directory")?;
    let tree = SourceTree::read(root)?;
    let metadata = cargo_metadata(root)?;

    let mut findings = check_tree(&tree);
    findings.extend(crate_deps::check(&crate_deps::workspace_packages(&metadata)?));
    findings.extend(commits::check(&commits::read(root)));
    findings.sort();
    for finding in &findings {
        println!("{finding}");
    }
    for note in sizes::long_functions(&tree) {
        println!("{note} (a note, not an error)");
    }

    let mut failed_commands = 0;
    if with_cargo {
        let clippy = ["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"];
        for arguments in [&["fmt", "--all", "--check"][..], &clippy] {
            let status = Command::new(env!("CARGO")).args(arguments).current_dir(root).status()?;
            if !status.success() {
                println!("cargo {}: {status}", arguments.join(" "));
                failed_commands += 1;
            }
        }
    }
    println!(
        "tidy: {} files, {} findings, {failed_commands} failed cargo commands",
        tree.files.len(),
        findings.len()
    );
    Ok(findings.is_empty() && failed_commands == 0)
}

/// Every check that needs only the files.
fn check_tree(tree: &SourceTree) -> Vec<Finding> {
    let mut findings = Vec::new();
    let exceptions = Exceptions::read(tree, &mut findings);
    findings.extend(headers::check(tree));
    findings.extend(forbidden_apis::check(tree, &exceptions));
    findings.extend(sizes::long_files(tree, &exceptions));
    findings.extend(unfinished::check(tree));
    findings.extend(documents::check(tree));
    findings.extend(prose::check(tree));
    findings.extend(test_files::check(tree));
    let sources = syntax::parse(tree, &mut findings);
    findings.extend(error_docs::check(&sources));
    findings.extend(type_names::check(&sources));
    findings.extend(module_cycles::check(&sources));
    findings.extend(exceptions.unused());
    findings
}

/// The workspace's own packages as cargo sees them.
fn cargo_metadata(root: &Path) -> Result<serde_json::Value> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps"])
        .current_dir(root)
        .output()
        .context("running cargo metadata")?;
    anyhow::ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).context("reading cargo metadata")
}
