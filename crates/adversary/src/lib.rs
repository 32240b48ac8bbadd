//! The hostile room: hosts that break every rule, an honest one that must not notice, and a node between them.
//!
//! What is attacked is a real `octokv serve` process, over TCP. The tests of the binary use the parts one by one and
//! say what each attack must be answered with; the program of this room (`main.rs`) measures what attacks cost
//! others, and soaks a node in all of it for a long time.
//!
//! # Layout
//! - [`raw_connection`]: one connection that says what it likes.
//! - [`attacks`]: attacks that go on for as long as they are let.
//! - [`command_builder`]: entries of commands, right by default.
//! - [`reference_client`]: the host that must be served all the while.
//! - [`soak_clients`]: the hosts of a soak.
//! - [`model_client`]: a client that keeps account of every key it has.
//! - [`attack_latency`]: what attacks cost others.
//! - [`node_process`]: a node as a process, and what it holds.
//! - [`attack_harness`]: a node under attack, held to its promises and its bound on memory.
//! - [`soak`]: a node in everything at once for a long time.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "attackers have sockets, threads and clocks of their own"
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
