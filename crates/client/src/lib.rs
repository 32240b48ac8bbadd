//! The initiator: a client of a Key Value or block namespace over NVMe/TCP.
//!
//! Four interfaces, each built on the last: [`BlockingClient`] and [`Client`] (async, any executor) own an I/O thread; a
//! [`PollGroup`] holds the sessions of a reactor, whose tasks await their commands; a [`Session`] is polled by its owner
//! (the load generator, the simulator); the sans-I/O state machines below them ([`initiator`], [`queue_pair`]) perform no
//! I/O.
//!
//! ```no_run
//! let client = octokv_client::BlockingClient::connect("nvme+tcp://127.0.0.1:4420/nqn.2026-11.io.octokv:node?nsid=1")?;
//! client.put(b"hello", b"world")?;
//! assert_eq!(client.get(b"hello")?, Some(b"world".to_vec()));
//! # Ok::<(), octokv_client::Error>(())
//! ```
//!
//! # Layout
//! - [`url`]: namespace URLs, as in the example.
//! - [`config`]: configuration with defaults, reconnect delays.
//! - [`error`]: errors, and which of them leave the outcome unknown.
//! - [`command`]: commands, responses, and a command encoded for a queue.
//! - `encode`, `kv_commands`, `block_commands`: encoding of commands by command set.
//! - [`completion`]: completions, and the response or error of each.
//! - [`queue_pair`], `command_slot`: state machine of one queue on one TCP connection: PDUs, transfers, digests; its slots.
//! - [`controller_info`]: limits of a controller and its namespace.
//! - [`controller_init`]: the steps of controller initialization, as a table.
//! - [`initiator`]: state machine of one controller: its queues, keep alive, connection loss and reconnection.
//! - `initiator_state`: its states and the connection changes that it requests.
//! - [`session`], `session_io`: an initiator on sockets, which it owns or which its reactor lends.
//! - [`poll_group`]: the outgoing sessions of a reactor, on the reactor's sockets.
//! - [`peer_session`], `peer_commands`: one of them, and its commands in flight as futures.
//! - [`remote_device`]: a block namespace as a [`octokv_device::Device`], for an engine in the client's process.
//! - [`bug_injection`]: injected bugs, which the tests must detect.
//! - `io_thread`: the I/O thread of a [`Client`], which retries commands that are safe to retry.
//! - [`flow_control`]: which requests are sent, by the tokens of their devices.
//! - [`scan`]: a range of keys in order, over one snapshot or, after a lost connection, several.
//! - [`client`], [`blocking`]: async and blocking interface.

mod block_commands;
pub mod blocking;
pub mod bug_injection;
pub mod client;
pub mod command;
mod command_slot;
pub mod completion;
pub mod config;
pub mod controller_info;
pub mod controller_init;
mod encode;
pub mod error;
pub mod flow_control;
pub mod initiator;
mod initiator_state;
mod io_thread;
mod kv_commands;
mod peer_commands;
pub mod peer_session;
pub mod poll_group;
pub mod queue_pair;
pub mod remote_device;
pub mod scan;
pub mod session;
mod session_io;
pub mod url;

pub use blocking::{BlockingClient, BlockingScan};
pub use client::Client;
pub use command::{Command, RemoteIterator, Response, Value};
pub use completion::TokenReport;
pub use config::{ClientConfig, Reconnect};
pub use controller_info::{BlockInfo, ControllerInfo};
pub use error::{ConnectionError, Error, SubmitError};
pub use flow_control::{FlowControl, FlowRequest};
pub use octokv_wire::kv::StoreMode;
pub use peer_session::{PeerConfig, PeerSession};
pub use poll_group::{ConnectPeerError, PEERS_MAX, PollGroup};
pub use remote_device::{RemoteDevice, RemoteSession};
pub use scan::{Pair, Scan, ScanOptions};
pub use session::Session;
pub use url::Url;

/// Compiles the Rust examples of the manual.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/USAGE.md")]
struct ReadmeExamples;
