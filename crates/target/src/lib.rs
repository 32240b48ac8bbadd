//! NVMe-oF/TCP controllers as machines without I/O: bytes and times in, requests and bytes out.
//!
//! # Layout
//! - [`request`]: what a connection asks of the engine and what comes back.
//! - [`settings`]: the target's name, bounds and namespaces.
//! - [`outbox`]: what a connection has yet to send.
//! - [`subsystem`]: the target as a whole: who may connect, which controllers there are.
//! - [`connection`]: one TCP connection.

pub mod connection;
pub mod outbox;
pub mod request;
pub mod settings;
pub mod subsystem;

pub use connection::{Connection, Consumed, Stall};
pub use outbox::Outbox;
pub use request::{Operation, Outcome, Request, StoreMode};
pub use settings::{NamespaceInfo, TargetSettings};
pub use subsystem::Target;
