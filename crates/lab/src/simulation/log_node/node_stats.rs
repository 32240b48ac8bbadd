//! Results of a load on the simulated node: of each drive, and of all.
//!
//! In: moments and latencies. Out: throughput, latencies, and the imbalance of the drives.

use crate::simulation::log_store::load_stats::LoadStats;
use crate::simulation::percentile::percentile_us;
use octokv_base::Nanos;
use octokv_engine::SwapReport;

/// A load between its warm-up and its end.
#[derive(Clone, Debug, Default)]
pub struct NodeStats {
    /// By drive: its requests, commands and dies. The times of cores are not by drive.
    pub drives: Vec<LoadStats>,
    /// By drive: what swapping had done with its keys at the begin.
    pub swaps_before: Vec<SwapReport>,
    /// The same at the end.
    pub swaps_after: Vec<SwapReport>,
    /// Time that all cores worked.
    pub core_time: Nanos,
    /// The times of requests between their arrival at the node and their end there.
    pub node_latency_ns: Vec<u32>,
}

impl NodeStats {
    /// Requests per second of all drives.
    pub fn per_second(&self) -> f64 {
        self.drives.iter().map(LoadStats::per_second).sum()
    }

    /// Requests of all drives.
    pub fn requests(&self) -> f64 {
        self.drives.iter().map(LoadStats::requests).sum()
    }

    /// Seconds of all storage cores for a request: those of commands, not of the network.
    pub fn core_seconds_per_request(&self) -> f64 {
        self.core_time.as_secs_f64() / self.requests()
    }

    /// Latencies of all requests, in nanoseconds.
    fn latencies(&self) -> Vec<u32> {
        self.drives.iter().flat_map(|drive| drive.latency_ns.iter().flatten().copied()).collect()
    }

    /// The mean latency in microseconds.
    pub fn mean_us(&self) -> f64 {
        self.latencies().iter().map(|&ns| f64::from(ns)).sum::<f64>() / self.requests() / 1e3
    }

    /// The latency that so many of 1,000 requests do not exceed, in microseconds.
    pub fn percentile_us(&self, per_mille: usize) -> f64 {
        percentile_us(&self.latencies(), per_mille)
    }

    /// The mean time of a request in the node, in microseconds.
    pub fn node_mean_us(&self) -> f64 {
        self.node_latency_ns.iter().map(|&ns| f64::from(ns)).sum::<f64>()
            / self.node_latency_ns.len() as f64
            / 1e3
    }

    /// The time in the node that so many of 1,000 requests do not exceed, in microseconds.
    pub fn node_percentile_us(&self, per_mille: usize) -> f64 {
        percentile_us(&self.node_latency_ns, per_mille)
    }

    /// Requests for keys of the drive that has most, in parts of the mean of all.
    pub fn imbalance(&self) -> f64 {
        most_to_mean(self.drives.iter().map(LoadStats::requests))
    }

    /// The parts of their time that the dies of each drive worked.
    pub fn die_shares(&self) -> Vec<f64> {
        self.drives.iter().map(LoadStats::die_share).collect()
    }

    /// The dies' time of the busiest drive, in parts of the mean of all.
    pub fn die_imbalance(&self) -> f64 {
        most_to_mean(self.drives.iter().map(LoadStats::die_share))
    }

    /// A number of all drives, for a request.
    pub fn for_a_request(&self, number: fn(&LoadStats) -> f64) -> f64 {
        self.drives.iter().map(number).sum::<f64>() / self.requests()
    }

    /// Puts that were stored in the swap regions of other drives.
    pub fn swapped_puts(&self) -> u64 {
        let sum = |swaps: &[SwapReport]| swaps.iter().map(|of| of.swapped).sum::<u64>();
        sum(&self.swaps_after) - sum(&self.swaps_before)
    }

    /// The keys in these regions at the end.
    pub fn swapped_keys(&self) -> usize {
        self.swaps_after.iter().map(|of| of.keys).sum()
    }
}

/// The largest number in parts of their mean.
fn most_to_mean(numbers: impl Iterator<Item = f64> + Clone) -> f64 {
    numbers.clone().fold(0.0, f64::max) * numbers.clone().count() as f64 / numbers.sum::<f64>()
}
