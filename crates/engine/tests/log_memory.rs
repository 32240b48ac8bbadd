//! The log engine's memory per object (LEED §3.2.1: SegTbl), on a device that discards writes to value logs.
//!
//! `OCTOKV_LOG_OBJECTS` is the number of objects: 2 million if it is not set. `make log-memory` has 100 million, which takes about 9 GB.

#![allow(clippy::disallowed_methods, reason = "the test prints how long it takes")]

use crate::held_since;
use octokv_base::{Buffer, BufferPool, Key, Lba, Prng};
use octokv_device::{Device, DeviceFuture, Geometry, IoResult};
use octokv_engine::log::handle::LogEngine;
use octokv_engine::log::log_place::LogKind;
use octokv_engine::log::open::open;
use octokv_engine::log::volume::LogVolume;
use octokv_engine::{
    Durability, Engine, EngineKind, FormatConfig, OpenConfig, PutMode, PutOutcome, Volume, WallClock,
};
use octokv_runtime::block_on;
use octokv_sys::counting_allocator::thread_held_bytes;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::time::Instant;

const VALUE_BYTES: usize = 256;
/// Checkpoints and compactions of the key logs during the puts.
const CHECKPOINTS: u64 = 200;
const BLOCK_BYTES: usize = 512;
/// The device has so many bytes for each object: 331 live ones, and room for the garbage of the key log.
const DEVICE_BYTES_PER_OBJECT: u64 = 400;
/// No larger than a chunk, so that a page is of at most two.
const PAGE_BYTES: usize = 64 << 10;

fn run<T>(future: impl Future<Output = T>) -> T {
    block_on(future, || ())
}

/// A page of the device.
#[derive(Default)]
struct MemoryPage {
    /// `None` before the first write.
    bytes: Option<Box<[u8]>>,
    /// Whether a part of it was written as a part of a key log.
    has_keys: bool,
}

/// A memory device whose pages are allocated by the first write. Writes to value logs are discarded.
struct DroppingMemory {
    blocks: u64,
    pages: RefCell<Vec<MemoryPage>>,
    /// The bytes of all pages.
    page_bytes: Cell<usize>,
    /// The bytes of all reads.
    read_bytes: Cell<u64>,
    volume: RefCell<Weak<LogVolume>>,
}

impl DroppingMemory {
    fn new(bytes: u64) -> DroppingMemory {
        let pages = (bytes as usize).div_ceil(PAGE_BYTES);
        DroppingMemory {
            blocks: bytes / BLOCK_BYTES as u64,
            pages: RefCell::new((0..pages).map(|_| MemoryPage::default()).collect()),
            page_bytes: Cell::new(0),
            read_bytes: Cell::new(0),
            volume: RefCell::default(),
        }
    }

    /// Calls `f` with each piece of a range that lies in one page: the page, the place in it, that in the range, and the bytes.
    fn pieces(at: Lba, bytes: usize, mut f: impl FnMut(usize, usize, usize, usize)) {
        let (start, mut done) = (at.0 as usize * BLOCK_BYTES, 0);
        while done < bytes {
            let within = (start + done) % PAGE_BYTES;
            let count = (PAGE_BYTES - within).min(bytes - done);
            f((start + done) / PAGE_BYTES, within, done, count);
            done += count;
        }
    }

    fn log_of(&self, at: Lba) -> Option<LogKind> {
        self.volume.borrow().upgrade()?.log_of_block(at)
    }

    /// Frees the pages that lie in chunks which key logs had, and have no longer. The others are metadata.
    fn free_unused_pages(&self) {
        let Some(volume) = self.volume.borrow().upgrade() else { return };
        let log_of = |block| volume.log_of_block(Lba(block));
        for (number, page) in self.pages.borrow_mut().iter_mut().enumerate() {
            let first = (number * PAGE_BYTES / BLOCK_BYTES) as u64;
            let ends = [first, first + (PAGE_BYTES / BLOCK_BYTES) as u64 - 1];
            if page.has_keys && ends.into_iter().all(|block| log_of(block) != Some(LogKind::Keys)) {
                *page = MemoryPage::default();
                self.page_bytes.set(self.page_bytes.get() - PAGE_BYTES);
            }
        }
    }
}

impl Device for DroppingMemory {
    fn geometry(&self) -> Geometry {
        Geometry { block_bytes: BLOCK_BYTES as u32, blocks: self.blocks, volatile: false }
    }
    fn name(&self) -> &str {
        "memory that drops values"
    }
    fn read(&self, at: Lba, mut buffer: Buffer) -> DeviceFuture {
        let pages = self.pages.borrow();
        self.read_bytes.set(self.read_bytes.get() + buffer.len() as u64);
        DroppingMemory::pieces(at, buffer.len(), |page, within, from, count| match &pages[page].bytes {
            Some(page) => buffer[from..from + count].copy_from_slice(&page[within..within + count]),
            None => buffer[from..from + count].fill(0),
        });
        DeviceFuture::ready(IoResult { buffer: Some(buffer), result: Ok(()) })
    }
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        let log = self.log_of(at);
        if log != Some(LogKind::Values) {
            let mut pages = self.pages.borrow_mut();
            DroppingMemory::pieces(at, buffer.len(), |page, within, from, count| {
                let page = &mut pages[page];
                page.has_keys |= log == Some(LogKind::Keys);
                let bytes = page.bytes.get_or_insert_with(|| {
                    self.page_bytes.set(self.page_bytes.get() + PAGE_BYTES);
                    vec![0; PAGE_BYTES].into_boxed_slice()
                });
                bytes[within..within + count].copy_from_slice(&buffer[from..from + count]);
            });
        }
        DeviceFuture::ready(IoResult { buffer: Some(buffer), result: Ok(()) })
    }
    fn flush(&self) -> DeviceFuture {
        DeviceFuture::ready(IoResult { buffer: None, result: Ok(()) })
    }
    fn trim(&self, _at: Lba, _blocks: u64) -> DeviceFuture {
        DeviceFuture::ready(IoResult { buffer: None, result: Ok(()) })
    }
}

/// 16 bytes, all different.
fn key_of(number: u64) -> Key {
    Key::new(format!("{:016x}", octokv_base::prng::mix64(number)).as_bytes()).expect("within the limit")
}

fn open_config() -> OpenConfig {
    OpenConfig {
        durability: Durability::PowerSafe,
        cores: 1,
        cache_bytes: 0,
        prepare_bytes: 0,
        compact_bytes_per_second: u64::MAX,
        tree: OpenConfig::TREE,
        swap_gap: OpenConfig::SWAP_GAP,
        clock: WallClock::default(),
        tokens: None,
    }
}

#[test]
fn an_object_takes_less_than_half_a_byte_of_memory() {
    let objects =
        std::env::var("OCTOKV_LOG_OBJECTS").map_or(2_000_000, |count| count.parse().expect("a number"));
    let format = FormatConfig {
        engine: EngineKind::Log,
        seed: 1,
        unit_bytes: Some(BLOCK_BYTES as u32),
        value_bytes_max: 64 << 10,
        // As a device of 32 million objects and more has 32; with fewer objects their tables would not grow.
        partitions: (objects / 1_000_000).clamp(1, 32) as u16,
        ..FormatConfig::default()
    };
    let memory = Rc::new(DroppingMemory::new(objects * DEVICE_BYTES_PER_OBJECT + (48 << 20)));
    let device: Rc<dyn Device> = Rc::clone(&memory) as Rc<dyn Device>;
    let pool = BufferPool::new(64 << 20);
    run(<Arc<LogVolume>>::format(&[Rc::clone(&device)], &format)).expect("formats");
    let before = thread_held_bytes() - memory.page_bytes.get() as i64;
    let volume = run(open(&device, &pool, open_config(), &format)).expect("opens");
    memory.volume.replace(Arc::downgrade(&volume));
    let engine = LogEngine::new(volume, Rc::clone(&device), pool.clone());
    // Without the device's pages.
    let engine_bytes = || held_since(before) - memory.page_bytes.get();

    let segment_table_bytes = || engine.statistics().log.expect("it has logs").segment_table_bytes as usize;
    // The key logs would take all of the device before a put compacts them, and with it the memory of this process.
    let has_garbage = || {
        let log = engine.statistics().log.expect("it has logs");
        (log.keys.chunks - log.stores) * log.chunk_bytes > 2 * log.keys.live_bytes
    };
    let put = |engine: &LogEngine, number: u64| {
        let key = key_of(number);
        let record = Buffer::zeroed(engine.record_layout().value_offset(key.len()) + VALUE_BYTES);
        assert_eq!(run(engine.put(&key, PutMode::Upsert, record, VALUE_BYTES)), Ok(PutOutcome::Stored));
    };
    let (mut first, mut first_tables, begun) = (0, 0, Instant::now());
    for number in 0..objects {
        put(&engine, number);
        if number % 32 == 0 {
            while run(engine.split_once()).expect("no fault") {}
        }
        if (number + 1) % (objects / CHECKPOINTS).max(1) == 0 {
            while has_garbage() && run(engine.compact_once(LogKind::Keys)).expect("no fault") {}
            run(engine.checkpoint()).expect("no fault");
            memory.free_unused_pages();
        }
        if number + 1 == objects / 10 {
            (first, first_tables) = (engine_bytes(), segment_table_bytes());
        }
    }
    let (all, log) = (engine_bytes(), engine.statistics().log.expect("it has logs"));
    let slope = (all - first) as f64 / (objects - objects / 10) as f64;
    println!("{} B of the device's memory", memory.page_bytes.get());
    println!(
        "{objects} objects of {VALUE_BYTES} B in {:.0} s: {slope:.3} B of memory for each more; {first} B with a tenth of them, {all} B with all, of which {} B \
         for segments and {} B for chunks; {} live bytes of the key logs for each",
        begun.elapsed().as_secs_f64(),
        log.segment_table_bytes,
        log.chunk_table_bytes,
        log.keys.live_bytes / objects,
    );
    assert!(slope < 0.5, "{slope} B for each object");
    let more_tables = segment_table_bytes() - first_tables;
    assert!(more_tables > 0 && all - first >= more_tables, "{more_tables} B of tables are counted");

    // Opened behind a crash, with as many puts behind the last checkpoint as there were between two: nothing but checkpoint and
    // key log is read, since markers state that all is durable.
    let tail = (objects / CHECKPOINTS).max(1);
    let key_log_bytes = |log: &octokv_engine::LogStatistics| log.keys.chunks * log.chunk_bytes;
    let before_tail = key_log_bytes(&log);
    for number in 0..tail {
        put(&engine, number * (objects / tail));
    }
    let log = engine.statistics().log.expect("it has logs");
    let tail_bytes = key_log_bytes(&log) - before_tail;
    run(engine.mark_durable()).expect("no fault");
    drop(engine);
    memory.volume.replace(Weak::new());
    memory.read_bytes.set(0);
    let begun = Instant::now();
    let volume = run(open(&device, &pool, open_config(), &format)).expect("opens");
    let (took, read) = (begun.elapsed(), memory.read_bytes.get());
    println!(
        "opened behind a crash and {tail} puts, {tail_bytes} B of key logs, in {:.2} s: {read} B were read, of {} B of key logs and segment tables of {} B",
        took.as_secs_f64(),
        key_log_bytes(&log),
        log.segment_table_bytes,
    );
    assert!(took.as_secs() < 30, "{took:?}");
    // The checkpoint has the tables; what is replayed is read at most twice, and the ends of a chunk of each store.
    let bound =
        2 * (tail_bytes + log.segment_table_bytes + log.chunk_table_bytes) + 4 * log.stores * log.chunk_bytes;
    assert!(tail_bytes > 0 && read < bound, "{read} B are read, more than {bound}");
    memory.volume.replace(Arc::downgrade(&volume));
    let engine = LogEngine::new(volume, Rc::clone(&device), pool);
    assert_eq!(engine.statistics().keys, objects);
    let mut random = Prng::new(9);
    for _ in 0..1_000 {
        let key = key_of(random.below(objects));
        assert_eq!(run(engine.exist(&key)), Ok(Some(VALUE_BYTES)));
        assert_eq!(run(engine.exist(&key_of(objects + random.below(objects)))), Ok(None));
    }
}
