//! NVMe-oF/TCP controllers as machines without I/O: bytes and times in, requests and bytes out.
//!
//! # Layout
//! - [`connection`]: one TCP connection: its states, and all that its owner calls.
//! - `intake`: PDUs from the head of its bytes: framing, digests, transfers.
//! - `commands`: what it does with a command.
//! - `kv`: Key Value commands and their answers.
//! - `slots`: the commands of one queue that have no answer yet.
//! - `replies`, [`outbox`]: completions and data on their way out.
//! - [`subsystem`]: the target as a whole: namespaces, controllers, listeners, who may connect.
//! - [`controller`]: what the connections of one host share: properties, keep alive, queues.
//! - `admin`, `identify`, `logs`, `features`, [`events`], `errors`: admin commands and what they read.
//! - [`request`], [`settings`], [`statistics`]: the words between this room and its callers.
//!
//! # Use
//! For each accepted socket make a [`Connection`]; give it what was received, do its [`Request`]s, give
//! their [`Outcome`]s back, send what is in its [`Outbox`], and tick it by its deadline.

mod admin;
mod commands;
pub mod connection;
pub mod controller;
mod errors;
pub mod events;
mod features;
mod identify;
mod intake;
mod kv;
mod logs;
pub mod outbox;
mod replies;
pub mod request;
pub mod settings;
mod slots;
pub mod statistics;
pub mod subsystem;

pub use connection::{Closing, Connection, Consumed, Stall};
pub use outbox::Outbox;
pub use request::{Operation, Outcome, Request, StoreMode};
pub use settings::{NamespaceInfo, TargetSettings};
pub use statistics::Counts;
pub use subsystem::{ControllerReport, Target};
