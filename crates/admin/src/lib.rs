//! Everything of a node that is off its data cores: what an operator changes while it runs, and keeping that.
//!
//! ```text
//!   octokv ns, host, ana, sched, stats ─▶ client ─▶ Unix socket, HTTP/JSON ─▶ server ─▶ operator ─▶ the running node
//!                                                                            └─▶ state file
//! ```
//! # Layout
//! - [`api_types`]: the JSON documents that client and server exchange.
//! - [`scheduling_api`]: those of who is served where and when.
//! - [`state_file`]: what survives a restart, in one file.
//! - [`service`]: what can be changed, in the node and in the file together.
//! - [`http_server`]: the door: HTTP on a Unix socket, on a thread of its own.
//! - [`http_client`]: the other side of it, for the command line.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "off the data cores, on a thread of its own: the state file and the socket are here"
)]

pub mod api_types;
pub mod http_client;
pub mod http_server;
pub mod scheduling_api;
pub mod service;
pub mod state_file;

pub use http_server::AdminServer;
pub use service::{AdminError, AdminService};
pub use state_file::{PersistedState, StateFile};
