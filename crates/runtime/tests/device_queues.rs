//! One conformance suite for every device queue: io_uring, worker threads, the virtual disk.

mod common;

use common::{SCRATCH_BYTES, Scratch, drivers, wait};
use octokv_base::{Buffer, Random};
use octokv_runtime::simulated::{DiskSettings, VirtualWorld, WorldSettings};
use octokv_runtime::{Channel, DeviceDriver, Doorbell, Media, Operation, block_on, device_queue};
use std::cell::RefCell;
use std::rc::Rc;

/// What the kernel answers beyond a device's end, and what the virtual disk does.
const EIO: i32 = 5;
const EINVAL: i32 = 22;

fn buffer(seed: u64, bytes: usize) -> Buffer {
    let mut buffer = Buffer::zeroed(bytes);
    Random::new(seed).fill(&mut buffer);
    buffer
}

/// A channel of some depth over each kind of queue, and what lets time pass for it.
struct Bench {
    media: Media,
    channel: Channel,
    world: Option<VirtualWorld>,
    _scratch: Option<Scratch>,
}

impl Bench {
    fn wait(&self, ticket: octokv_runtime::Ticket) -> octokv_runtime::Completed {
        match &self.world {
            None => wait(&self.channel, ticket),
            Some(world) => block_on(ticket, || self.virtual_step(world)),
        }
    }

    fn virtual_step(&self, world: &VirtualWorld) {
        if self.channel.poll() == 0 {
            assert!(world.step(octokv_base::Nanos::NEVER), "nothing will ever happen");
        }
    }

    fn poll(&self) {
        match &self.world {
            None => {
                self.channel.poll();
            }
            Some(world) => self.virtual_step(world),
        }
    }
}

fn each_kind(name: &str, depth: usize, test: impl Fn(&Bench)) {
    for driver in drivers() {
        let scratch = Scratch::new(&format!("{name}-{driver:?}"));
        let doorbell = Doorbell::new().unwrap();
        let (queue, chosen) = device_queue(driver, depth, &doorbell).unwrap();
        assert_eq!(chosen, driver);
        let channel = Channel::new(queue, depth);
        test(&Bench { media: scratch.media.clone(), channel, world: None, _scratch: Some(scratch) });
    }
    let world = VirtualWorld::new(WorldSettings::new(1));
    let host = world.add_host();
    let disk = world.add_disk(host, DiskSettings { size_bytes: SCRATCH_BYTES, ..Default::default() });
    let channel = Channel::new(Box::new(world.queue(host)), depth);
    test(&Bench { media: world.media(disk), channel, world: Some(world), _scratch: None });
}

#[test]
fn what_is_written_is_read_and_buffers_come_back() {
    each_kind("round", 8, |bench| {
        let file = bench.channel.open(&bench.media).unwrap();
        for (index, bytes) in [4096, 65_536, 1 << 20].into_iter().enumerate() {
            let offset = (index as u64) << 20;
            let write = Operation::Write { offset, buffer: buffer(7 + index as u64, bytes) };
            let written = bench.wait(bench.channel.submit(file, write));
            assert_eq!(written.result, Ok(()));
            let mut back = written.buffer.unwrap();
            assert_eq!(back[..], buffer(7 + index as u64, bytes)[..]);
            back.fill(0);
            let read = bench.wait(bench.channel.submit(file, Operation::Read { offset, buffer: back }));
            assert_eq!(read.result, Ok(()));
            assert_eq!(read.buffer.unwrap()[..], buffer(7 + index as u64, bytes)[..]);
        }
        assert_eq!(bench.wait(bench.channel.submit(file, Operation::Flush)).result, Ok(()));
        assert_eq!(bench.channel.in_flight(), 0);
    });
}

#[test]
fn a_trimmed_range_is_zero_and_its_neighbours_are_not() {
    each_kind("trim", 4, |bench| {
        let file = bench.channel.open(&bench.media).unwrap();
        let submit = |operation| bench.wait(bench.channel.submit(file, operation));
        let write = Operation::Write { offset: 0, buffer: buffer(1, 65_536) };
        assert_eq!(submit(write).result, Ok(()));
        assert_eq!(submit(Operation::Trim { offset: 16_384, bytes: 32_768 }).result, Ok(()));
        let read = submit(Operation::Read { offset: 0, buffer: Buffer::zeroed(65_536) }).buffer.unwrap();
        let (expected, trimmed) = (buffer(1, 65_536), 16_384..49_152);
        assert!(read[trimmed.clone()].iter().all(|&byte| byte == 0));
        assert_eq!(read[..trimmed.start], expected[..trimmed.start]);
        assert_eq!(read[trimmed.end..], expected[trimmed.end..]);
    });
}

#[test]
fn a_transfer_beyond_the_end_fails_and_gives_its_buffer_back() {
    each_kind("beyond", 4, |bench| {
        let file = bench.channel.open(&bench.media).unwrap();
        let beyond = Operation::Read { offset: SCRATCH_BYTES - 4096, buffer: buffer(1, 8192) };
        let answer = bench.wait(bench.channel.submit(file, beyond));
        assert!(answer.result.is_err());
        assert_eq!(answer.buffer.unwrap().len(), 8192);
    });
}

#[test]
fn more_operations_than_the_depth_wait_and_all_are_carried_out() {
    each_kind("depth", 4, |bench| {
        let file = bench.channel.open(&bench.media).unwrap();
        let write = |index: u64| Operation::Write { offset: index * 4096, buffer: buffer(index, 4096) };
        let tickets: Vec<_> = (0..200).map(|index| bench.channel.submit(file, write(index))).collect();
        assert_eq!(bench.channel.in_flight(), 200);
        for ticket in tickets {
            assert_eq!(bench.wait(ticket).result, Ok(()));
        }
        let mut order: Vec<u64> = (0..200).collect();
        order.sort_by_key(|&index| octokv_base::prng::mix(index));
        for index in order {
            let read = Operation::Read { offset: index * 4096, buffer: Buffer::zeroed(4096) };
            let read = bench.wait(bench.channel.submit(file, read));
            assert_eq!(read.buffer.unwrap()[..], buffer(index, 4096)[..]);
        }
    });
}

#[test]
fn one_at_a_time_operations_are_carried_out_in_the_order_they_were_submitted() {
    each_kind("order", 1, |bench| {
        let file = bench.channel.open(&bench.media).unwrap();
        let order = Rc::new(RefCell::new(Vec::new()));
        let doorbell = Doorbell::silent();
        let mut tasks = octokv_runtime::Tasks::new(50, doorbell);
        for index in 0..50 {
            let ticket =
                bench.channel.submit(file, Operation::Write { offset: 0, buffer: buffer(index, 4096) });
            let order = Rc::clone(&order);
            let task = async move {
                assert_eq!(ticket.await.result, Ok(()));
                order.borrow_mut().push(index);
            };
            assert!(tasks.spawn(task).is_ok());
        }
        while tasks.running() > 0 {
            bench.poll();
            tasks.poll_ready();
        }
        assert_eq!(*order.borrow(), (0..50).collect::<Vec<_>>());
        let read = Operation::Read { offset: 0, buffer: Buffer::zeroed(4096) };
        assert_eq!(bench.wait(bench.channel.submit(file, read)).buffer.unwrap()[..], buffer(49, 4096)[..]);
    });
}

#[test]
fn a_dropped_ticket_does_not_stop_its_operation_nor_lose_its_slot() {
    each_kind("dropped", 2, |bench| {
        let file = bench.channel.open(&bench.media).unwrap();
        for index in 0..20 {
            let write = Operation::Write { offset: index * 4096, buffer: buffer(index, 4096) };
            drop(bench.channel.submit(file, write));
        }
        while bench.channel.in_flight() > 0 {
            bench.poll();
        }
        for index in 0..20 {
            let read = Operation::Read { offset: index * 4096, buffer: Buffer::zeroed(4096) };
            let read = bench.wait(bench.channel.submit(file, read));
            assert_eq!(read.buffer.unwrap()[..], buffer(index, 4096)[..]);
        }
    });
}

#[test]
fn a_channel_dropped_with_operations_in_flight_leaves_the_kernel_no_freed_memory() {
    for driver in drivers() {
        let scratch = Scratch::new(&format!("abandoned-{driver:?}"));
        let pool = octokv_base::Pool::new(64 << 20);
        for round in 0..20 {
            let (queue, _) = device_queue(driver, 32, &Doorbell::new().unwrap()).unwrap();
            let channel = Channel::new(queue, 32);
            let file = channel.open(&scratch.media).unwrap();
            let mut tickets = Vec::new();
            for index in 0..32 {
                let mut buffer = pool.take(65_536).unwrap();
                let offset = index % 16 * 65_536;
                buffer.fill(round);
                tickets.push(channel.submit(file, Operation::Read { offset, buffer }));
            }
            channel.poll();
        }
        // Queue and buffers are gone only when the kernel had answered: every buffer is back, once.
        assert_eq!(pool.out_bytes(), 0, "{driver:?}");
    }
}

#[test]
fn a_queue_dropped_with_writes_in_line_has_written_them_all() {
    for driver in drivers() {
        let scratch = Scratch::new(&format!("in-line-{driver:?}"));
        let (mut queue, _) = device_queue(driver, 64, &Doorbell::new().unwrap()).unwrap();
        let file = queue.open(&scratch.media).unwrap();
        for index in 0..64 {
            let write = Operation::Write { offset: index * 65_536, buffer: buffer(index, 65_536) };
            queue.submit(index as u32, file, write);
        }
        // io_uring is handed them by a poll; nobody looks at the answers.
        queue.poll(&mut Vec::new());
        drop(queue);
        let (queue, _) = device_queue(driver, 8, &Doorbell::new().unwrap()).unwrap();
        let channel = Channel::new(queue, 8);
        let file = channel.open(&scratch.media).unwrap();
        for index in 0..64 {
            let read = Operation::Read { offset: index * 65_536, buffer: Buffer::zeroed(65_536) };
            let read = wait(&channel, channel.submit(file, read));
            assert_eq!(read.result, Ok(()));
            assert!(read.buffer.unwrap()[..] == buffer(index, 65_536)[..], "{driver:?} lost write {index}");
        }
    }
}

#[test]
fn the_error_number_of_each_failed_operation_comes_back_with_its_own_ticket() {
    each_kind("errors", 8, |bench| {
        let file = bench.channel.open(&bench.media).unwrap();
        // Every other read lies beyond the end; they are answered in any order.
        let read = |index: u64| {
            let beyond = if index.is_multiple_of(2) { 0 } else { SCRATCH_BYTES };
            let offset = beyond + index * 4096;
            bench.channel.submit(file, Operation::Read { offset, buffer: Buffer::zeroed(4096) })
        };
        let tickets: Vec<_> = (0..100).map(|index| (index, read(index))).collect();
        for (index, ticket) in tickets {
            let answer = bench.wait(ticket);
            let failure = if bench.world.is_some() { EINVAL } else { EIO };
            let want = if index.is_multiple_of(2) { Ok(()) } else { Err(failure) };
            assert_eq!((index, answer.result), (index, want));
            assert_eq!(answer.buffer.unwrap().len(), 4096);
        }
        assert_eq!(bench.channel.in_flight(), 0);
        // The queue works on after errors.
        let write = Operation::Write { offset: 0, buffer: buffer(1, 4096) };
        assert_eq!(bench.wait(bench.channel.submit(file, write)).result, Ok(()));
        assert_eq!(bench.wait(bench.channel.submit(file, Operation::Flush)).result, Ok(()));
    });
}

#[test]
fn several_devices_on_one_queue_keep_their_bytes_apart() {
    for driver in drivers() {
        let scratches: Vec<_> =
            (0..5).map(|index| Scratch::new(&format!("apart-{driver:?}-{index}"))).collect();
        let (queue, _) = device_queue(driver, 16, &Doorbell::new().unwrap()).unwrap();
        let channel = Channel::new(queue, 16);
        let files: Vec<_> = scratches.iter().map(|one| channel.open(&one.media).unwrap()).collect();
        let seed = |file: usize, block: u64| file as u64 * 1_000 + block;
        let mut tickets = Vec::new();
        for block in 0..20 {
            for (index, &file) in files.iter().enumerate() {
                let buffer = buffer(seed(index, block), 4096);
                tickets.push(channel.submit(file, Operation::Write { offset: block * 4096, buffer }));
            }
        }
        for ticket in tickets {
            assert_eq!(wait(&channel, ticket).result, Ok(()));
        }
        for (index, &file) in files.iter().enumerate() {
            for block in 0..20 {
                let read = Operation::Read { offset: block * 4096, buffer: Buffer::zeroed(4096) };
                let read = wait(&channel, channel.submit(file, read)).buffer.unwrap();
                assert_eq!(read[..], buffer(seed(index, block), 4096)[..]);
            }
        }
    }
}

#[test]
fn auto_takes_what_works() {
    let doorbell = Doorbell::new().unwrap();
    let (queue, chosen) = device_queue(DeviceDriver::Auto, 8, &doorbell).unwrap();
    assert_eq!(chosen, drivers()[0]);
    assert_eq!(queue.wait_descriptor().is_some(), chosen == DeviceDriver::Uring);
}
