//! The live snapshots of a volume: what flush and compaction have to keep.
//!
//! A snapshot is a sequence number and a time: it sees the entries up to that number, without those that had expired at that time.
//! Creating one takes a lock, and less than [`SNAPSHOT_BYTES_MAX`]. It ends when its [`LiveSnapshot`] is dropped, or when it was not used
//! for some time ([`SnapshotList::expire`]): then [`LiveSnapshot::begin_use`] gives nothing. While it is in use, it does not expire.
//!
//! ```text
//!   create ─▶ idle ⇄ in use        idle ──expire──▶ expired        drop ends any
//! ```
//! Invariants: in the order of creation, sequence numbers do not decrease; at most the configured number live. Tested below and in
//! `tests/lsm_memory.rs`.

use octokv_base::{Nanos, UnixTime};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The most memory that a snapshot takes, in bytes, the handle included.
pub const SNAPSHOT_BYTES_MAX: usize = 256;

/// What a snapshot sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SnapshotPoint {
    /// The entries up to this sequence number.
    pub sequence: u64,
    /// Values that expire at this time or before do not exist.
    pub time: UnixTime,
}

/// A live snapshot, as statistics show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotInfo {
    /// What it sees.
    pub point: SnapshotPoint,
    /// When it was created, by the clock that measures idle time.
    pub created: Nanos,
    /// When its last use began.
    pub last_used: Nanos,
}

/// The live snapshots of a volume.
pub struct SnapshotList {
    live: Mutex<SnapshotTable>,
    snapshots_max: usize,
}

#[derive(Default)]
struct SnapshotTable {
    /// By number; numbers count up.
    snapshots: BTreeMap<u64, SnapshotSlot>,
    next_number: u64,
    newest_sequence: u64,
    expired: u64,
}

struct SnapshotSlot {
    info: SnapshotInfo,
    uses: u32,
}

/// A snapshot, which ends when this is dropped, unless it has expired.
pub struct LiveSnapshot {
    list: Arc<SnapshotList>,
    number: u64,
    point: SnapshotPoint,
}

/// A use of a snapshot, during which it does not expire.
pub struct SnapshotUse<'a>(&'a LiveSnapshot);

impl SnapshotList {
    /// A list without snapshots, of at most `snapshots_max`.
    pub fn new(snapshots_max: usize) -> Arc<SnapshotList> {
        Arc::new(SnapshotList { live: Mutex::default(), snapshots_max })
    }

    /// Creates a snapshot of what is there `now`. `None` if there are too many. `sequence` gives the number of the newest change that
    /// reads see, and is called under the list's lock: so a flush or compaction that has listed the snapshots before keeps everything that
    /// this one sees, because the entries that it drops were replaced by then. REQUIRES: `sequence` does not use the list.
    ///
    /// # Panics
    /// If the sequence number is less than that of an earlier snapshot.
    pub fn create(
        self: &Arc<SnapshotList>,
        sequence: impl FnOnce() -> u64,
        time: UnixTime,
        now: Nanos,
    ) -> Option<LiveSnapshot> {
        let mut live = self.live.lock();
        if live.snapshots.len() >= self.snapshots_max {
            return None;
        }
        let point = SnapshotPoint { sequence: sequence(), time };
        assert!(point.sequence >= live.newest_sequence, "sequence numbers count up");
        live.newest_sequence = point.sequence;
        let number = live.next_number;
        live.next_number += 1;
        let info = SnapshotInfo { point, created: now, last_used: now };
        live.snapshots.insert(number, SnapshotSlot { info, uses: 0 });
        Some(LiveSnapshot { list: Arc::clone(self), number, point })
    }

    /// The snapshot with the lowest sequence number.
    pub fn oldest(&self) -> Option<SnapshotInfo> {
        self.live.lock().snapshots.first_key_value().map(|(_, slot)| slot.info)
    }

    /// The number of live snapshots.
    pub fn count(&self) -> usize {
        self.live.lock().snapshots.len()
    }

    /// The number of snapshots that have expired.
    pub fn expired_count(&self) -> u64 {
        self.live.lock().expired
    }

    /// What the live snapshots see, by ascending sequence number, for one flush or compaction. REQUIRES: called after the last
    /// change of its input was applied.
    pub fn points(&self) -> Vec<SnapshotPoint> {
        self.live.lock().snapshots.values().map(|slot| slot.info.point).collect()
    }

    /// Takes all snapshots for used now: of a clock that stood still while there were none.
    pub fn touch(&self, now: Nanos) {
        for slot in self.live.lock().snapshots.values_mut() {
            slot.info.last_used = slot.info.last_used.max(now);
        }
    }

    /// Ends the snapshots that are not in use and were not for `idle_time`. Gives their number.
    pub fn expire(&self, now: Nanos, idle_time: Nanos) -> usize {
        let mut live = self.live.lock();
        let before = live.snapshots.len();
        live.snapshots.retain(|_, slot| slot.uses > 0 || now.since(slot.info.last_used) < idle_time);
        let expired = before - live.snapshots.len();
        live.expired += expired as u64;
        expired
    }
}

impl LiveSnapshot {
    /// What it sees.
    pub fn point(&self) -> SnapshotPoint {
        self.point
    }

    /// Begins a use. `None` if the snapshot has expired: what it saw may be gone.
    pub fn begin_use(&self, now: Nanos) -> Option<SnapshotUse<'_>> {
        let mut live = self.list.live.lock();
        let slot = live.snapshots.get_mut(&self.number)?;
        slot.uses += 1;
        slot.info.last_used = slot.info.last_used.max(now);
        Some(SnapshotUse(self))
    }
}

impl Drop for LiveSnapshot {
    fn drop(&mut self) {
        self.list.live.lock().snapshots.remove(&self.number);
    }
}

impl Drop for SnapshotUse<'_> {
    fn drop(&mut self) {
        let mut live = self.0.list.live.lock();
        let slot = live.snapshots.get_mut(&self.0.number).expect("a snapshot in use is live");
        slot.uses -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE_TIME: Nanos = Nanos(100);

    fn create(list: &Arc<SnapshotList>, sequence: u64, now: u64) -> Option<LiveSnapshot> {
        list.create(|| sequence, UnixTime(now * 10), Nanos(now))
    }

    fn sequences(list: &SnapshotList) -> Vec<u64> {
        list.points().iter().map(|point| point.sequence).collect()
    }

    #[test]
    fn live_snapshots_are_listed_until_they_are_dropped() {
        let list = SnapshotList::new(10);
        assert_eq!((list.oldest(), list.count()), (None, 0));
        let [first, second, third] = [(5, 1), (5, 2), (9, 3)]
            .map(|(sequence, now)| create(&list, sequence, now).expect("below the bound"));
        assert_eq!(second.point(), SnapshotPoint { sequence: 5, time: UnixTime(20) });
        assert_eq!(sequences(&list), [5, 5, 9]);
        let oldest = list.oldest().expect("three live");
        assert_eq!((oldest.point, oldest.created, oldest.last_used), (first.point(), Nanos(1), Nanos(1)));
        drop(first);
        assert_eq!(list.oldest().map(|info| info.point), Some(second.point()));
        drop(third);
        assert_eq!((sequences(&list), list.count(), list.expired_count()), (vec![5], 1, 0));
        drop(second);
        assert_eq!(list.oldest(), None);
    }

    #[test]
    fn there_are_at_most_as_many_as_configured() {
        let list = SnapshotList::new(2);
        let (first, _second) = (create(&list, 1, 0), create(&list, 1, 0));
        let third = list.create(|| panic!("no number is needed"), UnixTime(0), Nanos(0));
        assert!(third.is_none());
        drop(first);
        assert!(create(&list, 1, 0).is_some());
    }

    #[test]
    fn what_is_not_used_for_some_time_expires() {
        let list = SnapshotList::new(10);
        let [forgotten, used, in_use] = [1, 2, 3].map(|sequence| create(&list, sequence, 0).expect("below"));
        let long_use = in_use.begin_use(Nanos(0)).expect("live");
        assert_eq!(list.expire(Nanos(99), IDLE_TIME), 0);
        drop(used.begin_use(Nanos(99)).expect("live"));
        assert_eq!(list.expire(Nanos(100), IDLE_TIME), 1);
        assert_eq!((sequences(&list), list.expired_count()), (vec![2, 3], 1));
        assert!(forgotten.begin_use(Nanos(100)).is_none(), "an expired snapshot is used");
        let again = in_use.begin_use(Nanos(50)).expect("live");
        assert_eq!(list.expire(Nanos(1000), IDLE_TIME), 1);
        drop(long_use);
        assert_eq!(list.expire(Nanos(1000), IDLE_TIME), 0, "one use is left");
        drop(again);
        assert_eq!(list.expire(Nanos(1000), IDLE_TIME), 1);
        // Dropped when they are not in the list any more.
        drop((forgotten, used, in_use));
        assert_eq!((list.count(), list.expired_count()), (0, 3));
    }

    #[test]
    fn a_clock_that_goes_back_expires_nothing() {
        let list = SnapshotList::new(1);
        let snapshot = create(&list, 1, 500).expect("below");
        drop(snapshot.begin_use(Nanos(400)));
        assert_eq!(list.expire(Nanos(10), IDLE_TIME), 0);
        assert_eq!(list.oldest().map(|info| info.last_used), Some(Nanos(500)));
    }

    #[test]
    #[should_panic(expected = "sequence numbers count up")]
    fn a_lower_sequence_number_is_a_bug() {
        let list = SnapshotList::new(2);
        let _newer = create(&list, 2, 0);
        create(&list, 1, 0);
    }
}
