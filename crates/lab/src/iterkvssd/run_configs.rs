//! Simulated runs of IterKVSSD: a filled store, scanned with several settings.

use crate::job_runner::{Durations, ExperimentJob, JobRunner};
use crate::simulation::iterators::experiment::{IteratorExperiment, ReadAhead, WriteOrder};
use crate::simulation::iterators::parameters::{self, DEGREES, LONG_SCAN, SCAN_LENGTHS};
use crate::simulation::iterators::scan_client::{ScanConfig, ScanStats, StoredPairs};
use crate::simulation::percentile::percentile_us;

const SEED: u64 = 1;
/// Scans of a cell at least.
const SCANS_MIN: u32 = 4;
/// Scans of the long one.
const LONG_SCANS: u32 = 2;

/// What is scanned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScanSeries {
    /// Every degree and the engine's own, at each scan length, one pair a command.
    Degrees,
    /// The long scan without read-ahead, with that of indexes, and with all.
    LongScan,
}

/// Configuration of one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IterkvssdRunConfig {
    /// Length of each value.
    pub value_bytes: u32,
    /// The order in which the pairs were written.
    pub order: WriteOrder,
    /// What is scanned.
    pub series: ScanSeries,
}

/// Summary of the scans with one setting and length.
#[derive(Clone, Debug, PartialEq)]
pub struct ScanCell {
    /// The setting.
    pub read_ahead: ReadAhead,
    /// Pairs of a scan.
    pub length: u32,
    /// Pairs per second.
    pub pairs_per_s: f64,
    /// Time of a Seek: median, 99th percentile, maximum, in microseconds.
    pub seek_us: [f64; 3],
    /// Time of a Next: median, 99th and 99.9th percentile, maximum, in microseconds.
    pub next_us: [f64; 4],
    /// Nexts.
    pub nexts: usize,
    /// Of these, those that took the time of so many flash reads more than the median: one, two or more.
    pub waited: [usize; 2],
}

impl ScanCell {
    fn new(read_ahead: ReadAhead, length: u32, stats: &ScanStats) -> ScanCell {
        let of = |values: &[u32], per_mille: &[usize]| -> Vec<f64> {
            per_mille.iter().map(|&per_mille| percentile_us(values, per_mille)).collect()
        };
        let (seek, next) =
            (of(&stats.seek_ns, &[500, 990, 1000]), of(&stats.next_ns, &[500, 990, 999, 1000]));
        let read_us = parameters::flash_read_us();
        let reads_more = |ns: u32| ((f64::from(ns) / 1e3 - next[0]) / read_us).round() as i64;
        let count = |is: fn(i64) -> bool| stats.next_ns.iter().filter(|&&ns| is(reads_more(ns))).count();
        ScanCell {
            read_ahead,
            length,
            pairs_per_s: stats.pairs_per_s(),
            seek_us: [seek[0], seek[1], seek[2]],
            next_us: [next[0], next[1], next[2], next[3]],
            nexts: stats.next_ns.len(),
            waited: [count(|reads| reads == 1), count(|reads| reads > 1)],
        }
    }
}

/// Settings of the long scan: the baseline, the paper's IterKVSSD-I, and both kinds of prefetch.
pub const LONG_SCAN_SETTINGS: [(&str, ReadAhead); 3] = [
    ("no prefetch", ReadAhead { degree: Some(0), index: false }),
    ("index prefetch", ReadAhead { degree: Some(0), index: true }),
    ("index and value prefetch", ReadAhead { degree: None, index: true }),
];

/// Settings of the value prefetch: each degree, and last the engine's own.
pub fn degree_settings() -> impl Iterator<Item = ReadAhead> {
    DEGREES.into_iter().map(Some).chain([None]).map(|degree| ReadAhead { degree, index: true })
}

impl ExperimentJob for IterkvssdRunConfig {
    type Output = Vec<ScanCell>;

    fn run(&self, durations: &Durations) -> Result<Vec<ScanCell>, String> {
        let count = parameters::pairs_for(self.value_bytes, durations.stored_pairs);
        let pairs = StoredPairs { count, value_bytes: self.value_bytes };
        let experiment = IteratorExperiment::new(pairs, self.order, SEED)?;
        let scan = |length: u32, scans: u32| ScanConfig { scans, length, batch: 1, seed: SEED };
        let (settings, scans): (Vec<ReadAhead>, Vec<ScanConfig>) = match self.series {
            ScanSeries::Degrees => {
                let nexts = durations.requests as u32 / 5;
                let scans = SCAN_LENGTHS.map(|length| scan(length, (nexts / length).max(SCANS_MIN)));
                (degree_settings().collect(), scans.to_vec())
            }
            ScanSeries::LongScan => {
                let settings = LONG_SCAN_SETTINGS.map(|(_, setting)| setting);
                (settings.to_vec(), vec![scan(LONG_SCAN.min(count), LONG_SCANS)])
            }
        };
        let mut cells = Vec::new();
        for setting in settings {
            let stats = experiment.scan(setting, &scans)?;
            let cell = |(scan, stats): (&ScanConfig, &ScanStats)| ScanCell::new(setting, scan.length, stats);
            cells.extend(scans.iter().zip(&stats).map(cell));
        }
        Ok(cells)
    }
}

/// Runner of these configurations.
pub type IterkvssdRunner = JobRunner<IterkvssdRunConfig>;

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Nanos;

    #[test]
    fn a_cell_counts_nexts_by_the_flash_reads_that_they_waited_for() {
        let read_ns = (parameters::flash_read_us() * 1e3) as u32;
        let next_ns =
            [[160_000; 7].as_slice(), &[160_000 + read_ns, 160_000 + 2 * read_ns, 161_000]].concat();
        let stats = ScanStats { seek_ns: vec![400_000], next_ns, pairs: 11, span: Nanos::from_millis(2) };
        let cell = ScanCell::new(ReadAhead { degree: None, index: true }, 11, &stats);
        assert_eq!((cell.nexts, cell.waited), (10, [1, 1]));
        assert_eq!((cell.next_us[0], cell.seek_us, cell.pairs_per_s), (160.0, [400.0; 3], 5_500.0));
    }
}
