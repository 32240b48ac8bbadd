//! One conformance suite for every device queue: io_uring, worker threads, the simulated disk.

use crate::common::{SCRATCH_BYTES, ScratchFile, drivers, wait};
use octokv_base::{Buffer, Prng};
use octokv_runtime::device_queue::{DeviceQueue, FileId};
use octokv_runtime::simulated::{SimDiskConfig, SimEnv, SimEnvConfig};
use octokv_runtime::{
    CoreWaker, DeviceDriver, DeviceHandle, DeviceSource, IoCompletion, IoOperation, block_on,
    open_device_queue,
};
use std::cell::RefCell;
use std::rc::Rc;

/// The errors of a transfer beyond the device's end: the kernel's, and the simulated disk's.
const EIO: i32 = 5;
const EINVAL: i32 = 22;
/// That of what waits for a device that is closed.
const EBADF: i32 = 9;

fn buffer(seed: u64, bytes: usize) -> Buffer {
    let mut buffer = Buffer::zeroed(bytes);
    Prng::new(seed).fill(&mut buffer);
    buffer
}

/// A device handle over one kind of queue, and the simulation that advances its time, if any.
struct QueueFixture {
    source: DeviceSource,
    devices: DeviceHandle,
    env: Option<SimEnv>,
    _scratch: Option<ScratchFile>,
}

impl QueueFixture {
    fn wait(&self, future: octokv_runtime::CompletionFuture) -> octokv_runtime::IoCompletion {
        match &self.env {
            None => wait(&self.devices, future),
            Some(env) => block_on(future, || self.simulated_step(env)),
        }
    }

    fn simulated_step(&self, env: &SimEnv) {
        if self.devices.poll() == 0 {
            assert!(env.step(octokv_base::Nanos::NEVER), "no event is scheduled");
        }
    }

    fn poll(&self) {
        match &self.env {
            None => {
                self.devices.poll();
            }
            Some(env) => self.simulated_step(env),
        }
    }
}

fn each_kind(name: &str, depth: usize, test: impl Fn(&QueueFixture)) {
    for driver in drivers() {
        let scratch = ScratchFile::new(&format!("{name}-{driver:?}"));
        let core_waker = CoreWaker::new().unwrap();
        let (queue, chosen) = open_device_queue(driver, depth, &core_waker).unwrap();
        assert_eq!(chosen, driver);
        let devices = DeviceHandle::new(queue, depth);
        test(&QueueFixture { source: scratch.source.clone(), devices, env: None, _scratch: Some(scratch) });
    }
    let env = SimEnv::new(SimEnvConfig::new(1));
    let host = env.add_host();
    let disk = env.add_disk(host, SimDiskConfig { size_bytes: SCRATCH_BYTES, ..Default::default() });
    let devices = DeviceHandle::new(Box::new(env.device_queue(host)), depth);
    test(&QueueFixture { source: env.device_source(disk), devices, env: Some(env), _scratch: None });
}

#[test]
fn written_bytes_are_read_and_buffers_returned() {
    each_kind("round", 8, |fixture| {
        let file = fixture.devices.open(&fixture.source).unwrap();
        for (index, bytes) in [4096, 65_536, 1 << 20].into_iter().enumerate() {
            let offset = (index as u64) << 20;
            let write = IoOperation::Write { offset, buffer: buffer(7 + index as u64, bytes) };
            let written = fixture.wait(fixture.devices.submit(file, write));
            assert_eq!(written.result, Ok(()));
            let mut back = written.buffer.unwrap();
            assert_eq!(back[..], buffer(7 + index as u64, bytes)[..]);
            back.fill(0);
            let read = fixture.wait(fixture.devices.submit(file, IoOperation::Read { offset, buffer: back }));
            assert_eq!(read.result, Ok(()));
            assert_eq!(read.buffer.unwrap()[..], buffer(7 + index as u64, bytes)[..]);
        }
        assert_eq!(fixture.wait(fixture.devices.submit(file, IoOperation::Flush)).result, Ok(()));
        assert_eq!(fixture.devices.in_flight(), 0);
    });
}

#[test]
fn buffers_are_written_side_by_side() {
    each_kind("vectored", 4, |fixture| {
        let file = fixture.devices.open(&fixture.source).unwrap();
        let submit = |operation| fixture.wait(fixture.devices.submit(file, operation));
        for (first, lengths) in [(1, vec![4096]), (10, vec![4096, 12_288, 8192]), (40, vec![4096; 300])] {
            let offset = first * 4096;
            let parts =
                || lengths.iter().enumerate().map(|(index, &bytes)| buffer(first + index as u64, bytes));
            let write = IoOperation::WriteVectored { offset, buffers: parts().collect() };
            assert_eq!(submit(write).result, Ok(()));
            let bytes = lengths.iter().sum();
            let read = submit(IoOperation::Read { offset, buffer: Buffer::zeroed(bytes) }).buffer.unwrap();
            let mut at = 0;
            for (index, part) in parts().enumerate() {
                assert_eq!(read[at..at + part.len()], part[..], "part {index} of {}", lengths.len());
                at += part.len();
            }
        }
        let beyond = vec![buffer(1, 4096), buffer(2, 4096)];
        let write = IoOperation::WriteVectored { offset: SCRATCH_BYTES - 4096, buffers: beyond };
        assert!(submit(write).result.is_err() || fixture.env.is_none(), "only a file grows");
        assert_eq!(fixture.devices.in_flight(), 0);
    });
}

#[test]
fn a_trimmed_range_is_zero_and_its_neighbours_unchanged() {
    each_kind("trim", 4, |fixture| {
        let file = fixture.devices.open(&fixture.source).unwrap();
        let submit = |operation| fixture.wait(fixture.devices.submit(file, operation));
        let write = IoOperation::Write { offset: 0, buffer: buffer(1, 65_536) };
        assert_eq!(submit(write).result, Ok(()));
        assert_eq!(submit(IoOperation::Trim { offset: 16_384, bytes: 32_768 }).result, Ok(()));
        let read = submit(IoOperation::Read { offset: 0, buffer: Buffer::zeroed(65_536) }).buffer.unwrap();
        let (expected, trimmed) = (buffer(1, 65_536), 16_384..49_152);
        assert!(read[trimmed.clone()].iter().all(|&byte| byte == 0));
        assert_eq!(read[..trimmed.start], expected[..trimmed.start]);
        assert_eq!(read[trimmed.end..], expected[trimmed.end..]);
    });
}

#[test]
fn a_transfer_beyond_the_end_fails_and_returns_its_buffer() {
    each_kind("beyond", 4, |fixture| {
        let file = fixture.devices.open(&fixture.source).unwrap();
        let beyond = IoOperation::Read { offset: SCRATCH_BYTES - 4096, buffer: buffer(1, 8192) };
        let completion = fixture.wait(fixture.devices.submit(file, beyond));
        assert!(completion.result.is_err());
        assert_eq!(completion.buffer.unwrap().len(), 8192);
    });
}

#[test]
fn operations_beyond_the_depth_are_queued_and_all_execute() {
    each_kind("depth", 4, |fixture| {
        let file = fixture.devices.open(&fixture.source).unwrap();
        let write = |index: u64| IoOperation::Write { offset: index * 4096, buffer: buffer(index, 4096) };
        let futures: Vec<_> = (0..200).map(|index| fixture.devices.submit(file, write(index))).collect();
        assert_eq!(fixture.devices.in_flight(), 200);
        for future in futures {
            assert_eq!(fixture.wait(future).result, Ok(()));
        }
        let mut order: Vec<u64> = (0..200).collect();
        order.sort_by_key(|&index| octokv_base::prng::mix64(index));
        for index in order {
            let read = IoOperation::Read { offset: index * 4096, buffer: Buffer::zeroed(4096) };
            let read = fixture.wait(fixture.devices.submit(file, read));
            assert_eq!(read.buffer.unwrap()[..], buffer(index, 4096)[..]);
        }
    });
}

#[test]
fn at_depth_one_operations_execute_in_submission_order() {
    each_kind("order", 1, |fixture| {
        let file = fixture.devices.open(&fixture.source).unwrap();
        let order = Rc::new(RefCell::new(Vec::new()));
        let core_waker = CoreWaker::without_eventfd();
        let mut tasks = octokv_runtime::TaskSlab::new(50, core_waker);
        for index in 0..50 {
            let future =
                fixture.devices.submit(file, IoOperation::Write { offset: 0, buffer: buffer(index, 4096) });
            let order = Rc::clone(&order);
            let task = async move {
                assert_eq!(future.await.result, Ok(()));
                order.borrow_mut().push(index);
            };
            assert!(tasks.spawn(task).is_ok());
        }
        while tasks.running() > 0 {
            fixture.poll();
            tasks.poll_ready();
        }
        assert_eq!(*order.borrow(), (0..50).collect::<Vec<_>>());
        let read = IoOperation::Read { offset: 0, buffer: Buffer::zeroed(4096) };
        assert_eq!(
            fixture.wait(fixture.devices.submit(file, read)).buffer.unwrap()[..],
            buffer(49, 4096)[..]
        );
    });
}

#[test]
fn a_dropped_future_neither_stops_its_operation_nor_leaks_its_slot() {
    each_kind("dropped", 2, |fixture| {
        let file = fixture.devices.open(&fixture.source).unwrap();
        for index in 0..20 {
            let write = IoOperation::Write { offset: index * 4096, buffer: buffer(index, 4096) };
            drop(fixture.devices.submit(file, write));
        }
        while fixture.devices.in_flight() > 0 {
            fixture.poll();
        }
        for index in 0..20 {
            let read = IoOperation::Read { offset: index * 4096, buffer: Buffer::zeroed(4096) };
            let read = fixture.wait(fixture.devices.submit(file, read));
            assert_eq!(read.buffer.unwrap()[..], buffer(index, 4096)[..]);
        }
    });
}

#[test]
fn a_device_handle_dropped_with_operations_in_flight_frees_no_buffer_early() {
    for driver in drivers() {
        let scratch = ScratchFile::new(&format!("abandoned-{driver:?}"));
        let pool = octokv_base::BufferPool::new(64 << 20);
        for round in 0..20 {
            let (queue, _) = open_device_queue(driver, 32, &CoreWaker::new().unwrap()).unwrap();
            let devices = DeviceHandle::new(queue, 32);
            let file = devices.open(&scratch.source).unwrap();
            let mut futures = Vec::new();
            for index in 0..32 {
                let mut buffer = pool.take(65_536).unwrap();
                let offset = index % 16 * 65_536;
                buffer.fill(round);
                futures.push(devices.submit(file, IoOperation::Read { offset, buffer }));
            }
            devices.poll();
        }
        // The drop waits for the kernel's completions: every buffer is back in the pool, once.
        assert_eq!(pool.in_use_bytes(), 0, "{driver:?}");
    }
}

#[test]
fn a_queue_dropped_with_queued_writes_has_written_them_all() {
    for driver in drivers() {
        let scratch = ScratchFile::new(&format!("queued-{driver:?}"));
        let (mut queue, _) = open_device_queue(driver, 64, &CoreWaker::new().unwrap()).unwrap();
        let file = queue.open(&scratch.source).unwrap();
        for index in 0..64 {
            let write = IoOperation::Write { offset: index * 65_536, buffer: buffer(index, 65_536) };
            queue.submit(index as u32, file, write);
        }
        // io_uring receives the operations by a poll; their completions are ignored.
        queue.poll(&mut Vec::new());
        drop(queue);
        let (queue, _) = open_device_queue(driver, 8, &CoreWaker::new().unwrap()).unwrap();
        let devices = DeviceHandle::new(queue, 8);
        let file = devices.open(&scratch.source).unwrap();
        for index in 0..64 {
            let read = IoOperation::Read { offset: index * 65_536, buffer: Buffer::zeroed(65_536) };
            let read = wait(&devices, devices.submit(file, read));
            assert_eq!(read.result, Ok(()));
            assert!(read.buffer.unwrap()[..] == buffer(index, 65_536)[..], "{driver:?} lost write {index}");
        }
    }
}

#[test]
fn each_failed_operation_returns_its_own_errno() {
    each_kind("errors", 8, |fixture| {
        let file = fixture.devices.open(&fixture.source).unwrap();
        // Every other read is beyond the end; the completions arrive in any order.
        let read = |index: u64| {
            let beyond = if index.is_multiple_of(2) { 0 } else { SCRATCH_BYTES };
            let offset = beyond + index * 4096;
            fixture.devices.submit(file, IoOperation::Read { offset, buffer: Buffer::zeroed(4096) })
        };
        let futures: Vec<_> = (0..100).map(|index| (index, read(index))).collect();
        for (index, future) in futures {
            let completion = fixture.wait(future);
            let failure = if fixture.env.is_some() { EINVAL } else { EIO };
            let want = if index.is_multiple_of(2) { Ok(()) } else { Err(failure) };
            assert_eq!((index, completion.result), (index, want));
            assert_eq!(completion.buffer.unwrap().len(), 4096);
        }
        assert_eq!(fixture.devices.in_flight(), 0);
        // The queue works on after errors.
        let write = IoOperation::Write { offset: 0, buffer: buffer(1, 4096) };
        assert_eq!(fixture.wait(fixture.devices.submit(file, write)).result, Ok(()));
        assert_eq!(fixture.wait(fixture.devices.submit(file, IoOperation::Flush)).result, Ok(()));
    });
}

#[test]
fn several_devices_on_one_queue_keep_their_bytes_apart() {
    for driver in drivers() {
        let scratches: Vec<_> =
            (0..5).map(|index| ScratchFile::new(&format!("apart-{driver:?}-{index}"))).collect();
        let (queue, _) = open_device_queue(driver, 16, &CoreWaker::new().unwrap()).unwrap();
        let devices = DeviceHandle::new(queue, 16);
        let files: Vec<_> = scratches.iter().map(|one| devices.open(&one.source).unwrap()).collect();
        let seed = |file: usize, block: u64| file as u64 * 1_000 + block;
        let mut futures = Vec::new();
        for block in 0..20 {
            for (index, &file) in files.iter().enumerate() {
                let buffer = buffer(seed(index, block), 4096);
                futures.push(devices.submit(file, IoOperation::Write { offset: block * 4096, buffer }));
            }
        }
        for future in futures {
            assert_eq!(wait(&devices, future).result, Ok(()));
        }
        for (index, &file) in files.iter().enumerate() {
            for block in 0..20 {
                let read = IoOperation::Read { offset: block * 4096, buffer: Buffer::zeroed(4096) };
                let read = wait(&devices, devices.submit(file, read)).buffer.unwrap();
                assert_eq!(read[..], buffer(seed(index, block), 4096)[..]);
            }
        }
    }
}

#[test]
fn auto_selects_the_available_driver() {
    let core_waker = CoreWaker::new().unwrap();
    let (queue, chosen) = open_device_queue(DeviceDriver::Auto, 8, &core_waker).unwrap();
    assert_eq!(chosen, drivers()[0]);
    assert_eq!(queue.completion_eventfd().is_some(), chosen == DeviceDriver::Uring);
}

/// A queue whose operations complete when the test says so.
#[derive(Clone, Default)]
struct ManualQueue(Rc<RefCell<ManualState>>);

#[derive(Default)]
struct ManualState {
    /// The operations that have begun: token, device, offset.
    begun: Vec<(u32, FileId, u64)>,
    completed: Vec<u32>,
    files: u32,
}

impl ManualQueue {
    /// The devices and offsets of the operations at the queue.
    fn begun(&self) -> Vec<(u32, u64)> {
        self.0.borrow().begun.iter().map(|&(_, file, offset)| (file.0, offset)).collect()
    }

    fn complete(&self, file: FileId, offset: u64) {
        let state = &mut *self.0.borrow_mut();
        let at = state.begun.iter().position(|&(_, of, at)| (of, at) == (file, offset)).expect("has begun");
        state.completed.push(state.begun.remove(at).0);
    }
}

impl DeviceQueue for ManualQueue {
    fn open(&mut self, _source: &DeviceSource) -> std::io::Result<FileId> {
        let files = &mut self.0.borrow_mut().files;
        *files += 1;
        Ok(FileId(*files))
    }
    fn close(&mut self, _file: FileId) {}
    fn submit(&mut self, token: u32, file: FileId, operation: IoOperation) {
        let IoOperation::Read { offset, .. } = operation else { panic!("only reads are used") };
        self.0.borrow_mut().begun.push((token, file, offset));
    }
    fn poll(&mut self, completions: &mut Vec<(u32, IoCompletion)>) {
        let completed = std::mem::take(&mut self.0.borrow_mut().completed);
        completions.extend(
            completed.into_iter().map(|token| (token, IoCompletion { buffer: None, result: Ok(()) })),
        );
    }
    fn in_flight(&self) -> usize {
        self.0.borrow().begun.len()
    }
}

#[test]
fn a_bounded_device_that_hangs_leaves_the_queue_to_the_others() {
    let (queue, scratch) = (ManualQueue::default(), ScratchFile::new("bounded"));
    let devices = DeviceHandle::new(Box::new(queue.clone()), 8);
    let [hung, other, free] = [0; 3].map(|_| devices.open(&scratch.source).unwrap());
    devices.set_depth(hung, 3);
    devices.set_depth(other, 2);
    let read = |file, offset| devices.submit(file, IoOperation::Read { offset, buffer: Buffer::zeroed(512) });
    let of_hung: Vec<_> = (0..20).map(|at| read(hung, at)).collect();
    let mut of_other: Vec<_> = (0..4).map(|at| read(other, at)).collect();
    let of_free: Vec<_> = (0..3).map(|at| read(free, at)).collect();
    let first = [
        (hung.0, 0),
        (hung.0, 1),
        (hung.0, 2),
        (other.0, 0),
        (other.0, 1),
        (free.0, 0),
        (free.0, 1),
        (free.0, 2),
    ];
    assert_eq!((queue.begun(), devices.in_flight()), (first.to_vec(), 27));
    // Those of the others follow each other in order, and nothing of the one that hangs begins.
    queue.complete(other, 1);
    assert_eq!(devices.poll(), 1);
    assert_eq!(queue.begun().last(), Some(&(other.0, 2)));
    drop(of_other.pop());
    queue.complete(other, 0);
    assert_eq!(devices.poll(), 1);
    // A dropped future neither stops its operation nor frees its place early.
    assert_eq!(queue.begun().last(), Some(&(other.0, 3)));
    for at in 0..3 {
        queue.complete(free, at);
    }
    assert_eq!((devices.poll(), queue.begun().len()), (3, 5));
    queue.complete(other, 2);
    queue.complete(other, 3);
    assert_eq!((devices.poll(), queue.begun().len()), (2, 3));
    let more: Vec<_> = (10..13).map(|at| read(other, at)).collect();
    assert_eq!(queue.begun()[3..], [(other.0, 10), (other.0, 11)]);
    // It ends one operation after all: the next one of it begins.
    queue.complete(hung, 1);
    assert_eq!((devices.poll(), queue.begun().last()), (1, Some(&(hung.0, 3))));
    // Closed: what has not begun fails, and the bound ends with the operations that have.
    devices.close(hung);
    assert_eq!(devices.in_flight(), 3 + 3);
    let failed = |of: octokv_runtime::CompletionFuture| block_on(of, || ()).result;
    for (at, read) in of_hung.into_iter().enumerate() {
        match at {
            1 => assert_eq!(failed(read), Ok(())),
            0 | 2 | 3 => drop(read),
            _ => assert_eq!(failed(read), Err(EBADF), "{at}"),
        }
    }
    let reopened = devices.open(&scratch.source).unwrap();
    devices.set_depth(reopened, 1);
    for at in [0, 2, 3] {
        queue.complete(hung, at);
    }
    queue.complete(other, 10);
    assert_eq!(devices.poll(), 4);
    let again: Vec<_> = (0..2).map(|at| read(reopened, at)).collect();
    assert_eq!(queue.begun(), [(other.0, 11), (other.0, 12), (reopened.0, 0)]);
    drop((of_other, of_free, more, again));
}
