//! One storage node: a device, an engine and a target, run by reactors.
//!
//! # Layout
//! - [`reactor`](mod@reactor): one core's turn: sockets, messages, engine, device, replies. Runs on any driver.
//! - [`link`]: one connection's bytes between its socket and its machine.
//! - [`perform`]: one request of a host, carried out by an engine.
//! - `start`: a node on the kernel's sockets and devices: open, listen, run, stop.
//! - [`settings`]: what a node is told.

pub mod link;
pub mod perform;
pub mod reactor;
pub mod settings;
mod start;

pub use reactor::{Message, Parts, Turns, reactor};
pub use settings::{DeviceSettings, EngineKind, NodeSettings};
pub use start::{RunningNode, StartError, StopError, check_device, namespace_of, start};
