//! The admin API of a node: changes at run time, their persistence, and the HTTP server and client.
//!
//! ```text
//!   octokv ns, host, ana, sched, stats ─▶ http_client ─▶ Unix socket ─▶ http_server ─▶ service ─▶ the running node
//!                                                                                        └─▶ state file
//! ```
//! # Layout
//! - [`api_types`]: the JSON documents of client and server.
//! - [`device_names`]: the devices of a namespace.
//! - [`scheduling_api`]: the JSON documents of scheduling.
//! - [`tree_report`], [`log_report`], [`device_load_report`]: the JSON documents of an ordered engine's tree, of a log engine's logs, and of one of several devices.
//! - [`state_file`]: the settings that survive a restart, in one file.
//! - [`service`]: applies changes to the node and to the state file.
//! - `device_replacement`: the same for a device that is lost. `namespace_summary`: the document of a namespace.
//! - [`http_server`]: HTTP on a Unix socket, on its own thread.
//! - [`http_client`]: requests of the command line.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "off the data cores, on a thread of its own: the state file and the socket are here"
)]

pub mod api_types;
pub mod device_load_report;
pub mod device_names;
mod device_replacement;
pub mod http_client;
pub mod http_server;
pub mod log_report;
mod namespace_summary;
pub mod scheduling_api;
pub mod service;
pub mod state_file;
pub mod tree_report;

pub use device_names::DeviceNames;
pub use http_server::AdminServer;
pub use service::{AdminError, AdminService};
pub use state_file::{PersistedState, StateFile};
