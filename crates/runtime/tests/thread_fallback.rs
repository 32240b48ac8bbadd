//! Worker threads where io_uring is forbidden: Auto takes them, how many there are, that none stays.
//!
//! Alone in its process: it counts this process's threads.

#![allow(clippy::disallowed_methods, reason = "the test reads what the kernel says of its threads")]

mod common;

use common::{Scratch, wait};
use octokv_base::{Buffer, Nanos};
use octokv_runtime::kernel::DEVICE_THREADS;
use octokv_runtime::{Channel, DeviceDriver, Doorbell, Operation, device_queue};
use octokv_sys::clock;
use octokv_sys::seccomp::{Refusal, refuse_io_uring};
use octokv_sys::thread;

const GONE_WITHIN: Nanos = Nanos::from_secs(10);

/// Threads of this process that carry out device operations.
fn workers() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.filter(|name| name.trim() == "octokv-disk").count()
}

#[test]
fn where_io_uring_is_refused_a_fixed_number_of_threads_serves_any_number_of_devices_and_ends_with_them() {
    for refusal in [Refusal::Forbidden, Refusal::Missing] {
        let body = move || {
            refuse_io_uring(refusal).unwrap();
            let doorbell = Doorbell::new().unwrap();
            let refused = device_queue(DeviceDriver::Uring, 8, &doorbell).err().expect("is refused");
            assert_eq!(refused.raw_os_error(), Some(refusal.errno()));
            let (queue, chosen) = device_queue(DeviceDriver::Auto, 256, &doorbell).unwrap();
            assert_eq!(chosen, DeviceDriver::Threads);
            assert_eq!(queue.wait_descriptor(), None);
            let channel = Channel::new(queue, 256);
            let scratches: Vec<_> =
                (0..6).map(|index| Scratch::new(&format!("workers-{refusal:?}-{index}"))).collect();
            let files: Vec<_> = scratches.iter().map(|one| channel.open(&one.media).unwrap()).collect();
            let read =
                |index: u64| Operation::Read { offset: index % 64 * 65_536, buffer: Buffer::zeroed(65_536) };
            let tickets: Vec<_> = (0..600)
                .map(|index| channel.submit(files[index % files.len()], read(index as u64)))
                .collect();
            assert_eq!(workers(), DEVICE_THREADS);
            for ticket in tickets {
                assert_eq!(wait(&channel, ticket).result, Ok(()));
            }
            assert_eq!(workers(), DEVICE_THREADS);
            drop(channel);
            // A thread that was waited for may be listed a moment longer: the kernel tells of its end before it is gone.
            let begun = clock::now();
            while workers() > 0 {
                assert!(clock::now().since(begun) < GONE_WITHIN, "a worker outlived its queue");
                std::thread::yield_now();
            }
        };
        thread::spawn("refused", body).unwrap().join().unwrap();
    }
}
