//! The commit queue without a device: positions in the ring, claims, waiters.

use super::super::journal::batch_units;
use super::*;
use octokv_base::{Lba, Prng};
use std::ops::Range;

const RING_UNITS: u32 = 496;

fn queue_with(durability: Durability, record_units: u64) -> CommitQueue<Change> {
    let config = JournalConfig {
        ring_units: RING_UNITS,
        unit_bytes: 512,
        volume_id: 1,
        incarnation: 1,
        durability,
        record_units,
    };
    CommitQueue::new(JournalPosition { batch: 1, entry: 1, ..JournalPosition::default() }, config)
}

/// A change of 48 bytes with a number.
#[derive(Clone, Debug, PartialEq)]
struct Change(u64);

impl JournalEntry for Change {
    type Outcome = ();
    const FIXED_BYTES: Option<usize> = Some(48);
    const BATCH_ENTRIES_MAX: usize = 660;
    const BATCH_BYTES_MAX: usize = BATCH_HEADER_BYTES + 660 * 48;

    fn encoded_bytes(&self) -> usize {
        48
    }
    fn encode(&self, bytes: &mut [u8]) {
        bytes[..8].copy_from_slice(&self.0.to_le_bytes());
    }
    fn decode(bytes: &[u8]) -> Option<(Change, usize)> {
        Some((Change(u64::from_le_bytes(*bytes.first_chunk()?)), 48))
    }
    fn amended(self, (): ()) -> Change {
        self
    }
    fn cancelled(self) -> Change {
        Change(0)
    }
}

fn enqueue_written(commits: &CommitQueue<Change>, changes: u64) {
    (0..changes).for_each(|i| {
        commits.enqueue(Change(i + 1), None, ChangeState::Decided(()));
    });
}

#[test]
#[should_panic(expected = "3 runs of units are pending free in a record area of 2 units")]
fn more_pending_runs_than_units_is_a_bug() {
    queue_with(Durability::Completed, 2).defer_free(&[Extent { location: 1, units: 1 }; 3]);
}

#[test]
fn no_batch_overwrites_one_that_replay_needs_and_no_space_is_wasted() {
    let (commits, mut random) = (queue_with(Durability::PowerSafe, 1_000), Prng::new(1));
    let most = batch_units_max::<Change>(512);
    // The units of the batches that replay needs.
    let mut needed: Vec<Range<u32>> = Vec::new();
    let mut want = JournalPosition { batch: 1, entry: 1, ..JournalPosition::default() };
    let (mut tail, mut full) = (0, 0);
    let (mut reserved, mut reservations, mut held_back) = (0..0, 0, 0);
    for _ in 0..20_000 {
        let changes = random.below(Change::BATCH_ENTRIES_MAX as u64 + 1);
        enqueue_written(&commits, changes);
        let replay_from = commits.replay_from();
        assert_eq!(replay_from.units_used, want.units_used);
        let (buffers, at, header) = loop {
            match commits.claim_batch(None) {
                BatchClaim::Batch(buffers, at, header) => break (buffers, at, header),
                BatchClaim::AlreadyClaimed | BatchClaim::ReadOnly => {
                    unreachable!("no own change, no failure")
                }
                BatchClaim::JournalFull if commits.has_reservation() => {
                    commits.end_reservation();
                    (reserved, held_back) = (0..0, held_back + 1);
                }
                BatchClaim::JournalFull => {
                    full += 1;
                    let used = replay_from.units_used - tail;
                    assert!(!commits.has_room() && used + 2 * u64::from(most) > u64::from(RING_UNITS));
                    commits.release_before(replay_from);
                    tail = replay_from.units_used;
                    needed.clear();
                    assert!(commits.has_room(), "the ring is empty");
                }
            }
        };
        let units = at.unit..at.unit + batch_units(changes as usize * 48, 512);
        if want.unit + most > RING_UNITS {
            want.units_used += u64::from(RING_UNITS - want.unit);
            want.unit = 0;
        }
        assert_eq!((at, replay_from.unit), (want, want.unit));
        for other in &needed {
            assert!(units.end <= other.start || other.end <= units.start, "{units:?} overwrite {other:?}");
        }
        assert_eq!((header.batch, header.first_entry), (want.batch, want.entry));
        assert_eq!(buffers.entries.len() as u64, changes);
        want = JournalPosition {
            unit: units.end,
            batch: want.batch + 1,
            entry: want.entry + changes,
            units_used: want.units_used + units.len() as u64,
        };
        assert!(reserved.end <= units.start || units.end <= reserved.start, "{units:?} in {reserved:?}");
        needed.push(units);
        commits.complete_batch(header.flushed_through, true, buffers);
        if random.one_in(4) {
            commits.end_reservation();
            let start = random.below(u64::from(RING_UNITS)) as u32;
            reserved = start..(start + 1 + random.below(100) as u32).min(RING_UNITS);
            let overlaps = |other: &Range<u32>| reserved.start < other.end && other.start < reserved.end;
            let is_needed = needed.iter().any(overlaps);
            let is_reserved = commits.reserve_journal(reserved.clone());
            assert!(!(is_reserved && is_needed), "{reserved:?} is needed");
            assert_eq!(commits.has_reservation(), is_reserved);
            (reservations, reserved) = match is_reserved {
                true => (reservations + 1, reserved),
                false => (reservations, 0..0),
            };
        }
        if random.one_in(12) {
            tail = commits.replay_from().units_used;
            commits.release_before(commits.replay_from());
            needed.clear();
        }
    }
    assert!(full > 100, "the ring was full {full} times");
    assert!(
        reservations > 100 && held_back > 100,
        "{held_back} batches waited of {reservations} reservations"
    );
}

#[test]
fn a_batch_is_marked_unflushed_unless_its_writer_waited_for_the_flush_of_the_preceding_one() {
    for durability in [Durability::PowerSafe, Durability::Completed] {
        let commits = queue_with(durability, 1_000);
        let claim = || {
            enqueue_written(&commits, 1);
            match commits.claim_batch(None) {
                BatchClaim::Batch(buffers, _, header) => (buffers, header),
                _ => panic!("there is room"),
            }
        };
        let (first, header) = claim();
        let is_durable = durability == Durability::PowerSafe;
        assert_eq!((header.is_predecessor_unflushed, header.flushed_through), (!is_durable, 0));
        let (second, header) = claim();
        assert_eq!((header.is_predecessor_unflushed, header.flushed_through), (true, 0));
        commits.complete_batch(0, is_durable, first);
        commits.complete_batch(0, is_durable, second);
        let (_, header) = claim();
        let flushed_through = if is_durable { 2 } else { 0 };
        assert_eq!((header.is_predecessor_unflushed, header.flushed_through), (!is_durable, flushed_through));
    }
}

#[test]
fn a_durability_marker_is_written_once_after_a_change_and_never_beside_a_writer() {
    let commits = queue_with(Durability::PowerSafe, 1_000);
    let claim = || match commits.claim_batch(None) {
        BatchClaim::Batch(buffers, _, header) => (buffers, header.flushed_through),
        _ => panic!("there is room"),
    };
    assert!(!commits.try_lead_for_marker(), "nothing has changed");
    enqueue_written(&commits, 1);
    let context = Context::from_waker(Waker::noop());
    assert!(matches!(commits.poll_waiter(0, &context), Poll::Ready(WaiterAction::Lead)));
    let (buffers, marked) = claim();
    commits.complete_batch(marked, true, buffers);
    assert!(!commits.try_lead_for_marker(), "its writer leads still");
    commits.release_leadership();
    assert!(commits.is_idle());
    enqueue_written(&commits, 1);
    assert!(!commits.try_lead_for_marker() && !commits.is_idle(), "another change is queued");
    assert!(matches!(commits.poll_waiter(1, &context), Poll::Ready(WaiterAction::Lead)));
    let (buffers, marked) = claim();
    commits.complete_batch(marked, true, buffers);
    commits.release_leadership();
    assert!(commits.try_lead_for_marker());
    assert!(!commits.try_lead_for_marker() && !commits.is_idle(), "it is being written");
    let (buffers, marked) = claim();
    commits.complete_batch(marked, true, buffers);
    commits.release_leadership();
    assert!(!commits.try_lead_for_marker(), "it is written");
    assert!(commits.is_idle());
}

#[test]
fn a_batch_begins_beside_few_changes_or_with_half_as_many() {
    let commits = queue_with(Durability::PowerSafe, 1_000);
    let context = Context::from_waker(Waker::noop());
    let mut next_ticket = 0;
    // Adds a change, and gives the size of the batch that its writer leads.
    let mut put = || {
        enqueue_written(&commits, 1);
        next_ticket += 1;
        match commits.poll_waiter(next_ticket - 1, &context) {
            Poll::Ready(WaiterAction::Lead) => match commits.claim_batch(Some(next_ticket - 1)) {
                BatchClaim::Batch(buffers, ..) => Some(buffers),
                _ => panic!("there is room"),
            },
            _ => None,
        }
    };
    let sizes = |batches: &[Option<BatchBuffers<Change>>]| -> Vec<usize> {
        batches.iter().flatten().map(|buffers| buffers.entries.len()).collect()
    };
    let mut batches: Vec<_> = (0..20).map(|_| put()).collect();
    assert_eq!(sizes(&batches), [1, 1, 1], "beside one, beside two, and no more than three");
    for buffers in batches.drain(..).flatten().take(2) {
        commits.complete_batch(0, true, buffers);
        commits.release_leadership();
    }
    // One is in flight, and seventeen wait.
    let batches: Vec<_> = (0..40).map(|_| put()).collect();
    assert_eq!(sizes(&batches), [18, 10]);
}

#[test]
fn nothing_is_claimed_after_a_failed_write_and_no_record_kept() {
    let commits = queue_with(Durability::PowerSafe, 1_000);
    let pool = octokv_base::BufferPool::new(1 << 20);
    let put = || {
        let record = UnwrittenRecord { at: Lba(0), buffer: pool.take(512).unwrap() };
        commits.enqueue(Change(1), Some(record), ChangeState::Decided(()))
    };
    put();
    commits.fail();
    assert_eq!(pool.in_use_bytes(), 0, "of a writer that leads");
    let context = Context::from_waker(Waker::noop());
    assert!(matches!(commits.poll_waiter(put(), &context), Poll::Ready(WaiterAction::ReadOnly)));
    assert_eq!(pool.in_use_bytes(), 0, "of one that came later");
    assert!(matches!(commits.claim_batch(Some(0)), BatchClaim::ReadOnly));
    assert_eq!(commits.replay_from().batch, 1);
}

/// A change whose length is its number.
#[derive(Clone, Debug, PartialEq)]
struct Long(usize);

impl JournalEntry for Long {
    type Outcome = ();
    const FIXED_BYTES: Option<usize> = None;
    const BATCH_ENTRIES_MAX: usize = 100;
    const BATCH_BYTES_MAX: usize = BATCH_HEADER_BYTES + 10_000;

    fn encoded_bytes(&self) -> usize {
        self.0
    }
    fn encode(&self, bytes: &mut [u8]) {
        bytes.fill(1);
    }
    fn decode(bytes: &[u8]) -> Option<(Long, usize)> {
        Some((Long(bytes.len()), bytes.len()))
    }
    fn amended(self, (): ()) -> Long {
        self
    }
    fn cancelled(self) -> Long {
        self
    }
}

#[test]
fn a_batch_takes_the_changes_that_fit_it_in_their_order() {
    let config = JournalConfig {
        ring_units: RING_UNITS,
        unit_bytes: 512,
        volume_id: 1,
        incarnation: 1,
        durability: Durability::PowerSafe,
        record_units: 1_000,
    };
    let start = JournalPosition { batch: 1, entry: 1, ..JournalPosition::default() };
    let commits = CommitQueue::<Long>::new(start, config);
    for bytes in [4_000, 6_000, 10_000, 1, 9_999, 1] {
        commits.enqueue(Long(bytes), None, ChangeState::Decided(()));
    }
    let mut unit = 0;
    for want in [vec![4_000, 6_000], vec![10_000], vec![1, 9_999], vec![1]] {
        let BatchClaim::Batch(buffers, at, header) = commits.claim_batch(None) else { panic!("no batch") };
        let found: Vec<usize> = buffers.entries.iter().map(|entry| entry.0).collect();
        assert_eq!((found, at.unit), (want.clone(), unit), "batch {}", header.batch);
        unit += batch_units(want.iter().sum(), 512);
        commits.complete_batch(0, true, buffers);
    }
}

#[test]
fn space_that_is_deferred_after_the_flush_of_its_batch_is_given_back_by_the_next_flush() {
    let commits = queue_with(Durability::Completed, 100);
    enqueue_written(&commits, 1);
    let BatchClaim::Batch(buffers, at, header) = commits.claim_batch(None) else { panic!("no batch") };
    commits.complete_batch(header.flushed_through, false, buffers);
    // A flush passes before the writer, on another core, gives up the pieces of the value that it replaced.
    let (batch, freed) = commits.take_pending_free().expect("not durable");
    assert_eq!((batch, freed), (at.batch, Vec::new()));
    commits.note_flushed_through(batch);
    let pieces = [Extent { location: 7, units: 2 }];
    commits.defer_free(&pieces);
    assert_eq!(commits.take_pending_free(), Some((batch, pieces.to_vec())));
    assert_eq!(commits.take_pending_free(), None);
}
