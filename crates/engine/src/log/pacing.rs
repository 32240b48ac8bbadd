//! Pacing of the log engine: how fast compaction writes, and how fast users may, so that free space settles. Pure.
//!
//! ```text
//!   pressure    0 ──────── 0.125 ─────────────── 0.5 ───────────────────── 1      of free chunks: 0 at F_start, 1 at F_pass
//!   compaction  frees half  as much              2.5 times                  4.5 times of what users consume
//!   users       no limit .........................│ falls from no limit to a half of what compaction frees
//! ```
//! In: free chunks, and rates that a [`LogPaceMeter`] takes from totals of the volume. Out: bytes a second for the throttles of users and
//! of compaction (`common::write_throttle`), and reads in flight.
//!
//! What compaction has to write for each byte that it frees depends on the live part of the chunks at the heads: 1 with a half of them
//! alive, 9 with nine tenths. So its goal is in freed bytes, and the meter says what one costs.
//!
//! Invariants: with more pressure users are not faster, and compaction is not slower; the limit of users has no step and is never 0;
//! compaction goes on under pressure when nothing is consumed. Tested in `pacing_tests.rs`, also in a closed loop with a model of a device.

use super::space_limits::SpaceLimits;
use octokv_base::Nanos;

/// The least that compaction writes while it runs, in bytes a second.
const COMPACTION_MIN: f64 = (1 << 20) as f64;
/// The least that users may write, in bytes a second: passes stop them, not the throttle.
const USERS_MIN: f64 = (1 << 20) as f64;
/// The part of consumption that compaction frees without pressure, and how much more it frees at the highest.
const FREED_PARTS: (f64, f64) = (0.5, 4.0);
/// Compaction makes up for what is missing at the highest pressure in so long, even if nothing is consumed.
const REFILL_SECONDS: f64 = 10.0;
/// From this pressure on users are limited, and compaction reads more at once.
const HIGH_PRESSURE: f64 = 0.5;
/// Users consume the free space above F_pass in so long at the highest pressure, beside what is freed.
const SPACE_SECONDS: f64 = 2.0;
/// Value reads in flight of a sub-compaction, beside many reads of users and otherwise.
const READS_IN_FLIGHT: (usize, usize) = (1, 4);
/// So many reads of users a second are many.
const MANY_READS: u64 = 1_000;
/// What a freed byte costs at most, in written bytes: with more, the measure is of too few chunks.
const COST_MAX: f64 = 64.0;

/// What was observed of a volume.
#[derive(Clone, Copy, Debug)]
pub struct LogPaceInput {
    /// The limits of its pool.
    pub limits: SpaceLimits,
    /// The bytes of a chunk.
    pub chunk_bytes: u32,
    /// The free chunks.
    pub free: u32,
    /// What users wrote of late, to both logs, in bytes a second.
    pub consumed_per_second: u64,
    /// What compaction freed of late beyond what it wrote, in bytes a second; 0 if nothing.
    pub freed_per_second: u64,
    /// What compaction wrote for each byte that it freed beyond that; 0 is taken for unknown.
    pub cost: f64,
    /// The reads of users a second.
    pub reads_per_second: u64,
    /// What compaction may write, in bytes a second ([`super::settings::LogSettings::compaction_max_per_second`]); 0 for no compaction.
    pub compaction_max_per_second: u64,
}

/// How fast things may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogPaceRates {
    /// What users may write, in bytes a second; [`u64::MAX`] for no limit.
    pub users_per_second: u64,
    /// What compaction may write, in bytes a second. Whether it runs is for [`SpaceLimits::start`].
    pub compaction_per_second: u64,
    /// The value reads in flight of each sub-compaction.
    pub reads_in_flight: usize,
}

/// How fast compaction and users may write.
pub fn log_pace(input: &LogPaceInput) -> LogPaceRates {
    let pressure = input.limits.pressure(input.free);
    let has_compaction = input.compaction_max_per_second > 0;
    // Without compaction no delay would free anything.
    let is_limited = has_compaction && pressure > HIGH_PRESSURE;
    let is_beside_reads = input.reads_per_second >= MANY_READS && pressure < HIGH_PRESSURE;
    LogPaceRates {
        users_per_second: if is_limited { users_rate(input, pressure) } else { u64::MAX },
        compaction_per_second: compaction_rate(input, pressure).min(input.compaction_max_per_second),
        reads_in_flight: if is_beside_reads { READS_IN_FLIGHT.0 } else { READS_IN_FLIGHT.1 },
    }
}

/// The bytes between F_start and F_pass.
fn span_bytes(input: &LogPaceInput) -> f64 {
    f64::from(input.limits.start - input.limits.pass) * f64::from(input.chunk_bytes)
}

/// What compaction writes to free its part of what users consume, or to make up for what is missing, whichever is more.
fn compaction_rate(input: &LogPaceInput, pressure: f64) -> u64 {
    let (least, more) = FREED_PARTS;
    let beside_users = input.consumed_per_second as f64 * (least + more * pressure);
    let refill = span_bytes(input) * pressure * pressure / REFILL_SECONDS;
    let cost = if input.cost > 0.0 { input.cost.min(COST_MAX) } else { 1.0 };
    (beside_users.max(refill) * cost).max(COMPACTION_MIN) as u64
}

/// The limit of users: unbounded at [`HIGH_PRESSURE`], and falling from there on.
fn users_rate(input: &LogPaceInput, pressure: f64) -> u64 {
    // 0 at high pressure, 1 at the highest.
    let way = (pressure - HIGH_PRESSURE) / (1.0 - HIGH_PRESSURE);
    let spare_bytes = span_bytes(input) * (1.0 - pressure);
    // All of what is freed at first, half of it in the end: so space settles before passes stop users.
    let of_freed = input.freed_per_second as f64 * (1.0 - way / 2.0);
    (of_freed + spare_bytes / (SPACE_SECONDS * way)).max(USERS_MIN) as u64
}

/// Rates count for about so long.
const RATE_TIME: Nanos = Nanos::from_secs(1);
/// What was freed counts for about so long: it comes chunk by chunk.
const FREED_TIME: Nanos = Nanos::from_secs(3);
/// The cost is not known before so many chunks were emptied.
const COST_CHUNKS_MIN: u64 = 16;
/// It is measured over the last emptied chunks: so many of them, or a 64th of a small pool. With nine tenths alive, one chunk more or
/// less among 16 would change it by a half.
const COST_CHUNKS_MAX: u64 = 512;
const COST_CHUNKS_IN_POOL: u64 = 64;

/// The totals of a volume since its opening.
#[derive(Clone, Copy, Debug, Default)]
pub struct LogPaceTotals {
    /// What users appended to both logs, in bytes.
    pub consumed_bytes: u64,
    /// What compaction appended to both logs, in bytes.
    pub compacted_bytes: u64,
    /// The chunks that compaction emptied, in bytes.
    pub emptied_bytes: u64,
    /// The reads of users.
    pub reads: u64,
}

impl LogPaceTotals {
    fn since(self, before: LogPaceTotals) -> LogPaceTotals {
        LogPaceTotals {
            consumed_bytes: self.consumed_bytes.saturating_sub(before.consumed_bytes),
            compacted_bytes: self.compacted_bytes.saturating_sub(before.compacted_bytes),
            emptied_bytes: self.emptied_bytes.saturating_sub(before.emptied_bytes),
            reads: self.reads.saturating_sub(before.reads),
        }
    }
}

/// Measures rates from totals. Pure.
#[derive(Debug)]
pub struct LogPaceMeter {
    chunk_bytes: u64,
    /// The emptied chunks over which the cost is measured, at most.
    cost_chunks: u64,
    last: Option<(Nanos, LogPaceTotals)>,
    consumed_per_second: f64,
    /// Below 0 while compaction writes what will empty chunks.
    freed_per_second: f64,
    reads_per_second: f64,
    /// What compaction wrote, and emptied, of late.
    compacted_bytes: u64,
    emptied_bytes: u64,
}

impl LogPaceMeter {
    /// Without a measure, of a pool of so many chunks, each of so many bytes.
    pub fn new(chunk_bytes: u32, pool: u32) -> LogPaceMeter {
        let cost_chunks = u64::from(pool) / COST_CHUNKS_IN_POOL;
        LogPaceMeter {
            chunk_bytes: chunk_bytes.into(),
            cost_chunks: cost_chunks.clamp(2 * COST_CHUNKS_MIN, COST_CHUNKS_MAX),
            last: None,
            consumed_per_second: 0.0,
            freed_per_second: 0.0,
            reads_per_second: 0.0,
            compacted_bytes: 0,
            emptied_bytes: 0,
        }
    }

    /// Takes the totals at a time. What was before the first ones is not counted.
    pub fn sample(&mut self, now: Nanos, totals: LogPaceTotals) {
        let (at, before) = match self.last {
            Some(last) if now > last.0 => last,
            Some(_) => return,
            None => {
                self.last = Some((now, totals));
                return;
            }
        };
        self.last = Some((now, totals));
        let (time, new) = (now.since(at), totals.since(before));
        let approach = |rate: &mut f64, amount: f64, window: Nanos| {
            let share = (time.0 as f64 / window.0 as f64).min(1.0);
            *rate += (amount * 1e9 / time.0 as f64 - *rate) * share;
        };
        approach(&mut self.consumed_per_second, new.consumed_bytes as f64, RATE_TIME);
        approach(&mut self.reads_per_second, new.reads as f64, RATE_TIME);
        let freed_bytes = new.emptied_bytes as f64 - new.compacted_bytes as f64;
        approach(&mut self.freed_per_second, freed_bytes, FREED_TIME);
        self.compacted_bytes += new.compacted_bytes;
        self.emptied_bytes += new.emptied_bytes;
        if self.emptied_bytes >= self.cost_chunks * self.chunk_bytes {
            self.compacted_bytes /= 2;
            self.emptied_bytes /= 2;
        }
    }

    /// What users wrote, in bytes a second.
    pub fn consumed_per_second(&self) -> u64 {
        self.consumed_per_second as u64
    }

    /// What compaction freed beyond what it wrote, in bytes a second; 0 if it wrote more.
    pub fn freed_per_second(&self) -> u64 {
        self.freed_per_second as u64
    }

    /// The reads of users a second.
    pub fn reads_per_second(&self) -> u64 {
        self.reads_per_second as u64
    }

    /// What compaction wrote for each byte that it freed beyond that; 0 if nothing, and until it has emptied some chunks.
    pub fn cost(&self) -> f64 {
        if self.emptied_bytes < COST_CHUNKS_MIN * self.chunk_bytes {
            return 0.0;
        }
        let freed_bytes = self.emptied_bytes.saturating_sub(self.compacted_bytes).max(1);
        self.compacted_bytes as f64 / freed_bytes as f64
    }
}
