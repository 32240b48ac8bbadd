//! Retention against its definition: no reader sees a difference.

use super::entry::{EntryValue, TreeEntry};
use super::retention::{ForgottenTombstones, Retention, RetentionRule};
use super::snapshots::SnapshotPoint;
use super::test_cursor::seeded;
use octokv_base::{UnixTime, Version};
use proptest::prelude::*;

/// An entry without its sequence number: whether it is a value, its version, and its expiry.
type Written = (bool, u64, u64);

/// What a reader learns of a key.
#[derive(Debug, PartialEq, Eq)]
enum Seen {
    Nothing,
    /// A tombstone, or an expired value, of this version.
    Version(Version),
    /// The value of this write.
    Value(u64),
}

fn entry_of(sequence: u64, (is_value, version, expires_at): Written) -> TreeEntry<'static> {
    TreeEntry {
        key: b"key",
        sequence,
        version: Version::from_bits(version),
        expires_at: if is_value { UnixTime(expires_at) } else { UnixTime::NEVER },
        value: if is_value { EntryValue::Inline(b"value") } else { EntryValue::Tombstone },
    }
}

/// The definition: the newest entry up to the reader's sequence number, in any place.
fn seen(entries: &[TreeEntry<'_>], reader: SnapshotPoint, forgotten: &ForgottenTombstones) -> Seen {
    let newest = entries.iter().filter(|entry| entry.sequence <= reader.sequence);
    let Some(newest) = newest.max_by_key(|entry| entry.sequence) else { return Seen::Nothing };
    let is_hidden = newest.value == EntryValue::Tombstone || newest.expires_at <= reader.time;
    match is_hidden {
        false => Seen::Value(newest.sequence),
        true if forgotten.has_no_version(newest) => Seen::Nothing,
        true => Seen::Version(newest.version),
    }
}

fn written() -> impl Strategy<Value = Written> {
    (any::<bool>(), 0..4u64, prop_oneof![Just(u64::MAX), 0..100u64])
}

/// Snapshots by ascending sequence number, their times in any order.
fn snapshots() -> impl Strategy<Value = Vec<SnapshotPoint>> {
    let point =
        (0..40u64, 0..80u64).prop_map(|(sequence, time)| SnapshotPoint { sequence, time: UnixTime(time) });
    proptest::collection::vec(point, 0..6).prop_map(|mut points| {
        points.sort_unstable();
        points
    })
}

fn forgets() -> impl Strategy<Value = ForgottenTombstones> {
    (0..5u64, 0..40u64, 0..80u64).prop_map(|(below, sequence, time)| ForgottenTombstones {
        below: Version::from_bits(below),
        sequence,
        time: UnixTime(time),
    })
}

proptest! {
    #![proptest_config(seeded(2000))]

    #[test]
    fn no_reader_sees_what_was_dropped(
        // In the order of writes: the lower levels, the input, the levels above it.
        writes in proptest::collection::vec(written(), 0..24),
        split in any::<[proptest::sample::Index; 2]>(),
        snapshots in snapshots(),
        forgotten in forgets(),
        now in 0..80u64,
        later in 0..60u64,
        may_be_below: bool,
    ) {
        let entries: Vec<_> =
            writes.iter().zip(1..).map(|(write, number)| entry_of(number * 2, *write)).collect();
        let mut ends = split.map(|end| end.index(entries.len() + 1));
        ends.sort_unstable();
        let lower = if may_be_below { &entries[..ends[0]] } else { &[] };
        let (mut input, upper) = (entries[ends[0]..ends[1]].to_vec(), &entries[ends[1]..]);
        input.reverse();
        let rule = RetentionRule { snapshots: &snapshots, now: UnixTime(now), forgotten };
        let retentions = rule.retain_in_compaction(&input, may_be_below);
        prop_assert_eq!(retentions.len(), input.len());
        let kept = input.iter().zip(&retentions).filter_map(|(entry, retention)| retention.apply(*entry));
        let kept: Vec<_> = kept.collect();
        let all = [lower, &input, upper].concat();
        let remaining = [lower, &kept, upper].concat();
        let later = [now, now + 1, now + later].map(|time| SnapshotPoint { sequence: u64::MAX, time: UnixTime(time) });
        for reader in snapshots.iter().chain(&later) {
            let (before, after) = (seen(&all, *reader, &forgotten), seen(&remaining, *reader, &forgotten));
            prop_assert_eq!(before, after, "{:?} sees a difference: {:?}", reader, retentions);
        }

        // A flush keeps what a compaction above other levels keeps.
        if may_be_below {
            prop_assert_eq!(&rule.retain_in_flush(&input), &retentions);
        }
        // A second compaction of the same finds nothing more to do.
        prop_assert!(rule.retain_in_compaction(&kept, may_be_below).iter().all(|retention| *retention == Retention::Keep));

        // Nothing is kept in vain.
        let readers: Vec<_> = snapshots.iter().chain(&later[..1]).collect();
        for (entry, retention) in input.iter().zip(&retentions) {
            let newest_of = |reader: &&&SnapshotPoint| {
                input.iter().find(|entry| entry.sequence <= reader.sequence) == Some(entry)
            };
            let mut seeing = readers.iter().filter(newest_of);
            prop_assert!(*retention == Retention::Drop || seeing.next().is_some(), "{:?} is kept in vain", entry);
        }
        if let (Some(oldest), false) = (kept.last(), may_be_below) {
            let is_vain = oldest.value == EntryValue::Tombstone && forgotten.has_no_version(oldest);
            prop_assert!(!is_vain, "the tombstone {:?} hides nothing", oldest);
        }
    }
}

fn retain(writes: &[Written], snapshots: &[u64], below: bool) -> Vec<Retention> {
    let newest_first = writes.iter().enumerate().rev();
    let entries: Vec<_> = newest_first.map(|(at, write)| entry_of(at as u64 + 1, *write)).collect();
    let snapshots: Vec<_> =
        snapshots.iter().map(|&sequence| SnapshotPoint { sequence, time: UnixTime(5) }).collect();
    let rule =
        RetentionRule { snapshots: &snapshots, now: UnixTime(10), forgotten: ForgottenTombstones::NONE };
    rule.retain_in_compaction(&entries, below).to_vec()
}

#[test]
fn the_rule_by_examples() {
    use Retention::{Drop, Keep, KeepAsTombstone};
    const NEVER: u64 = u64::MAX;
    const VALUE: Written = (true, 0, NEVER);
    const TOMBSTONE: Written = (false, 0, NEVER);
    /// Name; writes, oldest first; snapshots; may a lower level have the key; outcomes, newest first.
    type Example = (&'static str, &'static [Written], &'static [u64], bool, &'static [Retention]);
    let table: &[Example] = &[
        ("overwritten", &[VALUE, VALUE], &[], true, &[Keep, Drop]),
        ("seen by a snapshot", &[VALUE, VALUE, VALUE], &[1], true, &[Keep, Drop, Keep]),
        ("a snapshot before all", &[VALUE, VALUE], &[0], true, &[Keep, Drop]),
        ("two snapshots of one entry", &[VALUE, VALUE, VALUE], &[2, 2], true, &[Keep, Keep, Drop]),
        ("tombstone above a lower level", &[VALUE, TOMBSTONE], &[], true, &[Keep, Drop]),
        ("tombstone at the bottom", &[VALUE, TOMBSTONE], &[], false, &[Drop, Drop]),
        ("tombstone over a snapshot's value", &[VALUE, TOMBSTONE], &[1], false, &[Keep, Keep]),
        (
            "tombstones of snapshots alone",
            &[TOMBSTONE, VALUE, TOMBSTONE],
            &[1, 2],
            false,
            &[Keep, Keep, Drop],
        ),
        ("tombstone with a version", &[VALUE, (false, 7, NEVER)], &[], false, &[Keep, Drop]),
        ("replaced tombstone with a version", &[(false, 7, NEVER), VALUE], &[], false, &[Keep, Drop]),
        ("expired above a lower level", &[(true, 0, 10)], &[], true, &[KeepAsTombstone]),
        ("expired at the bottom", &[(true, 0, 10)], &[], false, &[Drop]),
        ("not expired", &[(true, 0, 11)], &[], false, &[Keep]),
        ("expired with a version", &[(true, 7, 10)], &[], false, &[KeepAsTombstone]),
        ("expired, but not for a snapshot", &[(true, 0, 10)], &[1], false, &[Keep]),
        ("expired, also for a snapshot", &[(true, 0, 5)], &[1], false, &[Drop]),
        ("nothing", &[], &[1], false, &[]),
    ];
    for (name, writes, snapshots, below, want) in table {
        assert_eq!(retain(writes, snapshots, *below), *want, "{name}");
    }
}

#[test]
fn forget_below_ends_the_tombstones_that_there_were() {
    let forgotten = ForgottenTombstones { below: Version::from_bits(5), sequence: 100, time: UnixTime(50) };
    // (sequence, write, has it no version?)
    for (sequence, write, want) in [
        (100, (false, 4, 0), true),
        (101, (false, 4, 0), false),
        (100, (false, 5, 0), false),
        (999, (false, 0, 0), true),
        (100, (true, 4, 50), true),
        (100, (true, 4, 51), false),
    ] {
        let entry = entry_of(sequence, write);
        assert_eq!(forgotten.has_no_version(&entry), want, "{entry:?}");
        // What had not expired at the time of the call stays a value, whose expiry tells so.
        let rule = RetentionRule { snapshots: &[], now: UnixTime(60), forgotten };
        let kept = if want { Retention::Drop } else { Retention::Keep };
        assert_eq!(rule.retain_in_compaction(&[entry], false)[..], [kept], "{entry:?}");
    }
}

#[test]
#[should_panic(expected = "the newest comes first")]
fn entries_out_of_order_are_a_bug() {
    let rule = RetentionRule { snapshots: &[], now: UnixTime(0), forgotten: ForgottenTombstones::NONE };
    rule.retain_in_flush(&[entry_of(1, (true, 0, 1)), entry_of(2, (true, 0, 1))]);
}
