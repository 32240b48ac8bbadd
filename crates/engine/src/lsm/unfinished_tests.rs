//! Flushes and compactions that are dropped half-way, as when maintenance is cancelled: the space of what they wrote is free again, once no write to it is in flight.

use super::compaction_run::RunPace;
use super::core::LsmCore;
use super::open_with;
use super::settings::TreeSettings;
use super::space_reserve::SpaceDemand;
use super::volume::LsmVolume;
use crate::common::record;
use crate::conformance::{key_of, record_of, value_of};
use crate::{
    Durability, EngineError, EngineKind, FormatConfig, OpenConfig, PutMode, PutOutcome, PutValue, Volume,
    WallClock,
};
use octokv_base::{BufferPool, Prng};
use octokv_device::Device;
use octokv_device::power_loss::PowerLossDisk;
use octokv_runtime::block_on;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Waker};

fn make_small(settings: &mut TreeSettings) {
    settings.memtable_bytes = 8 << 10;
    settings.table_bytes = 8 << 10;
    settings.segment_bytes = 32 << 10;
    settings.reserve_bytes = 2 << 20;
    settings.compaction.level0_trigger = 2;
    settings.compaction.level1_bytes = 12 << 10;
    settings.compaction.multiplier = 2;
    settings.compaction.input_bytes_max = 256 << 10;
}

/// A volume on a disk that completes operations one by one, in random order.
struct SlowVolume {
    disk: PowerLossDisk,
    random: Prng,
    core: Rc<LsmCore>,
}

impl SlowVolume {
    /// With values in tables and in segments, of which a part is dead.
    fn new(seed: u64) -> SlowVolume {
        let disk = PowerLossDisk::new(vec![0; 24 << 20], 512);
        let (mut random, pool) = (Prng::new(seed), BufferPool::new(64 << 20));
        let device: Rc<dyn Device> = Rc::new(disk.clone());
        let format = FormatConfig {
            engine: EngineKind::Lsm,
            unit_bytes: Some(512),
            inline_bytes_max: 300,
            ..FormatConfig::default()
        };
        let config = OpenConfig {
            durability: Durability::PowerSafe,
            cores: 1,
            cache_bytes: 64 << 10,
            prepare_bytes: 0,
            compact_bytes_per_second: u64::MAX,
            tree: OpenConfig::TREE,
            swap_gap: OpenConfig::SWAP_GAP,
            clock: WallClock::default(),
            tokens: None,
        };
        let mut complete = || {
            disk.complete_one(&mut random);
        };
        let devices = [Rc::clone(&device)];
        block_on(<Arc<LsmVolume>>::format(&devices, &format), &mut complete).expect("formats");
        let opened = open_with(&device, &pool, config, &format, make_small);
        let volume = block_on(opened, &mut complete).expect("opens");
        let core = Rc::new(LsmCore::new(volume, 0, device, pool));
        let mut volume = SlowVolume { disk, random, core };
        for operation in 0..400 {
            let (key, bytes) = (key_of(operation % 160), if operation % 3 == 0 { 600 } else { 120 });
            let record = record_of(record::LAYOUT, &key, &value_of(&key, operation, bytes));
            let core = Rc::clone(&volume.core);
            let put = core.put(&key, PutValue::new(record, bytes), PutMode::Upsert.into());
            assert_eq!(volume.run(put), Ok(PutOutcome::Stored));
        }
        volume
    }

    fn run<T>(&mut self, future: impl Future<Output = T>) -> T {
        block_on(future, || {
            self.disk.complete_one(&mut self.random);
        })
    }

    /// The units that are allocated, though no version has them.
    fn unused_units(&self) -> u64 {
        let volume = &self.core.volume;
        volume.release_reclaimed();
        let referenced: u64 = volume.version().extents().map(|extent| extent.units).sum();
        volume.space.units() - volume.space.free_units() - referenced
    }

    /// Lets operations end that were dropped half-way.
    fn settle(&mut self) {
        let core = Rc::clone(&self.core);
        let mut abandoned = pin!(core.abandoned.run());
        while !core.volume.is_idle() {
            let _ = abandoned.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            self.disk.complete_one(&mut self.random);
        }
    }
}

type Work<'a> = Pin<Box<dyn Future<Output = Result<(), EngineError>> + 'a>>;

/// Drops the work after each number of polls with which it is half done. Gives how often its space was free at once, and how often writes to it were in flight.
fn drop_half_way(seed: u64, work: impl Fn(&LsmCore) -> Work<'_>) -> (u32, u32) {
    let (mut at_once, mut later) = (0, 0);
    for polls in (1..).step_by(4) {
        let mut volume = SlowVolume::new(seed);
        let core = Rc::clone(&volume.core);
        let mut future = work(&core);
        for _ in 0..polls {
            if future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready() {
                assert_eq!(volume.unused_units(), 0, "it has ended");
                return (at_once, later);
            }
            if volume.random.one_in(2) {
                volume.disk.complete_one(&mut volume.random);
            }
        }
        // Before that it must not be dropped.
        if !core.volume.is_idle() {
            continue;
        }
        let began = volume.unused_units() > 0;
        drop(future);
        match volume.unused_units() {
            0 if began => at_once += 1,
            0 => {}
            _ => {
                later += 1;
                assert!(!core.volume.is_idle(), "writes are in flight");
                volume.settle();
            }
        }
        assert_eq!(volume.unused_units(), 0, "after {polls} polls");
    }
    unreachable!("it ends")
}

fn flush_and_compact(core: &LsmCore) -> Work<'_> {
    Box::pin(async move {
        core.flush_memtables().await?;
        core.compact_step(&RunPace { handle: None }, SpaceDemand::Garbage).await.map(drop)
    })
}

#[test]
fn the_space_of_work_that_is_dropped_is_free_when_its_writes_have_ended() {
    for seed in 0..2 {
        let (at_once, later) = drop_half_way(seed, flush_and_compact);
        assert!(at_once > 0 && later > 0, "{at_once} and {later}");
    }
}
