//! The table writer at its limits: full runs, failing devices, no buffers; and what reads cost the device.

use super::cache::{PartName, TablePart};
use super::cursor::TableCursorConfig;
use super::reader::SearchKey;
use super::run_writer::{WRITE_BYTES, WRITES_MAX};
use super::test_tables::{
    BLOCK_BYTES, EntryShape, LOCATION, OwnedEntry, TestVolume, at, data_block, inline, random_entries,
};
use super::writer::{TableWriteError, TableWriter, TableWriterConfig};
use crate::EngineError;
use crate::common::allocator::Extent;
use crate::lsm::cursor::EntryCursor;
use crate::lsm::entry::Position;
use octokv_base::Prng;
use octokv_device::DeviceError;
use octokv_device::fault_injection::{FaultRule, InjectedFault, OpFilter};
use octokv_device::power_loss::PowerLossDisk;
use octokv_runtime::block_on;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

const SHAPE: EntryShape =
    EntryShape { keys: 3000, key_bytes_max: 40, value_bytes_max: 2000, versions_max: 4 };

fn numbered(keys: u64, value_bytes: usize) -> Vec<OwnedEntry> {
    (0..keys).map(|key| inline(&key.to_be_bytes(), key + 1, &vec![b'v'; value_bytes])).collect()
}

#[test]
fn a_full_run_ends_a_table_that_has_all_entries_before() {
    let shapes = [
        SHAPE,
        EntryShape { keys: 2000, key_bytes_max: 1024, value_bytes_max: 10, versions_max: 1 },
        EntryShape { keys: 400, key_bytes_max: 9, value_bytes_max: 65536, versions_max: 2 },
        EntryShape { keys: 5000, key_bytes_max: 16, value_bytes_max: 0, versions_max: 1 },
    ];
    let mut tables = 0;
    for seed in 0..40 {
        let (random, shape) = (&mut Prng::new(seed), shapes[seed as usize % 4]);
        let (unit_bytes, entries) = ([512, 4096][seed as usize / 4 % 2], random_entries(seed, shape));
        let volume = TestVolume::new(8 << 20, unit_bytes, 1 << 20);
        let bytes = 8192 + random.below([20 << 10, 200 << 10, 2 << 20][seed as usize % 3]);
        let run = Extent { location: LOCATION, units: bytes / u64::from(unit_bytes) };
        // What lies behind the run stays.
        let behind = vec![0xab; unit_bytes as usize];
        volume.set_unit(LOCATION, run.units, &behind);
        let config = TableWriterConfig { block_bytes: 256 << (seed % 6), compresses: seed % 3 == 0 };
        let finished = block_on(
            async {
                let mut writer = TableWriter::new(Rc::clone(&volume.io), 5, run, config);
                let mut count = 0;
                for entry in &entries {
                    match writer.add(&entry.as_entry()).await {
                        Ok(()) => count += 1,
                        Err(TableWriteError::RunFull) => break,
                        Err(error) => panic!("{error}"),
                    }
                }
                // An entry that does not fit changes nothing.
                if let Some(next) = entries.get(count) {
                    assert_eq!(writer.add(&next.as_entry()).await, Err(TableWriteError::RunFull));
                }
                assert_eq!(writer.entries(), count as u64);
                if count == 0 {
                    writer.abandon().await;
                    return None;
                }
                Some((writer.finish().await.expect("a table that fits"), count))
            },
            || (),
        );
        let Some((table, count)) = finished else { continue };
        tables += 1;
        assert!(table.extent.units <= run.units && table.extent.location == run.location);
        assert_eq!(volume.unit(LOCATION, run.units), behind);
        block_on(
            async {
                let mut cursor = volume.cursor(&table, TableCursorConfig::COMPACTION);
                cursor.seek(Position::START).await.expect("no fault");
                for entry in &entries[..count] {
                    assert_eq!(at(&cursor).as_ref(), Some(entry));
                    cursor.next().await.expect("no fault");
                }
                assert_eq!(at(&cursor), None);
            },
            || (),
        );
        if let Some(next) = entries.get(count).filter(|_| !config.compresses) {
            // The bound is not far from what the table takes.
            let next_bytes = 3 * next.key.len() + next.as_entry().encoded_bytes();
            let segments_bytes = 9 * 25;
            let unused = (run.units - table.extent.units) * u64::from(unit_bytes);
            let expected =
                3 * u64::from(unit_bytes) + (next_bytes + 2 * (3 * 1024 + segments_bytes) + 1500) as u64;
            assert!(unused <= expected, "{unused} bytes of the run are unused, seed {seed}");
        }
    }
    assert!(tables > 30, "{tables} of 40");
}

#[test]
fn a_run_without_space_for_one_entry_has_no_table() {
    let volume = TestVolume::new(1 << 20, 4096, 0);
    let run = Extent { location: LOCATION, units: 1 };
    let mut writer = TableWriter::new(Rc::clone(&volume.io), 5, run, TableWriterConfig::default());
    let add = |writer: &mut TableWriter| block_on(writer.add(&inline(b"key", 1, b"value").as_entry()), || ());
    assert_eq!(add(&mut writer), Err(TableWriteError::RunFull));
    block_on(writer.abandon(), || ());
}

#[test]
#[should_panic(expected = "entries out of order")]
fn entries_out_of_order_are_a_bug_of_the_caller() {
    TestVolume::new(1 << 20, 512, 0).write(
        5,
        TableWriterConfig::default(),
        &[inline(b"key", 3, b""), inline(b"key", 4, b"")],
    );
}

/// A volume on a disk that completes operations one by one, in random order.
struct SlowVolume {
    disk: PowerLossDisk,
    random: RefCell<Prng>,
    volume: TestVolume,
    completed: Cell<u64>,
    /// The most writes in flight and bytes of buffers in use, whenever a future waited.
    most_writes: Cell<u64>,
    most_bytes: Cell<usize>,
}

impl SlowVolume {
    fn new(seed: u64, pool_bytes: usize) -> SlowVolume {
        let disk = PowerLossDisk::new(vec![0; 8 << 20], BLOCK_BYTES);
        SlowVolume {
            volume: TestVolume::on(Rc::new(disk.clone()), 512, 1 << 20, pool_bytes),
            disk,
            random: RefCell::new(Prng::new(seed)),
            completed: Cell::new(0),
            most_writes: Cell::new(0),
            most_bytes: Cell::new(0),
        }
    }

    fn run<T>(&self, future: impl Future<Output = T>) -> T {
        block_on(future, || {
            self.most_writes.set(self.most_writes.get().max(self.in_flight()));
            self.most_bytes.set(self.most_bytes.get().max(self.volume.io.pool.in_use_bytes()));
            assert!(self.disk.complete_one(&mut self.random.borrow_mut()), "nothing is in flight");
            self.completed.set(self.completed.get() + 1);
        })
    }

    /// Writes in flight. REQUIRES: there were no reads.
    fn in_flight(&self) -> u64 {
        self.volume.writes.get() - self.completed.get()
    }

    fn writer(&self) -> TableWriter {
        let TestVolume { io, .. } = &self.volume;
        TableWriter::new(Rc::clone(io), 5, self.volume.run(), TableWriterConfig::default())
    }
}

async fn add_all(writer: &mut TableWriter, entries: &[OwnedEntry]) -> Result<(), TableWriteError> {
    for entry in entries {
        writer.add(&entry.as_entry()).await?;
    }
    Ok(())
}

#[test]
fn writes_overlap_and_their_memory_is_bounded() {
    let slow = SlowVolume::new(1, 64 << 20);
    let (entries, mut writer) = (numbered(4000, 1000), slow.writer());
    slow.run(add_all(&mut writer, &entries)).expect("space and no fault");
    let table = slow.run(writer.finish()).expect("no fault");
    assert_eq!((table.entries, slow.most_writes.get()), (4000, WRITES_MAX as u64));
    assert!(slow.most_bytes.get() <= (WRITES_MAX + 1) * WRITE_BYTES, "{} bytes", slow.most_bytes.get());
    assert_eq!((slow.volume.io.pool.in_use_bytes(), slow.in_flight()), (0, 0));
    let reader = slow.volume.reader(&table);
    for entry in entries.iter().step_by(7) {
        let reading = reader.get(SearchKey::new(&entry.key), u64::MAX);
        let found = block_on(reading, || {
            slow.disk.complete_one(&mut slow.random.borrow_mut());
        });
        let found = found.expect("no fault").expect("it is there");
        assert_eq!(OwnedEntry::of(found.entry(&entry.key)), *entry);
    }
}

#[test]
fn a_failed_write_ends_the_table_with_nothing_in_flight() {
    let (mut failed_adds, mut failed_ends) = (0, 0);
    for skip in 0.. {
        let slow = SlowVolume::new(u64::from(skip), 64 << 20);
        slow.volume.faults.add(FaultRule::always(OpFilter::Write, InjectedFault::Error(28)).once(skip));
        let error = EngineError::Device { error: DeviceError::Io(28), place: slow.volume.io.place };
        let (entries, mut writer) = (numbered(4000, 1000), slow.writer());
        match slow.run(add_all(&mut writer, &entries)) {
            Ok(()) => match slow.run(writer.finish()) {
                Err(finished) => {
                    assert_eq!(finished, error);
                    failed_ends += 1;
                }
                // The table has fewer writes.
                Ok(_) => break,
            },
            Err(added) => {
                assert_eq!((added, slow.in_flight()), (TableWriteError::Engine(error), 0));
                let submitted = slow.volume.writes.get();
                // And it stays so.
                let last = entries.last().expect("entries").as_entry();
                assert_eq!(slow.run(writer.add(&last)), Err(added));
                assert_eq!(slow.run(writer.finish()), Err(error));
                assert_eq!(slow.volume.writes.get(), submitted, "a write after a failure");
                failed_adds += 1;
            }
        }
        assert_eq!((slow.in_flight(), slow.volume.io.pool.in_use_bytes()), (0, 0), "write {skip}");
    }
    // 4 MB in writes of 256 KiB.
    assert!(failed_adds + failed_ends == 16 || failed_adds + failed_ends == 17);
    assert!(failed_adds > 8 && failed_ends > 2, "{failed_adds} and {failed_ends}");
}

#[test]
fn an_abandoned_table_waits_for_its_writes() {
    let (slow, entries) = (SlowVolume::new(1, 64 << 20), numbered(700, 1000));
    let mut writer = slow.writer();
    block_on(add_all(&mut writer, &entries), || panic!("it waits")).expect("space and no fault");
    assert_eq!(slow.in_flight(), 1);
    slow.run(writer.abandon());
    assert_eq!((slow.in_flight(), slow.volume.io.pool.in_use_bytes()), (0, 0));
}

#[test]
fn few_buffers_make_a_writer_slow_and_none_make_it_fail() {
    for (buffers, is_enough) in [(0, false), (1, true), (2, true)] {
        let slow = SlowVolume::new(1, buffers * WRITE_BYTES);
        let (entries, mut writer) = (numbered(4000, 1000), slow.writer());
        let added = slow.run(add_all(&mut writer, &entries));
        let no_memory = TableWriteError::Engine(EngineError::NoMemory);
        assert_eq!(added, if is_enough { Ok(()) } else { Err(no_memory) });
        assert_eq!(slow.run(writer.finish()).is_ok(), is_enough);
        assert!(slow.most_writes.get() <= buffers as u64);
    }
}

#[test]
fn gets_read_each_part_once_and_filters_save_reads() {
    let volume = TestVolume::new(8 << 20, 512, 16 << 20);
    let entries = numbered(5000, 100);
    let table = volume.write(5, TableWriterConfig::default(), &entries);
    let reads = |wanted, what| assert_eq!(volume.reads.replace(0), wanted, "{what}");
    reads(0, "a writer reads nothing");
    block_on(volume.reader(&table).prefetch_index(), || ());
    reads(2, "index and filter");
    let get = |key: u64| volume.get(&table, &key.to_be_bytes(), u64::MAX).expect("no fault").is_some();
    assert!(get(17) && get(17) && get(18));
    reads(1, "the block of both keys");
    for key in 5000..15_000 {
        assert!(!get(key));
    }
    let statistics = volume.io.counters.statistics();
    assert_eq!(statistics.filter_uses, 10_003);
    assert_eq!(statistics.filter_exclusions + statistics.filter_errors, 10_000);
    assert!((20..200).contains(&statistics.filter_errors), "{statistics:?}");
    assert_eq!(volume.get(&table, &17u64.to_be_bytes(), 3), Ok(None));
    let after = volume.io.counters.statistics();
    assert_eq!(after.filter_errors, statistics.filter_errors, "the key is there, and newer");
}

#[test]
fn what_was_prefetched_is_not_read_again() {
    let volume = TestVolume::new(8 << 20, 512, 16 << 20);
    let entries = numbered(3000, 100);
    let table = volume.write(5, TableWriterConfig::default(), &entries);
    block_on(
        async {
            let config = TableCursorConfig { prefetches_blocks: false, ..TableCursorConfig::ITERATOR };
            let mut cursor = volume.cursor(&table, config);
            cursor.prefetch_next().await;
            assert_eq!(volume.reads.replace(0), 0, "the cursor is nowhere");
            cursor.seek(Position::START).await.expect("no fault");
            assert_eq!(volume.reads.replace(0), 2, "index and block");
            drop(cursor.prefetch_next());
            assert_eq!(volume.reads.replace(0), 0, "a future that was not polled");
            cursor.prefetch_next().await;
            cursor.prefetch_next().await;
            assert_eq!(volume.reads.replace(0), 1);
            // Blocks of 4 KiB, entries of 113 bytes: 36 in each.
            for entry in &entries[..70] {
                assert_eq!(at(&cursor).as_ref(), Some(entry));
                cursor.next().await.expect("no fault");
            }
            assert_eq!(volume.reads.replace(0), 0);
            cursor.seek(Position::before(&entries[2000].key)).await.expect("no fault");
            volume.reads.set(0);
            cursor.prefetch_prev().await;
            assert_eq!(volume.reads.replace(0), 1);
            for entry in entries[1900..2000].iter().rev() {
                cursor.prev().await.expect("no fault");
                assert_eq!(at(&cursor).as_ref(), Some(entry));
            }
            assert!((1..=2).contains(&volume.reads.get()), "100 entries back are two blocks back or three");
        },
        || (),
    );
}

#[test]
fn what_a_scan_has_read_ahead_is_not_read_again_though_gets_need_the_cache() {
    let volume = TestVolume::new(8 << 20, 512, 16 << 20);
    let entries = numbered(3000, 100);
    let table = volume.write(5, TableWriterConfig::default(), &entries);
    // As many blocks as the cache has, none of which is used again.
    let mut others = 100..;
    let mut fill_cache = || {
        for other in others.by_ref().take(6000) {
            let part = TablePart::Data(data_block(3000, Vec::with_capacity));
            volume.io.cache.insert(other, PartName::Data(0), part);
        }
    };
    let mut reads_of_scan = |is_disturbed: bool| {
        fill_cache();
        volume.reads.set(0);
        let mut cursor = volume.cursor(&table, TableCursorConfig::ITERATOR);
        let scan = async {
            cursor.seek(Position::START).await.expect("no fault");
            for (entry, number) in entries.iter().zip(1..) {
                assert_eq!(at(&cursor).as_ref(), Some(entry));
                if is_disturbed && number % 300 == 0 {
                    fill_cache();
                }
                cursor.next().await.expect("no fault");
            }
        };
        block_on(scan, || ());
        volume.reads.get()
    };
    // The first two find how long scans are, and that the index is needed often.
    let [_, _, quiet, disturbed] = [false, false, false, true].map(&mut reads_of_scan);
    assert!((4..20).contains(&quiet), "{quiet} reads of a scan of 84 blocks");
    assert_eq!(disturbed, quiet);
}

#[test]
fn reads_ahead_of_idle_cursors_leave_half_of_the_buffers() {
    let slow = SlowVolume::new(4, 512 << 10);
    let (entries, mut writer) = (numbered(8000, 100), slow.writer());
    slow.run(add_all(&mut writer, &entries)).expect("space and no fault");
    let table = slow.run(writer.finish()).expect("no fault");
    let mut idle = Vec::new();
    for (index, first) in (0..7500).step_by(50).enumerate() {
        let mut cursor = slow.volume.cursor(&table, TableCursorConfig::ITERATOR);
        let moves = async {
            cursor.seek(Position::before(&entries[first].key)).await.expect("a buffer");
            for _ in 0..150 {
                match index % 2 {
                    0 => cursor.next().await.expect("a buffer"),
                    _ => cursor.prev().await.expect("a buffer"),
                }
            }
        };
        block_on(moves, || {
            slow.disk.complete_one(&mut slow.random.borrow_mut());
        });
        idle.push(cursor);
        // Buffers have whole pages.
        let used_bytes = slow.volume.io.pool.in_use_bytes();
        assert!(used_bytes <= (256 << 10) + 4096, "{used_bytes} bytes behind {index} cursors");
    }
    assert!(slow.volume.io.pool.in_use_bytes() > 0, "some have reads in flight");
}

#[test]
fn tables_in_one_cache_are_kept_apart() {
    let volume = TestVolume::new(8 << 20, 512, 16 << 20);
    // Equal keys, so equal filters, indexes and places of blocks.
    let tables: Vec<_> = (0..3u8)
        .map(|table| {
            let entries: Vec<OwnedEntry> =
                (0..500u64).map(|key| inline(&key.to_be_bytes(), key + 1, &[table; 100])).collect();
            let run = Extent { location: LOCATION + u64::from(table) * 1000, units: 1000 };
            let (io, config) = (Rc::clone(&volume.io), TableWriterConfig::default());
            let mut writer = TableWriter::new(io, u64::from(table), run, config);
            block_on(add_all(&mut writer, &entries), || ()).expect("space and no fault");
            (block_on(writer.finish(), || ()).expect("no fault"), entries)
        })
        .collect();
    for _ in 0..2 {
        for key in 0..500 {
            for (table, entries) in &tables {
                let found = volume.get(table, &entries[key].key, u64::MAX);
                assert_eq!(found.expect("no fault").as_ref(), Some(&entries[key]));
            }
        }
    }
    assert!(volume.reads.get() < 100, "{} reads: the blocks are in the cache", volume.reads.get());
}

#[test]
fn a_compaction_reads_far_and_keeps_nothing_in_the_cache() {
    let volume = TestVolume::new(16 << 20, 512, 16 << 20);
    let entries = numbered(10_000, 1000);
    let table = volume.write(5, TableWriterConfig::default(), &entries);
    block_on(
        async {
            let mut cursor = volume.cursor(&table, TableCursorConfig::COMPACTION);
            cursor.seek(Position::START).await.expect("no fault");
            for entry in &entries {
                assert_eq!(at(&cursor).as_ref(), Some(entry));
                cursor.next().await.expect("no fault");
            }
        },
        || (),
    );
    // 10.2 MB in reads of 256 KiB, of which each may end with a part of a block; the index; the seek's block; and one more at the metadata.
    assert!((40..46).contains(&volume.reads.get()), "{} reads", volume.reads.get());
    assert_eq!(volume.io.cache.used_bytes(), 0);
}
