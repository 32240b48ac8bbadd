//! What the ordered engine's parts take in memory, by the bytes that they allocate.

use crate::held_since;
use octokv_base::{Nanos, Prng, UnixTime, Version};
use octokv_engine::lsm::entry::{EntryValue, TreeEntry};
use octokv_engine::lsm::memtable::Memtable;
use octokv_engine::lsm::snapshots::{LiveSnapshot, SNAPSHOT_BYTES_MAX, SnapshotList};
use octokv_sys::counting_allocator::thread_held_bytes;

#[test]
fn a_snapshot_takes_a_few_hundred_bytes() {
    const SNAPSHOTS: usize = 10_000;
    let list = SnapshotList::new(SNAPSHOTS);
    let mut live: Vec<LiveSnapshot> = Vec::with_capacity(SNAPSHOTS);
    let before = thread_held_bytes();
    for number in 1..=SNAPSHOTS {
        live.extend(list.create(|| number as u64, UnixTime(0), Nanos(0)));
        let each = held_since(before) / number + size_of::<LiveSnapshot>();
        // The first pays for a node of the map, which has room for ten others.
        assert!(number < 12 || each <= SNAPSHOT_BYTES_MAX, "{each} B for each of {number}");
    }
    assert!(held_since(before) > SNAPSHOTS * 16, "the allocator counts");
    assert_eq!(live.len(), SNAPSHOTS);
    live.clear();
    // The empty map keeps a node.
    assert!(held_since(before) < 1000, "dropped snapshots leave {} B", held_since(before));
}

#[test]
fn a_memtable_counts_what_it_allocates() {
    let before = thread_held_bytes();
    let memtable = Memtable::default();
    let mut random = Prng::new(1);
    let value = [7; 3000];
    for sequence in 1..=20_000u64 {
        let value_bytes = if random.one_in(20) { random.below(3000) } else { random.below(200) };
        let key = &random.next_u64().to_le_bytes()[..1 + random.below(8) as usize];
        let value = EntryValue::Inline(&value[..value_bytes as usize]);
        let (version, expires_at) = (Version::NONE, UnixTime::NEVER);
        assert!(memtable.insert(&TreeEntry { key, sequence, version, expires_at, value }));
        if sequence % 1000 == 0 {
            let (held, counted) = (held_since(before) + size_of::<Memtable>(), memtable.bytes());
            // The bytes in which the writer copies an entry; what the allocator rounds up, and has in front of each allocation.
            let (scratch_bytes, rounding_bytes) = (8 << 10, 24 * (sequence as usize + 1000));
            assert!(held <= counted + scratch_bytes, "{held} B, and {counted} B counted");
            assert!(counted <= held + rounding_bytes, "{held} B, and {counted} B counted");
        }
    }
    drop(memtable);
    assert_eq!(held_since(before), 0, "a dropped memtable leaves nothing");
}
