//! `octokv check`: verifies everything on a device, or lists what is left of a volume that cannot be recovered.
//! Nothing is written.

use crate::cli::CheckArgs;
use crate::exit_status::CliResult;
use crate::progress::ProgressReporter;
use crate::size::Size;
use anyhow::anyhow;
use octokv_engine::common::superblock::SuperblockError;
use octokv_engine::{Finding, FindingKind, OpenError, SalvageReport, VerifyObserver, VerifyReport};
use std::io::Write;
use std::path::PathBuf;

/// Findings that are held back until a record is found, on a device without a superblock.
const HELD_BACK_MAX: usize = 4096;

/// Runs `octokv check`.
///
/// # Errors
/// The device does not open, its volume cannot be recovered, or a record is damaged.
pub fn run(check: &CheckArgs) -> CliResult {
    let device = path_names(&check.device);
    let mut output = CheckOutput::new(&device);
    let verified = octokv_node::verify_devices(&check.device, &mut output);
    let report = match verified.map_err(|error| anyhow!("{error}"))? {
        Ok(report) => report,
        Err(failure) => {
            let records = failure.remains.map_or(0, |remains| remains.records);
            if let Some(remains) = &failure.remains {
                output.print_remains(remains);
            }
            output.written?;
            return Err(match records {
                0 => anyhow!("device {device}: {failure}"),
                1 => anyhow!("device {device}: {failure}; 1 intact record is left"),
                count => anyhow!("device {device}: {failure}; {count} intact records are left"),
            }
            .into());
        }
    };
    drop(output);
    print_report(&device, &report)?;
    match report.problems.len() {
        0 => Ok(()),
        1 => Err(anyhow!("device {device}: 1 problem").into()),
        count => Err(anyhow!("device {device}: {count} problems").into()),
    }
}

/// The paths of devices, in one line.
pub fn path_names(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// Prints progress on standard error and the findings of a scan on standard output.
struct CheckOutput<'a> {
    device: &'a str,
    reporter: ProgressReporter,
    /// Until a record is found, if there is no sign that the device ever was a volume.
    held_back: Option<Vec<String>>,
    written: std::io::Result<()>,
}

impl CheckOutput<'_> {
    fn new(device: &str) -> CheckOutput<'_> {
        CheckOutput { device, reporter: ProgressReporter::new("check"), held_back: None, written: Ok(()) }
    }

    fn print(&mut self, lines: &[String]) {
        let write = || {
            let mut out = std::io::stdout().lock();
            lines.iter().try_for_each(|line| writeln!(out, "{line}"))?;
            out.flush()
        };
        if self.written.is_ok() {
            self.written = self.reporter.suspend(write);
        }
    }

    fn print_remains(&mut self, remains: &SalvageReport) {
        if self.held_back.is_some() {
            return; // No record and no superblock: there is nothing to list.
        }
        let SalvageReport { superblocks, checkpoint_images, journal_batches, records, .. } = remains;
        let mut lines = vec![
            format!("superblocks        {superblocks} intact of 4"),
            format!("checkpoint images  {checkpoint_images} intact"),
            format!("journal batches    {journal_batches} intact"),
            format!("records            {records} intact, {} of values", Size(remains.value_bytes)),
            format!("damaged            {} structures and records", remains.damaged),
            format!("unreadable         {} blocks", remains.unreadable_blocks),
            format!("unrecognized       {} blocks", remains.unrecognized_blocks),
        ];
        if *records > 0 {
            lines.push(
                "Of several records of a key the one with the highest sequence is the newest; a key that is listed \
                 may have been deleted."
                    .to_owned(),
            );
        }
        self.print(&lines);
    }
}

impl VerifyObserver for CheckOutput<'_> {
    fn keys_verified(&mut self, done: u64, keys: u64) {
        self.reporter.update(done as f64 / keys.max(1) as f64, &format!("{done} of {keys} keys"));
    }

    fn scan_started(&mut self, reason: &OpenError) {
        let is_volume =
            !matches!(reason, OpenError::Superblock(SuperblockError::Blank | SuperblockError::Foreign));
        let lines = vec![
            format!("device    {}", self.device),
            format!("recovery  failed: {reason}"),
            "found:".to_owned(),
        ];
        match is_volume {
            true => self.print(&lines),
            false => self.held_back = Some(lines),
        }
    }

    fn blocks_scanned(&mut self, done: u64, blocks: u64) {
        self.reporter.update(done as f64 / blocks.max(1) as f64, &format!("{done} of {blocks} blocks"));
    }

    fn found(&mut self, finding: &Finding) {
        let is_record = matches!(finding.kind, FindingKind::Record { .. });
        match &mut self.held_back {
            Some(lines) if !is_record && lines.len() < HELD_BACK_MAX => lines.push(finding.to_string()),
            held_back => {
                let mut lines = held_back.take().unwrap_or_default();
                lines.push(finding.to_string());
                self.print(&lines);
            }
        }
    }
}

fn print_report(device: &str, report: &VerifyReport) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    let shutdown = match report.is_clean_shutdown {
        true => "cleanly",
        false => "not cleanly: recovery runs at the next start, and ran for this check",
    };
    writeln!(out, "device    {device}")?;
    writeln!(out, "shutdown  {shutdown}")?;
    writeln!(out, "keys      {}", report.keys)?;
    writeln!(out, "values    {} ({} bytes)", Size(report.value_bytes), report.value_bytes)?;
    writeln!(out, "space     {} of {} used", Size(report.used_bytes), Size(report.capacity_bytes))?;
    if report.dropped_entries > 0 {
        writeln!(out, "incomplete writes before the crash, never acknowledged: {}", report.dropped_entries)?;
    }
    if report.damaged_copies > 0 {
        writeln!(out, "damaged metadata copies, repaired at the next start: {}", report.damaged_copies)?;
    }
    writeln!(out, "problems  {}", report.problems.len())?;
    for problem in &report.problems {
        writeln!(out, "problem: {problem}")?;
    }
    out.flush()
}
