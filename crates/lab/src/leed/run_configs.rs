//! Simulated runs of LEED: a filled drive, and phases of load on it; and those of a whole node ([`super::node_runs`]).

use super::node_runs::{NodeRun, NodeRunConfig, run_node};
use crate::job_runner::{Durations, ExperimentJob, JobRunner};
use crate::simulation::log_store::experiment::{
    LoadPhase, LogStoreConfig, LogStoreExperiment, LogStoreSettings,
};
use crate::simulation::log_store::load_client::{Arrivals, Load, LoadKind, StoredObjects};
use crate::simulation::log_store::load_stats::LoadStats;
use crate::simulation::log_store::parameters::{
    CHUNK_BYTES, COMPACTED_CHUNK_BYTES, COMPACTION_STORES, COMPACTIONS, DEPTHS, FILL_CHUNK_BYTES,
    FILL_OVERWRITES, OBJECTS, PUT_PERCENTS, STORES, SUB_COMPACTIONS, UNITS, VALUE_BYTES, compaction_depth,
    compaction_objects, compaction_volume_bytes, fill_volume_bytes, modelled_drive, objects_of_run,
    objects_of_volume,
};
use octokv_base::Nanos;
use octokv_engine::Durability;
use octokv_engine::log::settings::{self, COMPACTIONS_PER_CORE};

const SEED: u64 = 1;
/// The largest number of requests in flight.
pub const DEPTH_MAX: usize = DEPTHS[DEPTHS.len() - 1];
/// Compaction runs between phases when puts may have written so much since the last: the drive has room for three times as much.
const GARBAGE_BYTES_MAX: u64 = 1 << 30;
/// The settings of the engine.
const OWN: LogStoreSettings = LogStoreSettings {
    durability: Durability::Completed,
    sub_compactions: 8,
    compactions: 1,
    overlaps_rounds: true,
};
/// Those that a node has.
const OF_NODE: LogStoreSettings =
    LogStoreSettings { compactions: COMPACTIONS_PER_CORE, sub_compactions: settings::SUB_COMPACTIONS, ..OWN };
/// The same with puts that survive a power loss.
pub const DURABLE: LogStoreSettings = LogStoreSettings { durability: Durability::PowerSafe, ..OWN };

/// The workloads of Figure 13.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompactedLoad {
    /// WR-ONLY: puts of random objects.
    WritesOnly,
    /// MIX-50: gets and puts of random objects, half each.
    Mix50,
    /// MIX-50-Zipf: the same with skew.
    Mix50Zipf,
}

impl CompactedLoad {
    /// All of them, with the paper's names.
    pub const ALL: [(CompactedLoad, &str); 3] = [
        (CompactedLoad::WritesOnly, "WR-ONLY"),
        (CompactedLoad::Mix50, "MIX-50"),
        (CompactedLoad::Mix50Zipf, "MIX-50-Zipf"),
    ];

    /// Its requests, and the puts that come before.
    pub fn kinds(self) -> [LoadKind; 2] {
        match self {
            CompactedLoad::WritesOnly => [LoadKind::Uniform(100); 2],
            CompactedLoad::Mix50 => [LoadKind::Uniform(50), LoadKind::Uniform(100)],
            CompactedLoad::Mix50Zipf => [LoadKind::Zipf(50), LoadKind::Zipf(100)],
        }
    }
}

/// Configuration of one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeedRunConfig {
    /// Phases in which no space has to be compacted, by the indices of the value's and the unit's length.
    BeforeCompaction(usize, usize),
    /// A load that compaction has to follow, with units of 512 B, by the index of the value's length, each setting from the same state.
    Compacted(usize, CompactedLoad),
    /// Puts of random objects of a store of which so many percent live, by the index of the value's length.
    Filled(usize, u8),
    /// The same puts, which arrive one in this time on average.
    FilledAtRate(usize, u8, Nanos),
    /// Loads on a whole node of four drives.
    Node(NodeRunConfig),
}

/// A phase with its result.
#[derive(Clone, Debug)]
pub struct RanPhase {
    /// The settings of the engine.
    pub settings: LogStoreSettings,
    /// The phase.
    pub phase: LoadPhase,
    /// What it did.
    pub stats: LoadStats,
}

/// The result of a run.
#[derive(Clone, Debug, Default)]
pub struct LeedRun {
    /// Of a run with one drive.
    pub phases: Vec<RanPhase>,
    /// Of a run of a node.
    pub node: NodeRun,
}

fn of_phases(phases: Vec<RanPhase>) -> LeedRun {
    LeedRun { phases, node: NodeRun::default() }
}

impl LeedRun {
    /// The last phase of a kind of requests, with so many in flight.
    pub fn requests(&self, settings: LogStoreSettings, kind: LoadKind, depth: usize) -> &LoadStats {
        let is_wanted = |ran: &&RanPhase| {
            let LoadPhase::Requests(load) = ran.phase else { return false };
            (ran.settings, load.kind, load.depth) == (settings, kind, depth)
        };
        &self.phases.iter().rev().find(is_wanted).expect("the run has this phase").stats
    }

    /// The phase of this kind of requests with the engine's settings.
    pub fn of(&self, kind: LoadKind, depth: usize) -> &LoadStats {
        self.requests(OWN, kind, depth)
    }

    /// The reads of the drive without the engine.
    pub fn drive_reads(&self) -> &LoadStats {
        let ran = self.phases.iter().find(|ran| matches!(ran.phase, LoadPhase::DriveReads(..)));
        &ran.expect("the run has drive reads").stats
    }

    /// The last phase.
    pub fn last(&self) -> &LoadStats {
        &self.phases.last().expect("a run has phases").stats
    }

    /// The last load with these settings.
    pub fn last_requests(&self, settings: LogStoreSettings) -> &LoadStats {
        let is_wanted =
            |ran: &&RanPhase| ran.settings == settings && matches!(ran.phase, LoadPhase::Requests(_));
        &self.phases.iter().rev().find(is_wanted).expect("the run has this phase").stats
    }
}

/// The settings with so many sub-compactions and compactions.
pub fn compacting(sub_compactions: usize, compactions: usize) -> LogStoreSettings {
    LogStoreSettings { sub_compactions, compactions, ..OWN }
}

/// The settings of the runs of Figure 13, each once: 13a's, then what 13b has besides.
pub fn compaction_settings() -> Vec<LogStoreSettings> {
    let [.., subs_most] = SUB_COMPACTIONS;
    let of_subs = SUB_COMPACTIONS.map(|subs| compacting(subs, 1));
    let more = COMPACTIONS.iter().filter(|&&at_once| at_once > 1);
    of_subs.into_iter().chain(more.map(|&at_once| compacting(subs_most, at_once))).collect()
}

/// A load of so many in flight: few in flight need fewer requests for a mean.
fn load(kind: LoadKind, depth: usize, durations: &Durations) -> Load {
    let parts = match depth {
        1 => 20,
        2..32 => 10,
        32..512 => 4,
        _ => 1,
    };
    let measured = (durations.requests / parts) as u32;
    Load { kind, depth, arrivals: Arrivals::WhenOthersEnd, warm_up: measured / 5, measured, seed: SEED }
}

/// The measured load of a run with compaction. In a quick run a part as of [`load`] would be 2,500 requests, a quarter of a second: one compaction stores
/// 6.2 to 10.4 K/s in that time, by the seed, since that depends on which chunks are compacted then. 10,000 compact more chunks than the volume has: 6.5 to 7.4 K/s.
fn compacted_load(kind: LoadKind, depth: usize, durations: &Durations) -> Load {
    let part = load(kind, depth, durations);
    let measured = if durations.is_quick { durations.requests as u32 } else { part.measured };
    Load { warm_up: measured / 5, measured, ..part }
}

/// The phases before compaction with the engine's settings, then those with durable puts.
fn phases_before_compaction(durations: &Durations) -> [Vec<LoadPhase>; 2] {
    let of = |kind, depth| LoadPhase::Requests(load(kind, depth, durations));
    let mut phases = vec![LoadPhase::DriveReads(DEPTH_MAX, durations.requests as u32)];
    phases.extend(DEPTHS.map(|depth| of(LoadKind::Uniform(0), depth)));
    phases.extend(
        PUT_PERCENTS.iter().filter(|&&puts| puts > 0).map(|&puts| of(LoadKind::Uniform(puts), DEPTH_MAX)),
    );
    phases.extend(
        DEPTHS.iter().filter(|&&depth| depth < DEPTH_MAX).map(|&depth| of(LoadKind::Uniform(100), depth)),
    );
    // Each object is deleted once, and put again.
    let in_order = |kind| {
        let load = load(kind, 1, durations);
        LoadPhase::Requests(Load { measured: load.measured + load.warm_up, warm_up: 0, ..load })
    };
    phases.extend([of(LoadKind::Deletes, 1), in_order(LoadKind::PutsInOrder)]);
    let durable = [1, DEPTH_MAX].map(|depth| of(LoadKind::Uniform(100), depth));
    [phases, durable.to_vec()]
}

/// Adds compactions, so that the garbage of puts, each with an image and a record, never is more than [`GARBAGE_BYTES_MAX`].
fn with_compactions(phases: Vec<LoadPhase>, put_bytes: u64) -> Vec<LoadPhase> {
    let (mut all, mut written) = (Vec::new(), 0);
    for phase in phases {
        let puts = puts_of(&phase);
        if written + puts * put_bytes > GARBAGE_BYTES_MAX {
            all.push(LoadPhase::Compaction);
            written = 0;
        }
        written += puts * put_bytes;
        all.push(phase);
    }
    all
}

/// The puts of a phase, and its deletes, each of which writes an image, too.
fn puts_of(phase: &LoadPhase) -> u64 {
    match phase {
        LoadPhase::Requests(load) => match load.kind {
            LoadKind::Uniform(percent) | LoadKind::Zipf(percent) => {
                u64::from(load.warm_up + load.measured) * u64::from(percent) / 100
            }
            _ => u64::from(load.warm_up + load.measured),
        },
        LoadPhase::Compaction | LoadPhase::DriveReads(..) => 0,
    }
}

/// Runs phases, and pairs each with its result.
fn run_phases(
    experiment: &LogStoreExperiment,
    settings: LogStoreSettings,
    phases: &[LoadPhase],
) -> Result<Vec<RanPhase>, String> {
    let all = experiment.run(settings, phases)?;
    Ok(phases.iter().zip(all).map(|(&phase, stats)| RanPhase { settings, phase, stats }).collect())
}

fn run_before_compaction(size: usize, unit: usize, durations: &Durations) -> Result<LeedRun, String> {
    let (value_bytes, unit_bytes) = (VALUE_BYTES[size], UNITS[unit]);
    let count = objects_of_run(OBJECTS[unit], durations.is_quick);
    let experiment = LogStoreExperiment::new(LogStoreConfig {
        drive: modelled_drive(),
        volume_bytes: modelled_drive().capacity_bytes,
        unit_bytes,
        chunk_bytes: CHUNK_BYTES,
        stores: STORES,
        objects: StoredObjects { count, value_bytes },
        seed: SEED,
    })?;
    let put_bytes = u64::from(value_bytes) + u64::from(2 * unit_bytes).max(1536);
    let [own, durable] =
        phases_before_compaction(durations).map(|phases| with_compactions(phases, put_bytes));
    let mut all = run_phases(&experiment, OWN, &own)?;
    all.extend(run_phases(&experiment, DURABLE, &durable)?);
    let compacted = all.iter().find(|ran| {
        ran.phase != LoadPhase::Compaction && ran.stats.counted(|logs| logs.compaction_rounds) > 0.0
    });
    match compacted {
        Some(ran) => Err(format!("{:?} is not before compaction", ran.phase)),
        None => Ok(of_phases(all)),
    }
}

fn run_compacted(size: usize, workload: CompactedLoad, durations: &Durations) -> Result<LeedRun, String> {
    let value_bytes = VALUE_BYTES[size];
    let count = compaction_objects(value_bytes, durations.is_quick);
    let experiment = LogStoreExperiment::new(LogStoreConfig {
        drive: modelled_drive(),
        volume_bytes: compaction_volume_bytes(durations.is_quick),
        unit_bytes: UNITS[0],
        chunk_bytes: if durations.is_quick { CHUNK_BYTES } else { COMPACTED_CHUNK_BYTES },
        stores: COMPACTION_STORES,
        objects: StoredObjects { count, value_bytes },
        seed: SEED,
    })?;
    let ([kind, puts], depth) = (workload.kinds(), compaction_depth(durations.is_quick));
    // The fill has left no garbage, and the oldest chunks of a log that has seen a load have the most.
    let ageing = Load { warm_up: 0, measured: count, ..load(puts, depth, durations) };
    run_phases(&experiment, OWN, &[LoadPhase::Requests(ageing)])?;
    let measured = [LoadPhase::Requests(compacted_load(kind, depth, durations))];
    let mut all = Vec::new();
    for settings in compaction_settings() {
        all.extend(run_phases(&experiment.copied()?, settings, &measured)?);
    }
    Ok(of_phases(all))
}

/// Puts on a store of which so many percent live, after all objects were overwritten [`FILL_OVERWRITES`] times.
fn run_filled(
    size: usize,
    live_percent: u8,
    arrivals: Arrivals,
    durations: &Durations,
) -> Result<LeedRun, String> {
    let value_bytes = VALUE_BYTES[size];
    let volume_bytes = fill_volume_bytes(durations.is_quick);
    let count = objects_of_volume(volume_bytes, value_bytes, f64::from(live_percent) / 100.0);
    let experiment = LogStoreExperiment::new(LogStoreConfig {
        drive: modelled_drive(),
        volume_bytes,
        unit_bytes: UNITS[0],
        chunk_bytes: FILL_CHUNK_BYTES,
        stores: COMPACTION_STORES,
        objects: StoredObjects { count, value_bytes },
        seed: SEED,
    })?;
    let depth = compaction_depth(durations.is_quick);
    let puts = |measured, arrivals, depth| {
        let load = Load { kind: LoadKind::Uniform(100), depth, arrivals, warm_up: 0, measured, seed: SEED };
        LoadPhase::Requests(load)
    };
    let ageing = puts(count * FILL_OVERWRITES, Arrivals::WhenOthersEnd, depth);
    // So many that a request hardly ever waits for one: latencies count from arrivals, but arrivals of waiting requests would not follow the rate.
    let clients = if arrivals == Arrivals::WhenOthersEnd { depth } else { DEPTH_MAX };
    run_phases(&experiment, OF_NODE, &[ageing, puts(count, arrivals, clients)]).map(of_phases)
}

impl ExperimentJob for LeedRunConfig {
    type Output = LeedRun;

    fn run(&self, durations: &Durations) -> Result<LeedRun, String> {
        match *self {
            LeedRunConfig::BeforeCompaction(size, unit) => run_before_compaction(size, unit, durations),
            LeedRunConfig::Compacted(size, workload) => run_compacted(size, workload, durations),
            LeedRunConfig::Filled(size, live) => run_filled(size, live, Arrivals::WhenOthersEnd, durations),
            LeedRunConfig::FilledAtRate(size, live, one_in) => {
                run_filled(size, live, Arrivals::OneIn(one_in), durations)
            }
            LeedRunConfig::Node(config) => {
                run_node(config, durations).map(|node| LeedRun { node, ..LeedRun::default() })
            }
        }
    }
}

/// Runner of these configurations.
pub type LeedRunner = JobRunner<LeedRunConfig>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn puts_are_compacted_before_their_garbage_fills_the_drive() {
        let durations = Durations::for_mode(false);
        let [phases, _] = phases_before_compaction(&durations);
        let compactions = |put_bytes| {
            let all = with_compactions(phases.clone(), put_bytes);
            all.iter().filter(|&&phase| phase == LoadPhase::Compaction).count()
        };
        let puts: u64 = phases.iter().map(puts_of).sum();
        // The fewest compactions leave half of the bound unused at most, on average.
        for put_bytes in [1, 1_792, 9_216] {
            let bytes = puts * put_bytes;
            let least = bytes.div_ceil(GARBAGE_BYTES_MAX).saturating_sub(1) as usize;
            let most = (2 * bytes / GARBAGE_BYTES_MAX) as usize;
            assert!(
                (least..=most).contains(&compactions(put_bytes)),
                "{put_bytes}: {}",
                compactions(put_bytes)
            );
        }
    }

    #[test]
    fn each_setting_of_both_figures_is_run_once() {
        let settings = compaction_settings();
        assert_eq!(settings.len(), SUB_COMPACTIONS.len() + COMPACTIONS.len() - 1);
        for subs in SUB_COMPACTIONS {
            assert_eq!(settings.iter().filter(|&&of| of == compacting(subs, 1)).count(), 1, "{subs}");
        }
    }
}
