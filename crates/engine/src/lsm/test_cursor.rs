//! For the tests of this folder: histories of writes, spread over sources, and cursors over them that meet damage and failures.

use super::cursor::EntryCursor;
use super::entry::{EntryValue, Position, TreeEntry};
use crate::{EngineError, VolumePlace};
use octokv_base::{UnixTime, Version};
use octokv_device::DeviceError;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use std::cell::Cell;
use std::rc::Rc;

/// So many cases, the same in each run.
pub fn seeded(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        rng_seed: RngSeed::Fixed(16),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

/// An entry that owns its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TestEntry {
    pub key: Vec<u8>,
    pub sequence: u64,
    pub version: Version,
    pub expires_at: UnixTime,
    /// `None` for a tombstone.
    pub value: Option<Vec<u8>>,
}

impl TestEntry {
    pub fn get(&self) -> TreeEntry<'_> {
        TreeEntry {
            key: &self.key,
            sequence: self.sequence,
            version: self.version,
            expires_at: self.expires_at,
            value: self.value.as_deref().map_or(EntryValue::Tombstone, EntryValue::Inline),
        }
    }

    /// Whether it is a value at a time.
    pub fn exists_at(&self, time: UnixTime) -> bool {
        self.value.is_some() && time < self.expires_at
    }
}

/// Keys of up to 300 bytes: with long common beginnings, with zeros at the end, and the empty one.
pub fn test_key(number: u8) -> Vec<u8> {
    match number % 4 {
        0 => vec![0; usize::from(number / 4)],
        1 => [&[b'x'; 7 + 290][..], &[number]].concat(),
        2 => format!("prefix{number:03}").into_bytes(),
        _ => vec![number],
    }
}

/// Writes in the order of their sequence numbers, with gaps. Times are below 100.
pub fn histories(keys: u8, writes: usize) -> impl Strategy<Value = Vec<TestEntry>> {
    let write = (0..keys, 1..3u64, 0..3u64, prop_oneof![Just(u64::MAX), 0..100u64], 0..40usize);
    proptest::collection::vec(write, 0..=writes).prop_map(|writes| {
        let mut sequence = 0;
        let entry_of = |(key, gap, version, expires_at, value_bytes)| {
            sequence += gap;
            // A quarter are tombstones.
            let value = (value_bytes >= 10).then(|| vec![sequence as u8; value_bytes]);
            let expires_at = if value.is_some() { UnixTime(expires_at) } else { UnixTime::NEVER };
            let version = Version::from_bits(version);
            TestEntry { key: test_key(key), sequence, version, expires_at, value }
        };
        writes.into_iter().map(entry_of).collect()
    })
}

/// Spreads a history over `sources`, the newest first: of one key, each has older entries than those before it. `draws` selects
/// the sources.
pub fn spread(history: &[TestEntry], sources: usize, draws: &[usize]) -> Vec<Rc<[TestEntry]>> {
    let mut spread = vec![Vec::new(); sources];
    let sorted = in_order(history);
    for entries in sorted.chunk_by(|one, other| one.key == other.key) {
        let draw = |at: usize| draws[(at + entries[0].sequence as usize) % draws.len()] % sources;
        let mut chosen: Vec<usize> = (0..entries.len()).map(draw).collect();
        chosen.sort_unstable();
        for (entry, source) in entries.iter().zip(chosen) {
            spread[source].push(entry.clone());
        }
    }
    for source in &mut spread {
        source.sort_by(|one, other| one.get().position().cmp(&other.get().position()));
    }
    spread.into_iter().map(Rc::from).collect()
}

/// The entries in the order of their positions.
pub fn in_order(history: &[TestEntry]) -> Vec<TestEntry> {
    let mut sorted = history.to_vec();
    sorted.sort_by(|one, other| one.get().position().cmp(&other.get().position()));
    sorted
}

/// A cursor over entries in blocks, some of which cannot be read.
pub struct TestCursor {
    entries: Rc<[TestEntry]>,
    block_entries: usize,
    damaged_blocks: Vec<usize>,
    /// The first block number of its errors.
    lba: u64,
    place: TestPlace,
    /// Operations until one fails with [`TestCursor::failure`].
    pub operations_left: Rc<Cell<u64>>,
    /// Whether operations are pending once.
    pub is_slow: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum TestPlace {
    NoEntry,
    At(usize),
    /// At a damaged block, met forward or not.
    Damaged(usize, bool),
}

impl TestCursor {
    pub fn failure() -> EngineError {
        DeviceError::Io(5).into()
    }

    /// The entries are in order; `lba` distinguishes the errors of sources.
    pub fn new(
        entries: Rc<[TestEntry]>,
        block_entries: usize,
        damaged_blocks: Vec<usize>,
        lba: u64,
    ) -> TestCursor {
        let place = TestPlace::NoEntry;
        let operations_left = Rc::new(Cell::new(u64::MAX));
        TestCursor { entries, block_entries, damaged_blocks, lba, place, operations_left, is_slow: false }
    }

    /// Whether the entry at an index can be read.
    pub fn can_read(&self, index: usize) -> bool {
        !self.damaged_blocks.contains(&(index / self.block_entries))
    }

    async fn arrive(&mut self, index: Option<usize>, is_forward: bool) -> Result<(), EngineError> {
        self.place = TestPlace::NoEntry;
        if self.is_slow {
            octokv_runtime::yield_now().await;
        }
        self.operations_left.set(self.operations_left.get() - 1);
        if self.operations_left.get() == 0 {
            return Err(Self::failure());
        }
        let Some(index) = index.filter(|&index| index < self.entries.len()) else { return Ok(()) };
        if self.can_read(index) {
            self.place = TestPlace::At(index);
            return Ok(());
        }
        let block = index / self.block_entries;
        self.place = TestPlace::Damaged(block, is_forward);
        Err(EngineError::Corrupt { lba: self.lba + block as u64, place: VolumePlace::default() })
    }

    fn lower_bound(&self, position: Position<'_>) -> usize {
        self.entries.partition_point(|entry| entry.get().position() < position)
    }
}

impl EntryCursor for TestCursor {
    fn entry(&self) -> Option<TreeEntry<'_>> {
        match self.place {
            TestPlace::At(index) => Some(self.entries[index].get()),
            TestPlace::NoEntry | TestPlace::Damaged(..) => None,
        }
    }

    async fn seek(&mut self, position: Position<'_>) -> Result<(), EngineError> {
        self.arrive(Some(self.lower_bound(position)), true).await
    }

    async fn seek_before(&mut self, position: Option<Position<'_>>) -> Result<(), EngineError> {
        let end = position.map_or(self.entries.len(), |position| self.lower_bound(position));
        self.arrive(end.checked_sub(1), false).await
    }

    async fn next(&mut self) -> Result<(), EngineError> {
        let index = match self.place {
            TestPlace::At(index) => index + 1,
            TestPlace::Damaged(block, true) => (block + 1) * self.block_entries,
            TestPlace::Damaged(_, false) | TestPlace::NoEntry => panic!("next is not allowed here"),
        };
        self.arrive(Some(index), true).await
    }

    async fn prev(&mut self) -> Result<(), EngineError> {
        let end = match self.place {
            TestPlace::At(index) => index,
            TestPlace::Damaged(block, false) => block * self.block_entries,
            TestPlace::Damaged(_, true) | TestPlace::NoEntry => panic!("prev is not allowed here"),
        };
        self.arrive(end.checked_sub(1), false).await
    }
}
