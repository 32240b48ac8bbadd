//! Trials of Host KVS and OctoKV, and their results.
//!
//! In: selected figures; the output of `octokv bench`. Out: trials, each once; puts and gets of a trial.

use crate::output_parser::parse_bench_results;
use crate::simulation::parameters::{HEAVY_THREADS, LIGHT_THREADS, MEDIUM_THREADS};

/// A compared system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComparedSystem {
    /// The engine in the client, on files, with an fsync for each put.
    HostKvs,
    /// Key Value commands; a put is acknowledged after a flush has made it durable.
    OctoKv,
    /// The same, acknowledged when the write to the drive completes, as in the paper.
    OctoKvNoFlush,
    /// The engine in the client, on a block namespace through our own initiator: Host KVS without an operating system.
    Blocks,
}

impl ComparedSystem {
    /// Its letter in the guest's script.
    pub fn script_letter(self) -> char {
        match self {
            ComparedSystem::HostKvs => 'h',
            ComparedSystem::OctoKv | ComparedSystem::OctoKvNoFlush => 'k',
            ComparedSystem::Blocks => 'b',
        }
    }

    /// Name in series.
    pub fn name(self) -> &'static str {
        match self {
            ComparedSystem::HostKvs => "Host KVS",
            ComparedSystem::OctoKv => "OctoKV",
            ComparedSystem::OctoKvNoFlush => "OctoKV without a flush",
            ComparedSystem::Blocks => "the engine here on blocks",
        }
    }
}

/// One trial: every key is stored once, then as many keys are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostKvsTrial {
    /// The system.
    pub system: ComparedSystem,
    /// Synchronous threads.
    pub threads: usize,
    /// Value length in units of 1,024 bytes.
    pub kib: usize,
}

/// Value lengths of Figures 4 and 5; the text names 16 KiB alone.
pub const SIZES_KIB: [usize; 3] = [1, 4, 16];
/// The paper's own value length.
pub const PAPER_VALUE_KIB: usize = 16;
/// Loads of Figure 6, in threads: one, and the paper's.
pub const TRIAL_THREADS: [usize; 4] = [1, LIGHT_THREADS, MEDIUM_THREADS, HEAVY_THREADS];

/// The trials of figures: by value length (4 and 5), by load (6). Systems alternate, so that a change of the machine's
/// speed affects all of them.
pub fn trials_for(by_size: bool, by_load: bool) -> Vec<HostKvsTrial> {
    let mut all: Vec<HostKvsTrial> = Vec::new();
    let mut add = |system, threads, kib| {
        let trial = HostKvsTrial { system, threads, kib };
        if !all.contains(&trial) {
            all.push(trial);
        }
    };
    if by_size {
        for kib in SIZES_KIB {
            add(ComparedSystem::HostKvs, LIGHT_THREADS, kib);
            add(ComparedSystem::OctoKv, LIGHT_THREADS, kib);
        }
        add(ComparedSystem::OctoKvNoFlush, LIGHT_THREADS, PAPER_VALUE_KIB);
        for threads in [1, LIGHT_THREADS] {
            add(ComparedSystem::HostKvs, threads, PAPER_VALUE_KIB);
            add(ComparedSystem::Blocks, threads, PAPER_VALUE_KIB);
        }
    }
    if by_load {
        for threads in TRIAL_THREADS {
            add(ComparedSystem::HostKvs, threads, PAPER_VALUE_KIB);
            add(ComparedSystem::OctoKv, threads, PAPER_VALUE_KIB);
        }
    }
    all
}

/// Breakdown of the mean operation, in microseconds: the response time, and the time in file system calls.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OpBreakdown {
    /// The response time.
    pub mean_us: f64,
    /// Operations per second.
    pub ops_s: f64,
    /// Waiting for the lock of the file.
    pub wait_us: f64,
    /// In pread.
    pub read_us: f64,
    /// In pwrite.
    pub write_us: f64,
    /// In fsync.
    pub sync_us: f64,
}

impl OpBreakdown {
    /// Time in system calls.
    pub fn syscalls_us(&self) -> f64 {
        self.read_us + self.write_us + self.sync_us
    }
}

/// Result of one trial.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PutGetSample {
    /// Its puts.
    pub put: OpBreakdown,
    /// Its gets.
    pub get: OpBreakdown,
}

/// Result of one trial, or why it failed.
pub type TrialResult = Result<PutGetSample, String>;

/// Parses the output of `octokv bench --workload fillseq,readrandom --json -`.
///
/// # Errors
/// A message with the error line of the output if a value is missing or a key was not found.
pub fn parse_bench_ops(text: &str) -> TrialResult {
    parse_bench_results(text, |results| {
        let of = |workload: &str| {
            let result = results.iter().find(|result| result["workload"] == workload)?;
            // A read of a missing key is not comparable.
            if result["not_found"] != 0 {
                return None;
            }
            let spent = |name: &str| result[name].as_f64().unwrap_or(0.0);
            Some(OpBreakdown {
                mean_us: result["latency_us_mean"].as_f64()?,
                ops_s: result["throughput_ops_s"].as_f64()?,
                wait_us: spent("file_wait_us_mean"),
                read_us: spent("file_read_us_mean"),
                write_us: spent("file_write_us_mean"),
                sync_us: spent("file_sync_us_mean"),
            })
        };
        Some(PutGetSample { put: of("fillseq")?, get: of("readrandom")? })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const BENCH: &str = r#"
fillseq: 40 %, 3 operations
{
  "schema": "octokv-bench/3",
  "results": [
    { "workload": "fillseq", "not_found": 0, "latency_us_mean": 800.5, "throughput_ops_s": 20.0,
      "file_wait_us_mean": 10.0, "file_read_us_mean": 0.5, "file_write_us_mean": 90.0, "file_sync_us_mean": 600.0 },
    { "workload": "readrandom", "not_found": 0, "latency_us_mean": 50.0, "throughput_ops_s": 300.0,
      "file_wait_us_mean": null, "file_sync_us_mean": null }
  ]
}
"#;

    #[test]
    fn a_bench_report_becomes_puts_and_gets_with_their_syscalls() {
        let PutGetSample { put, get } = parse_bench_ops(BENCH).unwrap();
        assert_eq!((put.mean_us, put.ops_s, put.wait_us, put.syscalls_us()), (800.5, 20.0, 10.0, 690.5));
        assert_eq!((get.mean_us, get.ops_s, get.syscalls_us()), (50.0, 300.0, 0.0));
        let missing = BENCH.replace(r#""readrandom", "not_found": 0"#, r#""readrandom", "not_found": 1"#);
        for wrong in ["", "{\n}", &BENCH[..BENCH.len() - 4], &missing, "octokv: refused\n"] {
            assert!(parse_bench_ops(wrong).is_err(), "{wrong}");
        }
        assert!(parse_bench_ops("octokv: refused\n").unwrap_err().ends_with("octokv: refused"));
    }

    #[test]
    fn every_trial_is_listed_once() {
        let both = trials_for(true, true);
        for (number, trial) in both.iter().enumerate() {
            assert!(!both[..number].contains(trial), "{trial:?}");
        }
        for part in [trials_for(true, false), trials_for(false, true)] {
            assert!(part.len() < both.len() && part.iter().all(|trial| both.contains(trial)));
        }
        assert!(trials_for(false, false).is_empty());
    }
}
