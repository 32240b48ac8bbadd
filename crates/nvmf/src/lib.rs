//! An NVMe-oF/TCP target without I/O: received bytes and times go in, requests and bytes to send come out.
//!
//! # Layout
//! - `connection`: [`Connection`], one TCP connection, which is one queue; its modules: `state` (fields and state
//!   changes), `pdu_receive` (framing, digests, H2CData), `command_handler` and `admin_handler` (commands),
//!   `transfers` (buffers for H2CData), `direct_path` (commands that are completed at once).
//! - `io_commands`: dispatches a command of an I/O queue by its namespace's command set to `kv_commands` or
//!   `nvm_commands`; `command_plan` has the types that they share. `iterator_commands`: commands over iterators.
//! - `command_slots`: the outstanding commands of one queue.
//! - `pdu_send`, [`SendBuffer`]: response PDUs and the bytes to send.
//! - [`Target`] (`subsystem`): controllers, queue admission; `reconfigure`: changes at run time.
//! - `controller`: the state that the connections of one controller share: properties, keep alive, queues;
//!   `controller_iterators`: its iterators; `iterator_turns`: the order of the commands on one.
//! - `namespace_info`, `namespace_directory`: namespaces and their ANA states.
//! - `host_acl`, `health`: access control ([`HostAcl`]); the node's part of the health log ([`HealthStatus`]).
//! - `admin_commands`, `admin_context`, `identify`, `log_pages`, `features`, `feature_values`,
//!   `async_events`, `error_log`: admin commands.
//! - [`DirectBackend`] (`direct`): executes commands at once.
//! - `token_share`: tokens of devices for hosts ([`TokenSource`], [`TokenShares`]).
//! - [`IoRequest`] (`io_request`), [`SubsystemConfig`] (`config`), [`CounterSet`] (`counters`): the
//!   interface to the caller.
//!
//! # Use
//! Create a [`Connection`] for each accepted socket. Pass received bytes to [`Connection::receive`],
//! execute the [`IoRequest`]s that it appends, pass each [`RequestOutcome`] to [`Connection::complete`],
//! send the contents of [`Connection::send_buffer`], and call [`Connection::tick`] no later than
//! [`Connection::next_deadline`].

mod admin_commands;
mod admin_context;
mod async_events;
mod command_plan;
mod command_slots;
mod config;
mod connection;
mod controller;
mod controller_iterators;
mod counters;
mod direct;
mod error_log;
mod feature_values;
mod features;
mod health;
mod host_acl;
mod identify;
mod io_commands;
mod io_request;
mod iterator_commands;
mod iterator_turns;
mod kv_commands;
mod log_pages;
mod namespace_directory;
mod namespace_info;
mod nvm_commands;
mod pdu_send;
mod reconfigure;
mod subsystem;
mod token_share;

pub use config::SubsystemConfig;
pub use connection::{CloseReason, Connection, ReceiveResult, StallReason};
pub use controller::{ControllerState, ControllerType};
pub use counters::{CounterSet, SharedCounters};
pub use direct::{DirectBackend, DirectOperation, DirectStage, LongWay};
pub use health::HealthStatus;
pub use host_acl::HostAcl;
pub use io_request::{
    IoRequest, IteratorCall, IteratorHandle, IteratorRequest, LbaRange, RequestOperation, RequestOutcome,
    StoreMode,
};
pub use namespace_directory::{NamespaceExists, NamespaceSnapshot};
pub use namespace_info::{ANA_GROUPS_MAX, KvLimits, NamespaceInfo, NamespaceKind};
pub use octokv_wire::SendBuffer;
pub use octokv_wire::log_page::AnaState;
pub use subsystem::{ControllerReport, HostWeights, Target};
pub use token_share::{ShareOwner, TokenCommand, TokenHold, TokenShares, TokenSource};
