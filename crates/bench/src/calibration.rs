//! The times of gets, puts and deletes while an engine on a device is saturated, and their ratios to that of a get.
//!
//! ```text
//!   load ─▶ round: settle, gets │ settle, puts │ deletes ─▶ deleted keys again    every other round puts before gets
//!           ...                                                                   ratios of each round; their median
//!           one more round with twice the operations in flight                   the throughput that is gained
//! ```
//! In: an open volume without keys, and how much to measure. Out: a [`Calibration`]. A saturated device needs for an operation its length of time divided
//! by the operations that ended in it, whatever the latency of each (ReFlex, ASPLOS 2017, §3.2.1; LEED, SIGCOMM 2023, §3.4). Gets and puts use keys drawn
//! uniformly, and a put overwrites; a delete takes a key that exists, each once, so that the keys bound the deletes of a round.
//!
//! Before each measurement the engine ends what it does in the background, so that compaction of an earlier kind does not count for a later one. What an
//! engine puts off for longer than a measurement counts for none. Invariant: every get and delete finds its key. Tested below.

use crate::config::{BenchConfig, StopCondition};
use crate::error::BenchError;
use crate::local_engine::LocalEngine;
use crate::platform::GeneratorPlatform;
use crate::runner::run_local_engine;
use crate::size_distribution::SizeDistribution;
use crate::statistics::median;
use crate::workload::Workload;
use octokv_base::Nanos;
use octokv_runtime::Polling;
use std::sync::Arc;

/// Bytes of every key.
pub const CALIBRATION_KEY_BYTES: usize = 16;
/// The part of a measurement of gets or puts that runs before it, uncounted.
const WARM_UP_PART: u64 = 5;
/// Interval in which the background work is looked at.
const SETTLE_POLL_INTERVAL: Nanos = Nanos::from_millis(20);
/// Background work that changes nothing for so long has ended.
const SETTLED_AFTER: Nanos = Nanos::from_millis(200);
/// A measurement begins after so long whether or not the background work has ended.
const SETTLE_LIMIT: Nanos = Nanos::from_secs(60);

/// What to measure.
#[derive(Clone, Debug)]
pub struct CalibrationConfig {
    /// Length of all values, in bytes.
    pub value_bytes: usize,
    /// Number of keys.
    pub keys: u64,
    /// Operations in flight, over all cores.
    pub streams: usize,
    /// Time of each measurement of gets and of puts; deletes end after as many operations as puts, or when all keys are deleted.
    pub span: Nanos,
    /// Rounds that count.
    pub rounds: usize,
    /// A reactor each, pinned to a core if one is given.
    pub cores: Vec<Option<usize>>,
    /// Seed of key choice and values.
    pub seed: u64,
}

/// One measurement of one kind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KindRun {
    /// The operations that ended.
    pub operations: u64,
    /// How long they took, in seconds.
    pub seconds: f64,
}

impl KindRun {
    /// The time of an operation, in microseconds.
    pub fn us_per_operation(&self) -> f64 {
        self.seconds * 1e6 / self.operations as f64
    }
}

/// One measurement of each kind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CalibrationRound {
    /// Gets.
    pub get: KindRun,
    /// Puts, which overwrite.
    pub put: KindRun,
    /// Deletes of keys that exist.
    pub delete: KindRun,
}

/// The median of the rounds, and the rounds that are the farthest from it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoundSpread {
    /// The median.
    pub median: f64,
    /// The least.
    pub min: f64,
    /// The greatest.
    pub max: f64,
}

/// The measurements.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    /// Those that count, at least one.
    pub rounds: Vec<CalibrationRound>,
    /// One with twice the operations in flight.
    pub deeper: CalibrationRound,
    /// Measurements that began while the engine still worked in the background.
    pub unsettled: u32,
}

/// Why a calibration failed.
#[derive(Debug, thiserror::Error)]
pub enum CalibrationError {
    /// The engine or a workload failed.
    #[error(transparent)]
    Bench(#[from] BenchError),
    /// Operations of a workload did not find their keys.
    #[error("{0}: {1} operations did not find their keys")]
    KeysMissing(&'static str, u64),
    /// Too few operations of a workload ended for a time of one.
    #[error("{0}: no operation ended after the warm-up; measure for longer")]
    NothingMeasured(&'static str),
}

impl Calibration {
    /// A quantity of each round, over the rounds.
    pub fn spread(&self, of: impl Fn(&CalibrationRound) -> f64) -> RoundSpread {
        let values: Vec<f64> = self.rounds.iter().map(of).collect();
        RoundSpread {
            median: median(&values).expect("there is a round"),
            min: values.iter().copied().fold(f64::INFINITY, f64::min),
            max: values.iter().copied().fold(0.0, f64::max),
        }
    }

    /// The time of a put divided by that of a get of the same round.
    pub fn put_ratio(&self) -> RoundSpread {
        self.spread(|round| round.put.us_per_operation() / round.get.us_per_operation())
    }

    /// The time of a delete divided by that of a get of the same round.
    pub fn delete_ratio(&self) -> RoundSpread {
        self.spread(|round| round.delete.us_per_operation() / round.get.us_per_operation())
    }

    /// All operations of a kind that count, and their time.
    pub fn total(&self, of: impl Fn(&CalibrationRound) -> KindRun) -> KindRun {
        let none = KindRun { operations: 0, seconds: 0.0 };
        self.rounds.iter().map(of).fold(none, |total, run| KindRun {
            operations: total.operations + run.operations,
            seconds: total.seconds + run.seconds,
        })
    }

    /// The throughput of a kind with twice the operations in flight, divided by its median: 1 of a saturated device.
    pub fn deeper_gain(&self, of: impl Fn(&CalibrationRound) -> KindRun) -> f64 {
        let time = self.spread(|round| of(round).us_per_operation()).median;
        time / of(&self.deeper).us_per_operation()
    }
}

/// Loads the keys and measures. `progress` is called before each step with the part that is done (0 to 1) and the name of the step.
///
/// # Errors
/// A failure of the engine, also a full volume; a measurement without operations.
///
/// # Panics
/// Without a round, a key or a core.
pub fn calibrate(
    engine: &Arc<LocalEngine>,
    config: &CalibrationConfig,
    polling: Polling,
    platform: GeneratorPlatform,
    mut progress: impl FnMut(f64, &str),
) -> Result<Calibration, CalibrationError> {
    assert!(
        config.rounds > 0 && config.keys > 0 && !config.cores.is_empty(),
        "there is something to measure"
    );
    let mut measurement = Measurement { engine, config, polling, platform, unsettled: 0 };
    progress(0.0, &format!("load of {} keys", config.keys));
    measurement.run(Workload::FillUniqueRandom, config.seed, config.streams, operations(config.keys))?;
    let mut rounds = Vec::with_capacity(config.rounds);
    let steps = (config.rounds + 2) as f64;
    for number in 0..config.rounds {
        progress((number + 1) as f64 / steps, &format!("round {} of {}", number + 1, config.rounds));
        rounds.push(measurement.round(number, config.streams)?);
    }
    progress((steps - 1.0) / steps, "round with twice the operations in flight");
    let deeper = measurement.round(config.rounds, config.streams * 2)?;
    Ok(Calibration { rounds, deeper, unsettled: measurement.unsettled })
}

fn operations(count: u64) -> StopCondition {
    StopCondition::Operations(count)
}

struct Measurement<'a> {
    engine: &'a Arc<LocalEngine>,
    config: &'a CalibrationConfig,
    polling: Polling,
    platform: GeneratorPlatform,
    unsettled: u32,
}

impl Measurement<'_> {
    /// Measures each kind once. REQUIRES: all keys exist, as they do afterwards.
    fn round(&mut self, number: usize, streams: usize) -> Result<CalibrationRound, CalibrationError> {
        // Other keys in each round, and the same ones for its deletes and the puts that follow them.
        let seed = self.config.seed.wrapping_add(1 + number as u64);
        let timed = StopCondition::Time(self.config.span);
        let mut measure = |workload| {
            self.settle()?;
            self.run(workload, seed, streams, timed)
        };
        let (get, put) = if number.is_multiple_of(2) {
            let get = measure(Workload::ReadRandom)?;
            (get, measure(Workload::Overwrite)?)
        } else {
            let put = measure(Workload::Overwrite)?;
            (measure(Workload::ReadRandom)?, put)
        };
        let puts_of_span = put.operations as f64 * self.config.span.as_secs_f64() / put.seconds;
        let deletes = operations((puts_of_span as u64).clamp(1, self.config.keys));
        self.settle()?;
        let delete = self.run(Workload::DeleteUniqueRandom, seed, streams, deletes)?;
        self.run(Workload::FillUniqueRandom, seed, streams, deletes)?;
        Ok(CalibrationRound { get, put, delete })
    }

    fn run(
        &self,
        workload: Workload,
        seed: u64,
        streams: usize,
        stop: StopCondition,
    ) -> Result<KindRun, CalibrationError> {
        let warm_up = match stop {
            StopCondition::Time(span) => Nanos(span.0 / WARM_UP_PART),
            StopCondition::Operations(_) => Nanos::ZERO,
        };
        let config = BenchConfig {
            workloads: vec![workload],
            key_sizes: SizeDistribution::Fixed(CALIBRATION_KEY_BYTES),
            value_sizes: SizeDistribution::Fixed(self.config.value_bytes),
            keys: self.config.keys,
            threads: streams,
            stop,
            warm_up,
            seed,
            // A node does not compare values either.
            verify: false,
            ..BenchConfig::default()
        };
        let (cores, platform) = (&self.config.cores, self.platform);
        let result = run_local_engine(&config, self.engine, cores, self.polling, platform)?.remove(0);
        if result.not_found > 0 {
            return Err(CalibrationError::KeysMissing(workload.name(), result.not_found));
        }
        if result.operations == 0 || result.elapsed_s == 0.0 {
            return Err(CalibrationError::NothingMeasured(workload.name()));
        }
        Ok(KindRun { operations: result.operations, seconds: result.elapsed_s })
    }

    /// Waits until the engine does nothing in the background, or for the limit.
    fn settle(&mut self) -> Result<(), BenchError> {
        let engine = self.engine;
        let has_settled = engine.run_task(self.polling, async |_, handle| {
            let start = handle.now();
            let (mut changed_at, mut last) = (start, engine.statistics());
            while handle.now().since(changed_at) < SETTLED_AFTER {
                handle.sleep(SETTLE_POLL_INTERVAL).await;
                let current = engine.statistics();
                if current != last {
                    (changed_at, last) = (handle.now(), current);
                }
                if handle.now().since(start) > SETTLE_LIMIT {
                    return false;
                }
            }
            true
        })?;
        self.unsettled += u32::from(!has_settled);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local_engine::LocalVolumeConfig;
    use crate::temporary_directory::temporary_directory;
    use octokv_device::ssd_model::drive_profiles::{DCT_983, FlushModel};
    use octokv_device::ssd_model::{DriveProfile, SsdModel, shared_model};
    use octokv_engine::{Durability, EngineKind, FormatConfig, OpenConfig, WallClock};
    use octokv_runtime::DeviceDriver;
    use octokv_sys::{clock, file, thread};

    const PLATFORM: GeneratorPlatform =
        GeneratorPlatform { now: clock::now, spawn: |_, body| thread::spawn("octokv-load", body).map(drop) };
    /// The interval of reads of the model drive: longer than what the processor needs for an operation.
    const READ: Nanos = Nanos::from_micros(250);

    fn config() -> CalibrationConfig {
        CalibrationConfig {
            value_bytes: 1000,
            keys: 300,
            streams: 32,
            span: Nanos::from_millis(300),
            rounds: 3,
            cores: vec![None],
            seed: 5,
        }
    }

    /// A calibration on a drive that ends a read each [`READ`], and a write each `slower` times as long, whatever is in flight.
    fn try_calibrated(
        engine: EngineKind,
        slower: u64,
        config: &CalibrationConfig,
    ) -> Result<Calibration, CalibrationError> {
        let drive = DriveProfile {
            read_interval: READ,
            write_interval: Nanos(READ.0 * slower),
            flush: FlushModel::Immediate,
            ..DCT_983
        };
        let directory = temporary_directory("octokv-calibration-").expect("a directory");
        let volume = LocalVolumeConfig {
            format: FormatConfig { engine, seed: 7, ..FormatConfig::default() },
            open: OpenConfig {
                durability: Durability::Completed,
                cores: 1,
                cache_bytes: 0,
                prepare_bytes: 0,
                compact_bytes_per_second: 0,
                tree: OpenConfig::TREE,
                swap_gap: OpenConfig::SWAP_GAP,
                clock: WallClock::default(),
                tokens: None,
            },
            driver: DeviceDriver::Auto,
            device_depth: 64,
            drive: Some(shared_model(SsdModel::new(drive, 4096))),
            pool_bytes: 16 << 20,
            now: clock::now,
        };
        let file = file::open_device(&directory.path().join("device"), Some(128 << 20), true);
        let engine = Arc::new(LocalEngine::open(file.expect("opens"), volume, true).expect("opens"));
        let calibration = calibrate(&engine, config, Polling::Sleep, PLATFORM, |_, _| ());
        assert_eq!(engine.statistics().keys, config.keys, "deleted keys are stored again");
        engine.erase().expect("erases");
        calibration
    }

    fn calibrated(engine: EngineKind, slower: u64, config: &CalibrationConfig) -> Calibration {
        try_calibrated(engine, slower, config).expect("calibrates")
    }

    /// On this drive a put of the hash engine takes a read, which compares the key, a write of its record, and a part of the write of its batch; a
    /// delete a read and such a part. So a put costs 1 + n to 1 + 1.5 n gets when a write takes n reads, and a delete 1 + n ÷ 32 to 1 + n ÷ 2.
    #[test]
    fn costs_are_those_of_the_reads_and_writes_of_the_drive() {
        for slower in [2, 8] {
            let calibration = calibrated(EngineKind::Hash, slower, &config());
            let (writes, what) = (slower as f64, format!("{slower} {calibration:#?}"));
            let get_us = calibration.spread(|round| round.get.us_per_operation()).median;
            assert!((get_us / (READ.0 as f64 / 1e3) - 1.0).abs() < 0.1, "{what}");
            let put = calibration.put_ratio();
            assert!((1.0 + writes..=1.0 + 1.5 * writes).contains(&put.median), "{what}");
            assert!(put.min <= put.median && put.median <= put.max, "{what}");
            let delete = calibration.delete_ratio().median;
            assert!((1.0 + writes / 32.0..=1.0 + writes / 2.0).contains(&delete), "{what}");
            assert!(calibration.deeper_gain(|round| round.get) < 1.1, "it was saturated: {what}");
        }
    }

    #[test]
    fn ratios_are_of_one_round_and_totals_of_all() {
        let run = |operations, seconds| KindRun { operations, seconds };
        // The device is slower in each round: ratios within a round do not show it.
        let round = |slower: f64, put: f64| CalibrationRound {
            get: run(1000, slower),
            put: run(500, slower * put / 2.0),
            delete: run(10, slower * 0.02),
        };
        let calibration = Calibration {
            rounds: vec![round(1.0, 3.0), round(2.0, 4.0), round(9.0, 2.0)],
            deeper: CalibrationRound { get: run(3000, 2.0), ..round(2.0, 4.0) },
            unsettled: 0,
        };
        assert_eq!(calibration.put_ratio(), RoundSpread { median: 3.0, min: 2.0, max: 4.0 });
        let delete = calibration.delete_ratio();
        assert!((delete.min - 2.0).abs() < 1e-9 && (delete.max - 2.0).abs() < 1e-9, "{delete:?}");
        assert_eq!(calibration.total(|round| round.get), run(3000, 12.0));
        assert_eq!(calibration.spread(|round| round.get.us_per_operation()).median, 2000.0);
        assert!((calibration.deeper_gain(|round| round.get) - 3.0).abs() < 1e-9);
    }

    #[test]
    fn a_calibration_that_is_too_short_says_so() {
        let short = CalibrationConfig { span: Nanos(1), keys: 20, rounds: 1, ..config() };
        let error = try_calibrated(EngineKind::Hash, 1, &short).expect_err("nothing ends in a nanosecond");
        assert!(matches!(error, CalibrationError::NothingMeasured("readrandom")), "{error}");
    }
}
