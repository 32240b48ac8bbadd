//! Table 3 and Figures 11, 12 and 13 of LEED, of one drive of the node.
//!
//! In: results of simulated runs. Out: data points with the paper's numbers where its text has any; its throughputs are of four drives, and
//! divided by four here.

use super::limits::{ObjectLengths, commands_per_s, die_reads_per_s, requests_by_dies};
use super::run_configs::{CompactedLoad, DEPTH_MAX, DURABLE, LeedRun, LeedRunConfig, LeedRunner, compacting};
use crate::data_points::{DataPoint, DataPoints};
use crate::simulation::log_store::experiment::LogStoreSettings;
use crate::simulation::log_store::load_client::LoadKind;
use crate::simulation::log_store::load_stats::LoadStats;
use crate::simulation::log_store::parameters::{
    COMPACTIONS, DEPTHS, KEY_BYTES, PAPER_CO_SCHEDULING_PERCENT, PAPER_DRIVES, PAPER_FAWN, PAPER_KVELL,
    PAPER_LEED, PAPER_MEMORY_BYTES, PAPER_PUT_OVER_DELETE_US, PAPER_SSD_PERCENT, PAPER_SUB_COMPACTIONS_GAIN,
    PAPER_TEN_PERCENT_PUTS, PUT_PERCENTS, PublishedRow, SUB_COMPACTIONS, UNITS, VALUE_BYTES, command_cost,
    modelled_drive,
};
use anyhow::Result;
use octokv_device::Geometry;
use octokv_device::ssd_model::drive_profiles::DCT_983;
use octokv_engine::common::record::RecordMeta;
use octokv_engine::log::format::choose_layout;
use octokv_engine::log::space_limits::SpaceLimits;
use octokv_engine::log::value_record::value_record_bytes;
use octokv_engine::{EngineKind, FormatConfig};

const GETS: LoadKind = LoadKind::Uniform(0);
const PUTS: LoadKind = LoadKind::Uniform(100);

/// "256 B", "1 KiB".
pub fn size_name(bytes: u32) -> String {
    if bytes < 1024 { format!("{bytes} B") } else { format!("{} KiB", bytes / 1024) }
}

/// The runs before compaction, each with the indices of the value's and the unit's length, and its name.
fn runs_before_compaction(runs: &mut LeedRunner) -> Result<Vec<(usize, usize, String, LeedRun)>> {
    let indices = [(0, 0), (1, 0), (0, 1), (1, 1)];
    let jobs = indices.map(|(size, unit)| LeedRunConfig::BeforeCompaction(size, unit));
    let all = runs.run_all(&jobs)?;
    let named = indices.into_iter().zip(all).map(|((size, unit), run)| {
        (size, unit, format!("{}, units of {} B", size_name(VALUE_BYTES[size]), UNITS[unit]), run)
    });
    Ok(named.collect())
}

/// The part of a whole drive that live data may take.
fn capacity_share(unit_bytes: u32) -> f64 {
    let blocks = DCT_983.capacity_bytes / u64::from(unit_bytes);
    let geometry = Geometry { block_bytes: unit_bytes, blocks, volatile: false };
    let config =
        FormatConfig { engine: EngineKind::Log, unit_bytes: Some(unit_bytes), ..FormatConfig::default() };
    let layout = choose_layout(geometry, unit_bytes, &config).expect("the drive is large");
    let record_chunks = layout.record_chunks_max(config.value_bytes_max);
    let limits = SpaceLimits::new(layout.chunks, layout.stores.into(), record_chunks);
    let capacity_bytes = u64::from(limits.capacity_chunks()) * u64::from(layout.chunk_bytes());
    capacity_bytes as f64 / DCT_983.capacity_bytes as f64
}

/// The bytes of the device that an object takes: record, id, its part of an image.
fn object_bytes(stats: &LoadStats) -> f64 {
    stats.after.engine.used_bytes as f64 / stats.after.engine.keys as f64
}

/// Table 3.
///
/// # Errors
/// The first run that failed.
pub fn table_3(runs: &mut LeedRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("Table 3");
    for (size, unit, name, run) in runs_before_compaction(runs)? {
        let PublishedRow { capacity_percent, read_us, write_us, read_kqps, write_kqps } = PAPER_LEED[size];
        let filled = run.of(GETS, 1);
        let pair_bytes = f64::from(VALUE_BYTES[size]) + KEY_BYTES as f64;
        let capacity = capacity_share(UNITS[unit]);
        let pairs = capacity * pair_bytes / object_bytes(filled) * 100.0;
        points.add_with_paper(&name, "keys and values of a full drive", Some(capacity_percent), pairs, "%");
        points.add(&name, "with what they take besides", capacity * 100.0, "%");
        points.add_with_paper(&name, "get", Some(read_us), run.of(GETS, 1).mean_us(0), "us");
        points.add_with_paper(&name, "put", Some(write_us), run.of(PUTS, 1).mean_us(1), "us");
        points.add(&name, "durable put", run.requests(DURABLE, PUTS, 1).mean_us(1), "us");
        let (gets, puts) = (run.of(GETS, DEPTH_MAX).per_second(), run.of(PUTS, DEPTH_MAX).per_second());
        points.add_with_paper(&name, "gets", Some(read_kqps / PAPER_DRIVES), gets / 1e3, "K/s");
        points.add_with_paper(&name, "puts", Some(write_kqps / PAPER_DRIVES), puts / 1e3, "K/s");
        let durable = run.requests(DURABLE, PUTS, DEPTH_MAX).per_second();
        points.add(&name, "durable puts", durable / 1e3, "K/s");
        let log = filled.after_logs();
        let memory = log.segment_table_bytes as f64 / filled.after.engine.keys as f64;
        points.add_with_paper(&name, "memory for an object, at most", Some(PAPER_MEMORY_BYTES), memory, "B");
        if unit == 0 {
            for (other, rows) in [("FAWN-JBOF", PAPER_FAWN), ("KVell-JBOF", PAPER_KVELL)] {
                let series =
                    format!("{}, four drives against {other} as published", size_name(VALUE_BYTES[size]));
                let row = rows[size];
                let ratio = |ours: f64, theirs: f64| ours * PAPER_DRIVES / 1e3 / theirs;
                let paper = [read_kqps / row.read_kqps, write_kqps / row.write_kqps];
                points.add_with_paper(&series, "gets", Some(paper[0]), ratio(gets, row.read_kqps), "times");
                points.add_with_paper(&series, "puts", Some(paper[1]), ratio(puts, row.write_kqps), "times");
            }
        }
    }
    Ok(points.points)
}

/// Throughputs by requests in flight, and what format and drive allow.
///
/// # Errors
/// The first run that failed.
pub fn limits(runs: &mut LeedRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("limits");
    let drive = modelled_drive();
    for (size, unit, name, run) in runs_before_compaction(runs)? {
        let (gets, puts) = (run.of(GETS, DEPTH_MAX), run.of(PUTS, DEPTH_MAX));
        for (what, kind) in [("gets", GETS), ("puts", PUTS)] {
            let series = format!("{what} by requests in flight, {name}");
            for depth in DEPTHS {
                points.add(&series, &depth.to_string(), run.of(kind, depth).per_second() / 1e3, "K/s");
            }
        }
        let record = value_record_bytes(KEY_BYTES, VALUE_BYTES[size], &RecordMeta::PLAIN);
        let lengths = ObjectLengths {
            unit: UNITS[unit].into(),
            granule: 8.0,
            image: gets.image_bytes(),
            record: f64::from(record).max(8.0),
        };
        let series = format!("limits of gets, {name}");
        points.add(&series, "two die reads a get", die_reads_per_s(&drive) / 2.0 / 1e3, "K/s");
        let by_format = requests_by_dies(&drive, lengths.get_die_reads(), 0.0);
        points.add(&series, "with the second pages of images and records", by_format / 1e3, "K/s");
        points.add(&series, "measured", gets.per_second() / 1e3, "K/s");
        points.add(
            &series,
            "half of the drive's reads, measured",
            run.drive_reads().per_second() / 2e3,
            "K/s",
        );
        let series = format!("a get, {name}");
        points.add(&series, "commands", gets.commands() / gets.requests(), "a request");
        points.add(&series, "die reads", gets.die_reads() / gets.requests(), "a request");
        points.add(&series, "die reads by the format", lengths.get_die_reads(), "a request");
        let series = format!("gets in parts of, {name}");
        points.add(&series, "the limit by the format", gets.per_second() / by_format * 100.0, "%");
        points.add(&series, "the dies' time", gets.die_share() * 100.0, "%");
        points.add(&series, "the core's time", gets.core_share() * 100.0, "%");
        let series = format!("limits of puts, {name}");
        let by_commands = commands_per_s(&drive) / 3.0;
        points.add(&series, "three commands a put", by_commands / 1e3, "K/s");
        let alone = run.of(PUTS, 1);
        let [die_reads, written] =
            [alone.die_reads(), alone.written_bytes()].map(|sum| sum / alone.requests());
        let by_dies = requests_by_dies(&drive, die_reads, written);
        points.add(&series, "die reads and bytes of a put alone", by_dies / 1e3, "K/s");
        let [die_reads, written] = [puts.die_reads(), puts.written_bytes()].map(|sum| sum / puts.requests());
        let shared = requests_by_dies(&drive, die_reads, written);
        points.add(&series, "die reads and bytes as measured", shared / 1e3, "K/s");
        points.add(&series, "measured", puts.per_second() / 1e3, "K/s");
        for (what, stats) in [("a put alone", alone), ("a put among many", puts)] {
            let series = format!("{what}, {name}");
            points.add(&series, "commands", stats.commands() / stats.requests(), "a request");
            points.add(&series, "die reads", stats.die_reads() / stats.requests(), "a request");
            points.add(&series, "written", stats.written_bytes() / stats.requests(), "B");
        }
        let series = format!("puts in parts of, {name}");
        let limit = by_commands.min(by_dies);
        points.add(&series, "the limit of puts alone", puts.per_second() / limit * 100.0, "%");
        points.add(&series, "the dies' time", puts.die_share() * 100.0, "%");
        points.add(&series, "the core's time", puts.core_share() * 100.0, "%");
    }
    Ok(points.points)
}

/// Figure 11: a request alone. The paper's text has latencies (Table 3) and the part of the drive.
///
/// # Errors
/// The first run that failed.
pub fn figure_11(runs: &mut LeedRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("Figure 11");
    for (size, _, name, run) in runs_before_compaction(runs)? {
        let PublishedRow { read_us, write_us, .. } = PAPER_LEED[size];
        let requests = [
            ("GET", run.of(GETS, 1), 0, read_us),
            ("PUT", run.of(PUTS, 1), 1, write_us),
            ("DEL", run.of(LoadKind::Deletes, 1), 2, write_us - PAPER_PUT_OVER_DELETE_US),
        ];
        let mut drive_percent = Vec::new();
        for (request, stats, kind, paper_us) in requests {
            let latency_us = stats.mean_us(kind);
            let core_us = stats.commands() / stats.requests() * command_cost().0 as f64 / 1e3;
            points.add_with_paper(&name, request, Some(paper_us), latency_us, "us");
            points.add(&format!("{name}, the core's part"), request, core_us, "us");
            drive_percent.push((1.0 - core_us / latency_us) * 100.0);
        }
        let mean = drive_percent.iter().sum::<f64>() / drive_percent.len() as f64;
        points.add_with_paper(&name, "the drive's part", Some(PAPER_SSD_PERCENT[size]), mean, "%");
        let over = run.of(PUTS, 1).mean_us(1) - run.of(LoadKind::Deletes, 1).mean_us(2);
        points.add_with_paper(&name, "PUT over DEL", Some(PAPER_PUT_OVER_DELETE_US), over, "us");
    }
    Ok(points.points)
}

/// Figure 12: throughput by the part of puts, before compaction.
///
/// # Errors
/// The first run that failed.
pub fn figure_12(runs: &mut LeedRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("Figure 12");
    let all = runs_before_compaction(runs)?;
    let of = |run: &LeedRun, percent| run.of(LoadKind::Uniform(percent), DEPTH_MAX).per_second();
    for (_, _, name, run) in &all {
        for percent in PUT_PERCENTS {
            points.add(name, &percent.to_string(), of(run, percent) / 1e3, "K/s");
        }
    }
    for (size, _, name, run) in &all {
        let change = (of(run, 10) / of(run, 0) - 1.0) * 100.0;
        let series = format!("change with 10 % of puts, {name}");
        points.add_with_paper(&series, "10", Some(PAPER_TEN_PERCENT_PUTS[*size]), change, "%");
    }
    Ok(points.points)
}

/// A run with compaction, with the index of the value's length, its workload and its name.
type CompactedRun = (usize, CompactedLoad, String, LeedRun);
/// A setting with its place on the axis.
type SettingOnAxis = (usize, LogStoreSettings);

/// The runs with compaction. The paper's text does not say which objects Figure 13 has: all workloads have those of 1 KiB.
fn runs_compacted(runs: &mut LeedRunner) -> Result<Vec<CompactedRun>> {
    let of_1_kib = CompactedLoad::ALL.map(|(load, name)| (1, load, name));
    let (load, name) = CompactedLoad::ALL[0];
    let indices: Vec<(usize, CompactedLoad, &str)> = of_1_kib.into_iter().chain([(0, load, name)]).collect();
    let jobs: Vec<LeedRunConfig> =
        indices.iter().map(|&(size, load, _)| LeedRunConfig::Compacted(size, load)).collect();
    let all = runs.run_all(&jobs)?;
    let named = indices.into_iter().zip(all).map(|((size, load, name), run)| {
        (size, load, format!("{name}, {}", size_name(VALUE_BYTES[size])), run)
    });
    Ok(named.collect())
}

/// Adds the throughput of each workload by a setting.
fn add_by_setting(points: &mut DataPoints, all: &[CompactedRun], settings: &[SettingOnAxis]) {
    for (.., name, run) in all {
        for (x, settings) in settings {
            let rate = run.last_requests(*settings).per_second();
            points.add(name, &x.to_string(), rate / 1e3, "K/s");
        }
    }
}

/// The gain of one setting over another, mean of the three workloads with objects of 1 KiB.
fn mean_gain(all: &[CompactedRun], over: LogStoreSettings, of: LogStoreSettings) -> f64 {
    let of_workloads = all.iter().filter(|run| run.0 == 1);
    let gains = of_workloads
        .map(|(.., run)| run.last_requests(of).per_second() / run.last_requests(over).per_second());
    gains.clone().sum::<f64>() / gains.count() as f64
}

/// Figure 13a: sub-compactions.
///
/// # Errors
/// The first run that failed.
pub fn figure_13a(runs: &mut LeedRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("Figure 13a");
    let all = runs_compacted(runs)?;
    let settings = SUB_COMPACTIONS.map(|subs| (subs, compacting(subs, 1)));
    add_by_setting(&mut points, &all, &settings);
    let [(_, one), .., (_, eight)] = settings;
    let gain = mean_gain(&all, one, eight);
    points.add_with_paper(
        "gain, mean of the workloads",
        "8",
        Some(PAPER_SUB_COMPACTIONS_GAIN),
        gain,
        "times",
    );
    for (.., name, run) in &all {
        let stats = run.last_requests(eight);
        let puts = stats.latency_ns[1].len() as f64;
        let series = format!("with 8 sub-compactions, {name}");
        points.add(&series, "live", stats.fill() * 100.0, "%");
        points.add(&series, "the dies' time", stats.die_share() * 100.0, "%");
        points.add(&series, "the core's time", stats.core_share() * 100.0, "%");
        points.add(&series, "values moved", stats.counted(|logs| logs.moved_values) / puts, "a put");
        points.add(&series, "images written", stats.counted(|logs| logs.images) / puts, "a put");
        points.add(&series, "written by the engine", stats.written_bytes() / puts / 1e3, "KB a put");
        points.add(&series, "programmed by the drive, for each page", stats.flash_amplification(), "times");
    }
    Ok(points.points)
}

/// Figure 13b: compactions at once.
///
/// # Errors
/// The first run that failed.
pub fn figure_13b(runs: &mut LeedRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("Figure 13b");
    let all = runs_compacted(runs)?;
    let [.., subs_most] = SUB_COMPACTIONS;
    let settings = COMPACTIONS.map(|at_once| (at_once, compacting(subs_most, at_once)));
    add_by_setting(&mut points, &all, &settings);
    let [(_, one), .., last] = settings;
    for (at_once, of) in &settings[1..] {
        // The paper's text does not say of how many.
        let paper = (*at_once == last.0).then_some(PAPER_CO_SCHEDULING_PERCENT);
        let percent = (mean_gain(&all, one, *of) - 1.0) * 100.0;
        points.add_with_paper("gain, mean of the workloads", &at_once.to_string(), paper, percent, "%");
    }
    Ok(points.points)
}
