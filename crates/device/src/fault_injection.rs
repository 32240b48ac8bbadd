//! Fault injection: a wrapper that makes any device fail as real devices do, by a plan of rules.
//!
//! In: operations for the inner device. Out: their completions, changed by the first [`FaultRule`] that matches.
//! Holds: the rules and how often each may still apply.
//!
//! | fault | effect |
//! | --- | --- |
//! | `BitFlip` | one bit of the bytes read is flipped, the same one for every read of that length |
//! | `Misdirected` | a write goes to another address and succeeds |
//! | `Lost` | a write or flush succeeds and has no effect: later reads are stale |
//! | `Error` | the operation fails with an error code |
//! | `NoSpace` | a write fails with [`DeviceError::NoSpace`] |
//! | `Slow` | the operation completes only after a number of polls of its future |
//! | `Hang` | the operation is not executed, and does not complete; its buffer stays with it |

use crate::{Device, DeviceError, DeviceFuture, Geometry, IoResult};
use octokv_base::prng::mix64;
use octokv_base::{Buffer, Lba};
use std::cell::RefCell;
use std::future::{Future, pending, poll_fn};
use std::ops::Range;
use std::rc::Rc;
use std::task::Poll;

/// The operations that a rule applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpFilter {
    /// Reads that touch the blocks.
    Read,
    /// Writes that touch the blocks.
    Write,
    /// Flushes; the block range is ignored.
    Flush,
}

/// The effect of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectedFault {
    /// A read returns one flipped bit.
    BitFlip {
        /// Selects the bit, anywhere in the buffer of the read.
        seed: u64,
    },
    /// The write goes to this address instead.
    Misdirected {
        /// The first block that is written instead.
        to: Lba,
    },
    /// The write or flush is dropped and succeeds.
    Lost,
    /// The operation fails with this system error code.
    Error(i32),
    /// The write fails for lack of space.
    NoSpace,
    /// The operation completes only after its future was polled this many more times.
    Slow {
        /// The number of additional polls.
        polls: u32,
    },
    /// The operation is not executed, and does not complete.
    Hang,
}

/// A fault and the operations that it applies to.
#[derive(Clone, Copy, Debug)]
pub struct FaultRule {
    /// The operations that match.
    pub filter: OpFilter,
    /// The first block of its range.
    pub from: Lba,
    /// The block after its range.
    pub to: Lba,
    /// The number of matching operations that succeed first.
    pub skip: u32,
    /// The number of operations that fail after those.
    pub times: u32,
    /// Their fault.
    pub fault: InjectedFault,
}

impl FaultRule {
    /// A rule for every matching operation on any block.
    pub fn always(filter: OpFilter, fault: InjectedFault) -> FaultRule {
        FaultRule { filter, from: Lba(0), to: Lba(u64::MAX), skip: 0, times: u32::MAX, fault }
    }
    /// A rule for every matching operation that touches the blocks `from..to`.
    pub fn within(filter: OpFilter, from: Lba, to: Lba, fault: InjectedFault) -> FaultRule {
        FaultRule { from, to, ..FaultRule::always(filter, fault) }
    }
    /// The same rule for a single operation, after `skip` others.
    pub fn once(self, skip: u32) -> FaultRule {
        FaultRule { skip, times: 1, ..self }
    }
}

/// The active rules. Clones share them, so that a test can change the rules while the device is in use.
#[derive(Clone, Default)]
pub struct FaultPlan(Rc<RefCell<Vec<FaultRule>>>);

impl FaultPlan {
    /// Adds a rule, behind the others.
    ///
    /// # Panics
    /// If the fault cannot happen to the operations of the filter.
    pub fn add(&self, rule: FaultRule) {
        let is_applicable = match rule.fault {
            InjectedFault::BitFlip { .. } => rule.filter == OpFilter::Read,
            InjectedFault::Misdirected { .. } | InjectedFault::NoSpace => rule.filter == OpFilter::Write,
            InjectedFault::Lost => rule.filter != OpFilter::Read,
            InjectedFault::Error(_) | InjectedFault::Slow { .. } | InjectedFault::Hang => true,
        };
        assert!(is_applicable, "{:?} has no effect on a {:?}", rule.fault, rule.filter);
        self.0.borrow_mut().push(rule);
    }
    /// Removes all rules.
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

/// A device that fails by a [`FaultPlan`].
pub struct FaultDevice {
    inner: Rc<dyn Device>,
    plan: FaultPlan,
}

impl FaultDevice {
    /// Wraps `inner` with the faults of `plan`.
    pub fn new(inner: Rc<dyn Device>, plan: FaultPlan) -> FaultDevice {
        FaultDevice { inner, plan }
    }

    fn block_count(&self, buffer: &Buffer) -> u64 {
        buffer.len() as u64 / u64::from(self.geometry().block_bytes)
    }
}

fn fail_with(buffer: Option<Buffer>, error: DeviceError) -> DeviceFuture {
    DeviceFuture::ready(IoResult { buffer, result: Err(error) })
}

fn hang(buffer: Option<Buffer>) -> DeviceFuture {
    DeviceFuture::boxed(async move {
        pending::<()>().await;
        IoResult { buffer, result: Ok(()) }
    })
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
    fn preferred_write_bytes(&self) -> u32 {
        self.inner.preferred_write_bytes()
    }
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn read(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        match self.plan.next_fault(OpFilter::Read, at, self.block_count(&buffer)) {
            Some(InjectedFault::Error(code)) => fail_with(Some(buffer), DeviceError::Io(code)),
            Some(InjectedFault::Slow { polls }) => delay_by_polls(self.inner.read(at, buffer), polls),
            Some(InjectedFault::Hang) => hang(Some(buffer)),
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
            Some(InjectedFault::Hang) => hang(Some(buffer)),
            _ => self.inner.write(at, buffer),
        }
    }
    fn next_unwritten(&self, at: Lba) -> Option<Range<Lba>> {
        self.inner.next_unwritten(at)
    }
    fn flush(&self) -> DeviceFuture {
        match self.plan.next_fault(OpFilter::Flush, Lba(0), 0) {
            Some(InjectedFault::Error(code)) => fail_with(None, DeviceError::Io(code)),
            Some(InjectedFault::Slow { polls }) => delay_by_polls(self.inner.flush(), polls),
            Some(InjectedFault::Hang) => hang(None),
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
