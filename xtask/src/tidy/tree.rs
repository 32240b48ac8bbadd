//! The repository's text files in memory, so that every check is a pure function and can be tested on a test tree.
//! In: the working tree without build output and `.git`. Out: [`SourceTree`], and [`Finding`]s about it.
//! Invariant: paths are relative to the root with `/` between their parts, in ascending order.

use std::fmt;
use std::path::Path;

use anyhow::{Context, Result};

use super::lexer;

/// One text file.
pub struct SourceFile {
    /// Relative to the repository's root.
    pub path: String,
    /// As it lies on the disk.
    pub text: String,
    /// For Rust: the text with comments and literals blanked, line by line the same; otherwise empty.
    pub code: String,
}

/// All text files of the repository.
#[derive(Default)]
pub struct SourceTree {
    /// Sorted by path.
    pub files: Vec<SourceFile>,
}

/// Something that breaks a rule, at a line (from 1; 0 for the file as a whole).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// The file.
    pub path: String,
    /// The line in it.
    pub line: usize,
    /// What is wrong and what to do.
    pub message: String,
}

impl Finding {
    /// A finding at one line of a file.
    pub fn new(path: &str, line: usize, message: impl Into<String>) -> Finding {
        Finding { path: path.to_owned(), line, message: message.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}: {}", self.path, self.line, self.message)
    }
}

impl SourceFile {
    /// A file with its code prepared.
    pub fn new(path: &str, text: &str) -> SourceFile {
        let code = if path.ends_with(".rs") { lexer::code_only(text) } else { String::new() };
        SourceFile { path: path.to_owned(), text: text.to_owned(), code }
    }

    /// Whether this is Rust source.
    pub fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// Whether the whole file is test code: in a directory for tests, benches, examples or fuzz targets, or a
    /// module file named for tests.
    pub fn is_test_code(&self) -> bool {
        let mut parts: Vec<&str> = self.path.split('/').collect();
        let name = parts.pop().unwrap_or_default();
        parts.iter().any(|part| matches!(*part, "tests" | "benches" | "examples" | "fuzz"))
            || name == "tests.rs"
            || name.ends_with("_tests.rs")
    }

    /// The crate (`base`, `sys`, …) or top directory (`xtask`, `fuzz`) that the file lies in.
    pub fn crate_name(&self) -> &str {
        let mut parts = self.path.split('/');
        match parts.next() {
            Some("crates") => parts.next().unwrap_or_default(),
            Some(top) => top,
            None => "",
        }
    }
}

impl SourceTree {
    /// Reads every text file below `root`.
    ///
    /// # Errors
    /// If a file cannot be listed or read.
    pub fn read(root: &Path) -> Result<SourceTree> {
        let mut files = Vec::new();
        let entries = walkdir::WalkDir::new(root).sort_by_file_name().into_iter();
        for entry in entries.filter_entry(|entry| !is_ignored(entry)) {
            let entry = entry.context("listing the repository")?;
            if !entry.file_type().is_file() {
                continue;
            }
            let relative = entry.path().strip_prefix(root)?.to_string_lossy().replace('\\', "/");
            // What is not UTF-8 is data (a fixture, a fuzz corpus), not text; it still has to be there for links.
            let text = String::from_utf8(std::fs::read(entry.path())?).unwrap_or_default();
            files.push(SourceFile::new(&relative, &text));
        }
        Ok(SourceTree { files })
    }

    /// The Rust sources.
    pub fn rust_files(&self) -> impl Iterator<Item = &SourceFile> {
        self.files.iter().filter(|file| file.is_rust())
    }

    /// The file at this path.
    pub fn file(&self, path: &str) -> Option<&SourceFile> {
        self.files.iter().find(|file| file.path == path)
    }

    /// Whether the path names a file or a directory.
    pub fn exists(&self, path: &str) -> bool {
        let directory = format!("{}/", path.trim_end_matches('/'));
        path.is_empty()
            || self.files.iter().any(|file| file.path == path || file.path.starts_with(&directory))
    }
}

/// Build output (named `target`, or marked by cargo with a tag) and git's own files are not the repository's text.
fn is_ignored(entry: &walkdir::DirEntry) -> bool {
    let name = entry.file_name();
    let is_output = name == "target" || entry.path().join("CACHEDIR.TAG").exists();
    name == ".git" || (entry.file_type().is_dir() && is_output)
}

/// A tree made of these files, for the tests of the checks.
#[cfg(test)]
pub fn test_tree(files: &[(&str, &str)]) -> SourceTree {
    SourceTree { files: files.iter().map(|(path, text)| SourceFile::new(path, text)).collect() }
}
