//! RocksDB by its own `db_bench`, a process per workload, embedded: no operation crosses a network.
//!
//! ```text
//!   ours                                  db_bench
//!   fillseq, fillrandom                   the same, into an empty database
//!   overwrite, readrandom                 the same, on the database that is there
//!   readmissing                           the same
//!   threads × depth in flight             as many threads, one operation each: db_bench has no other way
//!   ops                                   divided by the threads, rounded up
//! ```
//! Each thread of a db_bench fillseq begins at the first key, so that several store the same ones. Before the next
//! workload the database is then made anew with every key, without being measured.
//! In: a plan. Out: figures, from what db_bench prints. Invariant: every write is in a synced log before it counts.

use crate::baselines::{Account, Error, Ground, Kind, Peer, last_line};
use crate::config::{End, Plan};
use crate::key_distribution::Distribution;
use crate::recorder::Tally;
use crate::report::Figures;
use crate::runner::Progress;
use crate::workload::Workload;
use octokv_base::Nanos;
use std::process::Command;

/// The block cache: db_bench's own default, said so that nobody has to know it.
const CACHE_BYTES: usize = 8 << 20;
/// Bits a key of the filter that spares reads of missing keys; without one every read looks into several files.
const FILTER_BITS: u32 = 10;
/// The shortest key of which db_bench makes different ones.
const KEY_BYTES_MIN: usize = 8;
/// The most threads that are started.
const THREADS_MAX: usize = 1024;
/// The workloads that db_bench has, too. It deletes, but does not say of how many keys there were any.
const WORKLOADS: [Workload; 5] = [
    Workload::FillSequential,
    Workload::FillRandom,
    Workload::Overwrite,
    Workload::ReadRandom,
    Workload::ReadMissing,
];

/// RocksDB in a place.
pub struct RocksDb {
    ground: Ground,
    account: Account,
    /// Whether the database holds what a fill leaves.
    filled: bool,
}

impl RocksDb {
    /// With nothing in it.
    pub fn new(ground: Ground) -> RocksDb {
        RocksDb { ground, account: Account::new(Kind::RocksDb), filled: false }
    }

    fn db_bench(&mut self, options: &[String], purpose: &str) -> Result<String, Error> {
        let program = Kind::RocksDb.program();
        let mut command = Command::new(program);
        command.arg(format!("--db={}", self.ground.directory.display())).args(options);
        self.account.ran(&command, purpose);
        let ran = self.ground.children.run(&mut command);
        let (status, printed) = ran.map_err(|error| Error::Start { program, error })?;
        if !status.success() {
            return Err(Error::Ended { program, said: last_line(&printed) });
        }
        self.account.version = version(&printed).or(self.account.version.take());
        if printed.contains("WARNING: Assertions are enabled") {
            self.account.note("this db_bench is built with its assertions on, which it says makes it slower");
        }
        Ok(printed)
    }

    /// Makes the database anew with every key.
    fn load(&mut self, plan: &Plan) -> Result<(), Error> {
        self.ground.empty_directory()?;
        let load = Plan { threads: 1, depth: 1, end: End::Operations(plan.keys), ..plan.clone() };
        let mut options = options(&load, Workload::FillSequential);
        options.retain(|option| option != "--sync=1" && option != "--histogram=1");
        options.push("--sync=0".to_owned());
        self.db_bench(&options, "loads every key, not measured")?;
        self.filled = true;
        Ok(())
    }
}

impl Peer for RocksDb {
    fn kind(&self) -> Kind {
        Kind::RocksDb
    }

    fn check(&self, plan: &Plan) -> Result<(), String> {
        check(plan)
    }

    fn run(&mut self, plan: &Plan, progress: &mut dyn FnMut(Progress)) -> Result<Figures, Error> {
        let workload = plan.workloads[0];
        progress(Progress { workload, operations: 0, part: 0.0 });
        if is_fill(workload) {
            self.ground.empty_directory()?;
        } else if !self.filled {
            self.load(plan)?;
        }
        let printed = self.db_bench(&options(plan, workload), "")?;
        self.filled |= workload == Workload::FillRandom;
        if workload == Workload::FillSequential {
            self.filled = streams(plan) == 1;
        }
        let printed = Printed::read(&printed, workload.name())
            .ok_or_else(|| Error::Output { program: Kind::RocksDb.program(), said: last_line(&printed) })?;
        Ok(printed.figures(plan, workload))
    }

    fn account(&self) -> Account {
        self.account.clone()
    }
}

fn is_fill(workload: Workload) -> bool {
    matches!(workload, Workload::FillSequential | Workload::FillRandom)
}

/// Threads of db_bench for a plan.
fn streams(plan: &Plan) -> usize {
    plan.threads * plan.depth
}

fn check(plan: &Plan) -> Result<(), String> {
    if let Some(other) = plan.workloads.iter().find(|workload| !WORKLOADS.contains(workload)) {
        let names = WORKLOADS.map(Workload::name).join(", ");
        return Err(format!("--workload {}: db_bench does {names}", other.name()));
    }
    let drawn = plan.distribution.unwrap_or(Distribution::Uniform);
    let timed_fill = matches!(plan.end, End::Time(_)) && plan.workloads.contains(&Workload::FillSequential);
    let whole_seconds = match plan.end {
        End::Time(span) => span.0.is_multiple_of(1_000_000_000),
        End::Operations(_) => true,
    };
    let have = [
        (drawn == Distribution::Uniform, "--distribution: db_bench draws keys uniformly"),
        (plan.rate.is_none(), "--rate: db_bench begins an operation when the last has ended"),
        (plan.warm_up == Nanos::ZERO, "--warm-up: db_bench counts from its first operation"),
        (plan.value_sizes.fixed().is_some(), "--value-size: db_bench has one length"),
        (plan.key_sizes.fixed().is_some(), "--key-size: db_bench has one length"),
        (plan.key_sizes.least() >= KEY_BYTES_MIN, "--key-size: db_bench needs 8 bytes for its keys"),
        (streams(plan) <= THREADS_MAX, "--threads times --depth: at most 1024 threads of db_bench"),
        (!timed_fill, "--workload fillseq with --seconds: db_bench ends it by --ops alone"),
        (whole_seconds, "--seconds: db_bench takes whole seconds"),
    ];
    match have.into_iter().find(|(fine, _)| !fine) {
        Some((_, what)) => Err(what.to_owned()),
        None => Ok(()),
    }
}

/// What is given to db_bench for one workload, beside the place.
fn options(plan: &Plan, workload: Workload) -> Vec<String> {
    let reads = workload.reads();
    let mut options = vec![
        format!("--benchmarks={}", workload.name()),
        format!("--use_existing_db={}", u8::from(!is_fill(workload))),
        format!("--num={}", plan.keys),
        format!("--key_size={}", plan.key_sizes.most()),
        format!("--value_size={}", plan.value_sizes.most()),
        format!("--threads={}", streams(plan)),
    ];
    let counted = if reads { "reads" } else { "writes" };
    options.push(match plan.end {
        End::Operations(count) => format!("--{counted}={}", count.div_ceil(streams(plan) as u64)),
        End::Time(span) => format!("--duration={}", span.0 / 1_000_000_000),
    });
    let promise = ["--sync=1", "--disable_wal=0", "--compression_type=none", "--compression_ratio=1"];
    options.extend(promise.map(str::to_owned));
    options.push(format!("--cache_size={CACHE_BYTES}"));
    options.push(format!("--bloom_bits={FILTER_BITS}"));
    options.push(format!("--use_direct_reads={}", u8::from(reads)));
    options.push("--use_direct_io_for_flush_and_compaction=0".to_owned());
    // The same seed would draw the keys of the last workload again, and each thread may take one after it; 0 would
    // take one from the clock.
    let seed = plan.seed.wrapping_add((workload as u64) << 20) & i64::MAX as u64;
    options.push(format!("--seed={}", seed.max(1)));
    options.push("--histogram=1".to_owned());
    options
}

/// What db_bench printed of a workload.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Printed {
    operations: u64,
    elapsed_s: f64,
    throughput_ops_s: f64,
    mean_us: f64,
    p50_us: f64,
    p99_us: f64,
    p99_9_us: f64,
    max_us: f64,
    /// Of the operations, the part that found their keys.
    found: f64,
}

impl Printed {
    /// The figures with `--histogram=1`; none where something is missing.
    fn read(text: &str, workload: &str) -> Option<Printed> {
        let is_head =
            |line: &&str| line.split_ascii_whitespace().next() == Some(workload) && line.contains(" ops/sec");
        // Progress may stand before it on the same line, ended by a carriage return.
        let lines: Vec<&str> = text.split(['\n', '\r']).map(str::trim).collect();
        let at = lines.iter().position(is_head)?;
        let (head, histogram) = (lines[at], lines[at..].join("\n"));
        let after = |word: &str| number(histogram.split_once(word)?.1.split_ascii_whitespace().next()?);
        let before = |word: &str| number(head.split_once(word)?.0.split_ascii_whitespace().next_back()?);
        Some(Printed {
            operations: before(" operations;")? as u64,
            elapsed_s: before(" seconds ")?,
            throughput_ops_s: before(" ops/sec ")?,
            mean_us: after("Average:")?,
            p50_us: after(" P50:")?,
            p99_us: after(" P99:")?,
            p99_9_us: after(" P99.9:")?,
            max_us: after(" Max:")?,
            found: found(head).unwrap_or(1.0),
        })
    }

    fn figures(self, plan: &Plan, workload: Workload) -> Figures {
        let of_plan = Figures::new(workload, Kind::RocksDb.name(), plan, Tally::new(Nanos::ZERO));
        let not_found = (self.operations as f64 * (1.0 - self.found)).round() as u64;
        let moved = self.operations - not_found;
        let moved_mib = moved as f64 * plan.value_sizes.most() as f64 / f64::from(1 << 20);
        Figures {
            operations: self.operations,
            not_found,
            verified: false,
            elapsed_s: self.elapsed_s,
            throughput_ops_s: self.throughput_ops_s,
            throughput_mib_s: if self.elapsed_s > 0.0 { moved_mib / self.elapsed_s } else { 0.0 },
            latency_us_mean: self.mean_us,
            latency_us_p50: self.p50_us,
            latency_us_p99: self.p99_us,
            latency_us_p99_9: self.p99_9_us,
            latency_us_max: self.max_us,
            ..of_plan
        }
    }
}

/// A number that is one: db_bench prints others when it has counted nothing.
fn number(text: &str) -> Option<f64> {
    text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0)
}

/// The part that was found, as one of its threads says: "(632 of 1000 found)".
fn found(head: &str) -> Option<f64> {
    let words = head.rsplit_once('(')?.1.strip_suffix(" found)")?;
    let (found, of) = words.split_once(" of ")?;
    let part = number(found)? / number(of)?;
    (0.0..=1.0).contains(&part).then_some(part)
}

fn version(printed: &str) -> Option<String> {
    let line = printed.lines().find(|line| line.starts_with("RocksDB:"))?;
    Some(line.split_once("version")?.1.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::size_distribution::Sizes;

    /// What db_bench 7.8.3 printed: --benchmarks=fillrandom --num=1000 --value_size=1000 --threads=3 --writes=333.
    const FILL: &str = include_str!("../../tests/fixtures/db_bench-fillrandom.txt");
    /// The same with --benchmarks=readrandom --reads=333 --use_existing_db=1 and another seed.
    const READ: &str = include_str!("../../tests/fixtures/db_bench-readrandom.txt");

    #[test]
    fn recorded_output_becomes_figures() {
        let fill = Printed::read(FILL, "fillrandom").unwrap();
        assert_eq!((fill.operations, fill.throughput_ops_s, fill.elapsed_s), (999, 4320.0, 0.231));
        assert_eq!((fill.mean_us, fill.p50_us, fill.p99_us), (689.2903, 593.15, 3568.33));
        assert_eq!((fill.p99_9_us, fill.max_us, fill.found), (27186.0, 27186.0, 1.0));
        assert_eq!(version(FILL).as_deref(), Some("7.8.3"));
        let plan = Plan { value_sizes: Sizes::Fixed(1000), threads: 3, ..Plan::default() };
        let figures = fill.figures(&plan, Workload::FillRandom);
        assert_eq!((figures.system, figures.workload, figures.operations), ("rocksdb", "fillrandom", 999));
        assert!(
            (figures.throughput_mib_s - 4.12).abs() < 0.01 && !figures.verified && figures.series.is_empty()
        );

        let read = Printed::read(READ, "readrandom").unwrap();
        let figures = read.figures(&plan, Workload::ReadRandom);
        assert!((0.5..0.8).contains(&read.found), "{read:?}");
        assert_eq!(figures.not_found, (999.0 * (1.0 - read.found)).round() as u64);
    }

    #[test]
    fn output_without_figures_is_none_wherever_it_is_cut() {
        assert_eq!(Printed::read(FILL, "readrandom"), None);
        let end = FILL.find(" P99.9:").unwrap();
        for (at, _) in FILL[..end].char_indices() {
            assert_eq!(Printed::read(&FILL[..at], "fillrandom"), None, "{at}");
        }
        let nothing = FILL.replace("689.2903", "-nan");
        assert_eq!(Printed::read(&nothing, "fillrandom"), None);
        assert_eq!((found("x (5 of 0 found)"), found("x (5 of 4 found)"), found("x")), (None, None, None));
    }

    #[test]
    fn every_option_is_given_and_operations_are_divided() {
        let plan = Plan { threads: 3, depth: 2, end: End::Operations(100), ..Plan::default() };
        let has = |options: &[String], want: &[&str]| {
            want.iter()
                .for_each(|want| assert!(options.iter().any(|option| option == want), "{want} {options:?}"));
        };
        let fill = options(&plan, Workload::FillRandom);
        has(&fill, &["--threads=6", "--writes=17", "--sync=1", "--disable_wal=0", "--use_existing_db=0"]);
        has(&fill, &["--compression_type=none", "--cache_size=8388608", "--use_direct_reads=0"]);
        let timed = Plan { end: End::Time(Nanos::from_secs(7)), ..plan.clone() };
        let read = options(&timed, Workload::ReadRandom);
        has(&read, &["--duration=7", "--use_direct_reads=1", "--use_existing_db=1", "--sync=1"]);
    }

    #[test]
    fn what_db_bench_cannot_do_is_told() {
        let plan = || Plan { workloads: vec![Workload::Overwrite], ..Plan::default() };
        let second = |seconds: f64| End::Time(Nanos((seconds * 1e9) as u64));
        let table = [
            (plan(), ""),
            (Plan { end: second(2.0), ..plan() }, ""),
            (Plan { workloads: vec![Workload::YcsbA], ..plan() }, "--workload ycsb-a"),
            (Plan { distribution: Some(Distribution::Zipf), ..plan() }, "--distribution"),
            (Plan { rate: Some(5.0), ..plan() }, "--rate"),
            (Plan { warm_up: Nanos(1), ..plan() }, "--warm-up"),
            (Plan { value_sizes: Sizes::Uniform { least: 1, most: 2 }, ..plan() }, "--value-size"),
            (Plan { key_sizes: Sizes::Fixed(7), ..plan() }, "--key-size"),
            (Plan { threads: 100, depth: 100, ..plan() }, "--threads"),
            (Plan { end: second(0.5), ..plan() }, "whole seconds"),
            (Plan { end: second(1.0), workloads: vec![Workload::FillSequential], ..plan() }, "fillseq with"),
        ];
        for (plan, want) in table {
            let said = check(&plan).err().unwrap_or_default();
            assert!(said.contains(want) && said.is_empty() == want.is_empty(), "{want}: {said}");
        }
    }
}
