//! `octokv calibrate`: measures the starting costs of device tokens on a device, prints them and writes the file of `octokv serve --token-costs`.
//!
//! In: a device whose contents may be discarded. Out: a table, and the file. Invariants: nothing is written to a device that existed unless `--format`
//! says so; afterwards it holds no volume, and a file that the command created is removed, also if a measurement fails.

use crate::bench::{PLATFORM, SPIN_BEFORE_SLEEP, local_volume_config};
use crate::calibrate_args::CalibrateArgs;
use crate::choices::DurabilityChoice;
use crate::engine_arg::EngineArg;
use crate::exit_status::{CliError, CliResult};
use crate::progress::ProgressReporter;
use crate::size::Size;
use crate::token_costs::{self, CalibrationReport, KindReport};
use anyhow::{Context, anyhow};
use octokv_base::Nanos;
use octokv_bench::calibration::{
    CALIBRATION_KEY_BYTES, Calibration, CalibrationConfig, CalibrationRound, KindRun, calibrate,
};
use octokv_bench::local_engine::LocalEngine;
use octokv_bench::machine_info::MachineInfo;
use octokv_device::ssd_model::{SsdModel, shared_model};
use octokv_engine::FormatConfig;
use octokv_runtime::Polling;
use octokv_sched::{KindCost, StartingCosts};
use octokv_sys::file::{self, DeviceFile};
use octokv_sys::{output_file, process};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

/// Most keys without `--num`.
const KEYS_MAX: u64 = 200_000;
/// What a value occupies beside its bytes and its key, at most; and the unit in which it does, at most.
const RECORD_HEADER_BYTES: u64 = 48;
const RECORD_UNIT_BYTES: u64 = 4096;
/// Bytes of the longest value, as for `value_bytes_max` of a node.
const VALUE_BYTES_MAX: u64 = 1 << 30;
/// Most operations in flight.
const DEPTH_MAX: usize = 16_384;
const ROUNDS_MAX: usize = 1000;
const SECONDS_MAX: f64 = 3600.0;
/// A device whose throughput grows by more than this with twice the operations in flight was not saturated.
const SATURATED_GAIN_MAX: f64 = 1.1;
/// Seed of keys and values.
const SEED: u64 = 1;

/// Runs `octokv calibrate`.
///
/// # Errors
/// Invalid flags; a device that holds data or cannot be opened; a failed measurement; an output that cannot be written.
pub fn run(args: &CalibrateArgs) -> CliResult {
    check(args)?;
    if let Some(path) = &args.json {
        let failed =
            |error| CliError::Usage(format!("--json {}: cannot be written: {error}", path.display()));
        output_file::prepare_file(path).map_err(failed)?;
    }
    let named = || format!("device {}", args.path.display());
    let device = file::open_device(&args.path, Some(args.size.0), true).with_context(named)?;
    let is_new = device.was_created();
    if !is_new && !args.format {
        return Err(CliError::Failed(anyhow!(
            "{} exists and was left unchanged: a calibration discards what it holds (--format allows that)",
            named()
        )));
    }
    let device_bytes = device.size_bytes();
    let config = calibration_config(args, device_bytes);
    let measured = measure(args, device, &config);
    if is_new {
        std::fs::remove_file(&args.path).with_context(named)?;
    }
    let calibration = measured?;
    let costs = StartingCosts::of_time_ratios(
        config.value_bytes,
        calibration.put_ratio().median,
        calibration.delete_ratio().median,
    );
    let report = report_of(args, &config, device_bytes, &calibration);
    warn_of_doubts(&report);
    match &args.json {
        Some(path) => {
            let text = token_costs::to_text(&costs, &report).context("the document")?;
            let written = output_file::write(path, text.as_bytes());
            written.with_context(|| format!("document {}", path.display()))?;
            if path == Path::new(output_file::STDOUT) { Ok(()) } else { print_table(&costs, &report) }
        }
        None => print_table(&costs, &report),
    }
}

fn check(args: &CalibrateArgs) -> CliResult {
    let usage = |what: &str| Err(CliError::Usage(what.to_owned()));
    if args.value_size.0 > VALUE_BYTES_MAX {
        return usage("--value-size: must be at most 1GiB");
    }
    if args.num == Some(0) {
        return usage("--num: must be at least 1");
    }
    if !(1..=DEPTH_MAX).contains(&args.depth) {
        return usage("--depth: must be from 1 to 16384");
    }
    if !(1..=ROUNDS_MAX).contains(&args.rounds) {
        return usage("--rounds: must be from 1 to 1000");
    }
    if !(0.01..=SECONDS_MAX).contains(&args.seconds) {
        return usage("--seconds: must be from 0.01 to 3600");
    }
    Ok(())
}

fn calibration_config(args: &CalibrateArgs, device_bytes: u64) -> CalibrationConfig {
    let record_bytes = args.value_size.0 + CALIBRATION_KEY_BYTES as u64 + RECORD_HEADER_BYTES;
    let fitting = device_bytes / 2 / record_bytes.next_multiple_of(RECORD_UNIT_BYTES);
    CalibrationConfig {
        value_bytes: args.value_size.0 as usize,
        keys: args.num.unwrap_or(fitting.clamp(1, KEYS_MAX)),
        streams: args.depth,
        span: Nanos((args.seconds * 1e9) as u64),
        rounds: args.rounds,
        cores: match args.cores.as_slice() {
            [] => vec![None],
            cores => cores.iter().copied().map(Some).collect(),
        },
        seed: SEED,
    }
}

/// Formats the device, measures, and leaves it without a volume.
fn measure(
    args: &CalibrateArgs,
    device: DeviceFile,
    config: &CalibrationConfig,
) -> Result<Calibration, CliError> {
    let EngineArg(engine) = args.engine.unwrap_or_default();
    let defaults = FormatConfig::default();
    let format = FormatConfig {
        engine,
        value_bytes_max: defaults.value_bytes_max.max(config.value_bytes as u32),
        seed: process::random_u64().context("random numbers for a format")?,
        ..defaults
    };
    let drive = match args.nand.unwrap_or_default().0 {
        Some(drive) if device.size_bytes() > drive.capacity_bytes => {
            let (have, max) = (device.size_bytes(), drive.capacity_bytes);
            return Err(CliError::Usage(format!(
                "--nand: {have} bytes are more than a {} has: {max} bytes",
                drive.product
            )));
        }
        drive => drive.map(|drive| shared_model(SsdModel::new(*drive, device.block_bytes()))),
    };
    let mut volume = local_volume_config(format, args.durability, config.cores.len(), 0);
    volume.drive = drive;
    let engine = Arc::new(LocalEngine::open(device, volume, true).map_err(|error| anyhow!("{error}"))?);
    let mut reporter = ProgressReporter::new("calibrate");
    let polling = Polling::Adaptive { spin: SPIN_BEFORE_SLEEP };
    let calibration = calibrate(&engine, config, polling, PLATFORM, |part, step| reporter.update(part, step));
    drop(reporter);
    let erased = engine.erase();
    let calibration = calibration.map_err(|error| anyhow!("{error}"))?;
    erased.map_err(|error| anyhow!("{error}"))?;
    Ok(calibration)
}

fn report_of(
    args: &CalibrateArgs,
    config: &CalibrationConfig,
    device_bytes: u64,
    calibration: &Calibration,
) -> CalibrationReport {
    let kind = |of: fn(&CalibrationRound) -> KindRun| {
        let KindRun { operations, seconds } = calibration.total(of);
        let ratio = calibration.spread(|round| of(round).us_per_operation() / round.get.us_per_operation());
        KindReport {
            operations,
            seconds,
            us_per_operation: calibration.spread(|round| of(round).us_per_operation()).median,
            ratio: ratio.median,
            ratio_min: ratio.min,
            ratio_max: ratio.max,
            deeper_gain: calibration.deeper_gain(of),
        }
    };
    CalibrationReport {
        octokv_version: env!("CARGO_PKG_VERSION"),
        machine: MachineInfo::of_this_machine(),
        path: args.path.display().to_string(),
        device_bytes,
        nand: args.nand.unwrap_or_default().0.map(|drive| drive.name),
        engine: args.engine.unwrap_or_default().0.name(),
        durability: match args.durability {
            None | Some(DurabilityChoice::Flush) => "flush",
            Some(DurabilityChoice::Device) => "device",
        },
        value_bytes: config.value_bytes,
        keys: config.keys,
        depth: config.streams,
        cores: config.cores.len(),
        rounds: config.rounds,
        get: kind(|round| round.get),
        put: kind(|round| round.put),
        delete: kind(|round| round.delete),
        unsettled: calibration.unsettled,
    }
}

/// Says on standard error what makes the costs doubtful.
fn warn_of_doubts(report: &CalibrationReport) {
    for (name, kind) in [("get", &report.get), ("put", &report.put), ("delete", &report.delete)] {
        if kind.deeper_gain > SATURATED_GAIN_MAX {
            eprintln!(
                "calibrate: {name}: {:.2} times the throughput with {} operations in flight instead of {}: the device may not have \
                 been saturated (--depth)",
                kind.deeper_gain,
                report.depth * 2,
                report.depth
            );
        }
    }
    if report.unsettled > 0 {
        eprintln!(
            "calibrate: {} measurements began while the engine still worked in the background, which counts for them",
            report.unsettled
        );
    }
}

fn print_table(costs: &StartingCosts, report: &CalibrationReport) -> CliResult {
    let mut out = std::io::stdout().lock();
    let CalibrationReport { path, engine, durability, value_bytes, keys, depth, cores, rounds, .. } = report;
    writeln!(
        out,
        "device     {path}, {}, engine {engine}, durability {durability}",
        Size(report.device_bytes)
    )?;
    writeln!(
        out,
        "load       {keys} keys, values of {value_bytes} bytes, {depth} operations in flight, cores: {cores}"
    )?;
    writeln!(out, "measured   {rounds} rounds; times and ratios are medians of rounds")?;
    writeln!(
        out,
        "{:<8} {:>12} {:>9} {:>12} {:>10} {:>19} {:>8} {:>15}",
        "kind", "operations", "seconds", "us at satur.", "of a get", "rounds", "tokens", "further 4 KiB"
    )?;
    let KindCost { tokens: unit, .. } = costs.get;
    for (name, kind, cost) in [
        ("get", &report.get, costs.get),
        ("put", &report.put, costs.put),
        ("delete", &report.delete, costs.delete),
    ] {
        let spread = format!("{:.3} to {:.3}", kind.ratio_min, kind.ratio_max);
        writeln!(
            out,
            "{name:<8} {:>12} {:>9.2} {:>12.3} {:>10.3} {spread:>19} {:>8} {:>15}",
            kind.operations, kind.seconds, kind.us_per_operation, kind.ratio, cost.tokens, cost.tokens_per_4k
        )?;
    }
    writeln!(out, "A get of up to 4 KiB is {unit} tokens. A get or put of more is charged by 4 KiB.")?;
    Ok(out.flush()?)
}
