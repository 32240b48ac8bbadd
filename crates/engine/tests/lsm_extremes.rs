//! The ordered engine with the longest and shortest keys and values: also when they fill the volume.

use crate::common::lsm_fixture::{LsmFixture, make_small};
use crate::common::pool;
use crate::common::stable_memory::StableMemory;
use octokv_base::{Buffer, BufferPool, Key, Lba, Prng};
use octokv_device::{Device, DeviceFuture, Geometry, IoResult};
use octokv_engine::conformance::{EngineFixture, record_of};
use octokv_engine::lsm::settings::TreeSettings;
use octokv_engine::lsm::{LsmEngine, open_with};
use octokv_engine::{
    DeleteOutcome, Engine, IteratorOptions, IteratorProgress, PairSink, PutMode, PutOutcome,
};
use octokv_runtime::block_on;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

fn run<T>(future: impl Future<Output = T>) -> T {
    block_on(future, || ())
}

fn open(device: &Rc<dyn Device>, fixture: &LsmFixture, adjust: fn(&mut TreeSettings)) -> LsmEngine {
    let volume = run(open_with(device, &pool(), fixture.open_config(), &fixture.format, adjust));
    LsmEngine::new(volume.expect("opens"), 0, Rc::clone(device), pool())
}

fn put(engine: &LsmEngine, key: &Key, value: &[u8]) -> PutOutcome {
    let record = record_of(engine.record_layout(), key, value);
    run(engine.put(key, PutMode::Upsert, record, value.len())).expect("no fault")
}

fn get(engine: &LsmEngine, key: &Key) -> Option<Vec<u8>> {
    run(engine.get(key)).expect("no fault").map(|value| value.as_bytes().to_vec())
}

/// A sink that takes one pair in each call, or none.
struct OnePair {
    room: usize,
    pairs: Vec<(Vec<u8>, Vec<u8>)>,
}

impl PairSink for OnePair {
    fn has_space(&mut self, _key_bytes: usize, _value_bytes: usize) -> bool {
        self.room > 0
    }
    fn push(&mut self, key: &[u8], value: &[u8]) {
        self.room -= 1;
        self.pairs.push((key.to_vec(), value.to_vec()));
    }
}

fn iterate(engine: &LsmEngine, reverse: bool) -> Vec<(Vec<u8>, Vec<u8>)> {
    let options = IteratorOptions { reverse, ..IteratorOptions::default() };
    let iterator = run(engine.create_iterator(options)).unwrap().unwrap();
    let mut sink = OnePair { room: 0, pairs: Vec::new() };
    loop {
        // A sink without space moves nothing.
        sink.room = 0;
        let before = run(engine.next_pairs(&iterator, &mut sink)).expect("no fault");
        sink.room = 1;
        match run(engine.next_pairs(&iterator, &mut sink)).expect("no fault") {
            IteratorProgress::AtEnd => return sink.pairs,
            IteratorProgress::HasNext => assert_eq!(before, IteratorProgress::HasNext),
        }
    }
}

#[test]
fn keys_and_values_of_every_extreme_length_are_found_in_memtables_tables_and_segments() {
    let (fixture, mut random) = (LsmFixture::default(), Prng::new(5));
    let threshold = fixture.format.inline_bytes_max as usize;
    let device: Rc<dyn Device> = StableMemory::new(64 << 20, 512);
    run(fixture.format(Rc::clone(&device)));
    let mut engine = open(&device, &fixture, make_small);
    let lengths = [0, 1, 2, threshold - 1, threshold, threshold + 1, 511, 512, 4096, 2 << 20];
    let mut expected: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
    for round in 0..3_u8 {
        for key_bytes in [0, 1, 2, 15, 16, 255, 1023, 1024] {
            for (index, &bytes) in (0..).zip(&lengths) {
                // A key of no bytes is one alone; of one byte there are as many as lengths.
                let mut key = vec![index; key_bytes];
                if let Some(last) = key.last_mut() {
                    *last = 255 - index;
                }
                let mut value = vec![round; bytes];
                random.fill(&mut value);
                let key_of = Key::new(&key).expect("within the limit");
                assert_eq!(put(&engine, &key_of, &value), PutOutcome::Stored);
                expected.insert(key, value);
            }
        }
        let check = |engine: &LsmEngine| {
            for (key, value) in &expected {
                let found = get(engine, &Key::new(key).unwrap());
                assert!(
                    found.as_ref() == Some(value),
                    "a key of {} B, a value of {} B",
                    key.len(),
                    value.len()
                );
            }
            let pairs: Vec<_> = expected.clone().into_iter().collect();
            assert!(iterate(engine, false) == pairs);
            assert!(iterate(engine, true).into_iter().rev().eq(pairs));
        };
        check(&engine);
        run(engine.flush_memtables()).expect("no fault");
        check(&engine);
        run(engine.compact_all()).expect("no fault");
        check(&engine);
        drop(engine);
        engine = open(&device, &fixture, make_small);
        check(&engine);
    }
    for key in expected.keys() {
        assert_eq!(run(engine.delete(&Key::new(key).unwrap())), Ok(DeleteOutcome::Deleted));
    }
    run(engine.compact_all()).expect("no fault");
    assert_eq!(iterate(&engine, false), []);
    assert!(engine.statistics().used_bytes < 1 << 20, "{} B are used", engine.statistics().used_bytes);
}

#[test]
fn long_keys_fill_a_volume_whose_checkpoints_hold_them() {
    let fixture = LsmFixture::default();
    for device_bytes in [48 << 20, 96 << 20] {
        let device: Rc<dyn Device> = StableMemory::new(device_bytes, 512);
        run(fixture.format(Rc::clone(&device)));
        let mut engine = open(&device, &fixture, |_| {});
        let mut random = Prng::new(device_bytes);
        // All bytes differ, so that tables have long keys at their ends.
        let mut key_of = |index: u64| {
            let mut key = vec![0; 1024];
            random.fill(&mut key);
            key[..8].copy_from_slice(&index.to_be_bytes());
            Key::new(&key).unwrap()
        };
        let mut stored = Vec::new();
        for index in 0.. {
            let key = key_of(octokv_base::prng::mix64(index));
            match put(&engine, &key, &index.to_le_bytes()) {
                PutOutcome::Stored => stored.push(key),
                outcome => {
                    assert_eq!(outcome, PutOutcome::Full);
                    break;
                }
            }
        }
        let live = stored.len() as u64 * 1060;
        let capacity = engine.statistics().capacity_bytes;
        let room = capacity - engine.volume().settings().reserve_bytes;
        assert!(live * 10 >= room * 7, "{live} B live of {room} B");
        run(engine.checkpoint()).unwrap_or_else(|error| panic!("{error}: {:?}", engine.volume().version()));
        drop(engine);
        engine = open(&device, &fixture, |_| {});
        for (index, key) in (0_u64..).zip(&stored) {
            assert_eq!(get(&engine, key), Some(index.to_le_bytes().to_vec()));
        }
        run(engine.compact_all()).expect("no fault");
        run(engine.checkpoint()).expect("the image has its area");
        for key in &stored {
            assert_eq!(run(engine.delete(key)), Ok(DeleteOutcome::Deleted));
        }
        run(engine.compact_all()).expect("no fault");
        let used = engine.statistics().used_bytes;
        assert!(used * 20 < capacity, "{used} B of {capacity} B");
    }
}

#[test]
fn values_of_two_mebibytes_fill_a_volume_ten_times() {
    const VALUE: usize = 2 << 20;
    let fixture = LsmFixture::default();
    let device: Rc<dyn Device> = StableMemory::new(96 << 20, 512);
    run(fixture.format(Rc::clone(&device)));
    let engine = open(&device, &fixture, |_| {});
    let key_of = |index: u64| Key::new(&index.to_be_bytes()).unwrap();
    let value_of = |operation: u64| vec![operation as u8; VALUE];
    let mut random = Prng::new(4);
    let mut values: Vec<u64> = Vec::new();
    while put(&engine, &key_of(values.len() as u64), &value_of(values.len() as u64)) == PutOutcome::Stored {
        values.push(values.len() as u64);
    }
    let (live, capacity) = ((values.len() * VALUE) as u64, engine.statistics().capacity_bytes);
    assert!(live * 100 > capacity * 75, "{live} B live of {capacity} B");
    // Three are deleted, so that others can be replaced.
    for _ in 0..3 {
        values.pop();
        assert_eq!(run(engine.delete(&key_of(values.len() as u64))), Ok(DeleteOutcome::Deleted));
    }
    for operation in 0..(10 * (96 << 20) / VALUE) as u64 {
        let index = random.below(values.len() as u64);
        assert_eq!(put(&engine, &key_of(index), &value_of(operation)), PutOutcome::Stored, "{operation}");
        values[index as usize] = operation;
    }
    for (index, &operation) in (0..).zip(&values) {
        assert!(get(&engine, &key_of(index)) == Some(value_of(operation)));
    }
}

/// A device whose blocks of zeros take no memory.
struct SparseMemory {
    bytes: u64,
    /// Blocks that are not zero, by number.
    blocks: RefCell<BTreeMap<u64, Box<[u8]>>>,
}

const SPARSE_BLOCK: usize = 4096;

impl Device for SparseMemory {
    fn geometry(&self) -> Geometry {
        Geometry {
            blocks: self.bytes / SPARSE_BLOCK as u64,
            block_bytes: SPARSE_BLOCK as u32,
            volatile: false,
        }
    }
    fn name(&self) -> &str {
        "sparse memory"
    }
    fn read(&self, at: Lba, mut buffer: Buffer) -> DeviceFuture {
        buffer.fill(0);
        let end = at.0 + (buffer.len() / SPARSE_BLOCK) as u64;
        for (lba, block) in self.blocks.borrow().range(at.0..end) {
            let start = (lba - at.0) as usize * SPARSE_BLOCK;
            buffer[start..start + SPARSE_BLOCK].copy_from_slice(block);
        }
        DeviceFuture::ready(IoResult { buffer: Some(buffer), result: Ok(()) })
    }
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        let mut blocks = self.blocks.borrow_mut();
        for (lba, block) in (at.0..).zip(buffer.chunks(SPARSE_BLOCK)) {
            match block.iter().any(|byte| *byte != 0) {
                true => drop(blocks.insert(lba, block.into())),
                false => drop(blocks.remove(&lba)),
            }
        }
        drop(blocks);
        DeviceFuture::ready(IoResult { buffer: Some(buffer), result: Ok(()) })
    }
    fn flush(&self) -> DeviceFuture {
        DeviceFuture::ready(IoResult { buffer: None, result: Ok(()) })
    }
    fn trim(&self, _at: Lba, _blocks: u64) -> DeviceFuture {
        DeviceFuture::ready(IoResult { buffer: None, result: Ok(()) })
    }
}

#[test]
fn values_of_256_mebibytes_are_stored_replaced_and_iterated() {
    const VALUE: usize = 256 << 20;
    let mut fixture = LsmFixture::default();
    fixture.format.unit_bytes = Some(4096);
    fixture.format.value_bytes_max = VALUE as u32;
    let device: Rc<dyn Device> = Rc::new(SparseMemory { bytes: 8 << 30, blocks: RefCell::default() });
    run(fixture.format(Rc::clone(&device)));
    // Room for two such values, and not for all that an iterator would read ahead.
    let pool = BufferPool::new(600 << 20);
    let volume =
        run(open_with(&device, &pool, fixture.open_config(), &fixture.format, |_| {})).expect("opens");
    let engine = LsmEngine::new(volume, 0, Rc::clone(&device), pool.clone());
    let key_of = |index: u64| Key::new(&index.to_be_bytes()).unwrap();
    let value_of = |operation: u8| {
        let mut value = vec![0; VALUE];
        (value[0], value[VALUE - 1]) = (operation, operation);
        value
    };
    for round in 0..4_u8 {
        for index in 0..5_u8 {
            let outcome = put(&engine, &key_of(index.into()), &value_of(round * 5 + index));
            assert_eq!(outcome, PutOutcome::Stored, "round {round}");
        }
        run(engine.compact_all()).expect("no fault");
    }
    let iterator = run(engine.create_iterator(IteratorOptions::default())).unwrap().unwrap();
    let mut seen = Vec::new();
    loop {
        let mut sink = OnePair { room: 1, pairs: Vec::new() };
        let progress = run(engine.next_pairs(&iterator, &mut sink)).expect("a value at a time is read");
        seen.extend(sink.pairs.into_iter().map(|(_, value)| (value.len(), value[0], value[VALUE - 1])));
        if progress == IteratorProgress::AtEnd {
            break;
        }
    }
    assert_eq!(seen, (15..20).map(|operation| (VALUE, operation, operation)).collect::<Vec<_>>());
}
