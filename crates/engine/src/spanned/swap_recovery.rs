//! Swapped keys as an opening finds them: by the records of the regions, and the notes of superblocks where a region is missing.
//!
//! In: the regions that were opened, with their keys; the superblock of each device. Out: the keys that are swapped, and the partitions whose keys
//! may be in a region that is not there. Invariant: a key is served only if no region can have a newer value of it. Tested in `tests/spanned_swap.rs`.

use super::devices::rewrite_superblock;
use super::partition_map::PartitionMap;
use super::partition_set::SPAN_PARTITIONS;
use super::superblock::SpanSuperblock;
use super::swap_notes::SwapNotes;
use super::swap_region::{OpenedRegion, SwapVolume};
use super::swapped_keys::{SwappedKey, SwappedKeys};
use crate::OpenError;
use crate::bug_injection::{self, InjectedBug};
use octokv_base::RingPosition;
use octokv_device::Device;
use std::rc::Rc;

/// Takes the keys of the region of a device. `None` if it could not be opened, or damage hides keys of it: which are swapped is not known then.
pub(super) fn recover_swaps(
    swaps: &SwappedKeys,
    superblock: &SpanSuperblock,
    guest: usize,
    opened: Result<OpenedRegion, OpenError>,
) -> Option<SwapVolume> {
    let opened = opened.ok();
    let OpenedRegion { volume, keys, .. } = opened.filter(|region| region.is_whole)?;
    let mut unread = Vec::new();
    for (key, versions) in keys {
        if bug_injection::is_injected(InjectedBug::SwapForgetRegion) {
            break;
        }
        let position = RingPosition::of(&key, superblock.hash_seed);
        match versions {
            Some(versions) => {
                let swapped = SwappedKey { guest: guest as u8, versions, is_acknowledged: true };
                swaps.insert(superblock.map.device_of(position), key, swapped);
            }
            // It is not known to be older than what home has.
            None => unread.push(superblock.map.partition_of(position)),
        }
    }
    swaps.set_unknown(guest, &unread);
    Some(volume)
}

/// Takes the notes of the superblock of a home device, and clears them if no region has keys of it. Those of partitions that other devices have by `map` say
/// nothing: none of their keys was swapped when they moved.
pub(super) async fn recover_notes(
    swaps: &SwappedKeys,
    device: &Rc<dyn Device>,
    (home, superblock, map): (usize, &SpanSuperblock, &PartitionMap),
    is_open: impl Fn(usize) -> bool,
) {
    let mut notes = superblock.swaps;
    for guest in (0..superblock.device.count.into()).filter(|&guest| notes.guests >> guest & 1 != 0) {
        if !is_open(guest) {
            let partitions = map.partitions_of(home);
            for partition in (0..SPAN_PARTITIONS).filter(|&at| partitions.has(at) && notes.has(at, guest)) {
                swaps.add_unknown(partition, guest);
            }
        }
    }
    let is_empty = swaps.next(home, None).is_none() && !swaps.has_unknown();
    let none = SwapNotes::default();
    if is_empty && notes != none {
        // If the write fails, the device may have the old notes or none. They count as cleared: the next put that needs a note writes it.
        let _ = rewrite_superblock(&**device, |changed| changed.swaps = none).await;
        notes = none;
    }
    swaps.set_notes(home, notes);
}
