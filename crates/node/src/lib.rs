//! One storage node: devices, engines and a target, run by reactors.
//!
//! # Layout
//! - [`reactor`](mod@reactor): one core's turn: sockets, messages, stores, device, replies. Runs on any driver.
//! - [`connection_io`]: one connection's bytes between its socket and its machine.
//! - [`namespace_table`]: which store does the requests of which namespace on a core.
//! - [`kv_backend`]: one request of a host on keys, carried out by an engine.
//! - [`fair_yield`]: long flows of one core that take turns.
//! - [`block_backend`], [`range_locks`]: one request on blocks, carried out by a device; one writer at a time per range.
//! - `backing`: what is under a namespace: its device, opened once, and its volume.
//! - `core`: one core on the kernel's sockets and devices: its turns, and what the node orders.
//! - `driver`: io_uring or worker threads, decided once, and what is said of it.
//! - `gate`: how often something that hosts can cause is told.
//! - `until`: a background task that can be told to end.
//! - `dispatch`: where a core's requests run, and when: the scheduler's choices, carried out.
//! - [`monitor`]: the monitor: what is measured of all cores every window, and what is chosen by it.
//! - [`core_metrics`], [`tenants`]: what a core has done, in figures that all read; who is which flow.
//! - `jobs`: requests on their way to an engine, and what they will look at soon.
//! - `share`: how much of a turn one connection may have.
//! - `line`: in what order connections have it.
//! - `start`: the node: open, listen, run, add and remove namespaces, stop.
//! - [`config`]: what a node is told.
//! - [`bug_injection`]: bugs for tests of the tests.

mod abortable;
pub mod block_backend;
mod buffer_wait;
pub mod bug_injection;
pub mod config;
pub mod connection_io;
mod connection_queue;
pub mod core_metrics;
mod core_thread;
mod device_driver;
mod error;
pub mod fair_yield;
pub mod kv_backend;
mod log_limiter;
pub mod monitor;
mod namespace_open;
pub mod namespace_table;
mod node;
pub mod range_locks;
pub mod reactor;
mod request_queue;
mod request_scheduler;
pub mod tenants;
mod time_budget;
mod validate;

pub use self::core_thread::CoreStatus;
pub use config::{
    CommandSetConfig, DeviceConfig, EngineKind, ExistingDataPolicy, NamespaceConfig, NodeConfig,
};
pub use error::{NamespaceChangeError, StartError, StopError, UringUnavailable};
pub use namespace_open::{namespace_info, verify_device};
pub use node::{NamespaceStatus, RunningNode, start};
pub use octokv_sys::file::DeviceOpenError;
pub use reactor::{CoreMessage, ReactorLoop, ReactorParts, SimulatedCosts, new_reactor};
pub use validate::{ANA_GROUPS_MAX, NAMESPACE_ID_MAX};
