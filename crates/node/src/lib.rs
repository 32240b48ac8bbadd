//! The node: one process that serves NVMe namespaces over TCP with one reactor per core.
//!
//! # Layout
//! - [`node`](RunningNode): opens devices, listens, adds and removes namespaces, stops.
//! - [`config`], `validate`, `error`: configuration of a node, its validation, and the errors of a start, change or stop.
//! - [`node_core`]: one core on the sockets and devices of any driver: reactor, namespaces, control messages.
//! - [`control`], [`core_namespaces`]: control messages to cores; namespaces of one core, attached and detached.
//! - [`core_roles`]: cores for drives and cores for connections.
//! - `node_parts`: what a node has before its cores start. `device_replacement`: another device for one that is lost. `device_addition`: one more.
//! - `core_thread`: runs a core on a thread with the kernel's sockets and devices.
//! - `reactor`: one iteration of a core: sockets, messages, backends, device, outgoing sessions, responses.
//! - [`connection_io`]: bytes of one connection between its socket and its protocol state machine.
//! - `time_budget`, `connection_queue`: time share of a connection in an iteration, and the order of service.
//! - `request_scheduler`: where and when requests run: carries out the scheduling decisions.
//! - `request_queue`: requests that wait for a worker, with prefetch.
//! - [`namespace_table`]: the namespaces of one core and their backends.
//! - [`kv_backend`], [`fair_yield`]: executes Key Value requests on an engine; round-robin among long list requests.
//! - [`block_backend`], [`range_locks`]: executes block requests on a device; locks on ranges of device blocks.
//! - `buffer_wait`: waits for a buffer of the core's pool.
//! - `namespace_status`: a namespace as an operator sees it.
//! - `namespace_open`, `namespace_device`, `device_driver`: opens a namespace's devices and volume; selects io_uring or worker threads.
//! - [`monitor`]: measures all cores each sampling interval and chooses the policy action.
//! - [`core_metrics`], [`tenants`]: counters of a core that all cores read; tenant numbers of hosts.
//! - `spanned_tokens`: tokens of the devices of a namespace for hosts.
//! - `loans`: bytes of devices from which the responses of a connection are sent.
//! - `log_limiter`, `abortable`: rate limit of log lines; cancellation of background tasks.
//! - [`bug_injection`]: bugs that tests inject to prove the simulator detects them.

mod abortable;
pub mod block_backend;
mod buffer_wait;
pub mod bug_injection;
pub mod config;
pub mod connection_io;
mod connection_queue;
pub mod control;
pub mod core_metrics;
pub mod core_namespaces;
pub mod core_roles;
mod core_thread;
mod device_addition;
mod device_driver;
mod device_replacement;
mod error;
pub mod fair_yield;
pub mod kv_backend;
mod loans;
mod log_limiter;
pub mod monitor;
mod namespace_device;
mod namespace_open;
mod namespace_status;
pub mod namespace_table;
mod node;
pub mod node_core;
mod node_parts;
pub mod range_locks;
mod reactor;
mod request_queue;
mod request_scheduler;
mod spanned_tokens;
pub mod tenants;
mod time_budget;
mod validate;

pub use config::{
    ANA_GROUPS_MAX, CACHE_BYTES_MIN, CommandSetConfig, DEVICE_TIMEOUT_MIN, DeviceConfig, ExistingDataPolicy,
    ITERATOR_IDLE_MIN, NAMESPACE_ID_MAX, NamespaceConfig, NodeConfig, PREPARE_BYTES_MAX, REQUESTS_MAX,
    default_compact_bytes_per_second,
};
pub use control::{ControlMessage, ControlQueue, CoreFunction, CoreStatus, NamespaceChange, OnCompacted};
pub use core_namespaces::{CoreNamespace, NamespaceVolume, OpenDevice};
pub use core_roles::{CoreRole, CoreRoles};
pub use error::{
    CloseError, CompactionStartError, NamespaceChangeError, StartError, StopError, UringUnavailable,
};
pub use namespace_open::{namespace_info, upgrade_devices, verify_devices};
pub use namespace_status::{DeviceStatus, NamespaceStatus};
pub use node::{RunningNode, start};
pub use node_core::{CoreParts, NodeCore};
pub use octokv_device::health::{DeviceLoad, OperationLoad};
pub use octokv_sys::file::DeviceOpenError;
pub use reactor::{CoreMessage, SimulatedCosts};
pub use spanned_tokens::token_shares;
