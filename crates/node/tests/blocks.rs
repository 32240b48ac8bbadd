//! Namespaces of blocks against a model: every pair of block sizes, any order of completions, any power cut.

use octokv_base::{Buffer, Lba, Pool, Random};
use octokv_device::fault_injection::{Fault, FaultDevice, On, Plan, Rule};
use octokv_device::power_loss::{Cut, PowerDisk};
use octokv_device::{Device, DeviceError, Done, Geometry, Pending};
use octokv_node::block_backend::{BlockVolume, Blocks};
use octokv_nvmf::{Operation, Outcome, Range};
use octokv_runtime::{Busy, Channel, DeviceDriver, Doorbell, Handle, Tasks, block_on, device_queue};
use std::cell::RefCell;
use std::rc::Rc;

const DEVICE_BYTES: usize = 256 << 10;
/// Every block of the namespace on every block of the device.
const SIZES: [(u32, u32); 4] = [(512, 512), (4096, 512), (512, 4096), (4096, 4096)];

fn handle() -> Handle {
    let doorbell = Doorbell::silent();
    let (queue, _) = device_queue(DeviceDriver::Threads, 1, &doorbell).unwrap();
    Handle::new(doorbell, Channel::new(queue, 1), Busy::real())
}

fn blocks(device: Rc<dyn Device>, block_bytes: u32) -> Rc<Blocks> {
    let volume = BlockVolume::new(block_bytes, device.geometry().bytes());
    let (pool, name) = (Pool::new(8 << 20), Rc::from("disk"));
    Rc::new(Blocks { volume, device, pool, handle: handle(), name })
}

fn data(bytes: usize, stamp: u64) -> Buffer {
    let mut buffer = Buffer::zeroed(bytes);
    Random::new(stamp).fill(&mut buffer);
    buffer
}

fn range(lba: u64, blocks: u64) -> Range {
    Range { lba: Lba(lba), blocks: blocks as u32 }
}

/// Some of the namespace's blocks.
fn some(random: &mut Random, all: u64) -> Range {
    let lba = random.below(all);
    range(lba, 1 + random.below((all - lba).min(20)))
}

#[test]
fn what_was_written_zeroed_and_compared_is_what_a_model_says() {
    for (block_bytes, device_bytes) in SIZES {
        let disk = PowerDisk::new(data(DEVICE_BYTES, 1).to_vec(), device_bytes);
        let blocks = blocks(Rc::new(disk.clone()), block_bytes);
        let (mut random, mut model) = (Random::new(2), data(DEVICE_BYTES, 1).to_vec());
        let mut completions = Random::new(3);
        let mut perform = |operation| {
            block_on(blocks.perform(operation), || {
                disk.complete(&mut completions);
            })
        };
        for step in 0..600 {
            let of = some(&mut random, DEVICE_BYTES as u64 / u64::from(block_bytes));
            let from = of.lba.0 as usize * block_bytes as usize;
            let to = from + of.blocks as usize * block_bytes as usize;
            let force_unit_access = random.below(4) == 0;
            match random.below(7) {
                0 | 1 => {
                    let new = data(to - from, step);
                    model[from..to].copy_from_slice(&new);
                    let write = Operation::Write { lba: of.lba, data: new, force_unit_access };
                    assert!(matches!(perform(write), Outcome::Written));
                }
                2 => {
                    model[from..to].fill(0);
                    let deallocate = random.below(2) == 0;
                    let zeroes = Operation::WriteZeroes { range: of, force_unit_access, deallocate };
                    assert!(matches!(perform(zeroes), Outcome::Written));
                }
                3 => {
                    let mut there = Buffer::zeroed(to - from);
                    there.copy_from_slice(&model[from..to]);
                    let same = random.below(2) == 0;
                    if !same {
                        let at = random.below(there.len() as u64) as usize;
                        there[at] ^= 1;
                    }
                    let outcome = perform(Operation::Compare { lba: of.lba, data: there });
                    match same {
                        true => assert!(matches!(outcome, Outcome::Verified)),
                        false => assert!(matches!(outcome, Outcome::Different)),
                    }
                }
                4 => assert!(matches!(perform(Operation::Verify { range: of }), Outcome::Verified)),
                _ => {
                    let Outcome::Blocks { buffer } = perform(Operation::Read { range: of }) else {
                        panic!("blocks were not read")
                    };
                    assert!(*buffer == model[from..to], "{block_bytes} on {device_bytes}, step {step}");
                }
            }
        }
        assert!(disk.contents() == model, "{block_bytes} on {device_bytes}: a byte outside a range changed");
        assert_eq!(blocks.pool.out_bytes(), 0);
    }
}

#[test]
fn writes_of_parts_of_one_device_block_lose_none_of_each_other() {
    for seed in 0..40 {
        let disk = PowerDisk::new(vec![0; DEVICE_BYTES], 4096);
        let blocks = blocks(Rc::new(disk.clone()), 512);
        let (mut random, mut model) = (Random::new(seed), vec![0; DEVICE_BYTES]);
        let mut tasks = Tasks::new(64, Doorbell::silent());
        // Ranges that do not meet, a few device blocks, all under way at once.
        let (mut lba, mut stamp) = (random.below(8), 0);
        while lba < 60 {
            let count = 1 + random.below(9);
            let (from, bytes) = (lba as usize * 512, count as usize * 512);
            let (new, blocks) = (data(bytes, stamp), Rc::clone(&blocks));
            model[from..from + bytes].copy_from_slice(&new);
            let operation = match random.below(3) {
                0 => {
                    model[from..from + bytes].fill(0);
                    let range = range(lba, count);
                    Operation::WriteZeroes { range, force_unit_access: false, deallocate: false }
                }
                _ => Operation::Write { lba: Lba(lba), data: new, force_unit_access: stamp % 3 == 0 },
            };
            let task = async move { assert!(matches!(blocks.perform(operation).await, Outcome::Written)) };
            assert!(tasks.spawn(task).is_ok());
            (lba, stamp) = (lba + count + random.below(2), stamp + 1);
        }
        while tasks.running() > 0 {
            disk.complete(&mut random);
            tasks.poll_ready();
        }
        assert!(disk.contents() == model, "seed {seed}");
    }
}

#[test]
fn what_was_to_be_durable_survives_any_power_cut() {
    for (block_bytes, device_bytes) in SIZES {
        let disk = PowerDisk::new(vec![0; DEVICE_BYTES], device_bytes);
        let blocks = blocks(Rc::new(disk.clone()), block_bytes);
        let mut random = Random::new(7);
        let mut model = vec![0; DEVICE_BYTES];
        for step in 0..30 {
            let of = some(&mut random, DEVICE_BYTES as u64 / u64::from(block_bytes));
            let from = of.lba.0 as usize * block_bytes as usize;
            let new = data(of.blocks as usize * block_bytes as usize, step);
            model[from..from + new.len()].copy_from_slice(&new);
            let force_unit_access = step % 2 == 0;
            let write = Operation::Write { lba: of.lba, data: new, force_unit_access };
            let mut completions = Random::new(step);
            let mut perform = |operation| {
                block_on(blocks.perform(operation), || {
                    disk.complete(&mut completions);
                })
            };
            assert!(matches!(perform(write), Outcome::Written));
            if !force_unit_access {
                assert!(matches!(perform(Operation::Flush), Outcome::Flushed));
            }
            for cut in Cut::ALL {
                assert!(disk.cut(disk.events(), cut, &mut random) == model, "{cut:?}, step {step}");
            }
        }
    }
}

#[test]
fn a_device_that_fails_is_told_as_it_failed() {
    let disk = PowerDisk::new(vec![0; DEVICE_BYTES], 4096);
    let plan = Plan::default();
    let blocks = blocks(Rc::new(FaultDevice::new(Rc::new(disk.clone()), plan.clone())), 512);
    let mut completions = Random::new(1);
    let mut perform = |operation| {
        block_on(blocks.perform(operation), || {
            disk.complete(&mut completions);
        })
    };
    let write = |force_unit_access| Operation::Write { lba: Lba(8), data: data(4096, 1), force_unit_access };
    plan.add(Rule::always(On::Read, Fault::Error(5)));
    assert!(matches!(perform(Operation::Read { range: range(0, 1) }), Outcome::Unrecovered));
    assert!(matches!(perform(Operation::Verify { range: range(0, 1) }), Outcome::Unrecovered));
    assert!(matches!(perform(Operation::Compare { lba: Lba(0), data: data(512, 1) }), Outcome::Unrecovered));
    assert!(matches!(perform(write(false)), Outcome::Written), "a whole device block need not be read");
    plan.clear();
    plan.add(Rule::always(On::Write, Fault::Error(5)));
    assert!(matches!(perform(write(false)), Outcome::WriteFault));
    plan.clear();
    plan.add(Rule::always(On::Write, Fault::NoSpace));
    assert!(matches!(perform(write(false)), Outcome::CapacityExceeded));
    plan.clear();
    plan.add(Rule::always(On::Flush, Fault::Error(5)));
    assert!(matches!(perform(write(false)), Outcome::Written));
    assert!(matches!(perform(write(true)), Outcome::WriteFault), "not durable, so not answered as such");
    assert!(matches!(perform(Operation::Flush), Outcome::WriteFault));
    assert_eq!(blocks.pool.out_bytes(), 0);
}

/// A device that notes what is trimmed.
struct Trimmed(RefCell<Vec<(u64, u64)>>);

impl Device for Trimmed {
    fn geometry(&self) -> Geometry {
        Geometry { block_bytes: 4096, blocks: 64, volatile: false }
    }
    fn name(&self) -> &str {
        "trimmed"
    }
    fn read(&self, _: Lba, buffer: Buffer) -> Pending {
        Pending::out_of_range(Some(buffer))
    }
    fn write(&self, _: Lba, buffer: Buffer) -> Pending {
        Pending::out_of_range(Some(buffer))
    }
    fn flush(&self) -> Pending {
        Pending::ready(Done { buffer: None, result: Err(DeviceError::Io(5)) })
    }
    fn trim(&self, at: Lba, blocks: u64) -> Pending {
        self.0.borrow_mut().push((at.0, blocks));
        Pending::ready(Done { buffer: None, result: Ok(()) })
    }
}

#[test]
fn only_device_blocks_that_lie_wholly_in_a_range_are_given_back() {
    let device = Rc::new(Trimmed(RefCell::default()));
    let blocks = blocks(Rc::clone(&device) as Rc<dyn Device>, 512);
    let ranges = vec![range(0, 8), range(9, 15), range(15, 18), range(33, 6), range(500, 12)];
    assert!(matches!(block_on(blocks.perform(Operation::Deallocate { ranges }), || ()), Outcome::Written));
    assert_eq!(*device.0.borrow(), [(0, 1), (2, 1), (2, 2), (63, 1)]);
}
