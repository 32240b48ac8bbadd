//! A wrapper that makes any device fail as real ones do, by a plan that is data.
//!
//! In: operations for the device beneath. Out: their completion, changed where a [`FaultRule`] says so.
//! Holds: the rules, how often each may still strike, and for staleness what blocks held before.
//!
//! | fault | what happens |
//! | --- | --- |
//! | `BitFlip` | one bit of the blocks read is flipped, the same one at every read |
//! | `Misdirected` | a write lands at another address and is reported done |
//! | `Lost` | a write is reported done and never lands: later reads are stale |
//! | `Error` | the operation fails with an error code |
//! | `NoSpace` | a write fails for want of space |
//! | `Slow` | the operation completes only after a number of polls of its future |

use crate::{Device, DeviceError, DeviceFuture, Geometry, IoResult};
use octokv_base::prng::mix64;
use octokv_base::{Buffer, Lba};
use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::rc::Rc;
use std::task::Poll;

/// Which operations a rule strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpFilter {
    /// Reads that touch the blocks.
    Read,
    /// Writes that touch the blocks.
    Write,
    /// Flushes, whatever the blocks.
    Flush,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectedFault {
    /// A bit flips, chosen by the seed.
    BitFlip {
        /// Chooses the bit.
        seed: u64,
    },
    /// The write goes to this address instead.
    Misdirected {
        /// Where it lands.
        to: Lba,
    },
    /// The write is dropped and reported done.
    Lost,
    /// The operation fails with this system error code.
    Error(i32),
    /// The write finds no space.
    NoSpace,
    /// The operation is reported done only after its future was polled this many times more.
    Slow {
        /// How many polls.
        polls: u32,
    },
}

/// One thing that goes wrong.
#[derive(Clone, Copy, Debug)]
pub struct FaultRule {
    /// Which operations it strikes.
    pub filter: OpFilter,
    /// The first block of its range.
    pub from: Lba,
    /// The block after its range.
    pub to: Lba,
    /// How many matching operations pass before it strikes.
    pub skip: u32,
    /// How often it strikes.
    pub times: u32,
    /// What it does.
    pub fault: InjectedFault,
}

impl FaultRule {
    /// Strikes every operation on any block.
    pub fn always(on: OpFilter, fault: InjectedFault) -> FaultRule {
        FaultRule { filter: on, from: Lba(0), to: Lba(u64::MAX), skip: 0, times: u32::MAX, fault }
    }
    /// Strikes every operation on these blocks.
    pub fn within(filter: OpFilter, from: Lba, to: Lba, fault: InjectedFault) -> FaultRule {
        FaultRule { from, to, ..FaultRule::always(filter, fault) }
    }
    /// Strikes one operation, after `after` others.
    pub fn once(self, after: u32) -> FaultRule {
        FaultRule { skip: after, times: 1, ..self }
    }
}

/// The rules in force, shared by cloning, so that a test can change them while the device is used.
#[derive(Clone, Default)]
pub struct FaultPlan(Rc<RefCell<Vec<FaultRule>>>);

impl FaultPlan {
    /// Adds a rule.
    pub fn add(&self, rule: FaultRule) {
        self.0.borrow_mut().push(rule);
    }
    /// Takes all rules back.
    pub fn clear(&self) {
        self.0.borrow_mut().clear();
    }

    fn next_fault(&self, filter: OpFilter, at: Lba, blocks: u64) -> Option<InjectedFault> {
        let mut rules = self.0.borrow_mut();
        for rule in rules.iter_mut() {
            let is_in_range = filter == OpFilter::Flush || (at < rule.to && at.0 + blocks > rule.from.0);
            if rule.filter != filter || !is_in_range || rule.times == 0 {
                continue;
            }
            if rule.skip > 0 {
                rule.skip -= 1;
                continue;
            }
            rule.times -= 1;
            return Some(rule.fault);
        }
        None
    }
}

/// A device with faults.
pub struct FaultDevice {
    inner: Rc<dyn Device>,
    plan: FaultPlan,
}

impl FaultDevice {
    /// `beneath`, failing by `plan`.
    pub fn new(beneath: Rc<dyn Device>, plan: FaultPlan) -> FaultDevice {
        FaultDevice { inner: beneath, plan }
    }

    fn block_count(&self, buffer: &Buffer) -> u64 {
        buffer.len() as u64 / u64::from(self.geometry().block_bytes)
    }
}

fn fail_with(buffer: Option<Buffer>, error: DeviceError) -> DeviceFuture {
    DeviceFuture::ready(IoResult { buffer, result: Err(error) })
}

fn delay_by_polls(pending: DeviceFuture, polls: u32) -> DeviceFuture {
    let (mut pending, mut left) = (Box::pin(pending), polls);
    DeviceFuture::boxed(poll_fn(move |context| {
        if left > 0 {
            left -= 1;
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        pending.as_mut().poll(context)
    }))
}

impl Device for FaultDevice {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn read(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        match self.plan.next_fault(OpFilter::Read, at, self.block_count(&buffer)) {
            Some(InjectedFault::Error(code)) => fail_with(Some(buffer), DeviceError::Io(code)),
            Some(InjectedFault::Slow { polls }) => delay_by_polls(self.inner.read(at, buffer), polls),
            Some(InjectedFault::BitFlip { seed }) => {
                let pending = self.inner.read(at, buffer);
                DeviceFuture::boxed(async move {
                    let mut done = pending.await;
                    if let Some(buffer) = &mut done.buffer {
                        let bit = mix64(seed) as usize % (buffer.len() * 8);
                        buffer[bit / 8] ^= 1 << (bit % 8);
                    }
                    done
                })
            }
            _ => self.inner.read(at, buffer),
        }
    }
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        match self.plan.next_fault(OpFilter::Write, at, self.block_count(&buffer)) {
            Some(InjectedFault::Error(code)) => fail_with(Some(buffer), DeviceError::Io(code)),
            Some(InjectedFault::NoSpace) => fail_with(Some(buffer), DeviceError::NoSpace),
            Some(InjectedFault::Lost) => {
                DeviceFuture::ready(IoResult { buffer: Some(buffer), result: Ok(()) })
            }
            Some(InjectedFault::Misdirected { to }) => self.inner.write(to, buffer),
            Some(InjectedFault::Slow { polls }) => delay_by_polls(self.inner.write(at, buffer), polls),
            _ => self.inner.write(at, buffer),
        }
    }
    fn flush(&self) -> DeviceFuture {
        match self.plan.next_fault(OpFilter::Flush, Lba(0), 0) {
            Some(InjectedFault::Error(code)) => fail_with(None, DeviceError::Io(code)),
            Some(InjectedFault::Slow { polls }) => delay_by_polls(self.inner.flush(), polls),
            Some(InjectedFault::Lost) => DeviceFuture::ready(IoResult { buffer: None, result: Ok(()) }),
            _ => self.inner.flush(),
        }
    }
    fn trim(&self, at: Lba, blocks: u64) -> DeviceFuture {
        self.inner.trim(at, blocks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MemoryDevice, RamDisk};
    use octokv_runtime::block_on;

    fn device(rule: FaultRule) -> FaultDevice {
        let plan = FaultPlan::default();
        plan.add(rule);
        FaultDevice::new(Rc::new(MemoryDevice::new(RamDisk::new(1 << 20, 4096).unwrap())), plan)
    }

    fn read(device: &FaultDevice, at: u64) -> Result<Buffer, DeviceError> {
        block_on(device.read(Lba(at), Buffer::zeroed(4096)), || ()).into_read()
    }

    fn write(device: &FaultDevice, at: u64) -> Result<(), DeviceError> {
        let mut buffer = Buffer::zeroed(4096);
        buffer.fill(0xff);
        block_on(device.write(Lba(at), buffer), || ()).result
    }

    #[test]
    fn each_injected_fault_has_the_documented_effect() {
        let corrupting =
            device(FaultRule::within(OpFilter::Read, Lba(1), Lba(2), InjectedFault::BitFlip { seed: 1 }));
        let ones = |buffer: Buffer| buffer.iter().map(|byte| byte.count_ones()).sum::<u32>();
        assert_eq!((ones(read(&corrupting, 0).unwrap()), ones(read(&corrupting, 1).unwrap())), (0, 1));

        let misdirected =
            device(FaultRule::always(OpFilter::Write, InjectedFault::Misdirected { to: Lba(5) }).once(0));
        write(&misdirected, 1).unwrap();
        assert_eq!((read(&misdirected, 1).unwrap()[0], read(&misdirected, 5).unwrap()[0]), (0, 0xff));

        let lost = device(FaultRule::always(OpFilter::Write, InjectedFault::Lost).once(1));
        write(&lost, 1).unwrap();
        write(&lost, 2).unwrap();
        assert_eq!((read(&lost, 1).unwrap()[0], read(&lost, 2).unwrap()[0]), (0xff, 0));

        assert_eq!(
            write(&device(FaultRule::always(OpFilter::Write, InjectedFault::NoSpace)), 0),
            Err(DeviceError::NoSpace)
        );
        assert_eq!(
            read(&device(FaultRule::always(OpFilter::Read, InjectedFault::Error(5))), 0).err(),
            Some(DeviceError::Io(5))
        );
        let slow = device(FaultRule::always(OpFilter::Write, InjectedFault::Slow { polls: 3 }));
        assert_eq!(write(&slow, 0), Ok(()));
    }
}
