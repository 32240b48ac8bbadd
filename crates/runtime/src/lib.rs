//! What runs a core: reactor, executor, timers, messages between cores, and the seam to the world.
//!
//! Everything above this room is written against the seam in [`kernel_sockets`] (sockets) and [`device_queue`] (devices)
//! and so runs unchanged on the kernel ([`kernel`]) and in a deterministic world ([`simulated`]).
//! A future belongs to one core for life, is `!Send`, and holds no lock across an await.
//!
//! # Layout
//! - [`kernel_sockets`]: the socket half of the seam.
//! - [`device_queue`]: the device half: operations with owned buffers, a [`Channel`] per core, [`Ticket`] futures.
//! - [`executor`]: [`Tasks`], a bounded slab of futures, and [`block_on`].
//! - [`worker_pool`]: [`Workers`], a bounded crew of futures that carry out one job after the other.
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
pub mod reactor_handle;
pub mod simulated;
pub mod sockets;
pub mod thread_queue;
pub mod timer;
pub mod uring_queue;
pub mod worker_pool;

pub use core_waker::Doorbell;
pub use cpu_accounting::{Busy, BusyReader, Stage};
pub use device_queue::{Channel, Completed, DeviceQueue, FileId, Media, Operation, Ticket};
pub use executor::{TaskId, Tasks, block_on, yield_now};
pub use idle_policy::{Idle, Polling};
pub use kernel::{DeviceDriver, device_queue};
pub use kernel_sockets::RealSockets;
pub use mailbox::{Carrier, Mailbox, carried_mesh, mesh};
pub use octokv_sys::huge_pages::{HugeBytes, expect, expect_read, expect_write, give_back};
pub use reactor_handle::{Handle, Sleep, Underway};
pub use sockets::{DetachedSocket, ListenerId, Received, Sent, SocketId, Sockets};
pub use worker_pool::{Desk, Workers};
