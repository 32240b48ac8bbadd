//! The JSON report: command, machine, settings and results.

use crate::error::LabResult;
use anyhow::Context;
use octokv_bench::machine_info::MachineInfo;
use serde::Serialize;
use std::io::Write as _;
use std::path::Path;

/// The value of [`ReproductionReport::schema`].
const REPRODUCTION_SCHEMA: &str = "octokv-reproduce/2";

/// The report.
#[derive(Serialize)]
struct ReproductionReport<'a, S, R> {
    /// Name and version of the format.
    schema: &'static str,
    /// The command line of the run.
    command: String,
    machine: MachineInfo,
    settings: &'a S,
    /// The results, an object each.
    results: &'a [R],
}

/// Writes the report to a file; "-" is standard output.
///
/// # Errors
/// If the file cannot be written.
pub fn write_report<S: Serialize, R: Serialize>(file: &Path, settings: &S, results: &[R]) -> LabResult {
    let words: Vec<String> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    let document = ReproductionReport {
        schema: REPRODUCTION_SCHEMA,
        command: words.join(" "),
        machine: MachineInfo::of_this_machine(),
        settings,
        results,
    };
    let mut text = serde_json::to_string_pretty(&document).context("the document")?;
    text.push('\n');
    if file == Path::new("-") {
        return Ok(std::io::stdout().write_all(text.as_bytes())?);
    }
    Ok(std::fs::write(file, text).with_context(|| format!("document {}", file.display()))?)
}
