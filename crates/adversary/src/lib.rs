//! Attacks on a node over NVMe/TCP, a well-behaved reference client that must not be affected, and the node process.
//!
//! The node under attack is a real `octokv serve` process. The tests of the binary use the parts individually and
//! specify the response to each attack; the program of this crate (`main.rs`) measures how attacks affect the latency
//! of other hosts, and soaks a node under all of them for a long time.
//!
//! # Layout
//! - [`raw_connection`]: a connection that sends arbitrary bytes.
//! - [`attacks`]: continuous attacks.
//! - [`command_builder`]: valid submission queue entries, for modification.
//! - [`reference_client`]: a well-behaved client that must be served during attacks.
//! - [`soak_clients`]: the clients of a soak test.
//! - [`model_client`]: a client that keeps a model of the contents of every key.
//! - [`attack_latency`]: latency of the reference client under attack.
//! - [`node_process`]: a node process and its resource usage.
//! - [`attack_harness`]: a node under attack, with checks of its guarantees and its memory bound.
//! - [`soak`]: a node under load, attacks, kills and reconfiguration for a long time.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "attackers use their own sockets, threads and clocks"
)]

pub mod attack_harness;
pub mod attack_latency;
pub mod attacks;
pub mod command_builder;
pub mod model_client;
pub mod node_process;
pub mod raw_connection;
pub mod reference_client;
pub mod soak;
pub mod soak_clients;
