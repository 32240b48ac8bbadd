//! Everything on a device, read and verified; nothing is changed.

use crate::cli::CheckArgs;
use crate::exit_status::CliResult;
use crate::progress::ProgressReporter;
use crate::size::Size;
use anyhow::anyhow;
use octokv_engine::hash::VerifyReport;
use std::io::Write;
use std::path::Path;

/// Runs `octokv check`.
pub fn run(check: &CheckArgs) -> CliResult {
    let mut reporter = ProgressReporter::new("check");
    let report = octokv_node::verify_device(&check.device, |done, keys| {
        reporter.update(done as f64 / keys.max(1) as f64, &format!("{done} of {keys} keys"));
    });
    drop(reporter);
    let report = report.map_err(|error| anyhow!("{error}"))?;
    print_report(&check.device, &report)?;
    match report.problems.len() {
        0 => Ok(()),
        1 => Err(anyhow!("device {}: 1 problem", check.device.display()).into()),
        count => Err(anyhow!("device {}: {count} problems", check.device.display()).into()),
    }
}

fn print_report(device: &Path, report: &VerifyReport) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    let closed = match report.is_clean_shutdown {
        true => "in order",
        false => "not in order: the next start recovers, and so did this check",
    };
    writeln!(out, "device    {}", device.display())?;
    writeln!(out, "closed    {closed}")?;
    writeln!(out, "keys      {}", report.keys)?;
    writeln!(out, "values    {} ({} bytes)", Size(report.value_bytes), report.value_bytes)?;
    writeln!(out, "space     {} of {} used", Size(report.used_bytes), Size(report.capacity_bytes))?;
    if report.dropped_entries > 0 {
        writeln!(
            out,
            "unfinished writes of the last moment, never acknowledged: {}",
            report.dropped_entries
        )?;
    }
    if report.damaged_copies > 0 {
        writeln!(out, "damaged copies of metadata, mended at the next start: {}", report.damaged_copies)?;
    }
    writeln!(out, "problems  {}", report.problems.len())?;
    for problem in &report.problems {
        writeln!(out, "problem: {problem}")?;
    }
    out.flush()
}
