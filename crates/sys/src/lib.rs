//! The kernel made safe: the only room with `unsafe` in it.
//!
//! Everything here is a thin, owned, safe face on one thing of Linux. No policy: what to do when, and
//! with which bound, is `runtime`'s.
//!
//! # Layout
//! - [`clock`]: monotonic time, and the processor's tick counter for cheap spans.
//! - [`huge_pages`]: large zeroed memory in huge pages.
//! - [`eventfd`]: a descriptor that one thread signals and another waits for.
//! - [`epoll`]: waiting for many descriptors (epoll).
//! - [`socket`]: non-blocking TCP.
//! - [`file`](mod@file): a regular file or block device as storage: exclusive, direct, with its size and block.
//! - [`output_file`]: files for results, checked before the run that produces them.
//! - [`uring`]: storage operations on an io_uring that owns the buffers in flight.
//! - [`thread`]: threads by name and core.
//! - [`signal`]: SIGTERM and SIGINT as a flag.
//! - [`counting_allocator`]: an allocator that counts, for tests and reports.
//! - [`page_allocator`]: an allocator that takes large page-aligned memory from the kernel as it is touched.
//! - [`process`]: what this process costs and may use.
//! - [`machine`]: processor, memory and kernel of this machine, for reports.
//! - [`seccomp`]: io_uring taken away from a thread and what it starts, as a container does.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "this room is what the bans point at"
)]

pub mod clock;
pub mod counting_allocator;
pub mod epoll;
pub mod eventfd;
pub mod file;
pub mod huge_pages;
pub mod machine;
pub mod output_file;
pub mod page_allocator;
pub mod process;
pub mod seccomp;
pub mod signal;
pub mod socket;
pub mod thread;
pub mod uring;
