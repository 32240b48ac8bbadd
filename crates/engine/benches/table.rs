//! Nanoseconds per entry of the ordered engine's tables, on one core and memory: writing, gets of cached blocks, scans.
//!
//! Expected, by arithmetic: an entry has 16 B of key and 100 B of value. To write one is to compare its key with the one before, to
//! copy 120 B three times, to compute a checksum over them and one hash: about 100 ns. A get looks into the cache three times (50 ns each,
//! locks and hashing), into a line of the filter, into an index of 27,000 separators (11 steps of a search and 8 entries) and into
//! a block (2 steps and 8 entries): 500 ns, and 100 ns more for each of about ten lines that are not in the processor's caches. A step of a
//! scan decodes one entry: 15 ns, and as much again for checksum, check and copy of its block unless that is in the cache.
//! Each measure is the best, median and worst of several runs. Run with `cargo bench -p octokv-engine --bench table`.
#![allow(clippy::disallowed_methods)] // The time on a processor is in a file.

use octokv_base::{BufferPool, Prng, UnixTime, Version};
use octokv_device::{MemoryDevice, RamDisk};
use octokv_engine::VolumePlace;
use octokv_engine::common::allocator::Extent;
use octokv_engine::lsm::cursor::EntryCursor;
use octokv_engine::lsm::entry::{EntryValue, Position, TreeEntry};
use octokv_engine::lsm::prefetch_degree::PrefetchBudget;
use octokv_engine::lsm::table::cache::BlockCache;
use octokv_engine::lsm::table::cursor::{TableCursor, TableCursorConfig};
use octokv_engine::lsm::table::info::TableInfo;
use octokv_engine::lsm::table::io::{TableCounters, TableIo};
use octokv_engine::lsm::table::reader::{CacheFill, SearchKey, TableReader};
use octokv_engine::lsm::table::scan_lengths::ScanLengths;
use octokv_engine::lsm::table::spare_blocks::SpareBlocks;
use octokv_engine::lsm::table::writer::{TableWriter, TableWriterConfig};
use std::hint::black_box;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

const ENTRIES: u64 = 1_000_000;
const VALUE_BYTES: usize = 100;
const GETS: u64 = 500_000;
const RUNS: usize = 5;
const VOLUME_BYTES: u64 = 256 << 20;
const CACHE_BYTES: u64 = 512 << 20;
const UNIT_BYTES: u32 = 4096;

/// Keys in order, with 8 random bytes behind the number.
fn key(index: u64) -> [u8; 16] {
    let mut key = [0; 16];
    key[..8].copy_from_slice(&index.to_be_bytes());
    Prng::new(index).fill(&mut key[8..]);
    key
}

fn table_io(cache_bytes: u64) -> Rc<TableIo> {
    let disk = RamDisk::new(VOLUME_BYTES, 4096).expect("memory");
    Rc::new(TableIo {
        device: Rc::new(MemoryDevice::new(disk)),
        pool: BufferPool::new(64 << 20),
        cache: Arc::new(BlockCache::new(cache_bytes)),
        volume_id: 1,
        unit_bytes: UNIT_BYTES,
        place: VolumePlace::default(),
        counters: TableCounters::default(),
        scan_lengths: ScanLengths::default(),
        spare_blocks: SpareBlocks::default(),
        prefetch_budget: PrefetchBudget::new(64 << 20),
        unreadable: None,
    })
}

/// The outcome of an operation that completes at once.
fn poll_ready<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(outcome) => outcome,
        Poll::Pending => panic!("memory completes at once"),
    }
}

/// The time that this process has run, in nanoseconds: what other processes take does not count.
fn cpu_time_ns() -> f64 {
    let schedstat = std::fs::read_to_string("/proc/self/schedstat").expect("Linux");
    schedstat.split_whitespace().next().and_then(|time| time.parse().ok()).expect("the time on a processor")
}

/// Prints what an operation takes, of several runs.
fn measure(name: &str, operations: u64, mut run: impl FnMut()) {
    let mut times: Vec<f64> = (0..RUNS)
        .map(|_| {
            let start = cpu_time_ns();
            run();
            (cpu_time_ns() - start) / operations as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    println!("{name:44} {:8.1} {:8.1} {:8.1}", times[0], times[RUNS / 2], times[RUNS - 1]);
}

fn write(io: &Rc<TableIo>, keys: &[[u8; 16]], value: &[u8], compresses: bool) -> TableInfo {
    let run = Extent { location: 0, units: VOLUME_BYTES / u64::from(UNIT_BYTES) };
    let config = TableWriterConfig { compresses, ..TableWriterConfig::default() };
    let mut writer = TableWriter::new(Rc::clone(io), 1, run, config);
    let entries = async {
        for (index, key) in keys.iter().enumerate() {
            let entry = TreeEntry {
                key,
                sequence: 1 + index as u64,
                version: Version::NONE,
                expires_at: UnixTime::NEVER,
                value: EntryValue::Inline(&value[index % 16..][..VALUE_BYTES]),
            };
            writer.add(&entry).await.expect("space in the run");
        }
        writer.finish().await.expect("memory does not fail")
    };
    poll_ready(entries)
}

async fn scan(cursor: &mut TableCursor, is_forward: bool) -> u64 {
    let mut entries = 0;
    match is_forward {
        true => cursor.seek(Position::START).await.expect("intact"),
        false => cursor.seek_before(None).await.expect("intact"),
    }
    while let Some(entry) = cursor.entry() {
        black_box(entry);
        entries += 1;
        match is_forward {
            true => cursor.next().await.expect("intact"),
            false => cursor.prev().await.expect("intact"),
        }
    }
    entries
}

fn main() {
    println!("{:44} {:>8} {:>8} {:>8}", "ns", "best", "median", "worst");
    let keys: Vec<[u8; 16]> = (0..ENTRIES).map(key).collect();
    let (mut random_value, text) = (vec![0; VALUE_BYTES + 16], b"half of it repeats, ".repeat(6));
    Prng::new(1).fill(&mut random_value);
    measure("write an entry, LZ4", ENTRIES, || {
        write(&table_io(0), &keys, &text, true);
    });
    let io = table_io(CACHE_BYTES);
    let mut info = None;
    measure("write an entry", ENTRIES, || info = Some(write(&io, &keys, &random_value, false)));
    let info = info.expect("it was written");
    println!(
        "  data {} B, filter {} B, index {} B of {} entries",
        info.data_bytes, info.place.filter_bytes, info.place.index_bytes, info.entries
    );

    let reader = |io: &Rc<TableIo>| TableReader::new(Rc::clone(io), info.place);
    let cold = table_io_of(&io, 4 << 20);
    for (name, io, read_ahead_bytes) in [
        ("scan, blocks one by one", &cold, 0),
        ("scan, 256 KiB at once", &cold, 256 << 10),
        ("scan, blocks in the cache", &io, 0),
    ] {
        let fill = if Rc::ptr_eq(io, &cold) { CacheFill::Skip } else { CacheFill::Keep };
        let config = TableCursorConfig { fill, read_ahead_bytes, prefetches_blocks: false };
        for (is_forward, direction) in [(true, "forward"), (false, "backward")] {
            measure(&format!("{name}, {direction}"), ENTRIES, || {
                let mut cursor = TableCursor::new(reader(io), config);
                assert_eq!(poll_ready(scan(&mut cursor, is_forward)), ENTRIES);
            });
        }
    }
    for (name, mask) in [("of 2,000 keys", 2047), ("of 1,000,000 keys", u64::MAX)] {
        measure(&format!("get, cached, {name}"), GETS, || {
            let (reader, mut random) = (reader(&io), Prng::new(3));
            for _ in 0..GETS {
                let key = &keys[(random.below(ENTRIES) & mask) as usize];
                let found = poll_ready(reader.get(SearchKey::new(key), u64::MAX));
                assert!(black_box(found.expect("intact")).is_some());
            }
        });
    }
    measure("get, block not in the cache", GETS / 10, || {
        let (reader, mut random) = (reader(&cold), Prng::new(3));
        for _ in 0..GETS / 10 {
            let key = &keys[random.below(ENTRIES) as usize];
            assert!(poll_ready(reader.get(SearchKey::new(key), u64::MAX)).expect("intact").is_some());
        }
    });
    measure("get of an absent key", GETS, || {
        let (reader, mut random) = (reader(&io), Prng::new(4));
        for _ in 0..GETS {
            let mut key = keys[random.below(ENTRIES) as usize];
            key[15] ^= 1;
            black_box(poll_ready(reader.get(SearchKey::new(&key), u64::MAX)).expect("intact"));
        }
    });
    measure("seek and ten steps, cached", GETS / 5, || {
        let (mut cursor, mut random) =
            (TableCursor::new(reader(&io), TableCursorConfig::ITERATOR), Prng::new(5));
        for _ in 0..GETS / 5 {
            let key = &keys[random.below(ENTRIES - 11) as usize];
            let steps = async {
                cursor.seek(Position::before(key)).await.expect("intact");
                for _ in 0..10 {
                    cursor.next().await.expect("intact");
                }
                black_box(cursor.entry()).is_some()
            };
            assert!(poll_ready(steps));
        }
    });
    println!("{:?}", io.counters.statistics());
}

/// The same device with another cache.
fn table_io_of(io: &Rc<TableIo>, cache_bytes: u64) -> Rc<TableIo> {
    Rc::new(TableIo {
        device: Rc::clone(&io.device),
        pool: io.pool.clone(),
        cache: Arc::new(BlockCache::new(cache_bytes)),
        counters: TableCounters::default(),
        scan_lengths: ScanLengths::default(),
        spare_blocks: SpareBlocks::default(),
        prefetch_budget: PrefetchBudget::new(64 << 20),
        unreadable: None,
        ..**io
    })
}
