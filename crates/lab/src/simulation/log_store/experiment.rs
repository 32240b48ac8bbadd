//! A drive with a log store under load: formatted and filled once, then opened with several settings for phases of load.
//!
//! ```text
//!   new: format, open ─▶ put all objects ─▶ compacted ─▶ close        run: open ─▶ phases ─▶ close, for each setting
//! ```
//! In: the objects to store; settings of the engine with phases of load. Out: [`LoadStats`] of each phase. Filling the store is not measured.
//!
//! Invariant: results are a function of the arguments. What a phase writes is there in the next.

use super::load_client::{Load, LoadKind, StoredObjects, run_load};
use super::load_stats::{LoadStats, Moment};
use super::parameters::{POOL_BYTES, VALUE_BYTES_MAX, command_cost};
use crate::simulation::node::host_handle;
use crate::simulation::ssd_device::{ModelledDrive, SharedSsd};
use futures_util::future::{Either, join, select};
use futures_util::stream::{FuturesUnordered, StreamExt};
use octokv_base::{Buffer, BufferPool, Lba, Nanos, Prng};
use octokv_device::Device;
use octokv_device::ssd_model::{DriveProfile, SsdModel};
use octokv_engine::log::handle::LogEngine;
use octokv_engine::log::open::open_with;
use octokv_engine::log::settings::LogSettings;
use octokv_engine::log::volume::LogVolume;
use octokv_engine::{Durability, Engine, EngineKind, FormatConfig, OpenConfig, Volume, WallClock};
use octokv_node::OpenDevice;
use octokv_runtime::cpu_accounting::CpuTimeReader;
use octokv_runtime::simulated::{HostFailure, SimEnv, SimEnvConfig, SimHostId};
use octokv_runtime::{CoreWaker, ReactorHandle};
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;

/// Time of a reactor iteration without simulated work.
const MIN_ITERATION_COST: Nanos = Nanos(100);
/// The time limit of one phase list.
const RUN_LIMIT: Nanos = Nanos::from_secs(100_000);
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
}

impl Default for LogStoreSettings {
    /// Those of the engine.
    fn default() -> LogStoreSettings {
        LogStoreSettings { durability: Durability::Completed, sub_compactions: 8, compactions: 1 }
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
    sim: SimEnv,
    host: SimHostId,
    handle: ReactorHandle,
    device: Rc<dyn Device>,
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
        let sim = SimEnv::new(SimEnvConfig {
            iteration_cost_min: MIN_ITERATION_COST,
            ..SimEnvConfig::new(config.seed)
        });
        let host = sim.add_host();
        let handle = host_handle(&sim, host, CoreWaker::without_eventfd());
        let own = handle.clone();
        sim.add_reactor(host, handle.clone(), move |now| {
            let fired = own.begin_iteration(now);
            fired + own.poll_background() > 0
        });
        let model = SsdModel::new(config.drive, config.unit_bytes);
        let ssd = SharedSsd::new(model, config.unit_bytes as usize);
        let blocks = config.volume_bytes / u64::from(config.unit_bytes);
        let drive = ModelledDrive::new(&ssd, (blocks, false), &sim).with_command_cost(command_cost());
        let device = drive.open_for_core(&handle).map_err(|error| error.to_string())?;
        let core = handle.cpu_time().reader();
        let experiment = LogStoreExperiment { sim, host, handle, device, ssd, core, config };
        let (devices, format) = ([Rc::clone(&experiment.device)], experiment.format());
        experiment.run_future(async move {
            <Arc<LogVolume>>::format(&devices, &format).await.map_err(|error| format!("format: {error}"))
        })?;
        let measured = config.objects.count;
        let fill = Load { kind: LoadKind::Fill, depth: FILL_DEPTH, warm_up: 0, measured, seed: config.seed };
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

    /// Opens the store with settings, and runs phases, one after the other.
    ///
    /// # Errors
    /// A message if the engine failed, or a value was wrong.
    pub fn run(&self, settings: LogStoreSettings, phases: &[LoadPhase]) -> Result<Vec<LoadStats>, String> {
        let (device, format, handle) = (Rc::clone(&self.device), self.format(), self.handle.clone());
        let (ssd, core, objects) = (Rc::clone(&self.ssd), self.core.clone(), self.config.objects);
        let (phases, seed) = (phases.to_vec(), self.config.seed);
        self.run_future(async move {
            let pool = BufferPool::new(POOL_BYTES);
            let adjust = |of_engine: &mut LogSettings| {
                of_engine.sub_compactions = settings.sub_compactions;
                of_engine.compactions = settings.compactions;
            };
            let opened = open_with(&device, &pool, open_config(settings), &format, adjust).await;
            let volume = opened.map_err(|error| format!("open: {error}"))?;
            let engine = LogEngine::new(Arc::clone(&volume), Rc::clone(&device), pool);
            let failed = Cell::new(None);
            let moment = || Moment {
                at: handle.now(),
                commands: ssd.borrow().commands(),
                ssd: ssd.borrow().model().statistics().clone(),
                engine: engine.statistics(),
                core: core.stage_times().into_iter().fold(Nanos::ZERO, |sum, span| sum + span),
            };
            let done = {
                let body = async {
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
                    while !volume.is_idle() {
                        handle.sleep(Nanos::from_millis(1)).await;
                    }
                    Ok(stats)
                };
                let maintenance = engine.maintain(&handle, |error| failed.set(Some(format!("{error}"))));
                let background = pin!(join(maintenance, engine.run_abandoned()));
                match select(background, pin!(body)).await {
                    Either::Left(_) => Err("the engine's background work has ended".to_owned()),
                    Either::Right((done, _)) => done,
                }
            };
            if let Some(failed) = failed.take() {
                return Err(format!("maintenance: {failed}"));
            }
            let stats = done?;
            // Operations that have become the engine's own end during the close.
            match select(pin!(engine.close()), pin!(engine.run_abandoned())).await {
                Either::Left((closed, _)) => closed.map_err(|error| format!("close: {error}"))?,
                Either::Right(_) => return Err("the engine's background work has ended".to_owned()),
            }
            Ok(stats)
        })
    }

    /// Runs a future on the drive's core.
    fn run_future<T: 'static>(
        &self,
        future: impl Future<Output = Result<T, String>> + 'static,
    ) -> Result<T, String> {
        let result = Rc::new(RefCell::new(None));
        let end = Rc::clone(&result);
        self.handle.spawn(async move { *end.borrow_mut() = Some(future.await) });
        self.sim.run_until_true(self.sim.now() + RUN_LIMIT, || result.borrow().is_some());
        let ended = result.take();
        ended.unwrap_or_else(|| Err("the engine does not come to an end".to_owned()))
    }
}

impl Drop for LogStoreExperiment {
    fn drop(&mut self) {
        // Reactors and pending events hold references to the simulation, which would keep it alive.
        self.sim.stop_host(self.host, HostFailure::ProcessKilled);
        while self.sim.step(Nanos::NEVER) {}
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
        clock: WallClock::default(),
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
