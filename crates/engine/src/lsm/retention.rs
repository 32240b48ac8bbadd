//! Which entries of a key a flush or compaction keeps.
//!
//! In: the entries of one key in the input, the newest first; the live snapshots; whether a lower level may have the key. Out: for each
//! entry, whether it is kept, dropped, or kept as a tombstone. The readers are the snapshots, each with its time, and all reads from now
//! on. Each reader sees the newest entry up to its sequence number, so:
//! - an entry that no reader sees is dropped;
//! - a value that has expired for all readers that see it is kept as a tombstone: its space is freed;
//! - in a compaction, the oldest kept entry, if it is a tombstone that has no version to keep, is dropped if no lower level may have
//!   the key, and then the next one.
//!
//! A tombstone without a version thus needs nothing at the bottom but that no older entry is left beneath it, in the lower levels or for an
//! older snapshot. A tombstone with a version stays until [`ForgottenTombstones`] has it, and so does an expired value with one: the
//! contract says that the version of a key does not decrease ([decision 0014](../../../../docs/decisions/0014-versions-in-the-contract.md)).
//!
//! REQUIRES of the caller: the snapshots are listed after the last change of the input was applied; a read without a snapshot reads
//! up to the highest number, or keeps the memtable that it began with. A key in a lost range of the version counts as one that a lower
//! level may have: its tombstone shows that the lost entries are older.
//! Tested in `retention_tests.rs` against the definition.

use super::entry::{EntryValue, TreeEntry};
use super::snapshots::SnapshotPoint;
use octokv_base::{UnixTime, Version};
use smallvec::SmallVec;

/// What becomes of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retention {
    /// It is written to the output.
    Keep,
    /// Its sequence number and version are, without value and expiry.
    KeepAsTombstone,
    /// It is not in the output.
    Drop,
}

impl Retention {
    /// What is written to the output of an entry.
    pub fn apply(self, entry: TreeEntry<'_>) -> Option<TreeEntry<'_>> {
        match self {
            Retention::Keep => Some(entry),
            Retention::KeepAsTombstone => {
                Some(TreeEntry { value: EntryValue::Tombstone, expires_at: UnixTime::NEVER, ..entry })
            }
            Retention::Drop => None,
        }
    }
}

/// The tombstones that the last `forget_below` ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForgottenTombstones {
    /// Those of a lower version,
    pub below: Version,
    /// that were written up to this sequence number, the last before the call,
    pub sequence: u64,
    /// and were tombstones, or had expired, at the time of the call.
    pub time: UnixTime,
}

impl ForgottenTombstones {
    /// None.
    pub const NONE: ForgottenTombstones =
        ForgottenTombstones { below: Version::NONE, sequence: 0, time: UnixTime(0) };

    /// Whether an entry that hides its key, a tombstone or an expired value, has no version that has to stay. Reads use it, too, so that
    /// a forgotten tombstone has no version before and after it is dropped.
    pub fn has_no_version(&self, entry: &TreeEntry<'_>) -> bool {
        let was_hidden = entry.value == EntryValue::Tombstone || entry.expires_at <= self.time;
        entry.version == Version::NONE || (self.is_in_range(entry) && was_hidden)
    }

    fn is_in_range(&self, entry: &TreeEntry<'_>) -> bool {
        entry.version < self.below && entry.sequence <= self.sequence
    }
}

/// What is the same for all keys of a flush or compaction.
#[derive(Clone, Copy, Debug)]
pub struct RetentionRule<'a> {
    /// The live snapshots, by ascending sequence number.
    pub snapshots: &'a [SnapshotPoint],
    /// The time of the flush or compaction: reads from now on are not earlier.
    pub now: UnixTime,
    /// The tombstones that need not stay.
    pub forgotten: ForgottenTombstones,
}

/// The outcomes for the entries of a key, in their order.
pub type Retentions = SmallVec<[Retention; 16]>;

impl RetentionRule<'_> {
    /// What becomes of the entries of one key in a flush, the newest first. Also at the bottom it keeps the tombstones that a
    /// reader sees: an iterator that moves backward may stand at an older entry of the key, which the memtable had, and goes on in the
    /// table that the memtable became.
    ///
    /// # Panics
    /// If the entries are not in order.
    pub fn retain_in_flush(&self, entries: &[TreeEntry<'_>]) -> Retentions {
        self.retain_seen(entries)
    }

    /// What becomes of the entries of one key in a compaction, the newest first. `below`: whether a level below the output, or any
    /// other place that is read after the input, may have the key. Iterators keep the tables of the input.
    ///
    /// # Panics
    /// If the entries are not in order.
    pub fn retain_in_compaction(&self, entries: &[TreeEntry<'_>], below: bool) -> Retentions {
        let mut retentions = self.retain_seen(entries);
        if !below {
            self.drop_oldest_tombstones(entries, &mut retentions);
        }
        retentions
    }

    /// Drops what no reader sees.
    fn retain_seen(&self, entries: &[TreeEntry<'_>]) -> Retentions {
        assert!(
            entries.is_sorted_by(|newer, older| newer.sequence > older.sequence),
            "the newest comes first"
        );
        let mut retentions = Retentions::new();
        // Of the newest entry: reads from now on, and snapshots.
        let mut seen_now = true;
        let mut snapshots = self.snapshots;
        for entry in entries {
            let first_seeing = snapshots.partition_point(|snapshot| snapshot.sequence < entry.sequence);
            let (earlier, seeing) = snapshots.split_at(first_seeing);
            snapshots = earlier;
            let is_seen = std::mem::take(&mut seen_now) || !seeing.is_empty();
            // Times of snapshots are not in order: a wall clock may jump.
            let earliest = seeing.iter().map(|snapshot| snapshot.time).fold(self.now, UnixTime::min);
            let has_expired = entry.value != EntryValue::Tombstone && entry.expires_at <= earliest;
            // As a tombstone, without its expiry, it would count as one at the time of the call, when it had not expired.
            let has_to_stay_value =
                self.forgotten.is_in_range(entry) && !self.forgotten.has_no_version(entry);
            retentions.push(match (is_seen, has_expired && !has_to_stay_value) {
                (false, _) => Retention::Drop,
                (true, true) => Retention::KeepAsTombstone,
                (true, false) => Retention::Keep,
            });
        }
        retentions
    }

    /// Drops the tombstones that have nothing to hide.
    fn drop_oldest_tombstones(&self, entries: &[TreeEntry<'_>], retentions: &mut Retentions) {
        for (entry, retention) in entries.iter().zip(retentions).rev() {
            let is_tombstone =
                entry.value == EntryValue::Tombstone || *retention == Retention::KeepAsTombstone;
            match retention {
                Retention::Drop => {}
                _ if is_tombstone && self.forgotten.has_no_version(entry) => *retention = Retention::Drop,
                Retention::Keep | Retention::KeepAsTombstone => return,
            }
        }
    }
}
