//! The binary's tests: every command, servers that are killed, adversarial hosts.
//! One binary: a second one would compile the node's generic code again.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests start processes and make files"
)]

mod admin;
mod adversary_commands;
mod adversary_pdus;
mod adversary_queues;
mod bench;
mod bench_baselines;
mod bench_systems;
mod bench_targets;
mod bench_workloads;
mod calibrate;
mod common;
mod compaction;
mod core_roles;
mod devices;
mod drivers;
mod kill_restart;
mod kv_commands;
mod log_engine;
mod scan;
mod sched;
mod serve;
mod several_devices;
mod sim;
mod ssd_model;
mod tree_stats;
