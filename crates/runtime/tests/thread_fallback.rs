//! The fallback to worker threads if io_uring is forbidden: Auto selects it, with a fixed number of threads, and all of
//! them end.
//!
//! A test binary of its own: it counts this process's threads.

#![allow(clippy::disallowed_methods, reason = "the test reads /proc/self/task")]

mod common;

use common::{ScratchFile, wait};
use octokv_base::{Buffer, Nanos};
use octokv_runtime::kernel::DEVICE_THREADS_PER_CORE;
use octokv_runtime::{CoreWaker, DeviceDriver, DeviceHandle, IoOperation, open_device_queue};
use octokv_sys::clock;
use octokv_sys::seccomp::{SeccompErrno, deny_io_uring};
use octokv_sys::thread;

const WORKERS_EXIT_TIMEOUT: Nanos = Nanos::from_secs(10);

/// The number of this process's threads that execute device operations.
fn worker_count() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.filter(|name| name.trim() == "octokv-disk").count()
}

#[test]
fn without_io_uring_a_fixed_number_of_threads_serves_all_devices_and_ends_with_the_queue() {
    for errno in [SeccompErrno::Eperm, SeccompErrno::Enosys] {
        let body = move || {
            deny_io_uring(errno).unwrap();
            let core_waker = CoreWaker::new().unwrap();
            let refused =
                open_device_queue(DeviceDriver::Uring, 8, &core_waker).err().expect("io_uring must fail");
            assert_eq!(refused.raw_os_error(), Some(errno.raw()));
            let (queue, chosen) = open_device_queue(DeviceDriver::Auto, 256, &core_waker).unwrap();
            assert_eq!(chosen, DeviceDriver::Threads);
            assert!(queue.completion_eventfd().is_none());
            let devices = DeviceHandle::new(queue, 256);
            let scratches: Vec<_> =
                (0..6).map(|index| ScratchFile::new(&format!("workers-{errno:?}-{index}"))).collect();
            let files: Vec<_> = scratches.iter().map(|one| devices.open(&one.source).unwrap()).collect();
            let read = |index: u64| IoOperation::Read {
                offset: index % 64 * 65_536,
                buffer: Buffer::zeroed(65_536),
            };
            let futures: Vec<_> = (0..600)
                .map(|index| devices.submit(files[index % files.len()], read(index as u64)))
                .collect();
            assert_eq!(worker_count(), DEVICE_THREADS_PER_CORE);
            for future in futures {
                assert_eq!(wait(&devices, future).result, Ok(()));
            }
            assert_eq!(worker_count(), DEVICE_THREADS_PER_CORE);
            drop(devices);
            // A joined thread may be listed a moment longer: the kernel wakes the joiner before it removes the thread.
            let start = clock::now();
            while worker_count() > 0 {
                assert!(clock::now().since(start) < WORKERS_EXIT_TIMEOUT, "a worker outlived its queue");
                std::thread::yield_now();
            }
        };
        thread::spawn("refused", body).unwrap().join().unwrap();
    }
}
