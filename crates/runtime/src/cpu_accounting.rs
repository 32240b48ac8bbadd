//! Processor time accounting of a core: cumulative time per stage, at one tick-counter read per stage and iteration.
//!
//! The reactor calls [`CpuTime::end_stage`] after each stage of an iteration, with whether the stage did any work: an
//! empty poll counts as idle. Any core may read another core's counters by a [`CpuTimeReader`]. In the simulation a
//! stage takes no time by itself: [`CpuTime::advance_simulated`] adds its cost, and the simulated clock advances by it.
//!
//! Tested in `tests/reactor.rs` and `tests/simulated.rs`.

use octokv_base::Nanos;
use octokv_sys::clock::{TscCalibration, ticks};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A stage of a reactor iteration. The scheduler's metrics are the first three.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Sockets, protocol and commands.
    Target = 0,
    /// Engines.
    Kv = 1,
    /// Device submissions and completions.
    Device = 2,
    /// Empty polls and sleep.
    Idle = 3,
}

/// The number of stages.
pub const STAGE_COUNT: usize = 4;

struct StageCounters {
    /// Ticks if there is a `calibration`, else nanoseconds. Written by the owning core alone.
    stage_ticks: [AtomicU64; STAGE_COUNT],
    calibration: Option<TscCalibration>,
}

/// The processor time of one core. Owned by its reactor.
pub struct CpuTime {
    counters: Arc<StageCounters>,
    stage_start_ticks: Cell<u64>,
    iteration_start_ticks: Cell<u64>,
    simulated_ns: Cell<u64>,
    /// Simulated cost since the last `end_stage`, in nanoseconds.
    simulated_stage_ns: Cell<u64>,
    /// The cached tick length; recomputing it costs more than `end_stage`.
    ns_per_tick: Cell<f64>,
    recalibrate_at_ticks: Cell<u64>,
}

/// Ticks between recalibrations: one or two milliseconds.
const RECALIBRATION_INTERVAL_TICKS: u64 = 1 << 22;

impl CpuTime {
    /// Measures by the processor's tick counter.
    pub fn measured() -> CpuTime {
        CpuTime::with_calibration(Some(TscCalibration::new()))
    }

    /// Counts simulated time: only [`CpuTime::advance_simulated`] adds to it.
    pub fn simulated() -> CpuTime {
        CpuTime::with_calibration(None)
    }

    fn with_calibration(calibration: Option<TscCalibration>) -> CpuTime {
        let stage_ticks = std::array::from_fn(|_| AtomicU64::new(0));
        let now = ticks();
        CpuTime {
            counters: Arc::new(StageCounters { stage_ticks, calibration }),
            stage_start_ticks: Cell::new(now),
            iteration_start_ticks: Cell::new(now),
            simulated_ns: Cell::new(0),
            simulated_stage_ns: Cell::new(0),
            ns_per_tick: Cell::new(0.0),
            recalibrate_at_ticks: Cell::new(now + RECALIBRATION_INTERVAL_TICKS),
        }
    }

    /// Begins an iteration, at the time of the last `end_stage`.
    pub fn begin_iteration(&self) {
        self.iteration_start_ticks.set(self.stage_start_ticks.get());
    }

    /// The time from the start of the iteration to the last `end_stage`; in the simulation the cost added since
    /// [`CpuTime::take_simulated`].
    #[inline]
    pub fn iteration_elapsed(&self) -> Nanos {
        if self.counters.calibration.is_none() {
            return Nanos(self.simulated_ns.get());
        }
        let span = self.stage_start_ticks.get().saturating_sub(self.iteration_start_ticks.get());
        Nanos((span as f64 * self.ns_per_tick.get()) as u64)
    }

    /// Ends a stage: adds the time since the last call to `stage` if it did work, else to [`Stage::Idle`]. Returns
    /// that time; zero in the first millisecond (no calibration yet), and in the simulation the cost added since the
    /// last call.
    pub fn end_stage(&self, stage: Stage, did_work: bool) -> Nanos {
        let Some(calibration) = self.counters.calibration else {
            return Nanos(self.simulated_stage_ns.take());
        };
        let now = ticks();
        let span = now.saturating_sub(self.stage_start_ticks.replace(now));
        self.add(if did_work { stage } else { Stage::Idle }, span);
        if now >= self.recalibrate_at_ticks.get() {
            self.recalibrate_at_ticks.set(now + RECALIBRATION_INTERVAL_TICKS);
            self.ns_per_tick.set(calibration.ticks_to_nanos(1 << 20).0 as f64 / (1 << 20) as f64);
        }
        Nanos((span as f64 * self.ns_per_tick.get()) as u64)
    }

    /// The time that [`CpuTime::end_stage`] would return now.
    pub fn stage_elapsed(&self) -> Nanos {
        let span = match self.counters.calibration {
            Some(_) => ticks().saturating_sub(self.stage_start_ticks.get()),
            None => return Nanos(self.simulated_stage_ns.get()),
        };
        Nanos((span as f64 * self.ns_per_tick.get()) as u64)
    }

    /// Adds the cost of work in simulated time. No effect on a measured account.
    pub fn advance_simulated(&self, stage: Stage, span: Nanos) {
        if self.counters.calibration.is_none() {
            self.add(stage, span.0);
            self.simulated_ns.set(self.simulated_ns.get() + span.0);
            self.simulated_stage_ns.set(self.simulated_stage_ns.get() + span.0);
        }
    }

    /// The simulated cost since the last call: how long the simulated core is busy.
    pub fn take_simulated(&self) -> Nanos {
        Nanos(self.simulated_ns.take())
    }

    fn add(&self, stage: Stage, span: u64) {
        let counter = &self.counters.stage_ticks[stage as usize];
        // Only the owning core writes, so no read-modify-write is needed.
        counter.store(counter.load(Ordering::Relaxed) + span, Ordering::Relaxed);
    }

    /// A reader of these counters for other cores.
    pub fn reader(&self) -> CpuTimeReader {
        CpuTimeReader(Arc::clone(&self.counters))
    }
}

/// Reads the counters of a [`CpuTime`] from any core.
#[derive(Clone)]
pub struct CpuTimeReader(Arc<StageCounters>);

impl CpuTimeReader {
    /// Cumulative time per stage since the account was created, indexed by [`Stage`].
    pub fn stage_times(&self) -> [Nanos; STAGE_COUNT] {
        std::array::from_fn(|index| {
            let count = self.0.stage_ticks[index].load(Ordering::Relaxed);
            self.0.calibration.map_or(Nanos(count), |scale| scale.ticks_to_nanos(count))
        })
    }
}
