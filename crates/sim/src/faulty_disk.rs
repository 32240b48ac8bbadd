//! A device between the engine and its disk that fails and dawdles while it is told to.
//!
//! In: operations for the device beneath. Out: their completion, late or failed. Holds: what is wrong now,
//! shared with whoever plays the plan. A write or flush that fails may have been carried out all the same.

use crate::scenario::FaultKind;
use octokv_base::{Buffer, Lba, Nanos, Random};
use octokv_device::{Device, DeviceError, Done, Geometry, Pending};
use octokv_runtime::Handle;
use std::cell::RefCell;
use std::rc::Rc;

const EIO: DeviceError = DeviceError::Io(5);

#[derive(Clone, Copy, Default)]
struct Rates {
    reads: u64,
    writes: u64,
    flushes: u64,
}

struct Wrong {
    random: Random,
    rates: Rates,
    slow: Option<(u64, Nanos)>,
    reads_failed: u64,
    failed: u64,
}

/// What is wrong with a disk now.
#[derive(Clone)]
pub struct DiskFaults(Rc<RefCell<Wrong>>);

impl DiskFaults {
    /// Nothing is.
    pub fn new(random: Random) -> DiskFaults {
        let rates = Rates::default();
        let wrong = Wrong { random, rates, slow: None, reads_failed: 0, failed: 0 };
        DiskFaults(Rc::new(RefCell::new(wrong)))
    }

    /// Makes something wrong; other faults than those of disks change nothing.
    pub fn begin(&self, kind: FaultKind) {
        let mut wrong = self.0.borrow_mut();
        match kind {
            FaultKind::SlowDisk { one_in, most } => wrong.slow = Some((one_in, most)),
            FaultKind::DiskErrors { reads, writes, flushes } => {
                wrong.rates = Rates { reads, writes, flushes }
            }
            _ => {}
        }
    }

    /// Nothing is wrong any more.
    pub fn clear(&self) {
        let mut wrong = self.0.borrow_mut();
        (wrong.rates, wrong.slow) = (Rates::default(), None);
    }

    /// How many reads have failed.
    pub fn reads_failed(&self) -> u64 {
        self.0.borrow().reads_failed
    }

    /// How many writes and flushes have failed.
    pub fn writes_failed(&self) -> u64 {
        self.0.borrow().failed - self.0.borrow().reads_failed
    }

    /// How many operations have failed.
    pub fn failed(&self) -> u64 {
        self.0.borrow().failed
    }

    /// Whether an operation of this rate fails, and whether it is carried out all the same.
    fn strikes(&self, rate: impl Fn(&Rates) -> u64) -> Option<bool> {
        let mut wrong = self.0.borrow_mut();
        let rate = rate(&wrong.rates);
        if rate == 0 || !wrong.random.one_in(rate) {
            return None;
        }
        wrong.failed += 1;
        Some(wrong.random.one_in(2))
    }

    fn delay(&self) -> Option<Nanos> {
        let mut wrong = self.0.borrow_mut();
        let (one_in, most) = wrong.slow?;
        wrong.random.one_in(one_in).then(|| Nanos(wrong.random.below(most.0 + 1)))
    }
}

/// One core's view of a disk with faults.
pub struct FaultyDisk {
    beneath: Rc<dyn Device>,
    faults: DiskFaults,
    handle: Handle,
}

impl FaultyDisk {
    /// `beneath`, with these faults, on the core of `handle`.
    pub fn new(beneath: Rc<dyn Device>, faults: DiskFaults, handle: Handle) -> FaultyDisk {
        FaultyDisk { beneath, faults, handle }
    }

    fn late(&self, pending: Pending) -> Pending {
        let Some(span) = self.faults.delay() else { return pending };
        let handle = self.handle.clone();
        Pending::later(async move {
            let done = pending.await;
            handle.sleep(span).await;
            done
        })
    }
}

fn failed(buffer: Option<Buffer>) -> Pending {
    Pending::ready(Done { buffer, result: Err(EIO) })
}

fn failed_after(pending: Pending) -> Pending {
    Pending::later(async move { Done { buffer: pending.await.buffer, result: Err(EIO) } })
}

impl Device for FaultyDisk {
    fn geometry(&self) -> Geometry {
        self.beneath.geometry()
    }

    fn name(&self) -> &str {
        self.beneath.name()
    }

    fn read(&self, at: Lba, buffer: Buffer) -> Pending {
        if self.faults.strikes(|rates| rates.reads).is_some() {
            self.faults.0.borrow_mut().reads_failed += 1;
            return failed(Some(buffer));
        }
        self.late(self.beneath.read(at, buffer))
    }

    fn write(&self, at: Lba, buffer: Buffer) -> Pending {
        match self.faults.strikes(|rates| rates.writes) {
            Some(false) => failed(Some(buffer)),
            Some(true) => failed_after(self.beneath.write(at, buffer)),
            None => self.late(self.beneath.write(at, buffer)),
        }
    }

    fn flush(&self) -> Pending {
        match self.faults.strikes(|rates| rates.flushes) {
            Some(false) => failed(None),
            Some(true) => failed_after(self.beneath.flush()),
            None => self.late(self.beneath.flush()),
        }
    }

    fn trim(&self, at: Lba, blocks: u64) -> Pending {
        self.beneath.trim(at, blocks)
    }
}
