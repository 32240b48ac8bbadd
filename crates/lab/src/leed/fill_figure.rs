//! What puts cost by the part of a volume that lives: writes, reads, throughput, and latencies at a rate that a full volume sustains.
//!
//! In: results of simulated runs. Out: data points. The paper has none of this: its text does not say how full its drives are.

use super::figures::size_name;
use super::fill_model::{FillModel, write_amplification};
use super::run_configs::{LeedRun, LeedRunConfig, LeedRunner};
use crate::data_points::{DataPoint, DataPoints};
use crate::simulation::log_store::load_stats::LoadStats;
use crate::simulation::log_store::parameters::{
    COMPACTION_STORES, KEY_BYTES, VALUE_BYTES, fills, rated_fill, record_bytes,
};
use crate::simulation::percentile::percentile_us;
use anyhow::Result;
use octokv_base::Nanos;
use octokv_engine::log::space_limits::SpaceLimits;

fn puts(stats: &LoadStats) -> f64 {
    stats.latency_ns[1].len() as f64
}

/// What the model of [`super::fill_model`] needs, of the end of a run.
fn model_of(stats: &LoadStats, value_bytes: u32) -> FillModel {
    let logs = stats.after_logs();
    let keys = stats.after.engine.keys as f64;
    FillModel {
        record_bytes: record_bytes(value_bytes),
        key_bytes: logs.keys.live_bytes as f64 / keys,
        image_bytes: stats.image_bytes(),
        segment_objects: keys / logs.segments as f64,
    }
}

/// The part of the space for logs that lives: without chunks that are free while compaction runs, and those in which logs end.
fn fill_of_logs(stats: &LoadStats) -> f64 {
    let logs = stats.after_logs();
    let limits = SpaceLimits::new(logs.chunks as u32, COMPACTION_STORES.into(), 1);
    let chunks = logs.chunks as f64 - f64::from(limits.start) - 2.0 * f64::from(COMPACTION_STORES);
    stats.after.engine.used_bytes as f64 / (chunks * logs.chunk_bytes as f64)
}

fn add_filled(points: &mut DataPoints, size: usize, live: u8, stats: &LoadStats) {
    let (value_bytes, x) = (VALUE_BYTES[size], live.to_string());
    let name = size_name(value_bytes);
    let of_user = (KEY_BYTES as u32 + value_bytes) as f64;
    let model = model_of(stats, value_bytes);
    let logs = stats.after_logs();
    let written = stats.written_bytes() / puts(stats);
    let mut add = |series: &str, value: f64, unit| points.add(&format!("{series}, {name}"), &x, value, unit);
    add("puts", stats.per_second() / 1e3, "K/s");
    add("mean latency with so many", stats.mean_us(1) / 1e3, "ms");
    add("p99 with so many", percentile_us(&stats.latency_ns[1], 990) / 1e3, "ms");
    add("the dies' time", stats.die_share() * 100.0, "%");
    let space = (logs.chunks * logs.chunk_bytes) as f64 / stats.after.engine.keys as f64;
    add("space of a byte of keys and values", space / of_user, "B");
    add("live of the space for logs", fill_of_logs(stats) * 100.0, "%");
    add("written for a byte of keys and values", written / of_user, "B");
    add("written for a put", written / 1e3, "KB");
    let by_model = model.least_cost(fill_of_logs(stats));
    add("written for a put, by arithmetic", by_model.map_or(f64::NAN, |cost| cost.written_bytes / 1e3), "KB");
    let values = 1.0 + stats.counted(|logs| logs.moved_values) / puts(stats);
    add("writes of a value", values, "times");
    let utilization = logs.values.live_bytes as f64 / (logs.values.chunks * logs.chunk_bytes) as f64;
    add("writes of a value, by the use of its log", write_amplification(utilization), "times");
    add("images for a put", stats.counted(|logs| logs.images) / puts(stats), "images");
    let of_keys = logs.keys.live_bytes as f64 / (logs.keys.chunks * logs.chunk_bytes) as f64;
    add("use of the key log", of_keys * 100.0, "%");
    add(
        "use of the key log, by arithmetic",
        by_model.map_or(f64::NAN, |cost| cost.utilizations[0] * 100.0),
        "%",
    );
    add("use of the value log", utilization * 100.0, "%");
    add("die reads for a put", stats.die_reads() / puts(stats), "reads");
}

/// Puts by the part of a volume that lives.
///
/// # Errors
/// The first run that failed.
pub fn fill(runs: &mut LeedRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("fill");
    let sizes = [0, 1];
    let fills = fills(runs.durations.is_quick);
    let (least, most) = (fills[0], rated_fill(runs.durations.is_quick));
    let jobs: Vec<_> = sizes
        .iter()
        .flat_map(|&size| fills.iter().map(move |&live| LeedRunConfig::Filled(size, live)))
        .collect();
    let all = runs.run_all(&jobs)?;
    let of = |size: usize, live: u8| -> &LeedRun {
        let at = jobs.iter().position(|job| *job == LeedRunConfig::Filled(size, live));
        &all[at.expect("it is one of the fills")]
    };
    for size in sizes {
        for &live in fills {
            add_filled(&mut points, size, live, of(size, live).last());
        }
    }
    let rates = sizes.map(|size| of(size, most).last().per_second() / 2.0);
    let one_in = |size: usize| Nanos((1e9 / rates[size]) as u64);
    let jobs: Vec<_> = sizes
        .iter()
        .flat_map(|&size| [least, most].map(|live| LeedRunConfig::FilledAtRate(size, live, one_in(size))))
        .collect();
    let paced = runs.run_all(&jobs)?;
    for (size, pair) in sizes.into_iter().zip(paced.chunks(2)) {
        let name = size_name(VALUE_BYTES[size]);
        points.add(&format!("half of the puts of {most} %, {name}"), "puts", rates[size] / 1e3, "K/s");
        let p99_ms = |run: &LeedRun| percentile_us(&run.last().latency_ns[1], 990) / 1e3;
        for (live, run) in [least, most].into_iter().zip(pair) {
            let mut add = |latency: &str, ms: f64| {
                let series = format!("{latency} at half of the puts of {most} %, {name}");
                points.add(&series, &live.to_string(), ms, "ms");
            };
            add("mean latency", run.last().mean_us(1) / 1e3);
            add("p99", p99_ms(run));
        }
        let ratio = p99_ms(&pair[1]) / p99_ms(&pair[0]);
        points.add(&format!("p99 at {most} % beside {least} %, {name}"), "ratio", ratio, "times");
    }
    Ok(points.points)
}
