//! Cores of a node and whole nodes: fairness, allocations, blocks, linearizability.
//! One binary: a second one would compile the node's generic code again.

mod allocations;
mod blocks;
mod iteration_fairness;
mod linearizable;
mod peers;
mod remote_engine;
#[path = "support/rig.rs"]
mod rig;
mod several_cores;
mod slow_reader;
