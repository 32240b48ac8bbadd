//! What a phase of load did: its requests, the commands and the dies of the drive, the engine's logs, the core.
//!
//! In: two moments and the latencies between them. Out: rates, shares and means of the phase.

use crate::simulation::ssd_device::SsdCommands;
use octokv_base::Nanos;
use octokv_device::ssd_model::SsdStatistics;
use octokv_engine::{EngineStatistics, LogStatistics};

/// The counters of all parts at one moment.
#[derive(Clone, Debug, Default)]
pub struct Moment {
    /// The moment.
    pub at: Nanos,
    /// The drive's commands.
    pub commands: SsdCommands,
    /// The drive's dies.
    pub ssd: SsdStatistics,
    /// The engine.
    pub engine: EngineStatistics,
    /// Time that the core has worked.
    pub core: Nanos,
}

/// A phase: what lies between two moments.
#[derive(Clone, Debug, Default)]
pub struct LoadStats {
    /// Its begin.
    pub before: Moment,
    /// Its end.
    pub after: Moment,
    /// Latencies of gets, puts and deletes, in nanoseconds.
    pub latency_ns: [Vec<u32>; 3],
}

impl LoadStats {
    /// The requests of all kinds.
    pub fn requests(&self) -> f64 {
        self.latency_ns.iter().map(Vec::len).sum::<usize>() as f64
    }

    /// Its length in seconds.
    pub fn seconds(&self) -> f64 {
        (self.after.at - self.before.at).as_secs_f64()
    }

    /// Requests per second.
    pub fn per_second(&self) -> f64 {
        self.requests() / self.seconds()
    }

    /// The mean latency of gets (0), puts (1) or deletes (2), in microseconds; NaN without one.
    pub fn mean_us(&self, kind: usize) -> f64 {
        let latencies = &self.latency_ns[kind];
        latencies.iter().map(|&ns| f64::from(ns)).sum::<f64>() / latencies.len() as f64 / 1e3
    }

    /// Commands of the drive.
    pub fn commands(&self) -> f64 {
        let sum = |commands: SsdCommands| commands.reads + commands.writes + commands.others;
        (sum(self.after.commands) - sum(self.before.commands)) as f64
    }

    /// Bytes that the host wrote.
    pub fn written_bytes(&self) -> f64 {
        (self.after.commands.written_bytes - self.before.commands.written_bytes) as f64
    }

    /// Page reads of dies for the host; those of the drive's garbage collection are not among them, as far as it moved pages.
    pub fn die_reads(&self) -> f64 {
        (self.after.ssd.reads - self.before.ssd.reads) as f64
    }

    /// The part of the dies' time that they worked.
    pub fn die_share(&self) -> f64 {
        let busy = |moment: &Moment| moment.ssd.die_busy.iter().map(|busy| busy.as_secs_f64()).sum::<f64>();
        let dies = self.after.ssd.die_busy.len() as f64;
        (busy(&self.after) - busy(&self.before)) / dies / self.seconds()
    }

    /// The part of its time that the core worked.
    pub fn core_share(&self) -> f64 {
        (self.after.core - self.before.core).as_secs_f64() / self.seconds()
    }

    /// Pages that flash programmed, for each that the host wrote.
    pub fn flash_amplification(&self) -> f64 {
        let [before, after] = [&self.before.ssd, &self.after.ssd];
        let written = after.host_pages_written - before.host_pages_written;
        (after.flash_pages_written - before.flash_pages_written) as f64 / written.max(1) as f64
    }

    /// A counter of the engine's logs.
    pub fn counted(&self, counter: fn(&LogStatistics) -> u64) -> f64 {
        (counter(&self.after_logs()) - counter(&self.before.engine.log.unwrap_or_default())) as f64
    }

    /// The state of the engine's logs at the end.
    pub fn after_logs(&self) -> LogStatistics {
        self.after.engine.log.unwrap_or_default()
    }

    /// The part of all chunks that live data takes at the end.
    pub fn fill(&self) -> f64 {
        let logs = self.after_logs();
        self.after.engine.used_bytes as f64 / (logs.chunks * logs.chunk_bytes) as f64
    }

    /// The mean length of the segment images at the end, in bytes.
    pub fn image_bytes(&self) -> f64 {
        let logs = self.after_logs();
        logs.keys.live_bytes as f64 / logs.segments as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_between_the_two_moments() {
        let moment = |at: u64, reads: u64, busy: [u64; 2]| Moment {
            at: Nanos::from_micros(at),
            commands: SsdCommands { reads, writes: 2 * reads, ..SsdCommands::default() },
            ssd: SsdStatistics {
                die_busy: busy.map(Nanos::from_micros).to_vec(),
                reads,
                host_pages_written: reads,
                flash_pages_written: 3 * reads,
                ..SsdStatistics::default()
            },
            core: Nanos(at * 250),
            ..Moment::default()
        };
        let latency_ns = [vec![100_000, 300_000], vec![50_000], vec![]];
        let stats = LoadStats {
            before: moment(1_000, 10, [500, 0]),
            after: moment(2_000, 14, [900, 600]),
            latency_ns,
        };
        assert_eq!((stats.requests(), stats.per_second()), (3.0, 3_000.0));
        assert_eq!((stats.mean_us(0), stats.mean_us(1), stats.mean_us(2).is_nan()), (200.0, 50.0, true));
        assert_eq!((stats.commands(), stats.die_reads(), stats.flash_amplification()), (12.0, 4.0, 3.0));
        assert!((stats.die_share() - 0.5).abs() < 1e-12 && (stats.core_share() - 0.25).abs() < 1e-12);
    }
}
