//! A drive with a log store under load: formatted and filled once, then opened with several settings for phases of load.
//!
//! ```text
//!   new: format, open ─▶ put all objects ─▶ compacted ─▶ close        run: open ─▶ phases ─▶ close, for each setting
//!   copied: the same drive in the same state, for another setting
//! ```
//! In: the objects to store; settings of the engine with phases of load. Out: [`LoadStats`] of each phase. Filling the store is not measured.
//!
//! Invariant: results are a function of the arguments. What a phase writes is there in the next.

use super::load_client::{Arrivals, Load, LoadKind, StoredObjects, run_load};
use super::load_stats::{LoadStats, Moment};
use super::parameters::{POOL_BYTES, VALUE_BYTES_MAX, command_cost};
use crate::simulation::engine_on_drive::{DriveCore, run_engine};
use crate::simulation::ssd_device::{ModelledDrive, SharedSsd};
use futures_util::stream::{FuturesUnordered, StreamExt};
use octokv_base::{Buffer, BufferPool, Lba, Nanos, Prng};
use octokv_device::Device;
use octokv_device::ssd_model::{DriveProfile, SsdModel};
use octokv_engine::log::handle::LogEngine;
use octokv_engine::log::open::open_with;
use octokv_engine::log::settings::LogSettings;
use octokv_engine::log::volume::LogVolume;
use octokv_engine::{Durability, Engine, EngineKind, FormatConfig, OpenConfig, Volume, WallClock};
use octokv_runtime::ReactorHandle;
use octokv_runtime::cpu_accounting::CpuTimeReader;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

/// Puts in flight while the store is filled. That time does not matter; with more, the first segments of a store are never idle, and are not
/// split before they are full.
const FILL_DEPTH: usize = 16;

/// The drive, and the volume and objects on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogStoreConfig {
    /// The drive.
    pub drive: DriveProfile,
    /// Bytes of the volume, at most the drive's.
    pub volume_bytes: u64,
    /// Bytes of a logical block, and of a unit of the volume.
    pub unit_bytes: u32,
    /// Bytes of a chunk.
    pub chunk_bytes: u32,
    /// Stores of the volume.
    pub stores: u16,
    /// The objects.
    pub objects: StoredObjects,
    /// Seed of all random choices.
    pub seed: u64,
}

/// How the engine is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogStoreSettings {
    /// When puts are acknowledged; the paper's when the drive has them.
    pub durability: Durability,
    /// Segments that a compaction handles at once.
    pub sub_compactions: usize,
    /// Compactions at once.
    pub compactions: usize,
    /// Whether a round begins beside the end of the one before, as in a node.
    pub overlaps_rounds: bool,
}

impl Default for LogStoreSettings {
    /// Those of the engine, with one compaction at once: figure 13b varies that.
    fn default() -> LogStoreSettings {
        LogStoreSettings {
            durability: Durability::Completed,
            sub_compactions: 8,
            compactions: 1,
            overlaps_rounds: true,
        }
    }
}

/// A phase of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadPhase {
    /// Requests on the engine.
    Requests(Load),
    /// Compaction of all that has garbage, and nothing else.
    Compaction,
    /// Reads of one block each from random written pages of the drive, without the engine: so many in flight, so many in all.
    DriveReads(usize, u32),
}

/// The simulated drive with its store.
pub struct LogStoreExperiment {
    drive: DriveCore,
    ssd: Rc<RefCell<SharedSsd>>,
    core: CpuTimeReader,
    config: LogStoreConfig,
}

impl LogStoreExperiment {
    /// Formats the drive, puts the objects and compacts what that left.
    ///
    /// # Errors
    /// A message if the engine failed.
    pub fn new(config: LogStoreConfig) -> Result<LogStoreExperiment, String> {
        let model = SsdModel::new(config.drive, config.unit_bytes);
        let ssd = SharedSsd::new(model, config.unit_bytes as usize);
        let experiment = LogStoreExperiment::on_drive(ssd, config)?;
        let (devices, format) = ([Rc::clone(experiment.drive.device())], experiment.format());
        experiment.drive.run(async move {
            <Arc<LogVolume>>::format(&devices, &format).await.map_err(|error| format!("format: {error}"))
        })?;
        let measured = config.objects.count;
        let fill = Load {
            kind: LoadKind::Fill,
            depth: FILL_DEPTH,
            arrivals: Arrivals::WhenOthersEnd,
            warm_up: 0,
            measured,
            seed: config.seed,
        };
        let phases = [LoadPhase::Requests(fill), LoadPhase::Compaction];
        experiment.run(LogStoreSettings::default(), &phases)?;
        Ok(experiment)
    }

    fn format(&self) -> FormatConfig {
        FormatConfig {
            engine: EngineKind::Log,
            unit_bytes: Some(self.config.unit_bytes),
            value_bytes_max: VALUE_BYTES_MAX,
            partitions: self.config.stores,
            chunk_bytes: Some(self.config.chunk_bytes),
            seed: self.config.seed,
            ..FormatConfig::default()
        }
    }

    /// Another drive with the same store, in the same state.
    ///
    /// # Errors
    /// A message if the drive cannot be opened.
    pub fn copied(&self) -> Result<LogStoreExperiment, String> {
        let (ssd, config) = (self.ssd.borrow().copied(), self.config);
        let experiment = LogStoreExperiment::on_drive(ssd, config)?;
        // The times of the drive's state are those of its simulation.
        experiment.drive.wait_until(self.drive.now());
        Ok(experiment)
    }

    fn on_drive(ssd: Rc<RefCell<SharedSsd>>, config: LogStoreConfig) -> Result<LogStoreExperiment, String> {
        let blocks = config.volume_bytes / u64::from(config.unit_bytes);
        let drive = DriveCore::new(config.seed, |sim| {
            ModelledDrive::new(&ssd, (blocks, false), sim).with_command_cost(command_cost())
        })?;
        let core = drive.handle().cpu_time().reader();
        Ok(LogStoreExperiment { drive, ssd, core, config })
    }

    /// Opens the store with settings, and runs phases, one after the other.
    ///
    /// # Errors
    /// A message if the engine failed, or a value was wrong.
    pub fn run(&self, settings: LogStoreSettings, phases: &[LoadPhase]) -> Result<Vec<LoadStats>, String> {
        let (device, handle) = (Rc::clone(self.drive.device()), self.drive.handle().clone());
        let (ssd, core, objects) = (Rc::clone(&self.ssd), self.core.clone(), self.config.objects);
        let (phases, seed, format) = (phases.to_vec(), self.config.seed, self.format());
        self.drive.run(async move {
            let pool = BufferPool::new(POOL_BYTES);
            let adjust = |of_engine: &mut LogSettings| {
                of_engine.sub_compactions = settings.sub_compactions;
                of_engine.compactions = settings.compactions;
                of_engine.overlaps_rounds = settings.overlaps_rounds;
                // The paper reads a segment for each operation, and a record for each that moves.
                of_engine.recent_image_bytes = 0;
                of_engine.prepared_bytes = 0;
            };
            let opened = open_with(&device, &pool, open_config(settings), &format, adjust).await;
            let volume = opened.map_err(|error| format!("open: {error}"))?;
            let engine = LogEngine::new(Arc::clone(&volume), Rc::clone(&device), pool);
            let moment = || Moment {
                at: handle.now(),
                commands: ssd.borrow().commands(),
                ssd: ssd.borrow().model().statistics().clone(),
                engine: engine.statistics(),
                core: core.stage_times().into_iter().fold(Nanos::ZERO, |sum, span| sum + span),
            };
            let work = async {
                let mut stats = Vec::new();
                for phase in phases {
                    stats.push(match phase {
                        LoadPhase::Requests(load) => {
                            run_load(&engine, &handle, objects, load, moment).await?
                        }
                        LoadPhase::Compaction => compact(&engine, moment).await?,
                        LoadPhase::DriveReads(depth, reads) => {
                            let pages = ssd.borrow().written_pages();
                            read_drive(&*device, &handle, &pages, (depth, reads), seed, moment).await?
                        }
                    });
                }
                Ok(stats)
            };
            run_engine(&engine, &volume, &handle, work).await
        })
    }
}

fn open_config(settings: LogStoreSettings) -> OpenConfig {
    OpenConfig {
        durability: settings.durability,
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

async fn compact(engine: &LogEngine, moment: impl Fn() -> Moment) -> Result<LoadStats, String> {
    let before = moment();
    engine.compact_all().await.map_err(|error| format!("compaction: {error}"))?;
    Ok(LoadStats { before, after: moment(), ..LoadStats::default() })
}

/// Reads one block from each of random pages.
async fn read_drive(
    device: &dyn Device,
    handle: &ReactorHandle,
    pages: &[Lba],
    (depth, reads): (usize, u32),
    seed: u64,
    moment: impl Fn() -> Moment,
) -> Result<LoadStats, String> {
    let (random, left, latency_ns) =
        (RefCell::new(Prng::new(seed)), Cell::new(reads), RefCell::new(Vec::new()));
    let block_bytes = device.geometry().block_bytes as usize;
    let before = moment();
    let mut readers: FuturesUnordered<_> = (0..depth)
        .map(|_| async {
            while left.get() > 0 {
                left.set(left.get() - 1);
                let page = pages[random.borrow_mut().below(pages.len() as u64) as usize];
                let began = handle.now();
                let read = device.read(page, Buffer::zeroed(block_bytes)).await;
                read.result.map_err(|error| format!("read: {error}"))?;
                latency_ns.borrow_mut().push((handle.now() - began).0 as u32);
            }
            Ok::<(), String>(())
        })
        .collect();
    while let Some(ended) = readers.next().await {
        ended?;
    }
    drop(readers);
    let latency_ns = [latency_ns.into_inner(), Vec::new(), Vec::new()];
    Ok(LoadStats { before, after: moment(), latency_ns })
}
