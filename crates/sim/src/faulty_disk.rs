//! A device decorator between the engine and its disk that injects errors and delays.
//!
//! In: operations for the inner device. Out: their completions, delayed or failed. Holds: the active faults,
//! shared with the runner. A write or flush that fails may have been executed nevertheless.

use crate::scenario::FaultKind;
use octokv_base::{Buffer, Lba, Nanos, Prng};
use octokv_device::{Device, DeviceError, DeviceFuture, Geometry, IoResult, ReadGuard};
use octokv_engine::common::superblock::SUPERBLOCK_AREA_BYTES;
use octokv_runtime::ReactorHandle;
use std::cell::RefCell;
use std::future::pending;
use std::ops::Range;
use std::rc::Rc;

const EIO: DeviceError = DeviceError::Io(5);
const ENODEV: DeviceError = DeviceError::Io(19);

#[derive(Clone, Copy, Default)]
struct FailureRates {
    reads: u64,
    writes: u64,
    flushes: u64,
}

struct ActiveFaults {
    random: Prng,
    /// Whether the disk beneath fails every operation.
    is_lost: bool,
    rates: FailureRates,
    slow_one_in: Option<(u64, Nanos)>,
    /// The disk that completes nothing that begins.
    hung: Option<usize>,
    /// The disk that was pulled.
    pulled: Option<usize>,
    /// Operations that will not complete, or failed since their disk was pulled.
    hung_operations: u64,
    reads_failed: u64,
    operations_failed: u64,
    in_place: u64,
    front_writes: u64,
    /// What another core does before and after accesses in place.
    interference: Option<Rc<dyn Fn()>>,
}

/// Active faults of a disk; clones share one state.
#[derive(Clone)]
pub struct DiskFaults(Rc<RefCell<ActiveFaults>>);

impl DiskFaults {
    /// No active faults; `random` selects the operations to fail or delay.
    pub fn new(random: Prng) -> DiskFaults {
        let rates = FailureRates::default();
        let active = ActiveFaults {
            random,
            is_lost: false,
            rates,
            slow_one_in: None,
            hung: None,
            pulled: None,
            hung_operations: 0,
            reads_failed: 0,
            operations_failed: 0,
            in_place: 0,
            front_writes: 0,
            interference: None,
        };
        DiskFaults(Rc::new(RefCell::new(active)))
    }

    /// Activates a disk fault; ignores faults of other kinds.
    pub fn activate(&self, kind: FaultKind) {
        let mut active = self.0.borrow_mut();
        match kind {
            FaultKind::SlowDisk { one_in, delay_max: most, .. } => active.slow_one_in = Some((one_in, most)),
            FaultKind::DiskErrors {
                read_one_in: reads, write_one_in: writes, flush_one_in: flushes, ..
            } => active.rates = FailureRates { reads, writes, flushes },
            FaultKind::HangDisk { disk, .. } => active.hung = Some(disk),
            FaultKind::PullDisk { disk, .. } => active.pulled = Some(disk),
            _ => {}
        }
    }

    /// Counts from now on every operation as failed, because the disk is lost; or not, because it was replaced.
    pub fn set_lost(&self, lost: bool) {
        let mut active = self.0.borrow_mut();
        active.is_lost = lost;
        // Those in flight.
        active.reads_failed += u64::from(lost);
        active.operations_failed += 2 * u64::from(lost);
    }

    /// Deactivates all faults except the loss of the disk.
    pub fn clear(&self) {
        let mut active = self.0.borrow_mut();
        (active.rates, active.slow_one_in) = (FailureRates::default(), None);
        (active.hung, active.pulled) = (None, None);
    }

    /// Whether any operation failed so far, or will not complete.
    pub fn has_failed(&self) -> bool {
        self.operations_failed() + self.hung_operations() > 0
    }

    /// Operations so far that will not complete, or failed since their disk was pulled.
    pub fn hung_operations(&self) -> u64 {
        self.0.borrow().hung_operations
    }

    /// Reads failed so far.
    pub fn reads_failed(&self) -> u64 {
        self.0.borrow().reads_failed
    }

    /// Writes and flushes failed so far.
    pub fn writes_failed(&self) -> u64 {
        self.0.borrow().operations_failed - self.0.borrow().reads_failed
    }

    /// Operations failed so far.
    pub fn operations_failed(&self) -> u64 {
        self.0.borrow().operations_failed
    }

    /// Writes so far that began where superblocks are, of any of the disks.
    pub fn front_writes(&self) -> u64 {
        self.0.borrow().front_writes
    }

    /// Accesses in place so far.
    pub fn in_place(&self) -> u64 {
        self.0.borrow().in_place
    }

    /// Sets what another core does before and after some accesses in place. REQUIRES: it does not access this device.
    pub fn set_interference(&self, interference: Option<Rc<dyn Fn()>>) {
        self.0.borrow_mut().interference = interference;
    }

    /// Counts an access in place, which happens or not, and lets another core act before and after it.
    fn in_place_access<T>(&self, access: impl FnOnce() -> T, is_done: impl FnOnce(&T) -> bool) -> T {
        self.interfere();
        let outcome = access();
        self.0.borrow_mut().in_place += u64::from(is_done(&outcome));
        self.interfere();
        outcome
    }

    fn interfere(&self) {
        let mut active = self.0.borrow_mut();
        if active.interference.is_some() && active.random.one_in(8) {
            let interference = active.interference.clone();
            drop(active);
            interference.iter().for_each(|act| act());
        }
    }

    /// `None` if the next operation succeeds; otherwise whether the inner device executes it before the error.
    fn draw_failure(&self, rate: impl Fn(&FailureRates) -> u64) -> Option<bool> {
        let mut active = self.0.borrow_mut();
        if active.is_lost {
            active.operations_failed += 1;
            return Some(true);
        }
        let rate = rate(&active.rates);
        if rate == 0 || !active.random.one_in(rate) {
            return None;
        }
        active.operations_failed += 1;
        Some(active.random.one_in(2))
    }

    /// Whether an operation of a disk that begins will not complete; counts it then.
    fn hangs(&self, disk: usize) -> bool {
        let mut active = self.0.borrow_mut();
        let hangs = active.hung == Some(disk);
        active.hung_operations += u64::from(hangs);
        hangs
    }

    /// If the disk was pulled: whether an operation that begins is executed before it fails. Counts it then.
    fn draw_pulled(&self, disk: usize) -> Option<bool> {
        let mut active = self.0.borrow_mut();
        if active.pulled != Some(disk) {
            return None;
        }
        active.hung_operations += 1;
        Some(active.random.one_in(2))
    }

    fn draw_delay(&self) -> Option<Nanos> {
        let mut active = self.0.borrow_mut();
        let (one_in, most) = active.slow_one_in?;
        active.random.one_in(one_in).then(|| Nanos(active.random.below(most.0 + 1)))
    }
}

/// One core's device with injected faults.
pub struct FaultyDisk {
    inner: Rc<dyn Device>,
    faults: DiskFaults,
    /// Which of the node's disks it is.
    disk: usize,
    handle: ReactorHandle,
}

impl FaultyDisk {
    /// Wraps a disk of a node with `faults`; delays are timers of the reactor of `handle`.
    pub fn new(
        beneath: Rc<dyn Device>,
        (faults, disk): (DiskFaults, usize),
        handle: ReactorHandle,
    ) -> FaultyDisk {
        FaultyDisk { inner: beneath, faults, disk, handle }
    }

    /// `None` if a write or flush that begins succeeds; otherwise whether the inner device executes it before which error.
    fn failure_of_change(&self, rate: impl Fn(&FailureRates) -> u64) -> Option<(bool, DeviceError)> {
        let pulled = self.faults.draw_pulled(self.disk).map(|is_executed| (is_executed, ENODEV));
        pulled.or_else(|| Some((self.faults.draw_failure(rate)?, EIO)))
    }

    /// Starts an operation and may delay its end, or in memory its beginning.
    fn with_delay(&self, start: impl FnOnce(&dyn Device) -> DeviceFuture + 'static) -> DeviceFuture {
        if self.faults.hangs(self.disk) {
            return DeviceFuture::boxed(async move {
                // The buffer stays with what does not begin.
                let _kept = start;
                pending().await
            });
        }
        let Some(span) = self.faults.draw_delay() else { return start(&*self.inner) };
        let handle = self.handle.clone();
        if self.inner.geometry().volatile && self.faults.0.borrow_mut().random.one_in(2) {
            let inner = Rc::clone(&self.inner);
            return DeviceFuture::boxed(async move {
                handle.sleep(span).await;
                start(&*inner).await
            });
        }
        let pending = start(&*self.inner);
        DeviceFuture::boxed(async move {
            let done = pending.await;
            handle.sleep(span).await;
            done
        })
    }
}

fn fail_now(buffer: Option<Buffer>, error: DeviceError) -> DeviceFuture {
    DeviceFuture::ready(IoResult { buffer, result: Err(error) })
}

fn fail_after(pending: DeviceFuture, error: DeviceError) -> DeviceFuture {
    DeviceFuture::boxed(async move { IoResult { buffer: pending.await.buffer, result: Err(error) } })
}

impl Device for FaultyDisk {
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
        if self.faults.draw_pulled(self.disk).is_some() {
            return fail_now(Some(buffer), ENODEV);
        }
        if self.faults.draw_failure(|rates| rates.reads).is_some() {
            self.faults.0.borrow_mut().reads_failed += 1;
            return fail_now(Some(buffer), EIO);
        }
        self.with_delay(move |inner| inner.read(at, buffer))
    }

    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        let byte = at.0 * u64::from(self.geometry().block_bytes);
        self.faults.0.borrow_mut().front_writes += u64::from(byte < SUPERBLOCK_AREA_BYTES);
        match self.failure_of_change(|rates| rates.writes) {
            Some((false, error)) => fail_now(Some(buffer), error),
            Some((true, error)) => fail_after(self.inner.write(at, buffer), error),
            None => self.with_delay(move |inner| inner.write(at, buffer)),
        }
    }

    fn prefetch_write(&self, at: Lba, blocks: u64) {
        self.inner.prefetch_write(at, blocks);
    }

    fn prefetch_read(&self, at: Lba, blocks: u64) {
        self.inner.prefetch_read(at, blocks);
    }

    fn read_in_place(&self, at: Lba, bytes: usize) -> Option<ReadGuard<'_>> {
        self.faults.in_place_access(|| self.inner.read_in_place(at, bytes), Option::is_some)
    }

    fn write_in_place(&self, at: Lba, bytes: usize, write: &mut dyn FnMut(&mut [u8])) -> bool {
        self.faults.in_place_access(|| self.inner.write_in_place(at, bytes, write), |&is_done| is_done)
    }

    /// Everything, whatever was written: that a block was never written is a hint, which the engine must not depend on.
    fn next_unwritten(&self, at: Lba) -> Option<Range<Lba>> {
        let end = Lba(self.geometry().blocks);
        (at < end).then_some(at..end)
    }

    fn flush(&self) -> DeviceFuture {
        match self.failure_of_change(|rates| rates.flushes) {
            Some((false, error)) => fail_now(None, error),
            Some((true, error)) => fail_after(self.inner.flush(), error),
            None => self.with_delay(|inner| inner.flush()),
        }
    }

    fn trim(&self, at: Lba, blocks: u64) -> DeviceFuture {
        self.inner.trim(at, blocks)
    }
}
