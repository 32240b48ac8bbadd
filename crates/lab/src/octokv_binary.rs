//! The path of the `octokv` binary, node and load generator of native runs: the running program itself.

use anyhow::{Context, Result};
use std::path::PathBuf;

/// The path of the running program.
///
/// # Errors
/// If the kernel does not return it.
pub fn octokv_binary() -> Result<PathBuf> {
    std::env::current_exe().context("this program's own file")
}
