//! The repository's own tool: `cargo xtask tidy` checks that the sources keep the repository lints.
//! In: the working tree and `cargo metadata`. Out: one line per finding on standard output.
//! Exit code: 0 when nothing is wrong, 1 when something is, 2 on wrong usage.
//!
//! # Layout
//! - [`tidy`]: the checks, each a pure function of the tree, and the run that puts them together.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "a developer's tool: it reads files and runs cargo"
)]

use std::process::ExitCode;

mod tidy;

const USAGE: &str = "\
usage: cargo xtask tidy [--no-cargo]
  tidy        check the working tree against the repository lints (docs/TESTING.md), rustfmt and clippy
  --no-cargo  leave out rustfmt and clippy, which take most of the time";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let with_cargo = match words[..] {
        ["tidy"] => true,
        ["tidy", "--no-cargo"] => false,
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match tidy::run(with_cargo) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
