//! Reads that the device fails while a volume of the ordered engine is maintained, in simulated time: nothing is lost, what needs no such read goes on, and once the
//! device reads again, all of the volume is compacted.

use crate::common::lsm_fixture::{LsmFixture, make_small};
use crate::common::maintained_volume::Maintained;
use crate::common::pool;
use crate::common::stable_memory::StableMemory;
use crate::lsm_faults::AllPairs;
use octokv_base::{Key, Nanos};
use octokv_device::Device;
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_engine::conformance::{EngineFixture, key_of};
use octokv_engine::lsm::{LsmEngine, LsmVolume, open_with};
use octokv_engine::{
    Engine, EngineError, IteratorOptions, IteratorProgress, PostponedStatistics, ProblemKind, PutOutcome,
    RecordProblem, Volume,
};
use octokv_runtime::block_on;
use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

const UNIT_BYTES: u64 = 512;
const KEYS: u64 = 400;
const EIO: InjectedFault = InjectedFault::Error(5);
const ENODATA: InjectedFault = InjectedFault::Error(61);

impl Maintained<LsmEngine> {
    fn new(compact_bytes_per_second: u64) -> Maintained<LsmEngine> {
        let (fixture, plan) = (LsmFixture::default(), FaultPlan::default());
        let memory: Rc<dyn Device> = StableMemory::new(24 << 20, UNIT_BYTES as u32);
        block_on(fixture.format(Rc::clone(&memory)), || ());
        let device: Rc<dyn Device> = Rc::new(FaultDevice::new(memory, plan.clone()));
        let mut config = fixture.open_config();
        config.compact_bytes_per_second = compact_bytes_per_second;
        let pool = pool();
        let opened = open_with(&device, &pool, config, &fixture.format, make_small);
        let volume = block_on(opened, || ()).expect("opens");
        let engine = LsmEngine::new(Arc::clone(&volume), 0, Rc::clone(&device), pool);
        Maintained::begin(engine, device, plan, KEYS)
    }

    /// The data blocks of a table that lies in the middle of its level, with its number.
    fn table_of(&self, level: usize) -> (u64, Range<u64>) {
        let version = self.engine.volume().version();
        let table = version.level(level).nth(version.level_tables(level) / 2).expect("it has tables").clone();
        (table.id(), table.extent().location..table.extent().location + table.extent().units)
    }

    fn has_table(&self, id: u64) -> bool {
        self.engine.volume().version().tables().any(|(_, table)| table.id() == id)
    }

    fn compactions(&self) -> u64 {
        self.engine.statistics().tree.expect("it has one").compactions
    }

    fn level0_tables(&self) -> usize {
        self.engine.volume().version().level0().len()
    }

    /// All is read and compacted, nothing was lost, and no space is used but that of the version.
    fn check_healed(&mut self) {
        assert_eq!(self.read_all(), []);
        self.write_for(Nanos::from_secs(3));
        self.advance(Nanos::from_secs(65));
        assert_eq!(self.read_all(), []);
        assert_eq!(self.engine.volume().version().lost().as_slice(), []);
        let level0_runs = self.engine.volume().version().level0_runs();
        assert!(level0_runs < 4, "{level0_runs} runs in level 0");
        block_on(self.engine.compact_all(), || ()).expect("compacts");
        assert_eq!(self.read_all(), []);
        let version = self.engine.volume().version();
        let units: u64 = version.extents().map(|extent| extent.units).sum();
        assert_eq!(self.engine.statistics().used_bytes, units * UNIT_BYTES);
    }
}

#[test]
fn a_device_that_fails_all_reads_for_a_time_costs_nothing_and_is_reported_once() {
    let mut volume = Maintained::<LsmEngine>::new(u64::MAX);
    for seconds in [1, 5, 15] {
        volume.plan.add(FaultRule::always(OpFilter::Read, EIO));
        volume.write_for(Nanos::from_secs(seconds));
        let errors = volume.read_all();
        assert!(!errors.is_empty(), "tables are read");
        assert!(errors.iter().all(|(_, error)| matches!(error, EngineError::Device { .. })), "{errors:?}");
        let reports = volume.take_reports();
        assert!(matches!(reports[..], [EngineError::Device { .. }]), "{seconds} s: {reports:?}");
        volume.plan.clear();
        volume.check_healed();
        assert_eq!(volume.take_reports(), []);
        // What failed is forgotten.
        volume.advance(Nanos::from_secs(700));
        volume.write_for(Nanos::from_secs(3));
    }
}

#[test]
fn a_table_that_stays_unreadable_stops_neither_writers_nor_other_compactions() {
    for level in [1, 2] {
        let mut volume = Maintained::<LsmEngine>::new(u64::MAX);
        volume.write_for(Nanos::from_secs(3));
        volume.advance(Nanos::from_secs(3));
        let (id, blocks) = volume.table_of(level);
        volume.fail(blocks, EIO);
        let before = volume.compactions();
        for _ in 0..20 {
            volume.write_for(Nanos::from_secs(4));
            volume.advance(Nanos::from_secs(1));
            let level0 = volume.engine.volume().version();
            let depth = |key: &[u8]| level0.level0().iter().filter(|it| it.overlaps(key, key)).count();
            let deepest = (0..KEYS).map(|index| depth(key_of(index).as_bytes())).max().unwrap();
            assert!(deepest < 24, "level {level}: {deepest} tables of level 0 share keys");
        }
        assert!(volume.has_table(id), "level {level}: it cannot be read, and stays");
        let compactions = volume.compactions() - before;
        assert!(compactions > 100, "level {level}: {compactions} compactions beside it");
        let errors = volume.read_all();
        let is_device = |(_, error): &(u64, EngineError)| matches!(error, EngineError::Device { .. });
        assert!(errors.len() < KEYS as usize / 2 && errors.iter().all(is_device), "{errors:?}");
        assert_eq!(volume.take_reports().len(), 1, "level {level}");
        let postponed = || volume.engine.statistics().tree.expect("it has one").postponed;
        let PostponedStatistics { tables, segments, compactions } = postponed();
        assert!((tables, segments) == (1, 0) && (5..40).contains(&compactions), "{:?}", postponed());
        volume.plan.clear();
        volume.check_healed();
        assert_eq!(volume.engine.statistics().tree.expect("it has one").postponed.tables, 0);
        assert!(!volume.has_table(id), "level {level}: it is compacted");
    }
}

#[test]
fn a_table_of_level_0_that_stays_unreadable_stops_neither_writers_nor_other_compactions() {
    // Compactions only by callers: the tables stay in level 0.
    let mut volume = Maintained::<LsmEngine>::new(0);
    volume.write_all();
    block_on(volume.engine.flush_memtables(), || ()).expect("no fault");
    let newest = volume.engine.volume().version().level0()[0].clone();
    let extent = newest.extent();
    drop(newest);
    volume.fail(extent.location..extent.location + extent.units, EIO);
    for _ in 0..10 {
        volume.write_all();
        while matches!(block_on(volume.engine.compact_once(false), || ()), Ok(true) | Err(_)) {}
    }
    assert!(volume.level0_tables() < 40, "{} tables", volume.level0_tables());
    let version = volume.engine.volume().version();
    assert!(version.level_tables(1) > 0, "older tables are compacted");
    drop(version);
    volume.plan.clear();
    block_on(volume.engine.compact_all(), || ()).expect("compacts");
    assert_eq!((volume.read_all(), volume.level0_tables()), (Vec::new(), 0));
}

#[test]
fn a_volume_without_space_answers_the_error_of_the_device_that_it_cannot_compact() {
    let mut volume = Maintained::<LsmEngine>::new(u64::MAX);
    volume.plan.add(FaultRule::always(OpFilter::Read, EIO));
    let refused = (0..1_000_000).find_map(|number| {
        let index = number % KEYS;
        if number % 50 == 0 {
            volume.advance(Nanos::from_millis(50));
        }
        match volume.try_write(index) {
            Ok(PutOutcome::Stored) => {
                volume.model[index as usize] = volume.operations;
                None
            }
            refused => Some(refused),
        }
    });
    assert!(matches!(refused, Some(Err(EngineError::Device { .. }))), "{refused:?}");
    volume.plan.clear();
    volume.advance(Nanos::from_secs(65));
    volume.check_healed();
}

#[test]
fn values_that_cannot_be_read_for_a_time_are_moved_later() {
    let mut volume = Maintained::<LsmEngine>::new(u64::MAX);
    volume.write_for(Nanos::from_secs(1));
    let version = volume.engine.volume().version();
    let segments: Vec<u32> = version.segments().iter().map(|segment| segment.meta.id()).collect();
    for segment in version.segments().iter() {
        let extent = segment.meta.extent();
        volume.fail(extent.location..extent.location + extent.units, EIO);
    }
    drop(version);
    // Every value but those of a few keys is replaced.
    for _ in 0..20 {
        (0..KEYS).filter(|index| index % 40 != 0).for_each(|index| volume.write(index));
        volume.advance(Nanos::from_secs(1));
    }
    let left = |volume: &Maintained<LsmEngine>| {
        let version = volume.engine.volume().version();
        segments.iter().filter(|id| version.segment(**id).is_some()).count()
    };
    assert!(left(&volume) > 0, "values in them are needed, and cannot be moved");
    volume.plan.clear();
    (0..KEYS).filter(|index| index % 40 != 0).for_each(|index| volume.write(index));
    volume.advance(Nanos::from_secs(70));
    volume.check_healed();
    assert_eq!(left(&volume), 0, "they are collected without a reopening");
}

#[test]
fn an_error_that_a_read_ahead_met_fails_no_call_after_it() {
    let volume = Maintained::<LsmEngine>::new(u64::MAX);
    let all: BTreeSet<Key> = (0..KEYS).map(key_of).collect();
    let mut failed = 0;
    for skip in 0..40 {
        for (calls, room) in (1..12).flat_map(|calls| [(calls, 1), (calls, 2)]) {
            // In memory are other blocks than those that the iterator needs.
            assert_eq!(volume.read_all(), []);
            let options = IteratorOptions { reverse: skip % 2 == 1, ..IteratorOptions::default() };
            let iterator = block_on(volume.engine.create_iterator(options), || ()).unwrap().unwrap();
            let mut sink = AllPairs { room: 0, ..AllPairs::default() };
            volume.plan.add(FaultRule { skip, ..FaultRule::always(OpFilter::Read, EIO) });
            for _ in 0..calls {
                sink.room = room;
                failed += u32::from(block_on(volume.engine.next_pairs(&iterator, &mut sink), || ()).is_err());
            }
            volume.plan.clear();
            sink.room = usize::MAX;
            let mut next = || block_on(volume.engine.next_pairs(&iterator, &mut sink), || ());
            while next().expect("the device reads again") != IteratorProgress::AtEnd {}
            assert!(sink.pairs.keys().eq(&all), "after {skip} reads and {calls} calls");
        }
    }
    assert!(failed > 10, "{failed} calls failed");
}

#[test]
fn a_block_that_the_medium_has_lost_costs_its_keys_and_holds_up_nothing() {
    let mut volume = Maintained::<LsmEngine>::new(u64::MAX);
    volume.write_for(Nanos::from_secs(3));
    volume.advance(Nanos::from_secs(3));
    let (id, blocks) = volume.table_of(2);
    volume.fail(blocks.start + 2..blocks.start + 3, ENODATA);
    block_on(volume.engine.compact_all(), || ()).expect("compacts");
    assert!(!volume.has_table(id));
    let lost = volume.engine.volume().version().lost().as_slice().to_vec();
    assert!(!lost.is_empty());
    // The device reads the block again, but what was lost stays lost until it is written.
    volume.plan.clear();
    let errors = volume.read_all();
    let is_lost = |(index, error): &(u64, EngineError)| {
        let is_in = lost
            .iter()
            .any(|range| (&range.first_key[..]..=&range.last_key[..]).contains(&key_of(*index).as_bytes()));
        is_in && matches!(error, EngineError::Corrupt { .. })
    };
    // Two blocks at most: another table may be written to the place, which fails on.
    assert!(!errors.is_empty() && errors.len() < KEYS as usize / 3, "{} keys", errors.len());
    assert!(errors.iter().all(is_lost), "{errors:?}");
    volume.write_all();
    assert_eq!(volume.read_all(), []);
}

#[test]
fn a_verification_tells_device_errors_from_damage_and_names_the_blocks() {
    let volume = Maintained::<LsmEngine>::new(u64::MAX);
    block_on(volume.engine.compact_all(), || ()).expect("compacts");
    let extents: Vec<_> = volume.engine.volume().version().extents().collect();
    let blocks = extents.iter().flat_map(|extent| extent.location..extent.location + extent.units);
    let (mut table_blocks, mut values) = (0, 0);
    for block in blocks.step_by(5) {
        for (fault, is_damage) in [(EIO, false), (ENODATA, true)] {
            volume.fail(block..block + 1, fault);
            let devices = [Rc::clone(&volume.device)];
            let report =
                block_on(<Arc<LsmVolume>>::verify(&devices, &pool(), &mut |_, _| ()), || ()).expect("loads");
            volume.plan.clear();
            for RecordProblem { lba, key, kind, .. } in report.problems {
                assert_eq!(kind != ProblemKind::Unreadable, is_damage, "block {block}: {kind} at {lba}");
                assert!((lba..lba + 9).contains(&block), "block {block}: {kind} at {lba}");
                *if key.is_some() { &mut values } else { &mut table_blocks } += 1;
            }
        }
    }
    assert!(table_blocks > 10 && values > 10, "{table_blocks} blocks of tables, {values} values");
}
