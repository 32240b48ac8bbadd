//! The node: one process that serves NVMe namespaces over TCP with one reactor per core.
//!
//! # Layout
//! - [`node`](RunningNode): opens devices, listens, adds and removes namespaces, stops.
//! - [`config`], `validate`, `error`: configuration of a node, its validation, and the errors of a start, change or stop.
//! - `core_thread`: one core on the kernel's sockets and devices: its reactor loop and control messages.
//! - [`reactor`](mod@reactor): one iteration of a core: sockets, messages, backends, device, responses; any driver.
//! - [`connection_io`]: bytes of one connection between its socket and its protocol state machine.
//! - `time_budget`, `connection_queue`: time share of a connection in an iteration, and the order of service.
//! - `request_scheduler`: where and when requests run: carries out the scheduling decisions.
//! - `request_queue`: requests that wait for a worker, with prefetch.
//! - [`namespace_table`]: the namespaces of one core and their backends.
//! - [`kv_backend`], [`fair_yield`]: executes Key Value requests on an engine; round-robin among long list requests.
//! - [`block_backend`], [`range_locks`]: executes block requests on a device; locks on ranges of device blocks.
//! - `buffer_wait`: waits for a buffer of the core's pool.
//! - `namespace_open`, `device_driver`: opens a namespace's device and volume; selects io_uring or worker threads.
//! - [`monitor`]: measures all cores each sampling interval and chooses the policy action.
//! - [`core_metrics`], [`tenants`]: counters of a core that all cores read; tenant numbers of hosts.
//! - `log_limiter`, `abortable`: rate limit of log lines; cancellation of background tasks.
//! - [`bug_injection`]: bugs that tests inject to prove the simulator detects them.

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
    ANA_GROUPS_MAX, CommandSetConfig, DeviceConfig, EngineKind, ExistingDataPolicy, NAMESPACE_ID_MAX,
    NamespaceConfig, NodeConfig, REQUESTS_MAX,
};
pub use error::{CloseError, NamespaceChangeError, StartError, StopError, UringUnavailable};
pub use namespace_open::{namespace_info, verify_device};
pub use node::{NamespaceStatus, RunningNode, start};
pub use octokv_sys::file::DeviceOpenError;
pub use reactor::{CoreMessage, ReactorLoop, ReactorParts, SimulatedCosts, new_reactor};
