//! Workloads of the simulated node: YCSB's A, B, C, D and F, writes only, and the fill.
//!
//! In: a random number generator. Out: operations on objects by their numbers. Invariant: reads choose among objects whose inserts have completed.
//! Tested below.

use octokv_base::{Nanos, Prng};
use octokv_bench::key_distribution::{KeyDistribution, KeySampler};
use std::collections::BTreeSet;

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeOperation {
    /// A get.
    Read,
    /// A put of an object that exists, or of a new one.
    Write,
    /// A get and then a put of the same object.
    ReadModifyWrite,
}

/// A request of a client.
#[derive(Clone, Copy, Debug)]
pub struct NodeRequest {
    /// What it does.
    pub operation: NodeOperation,
    /// The number of its object.
    pub number: u32,
    /// The number of the client.
    pub client: usize,
    /// When the client had it.
    pub issued: Nanos,
}

/// A mix of operations, and the distribution of their keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NodeWorkload {
    /// Puts of existing objects, in percent.
    pub updates: u8,
    /// Puts of new objects, in percent.
    pub inserts: u8,
    /// Read-modify-writes, in percent; the rest are gets.
    pub read_modify_writes: u8,
    /// The distribution of keys.
    pub distribution: KeyDistribution,
    /// The skew (theta), of distributions that have one.
    pub skew: f64,
}

const UNIFORM_READS: NodeWorkload = NodeWorkload {
    updates: 0,
    inserts: 0,
    read_modify_writes: 0,
    distribution: KeyDistribution::Uniform,
    skew: octokv_bench::key_distribution::ZIPF_THETA_DEFAULT,
};

impl NodeWorkload {
    /// Puts of all objects in the order of their numbers.
    pub const FILL: NodeWorkload = NodeWorkload { inserts: 100, ..UNIFORM_READS };
    /// Gets of random objects.
    pub const RANDOM_READS: NodeWorkload = UNIFORM_READS;
    /// Puts of random objects.
    pub const RANDOM_WRITES: NodeWorkload = NodeWorkload { updates: 100, ..UNIFORM_READS };

    /// The six workloads of Figures 6 and 14: YCSB's mixes with their skew, and writes only.
    pub const YCSB: [(&str, NodeWorkload); 6] = {
        const ZIPF: NodeWorkload = NodeWorkload { distribution: KeyDistribution::Zipf, ..UNIFORM_READS };
        [
            ("YCSB-A", NodeWorkload { updates: 50, ..ZIPF }),
            ("YCSB-B", NodeWorkload { updates: 5, ..ZIPF }),
            ("YCSB-C", ZIPF),
            ("YCSB-D", NodeWorkload { inserts: 5, distribution: KeyDistribution::Latest, ..ZIPF }),
            ("YCSB-F", NodeWorkload { read_modify_writes: 50, ..ZIPF }),
            ("YCSB-WR", NodeWorkload { updates: 100, ..ZIPF }),
        ]
    };
}

/// Draws the operations of a load.
pub struct OperationSource {
    workload: NodeWorkload,
    sampler: KeySampler,
    random: Prng,
    /// The number of the next new object.
    next_insert: u32,
    /// All objects below this number exist.
    present: u32,
    /// Objects above whose inserts have completed.
    completed_early: BTreeSet<u32>,
}

impl OperationSource {
    /// A source for a node with `present` objects; `objects`, at least 1, is the number over which ranks are spread.
    pub fn new(workload: NodeWorkload, present: u32, objects: u32, seed: u64) -> OperationSource {
        let NodeWorkload { distribution, skew, .. } = workload;
        OperationSource {
            workload,
            sampler: KeySampler::new(distribution, skew, objects.into(), seed),
            random: Prng::new(seed),
            next_insert: present,
            present,
            completed_early: BTreeSet::new(),
        }
    }

    /// The next operation with the number of its object.
    pub fn draw(&mut self) -> (NodeOperation, u32) {
        let NodeWorkload { updates, inserts, read_modify_writes, .. } = self.workload;
        let draw = self.random.below(100) as u8;
        if draw < inserts {
            self.next_insert += 1;
            return (NodeOperation::Write, self.next_insert - 1);
        }
        let number = self.sampler.sample(self.present.into(), &mut self.random) as u32;
        let operation = match draw - inserts {
            below if below < updates => NodeOperation::Write,
            below if below < updates + read_modify_writes => NodeOperation::ReadModifyWrite,
            _ => NodeOperation::Read,
        };
        (operation, number)
    }

    /// Notes that a write of an object has completed.
    pub fn note_written(&mut self, number: u32) {
        if number >= self.present {
            self.completed_early.insert(number);
        }
        while self.completed_early.remove(&self.present) {
            self.present += 1;
        }
    }

    /// A random time between two arrivals, in parts of the mean: exponentially distributed.
    pub fn interval(&mut self) -> f64 {
        // From (0, 1], whose logarithm is finite.
        -(1.0 - (self.random.next_u64() >> 11) as f64 / (1u64 << 53) as f64).ln()
    }

    /// The objects that exist.
    pub fn present(&self) -> u32 {
        self.present
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workload_has_its_parts_of_each_operation() {
        let expected = [(50, 50, 0), (95, 5, 0), (100, 0, 0), (95, 5, 0), (50, 0, 50), (0, 100, 0)];
        for ((name, workload), (reads, writes, both)) in NodeWorkload::YCSB.into_iter().zip(expected) {
            let mut source = OperationSource::new(workload, 1_000, 1_000, 3);
            let mut counts = [0; 3];
            for _ in 0..20_000 {
                counts[source.draw().0 as usize] += 1;
            }
            for (count, percent) in counts.into_iter().zip([reads, writes, both]) {
                assert!((f64::from(count) / 200.0 - f64::from(percent)).abs() < 1.5, "{name}: {counts:?}");
            }
        }
    }

    #[test]
    fn reads_choose_among_completed_inserts() {
        let mut source = OperationSource::new(NodeWorkload::FILL, 0, 10, 1);
        let numbers: Vec<u32> = (0..4).map(|_| source.draw().1).collect();
        assert_eq!(numbers, [0, 1, 2, 3]);
        for (number, present) in [(1, 0), (3, 0), (0, 2), (2, 4)] {
            source.note_written(number);
            assert_eq!(source.present(), present, "after {number}");
        }
    }
}
