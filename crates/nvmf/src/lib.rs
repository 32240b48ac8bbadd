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
mod admin_context;
mod async_events;
mod command_plan;
mod command_slots;
mod config;
mod connection;
mod controller;
mod counters;
mod error_log;
mod feature_values;
mod features;
mod health;
mod host_acl;
mod identify;
mod io_commands;
mod io_request;
mod kv_commands;
mod log_pages;
mod namespace_directory;
mod namespace_info;
mod nvm_commands;
mod pdu_send;
mod reconfigure;
mod send_buffer;
mod subsystem;

pub use config::SubsystemConfig;
pub use connection::{CloseReason, Connection, ReceiveResult, StallReason};
pub use controller::{ControllerState, ControllerType};
pub use counters::{CounterSet, SharedCounters};
pub use health::HealthStatus;
pub use host_acl::HostAcl;
pub use io_request::{IoRequest, LbaRange, RequestOperation, RequestOutcome, StoreMode};
pub use namespace_directory::{NamespaceExists, NamespaceSnapshot};
pub use namespace_info::{ANA_GROUPS_MAX, NamespaceInfo, NamespaceKind};
pub use octokv_wire::log_page::AnaState;
pub use send_buffer::SendBuffer;
pub use subsystem::{ControllerReport, Target};
