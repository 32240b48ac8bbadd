//! Checks of tests of recovery: what a recovery has found, against the model of [`super::test_log_writer`].

use super::chunk_pool::{ChunkOwner, ChunkState};
use super::hash_prefix::SegmentNumber;
use super::log_place::{ChunkIndex, ChunkNumber, LogKind};
use super::recovery::{RecoveredStore, RecoveredVolume, recover_volume};
use super::sealed_sums::LiveContents;
use super::segment_ref::SegmentRef;
use super::segment_table::LogSegmentTable;
use super::test_log_writer::TestLogVolume;
use super::test_store_model::StoreModel;
use crate::open_error::OpenError;
use octokv_runtime::block_on;

/// Checks that a table has the segments of a model.
pub(super) fn check_table(table: &LogSegmentTable, model: &StoreModel, what: &str) {
    assert_eq!(table.level(), model.level, "{what}");
    for segment in 0..model.level.segments() as u32 {
        let image = model.segments.get(&segment).map_or(SegmentRef::EMPTY, |of| of.0);
        assert_eq!(table.get(SegmentNumber(segment)), image, "{what}, segment {segment}");
    }
}

/// Recovers from the disk as it is.
pub(super) fn recover(volume: &TestLogVolume) -> Result<RecoveredVolume, OpenError> {
    block_on(recover_volume(&volume.device()), || {})
}

/// Compares a store with the model behind its expected last image, and gives the number of that.
pub(super) fn check_store(volume: &TestLogVolume, recovered: &RecoveredStore, at: usize) -> u64 {
    let (end, durable) = volume.expected_end(at);
    let mut expected = volume.stores[at].clone();
    let first = expected.start.replay.sequence;
    expected.go_back(end, &volume.layout);
    let model = expected.model;
    assert_eq!(recovered.last_sequence, end, "store {at}");
    assert_eq!((recovered.durable_through, recovered.images), (durable, end + 1 - first), "store {at}");
    assert_eq!((recovered.damaged, recovered.is_lost), (0, false));
    assert_eq!((recovered.previous, recovered.totals), (model.previous, model.totals));
    check_table(&recovered.table, &model, &format!("store {at}"));
    let log_of =
        |chunks: &[ChunkNumber], head: u32, tail: u32| chunks[head as usize..=tail as usize].to_vec();
    let keys = &recovered.keys;
    assert_eq!((keys.head(), keys.tail().index), (ChunkIndex(model.key_head), ChunkIndex(model.key_tail.0)));
    assert_eq!(keys.tail().unit, model.key_tail.1);
    assert_eq!(keys.chunks().collect::<Vec<_>>(), log_of(&model.keys, model.key_head, model.key_tail.0));
    let values = &recovered.values;
    assert_eq!((values.head(), values.tail().index), (ChunkIndex(model.value_head), model.value_tail.index));
    assert_eq!(recovered.value_tail, model.value_tail);
    assert_eq!(values.tail().unit * volume.layout.unit_granules(), model.value_tail.granule);
    let value_chunks = log_of(&model.values, model.value_head, model.value_tail.index.0);
    assert_eq!(values.chunks().collect::<Vec<_>>(), value_chunks);
    let next_of = |chunks: &[ChunkNumber], tail: u32| chunks.get(tail as usize + 1).copied();
    for (next, found) in [
        (next_of(&model.keys, model.key_tail.0), keys.next_reserved()),
        (next_of(&model.values, model.value_tail.index.0), values.next_reserved()),
    ] {
        assert!(next.is_none_or(|next| next == found), "store {at}: {next:?} and {found:?}");
    }
    end
}

/// Checks that the pool has exactly the chunks of the stores, in their states, with their live images.
pub(super) fn check_pool(volume: &RecoveredVolume) {
    let mut in_use = 0;
    for store in &volume.stores {
        for (kind, log) in [(LogKind::Keys, &store.keys), (LogKind::Values, &store.values)] {
            let tail = log.tail().chunk;
            for (chunk, index) in log.chunks().zip(log.head().0..) {
                let state = if chunk == tail { ChunkState::Open } else { ChunkState::Sealed };
                assert_eq!(volume.pool.state_of(chunk), state);
                let owner = ChunkOwner { partition: store.partition, kind, index: ChunkIndex(index) };
                let unit = volume.pool.first_unit_of(chunk);
                assert_eq!(volume.pool.owner_of(unit), Some((owner, 0)));
                if kind == LogKind::Keys {
                    let of_chunk = |unit| volume.pool.chunk_of(unit).is_some_and(|(of, _)| of == chunk);
                    let images = store.table.images().filter(|(_, image)| of_chunk(image.unit()));
                    let live = images.fold(LiveContents::default(), |live, (_, image)| LiveContents {
                        records: live.records + 1,
                        amount: live.amount + u32::from(image.chain()),
                    });
                    assert_eq!(volume.pool.live_of(chunk), Some(live));
                }
                in_use += 1;
            }
            assert_eq!(volume.pool.state_of(log.next_reserved()), ChunkState::Reserved);
            in_use += 1;
        }
        for retired in &store.retired {
            assert_eq!(volume.pool.state_of(retired.chunk), ChunkState::Retired);
            assert!(retired.index < store.keys.head());
        }
        in_use += store.retired.len() + store.pinned.len();
    }
    assert_eq!(volume.pool.free() as usize + in_use, volume.pool.chunks() as usize);
}
