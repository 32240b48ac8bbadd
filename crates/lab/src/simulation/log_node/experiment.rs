//! The simulated node of LEED: drives, cores and a volume, formatted and filled once, for loads one after the other.
//!
//! ```text
//!   new: format ─▶ open ─▶ a reactor for each core ─▶ all objects inserted        run: a load ─▶ NodeStats
//! ```
//! In: a [`LogNodeConfig`]; loads. Out: [`NodeStats`] of each load. The fill is not measured.
//!
//! Invariant: results are a function of the arguments.
//! Tested in `tests/log_node_simulation.rs`.

use super::client_flows::ClientFlows;
use super::clients::{ClientPath, NodeArrivals, NodeClients, NodeLoad, NodeMoment};
use super::node_stats::NodeStats;
use super::parameters::{FILL_REQUESTS, FLOW_CLIENTS, NODE_DRIVES, STORAGE_CORES, swap_bytes};
use super::workload::NodeWorkload;
use crate::simulation::log_store::load_client::{StoredObjects, object_key};
use crate::simulation::log_store::load_stats::Moment;
use crate::simulation::log_store::parameters::{POOL_BYTES, VALUE_BYTES_MAX, command_cost};
use crate::simulation::node::host_handle;
use crate::simulation::ssd_device::{ModelledDrive, SharedSsd};
use octokv_base::{BufferPool, Nanos};
use octokv_device::Device;
use octokv_device::ssd_model::{DriveProfile, SsdModel};
use octokv_engine::log::volume::LogVolume;
use octokv_engine::spanned::{SpannedEngine, SpannedVolume};
use octokv_engine::{Durability, Engine, EngineKind, FormatConfig, OpenConfig, Volume, WallClock};
use octokv_node::OpenDevice;
use octokv_runtime::simulated::{HostFailure, SimEnv, SimEnvConfig, SimHostId};
use octokv_runtime::{CoreWaker, ReactorHandle};
use octokv_sched::StartingCosts;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

type NodeVolume = SpannedVolume<Arc<LogVolume>>;
type NodeEngine = SpannedEngine<<Arc<LogVolume> as Volume>::Engine>;

/// Time of a reactor iteration without simulated work.
const MIN_ITERATION_COST: Nanos = Nanos(100);
/// The time limit of one load.
const RUN_LIMIT: Nanos = Nanos::from_secs(100_000);

/// How the engine is opened: the one place for settings that figures compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogNodeSettings {
    /// When puts are acknowledged.
    pub durability: Durability,
    /// The commands in flight by which a drive has to exceed another before its puts are swapped; `None` without swap regions.
    pub swap_gap: Option<u32>,
    /// Whether drives have queues with tokens, by which clients send.
    pub flow_control: bool,
    /// One way between clients and the node.
    pub one_way: Nanos,
}

impl Default for LogNodeSettings {
    /// The paper acknowledges a put when the drive has it, and swaps; the gap is that of a node.
    fn default() -> LogNodeSettings {
        LogNodeSettings {
            durability: Durability::Completed,
            swap_gap: Some(OpenConfig::SWAP_GAP),
            flow_control: false,
            one_way: Nanos::ZERO,
        }
    }
}

impl LogNodeSettings {
    fn open_config(self) -> OpenConfig {
        OpenConfig {
            durability: self.durability,
            cores: STORAGE_CORES,
            cache_bytes: 0,
            prepare_bytes: 0,
            compact_bytes_per_second: u64::MAX,
            tree: OpenConfig::TREE,
            swap_gap: self.swap_gap.unwrap_or(OpenConfig::SWAP_GAP),
            clock: WallClock::default(),
            tokens: self.flow_control.then(StartingCosts::default),
        }
    }
}

/// The node, and the volume and objects on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogNodeConfig {
    /// Each of its drives.
    pub drive: DriveProfile,
    /// Bytes of a logical block, and of a unit of the volume.
    pub unit_bytes: u32,
    /// Bytes of a chunk.
    pub chunk_bytes: u32,
    /// Stores of the volume on a drive.
    pub stores: u16,
    /// The objects.
    pub objects: StoredObjects,
    /// Settings of the engine.
    pub settings: LogNodeSettings,
    /// Seed of all random choices.
    pub seed: u64,
}

/// The simulated node with its objects.
pub struct LogNodeExperiment {
    sim: SimEnv,
    host: SimHostId,
    config: LogNodeConfig,
    volume: NodeVolume,
    clients: Rc<NodeClients>,
    /// The objects that exist.
    present: Cell<u32>,
}

fn host_reactor(sim: &SimEnv, host: SimHostId) -> ReactorHandle {
    let handle = host_handle(sim, host, CoreWaker::without_eventfd());
    let own = handle.clone();
    sim.add_reactor(host, handle.clone(), move |now| {
        let fired = own.begin_iteration(now);
        fired + own.poll_background() > 0
    });
    handle
}

impl LogNodeExperiment {
    /// Formats the drives, opens the volume and inserts all objects.
    ///
    /// # Errors
    /// A message if the engine failed.
    pub fn new(config: LogNodeConfig) -> Result<LogNodeExperiment, String> {
        let sim = SimEnv::new(SimEnvConfig {
            iteration_cost_min: MIN_ITERATION_COST,
            ..SimEnvConfig::new(config.seed)
        });
        let host = sim.add_host();
        let blocks = config.drive.capacity_bytes / u64::from(config.unit_bytes);
        let create =
            |_| SharedSsd::new(SsdModel::new(config.drive, config.unit_bytes), config.unit_bytes as usize);
        let ssds: Vec<_> = (0..NODE_DRIVES).map(create).collect();
        let cores: Vec<ReactorHandle> = (0..STORAGE_CORES).map(|_| host_reactor(&sim, host)).collect();
        let open_drives = |handle: &ReactorHandle| -> Result<Vec<Rc<dyn Device>>, String> {
            let open = |ssd| {
                let drive = ModelledDrive::new(ssd, (blocks, false), &sim).with_command_cost(command_cost());
                drive.open_for_core(handle).map_err(|error| error.to_string())
            };
            ssds.iter().map(open).collect()
        };
        let volume = open_volume(&sim, &cores[0], open_drives(&cores[0])?, config)?;
        let engine_of = |(core, handle)| -> Result<Rc<NodeEngine>, String> {
            let pool = BufferPool::new(POOL_BYTES / STORAGE_CORES);
            Ok(Rc::new(volume.engine(core, &open_drives(handle)?, pool)))
        };
        let engines = cores.iter().enumerate().map(engine_of).collect::<Result<Vec<_>, String>>()?;
        let (of_keys, owner) = (volume.clone(), Rc::clone(&engines[0]));
        let place_of = move |number| {
            let key = object_key(number);
            (of_keys.place_of(&key), owner.owner_core(&key).expect("the log engine has owners"))
        };
        let (of_moments, times, clock) = (
            volume.clone(),
            cores.iter().map(|core| core.cpu_time().reader()).collect::<Vec<_>>(),
            cores[0].clone(),
        );
        let moment = move || -> NodeMoment {
            let reports = of_moments.device_reports();
            let drive = |(ssd, report): (&Rc<RefCell<SharedSsd>>, octokv_engine::DeviceReport)| Moment {
                at: clock.now(),
                commands: ssd.borrow().commands(),
                ssd: ssd.borrow().model().statistics().clone(),
                engine: report.statistics,
                core: Nanos::ZERO,
            };
            let spans = times.iter().flat_map(|reader| reader.stage_times());
            let swaps = reports.iter().map(|report| report.swaps).collect();
            let core_time = spans.fold(Nanos::ZERO, |sum, span| sum + span);
            NodeMoment { drives: ssds.iter().zip(reports).map(drive).collect(), swaps, core_time }
        };
        let value_bytes = config.objects.value_bytes;
        let flows = octokv_node::token_shares(&volume)
            .map(|shares| ClientFlows::new(shares, FLOW_CLIENTS, NODE_DRIVES, value_bytes));
        let path = ClientPath { one_way: config.settings.one_way, clients: FLOW_CLIENTS, flows };
        let clients =
            NodeClients::new(&sim, STORAGE_CORES, value_bytes, path, Box::new(place_of), Box::new(moment));
        for ((core, handle), engine) in cores.iter().enumerate().zip(engines) {
            spawn_core(&clients, core, handle, engine);
        }
        let present = Cell::new(0);
        let experiment = LogNodeExperiment { sim, host, config, volume, clients, present };
        experiment.run(NodeLoad {
            workload: NodeWorkload::FILL,
            arrivals: NodeArrivals::InFlight(FILL_REQUESTS),
            warm_up: 0,
            measured: config.objects.count,
            seed: config.seed,
        })?;
        Ok(experiment)
    }

    /// Runs a load to its end, and the background work that it leaves: all keys are at their homes then.
    ///
    /// # Errors
    /// A message if a request failed, a value was wrong, or the load does not end.
    pub fn run(&self, load: NodeLoad) -> Result<NodeStats, String> {
        self.clients.begin(load, self.present.get(), self.config.objects.count);
        let limit = self.sim.now() + RUN_LIMIT;
        if !self.sim.run_until_true(limit, || self.clients.is_done()) {
            return Err("the load does not end".to_owned());
        }
        let (stats, present) = self.clients.take_stats()?;
        self.present.set(present);
        let is_merged = || self.volume.device_reports().iter().all(|report| report.swaps.keys == 0);
        if !self.sim.run_until_true(limit, || self.volume.is_idle() && is_merged()) {
            return Err("background work does not end".to_owned());
        }
        Ok(stats)
    }
}

fn open_volume(
    sim: &SimEnv,
    core: &ReactorHandle,
    devices: Vec<Rc<dyn Device>>,
    config: LogNodeConfig,
) -> Result<NodeVolume, String> {
    let format = FormatConfig {
        engine: EngineKind::Log,
        unit_bytes: Some(config.unit_bytes),
        value_bytes_max: VALUE_BYTES_MAX,
        partitions: config.stores,
        chunk_bytes: Some(config.chunk_bytes),
        swap_bytes: config.settings.swap_gap.map_or(0, |_| swap_bytes(&config.drive)),
        seed: config.seed,
        ..FormatConfig::default()
    };
    let result: Rc<RefCell<Option<Result<NodeVolume, String>>>> = Rc::default();
    let end = Rc::clone(&result);
    core.spawn(async move {
        let pool = BufferPool::new(POOL_BYTES / STORAGE_CORES);
        let opened = async {
            NodeVolume::format(&devices, &format).await?;
            NodeVolume::open(&devices, &pool, config.settings.open_config(), &format).await
        };
        *end.borrow_mut() = Some(opened.await.map_err(|error| format!("the volume: {error}")));
    });
    sim.run_until_true(sim.now() + RUN_LIMIT, || result.borrow().is_some());
    result.take().unwrap_or_else(|| Err("the volume does not open".to_owned()))
}

fn spawn_core(clients: &Rc<NodeClients>, core: usize, handle: &ReactorHandle, engine: Rc<NodeEngine>) {
    let (maintained, own) = (Rc::clone(&engine), handle.clone());
    let failed = Rc::clone(clients);
    handle.spawn(async move {
        maintained.maintain(&own, |error| failed.fail(format!("maintenance: {error}"))).await;
    });
    let abandoned = Rc::clone(&engine);
    handle.spawn(async move { abandoned.run_abandoned().await });
    handle.spawn(Rc::clone(clients).serve(core, engine, handle.clone()));
}

impl Drop for LogNodeExperiment {
    fn drop(&mut self) {
        // Reactors and pending events hold references to the simulation, which would keep it alive.
        self.sim.stop_host(self.host, HostFailure::ProcessKilled);
        while self.sim.step(Nanos::NEVER) {}
    }
}
