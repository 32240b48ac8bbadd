//! Swapped keys when a device is replaced: those of which it had the newest values, and those that it was the home of.
//!
//! ```text
//!   in its region     ─▶ deleted at home, which has an older value
//!   its own           ─▶ superblock on the new device ─▶ stored there, one after another, and removed from the regions of others
//! ```
//! In: the devices, one of which is given up. Out: no key has a value that is older than one which was acknowledged, and those that are not lost are at their
//! home. Invariant: regions keep all until the new device is one of the volume. Tested in `tests/spanned_swap.rs`, and by the scenario `devices` of
//! the simulator.

use super::places::OpenMember;
use super::superblock::SpanSuperblock;
use super::swap_notes::SwapNotes;
use super::volume::SpannedVolume;
use crate::{Engine, OpenError, Volume};
use octokv_base::{BufferPool, Key, RingPosition, Version};
use octokv_device::Device;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Lets a member serve again, if it did before, unless its replacement is counted.
pub(super) struct RetiredMember(Option<Arc<AtomicBool>>);

impl RetiredMember {
    /// It serves no more: another device may have counted its replacement.
    pub fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for RetiredMember {
    fn drop(&mut self) {
        self.0.iter().for_each(|is_retired| is_retired.store(false, Ordering::Release));
    }
}

impl<V: Volume> SpannedVolume<V> {
    /// Keeps all cores from using the device of an index.
    pub(super) fn retire(&self, index: usize) -> RetiredMember {
        let is_retired = Arc::clone(&self.all_members()[index].is_retired);
        let was_retired = is_retired.swap(true, Ordering::AcqRel);
        RetiredMember((!was_retired).then_some(is_retired))
    }

    /// A handle on a device that serves, of the core that is for openings and replacements.
    pub(super) fn replacement_handle(
        &self,
        devices: &[Rc<dyn Device>],
        index: usize,
        pool: &BufferPool,
    ) -> Option<OpenMember<V::Engine>> {
        let member = &self.all_members()[index];
        let device = &devices[member.given];
        member
            .serves(device)
            .then(|| self.member_engine(index, member, (self.cores(), device, pool)).volume)
            .flatten()
    }

    pub(super) fn position_of(&self, key: &Key) -> RingPosition {
        RingPosition::of(key, self.superblock().hash_seed)
    }

    /// Deletes from their home devices the keys whose newest values were in the region of the device that is replaced. Until the superblocks count the replacement, these keys
    /// stay swapped: reads and writes of them fail with `Unavailable`. A put that was accepted earlier would be hidden by the region if the replaced device came back.
    ///
    /// # Errors
    /// A home device fails.
    pub(super) async fn delete_swapped(
        &self,
        devices: &[Rc<dyn Device>],
        guest: usize,
        pool: &BufferPool,
    ) -> Result<(), OpenError> {
        let Some(swaps) = self.swaps() else { return Ok(()) };
        swaps.drain_locks().await;
        for home in (0..devices.len()).filter(|&home| home != guest) {
            let keys = swaps.keys_in(home, guest);
            // The keys of a home that is lost, too, are lost with it.
            let Some(of_home) = self.replacement_handle(devices, home, pool) else { continue };
            let mut is_flushed = true;
            for key in keys {
                let _exclusive = swaps.exclude(self.position_of(&key)).await;
                let Some(swapped) = swaps.get(home, &key).filter(|of| usize::from(of.guest) == guest) else {
                    continue;
                };
                // Without an acknowledged put what home has is the newest.
                if swapped.is_acknowledged {
                    let deleted = of_home.engine.delete_with(&key, Version::NONE).await;
                    deleted.map_err(|error| of_home.place.engine_error(error))?;
                    is_flushed = false;
                }
            }
            if swaps.flushes_home() && !is_flushed {
                of_home.engine.flush().await.map_err(|error| of_home.place.engine_error(error))?;
            }
        }
        Ok(())
    }

    /// The notes of a device without keys: of those that it had the regions of others still have some.
    pub(super) fn notes_of_replaced(&self, index: usize) -> SwapNotes {
        let SpanSuperblock { map, hash_seed, .. } = self.superblock();
        let partition_of = |key: &Key| map.partition_of(RingPosition::of(key, hash_seed));
        self.swaps().map(|swaps| swaps.notes_of_keys(index, partition_of)).unwrap_or_default()
    }
}
