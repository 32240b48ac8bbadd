//! The thread-per-core runtime: executor, timers, messages between cores, and the I/O drivers.
//!
//! The crates above use the traits [`Sockets`] and [`DeviceQueue`], and so run unchanged on the kernel
//! ([`kernel`]) and in a deterministic simulation ([`simulated`]). A future stays on one core, is `!Send`, and
//! holds no lock across an await.
//!
//! # Layout
//! - [`net`]: the trait of a core's sockets.
//! - [`device_queue`]: the trait of a core's device queue, operations with owned buffers, a [`DeviceHandle`] per
//!   core, [`CompletionFuture`] futures.
//! - [`executor`]: [`TaskSlab`], a bounded slab of futures, and [`block_on`].
//! - [`worker_pool`]: [`WorkerPool`], a bounded pool of futures that each execute one job after another.
//! - `wake_set`: the wake-up bits of both.
//! - [`waiter_queue`]: [`WaiterQueue`], the waiters of a lock in arrival order.
//! - [`timer`]: a binary heap of deadlines.
//! - [`reactor_handle`]: a task's access to its reactor: time, timers, background tasks, devices.
//! - [`core_waker`]: wakes a core that may be asleep, without a lost wake-up.
//! - `wake_list`: the cores that it woke, for the simulation.
//! - [`mailbox`]: bounded message rings between cores.
//! - [`cpu_accounting`]: the processor time of a core by stage.
//! - [`idle_policy`]: when an idle core spins and when it sleeps.
//! - [`kernel_sockets`]: the kernel's TCP.
//! - [`uring_queue`], [`thread_queue`]: devices by io_uring, and by worker threads if io_uring is forbidden.
//! - [`kernel`]: selects the device queue, starts reactor threads.
//! - [`simulated`]: clock, network and disks in memory, reproducible from a seed.
//! - `sync`: the atomics of the lock-free modules, replaceable by loom's.

pub mod core_waker;
pub mod cpu_accounting;
pub mod device_queue;
pub mod executor;
pub mod idle_policy;
pub mod kernel;
pub mod kernel_sockets;
pub mod mailbox;
pub mod net;
pub mod reactor_handle;
pub mod simulated;
mod sync;
pub mod thread_queue;
pub mod timer;
pub mod uring_queue;
pub mod waiter_queue;
mod wake_list;
mod wake_set;
pub mod worker_pool;

pub use core_waker::CoreWaker;
pub use cpu_accounting::{CpuTime, CpuTimeReader, Stage};
pub use device_queue::{
    CompletionFuture, DeviceHandle, DeviceQueue, DeviceSource, FileId, IoCompletion, IoOperation,
};
pub use executor::{TaskId, TaskSlab, block_on, yield_now};
pub use idle_policy::{IdlePolicy, Polling};
pub use kernel::{DeviceDriver, open_device_queue};
pub use kernel_sockets::KernelSockets;
pub use mailbox::{DelayedMesh, Mailbox, delayed_mesh, mesh};
pub use net::{DetachedSocket, ListenerId, ReceiveStatus, SendStatus, SocketId, Sockets};
#[cfg(feature = "bug-injection")]
pub use octokv_sys::bug_injection;
pub use octokv_sys::huge_pages::HugePageBuffer;
pub use octokv_sys::latched_memory::{HeldBytes, LatchedMemory, MemoryView, ReadGuard};
pub use octokv_sys::prefetch::{prefetch_value, prefetch_value_for_write};
pub use octokv_sys::process::trim_heap;
pub use reactor_handle::{InFlightGuard, ReactorHandle, Sleep};
pub use waiter_queue::{WaiterQueue, WaiterTicket};
pub use worker_pool::{JobSlot, WorkerPool};
