//! Everything of a node that is off its data cores: what an operator changes while it runs, and keeping that.
//!
//! ```text
//!   octokv ns, host, ana, sched, stats ─▶ client ─▶ Unix socket, HTTP/JSON ─▶ server ─▶ operator ─▶ the running node
//!                                                                            └─▶ state file
//! ```
//! # Layout
//! - [`words`]: the JSON documents that client and server exchange.
//! - [`scheduling`]: those of who is served where and when.
//! - [`state`]: what survives a restart, in one file.
//! - [`operator`]: what can be changed, in the node and in the file together.
//! - [`server`]: the door: HTTP on a Unix socket, on a thread of its own.
//! - [`client`]: the other side of it, for the command line.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "off the data cores, on a thread of its own: the state file and the socket are here"
)]

pub mod client;
pub mod operator;
pub mod scheduling;
pub mod server;
pub mod state;
pub mod words;

pub use operator::{Operator, Refused};
pub use server::Server;
pub use state::{State, StateFile};
