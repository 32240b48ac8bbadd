//! Partitions of a volume with swap regions before they move: their swapped keys are merged, and no others are swapped until the move has ended.
//!
//! ```text
//!   map in which the partitions settle: no key of them is swapped ─▶ operations with an earlier map end ─▶ their swapped keys merged ─▶ move ─▶ they settle no more
//! ```
//! In: a planned move. Out: partitions all of whose newest values are at their home, or those that have others. Invariant: as long as a partition moves, none of its keys is
//! in a region; so a move concerns the volumes of two devices alone, and what a superblock noted of swapped keys counts for nothing behind it.
//! Tested in `tests/spanned_swap_growth.rs`, and by the scenario `devices` of the simulator.

use super::core::SpannedCore;
use super::partition_set::PartitionSet;
use super::swapped_keys::SwappedKeys;
use crate::Engine;
use crate::bug_injection::{self, InjectedBug};

impl<E: Engine> SpannedCore<E> {
    /// The partitions that cannot move, since their keys may be in a region that was not opened.
    pub(super) fn unknown_partitions(&self) -> PartitionSet {
        self.swaps().map(SwappedKeys::unknown_partitions).unwrap_or_default()
    }

    /// Merges the swapped keys of partitions of a home device. Returns the partitions with keys that stay swapped: a device fails, or home is full. REQUIRES: the
    /// partitions settle in the map of every operation.
    pub(super) async fn merge_partitions(&self, home: usize, partitions: &PartitionSet) -> PartitionSet {
        let (mut behind, mut swapped) = (None, PartitionSet::default());
        let Some(swaps) = self.swaps() else { return swapped };
        if bug_injection::is_injected(InjectedBug::MoveWhileSwapping) {
            return swapped;
        }
        while let Some(key) = swaps.next(home, behind.as_ref()) {
            let of = self.placed_key(swaps, &key);
            if partitions.has(of.partition()) {
                let _exclusive = of.exclude().await;
                if let Some(of_key) = of.swapped()
                    && self.merge(&of, of_key).await != Ok(true)
                {
                    swapped.insert(of.partition());
                }
            }
            behind = Some(key);
        }
        swapped
    }
}
