//! What cores can do when the network is not the limit: each thread is one core of a node and replays recorded commands to
//! it, through the driver's seam, without the kernel. All cores have one volume in memory.
//!
//! Usage: `core_scaling [BYTES [KEYS [CORES [MILLISECONDS [ROUNDS]]]]]`, by default values of 64 bytes, 1,000,000 keys, 2 cores,
//! 20 ms, 60 rounds. In each round every core replays alone, one after the other, and then all at once; the scaling factor of a
//! round is the rate of all over the mean rate of one alone. Processor time is that of the threads: what other processes take is
//! not in it.
//!
//! | keys | |
//! | --- | --- |
//! | `apart` | each core has a node and a volume of its own: what the machine gives if the program shares no line |
//! | `own` | one volume; each core has its part of the keys |
//! | `all` | one volume; each core draws from all keys |
//!
//! `core_scaling trace own|all BYTES` replays a few commands on each of two cores, one after the other, under a tracer of memory
//! accesses (`scripts/shared-lines`): each core's part lies between two stores to the printed address.

#![allow(clippy::disallowed_methods, reason = "a benchmark of threads")]

#[path = "../tests/support/rig.rs"]
mod rig;

use octokv_base::{Key, Nanos, Prng};
use octokv_sys::{clock, thread};
use rig::{ReactorRig, RecordedBatches, RigConfig, RigNode};
use std::fs;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};

const USAGE: &str =
    "usage: core_scaling [BYTES [KEYS [CORES [MILLISECONDS [ROUNDS]]]]] | core_scaling trace own|all BYTES";
const OPERATIONS: [&str; 2] = ["Retrieve", "Store"];
const DEPTH: usize = 32;
const TRACED_KEYS: usize = 4_096;
const TRACED_BATCHES: usize = 64;
/// Times that cores hand a line over for one figure, even, and figures of a round: the least counts, since other processes
/// interrupt them.
const TRANSFERS: u64 = 500;
const TRANSFER_RUNS: usize = 8;
/// Less than this is a transfer between neighbours, such as two cores with one cache; more is one across the processor. The
/// processors of a virtual machine may be moved from one to the other.
const NEAR_NS_MAX: f64 = 80.0;

/// Of the part that is traced: 0 outside, else 1 + 2 * operation + core.
static TRACED_PART: AtomicU64 = AtomicU64::new(0);

/// Whose keys a core replays; see the usage.
#[derive(Clone, Copy, PartialEq, Eq)]
enum KeyShare {
    Apart,
    Own,
    All,
}

const SHARES: [(KeyShare, &str); 3] =
    [(KeyShare::Apart, "apart"), (KeyShare::Own, "own"), (KeyShare::All, "all")];

#[derive(Clone, Copy)]
struct Plan {
    cores: usize,
    slice: Nanos,
    rounds: usize,
    keys: usize,
}

/// One core's slice: requests, and nanoseconds of wall clock and of its thread on the processor.
#[derive(Clone, Copy, Default)]
struct Slice {
    requests: u64,
    wall_ns: u64,
    cpu_ns: u64,
}

impl Slice {
    fn rate(self) -> f64 {
        self.requests as f64 * 1e9 / self.wall_ns as f64
    }

    fn cpu_ns_per_request(self) -> f64 {
        self.cpu_ns as f64 / self.requests as f64
    }
}

/// Time that the calling thread has been on a processor, in nanoseconds.
fn thread_cpu_ns() -> u64 {
    let text = fs::read_to_string("/proc/thread-self/schedstat").expect("Linux with scheduler statistics");
    text.split(' ').next().and_then(|field| field.parse().ok()).expect("the time on the processor")
}

/// One core's part of a round.
#[derive(Clone, Copy, Default)]
struct Round {
    alone: Slice,
    together: Slice,
    /// What the first two cores take to hand a line over, in nanoseconds.
    transfer_ns: f64,
}

/// One core's rounds, by operation.
type CoreRounds = [Vec<Round>; 2];

/// A line that two cores write in turns.
#[derive(Default)]
#[repr(align(64))]
struct ContendedLine(AtomicU64);

impl ContendedLine {
    /// Nanoseconds that one core takes to write the line after the other. REQUIRES: cores 0 and 1 call it at the same time.
    fn transfer_ns(&self, core: usize) -> f64 {
        (0..TRANSFER_RUNS).map(|_| self.run_transfers(core)).fold(f64::MAX, f64::min)
    }

    fn run_transfers(&self, core: usize) -> f64 {
        let begin = clock::now();
        for turn in (core as u64..TRANSFERS).step_by(2) {
            while self.0.load(Ordering::Acquire) % TRANSFERS != turn {
                std::hint::spin_loop();
            }
            self.0.fetch_add(1, Ordering::Release);
        }
        clock::now().since(begin).0 as f64 / TRANSFERS as f64
    }
}

/// A case: nodes with a volume, and threads that are their cores.
struct Bench {
    plan: Plan,
    share: KeyShare,
    value: Vec<u8>,
    nodes: Vec<RigNode>,
    barrier: Barrier,
    line: ContendedLine,
}

impl Bench {
    fn new(share: KeyShare, value_bytes: usize, plan: Plan, has_clock: bool) -> Bench {
        // A record has a header and a key beside its value; a quarter more is free.
        let record_bytes = (value_bytes + 128).next_multiple_of(512) as u64;
        let keys_of_node = if share == KeyShare::Apart { plan.keys / plan.cores } else { plan.keys };
        let device_bytes = (64 << 20) + keys_of_node as u64 * record_bytes / 4 * 5;
        let config = RigConfig { block_bytes: 512, has_clock, ..RigConfig::new(device_bytes, DEPTH as u16) };
        let nodes = match share {
            KeyShare::Apart => (0..plan.cores).map(|_| RigNode::new(config, 1)).collect(),
            KeyShare::Own | KeyShare::All => vec![RigNode::new(config, plan.cores)],
        };
        let (value, barrier) = (vec![7; value_bytes], Barrier::new(plan.cores));
        Bench { plan, share, value, nodes, barrier, line: ContendedLine::default() }
    }

    /// Runs each core on a thread of its own.
    fn run<T: Send>(&self, run_core: impl Fn(&Bench, usize) -> T + Sync) -> Vec<T> {
        let run_core = &run_core;
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..self.plan.cores).map(|core| scope.spawn(move || run_core(self, core))).collect();
            threads.into_iter().map(|thread| thread.join().expect("it measured")).collect()
        })
    }

    /// The keys that a core replays, in its order.
    fn draw_keys(&self, core: usize, share: KeyShare) -> Vec<Key> {
        let part = self.plan.keys / self.plan.cores / DEPTH * DEPTH;
        let mut random = Prng::new(core as u64);
        let mut drawn: Vec<u64> = match share {
            KeyShare::All => (0..part).map(|_| random.below((part * self.plan.cores) as u64)).collect(),
            KeyShare::Apart | KeyShare::Own => ((core * part) as u64..).take(part).collect(),
        };
        // Fisher and Yates.
        for at in (1..drawn.len()).rev() {
            drawn.swap(at, random.below(at as u64 + 1) as usize);
        }
        drawn.into_iter().flat_map(|index| rig::keys(index, 1)).collect()
    }

    /// The calling thread's core, with all keys stored, and its recorded operations.
    fn prepare_core(&self, core: usize) -> (ReactorRig, [RecordedBatches; 2]) {
        thread::pin_to_core(core).expect("this machine has that core");
        let mut rig = match self.share {
            KeyShare::Apart => ReactorRig::on_core(&self.nodes[core], 0),
            KeyShare::Own | KeyShare::All => ReactorRig::on_core(&self.nodes[0], core),
        };
        drop(rig.record_batches(&self.draw_keys(core, KeyShare::Own), Some(&self.value)));
        self.barrier.wait();
        let keys = self.draw_keys(core, self.share);
        let operations = [rig.record_batches(&keys, None), rig.record_batches(&keys, Some(&self.value))];
        (rig, operations)
    }

    /// Measures one core alone and with the others.
    fn measure_core(&self, core: usize) -> CoreRounds {
        let (mut rig, operations) = self.prepare_core(core);
        let mut next_batch = [0; 2];
        let mut rounds = CoreRounds::default();
        for _ in 0..self.plan.rounds {
            for (operation, recorded) in operations.iter().enumerate() {
                let mut round = Round::default();
                let mut replay =
                    || replay_slice(&mut rig, recorded, &mut next_batch[operation], self.plan.slice);
                for turn in 0..self.plan.cores {
                    self.barrier.wait();
                    if turn == core {
                        round.alone = replay();
                    }
                }
                self.barrier.wait();
                round.together = replay();
                self.barrier.wait();
                if core < 2 && self.plan.cores > 1 {
                    round.transfer_ns = self.line.transfer_ns(core);
                }
                rounds[operation].push(round);
            }
        }
        rounds
    }

    /// Replays each operation on each core, one after the other, for a tracer.
    fn trace_core(&self, core: usize) {
        let (mut rig, operations) = self.prepare_core(core);
        for (operation, recorded) in operations.iter().enumerate() {
            for turn in 0..self.plan.cores {
                self.barrier.wait();
                if turn == core {
                    rig.begin_replay(recorded);
                    TRACED_PART.store((1 + 2 * operation + core) as u64, Ordering::SeqCst);
                    (0..TRACED_BATCHES).for_each(|batch| rig.replay_next(recorded, batch));
                    TRACED_PART.store(0, Ordering::SeqCst);
                }
            }
        }
    }
}

fn replay_slice(
    rig: &mut ReactorRig,
    recorded: &RecordedBatches,
    next_batch: &mut usize,
    slice: Nanos,
) -> Slice {
    rig.begin_replay(recorded);
    let (mut batches, cpu_before, begin) = (0, thread_cpu_ns(), clock::now());
    let end = begin + slice;
    let mut now = begin;
    while now < end {
        rig.replay_next(recorded, *next_batch);
        *next_batch = (*next_batch + 1) % recorded.len();
        batches += 1;
        now = clock::now();
    }
    let cpu_ns = thread_cpu_ns() - cpu_before;
    Slice { requests: batches * DEPTH as u64, wall_ns: now.since(begin).0, cpu_ns }
}

/// Median, least and greatest.
fn spread(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [values[values.len() / 2], values[0], values[values.len() - 1]]
}

/// Prints a row for the rounds whose transfers were near, and one for the others.
fn print_rows(what: &str, of_cores: &[CoreRounds], operation: usize) {
    let cores = of_cores.len() as f64;
    let transfer_ns = |round: usize| of_cores[0][operation][round].transfer_ns;
    for is_near in [true, false] {
        let rounds: Vec<usize> = (0..of_cores[0][operation].len())
            .filter(|&round| (transfer_ns(round) < NEAR_NS_MAX) == is_near)
            .collect();
        if rounds.is_empty() {
            continue;
        }
        let mean = |round: usize, of: &dyn Fn(Round) -> f64| {
            of_cores.iter().map(|core| of(core[operation][round])).sum::<f64>() / cores
        };
        let each = |of: &dyn Fn(usize) -> f64| spread(rounds.iter().map(|&round| of(round)).collect());
        let rate = |of: fn(Round) -> Slice| {
            let [median, least, greatest] = each(&|round| mean(round, &|core| of(core).rate()) / 1e6);
            format!("{median:.2} ({least:.2} to {greatest:.2})")
        };
        let cpu =
            |of: fn(Round) -> Slice| each(&|round| mean(round, &|core| of(core).cpu_ns_per_request()))[0];
        let [factor, least, greatest] = each(&|round| {
            cores * mean(round, &|core| core.together.rate()) / mean(round, &|core| core.alone.rate())
        });
        println!(
            "| {what} | {:.0}, {} | {} | {} | {factor:.2} ({least:.2} to {greatest:.2}) | {:.0}, {:.0} |",
            each(&transfer_ns)[0],
            rounds.len(),
            rate(|core| core.alone),
            rate(|core| core.together),
            cpu(|core| core.alone),
            cpu(|core| core.together),
        );
    }
}

fn trace(share: KeyShare, value_bytes: usize) {
    let plan = Plan { cores: 2, slice: Nanos::ZERO, rounds: 0, keys: TRACED_KEYS };
    println!("{:p} {}", &TRACED_PART, TRACED_BATCHES * DEPTH);
    Bench::new(share, value_bytes, plan, false).run(Bench::trace_core);
}

/// Ends the process if a core panics: the others would wait for it.
fn exit_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::exit(101);
    }));
}

fn main() {
    exit_on_panic();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: usize| match arguments.get(at) {
        Some(text) => text.parse().expect(USAGE),
        None => default,
    };
    if arguments.first().is_some_and(|word| word == "trace") {
        let share = SHARES.iter().find(|(_, name)| arguments.get(1).is_some_and(|word| word == name));
        return trace(share.expect(USAGE).0, number(2, 64));
    }
    let (value_bytes, slice_ms) = (number(0, 64), number(3, 20));
    let plan = Plan {
        cores: number(2, 2),
        slice: Nanos::from_millis(slice_ms as u64),
        rounds: number(4, 60),
        keys: number(1, 1_000_000),
    };
    let Plan { cores, keys, rounds, .. } = plan;
    println!("{cores} cores, {keys} keys, {rounds} rounds of {slice_ms} ms; medians (least to greatest)");
    println!(
        "| operation, keys | transfer of a line, ns, rounds | alone, M/s | each of all, M/s | scaling factor \
         | processor time, ns: alone, all |"
    );
    println!("| --- | --- | --- | --- | --- | --- |");
    for (share, name) in SHARES {
        let of_cores = Bench::new(share, value_bytes, plan, true).run(Bench::measure_core);
        for (operation, what) in OPERATIONS.into_iter().enumerate() {
            print_rows(&format!("{what} {value_bytes} B, {name}"), &of_cores, operation);
        }
    }
}
