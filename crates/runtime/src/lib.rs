//! What runs a core: reactor, executor, timers, messages between cores, and the seam to the world.
//!
//! Everything above this room is written against the seam in [`net`] (sockets) and [`device_queue`] (devices)
//! and so runs unchanged on the kernel ([`kernel`]) and in a deterministic world ([`simulated`]).
//! A future belongs to one core for life, is `!Send`, and holds no lock across an await.
//!
//! # Layout
//! - [`net`]: the socket half of the seam.
//! - [`device_queue`]: the device half: operations with owned buffers, a [`DeviceHandle`] per core, [`CompletionFuture`] futures.
//! - [`executor`]: [`TaskSlab`], a bounded slab of futures, and [`block_on`].
//! - [`worker_pool`]: [`WorkerPool`], a bounded crew of futures that carry out one job after the other.
//! - [`timer`]: deadlines, in order.
//! - [`reactor_handle`]: what a task knows of its reactor: time, timers, background tasks, the device channel.
//! - [`core_waker`]: waking a core that may be asleep, without a lost wake-up.
//! - [`mailbox`]: bounded message rings between cores.
//! - [`cpu_accounting`]: where a core's time goes, by stage.
//! - [`idle_policy`]: when a core spins and when it sleeps.
//! - [`kernel_sockets`]: TCP by the kernel.
//! - [`uring_queue`], [`thread_queue`]: devices by io_uring, and by worker threads where it is forbidden.
//! - [`kernel`]: choosing among them, starting reactors.
//! - [`simulated`]: clock, links and disks that exist only in memory and repeat from a seed.

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
pub mod thread_queue;
pub mod timer;
pub mod uring_queue;
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
pub use octokv_sys::huge_pages::{HugePageBuffer, prefetch_read, prefetch_value, prefetch_write, trim_heap};
pub use reactor_handle::{InFlightGuard, ReactorHandle, Sleep};
pub use worker_pool::{JobSlot, WorkerPool};
