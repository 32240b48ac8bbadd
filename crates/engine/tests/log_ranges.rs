//! Parts of long values of the log engine: a get reads the head of the record and the pieces that have the part, and verifies these.

use crate::common::log_fixture::LogFixture;
use crate::common::noted_device::NotedDevice;
use crate::common::pool;
use crate::common::stable_memory::StableMemory;
use octokv_base::{Buffer, Lba, Prng};
use octokv_device::Device;
use octokv_engine::conformance::{EngineFixture, key_of, record_of, value_of};
use octokv_engine::log::handle::LogEngine;
use octokv_engine::log::value_record::VALUE_PIECE_BYTES;
use octokv_engine::{Engine, EngineError, PutMode, PutOutcome, StoredValue, ValueRange};
use octokv_runtime::block_on;
use std::rc::Rc;

const BLOCK: usize = 512;
const VALUE_BYTES: usize = 395_000;
/// Of an image, of the head, and of the units around them and the pieces.
const OTHER_BYTES: usize = 6 << 10;

/// A value of four pieces, the last one shorter, on a volume with chunks of so many bytes.
struct LongValue {
    memory: Rc<StableMemory>,
    noted: Rc<NotedDevice>,
    engine: LogEngine,
    value: Vec<u8>,
}

impl LongValue {
    fn new(chunk_bytes: u32) -> LongValue {
        let mut fixture = LogFixture { cores: 1, ..LogFixture::default() };
        fixture.format.chunk_bytes = Some(chunk_bytes);
        let memory = StableMemory::new(70 * u64::from(chunk_bytes).max(256 << 10), BLOCK as u32);
        let noted = NotedDevice::new(memory.clone());
        let device: Rc<dyn Device> = noted.clone();
        block_on(fixture.format(Rc::clone(&device)), || ());
        let volume = block_on(fixture.open_volume(&device), || ()).expect("opens");
        let engine = LogEngine::new(volume, device, pool());
        let value = value_of(&key_of(1), 1, VALUE_BYTES);
        let record = record_of(engine.record_layout(), &key_of(1), &value);
        let stored = block_on(engine.put(&key_of(1), PutMode::Upsert, record, VALUE_BYTES), || ());
        assert_eq!(stored, Ok(PutOutcome::Stored));
        LongValue { memory, noted, engine, value }
    }

    fn get(&self, offset: u32, bytes_max: u32) -> Result<Option<StoredValue>, EngineError> {
        block_on(self.engine.get_range(&key_of(1), ValueRange { offset, bytes_max }), || ())
    }

    /// The bytes that a get of a part reads. Its outcome is the part.
    fn read_bytes(&self, offset: u32, bytes_max: u32) -> usize {
        self.noted.reads.take();
        let found = self.get(offset, bytes_max).expect("no fault").expect("is there");
        let range = ValueRange { offset, bytes_max }.within(VALUE_BYTES as u32);
        let part = &self.value[range.start as usize..range.end as usize];
        assert!(found.as_bytes() == part, "{offset}, {bytes_max}");
        assert_eq!((found.bytes as usize, found.value_bytes as usize), (part.len(), VALUE_BYTES));
        self.noted.reads.take().iter().map(|&(_, blocks)| blocks as usize * BLOCK).sum()
    }

    /// Flips a bit of the byte of the value at an offset.
    fn flip(&self, offset: usize) {
        let needle = &self.value[offset..offset + 32];
        let mut block = 0;
        loop {
            // Two blocks, of which the first has its first byte.
            let read = block_on(self.memory.read(Lba(block), Buffer::zeroed(2 * BLOCK)), || ());
            let mut bytes = read.into_read().expect("memory");
            let found = bytes.windows(needle.len()).position(|window| window == needle);
            if let Some(at) = found.filter(|&at| at < BLOCK) {
                bytes[at] ^= 1;
                block_on(self.memory.write(Lba(block), bytes), || ()).result.expect("memory");
                return;
            }
            block += 1;
        }
    }
}

/// The whole pieces around a part.
fn pieces_around(offset: u32, bytes_max: u32) -> usize {
    let range = ValueRange { offset, bytes_max }.within(VALUE_BYTES as u32);
    let (start, end) = (range.start as usize, range.end as usize);
    match start < end {
        true => {
            end.next_multiple_of(VALUE_PIECE_BYTES).min(VALUE_BYTES)
                - start / VALUE_PIECE_BYTES * VALUE_PIECE_BYTES
        }
        false => 0,
    }
}

#[test]
fn a_part_of_a_long_value_takes_the_pieces_that_have_it() {
    // In many extents, and in one place or two.
    for chunk_bytes in [16 << 10, 512 << 10] {
        let (long, mut random) = (LongValue::new(chunk_bytes), Prng::new(5));
        let piece = VALUE_PIECE_BYTES as u32;
        let whole = long.read_bytes(0, u32::MAX);
        assert!(whole >= VALUE_BYTES);
        let mut parts = vec![
            (0, 1),
            (piece - 1, 2),
            (piece, piece),
            (2 * piece + 7, 100),
            (VALUE_BYTES as u32 - 1, 1),
            (VALUE_BYTES as u32 - 1, u32::MAX),
            (VALUE_BYTES as u32, 10),
            (u32::MAX, u32::MAX),
            (5, 0),
        ];
        let end = VALUE_BYTES as u64 + 10;
        parts.extend((0..200).map(|_| (random.below(end) as u32, random.below(end) as u32)));
        for (offset, bytes) in parts {
            let (read, around) = (long.read_bytes(offset, bytes), pieces_around(offset, bytes));
            // Each extent may share a unit with what lies beside it, at both ends.
            let of_extents = 2 * BLOCK * around.div_ceil(chunk_bytes as usize);
            assert!(
                (around..=around + of_extents + OTHER_BYTES).contains(&read),
                "{read} bytes for {bytes} from {offset}, chunks of {chunk_bytes}"
            );
        }
    }
}

#[test]
fn damage_costs_the_parts_that_its_piece_has() {
    for chunk_bytes in [16 << 10, 512 << 10] {
        let long = LongValue::new(chunk_bytes);
        let piece = VALUE_PIECE_BYTES as u32;
        long.flip(2 * VALUE_PIECE_BYTES + 70_000);
        let is_corrupt = |found| matches!(found, Err(EngineError::Corrupt { .. }));
        for (offset, bytes, is_damaged) in [
            (0, u32::MAX, true),
            (0, 2 * piece, false),
            (0, 2 * piece + 1, true),
            (2 * piece, 1, true),
            (3 * piece - 1, 1, true),
            (3 * piece, u32::MAX, false),
            (piece + 5, 10, false),
        ] {
            assert_eq!(is_corrupt(long.get(offset, bytes)), is_damaged, "{bytes} from {offset}");
        }
    }
}
