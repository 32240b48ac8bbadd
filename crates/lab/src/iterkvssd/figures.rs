//! The evaluation of the IterKVSSD slides: index prefetch, and value prefetch by value size.
//!
//! In: results of simulated runs. Out: data points with the slides' numbers where they have any.

use super::run_configs::{IterkvssdRunConfig, IterkvssdRunner, LONG_SCAN_SETTINGS, ScanCell, ScanSeries};
use crate::data_points::{DataPoint, DataPoints};
use crate::simulation::iterators::experiment::WriteOrder;
use crate::simulation::iterators::parameters::{
    DEGREES, LONG_SCAN_VALUE_BYTES, PAPER_GAIN_AT_RANDOM, PAPER_GAIN_IN_ORDER, PAPER_INDEX_PREFETCH_GAIN,
    SCAN_LENGTHS, VALUE_BYTES,
};
use anyhow::Result;

const ORDERS: [(WriteOrder, &str); 2] =
    [(WriteOrder::InOrder, "in order"), (WriteOrder::AtRandom, "at random")];

fn size_name(bytes: u32) -> String {
    if bytes < 1024 { format!("{bytes} B") } else { format!("{} KiB", bytes / 1024) }
}

fn degrees_job(value_bytes: u32, order: WriteOrder) -> IterkvssdRunConfig {
    IterkvssdRunConfig { value_bytes, order, series: ScanSeries::Degrees }
}

/// The cell of a degree (`None`: the engine's own) and a scan length.
fn cell_of(cells: &[ScanCell], degree: Option<u32>, length: u32) -> &ScanCell {
    let found = cells.iter().find(|cell| cell.read_ahead.degree == degree && cell.length == length);
    found.expect("the run has every cell")
}

/// Next with and without index prefetch in the long scan, and Seek.
///
/// # Errors
/// The first run that failed.
pub fn index_prefetch(runs: &mut IterkvssdRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("index prefetch");
    let jobs = ORDERS.map(|(order, _)| IterkvssdRunConfig {
        value_bytes: LONG_SCAN_VALUE_BYTES,
        order,
        series: ScanSeries::LongScan,
    });
    let all = runs.run_all(&jobs)?;
    for ((_, order), cells) in ORDERS.iter().zip(&all) {
        for ((setting, _), cell) in LONG_SCAN_SETTINGS.iter().zip(cells) {
            let series = format!("Next, {setting}, written {order}");
            for (name, us) in ["median", "p99", "p99.9", "maximum"].iter().zip(cell.next_us) {
                points.add(&series, name, us, "us");
            }
            let series = format!("Seek, {setting}, written {order}");
            points.add(&series, "median", cell.seek_us[0], "us");
            let series = format!("Nexts that waited for further flash reads, {setting}, written {order}");
            for (name, count) in
                ["all", "one", "two or more"].iter().zip([cell.nexts, cell.waited[0], cell.waited[1]])
            {
                points.add(&series, name, count as f64, "Nexts");
            }
        }
        let gain = |index: usize| cells[0].next_us[index] / cells[1].next_us[index];
        let series = format!("gain of index prefetch, written {order}");
        points.add_with_paper(&series, "p99.9", Some(PAPER_INDEX_PREFETCH_GAIN), gain(2), "times");
        points.add(&series, "maximum", gain(3), "times");
    }
    Ok(points.points)
}

/// Throughput by degree and scan length, for one value size.
fn value_prefetch(
    runs: &mut IterkvssdRunner,
    figure: &'static str,
    value_bytes: u32,
) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure(figure);
    let all = runs.run_all(&ORDERS.map(|(order, _)| degrees_job(value_bytes, order)))?;
    for ((_, order), cells) in ORDERS.iter().zip(&all) {
        for length in SCAN_LENGTHS {
            let series = format!("scans of {length}, written {order}, by D");
            for degree in DEGREES {
                let cell = cell_of(cells, Some(degree), length);
                points.add(&series, &degree.to_string(), cell.pairs_per_s, "pairs/s");
            }
        }
    }
    Ok(points.points)
}

/// Panel (a): values of 128 B.
///
/// # Errors
/// The first run that failed.
pub fn value_prefetch_a(runs: &mut IterkvssdRunner) -> Result<Vec<DataPoint>> {
    value_prefetch(runs, "value prefetch (a)", VALUE_BYTES[0])
}

/// Panel (b): values of 4 KiB.
///
/// # Errors
/// The first run that failed.
pub fn value_prefetch_b(runs: &mut IterkvssdRunner) -> Result<Vec<DataPoint>> {
    value_prefetch(runs, "value prefetch (b)", VALUE_BYTES[1])
}

/// Panel (c): values of 16 KiB.
///
/// # Errors
/// The first run that failed.
pub fn value_prefetch_c(runs: &mut IterkvssdRunner) -> Result<Vec<DataPoint>> {
    value_prefetch(runs, "value prefetch (c)", VALUE_BYTES[2])
}

/// Panel (d): values of 128 KiB.
///
/// # Errors
/// The first run that failed.
pub fn value_prefetch_d(runs: &mut IterkvssdRunner) -> Result<Vec<DataPoint>> {
    value_prefetch(runs, "value prefetch (d)", VALUE_BYTES[3])
}

/// The largest gains of value prefetch; and beyond the paper the engine's own degree against the best fixed one.
///
/// # Errors
/// The first run that failed.
pub fn gains(runs: &mut IterkvssdRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("gains");
    let jobs: Vec<IterkvssdRunConfig> =
        ORDERS.iter().flat_map(|&(order, _)| VALUE_BYTES.map(|bytes| degrees_job(bytes, order))).collect();
    let all = runs.run_all(&jobs)?;
    for ((_, order), by_size) in ORDERS.iter().zip(all.chunks(VALUE_BYTES.len())) {
        let series = format!("largest gain over D = 0, written {order}");
        let gains: Vec<f64> = by_size.iter().map(|cells| largest_gain(cells)).collect();
        for (bytes, gain) in VALUE_BYTES.iter().zip(&gains) {
            points.add(&series, &size_name(*bytes), *gain, "times");
        }
        let paper = if *order == "in order" { PAPER_GAIN_IN_ORDER } else { PAPER_GAIN_AT_RANDOM };
        let largest = gains.iter().copied().fold(f64::NAN, f64::max);
        points.add_with_paper(&series, "any", Some(paper), largest, "times");
    }
    for ((_, order), by_size) in ORDERS.iter().zip(all.chunks(VALUE_BYTES.len())) {
        for (bytes, cells) in VALUE_BYTES.iter().zip(by_size) {
            let series = format!("own D against the best fixed one, {}, written {order}", size_name(*bytes));
            for length in SCAN_LENGTHS {
                points.add(&series, &length.to_string(), against_best(cells, length), "%");
            }
        }
    }
    Ok(points.points)
}

/// The largest throughput divided by that of degree 0 at the same scan length.
fn largest_gain(cells: &[ScanCell]) -> f64 {
    let gain = |length: u32, degree: u32| {
        cell_of(cells, Some(degree), length).pairs_per_s / cell_of(cells, Some(0), length).pairs_per_s
    };
    let all = SCAN_LENGTHS.iter().flat_map(|&length| DEGREES.map(|degree| gain(length, degree)));
    all.fold(f64::NAN, f64::max)
}

/// Throughput of the engine's own degree against the best fixed one at a scan length, in percent.
pub fn against_best(cells: &[ScanCell], length: u32) -> f64 {
    let fixed = DEGREES.iter().map(|&degree| cell_of(cells, Some(degree), length).pairs_per_s);
    (cell_of(cells, None, length).pairs_per_s / fixed.fold(f64::NAN, f64::max) - 1.0) * 100.0
}
