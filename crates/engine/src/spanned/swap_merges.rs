//! Merges of swapped keys outside of operations: when a volume is opened, and when a device is replaced.
//!
//! ```text
//!   opening       keys that their home does not list ─▶ stored there ─▶ removed from the region
//!   replacement   keys of the new device             ─▶ stored there ─▶ removed from the regions of others
//! ```
//! In: the regions, and the volumes of the homes. Out: records moved to their homes. A home that lacks a swapped key is one whose delete was not acknowledged: that of a replacement which
//! a power loss ended before it was counted, or that of a home without space. Invariant: a key whose home or region fails stays swapped, and is merged later.
//! Tested in `tests/spanned_swap.rs`, `tests/spanned_swap_replacement.rs` and `tests/spanned_swap_failures.rs`.

use super::places::{OpenMember, OpenRegion};
use super::swap_region::{READ_AT_ONCE, read_record};
use super::swapped_keys::SwappedKeys;
use super::swapping::home_value;
use super::volume::{SpannedVolume, member_device};
use crate::log::handle::LogEngine;
use crate::{Engine, EngineError, PutOptions, PutOutcome, ValueRange, Volume};
use futures_util::future::join_all;
use octokv_base::{BufferPool, Key, Version};
use octokv_device::Device;
use std::rc::Rc;

/// Stores the value of a swapped key at a home that has no value of it, and removes it from its region. REQUIRES: the key's exclusive lock, or no handle serves yet.
async fn move_home<E: Engine>(
    swaps: &SwappedKeys,
    (home, engine): (usize, &E),
    region: &LogEngine,
    key: &Key,
) {
    let is_stored = match read_record(region, key, ValueRange::ALL).await {
        Ok(Some((versions, value))) => {
            let put = async |options| {
                let value = home_value(engine.record_layout(), key, &value);
                engine.put_with(key, value, options).await
            };
            let mut outcome = put(PutOptions { version: versions.version, ..PutOptions::default() }).await;
            // Home has a tombstone of the key with a version.
            if let Ok(PutOutcome::NotNewer(found)) = outcome
                && let Some(options) = versions.options_over(found)
            {
                outcome = put(options).await;
            }
            outcome.is_ok_and(|outcome| outcome != PutOutcome::Full)
                && (!swaps.flushes_home() || engine.flush().await.is_ok())
        }
        Ok(None) => true,
        Err(_) => false,
    };
    if is_stored && region.delete_with(key, Version::NONE).await.is_ok() {
        swaps.remove(home, key);
    }
}

impl<V: Volume> SpannedVolume<V> {
    /// Merges the swapped keys that their homes do not list. REQUIRES: no handle serves yet.
    pub(super) async fn merge_unlisted(&self, devices: &[Rc<dyn Device>], pool: &BufferPool) {
        let Some(swaps) = self.swaps().filter(|swaps| swaps.count() > 0) else { return };
        for home in 0..devices.len() {
            let Some(of_home) = self.replacement_handle(devices, home, pool) else { continue };
            for guest in (0..devices.len()).filter(|&guest| guest != home) {
                let keys = swaps.keys_in(home, guest);
                let unlisted = unlisted_keys(&of_home.engine, &keys).await;
                let of_guest = self.replacement_handle(devices, guest, pool);
                let Some(OpenMember { swap: Some(OpenRegion { engine: region, .. }), .. }) = of_guest else {
                    continue;
                };
                for key in unlisted {
                    move_home(swaps, (home, &of_home.engine), &region, key).await;
                }
            }
        }
    }

    /// Stores the values of the swapped keys of a device that was given up in the volume on the new one, and removes them from the regions of
    /// others.
    pub(super) async fn merge_into(
        &self,
        volume: &V,
        (devices, given): (&[Rc<dyn Device>], usize),
        home: usize,
        pool: &BufferPool,
    ) {
        let Some(swaps) = self.swaps() else { return };
        let device = member_device(&devices[given], self.superblock().swap_bytes);
        let new = volume.engine(self.cores(), &[device], pool.clone());
        for guest in (0..devices.len()).filter(|&guest| guest != home) {
            let of_guest = self.replacement_handle(devices, guest, pool);
            let Some(OpenMember { swap: Some(OpenRegion { engine: region, .. }), .. }) = of_guest else {
                continue;
            };
            for key in swaps.keys_in(home, guest) {
                let _exclusive = swaps.exclude(self.position_of(&key)).await;
                move_home(swaps, (home, &new), &region, &key).await;
            }
        }
    }
}

/// The keys that a home does not list. One that cannot be read counts as listed.
async fn unlisted_keys<'a, E: Engine>(home: &E, keys: &'a [Key]) -> Vec<&'a Key> {
    let mut unlisted = Vec::new();
    let is_unlisted = async |key| home.status(key).await.map(|status| status.is_none());
    for some in keys.chunks(READ_AT_ONCE) {
        let read = join_all(some.iter().map(&is_unlisted)).await;
        for (key, mut read) in some.iter().zip(read) {
            // A small pool has no buffers for so many reads at once.
            if read == Err(EngineError::NoMemory) {
                read = is_unlisted(key).await;
            }
            unlisted.extend((read == Ok(true)).then_some(key));
        }
    }
    unlisted
}
