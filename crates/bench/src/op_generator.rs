//! The operation generator: kind and key of the next operation, and the keys that inserts add.
//! In: the number of the operation, the worker's random numbers. Out: operations.
//! Invariant: only visible keys are sampled: initial keys, and inserted keys whose inserts and all earlier inserts have
//! completed.

use crate::config::BenchConfig;
use crate::key_distribution::{KeySampler, RankPermutation};
use crate::shard::Shard;
use crate::workload::{LIST_KEYS_MAX, Workload, WorkloadOp};
use octokv_base::Prng;
use octokv_base::prng::mix64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// One operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Operation {
    pub kind: WorkloadOp,
    /// Global index of its key.
    pub index: u64,
    /// Number of keys that a List requests, or of pairs that a Scan does; 0 for other kinds.
    pub range_keys: u32,
}

/// Which key is next.
enum KeyOrder {
    /// The keys in order.
    Sequential,
    /// Keys of a distribution.
    Sampled(KeySampler),
    /// Every key once in each pass, in an order of that pass, the same for all workers.
    Permuted { pass: u64, permutation: RankPermutation },
}

/// The order of the keys in a pass over all of them.
fn permutation_of(config: &BenchConfig, pass: u64) -> RankPermutation {
    RankPermutation::new(config.keys, config.seed ^ mix64(pass))
}

/// Generates the operations of one worker.
pub(crate) struct OpGenerator {
    workload: Workload,
    random: Prng,
    key_order: KeyOrder,
    /// Whether ycsb-e scans, because the target has iterators.
    scans: bool,
}

impl OpGenerator {
    pub fn new(config: &BenchConfig, workload: Workload, random: Prng) -> OpGenerator {
        let key_order = match config.distribution_of(workload) {
            Some(kind) => {
                KeyOrder::Sampled(KeySampler::new(kind, config.zipf_theta, config.keys, config.seed))
            }
            None if matches!(workload, Workload::FillUniqueRandom | Workload::DeleteUniqueRandom) => {
                KeyOrder::Permuted { pass: 0, permutation: permutation_of(config, 0) }
            }
            None => KeyOrder::Sequential,
        };
        OpGenerator { workload, random, key_order, scans: false }
    }

    /// Sets whether ycsb-e scans, because the target has iterators.
    pub fn set_scans(&mut self, scans: bool) {
        self.scans = scans;
    }

    /// Global index of the next key that the writer beside a workload stores: any visible one with the same probability.
    pub fn next_write(&mut self, keys: &KeySpace) -> u64 {
        keys.shard.global_index(self.random.below(keys.visible_count()))
    }

    /// Generates operation `number` of the workload.
    #[inline]
    pub fn next_op(&mut self, number: u64, config: &BenchConfig, keys: &KeySpace) -> Operation {
        let kind = match self.workload.mix() {
            [(action, _)] => *action,
            mix => pick_action(mix, self.random.below(100)),
        };
        let index = match (kind, &mut self.key_order) {
            (WorkloadOp::Insert, _) => keys.begin_insert(),
            (_, KeyOrder::Sequential) => keys.shard.global_index(number % config.keys),
            (_, KeyOrder::Sampled(sampler)) => {
                keys.shard.global_index(sampler.sample(keys.visible_count(), &mut self.random))
            }
            (_, KeyOrder::Permuted { pass, permutation }) => {
                let number_of_pass = number / config.keys;
                if *pass != number_of_pass {
                    (*pass, *permutation) = (number_of_pass, permutation_of(config, number_of_pass));
                }
                keys.shard.global_index(permutation.key_of_rank(number % config.keys))
            }
        };
        let (kind, range_keys) = match self.workload {
            Workload::SeekRandom => (kind, LIST_KEYS_MAX),
            Workload::ScanRandom | Workload::ScanWhileWriting => (kind, config.scan_length),
            Workload::YcsbE if kind == WorkloadOp::List => {
                let kind = if self.scans { WorkloadOp::Scan } else { kind };
                (kind, 1 + self.random.below(u64::from(LIST_KEYS_MAX)) as u32)
            }
            _ => (kind, 0),
        };
        Operation { kind, index, range_keys }
    }
}

fn pick_action(mix: &[(WorkloadOp, u64)], mut at: u64) -> WorkloadOp {
    for &(action, percent) in mix {
        match at.checked_sub(percent) {
            None => return action,
            Some(rest) => at = rest,
        }
    }
    unreachable!("the shares of a mix sum to 100")
}

/// The visible keys of a target: the first `visible` of its shard.
pub(crate) struct KeySpace {
    shard: Shard,
    visible: AtomicU64,
    inserts: Mutex<PendingInserts>,
}

struct PendingInserts {
    /// Local index of the next insert.
    next: u64,
    /// Local indices of inserts in flight; at most one per stream.
    pending: Vec<u64>,
}

impl KeySpace {
    /// Creates the key space of a shard with `count` initial keys and inserts of `streams` streams.
    pub fn new(shard: Shard, count: u64, streams: usize) -> KeySpace {
        let inserts = Mutex::new(PendingInserts { next: count, pending: Vec::with_capacity(streams) });
        KeySpace { shard, visible: AtomicU64::new(count), inserts }
    }

    fn visible_count(&self) -> u64 {
        self.visible.load(Ordering::Relaxed)
    }

    /// Starts an insert and returns the global index of its key.
    fn begin_insert(&self) -> u64 {
        let mut inserts = self.inserts.lock().unwrap_or_else(PoisonError::into_inner);
        let nth = inserts.next;
        inserts.next += 1;
        inserts.pending.push(nth);
        self.shard.global_index(nth)
    }

    /// Completes an insert, which makes it visible once all earlier inserts have completed.
    pub fn insert_completed(&self, index: u64) {
        let nth = self.shard.local_index(index);
        let mut inserts = self.inserts.lock().unwrap_or_else(PoisonError::into_inner);
        let at = inserts.pending.iter().position(|&open| open == nth).expect("the insert is in flight");
        inserts.pending.swap_remove(at);
        let present = inserts.pending.iter().copied().min().unwrap_or(inserts.next);
        self.visible.store(present, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key_distribution::KeyDistribution;

    #[test]
    fn a_key_is_visible_once_all_earlier_inserts_completed() {
        let keys = KeySpace::new(Shard::WHOLE, 10, 4);
        assert_eq!([keys.begin_insert(), keys.begin_insert(), keys.begin_insert()], [10, 11, 12]);
        keys.insert_completed(11);
        assert_eq!(keys.visible_count(), 10);
        keys.insert_completed(10);
        assert_eq!(keys.visible_count(), 12);
        keys.insert_completed(12);
        assert_eq!((keys.visible_count(), keys.begin_insert()), (13, 13));
    }

    #[test]
    fn a_target_samples_and_inserts_keys_of_its_shard_only() {
        for shard in Shard::all(3) {
            let config = BenchConfig { keys: shard.count(100), ..BenchConfig::default() };
            for workload in Workload::ALL {
                let keys = KeySpace::new(shard, config.keys, 1);
                let mut op_generator = OpGenerator::new(&config, workload, Prng::new(1));
                for number in 0..1000 {
                    let Operation { kind, index, .. } = op_generator.next_op(number, &config, &keys);
                    assert_eq!(index % 3, shard.shard_index, "{workload:?}");
                    match kind {
                        WorkloadOp::Insert => keys.insert_completed(index),
                        _ => assert!(shard.local_index(index) < keys.visible_count()),
                    }
                }
            }
            let keys = KeySpace::new(shard, config.keys, 1);
            assert_eq!(keys.begin_insert(), shard.global_index(config.keys));
        }
    }

    #[test]
    fn every_workload_follows_its_mix_on_visible_keys() {
        for workload in Workload::ALL {
            let config = BenchConfig { keys: 1000, ..BenchConfig::default() };
            let keys = KeySpace::new(Shard::WHOLE, config.keys, 1);
            let mut op_generator = OpGenerator::new(&config, workload, Prng::new(1));
            let mut done = vec![0; workload.mix().len()];
            for number in 0..100_000 {
                let operation = op_generator.next_op(number, &config, &keys);
                let at = workload.mix().iter().position(|(kind, _)| *kind == operation.kind).unwrap();
                done[at] += 1;
                match operation.kind {
                    WorkloadOp::Insert => keys.insert_completed(operation.index),
                    WorkloadOp::List => assert!((1..=LIST_KEYS_MAX).contains(&operation.range_keys)),
                    WorkloadOp::Scan => assert_eq!(operation.range_keys, config.scan_length),
                    _ => assert!(operation.index < keys.visible_count()),
                }
            }
            for (count, (action, percent)) in done.iter().zip(workload.mix()) {
                // 1000 to a percent, with a deviation of 158 at most.
                assert!(u64::abs_diff(*count, percent * 1000) < 800, "{workload:?} {action:?}: {count}");
            }
        }
    }

    #[test]
    fn each_pass_of_filluniquerandom_has_every_key_once_in_an_order_of_its_own() {
        let config = BenchConfig { keys: 1000, ..BenchConfig::default() };
        let keys = KeySpace::new(Shard::WHOLE, config.keys, 1);
        let worker = |seed| OpGenerator::new(&config, Workload::FillUniqueRandom, Prng::new(seed));
        // Two workers share the numbers of the operations.
        let mut workers = [worker(1), worker(2)];
        let mut pass = |pass: u64| -> Vec<u64> {
            let numbers = pass * config.keys..(pass + 1) * config.keys;
            numbers.map(|number| workers[number as usize % 2].next_op(number, &config, &keys).index).collect()
        };
        let orders = [pass(0), pass(1), pass(2)];
        for order in &orders {
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..config.keys));
            let in_order = order.windows(2).filter(|pair| pair[0] + 1 == pair[1]).count();
            assert!(in_order < 20, "{in_order} keys follow the one before them");
        }
        assert!(orders[0] != orders[1] && orders[1] != orders[2] && orders[0] != orders[2]);
    }

    #[test]
    fn ycsb_e_scans_where_there_are_iterators() {
        let config = BenchConfig { keys: 1000, ..BenchConfig::default() };
        let keys = KeySpace::new(Shard::WHOLE, config.keys, 1);
        let mut op_generator = OpGenerator::new(&config, Workload::YcsbE, Prng::new(1));
        op_generator.set_scans(true);
        let mut lengths = Vec::new();
        for number in 0..10_000 {
            match op_generator.next_op(number, &config, &keys) {
                Operation { kind: WorkloadOp::Insert, index, .. } => keys.insert_completed(index),
                Operation { kind: WorkloadOp::Scan, range_keys, .. } => lengths.push(range_keys),
                other => panic!("{other:?}"),
            }
        }
        assert!((9_300..9_700).contains(&lengths.len()));
        assert_eq!((lengths.iter().min(), lengths.iter().max()), (Some(&1), Some(&LIST_KEYS_MAX)));
    }

    #[test]
    fn the_writer_beside_a_workload_stores_visible_keys_of_its_shard() {
        for shard in Shard::all(3) {
            let config = BenchConfig { keys: shard.count(100), ..BenchConfig::default() };
            let keys = KeySpace::new(shard, config.keys, 1);
            let mut op_generator = OpGenerator::new(&config, Workload::ReadWhileWriting, Prng::new(1));
            let mut stored = [false; 100];
            (0..5_000).for_each(|_| stored[op_generator.next_write(&keys) as usize] = true);
            let of_shard = |index: &usize| *index as u64 % 3 == shard.shard_index;
            assert!((0..100).all(|index| stored[index] == of_shard(&index)));
        }
    }

    #[test]
    fn a_configured_distribution_replaces_the_workloads_own() {
        let config =
            BenchConfig { keys: 1000, distribution: Some(KeyDistribution::Latest), ..BenchConfig::default() };
        let keys = KeySpace::new(Shard::WHOLE, config.keys, 1);
        let newest = |workload| {
            let mut op_generator = OpGenerator::new(&config, workload, Prng::new(1));
            (0..1000).filter(|&number| op_generator.next_op(number, &config, &keys).index >= 990).count()
        };
        // 39 % by Zipf's law, 1 % in order.
        assert!(newest(Workload::YcsbA) > 300 && newest(Workload::ReadRandom) > 300);
        assert_eq!(newest(Workload::ReadSequential), 10);
    }
}
