//! A key-value drive under scans: the engine on the flash model, filled once and then scanned with several settings.
//!
//! ```text
//!   new: format, open ─▶ put all pairs ─▶ flushed and compacted ─▶ close        scan: open ─▶ scans ─▶ close, for each setting
//! ```
//! In: what is stored and in which order it was written; settings of the iterators with scans. Out: [`ScanStats`] of each scan. The
//! time in which the pairs are written does not matter.
//!
//! Invariant: every setting finds the same store. Results are a function of the arguments.

use super::parameters::{CommandCosts, TABLE_CACHE_BYTES, WRITERS, flash_profile};
use super::scan_client::{ScanConfig, ScanStats, StoredPairs, put_pairs, run_scans};
use crate::simulation::engine_on_drive::{DriveCore, run_engine};
use crate::simulation::ssd_device::{ModelledDrive, SharedSsd};
use octokv_base::{BufferPool, Nanos, Prng};
use octokv_device::ssd_model::SsdModel;
use octokv_engine::lsm::prefetch_degree::PrefetchMode;
use octokv_engine::lsm::settings::TreeSettings;
use octokv_engine::lsm::{LsmEngine, LsmVolume, open_with};
use octokv_engine::{Durability, Engine, FormatConfig, OpenConfig, Volume, WallClock};
use octokv_runtime::ReactorHandle;
use std::cell::RefCell;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

const POOL_BYTES: usize = 256 << 20;
const PAGE_BYTES: u64 = 4096;
/// How long the volume has to be idle before the tree counts as compacted.
const SETTLED_AFTER: Nanos = Nanos::from_secs(2);

/// The order in which the pairs were written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteOrder {
    /// That of the keys.
    InOrder,
    /// A random one, without repetition.
    AtRandom,
}

/// Read-ahead of iterators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadAhead {
    /// The prefetch degree D; `None` for the engine's own choice.
    pub degree: Option<u32>,
    /// Whether the index of the next table and the next block of keys and addresses are read ahead.
    pub index: bool,
}

impl ReadAhead {
    fn apply_to(self, settings: &mut TreeSettings) {
        settings.cache_bytes = TABLE_CACHE_BYTES;
        settings.prefetch = self.degree.map_or(PrefetchMode::Adaptive, PrefetchMode::Fixed);
        settings.iterator_cursors.prefetches_index = self.index;
        settings.iterator_cursors.table.prefetches_blocks = self.index;
    }
}

/// The simulated drive with its store.
pub struct IteratorExperiment {
    drive: DriveCore,
    pairs: StoredPairs,
    format: FormatConfig,
}

impl IteratorExperiment {
    /// Formats the drive and writes the pairs.
    ///
    /// # Errors
    /// A message if the engine failed.
    pub fn new(pairs: StoredPairs, order: WriteOrder, seed: u64) -> Result<IteratorExperiment, String> {
        let pages = device_bytes(pairs) / PAGE_BYTES;
        let ssd = SharedSsd::new(SsdModel::new(flash_profile(), PAGE_BYTES as u32), PAGE_BYTES as usize);
        let drive = DriveCore::new(seed, |sim| ModelledDrive::new(&ssd, (pages, false), sim))?;
        let format = FormatConfig {
            // Every value is in the value log, as in the paper.
            inline_bytes_max: 0,
            seed,
            ..FormatConfig::default()
        };
        let experiment = IteratorExperiment { drive, pairs, format };
        let (devices, format) = ([Rc::clone(experiment.drive.device())], experiment.format);
        experiment.drive.run(async move {
            <Arc<LsmVolume>>::format(&devices, &format).await.map_err(|error| format!("format: {error}"))
        })?;
        let numbers = Rc::new(RefCell::new(write_order(pairs.count, order, seed).into_iter()));
        let read_ahead = ReadAhead { degree: Some(0), index: false };
        experiment.with_engine(read_ahead, async move |engine, handle| {
            let writers = (0..WRITERS).map(|_| put_pairs(&*engine, pairs, Rc::clone(&numbers)));
            let mut writers: Vec<_> = writers.map(|writer| Some(Box::pin(writer))).collect();
            poll_fn(|context| {
                for writer in &mut writers {
                    let Some(future) = writer else { continue };
                    match future.as_mut().poll(context) {
                        Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                        Poll::Ready(Ok(())) => *writer = None,
                        Poll::Pending => {}
                    }
                }
                if writers.iter().all(Option::is_none) { Poll::Ready(Ok(())) } else { Poll::Pending }
            })
            .await?;
            engine.flush().await.map_err(|error| format!("flush: {error}"))?;
            // Compactions go on while there is something to compact.
            let mut before = engine.statistics();
            loop {
                handle.sleep(SETTLED_AFTER).await;
                let now = engine.statistics();
                if now == before {
                    return Ok(());
                }
                before = now;
            }
        })?;
        Ok(experiment)
    }

    /// Opens the store with a read-ahead, and runs scans, each list of them in turn.
    ///
    /// # Errors
    /// A message if the engine failed, or a pair was wrong.
    pub fn scan(&self, read_ahead: ReadAhead, scans: &[ScanConfig]) -> Result<Vec<ScanStats>, String> {
        let (pairs, scans) = (self.pairs, scans.to_vec());
        self.with_engine(read_ahead, async move |engine, handle| {
            let mut stats = Vec::new();
            for &scan in &scans {
                let costs = CommandCosts::of_the_paper();
                stats.push(run_scans(&*engine, &handle, costs, pairs, scan).await?);
            }
            Ok(stats)
        })
    }

    /// Opens the volume, runs `work` on it beside its maintenance, and closes it.
    fn with_engine<T: 'static>(
        &self,
        read_ahead: ReadAhead,
        work: impl AsyncFnOnce(Rc<LsmEngine>, ReactorHandle) -> Result<T, String> + 'static,
    ) -> Result<T, String> {
        let (devices, handle) = ([Rc::clone(self.drive.device())], self.drive.handle().clone());
        let format = self.format;
        self.drive.run(async move {
            let pool = BufferPool::new(POOL_BYTES);
            let adjust = |settings: &mut TreeSettings| read_ahead.apply_to(settings);
            let opened = open_with(&devices[0], &pool, open_config(), &format, adjust).await;
            let volume = opened.map_err(|error| format!("open: {error}"))?;
            let engine = Rc::new(volume.engine(0, &devices, pool));
            run_engine(&*engine, &volume, &handle, work(Rc::clone(&engine), handle.clone())).await
        })
    }
}

/// Room for the pairs, and as much again: the order of writes decides how much compactions need.
fn device_bytes(pairs: StoredPairs) -> u64 {
    let record_bytes = (u64::from(pairs.value_bytes) + 256).next_multiple_of(PAGE_BYTES);
    (2 * u64::from(pairs.count) * record_bytes).max(1 << 30).next_multiple_of(1 << 20)
}

fn write_order(count: u32, order: WriteOrder, seed: u64) -> Vec<u32> {
    let mut numbers: Vec<u32> = (0..count).collect();
    if order == WriteOrder::AtRandom {
        let mut random = Prng::new(seed);
        for last in (1..numbers.len()).rev() {
            numbers.swap(last, random.below(last as u64 + 1) as usize);
        }
    }
    numbers
}

fn open_config() -> OpenConfig {
    OpenConfig {
        durability: Durability::Completed,
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
