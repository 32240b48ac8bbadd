//! What runs a core: reactor, executor, timers, messages between cores, and the seam to the world.
//!
//! Everything above this room is written against the seam in [`driver`] (sockets) and [`io`] (devices)
//! and so runs unchanged on the kernel ([`real`]) and in a deterministic world ([`virtual_world`]).
//! A future belongs to one core for life, is `!Send`, and holds no lock across an await.
//!
//! # Layout
//! - [`driver`]: the socket half of the seam.
//! - [`io`]: the device half: operations with owned buffers, a [`Channel`] per core, [`Ticket`] futures.
//! - [`executor`]: [`Tasks`], a bounded slab of futures, and [`block_on`].
//! - [`workers`]: [`Workers`], a bounded crew of futures that carry out one job after the other.
//! - [`timer`]: deadlines, in order.
//! - [`handle`]: what a task knows of its reactor: time, timers, background tasks, the device channel.
//! - [`doorbell`]: waking a core that may be asleep, without a lost wake-up.
//! - [`ring`]: bounded message rings between cores.
//! - [`busy`]: where a core's time goes, by stage.
//! - [`reactor`]: when a core spins and when it sleeps.
//! - [`sockets`]: TCP by the kernel.
//! - [`uring`], [`threads`]: devices by io_uring, and by worker threads where it is forbidden.
//! - [`real`]: choosing among them, starting reactors.
//! - [`virtual_world`]: clock, links and disks that exist only in memory and repeat from a seed.

pub mod busy;
pub mod doorbell;
pub mod driver;
pub mod executor;
pub mod handle;
pub mod io;
pub mod reactor;
pub mod real;
pub mod ring;
pub mod sockets;
pub mod threads;
pub mod timer;
pub mod uring;
pub mod virtual_world;
pub mod workers;

pub use busy::{Busy, BusyReader, Stage};
pub use doorbell::Doorbell;
pub use driver::{DetachedSocket, ListenerId, Received, Sent, SocketId, Sockets};
pub use executor::{TaskId, Tasks, block_on, yield_now};
pub use handle::{Handle, Sleep, Underway};
pub use io::{Channel, Completed, DeviceQueue, FileId, Media, Operation, Ticket};
pub use octokv_sys::memory::{HugeBytes, expect, expect_read, expect_write, give_back};
pub use reactor::{Idle, Polling};
pub use real::{DeviceDriver, device_queue};
pub use ring::{Carrier, Mailbox, carried_mesh, mesh};
pub use sockets::RealSockets;
pub use workers::{Desk, Workers};
