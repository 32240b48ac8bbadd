//! One core's part of an open volume: its device, its buffers, and what reads and writes share.

use super::iterator_views::IteratorViews;
use super::table::io::{TableCounters, TableIo, UnreadableBlocks};
use super::table::scan_lengths::ScanLengths;
use super::table::spare_blocks::SpareBlocks;
use super::volume::LsmVolume;
use crate::common::abandoned::AbandonedOperations;
use crate::common::allocator::Extent;
use crate::{EngineError, VolumePlace};
use octokv_base::{BufferPool, Nanos};
use octokv_device::{Device, DeviceFuture};
use std::cell::RefCell;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Waker};

/// One core's part of an open volume.
pub struct LsmCore {
    pub(super) volume: Arc<LsmVolume>,
    pub(super) core: usize,
    pub(super) device: Rc<dyn Device>,
    pub(super) pool: BufferPool,
    pub(super) io: Rc<TableIo>,
    /// Operations whose callers dropped them.
    pub(super) abandoned: AbandonedOperations,
    /// The open views of iterators that this core advanced last.
    pub(super) views: RefCell<IteratorViews>,
}

impl LsmCore {
    /// The part of core `core`. REQUIRES: `device` is that core's view of the volume's device, and no other part of the volume has the same core.
    pub(super) fn new(
        volume: Arc<LsmVolume>,
        core: usize,
        device: Rc<dyn Device>,
        pool: BufferPool,
    ) -> LsmCore {
        LsmCore::with_io(volume, core, device, pool, None)
    }

    /// The part of a verification, which goes on behind all that it cannot read. REQUIRES: it changes nothing, and no other part of the volume has core 0.
    pub(super) fn for_verification(
        volume: Arc<LsmVolume>,
        device: Rc<dyn Device>,
        pool: BufferPool,
    ) -> LsmCore {
        LsmCore::with_io(volume, 0, device, pool, Some(UnreadableBlocks::default()))
    }

    fn with_io(
        volume: Arc<LsmVolume>,
        core: usize,
        device: Rc<dyn Device>,
        pool: BufferPool,
        unreadable: Option<UnreadableBlocks>,
    ) -> LsmCore {
        let io = Rc::new(TableIo {
            device: Rc::clone(&device),
            pool: pool.clone(),
            cache: Arc::clone(&volume.cache),
            volume_id: volume.fixed().volume_id,
            unit_bytes: volume.fixed().layout.unit_bytes,
            place: VolumePlace::default(),
            counters: TableCounters::default(),
            scan_lengths: ScanLengths::default(),
            spare_blocks: SpareBlocks::default(),
            prefetch_budget: Arc::clone(&volume.prefetch_budget),
            unreadable,
        });
        let abandoned = AbandonedOperations::new(volume.abandoned.clone());
        let views = RefCell::new(IteratorViews::new(volume.settings.views_max));
        LsmCore { volume, core, device, pool, io, abandoned, views }
    }

    /// The time by which reads are measured: the device's, else the volume's; `None` if neither has one.
    pub(super) fn clock(&self) -> Option<Nanos> {
        self.device.now().or_else(|| self.volume.clock.elapsed())
    }

    /// Gives back a run to which these writes may still be in flight, once they have ended. Those that nothing polls to their end leave the run allocated until the next
    /// opening.
    pub(super) fn release_unfinished(&self, run: Extent, mut writes: Vec<DeviceFuture>) {
        let has_not_ended = |write: &mut DeviceFuture| {
            Pin::new(write).poll(&mut Context::from_waker(Waker::noop())).is_pending()
        };
        writes.retain_mut(has_not_ended);
        let volume = Arc::clone(&self.volume);
        if writes.is_empty() {
            return volume.release(run);
        }
        self.abandoned.push(async move {
            for write in writes {
                // The data is not used, so its outcome does not matter.
                let _ = write.await;
            }
            volume.release(run);
        });
    }

    /// The error of a damaged record at a unit.
    pub(super) fn corrupt(&self, unit: u64) -> EngineError {
        EngineError::Corrupt { lba: self.volume.lba(unit).0, place: VolumePlace::default() }
    }
}
