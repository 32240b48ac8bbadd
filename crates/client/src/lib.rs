//! The initiator: uses a namespace of keys and values, or of blocks, over NVMe/TCP.
//!
//! Three ways in, each on top of the next: [`blocking::BlockingClient`] and [`BlockingClient`] (async, any executor) own an
//! I/O thread; [`Session`] is polled by whoever owns the core (the load generator, the simulator); the
//! machines under it do no I/O at all.
//!
//! ```no_run
//! let client = octokv_client::blocking::Client::connect("nvme+tcp://127.0.0.1:4420/nqn.2026-11.io.octokv:node?nsid=1")?;
//! client.put(b"hello", b"world")?;
//! assert_eq!(client.get(b"hello")?, Some(b"world".to_vec()));
//! # Ok::<(), octokv_client::Error>(())
//! ```
//!
//! # Layout
//! - [`url`]: names of namespaces, as in the example.
//! - [`config`]: what a client may be told, with defaults.
//! - [`error`]: what can go wrong, and which of it may have happened all the same.
//! - [`command`]: commands and answers, and how they become queue entries and come back.
//! - `block`: commands on blocks.
//! - [`send_buffer`]: bytes that wait to be sent; values are referenced, not copied.
//! - [`queue_pair`]: machine of one queue on one TCP connection: PDUs, transfers, digests.
//! - [`controller_init`]: the order in which a controller is set up, as a table.
//! - [`initiator`]: machine of one controller: its queues, keep alive, loss and reconnection.
//! - [`session`]: the machine on sockets.
//! - [`remote_device`]: a namespace of blocks as a [`octokv_device::Device`], for an engine on this side.
//! - [`bug_injection`]: bugs for tests of the tests.
//! - `thread`: the I/O thread of a [`BlockingClient`], which repeats what is safe to repeat.
//! - [`client`], [`blocking`]: the front doors.

mod block_commands;
pub mod blocking;
pub mod bug_injection;
pub mod client;
pub mod command;
pub mod completion;
pub mod config;
pub mod controller_info;
pub mod controller_init;
mod encode;
pub mod error;
pub mod initiator;
mod io_thread;
mod kv_commands;
pub mod queue_pair;
pub mod remote_device;
pub mod send_buffer;
pub mod session;
pub mod url;

pub use client::Client;
pub use command::{Command, Response, Value};
pub use config::{ClientConfig, Reconnect};
pub use controller_info::{BlockInfo, ControllerInfo};
pub use error::{ConnectionError, Error};
pub use octokv_wire::kv::StoreMode;
pub use remote_device::{RemoteDevice, RemoteSession};
pub use session::{Session, SubmitError};
pub use url::Url;
