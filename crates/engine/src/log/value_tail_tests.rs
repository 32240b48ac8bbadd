//! Tests of the value tail: a device of bytes, records of any length, torn and failed writes, dropped waiters and leaders.

use super::chunk_directory::{ChunkDirectory, DirectoryPlace, UncheckedDirectory, encode_directory};
use super::chunk_log::ChunkLog;
use super::chunk_pool::ChunkPool;
use super::log_layout::LogLayout;
use super::log_place::{ChunkIndex, ChunkNumber, LogKind};
use super::segment_buckets::ValueTailPlace;
use super::segment_entry::{EntryContents, SegmentEntry, ValuePlace};
use super::space_limits::{CHUNK_END_DIVISOR, ChunkPurpose, SpaceLimits};
use super::value_record::{NewValueRecord, ValueRecordPlace, check_value_record, record_granules};
use super::value_tail::{
    TAIL_WRITE_BYTES_MAX, TailRecord, TailSpace, TailTurn, TailWrites, ValueAppendError, ValueTail,
    ValueTailConfig, ValueTicket,
};
use crate::common::record::RecordMeta;
use octokv_base::{BufferPool, Prng};
use octokv_device::DeviceError;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::task::{Context, Poll, Waker};

const CHUNKS: u32 = 64;
const SECTOR_BYTES: usize = 512;
pub(super) const ERROR: DeviceError = DeviceError::Io(5);
const VOLUME: u64 = 7;
const PARTITION: u32 = 3;
const INCARNATION: u32 = 9;

/// A record that was appended.
#[derive(Clone)]
pub(super) struct ModelRecord {
    key: Vec<u8>,
    value: Vec<u8>,
    id: u32,
    place: ValuePlace,
    index: ChunkIndex,
}

pub(super) struct TestTail {
    layout: LogLayout,
    pool: ChunkPool,
    log: ChunkLog,
    pub tail: ValueTail,
    pub buffers: BufferPool,
    device: Vec<u8>,
    appended: u32,
    /// The ids of the records of each chunk, in order.
    ids: BTreeMap<u32, Vec<u32>>,
    written: Vec<ModelRecord>,
}

pub(super) fn layout(unit_bytes: u32, chunk_units: u32, granule_log2: u8) -> LogLayout {
    let chunks_start_unit = u64::from(16_384 / unit_bytes) + 4;
    LogLayout {
        unit_bytes,
        chunk_units,
        area_units: 1,
        chunks_start_unit,
        chunks: CHUNKS,
        stores: 1,
        granule_log2,
    }
}

fn config(layout: LogLayout, rewrites_tail: bool) -> ValueTailConfig {
    let (volume_id, partition, incarnation) = (VOLUME, PARTITION, INCARNATION);
    ValueTailConfig { volume_id, partition, incarnation, layout, rewrites_tail }
}

/// That a sector is written, of a write that ends.
fn every_sector() -> bool {
    true
}

impl TestTail {
    pub fn new(layout: LogLayout, rewrites_tail: bool) -> TestTail {
        assert!(layout.is_consistent());
        let limits = SpaceLimits::new(CHUNKS, 1, 1);
        let pool = ChunkPool::new(layout.chunks_start_unit, layout.chunk_sizes(), limits);
        let log = ChunkLog::create(PARTITION, LogKind::Values, &pool).unwrap();
        let tail = ValueTail::new(config(layout, rewrites_tail), log.tail());
        TestTail {
            layout,
            pool,
            log,
            tail,
            buffers: BufferPool::new(64 << 20),
            // What an earlier use left.
            device: vec![0xee; (layout.units() * u64::from(layout.unit_bytes)) as usize],
            appended: 0,
            ids: BTreeMap::new(),
            written: Vec::new(),
        }
    }

    pub fn append(&mut self, value_bytes: usize) -> Result<(ModelRecord, ValueTicket), ValueAppendError> {
        let number = self.appended + 1;
        let key = format!("key {number}").into_bytes();
        let mut value = vec![0; value_bytes];
        Prng::new(number.into()).fill(&mut value);
        let record = NewValueRecord { key: &key, meta: RecordMeta::PLAIN, value_bytes: value_bytes as u32 };
        let (pool, buffers) = (&self.pool, &self.buffers);
        let space = TailSpace { log: &mut self.log, pool, purpose: ChunkPurpose::User, buffers };
        let id = number ^ 0x55;
        let TailRecord { place, ticket } = self.tail.append(&record, value.chunks(1000), id, space)?;
        self.appended = number;
        let chunks: Vec<ChunkIndex> =
            self.extents_of(&key, &value, &place).iter().map(|&(chunk, ..)| self.index_of(chunk)).collect();
        chunks.iter().for_each(|index| self.ids.entry(index.0).or_default().push(id));
        Ok((ModelRecord { key, value, id, place, index: chunks[0] }, ticket))
    }

    fn index_of(&self, chunk: ChunkNumber) -> ChunkIndex {
        let unit = self.layout.unit_of(chunk, 0);
        self.pool.owner_of(unit).expect("it is in a log").0.index
    }

    fn granules(&self, key: &[u8], value: &[u8]) -> u32 {
        record_granules(key.len(), value.len() as u32, &RecordMeta::PLAIN, self.layout.granule_log2)
    }

    /// Chunk, granule and granules of each extent.
    fn extents_of(&self, key: &[u8], value: &[u8], place: &ValuePlace) -> Vec<(ChunkNumber, u32, u32)> {
        let granules = self.granules(key, value);
        match place {
            ValuePlace::Nowhere => panic!("a record has a place"),
            ValuePlace::Record(at) => {
                let (chunk, granule) = self.layout.place_of_granule(*at).unwrap();
                vec![(chunk, granule, granules)]
            }
            ValuePlace::Extents(extents) => {
                let total: u32 = extents.extents.iter().map(|extent| extent.granules).sum();
                assert_eq!(total, granules);
                let starts = std::iter::once(extents.first_granule).chain(std::iter::repeat(0));
                extents
                    .extents
                    .iter()
                    .zip(starts)
                    .map(|(extent, at)| (extent.chunk, at, extent.granules))
                    .collect()
            }
        }
    }

    pub fn poll(&mut self, ticket: &ValueTicket) -> Poll<TailTurn> {
        self.tail.poll_turn(ticket, &Context::from_waker(Waker::noop()))
    }

    /// Writes every sector.
    fn apply(&mut self, writes: &TailWrites) {
        self.apply_sectors(writes, every_sector);
    }

    /// Writes the sectors for which `is_written` says so, as an interrupted write may.
    fn apply_sectors(&mut self, writes: &TailWrites, mut is_written: impl FnMut() -> bool) {
        for write in writes {
            let start = (write.unit * u64::from(self.layout.unit_bytes)) as usize;
            assert_eq!(write.bytes.len() % self.layout.unit_bytes as usize, 0);
            assert!(write.bytes.len() <= TAIL_WRITE_BYTES_MAX && !write.bytes.is_empty());
            let end_unit = write.unit + (write.bytes.len() / self.layout.unit_bytes as usize) as u64;
            for unit in write.unit..end_unit {
                let owner = self.pool.owner_of(unit).expect("a unit of the log").0;
                assert_eq!((owner.partition, owner.kind), (PARTITION, LogKind::Values));
            }
            for (sector, bytes) in write.bytes.chunks(SECTOR_BYTES).enumerate() {
                if is_written() {
                    let at = start + sector * SECTOR_BYTES;
                    self.device[at..at + bytes.len()].copy_from_slice(bytes);
                }
            }
        }
    }

    fn check_record(&self, record: &ModelRecord) {
        let mut bytes = Vec::new();
        let granule_log2 = self.layout.granule_log2;
        let extents = self.extents_of(&record.key, &record.value, &record.place);
        for &(chunk, granule, granules) in &extents {
            let start = (self.layout.granule_of(chunk, granule) << granule_log2) as usize;
            bytes.extend_from_slice(&self.device[start..start + ((granules as usize) << granule_log2)]);
        }
        let (index, granule) = (record.index, extents[0].1);
        let place = ValueRecordPlace { volume_id: VOLUME, partition: PARTITION, index, granule };
        let at = record.place.clone();
        let contents = EntryContents::Value { bytes: record.value.len() as u32, at };
        let entry = SegmentEntry { key: &record.key, meta: RecordMeta::PLAIN, contents };
        let at = check_value_record(&bytes, &entry, place);
        let at = at.unwrap_or_else(|error| panic!("{error:?}: record {} at {:?}", record.id, record.place));
        assert_eq!(bytes[at], record.value);
    }

    /// All acknowledged records are intact, and in front of the completed place.
    pub fn check(&self) {
        let completed = self.tail.completed();
        assert!((completed.index, completed.granule) <= (self.tail.end().index, self.tail.end().granule));
        for record in &self.written {
            self.check_record(record);
            let extents = self.extents_of(&record.key, &record.value, &record.place);
            let &(chunk, granule, granules) = extents.last().unwrap();
            let end = (self.index_of(chunk), granule + granules);
            assert!(end <= (completed.index, completed.granule), "{end:?} behind {completed:?}");
        }
    }

    /// Appends a record and writes all that is due.
    pub fn put(&mut self, value_bytes: usize) -> Result<ModelRecord, ValueAppendError> {
        let (record, ticket) = self.append(value_bytes)?;
        self.complete(&ticket);
        self.written.push(record.clone());
        Ok(record)
    }

    /// Leads until a record is written; gives the number of turns.
    fn complete(&mut self, ticket: &ValueTicket) -> usize {
        for turns in 0.. {
            match self.poll(ticket) {
                Poll::Ready(TailTurn::Lead(writes)) => {
                    self.apply(&writes);
                    self.tail.finished(Ok(())).wake();
                }
                Poll::Ready(TailTurn::Written) => return turns,
                other => panic!("{other:?}"),
            }
        }
        unreachable!()
    }

    fn directory_place(&self, index: ChunkIndex) -> DirectoryPlace {
        let (chunk_bytes, granule_log2) = (self.layout.chunk_bytes(), self.layout.granule_log2);
        DirectoryPlace { volume_id: VOLUME, partition: PARTITION, index, chunk_bytes, granule_log2 }
    }

    fn chunk_bytes_of(&self, chunk: ChunkNumber) -> &[u8] {
        let start = (self.layout.granule_of(chunk, 0) << self.layout.granule_log2) as usize;
        &self.device[start..start + self.layout.chunk_bytes() as usize]
    }

    fn directory_of(&self, index: ChunkIndex, chunk: ChunkNumber) -> Option<ChunkDirectory> {
        let (bytes, place) = (self.chunk_bytes_of(chunk), self.directory_place(index));
        UncheckedDirectory { bytes, place }.check().ok()
    }

    /// Frees all chunks but the tail. REQUIRES: nothing is pending.
    fn free_all(&mut self) {
        let tail = self.log.tail().index;
        self.log.advance_head(tail, &self.pool).into_iter().for_each(|(_, chunk)| self.pool.release(chunk));
        self.written.retain(|record| record.index == tail);
        self.ids.retain(|&index, _| index >= tail.0);
    }
}

fn layouts() -> impl Strategy<Value = LogLayout> {
    let units = prop_oneof![Just(512u32), Just(4096)];
    (units, prop_oneof![Just(16u32), Just(64)], 3u8..=5)
        .prop_map(|(unit, chunk_units, granule_log2)| layout(unit, chunk_units, granule_log2))
}

/// Mostly short records, some that end a chunk, some of several chunks.
fn lengths() -> impl Strategy<Value = (u32, u32)> {
    prop_oneof![
        8 => (Just(0u32), 1..300u32),
        4 => (Just(0u32), 300..6000u32),
        2 => (Just(1u32), 0..4000u32),
        1 => (Just(2u32), 0..4000u32),
    ]
}

#[derive(Clone, Debug)]
enum Event {
    Append(u32, u32),
    /// The first record that is not written is polled.
    Poll,
    /// A later one is.
    PollOther(u8),
    Forget(u8),
    /// The write in flight ends, having reached the device in part at first.
    Finish(u64),
    /// It fails.
    Fail(u64),
    DropLeader(u64),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        6 => lengths().prop_map(|(chunks, bytes)| Event::Append(chunks, bytes)),
        3 => Just(Event::Poll),
        2 => any::<u8>().prop_map(Event::PollOther),
        1 => any::<u8>().prop_map(Event::Forget),
        5 => any::<u64>().prop_map(Event::Finish),
        1 => any::<u64>().prop_map(Event::Fail),
        1 => any::<u64>().prop_map(Event::DropLeader),
    ];
    proptest::collection::vec(event, 1..120)
}

/// How the records of a run ended.
#[derive(Default)]
struct RunState {
    waiting: Vec<(ModelRecord, ValueTicket)>,
    /// The writes in flight, and whether a waiter that was not forgotten leads them.
    flight: Option<TailWrites>,
}

impl RunState {
    fn poll(&mut self, test: &mut TestTail, index: usize) {
        let Some((record, ticket)) = self.waiting.get(index) else { return };
        match test.poll(ticket) {
            Poll::Ready(TailTurn::Lead(writes)) => {
                assert!(self.flight.replace(writes).is_none(), "two writes in flight");
            }
            Poll::Ready(TailTurn::Written) => {
                test.written.push(record.clone());
                drop(self.waiting.remove(index));
            }
            Poll::Ready(TailTurn::Failed(error)) => {
                assert_eq!(error, ERROR);
                drop(self.waiting.remove(index));
            }
            Poll::Ready(TailTurn::Interrupted) => {
                drop(self.waiting.remove(index));
            }
            Poll::Pending => assert!(self.flight.is_some(), "nothing is in flight, and no waiter leads"),
        }
    }

    /// Ends the write in flight after a part of its sectors was written.
    fn end(&mut self, test: &mut TestTail, seed: u64, result: Option<Result<(), DeviceError>>) {
        let Some(writes) = self.flight.take() else { return };
        let mut random = Prng::new(seed);
        let part = random.below(4);
        test.apply_sectors(&writes, || random.below(4) < part);
        test.check();
        match result {
            Some(Ok(())) => {
                test.apply(&writes);
                test.tail.finished(Ok(())).wake();
            }
            Some(error) => test.tail.finished(error).wake(),
            None => test.tail.lead_dropped().wake(),
        }
        test.check();
    }

    /// Writes all that is due.
    fn drain(&mut self, test: &mut TestTail) {
        while !self.waiting.is_empty() {
            self.poll(test, 0);
            self.end(test, 0, Some(Ok(())));
        }
        self.end(test, 0, Some(Ok(())));
    }
}

fn run(layout: LogLayout, rewrites_tail: bool, events: &[Event]) -> TestTail {
    let mut test = TestTail::new(layout, rewrites_tail);
    let mut state = RunState::default();
    for event in events {
        match *event {
            Event::Append(chunks, bytes) => {
                let value_bytes = chunks * layout.chunk_bytes() + bytes.max(1);
                let before = (test.tail.end(), test.pool.free(), test.log.tail());
                match test.append(value_bytes as usize) {
                    Ok(appended) => state.waiting.push(appended),
                    Err(error) => {
                        assert_eq!(error, ValueAppendError::NoChunks);
                        assert_eq!((test.tail.end(), test.pool.free(), test.log.tail()), before);
                        state.drain(&mut test);
                        test.free_all();
                    }
                }
            }
            Event::Poll => state.poll(&mut test, 0),
            Event::PollOther(which) => state.poll(&mut test, which as usize % state.waiting.len().max(1)),
            Event::Forget(which) if state.waiting.len() > 1 => {
                let (_, ticket) = state.waiting.remove(which as usize % state.waiting.len());
                test.tail.forget(ticket).wake();
            }
            Event::Forget(_) => {}
            Event::Finish(seed) => state.end(&mut test, seed, Some(Ok(()))),
            Event::Fail(seed) => state.end(&mut test, seed, Some(Err(ERROR))),
            Event::DropLeader(seed) => state.end(&mut test, seed, None),
        }
        let is_awaited = state.flight.is_some() || !state.waiting.is_empty();
        assert!(is_awaited || test.buffers.in_use_bytes() == 0, "{} are kept", test.buffers.in_use_bytes());
    }
    state.drain(&mut test);
    test.check();
    test
}

proptest! {
    #[test]
    fn acknowledged_records_stay_intact(layout in layouts(), rewrites: bool, events in events()) {
        let test = run(layout, rewrites, &events);
        // A directory that is there has the ids of all records of its chunk.
        for (index, chunk) in test.log.sealed() {
            if let (Some(directory), Some(ids)) = (test.directory_of(index, chunk), test.ids.get(&index.0)) {
                prop_assert_eq!(&directory.ids, ids, "{:?}", index);
            }
        }
    }

    #[test]
    fn without_failures_each_sealed_chunk_has_its_directory_and_little_waste(
        layout in layouts(),
        rewrites: bool,
        events in events(),
    ) {
        let ends_well = |event: &Event| !matches!(event, Event::Fail(_) | Event::DropLeader(_));
        let events: Vec<Event> = events.into_iter().filter(ends_well).collect();
        let mut test = run(layout, rewrites, &events);
        // Without a waiter, records and the directory behind them are due until the next write.
        while let Err(ValueAppendError::NoChunks) = test.put(1) {
            test.free_all();
        }
        test.check();
        for (index, chunk) in test.log.sealed() {
            let directory = test.directory_of(index, chunk);
            prop_assert!(directory.is_some(), "{:?}", index);
            let directory = directory.unwrap();
            prop_assert_eq!(&directory.ids, &test.ids.remove(&index.0).unwrap_or_default());
            prop_assert_eq!(directory.incarnation, INCARNATION);
            let room = test.directory_place(index).free_granules(directory.data_granules, directory.ids.len());
            let padding = if rewrites { 0 } else { layout.unit_granules() };
            prop_assert!(room < layout.chunk_granules() / CHUNK_END_DIVISOR + padding, "{} are left", room);
        }
    }
}

#[test]
fn a_lone_writer_needs_one_write() {
    let mut test = TestTail::new(layout(512, 128, 3), true);
    let units: Vec<_> = (0..5)
        .map(|_| {
            let (record, ticket) = test.append(256).unwrap();
            let Poll::Ready(TailTurn::Lead(writes)) = test.poll(&ticket) else { panic!("it leads") };
            assert_eq!(writes.len(), 1);
            assert!(!test.tail.is_idle());
            test.apply(&writes);
            assert!(test.tail.finished(Ok(())).is_empty());
            assert!(matches!(test.poll(&ticket), Poll::Ready(TailTurn::Written)));
            assert_eq!(test.tail.completed(), test.tail.end());
            test.written.push(record);
            (writes[0].unit - test.layout.unit_of(test.log.tail().chunk, 0), writes[0].bytes.len())
        })
        .collect();
    // Records of 280 bytes: each begins where the last one ended.
    assert_eq!(units, [(0, 512), (0, 1024), (1, 512), (1, 1024), (2, 512)]);
    assert_eq!(test.tail.end(), ValueTailPlace { index: ChunkIndex(0), granule: 5 * 35 });
    test.check();
}

#[test]
fn without_rewriting_each_write_begins_a_unit() {
    let mut test = TestTail::new(layout(512, 128, 3), false);
    for put in 0..5 {
        assert_eq!(test.tail.end().granule, put * 64);
        test.put(256).unwrap();
    }
    test.check();
}

#[test]
fn records_that_come_while_a_write_is_in_flight_leave_together() {
    let mut test = TestTail::new(layout(512, 128, 3), true);
    let (_, first) = test.append(100).unwrap();
    let Poll::Ready(TailTurn::Lead(writes)) = test.poll(&first) else { panic!("the first leads") };
    let (_, second) = test.append(100).unwrap();
    let (_, third) = test.append(2000).unwrap();
    assert!(test.poll(&second).is_pending() && test.poll(&third).is_pending());
    test.apply(&writes);
    assert!(!test.tail.finished(Ok(())).is_empty(), "the next leader is woken");
    // The leader is dropped before it leads: the next one is woken.
    assert!(!test.tail.forget(second).is_empty());
    assert_eq!(test.complete(&third), 1);
    assert!(matches!(test.poll(&first), Poll::Ready(TailTurn::Written)));
}

#[test]
fn a_failed_write_fails_its_records_and_those_of_its_last_unit() {
    let mut test = TestTail::new(layout(512, 128, 3), true);
    test.put(100).unwrap();
    let (_, failed) = test.append(100).unwrap();
    let Poll::Ready(TailTurn::Lead(writes)) = test.poll(&failed) else { panic!("it leads") };
    let (_, shares) = test.append(800).unwrap();
    let (last, intact) = test.append(100).unwrap();
    assert!(test.poll(&shares).is_pending() && test.poll(&intact).is_pending());
    drop(writes);
    test.tail.finished(Err(ERROR)).wake();
    assert_eq!(test.tail.completed(), ValueTailPlace { index: ChunkIndex(0), granule: 64 });
    for ticket in [&failed, &shares] {
        assert!(matches!(test.poll(ticket), Poll::Ready(TailTurn::Failed(ERROR))));
    }
    assert_eq!(test.complete(&intact), 1);
    test.written.push(last);
    test.check();
    let end = test.tail.end().granule;
    // Nothing follows: the rest of the unit is left.
    let (_, failed) = test.append(10).unwrap();
    assert!(matches!(test.poll(&failed), Poll::Ready(TailTurn::Lead(_))));
    test.tail.lead_dropped().wake();
    assert!(matches!(test.poll(&failed), Poll::Ready(TailTurn::Interrupted)));
    assert_eq!(test.tail.end().granule, end.next_multiple_of(64));
    assert_eq!(test.tail.completed(), test.tail.end());
    test.put(100).unwrap();
    test.check();
}

#[test]
fn a_record_that_does_not_fit_goes_on_in_the_next_chunk_unless_little_is_left() {
    let mut test = TestTail::new(layout(512, 128, 3), true);
    // 65,536 bytes, of which 32 and 4 an id are the directory's. A key of 5 bytes, a head of 21.
    let in_chunk = |granules: usize| granules * 8 - 21;
    test.put(in_chunk(6000)).unwrap();
    // Room: (65,536 - 32 - 2 * 4) / 8 = 8,187, so 2,187 are left.
    let record = test.put(in_chunk(3000)).unwrap();
    let ValuePlace::Extents(extents) = &record.place else { panic!("{:?}", record.place) };
    let granules: Vec<u32> = extents.extents.iter().map(|extent| extent.granules).collect();
    assert_eq!((extents.first_granule, granules), (6000, vec![2187, 813]));
    // Of 8,187 granules 256, a 32nd of the chunk, are left: enough.
    test.put(in_chunk(8187 - 1 - 813 - 256)).unwrap();
    let record = test.put(in_chunk(257)).unwrap();
    assert!(
        matches!(&record.place, ValuePlace::Extents(extents) if extents.extents[0].granules == 256),
        "{:?}",
        record.place
    );
    // One less is too little.
    let left = 8187 - 1 - test.tail.end().granule as usize;
    test.put(in_chunk(left - 255)).unwrap();
    let record = test.put(in_chunk(256)).unwrap();
    let (chunk, granule, _) = test.extents_of(&record.key, &record.value, &record.place)[0];
    assert_eq!((test.index_of(chunk), granule), (ChunkIndex(3), 0));
    test.check();
    for (index, chunk) in test.log.sealed() {
        assert_eq!(
            test.directory_of(index, chunk).map(|directory| directory.ids),
            test.ids.get(&index.0).cloned()
        );
    }
}

#[test]
fn a_long_record_leaves_in_writes_of_a_mebibyte() {
    let mut test = TestTail::new(layout(4096, 256, 4), true);
    let (record, ticket) = test.append(5 << 20).unwrap();
    let turns = test.complete(&ticket);
    assert!((5..=8).contains(&turns), "{turns} turns");
    test.written.push(record);
    test.check();
}

#[test]
fn an_append_without_memory_changes_nothing() {
    let mut test = TestTail::new(layout(512, 128, 3), true);
    test.put(100).unwrap();
    let enough = std::mem::replace(&mut test.buffers, BufferPool::new(8192));
    let before = (test.tail.end(), test.pool.free(), test.log.tail());
    assert_eq!(test.append(70_000).err(), Some(ValueAppendError::NoMemory));
    assert_eq!((test.tail.end(), test.pool.free(), test.log.tail()), before);
    test.put(200).unwrap();
    test.buffers = enough;
    test.put(70_000).unwrap();
    test.check();
}

#[test]
fn a_recovered_chunk_gets_no_directory_and_loses_that_of_an_earlier_opening() {
    let mut test = TestTail::new(layout(512, 128, 3), true);
    let chunk = test.log.tail().chunk;
    let old = ChunkDirectory { ids: vec![1, 2], data_granules: 100, incarnation: INCARNATION - 1 };
    let place = test.directory_place(ChunkIndex(0));
    let start = (test.layout.granule_of(chunk, 0) << 3) as usize;
    encode_directory(&mut test.device[start..start + (64 << 10)], &old, place);
    assert_eq!(test.directory_of(ChunkIndex(0), chunk), Some(old));
    // Recovery found the tail behind three units.
    test.log.append(3, &test.pool, ChunkPurpose::User).unwrap();
    test.tail = ValueTail::new(config(test.layout, true), test.log.tail());
    assert_eq!(test.tail.end(), ValueTailPlace { index: ChunkIndex(0), granule: 192 });
    while test.log.tail().index < ChunkIndex(3) {
        test.put(1500).unwrap();
    }
    test.check();
    assert_eq!(test.directory_of(ChunkIndex(0), chunk), None);
    let in_first = |record: &&ModelRecord| record.index == ChunkIndex(0);
    let last = test.written.iter().rfind(in_first).expect("records go on in the recovered chunk");
    let (_, granule, granules) = test.extents_of(&last.key, &last.value, &last.place)[0];
    let data_end = ((granule + granules) as usize) << 3;
    let behind = &test.chunk_bytes_of(chunk)[data_end..];
    assert!(data_end > 62 << 10 && !behind.is_empty(), "{data_end}");
    assert!(behind.iter().all(|&byte| byte == 0), "the end of the chunk is cleared");
    for (index, chunk) in test.log.sealed().skip(1) {
        assert_eq!(
            test.directory_of(index, chunk).map(|directory| directory.ids),
            test.ids.get(&index.0).cloned()
        );
    }
}
