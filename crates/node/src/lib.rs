//! One storage node: devices, engines and a target, run by reactors.
//!
//! # Layout
//! - [`reactor`](mod@reactor): one core's turn: sockets, messages, stores, device, replies. Runs on any driver.
//! - [`link`]: one connection's bytes between its socket and its machine.
//! - [`stores`]: which store does the requests of which namespace on a core.
//! - [`perform`]: one request of a host on keys, carried out by an engine.
//! - [`pace`]: long flows of one core that take turns.
//! - [`blocks`], [`ranges`]: one request on blocks, carried out by a device; one writer at a time per range.
//! - `backing`: what is under a namespace: its device, opened once, and its volume.
//! - `core`: one core on the kernel's sockets and devices: its turns, and what the node orders.
//! - `driver`: io_uring or worker threads, decided once, and what is said of it.
//! - `gate`: how often something that hosts can cause is told.
//! - `until`: a background task that can be told to end.
//! - `dispatch`: where a core's requests run, and when: the scheduler's choices, carried out.
//! - [`scheduling`]: the monitor: what is measured of all cores every window, and what is chosen by it.
//! - [`board`], [`flows`]: what a core has done, in figures that all read; who is which flow.
//! - `jobs`: requests on their way to an engine, and what they will look at soon.
//! - `share`: how much of a turn one connection may have.
//! - `line`: in what order connections have it.
//! - `start`: the node: open, listen, run, add and remove namespaces, stop.
//! - [`settings`]: what a node is told.
//! - [`planted`]: bugs for tests of the tests.

mod backing;
pub mod blocks;
pub mod board;
mod core;
mod dispatch;
mod driver;
pub mod flows;
mod gate;
mod jobs;
mod line;
pub mod link;
pub mod pace;
pub mod perform;
pub mod planted;
pub mod ranges;
pub mod reactor;
pub mod scheduling;
pub mod settings;
mod share;
mod start;
pub mod stores;
mod until;

pub use self::core::CoreReport;
pub use backing::{check_device, namespace_of};
pub use driver::Unavailable;
pub use octokv_sys::file::OpenError;
pub use reactor::{Costs, Message, Parts, Turns, reactor};
pub use settings::{Content, DeviceSettings, EngineKind, Existing, NamespaceSettings, NodeSettings};
pub use start::{ANA_GROUPS_MAX, NAMESPACE_ID_MAX};
pub use start::{ChangeError, NamespaceReport, RunningNode, StartError, StopError, start};
