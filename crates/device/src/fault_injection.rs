//! A wrapper that makes any device fail as real ones do, by a plan that is data.
//!
//! In: operations for the device beneath. Out: their completion, changed where a [`Rule`] says so.
//! Holds: the rules, how often each may still strike, and for staleness what blocks held before.
//!
//! | fault | what happens |
//! | --- | --- |
//! | `BitRot` | one bit of the blocks read is flipped, the same one at every read |
//! | `Misdirected` | a write lands at another address and is reported done |
//! | `Lost` | a write is reported done and never lands: later reads are stale |
//! | `Error` | the operation fails with an error code |
//! | `NoSpace` | a write fails for want of space |
//! | `Slow` | the operation completes only after a number of polls of its future |

use crate::{Device, DeviceError, Done, Geometry, Pending};
use octokv_base::prng::mix;
use octokv_base::{Buffer, Lba};
use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::rc::Rc;
use std::task::Poll;

/// Which operations a rule strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    /// Reads that touch the blocks.
    Read,
    /// Writes that touch the blocks.
    Write,
    /// Flushes, whatever the blocks.
    Flush,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A bit flips, chosen by the seed.
    BitRot {
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
pub struct Rule {
    /// Which operations it strikes.
    pub on: On,
    /// The first block of its range.
    pub from: Lba,
    /// The block after its range.
    pub to: Lba,
    /// How many matching operations pass before it strikes.
    pub after: u32,
    /// How often it strikes.
    pub times: u32,
    /// What it does.
    pub fault: Fault,
}

impl Rule {
    /// Strikes every operation on any block.
    pub fn always(on: On, fault: Fault) -> Rule {
        Rule { on, from: Lba(0), to: Lba(u64::MAX), after: 0, times: u32::MAX, fault }
    }
    /// Strikes every operation on these blocks.
    pub fn within(on: On, from: Lba, to: Lba, fault: Fault) -> Rule {
        Rule { from, to, ..Rule::always(on, fault) }
    }
    /// Strikes one operation, after `after` others.
    pub fn once(self, after: u32) -> Rule {
        Rule { after, times: 1, ..self }
    }
}

/// The rules in force, shared by cloning, so that a test can change them while the device is used.
#[derive(Clone, Default)]
pub struct Plan(Rc<RefCell<Vec<Rule>>>);

impl Plan {
    /// Adds a rule.
    pub fn add(&self, rule: Rule) {
        self.0.borrow_mut().push(rule);
    }
    /// Takes all rules back.
    pub fn clear(&self) {
        self.0.borrow_mut().clear();
    }

    fn strike(&self, on: On, at: Lba, blocks: u64) -> Option<Fault> {
        let mut rules = self.0.borrow_mut();
        for rule in rules.iter_mut() {
            let touches = on == On::Flush || (at < rule.to && at.0 + blocks > rule.from.0);
            if rule.on != on || !touches || rule.times == 0 {
                continue;
            }
            if rule.after > 0 {
                rule.after -= 1;
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
    beneath: Rc<dyn Device>,
    plan: Plan,
}

impl FaultDevice {
    /// `beneath`, failing by `plan`.
    pub fn new(beneath: Rc<dyn Device>, plan: Plan) -> FaultDevice {
        FaultDevice { beneath, plan }
    }

    fn blocks(&self, buffer: &Buffer) -> u64 {
        buffer.len() as u64 / u64::from(self.geometry().block_bytes)
    }
}

fn failed(buffer: Option<Buffer>, error: DeviceError) -> Pending {
    Pending::ready(Done { buffer, result: Err(error) })
}

fn slow(pending: Pending, polls: u32) -> Pending {
    let (mut pending, mut left) = (Box::pin(pending), polls);
    Pending::later(poll_fn(move |context| {
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
        self.beneath.geometry()
    }
    fn name(&self) -> &str {
        self.beneath.name()
    }
    fn read(&self, at: Lba, buffer: Buffer) -> Pending {
        match self.plan.strike(On::Read, at, self.blocks(&buffer)) {
            Some(Fault::Error(code)) => failed(Some(buffer), DeviceError::Io(code)),
            Some(Fault::Slow { polls }) => slow(self.beneath.read(at, buffer), polls),
            Some(Fault::BitRot { seed }) => {
                let pending = self.beneath.read(at, buffer);
                Pending::later(async move {
                    let mut done = pending.await;
                    if let Some(buffer) = &mut done.buffer {
                        let bit = mix(seed) as usize % (buffer.len() * 8);
                        buffer[bit / 8] ^= 1 << (bit % 8);
                    }
                    done
                })
            }
            _ => self.beneath.read(at, buffer),
        }
    }
    fn write(&self, at: Lba, buffer: Buffer) -> Pending {
        match self.plan.strike(On::Write, at, self.blocks(&buffer)) {
            Some(Fault::Error(code)) => failed(Some(buffer), DeviceError::Io(code)),
            Some(Fault::NoSpace) => failed(Some(buffer), DeviceError::NoSpace),
            Some(Fault::Lost) => Pending::ready(Done { buffer: Some(buffer), result: Ok(()) }),
            Some(Fault::Misdirected { to }) => self.beneath.write(to, buffer),
            Some(Fault::Slow { polls }) => slow(self.beneath.write(at, buffer), polls),
            _ => self.beneath.write(at, buffer),
        }
    }
    fn flush(&self) -> Pending {
        match self.plan.strike(On::Flush, Lba(0), 0) {
            Some(Fault::Error(code)) => failed(None, DeviceError::Io(code)),
            Some(Fault::Slow { polls }) => slow(self.beneath.flush(), polls),
            Some(Fault::Lost) => Pending::ready(Done { buffer: None, result: Ok(()) }),
            _ => self.beneath.flush(),
        }
    }
    fn trim(&self, at: Lba, blocks: u64) -> Pending {
        self.beneath.trim(at, blocks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Memory, MemoryDevice};
    use octokv_runtime::block_on;

    fn device(rule: Rule) -> FaultDevice {
        let plan = Plan::default();
        plan.add(rule);
        FaultDevice::new(Rc::new(MemoryDevice::new(Memory::new(1 << 20, 4096).unwrap())), plan)
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
    fn each_fault_does_what_its_row_says() {
        let rot = device(Rule::within(On::Read, Lba(1), Lba(2), Fault::BitRot { seed: 1 }));
        let ones = |buffer: Buffer| buffer.iter().map(|byte| byte.count_ones()).sum::<u32>();
        assert_eq!((ones(read(&rot, 0).unwrap()), ones(read(&rot, 1).unwrap())), (0, 1));

        let misdirected = device(Rule::always(On::Write, Fault::Misdirected { to: Lba(5) }).once(0));
        write(&misdirected, 1).unwrap();
        assert_eq!((read(&misdirected, 1).unwrap()[0], read(&misdirected, 5).unwrap()[0]), (0, 0xff));

        let lost = device(Rule::always(On::Write, Fault::Lost).once(1));
        write(&lost, 1).unwrap();
        write(&lost, 2).unwrap();
        assert_eq!((read(&lost, 1).unwrap()[0], read(&lost, 2).unwrap()[0]), (0xff, 0));

        assert_eq!(write(&device(Rule::always(On::Write, Fault::NoSpace)), 0), Err(DeviceError::NoSpace));
        assert_eq!(read(&device(Rule::always(On::Read, Fault::Error(5))), 0).err(), Some(DeviceError::Io(5)));
        let slow = device(Rule::always(On::Write, Fault::Slow { polls: 3 }));
        assert_eq!(write(&slow, 0), Ok(()));
    }
}
