//! NVMe-oF/TCP controllers as machines without I/O: bytes and times in, requests and bytes out.
//!
//! # Layout
//! - [`connection`]: one TCP connection: its states, and all that its owner calls.
//! - `intake`: PDUs from the head of its bytes: framing, digests, transfers.
//! - `commands`: what it does with a command.
//! - `plans`: what a command of an I/O queue needs and how it is answered, by its namespace's command set:
//! - `kv`: Key Value commands and their answers.
//! - `nvm`: commands on blocks and their answers.
//! - `slots`: the commands of one queue that have no answer yet.
//! - `replies`, [`outbox`]: completions and data on their way out.
//! - [`subsystem`]: the target as a whole: its controllers, and who may connect.
//! - `changes`: what may change while it runs.
//! - [`namespaces`]: its namespaces and their access, in tables that connections share.
//! - [`hosts`], [`health`]: who may connect; what the health log tells.
//! - [`controller`]: what the connections of one host share: properties, keep alive, queues.
//! - `admin`, `identify`, `logs`, `features`, [`events`], `errors`: admin commands and what they read.
//! - [`request`], [`settings`], [`statistics`]: the words between this room and its callers.
//!
//! # Use
//! For each accepted socket make a [`Connection`]; give it what was received, do its [`Request`]s, give
//! their [`Outcome`]s back, send what is in its [`Outbox`], and tick it by its deadline.

mod admin;
mod changes;
mod commands;
pub mod connection;
pub mod controller;
mod errors;
pub mod events;
mod features;
pub mod health;
pub mod hosts;
mod identify;
mod intake;
mod kv;
mod logs;
pub mod namespaces;
mod nvm;
pub mod outbox;
mod plans;
mod replies;
pub mod request;
pub mod settings;
mod slots;
pub mod statistics;
pub mod subsystem;

pub use connection::{Closing, Connection, Consumed, Stall};
pub use health::HealthFacts;
pub use hosts::Hosts;
pub use namespaces::{NamespaceExists, Namespaces};
pub use octokv_wire::log::AnaState;
pub use outbox::Outbox;
pub use request::{Operation, Outcome, Range, Request, StoreMode};
pub use settings::{NamespaceInfo, NamespaceKind, TargetSettings};
pub use statistics::Counts;
pub use subsystem::{ControllerReport, Target};
