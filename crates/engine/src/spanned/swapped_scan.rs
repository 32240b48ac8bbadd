//! Scans of a volume with swapped keys: what home has of them, with the versions and digests of their newest values.
//!
//! In: the entries of the home devices, in the order of the ring. Out: the same keys, with what the regions have. A key whose newest version only its record has is
//! found whatever the scan asks for: the home devices are asked for all, and entries are left out afterwards. Tested in `tests/spanned_swap.rs`.

use super::places::PlacedMember;
use super::ring_merge::{ListOrder, scan_merged};
use crate::{Engine, EngineError, ScanEntry, ScanSink, StoredValue, value_digest};
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

/// Yields the entries of a range in the order of the ring; `swapped` gives the value of a key that a region has.
///
/// # Errors
/// Of a device.
pub(super) async fn scan_with_swaps<E: Engine>(
    members: &[PlacedMember<E>],
    order: ListOrder,
    (range, since): (RingRange, Version),
    swapped: impl AsyncFn(&Key) -> Result<Option<StoredValue>, EngineError>,
    sink: &mut impl ScanSink,
) -> Result<(), EngineError> {
    let mut rest = Some(range);
    while let Some(range) = rest {
        let mut page = Vec::new();
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
        scan_merged(members, order, (range, Version::NONE), &mut collect).await?;
        rest = match page.last() {
            Some(last) if page.len() == PAGE_ENTRIES && last.position < range.last() => {
                RingRange::new(RingPosition(last.position.0 + 1), range.last())
            }
            _ => None,
        };
        for mut entry in page {
            if let Some(value) = swapped(&entry.key).await? {
                entry.version = value.version;
                entry.digest = value_digest(value.as_bytes(), value.expires_at);
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
