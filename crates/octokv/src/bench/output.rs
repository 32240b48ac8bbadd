//! Table rows of `octokv bench` on standard output.

use crate::exit_status::CliResult;
use octokv_bench::workload_result::{WorkloadResult, table_row, target_row};
use std::io::Write;

/// Prints the table rows of one workload.
///
/// # Errors
/// If standard output cannot be written.
pub fn print_result(result: &WorkloadResult) -> CliResult {
    let mut out = std::io::stdout();
    writeln!(out, "{}", table_row(result))?;
    for target in &result.targets {
        writeln!(out, "{}", target_row(target))?;
    }
    Ok(())
}
