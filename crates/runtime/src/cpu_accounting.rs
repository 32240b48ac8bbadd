//! Where a core's time goes: cumulative time per stage, one tick-counter read per stage and turn.
//!
//! The reactor calls [`CpuTime::lap`] at the end of each stage of its turn and says whether the stage did
//! anything: an empty poll counts as idle. Any core may read another's figures by a [`CpuTimeReader`].
//! In a virtual world stages take no time by themselves; there [`CpuTime::charge`] adds what they would
//! cost, and the world lets that time pass.

use octokv_base::Nanos;
use octokv_sys::clock::{TscCalibration, ticks};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a core was doing. The first three are the stages that the scheduler lives on.
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

/// How many stages there are.
pub const STAGE_COUNT: usize = 4;

struct StageCounters {
    /// Ticks with a scale, nanoseconds without. Written by the one owner.
    stage_ticks: [AtomicU64; STAGE_COUNT],
    calibration: Option<TscCalibration>,
}

/// The time account of one core; kept by its reactor.
pub struct CpuTime {
    counters: Arc<StageCounters>,
    stage_start_ticks: Cell<u64>,
    iteration_start_ticks: Cell<u64>,
    simulated_ns: Cell<u64>,
    /// What was charged since the last lap.
    simulated_stage_ns: Cell<u64>,
    /// The scale as it was, and when it is looked at again: a look costs more than a lap.
    ns_per_tick: Cell<f64>,
    recalibrate_at_ticks: Cell<u64>,
}

/// For so many ticks the scale is not looked at again: a millisecond or two.
const RECALIBRATION_INTERVAL_TICKS: u64 = 1 << 22;

impl CpuTime {
    /// An account in real time, by the processor's tick counter.
    pub fn measured() -> CpuTime {
        CpuTime::with_calibration(Some(TscCalibration::new()))
    }

    /// An account in virtual time: only [`CpuTime::charge`] adds to it.
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

    /// A turn begins, with the lap that has just ended.
    pub fn begin_iteration(&self) {
        self.iteration_start_ticks.set(self.stage_start_ticks.get());
    }

    /// How much of the turn had passed at the last lap; in virtual time what was charged in it.
    #[inline]
    pub fn iteration_elapsed(&self) -> Nanos {
        if self.counters.calibration.is_none() {
            return Nanos(self.simulated_ns.get());
        }
        let span = self.stage_start_ticks.get().saturating_sub(self.iteration_start_ticks.get());
        Nanos((span as f64 * self.ns_per_tick.get()) as u64)
    }

    /// Ends a stretch of work: the time since the last lap goes to `stage` when it did something, to
    /// [`Stage::IdlePolicy`] when it did not. Gives how long it was: nothing in the first millisecond, and in virtual time
    /// what was charged.
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

    /// How long the stretch is so far that the next lap will end, as that would give it.
    pub fn stage_elapsed(&self) -> Nanos {
        let span = match self.counters.calibration {
            Some(_) => ticks().saturating_sub(self.stage_start_ticks.get()),
            None => return Nanos(self.simulated_stage_ns.get()),
        };
        Nanos((span as f64 * self.ns_per_tick.get()) as u64)
    }

    /// Adds the cost of work in virtual time. Does nothing in real time, which passes by itself.
    pub fn advance_simulated(&self, stage: Stage, span: Nanos) {
        if self.counters.calibration.is_none() {
            self.add(stage, span.0);
            self.simulated_ns.set(self.simulated_ns.get() + span.0);
            self.simulated_stage_ns.set(self.simulated_stage_ns.get() + span.0);
        }
    }

    /// What was charged since the last call: how long the virtual core is busy with it.
    pub fn take_simulated(&self) -> Nanos {
        Nanos(self.simulated_ns.take())
    }

    fn add(&self, stage: Stage, span: u64) {
        let counter = &self.counters.stage_ticks[stage as usize];
        // One writer: no read-modify-write needed.
        counter.store(counter.load(Ordering::Relaxed) + span, Ordering::Relaxed);
    }

    /// A view of this account for other cores.
    pub fn reader(&self) -> CpuTimeReader {
        CpuTimeReader(Arc::clone(&self.counters))
    }
}

/// Another core's view of a [`CpuTime`].
#[derive(Clone)]
pub struct CpuTimeReader(Arc<StageCounters>);

impl CpuTimeReader {
    /// Cumulative time per stage, indexed by [`Stage`].
    pub fn stage_times(&self) -> [Nanos; STAGE_COUNT] {
        std::array::from_fn(|index| {
            let count = self.0.stage_ticks[index].load(Ordering::Relaxed);
            self.0.calibration.map_or(Nanos(count), |scale| scale.ticks_to_nanos(count))
        })
    }
}
