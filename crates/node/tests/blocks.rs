//! Block namespaces against a model: all pairs of block sizes, any order of completions, any power loss.

use octokv_base::{Buffer, BufferPool, Lba, Nanos, Prng};
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_device::power_loss::{PowerLossDisk, PowerLossMode};
use octokv_device::{Device, DeviceError, DeviceFuture, Geometry, IoResult, MemoryDevice, RamDisk};
use octokv_node::block_backend::{BlockBackend, BlockVolume};
use octokv_nvmf::{LbaRange, RequestOperation, RequestOutcome};
use octokv_runtime::{
    CoreWaker, CpuTime, DeviceDriver, DeviceHandle, ReactorHandle, TaskSlab, block_on, open_device_queue,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

const DEVICE_BYTES: usize = 256 << 10;
/// Block sizes of the namespace and of the device.
const SIZES: [(u32, u32); 4] = [(512, 512), (4096, 512), (512, 4096), (4096, 4096)];

fn handle() -> ReactorHandle {
    let core_waker = CoreWaker::without_eventfd();
    let (queue, _) = open_device_queue(DeviceDriver::Threads, 1, &core_waker).unwrap();
    ReactorHandle::new(core_waker, DeviceHandle::new(queue, 1), CpuTime::measured())
}

fn blocks(device: Rc<dyn Device>, block_bytes: u32) -> Rc<BlockBackend> {
    let volume = BlockVolume::new(block_bytes, device.geometry().bytes());
    let (pool, name) = (BufferPool::new(8 << 20), Rc::from("disk"));
    Rc::new(BlockBackend::new(volume, device, pool, handle(), name))
}

fn data(bytes: usize, seed: u64) -> Buffer {
    let mut buffer = Buffer::zeroed(bytes);
    Prng::new(seed).fill(&mut buffer);
    buffer
}

fn range(lba: u64, blocks: u64) -> LbaRange {
    LbaRange { lba: Lba(lba), blocks: blocks as u32 }
}

/// A random range of the namespace's blocks.
fn random_range(random: &mut Prng, all: u64) -> LbaRange {
    let lba = random.below(all);
    range(lba, 1 + random.below((all - lba).min(20)))
}

#[derive(Clone, Copy, Debug)]
enum OperationKind {
    Read,
    Verify,
    /// With the blocks of the model; if given, the byte at this position differs, which counts round.
    Compare(Option<usize>),
    WriteZeroes {
        force_unit_access: bool,
        deallocate: bool,
    },
    Write {
        force_unit_access: bool,
    },
}

/// On blocks from `lba` on, which counts round, as many as there are up to the last block.
#[derive(Clone, Copy)]
struct Operation {
    kind: OperationKind,
    lba: u64,
    blocks: u64,
}

/// One line, also in a failing list.
impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{:?}, {} blocks from {}", self.kind, self.blocks, self.lba)
    }
}

/// In parts, so that a failing list loses whole parts first.
fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let force_unit_access = || proptest::bool::weighted(0.25);
    let write_zeroes = (force_unit_access(), any::<bool>());
    let kind = prop_oneof![
        2 => Just(OperationKind::Read),
        1 => Just(OperationKind::Verify),
        1 => proptest::option::of(0..20 * 4096_usize).prop_map(OperationKind::Compare),
        1 => write_zeroes.prop_map(|(force_unit_access, deallocate)| {
            OperationKind::WriteZeroes { force_unit_access, deallocate }
        }),
        2 => force_unit_access().prop_map(|force_unit_access| OperationKind::Write { force_unit_access }),
    ];
    let operation = (kind, 0..512_u64, 1..=20_u64);
    let operation = operation.prop_map(|(kind, lba, blocks)| Operation { kind, lba, blocks });
    vec(vec(operation, 0..=34), 0..=34).prop_map(|parts| parts.concat())
}

fn assert_matches_a_model(block_bytes: u32, device_bytes: u32, operations: &[Operation]) {
    let disk = PowerLossDisk::new(data(DEVICE_BYTES, 1).to_vec(), device_bytes);
    let blocks = blocks(Rc::new(disk.clone()), block_bytes);
    let (mut completions, mut model) = (Prng::new(3), data(DEVICE_BYTES, 1).to_vec());
    let mut perform = |operation| {
        block_on(blocks.execute(operation), || {
            disk.complete_one(&mut completions);
        })
    };
    let block = block_bytes as usize;
    let all = (DEVICE_BYTES / block) as u64;
    for (operation, seed) in operations.iter().zip(0..) {
        let lba = operation.lba % all;
        let range = range(lba, operation.blocks.min(all - lba));
        let from = lba as usize * block;
        let to = from + range.blocks as usize * block;
        match operation.kind {
            OperationKind::Read => {
                let RequestOutcome::Blocks { buffer } = perform(RequestOperation::Read { range }) else {
                    panic!("blocks were not read")
                };
                assert!(*buffer == model[from..to], "{range:?} was read and differs");
            }
            OperationKind::Verify => {
                let outcome = perform(RequestOperation::Verify { range });
                assert!(matches!(outcome, RequestOutcome::Verified), "{range:?} was not verified");
            }
            OperationKind::Compare(different) => {
                let mut there = Buffer::zeroed(to - from);
                there.copy_from_slice(&model[from..to]);
                if let Some(at) = different {
                    there[at % (to - from)] ^= 1;
                }
                let outcome = perform(RequestOperation::Compare { lba: range.lba, data: there });
                match different {
                    None => assert!(matches!(outcome, RequestOutcome::Verified), "{range:?} is as compared"),
                    Some(_) => assert!(matches!(outcome, RequestOutcome::Mismatch), "{range:?} is not"),
                }
            }
            OperationKind::WriteZeroes { force_unit_access, deallocate } => {
                model[from..to].fill(0);
                let zeroes = RequestOperation::WriteZeroes { range, force_unit_access, deallocate };
                assert!(matches!(perform(zeroes), RequestOutcome::Written), "{range:?} was not zeroed");
            }
            OperationKind::Write { force_unit_access } => {
                let new = data(to - from, seed);
                model[from..to].copy_from_slice(&new);
                let write = RequestOperation::Write { lba: range.lba, data: new, force_unit_access };
                assert!(matches!(perform(write), RequestOutcome::Written), "{range:?} was not written");
            }
        }
    }
    assert!(disk.contents() == model, "a byte outside a range changed");
    assert_eq!(blocks.pool.in_use_bytes(), 0, "buffers in use");
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 10, rng_seed: RngSeed::Fixed(18), failure_persistence: None, max_shrink_iters: 2_000,
        ..ProptestConfig::default()
    })]

    #[test]
    fn block_operations_match_a_model(
        block_bytes in prop_oneof![Just(512), Just(4_096)],
        device_bytes in prop_oneof![Just(512), Just(4_096)],
        operations in operations(),
    ) {
        assert_matches_a_model(block_bytes, device_bytes, &operations);
    }
}

#[test]
fn concurrent_partial_writes_of_one_device_block_are_all_kept() {
    for seed in 0..40 {
        let disk = PowerLossDisk::new(vec![0; DEVICE_BYTES], 4096);
        let blocks = blocks(Rc::new(disk.clone()), 512);
        let (mut random, mut model) = (Prng::new(seed), vec![0; DEVICE_BYTES]);
        let mut tasks = TaskSlab::new(64, CoreWaker::without_eventfd());
        // Disjoint ranges in a few device blocks, all in flight at once.
        let (mut lba, mut sequence) = (random.below(8), 0);
        while lba < 60 {
            let count = 1 + random.below(9);
            let (from, bytes) = (lba as usize * 512, count as usize * 512);
            let (new, blocks) = (data(bytes, sequence), Rc::clone(&blocks));
            model[from..from + bytes].copy_from_slice(&new);
            let operation = match random.below(3) {
                0 => {
                    model[from..from + bytes].fill(0);
                    let range = range(lba, count);
                    RequestOperation::WriteZeroes { range, force_unit_access: false, deallocate: false }
                }
                _ => {
                    RequestOperation::Write { lba: Lba(lba), data: new, force_unit_access: sequence % 3 == 0 }
                }
            };
            let task =
                async move { assert!(matches!(blocks.execute(operation).await, RequestOutcome::Written)) };
            assert!(tasks.spawn(task).is_ok());
            (lba, sequence) = (lba + count + random.below(2), sequence + 1);
        }
        while tasks.running() > 0 {
            disk.complete_one(&mut random);
            tasks.poll_ready();
        }
        assert!(disk.contents() == model, "seed {seed}");
    }
}

#[test]
fn a_partial_write_that_waits_for_a_buffer_delays_no_other_write_of_its_block() {
    let disk: Rc<dyn Device> = Rc::new(MemoryDevice::new(RamDisk::new(DEVICE_BYTES as u64, 4096).unwrap()));
    let blocks = blocks(disk, 512);
    let all_buffers = blocks.pool.take(8 << 20).unwrap();
    let write = |lba: u64, bytes: usize, seed: u64| {
        let write =
            RequestOperation::Write { lba: Lba(lba), data: data(bytes, seed), force_unit_access: false };
        Box::pin(blocks.execute(write))
    };
    let mut context = Context::from_waker(Waker::noop());
    let mut partial = write(1, 512, 1);
    assert!(partial.as_mut().poll(&mut context).is_pending(), "no buffer is free");
    let whole = write(0, 4096, 2).as_mut().poll(&mut context);
    assert!(matches!(whole, Poll::Ready(RequestOutcome::Written)), "it needs no buffer");
    drop(all_buffers);
    let run_timers = || {
        blocks.handle.begin_iteration(blocks.handle.now() + Nanos::from_millis(1));
    };
    assert!(matches!(block_on(partial, run_timers), RequestOutcome::Written));
    let read = block_on(blocks.execute(RequestOperation::Read { range: range(0, 8) }), || ());
    let RequestOutcome::Blocks { buffer } = read else { panic!("blocks were not read") };
    let mut want = data(4096, 2);
    want[512..1024].copy_from_slice(&data(512, 1));
    assert!(*buffer == *want);
}

#[test]
fn durable_writes_survive_any_power_loss() {
    for (block_bytes, device_bytes) in SIZES {
        let disk = PowerLossDisk::new(vec![0; DEVICE_BYTES], device_bytes);
        let blocks = blocks(Rc::new(disk.clone()), block_bytes);
        let mut random = Prng::new(7);
        let mut model = vec![0; DEVICE_BYTES];
        for step in 0..30 {
            let range = random_range(&mut random, DEVICE_BYTES as u64 / u64::from(block_bytes));
            let from = range.lba.0 as usize * block_bytes as usize;
            let new = data(range.blocks as usize * block_bytes as usize, step);
            model[from..from + new.len()].copy_from_slice(&new);
            let force_unit_access = step % 2 == 0;
            let write = RequestOperation::Write { lba: range.lba, data: new, force_unit_access };
            let mut completions = Prng::new(step);
            let mut perform = |operation| {
                block_on(blocks.execute(operation), || {
                    disk.complete_one(&mut completions);
                })
            };
            assert!(matches!(perform(write), RequestOutcome::Written));
            if !force_unit_access {
                assert!(matches!(perform(RequestOperation::Flush), RequestOutcome::Flushed));
            }
            for cut in PowerLossMode::ALL {
                assert!(
                    disk.image_after_power_loss(disk.events(), cut, &mut random).to_vec() == model,
                    "{cut:?}, step {step}"
                );
            }
        }
    }
}

#[test]
fn device_errors_map_to_their_status() {
    let disk = PowerLossDisk::new(vec![0; DEVICE_BYTES], 4096);
    let plan = FaultPlan::default();
    let blocks = blocks(Rc::new(FaultDevice::new(Rc::new(disk.clone()), plan.clone())), 512);
    let mut completions = Prng::new(1);
    let mut perform = |operation| {
        block_on(blocks.execute(operation), || {
            disk.complete_one(&mut completions);
        })
    };
    let write =
        |force_unit_access| RequestOperation::Write { lba: Lba(8), data: data(4096, 1), force_unit_access };
    plan.add(FaultRule::always(OpFilter::Read, InjectedFault::Error(5)));
    assert!(matches!(perform(RequestOperation::Read { range: range(0, 1) }), RequestOutcome::Unrecovered));
    assert!(matches!(perform(RequestOperation::Verify { range: range(0, 1) }), RequestOutcome::Unrecovered));
    assert!(matches!(
        perform(RequestOperation::Compare { lba: Lba(0), data: data(512, 1) }),
        RequestOutcome::Unrecovered
    ));
    assert!(
        matches!(perform(write(false)), RequestOutcome::Written),
        "a write of a whole device block reads nothing"
    );
    plan.clear();
    plan.add(FaultRule::always(OpFilter::Write, InjectedFault::Error(5)));
    assert!(matches!(perform(write(false)), RequestOutcome::WriteFault));
    plan.clear();
    plan.add(FaultRule::always(OpFilter::Write, InjectedFault::NoSpace));
    assert!(matches!(perform(write(false)), RequestOutcome::CapacityExceeded));
    plan.clear();
    plan.add(FaultRule::always(OpFilter::Flush, InjectedFault::Error(5)));
    assert!(matches!(perform(write(false)), RequestOutcome::Written));
    assert!(
        matches!(perform(write(true)), RequestOutcome::WriteFault),
        "a write that is not durable must not complete as durable"
    );
    assert!(matches!(perform(RequestOperation::Flush), RequestOutcome::WriteFault));
    assert_eq!(blocks.pool.in_use_bytes(), 0);
}

/// A device that records trims.
struct TrimRecorder(RefCell<Vec<(u64, u64)>>);

impl Device for TrimRecorder {
    fn geometry(&self) -> Geometry {
        Geometry { block_bytes: 4096, blocks: 64, volatile: false }
    }
    fn name(&self) -> &str {
        "trimmed"
    }
    fn read(&self, _: Lba, buffer: Buffer) -> DeviceFuture {
        DeviceFuture::out_of_range(Some(buffer))
    }
    fn write(&self, _: Lba, buffer: Buffer) -> DeviceFuture {
        DeviceFuture::out_of_range(Some(buffer))
    }
    fn flush(&self) -> DeviceFuture {
        DeviceFuture::ready(IoResult { buffer: None, result: Err(DeviceError::Io(5)) })
    }
    fn trim(&self, at: Lba, blocks: u64) -> DeviceFuture {
        self.0.borrow_mut().push((at.0, blocks));
        DeviceFuture::ready(IoResult { buffer: None, result: Ok(()) })
    }
}

#[test]
fn only_device_blocks_fully_inside_a_range_are_trimmed() {
    let device = Rc::new(TrimRecorder(RefCell::default()));
    let blocks = blocks(Rc::clone(&device) as Rc<dyn Device>, 512);
    let ranges = vec![range(0, 8), range(9, 15), range(15, 18), range(33, 6), range(500, 12)];
    assert!(matches!(
        block_on(blocks.execute(RequestOperation::Deallocate { ranges }), || ()),
        RequestOutcome::Written
    ));
    assert_eq!(*device.0.borrow(), [(0, 1), (2, 1), (2, 2), (63, 1)]);
}
