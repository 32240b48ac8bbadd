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
//! - `replies`, [`send_buffer`]: completions and data on their way out.
//! - [`subsystem`]: the target as a whole: its controllers, and who may connect.
//! - `changes`: what may change while it runs.
//! - [`namespaces`]: its namespaces and their access, in tables that connections share.
//! - [`host_acl`], [`health`]: who may connect; what the health log tells.
//! - [`controller`]: what the connections of one host share: properties, keep alive, queues.
//! - `admin`, `identify`, `logs`, `features`, [`async_events`], `errors`: admin commands and what they read.
//! - [`io_request`], [`config`], [`counters`]: the words between this room and its callers.
//!
//! # Use
//! For each accepted socket make a [`Connection`]; give it what was received, do its [`IoRequest`]s, give
//! their [`RequestOutcome`]s back, send what is in its [`SendBuffer`], and tick it by its deadline.

mod admin_commands;
pub mod async_events;
mod command_handler;
mod command_slots;
pub mod config;
pub mod connection;
pub mod controller;
pub mod counters;
mod error_log;
mod features;
pub mod health;
pub mod host_acl;
mod identify;
mod io_commands;
pub mod io_request;
mod kv_commands;
mod log_pages;
pub mod namespaces;
mod nvm_commands;
mod pdu_receive;
mod pdu_send;
mod reconfigure;
pub mod send_buffer;
pub mod subsystem;

pub use config::{NamespaceInfo, NamespaceKind, SubsystemConfig};
pub use connection::{CloseReason, Connection, ReceiveResult, StallReason};
pub use counters::CounterSet;
pub use health::HealthStatus;
pub use host_acl::HostAcl;
pub use io_request::{IoRequest, LbaRange, RequestOperation, RequestOutcome, StoreMode};
pub use namespaces::{NamespaceExists, NamespaceSnapshot};
pub use octokv_wire::log_page::AnaState;
pub use send_buffer::SendBuffer;
pub use subsystem::{ControllerReport, Target};
