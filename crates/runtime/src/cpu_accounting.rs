//! Where a core's time goes: cumulative time per stage, one tick-counter read per stage and turn.
//!
//! The reactor calls [`Busy::lap`] at the end of each stage of its turn and says whether the stage did
//! anything: an empty poll counts as idle. Any core may read another's figures by a [`BusyReader`].
//! In a virtual world stages take no time by themselves; there [`Busy::charge`] adds what they would
//! cost, and the world lets that time pass.

use octokv_base::Nanos;
use octokv_sys::clock::{TickScale, ticks};
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
pub const STAGES: usize = 4;

struct Counters {
    /// Ticks with a scale, nanoseconds without. Written by the one owner.
    spent: [AtomicU64; STAGES],
    scale: Option<TickScale>,
}

/// The time account of one core; kept by its reactor.
pub struct Busy {
    counters: Arc<Counters>,
    last_ticks: Cell<u64>,
    begun_ticks: Cell<u64>,
    charged: Cell<u64>,
    /// What was charged since the last lap.
    charged_since_lap: Cell<u64>,
    /// The scale as it was, and when it is looked at again: a look costs more than a lap.
    ns_per_tick: Cell<f64>,
    scaled_until_ticks: Cell<u64>,
}

/// For so many ticks the scale is not looked at again: a millisecond or two.
const SCALED_TICKS: u64 = 1 << 22;

impl Busy {
    /// An account in real time, by the processor's tick counter.
    pub fn real() -> Busy {
        Busy::with(Some(TickScale::new()))
    }

    /// An account in virtual time: only [`Busy::charge`] adds to it.
    pub fn virtual_time() -> Busy {
        Busy::with(None)
    }

    fn with(scale: Option<TickScale>) -> Busy {
        let spent = std::array::from_fn(|_| AtomicU64::new(0));
        let now = ticks();
        Busy {
            counters: Arc::new(Counters { spent, scale }),
            last_ticks: Cell::new(now),
            begun_ticks: Cell::new(now),
            charged: Cell::new(0),
            charged_since_lap: Cell::new(0),
            ns_per_tick: Cell::new(0.0),
            scaled_until_ticks: Cell::new(now + SCALED_TICKS),
        }
    }

    /// A turn begins, with the lap that has just ended.
    pub fn begin_turn(&self) {
        self.begun_ticks.set(self.last_ticks.get());
    }

    /// How much of the turn had passed at the last lap; in virtual time what was charged in it.
    #[inline]
    pub fn within_turn(&self) -> Nanos {
        if self.counters.scale.is_none() {
            return Nanos(self.charged.get());
        }
        let span = self.last_ticks.get().saturating_sub(self.begun_ticks.get());
        Nanos((span as f64 * self.ns_per_tick.get()) as u64)
    }

    /// Ends a stretch of work: the time since the last lap goes to `stage` when it did something, to
    /// [`Stage::Idle`] when it did not. Gives how long it was: nothing in the first millisecond, and in virtual time
    /// what was charged.
    pub fn lap(&self, stage: Stage, worked: bool) -> Nanos {
        let Some(scale) = self.counters.scale else { return Nanos(self.charged_since_lap.take()) };
        let now = ticks();
        let span = now.saturating_sub(self.last_ticks.replace(now));
        self.add(if worked { stage } else { Stage::Idle }, span);
        if now >= self.scaled_until_ticks.get() {
            self.scaled_until_ticks.set(now + SCALED_TICKS);
            self.ns_per_tick.set(scale.nanos(1 << 20).0 as f64 / (1 << 20) as f64);
        }
        Nanos((span as f64 * self.ns_per_tick.get()) as u64)
    }

    /// How long the stretch is so far that the next lap will end, as that would give it.
    pub fn since_lap(&self) -> Nanos {
        let span = match self.counters.scale {
            Some(_) => ticks().saturating_sub(self.last_ticks.get()),
            None => return Nanos(self.charged_since_lap.get()),
        };
        Nanos((span as f64 * self.ns_per_tick.get()) as u64)
    }

    /// Adds the cost of work in virtual time. Does nothing in real time, which passes by itself.
    pub fn charge(&self, stage: Stage, span: Nanos) {
        if self.counters.scale.is_none() {
            self.add(stage, span.0);
            self.charged.set(self.charged.get() + span.0);
            self.charged_since_lap.set(self.charged_since_lap.get() + span.0);
        }
    }

    /// What was charged since the last call: how long the virtual core is busy with it.
    pub fn take_charged(&self) -> Nanos {
        Nanos(self.charged.take())
    }

    fn add(&self, stage: Stage, span: u64) {
        let counter = &self.counters.spent[stage as usize];
        // One writer: no read-modify-write needed.
        counter.store(counter.load(Ordering::Relaxed) + span, Ordering::Relaxed);
    }

    /// A view of this account for other cores.
    pub fn reader(&self) -> BusyReader {
        BusyReader(Arc::clone(&self.counters))
    }
}

/// Another core's view of a [`Busy`].
#[derive(Clone)]
pub struct BusyReader(Arc<Counters>);

impl BusyReader {
    /// Cumulative time per stage, indexed by [`Stage`].
    pub fn spent(&self) -> [Nanos; STAGES] {
        std::array::from_fn(|index| {
            let spent = self.0.spent[index].load(Ordering::Relaxed);
            self.0.scale.map_or(Nanos(spent), |scale| scale.nanos(spent))
        })
    }
}
