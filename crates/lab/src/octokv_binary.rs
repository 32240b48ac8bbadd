//! The path of the `octokv` binary, which serves and loads in the real runs: the running program itself.

use anyhow::{Context, Result};
use std::path::PathBuf;

/// The path of the running program.
///
/// # Errors
/// If the kernel does not give it.
pub fn octokv_binary() -> Result<PathBuf> {
    std::env::current_exe().context("this program's own file")
}
