//! Scans of a volume with swapped keys: what home has of them, with the versions and digests of their newest values.
//!
//! In: the entries of the home devices, in the order of the ring. Out: the same keys, with what the regions have. A key whose newest version only its record has is
//! found whatever the scan asks for: the home devices are asked for all, and entries are left out afterwards. Invariant: a key that was merged since its entry was read is
//! read again. Tested in `tests/spanned_swap.rs`.

use super::core::SpannedCore;
use super::places::PlacedMember;
use super::ring_merge::{KeysOfDevice, scan_merged};
use super::swapped_keys::SwappedKeys;
use crate::{Engine, EngineError, ScanEntry, ScanSink, ValueRange, value_digest};
use octokv_base::{Key, RingPosition, RingRange, Version};

/// The entries that are read ahead of the sink.
const PAGE_ENTRIES: usize = 64;

/// An entry of a home device.
struct HomeEntry {
    position: RingPosition,
    key: Key,
    version: Version,
    is_tombstone: bool,
    digest: u64,
}

/// Yields the entries of a range in the order of the ring.
///
/// # Errors
/// Of a device.
pub(super) async fn scan_with_swaps<E: Engine>(
    (core, swaps): (&SpannedCore<E>, &SwappedKeys),
    (members, kept): (&[PlacedMember<E>], KeysOfDevice<'_>),
    (range, since): (RingRange, Version),
    sink: &mut impl ScanSink,
) -> Result<(), EngineError> {
    let mut rest = Some(range);
    while let Some(range) = rest {
        let (mut page, removals) = (Vec::new(), swaps.removals());
        let mut collect = |entry: &ScanEntry<'_>| {
            let has_space = page.len() < PAGE_ENTRIES;
            if has_space {
                page.push(HomeEntry {
                    position: entry.position,
                    key: Key::new(entry.key).expect("a key of the volume"),
                    version: entry.version,
                    is_tombstone: entry.is_tombstone,
                    digest: entry.digest,
                });
            }
            has_space
        };
        scan_merged((members, kept), core.order, (range, Version::NONE), &mut collect).await?;
        rest = match page.last() {
            Some(last) if page.len() == PAGE_ENTRIES && last.position < range.last() => {
                RingRange::new(RingPosition(last.position.0 + 1), range.last())
            }
            _ => None,
        };
        for mut entry in page {
            if core.may_be_newer(swaps, &entry.key, removals)? {
                match core.get_swapping(swaps, &entry.key, ValueRange::ALL).await? {
                    Some(value) => {
                        entry.version = value.version;
                        entry.digest = value_digest(value.as_bytes(), value.expires_at);
                        entry.is_tombstone = false;
                    }
                    // It was deleted since the page was read.
                    None if !entry.is_tombstone => continue,
                    None => {}
                }
            }
            let HomeEntry { position, ref key, version, is_tombstone, digest } = entry;
            let key = key.as_bytes();
            let is_wanted = version >= since;
            if is_wanted && !sink.offer(&ScanEntry { position, key, version, is_tombstone, digest }) {
                return Ok(());
            }
        }
    }
    Ok(())
}
