//! Safe, owned interfaces to Linux. The only crate with `unsafe` code.
//!
//! Each module wraps one facility of the kernel, without policy: when to call and with which bounds is decided in
//! `octokv-runtime`.
//!
//! # Unsafe code
//! System calls go through `rustix`, signal handlers through `signal-hook`. `unsafe` remains for
//! - io_uring ([`uring`]): the kernel accesses memory after the call, so no crate can check the submission;
//! - memory ([`huge_pages`], [`latched_memory`], [`page_allocator`], [`counting_allocator`], [`prefetch`], `malloc_trim`): mappings
//!   of our own, bytes that cores share, the allocator trait, prefetch instructions;
//! - the clock ([`clock`]): the vDSO call and the tick counter, on the hot path;
//! - calls that rustix does not have: `getsockopt(TCP_INFO)`, `ioctl(BLKDISCARD)` and `ioctl(BLKGETSIZE64)`, `sched_setscheduler`, and
//!   `prctl(PR_SET_SECCOMP)` of the test tool [`seccomp`];
//! - [`rocksdb_library`]: the C interface of a library that benchmarks load.
//!
//! # Layout
//! - [`bug_injection`]: a deliberate bug, which tests enable.
//! - [`clock`]: monotonic time, and the processor's tick counter for short durations.
//! - [`huge_pages`]: large zeroed memory in huge pages.
//! - [`latched_memory`]: a memory that cores read and write in place; [`page_latches`]: who may.
//! - [`prefetch`]: cache prefetch hints.
//! - [`eventfd`]: an event that one thread signals and another waits for.
//! - [`epoll`]: readiness of many descriptors.
//! - [`socket`]: non-blocking TCP.
//! - [`file`](mod@file): a regular file or block device as a storage device.
//! - [`output_file`]: files for results, checked before the run that produces them.
//! - [`uring`]: the io_uring driver, which owns the buffers in flight.
//! - [`thread`]: threads by name, core and priority.
//! - [`signal`]: SIGTERM, SIGINT and SIGHUP as a shutdown flag.
//! - [`counting_allocator`]: an allocator that counts, for tests.
//! - [`page_allocator`]: an allocator that maps large page-aligned memory.
//! - [`process`]: memory, processor time and limits of this process.
//! - [`machine`]: processor, memory, kernel and disk counters of this system, for reports.
//! - [`rocksdb_library`]: RocksDB, a baseline of benchmarks.
//! - [`seccomp`]: denies io_uring to a thread, as containers do.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the banned functions are wrapped here"
)]

pub mod bug_injection;
pub mod clock;
pub mod counting_allocator;
pub mod epoll;
pub mod eventfd;
pub mod file;
pub mod huge_pages;
pub mod latched_memory;
pub mod machine;
pub mod output_file;
pub mod page_allocator;
pub mod page_latches;
pub mod prefetch;
pub mod process;
pub mod rocksdb_library;
pub mod seccomp;
pub mod signal;
pub mod socket;
pub mod thread;
pub mod uring;
