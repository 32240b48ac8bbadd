//! RocksDB, driven by its own `db_bench`: a process per workload, embedded, so no operation crosses a network.
//!
//! ```text
//!   ours                                  db_bench
//!   fillseq, fillrandom                   the same, into an empty database
//!   overwrite, readrandom                 the same, on the existing database
//!   readmissing, readwhilewriting         the same
//!   scanrandom                            seekrandom, with --seek_nexts
//!   threads × depth in flight             as many threads, one operation each: db_bench has no depth
//!   ops                                   divided by the threads, rounded up
//! ```
//! Each thread of a db_bench fillseq starts at the first key, so several threads store the same keys. The database is
//! then loaded again with every key before the next workload, without being measured.
//! In: a configuration. Out: results, parsed from the output. Invariant: every write is in a synced log before it counts.

use crate::baselines::baseline::{
    Baseline, BaselineEnv, BaselineError, BaselineInfo, BaselineKind, EmbeddedOptions, last_line,
};
use crate::config::{BenchConfig, StopCondition};
use crate::key_distribution::KeyDistribution;
use crate::recorder::Recorder;
use crate::workload::Workload;
use crate::workload_result::WorkloadResult;
use crate::workload_state::WorkloadProgress;
use octokv_base::Nanos;
use std::process::Command;

/// Block cache beside a node, in bytes: db_bench's default, set explicitly.
const CACHE_BYTES: u64 = 8 << 20;
/// Bits per key of the bloom filter that avoids reads of missing keys; without one every read searches several files.
const FILTER_BITS: u32 = 10;
/// The shortest key length for which db_bench generates different keys.
const KEY_BYTES_MIN: usize = 8;
/// Largest number of db_bench threads.
const THREADS_MAX: usize = 1024;
/// The supported workloads. db_bench has deletions too, but does not report how many keys existed.
const WORKLOADS: [Workload; 7] = [
    Workload::FillSequential,
    Workload::FillRandom,
    Workload::Overwrite,
    Workload::ReadRandom,
    Workload::ReadMissing,
    Workload::ReadWhileWriting,
    Workload::ScanRandom,
];

/// The name of a workload in db_bench.
fn db_bench_name(workload: Workload) -> &'static str {
    match workload {
        Workload::ScanRandom => "seekrandom",
        _ => workload.name(),
    }
}

/// RocksDB in a directory.
pub struct RocksDbBaseline {
    env: BaselineEnv,
    info: BaselineInfo,
    /// Whether the database holds the keys of a fill.
    filled: bool,
}

impl RocksDbBaseline {
    /// Creates the baseline with an empty database.
    pub fn new(env: BaselineEnv) -> RocksDbBaseline {
        RocksDbBaseline { env, info: BaselineInfo::new(BaselineKind::RocksDb), filled: false }
    }

    fn run_db_bench(&mut self, options: &[String], purpose: &str) -> Result<String, BaselineError> {
        let program = BaselineKind::RocksDb.program();
        let mut command = Command::new(program);
        command.arg(format!("--db={}", self.env.directory.display())).args(options);
        self.info.add_command_line(&command, purpose);
        let ran = self.env.processes.run(&mut command);
        let (status, printed) = ran.map_err(|error| BaselineError::Start { program, error })?;
        if !status.success() {
            return Err(BaselineError::Failed { program, last_line: last_line(&printed) });
        }
        self.info.version = parse_version(&printed).or(self.info.version.take());
        if printed.contains("WARNING: Assertions are enabled") {
            self.info
                .add_note("this db_bench is built with its assertions on, which it says makes it slower");
        }
        Ok(printed)
    }

    /// Recreates the database with every key.
    fn preload(&mut self, config: &BenchConfig) -> Result<(), BaselineError> {
        self.env.recreate_directory()?;
        let preload = BenchConfig {
            threads: 1,
            depth: 1,
            stop: StopCondition::Operations(config.keys),
            ..config.clone()
        };
        let mut options = db_bench_options(&preload, Workload::FillSequential, self.env.embedded);
        options.retain(|option| option != "--sync=1" && option != "--histogram=1");
        options.push("--sync=0".to_owned());
        self.run_db_bench(&options, "loads every key, not measured")?;
        self.filled = true;
        Ok(())
    }
}

impl Baseline for RocksDbBaseline {
    fn kind(&self) -> BaselineKind {
        BaselineKind::RocksDb
    }

    fn check_supported(&self, config: &BenchConfig) -> Result<(), String> {
        check_config(config)
    }

    fn run(
        &mut self,
        config: &BenchConfig,
        progress: &mut dyn FnMut(WorkloadProgress),
    ) -> Result<WorkloadResult, BaselineError> {
        let workload = config.workloads[0];
        progress(WorkloadProgress { workload, operations: 0, fraction: 0.0 });
        if workload.is_fill() {
            self.env.recreate_directory()?;
        } else if !self.filled {
            self.preload(config)?;
        }
        let printed = self.run_db_bench(&db_bench_options(config, workload, self.env.embedded), "")?;
        self.filled |= workload == Workload::FillRandom;
        if workload == Workload::FillSequential {
            self.filled = thread_count(config) == 1;
        }
        let printed = DbBenchOutput::parse(&printed, db_bench_name(workload)).ok_or_else(|| {
            BaselineError::Output { program: BaselineKind::RocksDb.program(), last_line: last_line(&printed) }
        })?;
        Ok(printed.workload_result(config, workload))
    }

    fn info(&self) -> BaselineInfo {
        self.info.clone()
    }
}

/// Threads of db_bench for a configuration.
fn thread_count(config: &BenchConfig) -> usize {
    config.threads * config.depth
}

fn check_config(config: &BenchConfig) -> Result<(), String> {
    if let Some(other) = config.workloads.iter().find(|workload| !WORKLOADS.contains(workload)) {
        let names = WORKLOADS.map(Workload::name).join(", ");
        return Err(format!("--workload {}: db_bench does {names}", other.name()));
    }
    let distribution = config.distribution.unwrap_or(KeyDistribution::Uniform);
    let timed_fill =
        matches!(config.stop, StopCondition::Time(_)) && config.workloads.contains(&Workload::FillSequential);
    let whole_seconds = match config.stop {
        StopCondition::Time(span) => span.0.is_multiple_of(1_000_000_000),
        StopCondition::Operations(_) => true,
    };
    let have = [
        (distribution == KeyDistribution::Uniform, "--distribution: db_bench draws keys uniformly"),
        (config.rate.is_none(), "--rate: db_bench begins an operation when the last has ended"),
        (config.warm_up == Nanos::ZERO, "--warm-up: db_bench counts from its first operation"),
        (config.value_sizes.fixed_bytes().is_some(), "--value-size: db_bench has one length"),
        (config.key_sizes.fixed_bytes().is_some(), "--key-size: db_bench has one length"),
        (config.key_sizes.min_bytes() >= KEY_BYTES_MIN, "--key-size: db_bench needs 8 bytes for its keys"),
        (thread_count(config) <= THREADS_MAX, "--threads times --depth: at most 1024 threads of db_bench"),
        (!timed_fill, "--workload fillseq with --seconds: db_bench ends it by --ops alone"),
        (whole_seconds, "--seconds: db_bench supports whole seconds only"),
    ];
    match have.into_iter().find(|(fine, _)| !fine) {
        Some((_, message)) => Err(message.to_owned()),
        None => Ok(()),
    }
}

/// Options of db_bench for one workload, besides the directory.
fn db_bench_options(
    config: &BenchConfig,
    workload: Workload,
    embedded: Option<EmbeddedOptions>,
) -> Vec<String> {
    let reads = workload.reads_values();
    let mut options = vec![
        format!("--benchmarks={}", db_bench_name(workload)),
        format!("--use_existing_db={}", u8::from(!workload.is_fill())),
        format!("--num={}", config.keys),
        format!("--key_size={}", config.key_sizes.max_bytes()),
        format!("--value_size={}", config.value_sizes.max_bytes()),
        format!("--threads={}", thread_count(config)),
    ];
    let counted = if reads { "reads" } else { "writes" };
    options.push(match config.stop {
        StopCondition::Operations(count) => {
            format!("--{counted}={}", count.div_ceil(thread_count(config) as u64))
        }
        StopCondition::Time(span) => format!("--duration={}", span.0 / 1_000_000_000),
    });
    let durability_options =
        ["--sync=1", "--disable_wal=0", "--compression_type=none", "--compression_ratio=1"];
    options.extend(durability_options.map(str::to_owned));
    options.push(format!("--cache_size={}", embedded.map_or(CACHE_BYTES, |own| own.cache_bytes)));
    options.extend(embedded.and_then(|own| Some(format!("--write_buffer_size={}", own.write_buffer_bytes?))));
    if workload == Workload::ScanRandom {
        options.push(format!("--seek_nexts={}", config.scan_length));
    }
    if let (Some(rate), true) = (config.write_rate, workload.has_writer()) {
        // It counts bytes of keys and values.
        let pair = config.key_sizes.max_bytes() + config.value_sizes.max_bytes();
        let bytes_per_second = (rate * pair as f64).ceil() as u64;
        options.push(format!("--benchmark_write_rate_limit={bytes_per_second}"));
    }
    options.push(format!("--bloom_bits={FILTER_BITS}"));
    options.push(format!("--use_direct_reads={}", u8::from(reads || embedded.is_some())));
    options.push(format!("--use_direct_io_for_flush_and_compaction={}", u8::from(embedded.is_some())));
    // Each workload has a seed of its own, so that it does not repeat the keys of the last; threads take the seeds after it,
    // and 0 would take one from the clock.
    let seed = config.seed.wrapping_add((workload as u64) << 20) & i64::MAX as u64;
    options.push(format!("--seed={}", seed.max(1)));
    options.push("--histogram=1".to_owned());
    options
}

/// The results of a workload in the output of db_bench.
#[derive(Clone, Copy, Debug, PartialEq)]
struct DbBenchOutput {
    operations: u64,
    elapsed_s: f64,
    throughput_ops_s: f64,
    mean_us: f64,
    p50_us: f64,
    p99_us: f64,
    p99_9_us: f64,
    max_us: f64,
    /// Fraction of the operations that found their keys.
    hit_rate: f64,
    /// Bytes of keys and values per second, in MiB; `None` if it does not print them.
    mib_s: Option<f64>,
}

impl DbBenchOutput {
    /// Parses the output with `--histogram=1`; `None` if a value is missing.
    fn parse(text: &str, workload: &str) -> Option<DbBenchOutput> {
        let is_head =
            |line: &&str| line.split_ascii_whitespace().next() == Some(workload) && line.contains(" ops/sec");
        // Progress may precede the result on the same line, ended by a carriage return.
        let lines: Vec<&str> = text.split(['\n', '\r']).map(str::trim).collect();
        let at = lines.iter().position(is_head)?;
        let (head, histogram) = (lines[at], lines[at..].join("\n"));
        let after = |word: &str| parse_number(histogram.split_once(word)?.1.split_ascii_whitespace().next()?);
        let before =
            |word: &str| parse_number(head.split_once(word)?.0.split_ascii_whitespace().next_back()?);
        Some(DbBenchOutput {
            operations: before(" operations;")? as u64,
            elapsed_s: before(" seconds ")?,
            throughput_ops_s: before(" ops/sec ")?,
            mean_us: after("Average:")?,
            p50_us: after(" P50:")?,
            p99_us: after(" P99:")?,
            p99_9_us: after(" P99.9:")?,
            max_us: after(" Max:")?,
            hit_rate: parse_hit_rate(head).unwrap_or(1.0),
            mib_s: before(" MB/s"),
        })
    }

    fn workload_result(self, config: &BenchConfig, workload: Workload) -> WorkloadResult {
        let of_config =
            WorkloadResult::new(workload, BaselineKind::RocksDb.name(), config, Recorder::new(Nanos::ZERO));
        let not_found = (self.operations as f64 * (1.0 - self.hit_rate)).round() as u64;
        // It prints no number of pairs, but the bytes of all.
        let (key_bytes, value_bytes) = (config.key_sizes.max_bytes(), config.value_sizes.max_bytes());
        let pair_mib = (key_bytes + value_bytes) as f64 / f64::from(1 << 20);
        let pairs_read = match (workload, self.mib_s) {
            (Workload::ScanRandom, Some(mib_s)) if self.throughput_ops_s > 0.0 => {
                (mib_s / pair_mib / self.throughput_ops_s * self.operations as f64).round() as u64
            }
            _ => 0,
        };
        let moved = if pairs_read > 0 { pairs_read } else { self.operations - not_found };
        let moved_mib = moved as f64 * value_bytes as f64 / f64::from(1 << 20);
        WorkloadResult {
            operations: self.operations,
            not_found,
            pairs_read,
            verified: false,
            elapsed_s: self.elapsed_s,
            throughput_ops_s: self.throughput_ops_s,
            throughput_mib_s: if self.elapsed_s > 0.0 { moved_mib / self.elapsed_s } else { 0.0 },
            latency_us_mean: self.mean_us,
            latency_us_p50: self.p50_us,
            latency_us_p99: self.p99_us,
            latency_us_p99_9: self.p99_9_us,
            latency_us_max: self.max_us,
            ..of_config
        }
    }
}

/// A finite, non-negative number; db_bench prints `nan` if it has counted nothing.
fn parse_number(text: &str) -> Option<f64> {
    text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0)
}

/// The fraction found, as one of its threads reports it: "(632 of 1000 found)".
fn parse_hit_rate(head: &str) -> Option<f64> {
    let words = head.rsplit_once('(')?.1.strip_suffix(" found)")?;
    let (found, of) = words.split_once(" of ")?;
    let part = parse_number(found)? / parse_number(of)?;
    (0.0..=1.0).contains(&part).then_some(part)
}

fn parse_version(printed: &str) -> Option<String> {
    let line = printed.lines().find(|line| line.starts_with("RocksDB:"))?;
    Some(line.split_once("version")?.1.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::size_distribution::SizeDistribution;

    /// Output of db_bench 7.8.3: --benchmarks=fillrandom --num=1000 --value_size=1000 --threads=3 --writes=333.
    const FILL: &str = include_str!("../../tests/fixtures/db_bench-fillrandom.txt");
    /// The same with --benchmarks=readrandom --reads=333 --use_existing_db=1 and another seed.
    const READ: &str = include_str!("../../tests/fixtures/db_bench-readrandom.txt");
    /// The same with --benchmarks=seekrandom --seek_nexts=10 --num=2000 --value_size=100, every key present.
    const SEEK: &str = include_str!("../../tests/fixtures/db_bench-seekrandom.txt");
    /// The same with --benchmarks=readwhilewriting --benchmark_write_rate_limit=1000000.
    const READ_WHILE_WRITING: &str = include_str!("../../tests/fixtures/db_bench-readwhilewriting.txt");

    #[test]
    fn recorded_output_becomes_a_result() {
        let fill = DbBenchOutput::parse(FILL, "fillrandom").unwrap();
        assert_eq!((fill.operations, fill.throughput_ops_s, fill.elapsed_s), (999, 4320.0, 0.231));
        assert_eq!((fill.mean_us, fill.p50_us, fill.p99_us), (689.2903, 593.15, 3568.33));
        assert_eq!((fill.p99_9_us, fill.max_us, fill.hit_rate), (27186.0, 27186.0, 1.0));
        assert_eq!(parse_version(FILL).as_deref(), Some("7.8.3"));
        let config =
            BenchConfig { value_sizes: SizeDistribution::Fixed(1000), threads: 3, ..BenchConfig::default() };
        let result = fill.workload_result(&config, Workload::FillRandom);
        assert_eq!((result.system, result.workload, result.operations), ("rocksdb", "fillrandom", 999));
        assert!(
            (result.throughput_mib_s - 4.12).abs() < 0.01 && !result.verified && result.series.is_empty()
        );

        let read = DbBenchOutput::parse(READ, "readrandom").unwrap();
        let result = read.workload_result(&config, Workload::ReadRandom);
        assert!((0.5..0.8).contains(&read.hit_rate), "{read:?}");
        assert_eq!(result.not_found, (999.0 * (1.0 - read.hit_rate)).round() as u64);
    }

    #[test]
    fn a_scan_has_pairs_and_the_writer_beside_reads_is_not_counted() {
        let config = BenchConfig { value_sizes: SizeDistribution::Fixed(100), ..BenchConfig::default() };
        let seek = DbBenchOutput::parse(SEEK, db_bench_name(Workload::ScanRandom)).unwrap();
        let result = seek.workload_result(&config, Workload::ScanRandom);
        assert_eq!((result.workload, result.operations, result.not_found), ("scanrandom", 999, 0));
        // 10 each, but for those at the end of the keys; the rate has three digits.
        assert!((9_900..=10_020).contains(&result.pairs_read), "{}", result.pairs_read);
        assert!((result.throughput_mib_s - 60.0).abs() < 2.0, "{}", result.throughput_mib_s);

        let read = DbBenchOutput::parse(READ_WHILE_WRITING, "readwhilewriting").unwrap();
        let result = read.workload_result(&config, Workload::ReadWhileWriting);
        assert_eq!((result.operations, result.pairs_read), (999, 0));
    }

    #[test]
    fn truncated_output_gives_no_result() {
        assert_eq!(DbBenchOutput::parse(FILL, "readrandom"), None);
        let end = FILL.find(" P99.9:").unwrap();
        for (at, _) in FILL[..end].char_indices() {
            assert_eq!(DbBenchOutput::parse(&FILL[..at], "fillrandom"), None, "{at}");
        }
        let nothing = FILL.replace("689.2903", "-nan");
        assert_eq!(DbBenchOutput::parse(&nothing, "fillrandom"), None);
        assert_eq!(
            (parse_hit_rate("x (5 of 0 found)"), parse_hit_rate("x (5 of 4 found)"), parse_hit_rate("x")),
            (None, None, None)
        );
    }

    #[test]
    fn every_option_is_passed_and_operations_are_divided() {
        let config = BenchConfig {
            threads: 3,
            depth: 2,
            stop: StopCondition::Operations(100),
            ..BenchConfig::default()
        };
        let has = |options: &[String], want: &[&str]| {
            want.iter()
                .for_each(|want| assert!(options.iter().any(|option| option == want), "{want} {options:?}"));
        };
        let fill = db_bench_options(&config, Workload::FillRandom, None);
        has(&fill, &["--threads=6", "--writes=17", "--sync=1", "--disable_wal=0", "--use_existing_db=0"]);
        has(&fill, &["--compression_type=none", "--cache_size=8388608", "--use_direct_reads=0"]);
        let timed = BenchConfig { stop: StopCondition::Time(Nanos::from_secs(7)), ..config.clone() };
        let read = db_bench_options(&timed, Workload::ReadRandom, None);
        has(&read, &["--duration=7", "--use_direct_reads=1", "--use_existing_db=1", "--sync=1"]);
        let ranges = BenchConfig { scan_length: 1000, write_rate: Some(100.0), ..config.clone() };
        let scan = db_bench_options(&ranges, Workload::ScanRandom, None);
        has(&scan, &["--benchmarks=seekrandom", "--seek_nexts=1000", "--reads=17"]);
        let beside = db_bench_options(&ranges, Workload::ReadWhileWriting, None);
        has(
            &beside,
            &["--benchmarks=readwhilewriting", "--benchmark_write_rate_limit=1640000", "--threads=6"],
        );
        assert!(!scan.iter().any(|option| option.contains("write_rate")), "{scan:?}");
    }

    #[test]
    fn beside_an_engine_in_this_process_it_gets_the_same_memory_and_direct_io() {
        let embedded = EmbeddedOptions { cache_bytes: 5 << 20, write_buffer_bytes: Some(1 << 20) };
        for workload in [Workload::FillRandom, Workload::ReadRandom] {
            let options = db_bench_options(&BenchConfig::default(), workload, Some(embedded));
            for want in [
                "--cache_size=5242880",
                "--write_buffer_size=1048576",
                "--use_direct_reads=1",
                "--use_direct_io_for_flush_and_compaction=1",
                "--sync=1",
            ] {
                assert!(options.iter().any(|option| option == want), "{want} {options:?}");
            }
        }
    }

    #[test]
    fn unsupported_configs_are_rejected_with_a_reason() {
        let config = || BenchConfig { workloads: vec![Workload::Overwrite], ..BenchConfig::default() };
        let seconds_of = |seconds: f64| StopCondition::Time(Nanos((seconds * 1e9) as u64));
        let table = [
            (config(), ""),
            (BenchConfig { stop: seconds_of(2.0), ..config() }, ""),
            (BenchConfig { workloads: vec![Workload::YcsbA], ..config() }, "--workload ycsb-a"),
            (BenchConfig { distribution: Some(KeyDistribution::Zipf), ..config() }, "--distribution"),
            (BenchConfig { rate: Some(5.0), ..config() }, "--rate"),
            (BenchConfig { warm_up: Nanos(1), ..config() }, "--warm-up"),
            (
                BenchConfig { value_sizes: SizeDistribution::Uniform { min: 1, max: 2 }, ..config() },
                "--value-size",
            ),
            (BenchConfig { key_sizes: SizeDistribution::Fixed(7), ..config() }, "--key-size"),
            (BenchConfig { threads: 100, depth: 100, ..config() }, "--threads"),
            (BenchConfig { stop: seconds_of(0.5), ..config() }, "whole seconds"),
            (
                BenchConfig { stop: seconds_of(1.0), workloads: vec![Workload::FillSequential], ..config() },
                "fillseq with",
            ),
        ];
        for (config, want) in table {
            let reason = check_config(&config).err().unwrap_or_default();
            assert!(reason.contains(want) && reason.is_empty() == want.is_empty(), "{want}: {reason}");
        }
    }
}
