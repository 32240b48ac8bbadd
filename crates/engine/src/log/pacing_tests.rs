//! Tests of pacing: tables, monotony, and a closed loop with a model of a device whose bandwidth users and compaction share.

use super::pacing::{LogPaceInput, LogPaceMeter, LogPaceRates, LogPaceTotals, log_pace};
use super::space_limits::SpaceLimits;
use octokv_base::Nanos;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

/// A pool of 6,400 chunks of 1 MiB: compaction begins below 100 free ones, and puts wait below 50.
fn input(free: u32) -> LogPaceInput {
    LogPaceInput {
        limits: SpaceLimits::new(6_400, 4, 1),
        chunk_bytes: 1 << 20,
        free,
        consumed_per_second: 40 * MIB,
        freed_per_second: 20 * MIB,
        cost: 3.0,
        reads_per_second: 0,
        compaction_max_per_second: u64::MAX,
    }
}

#[test]
fn compaction_frees_what_users_consume_at_an_eighth_of_the_pressure() {
    //  free, times 40 MiB and the cost of 3
    let table = [(6_400, 0.5), (100, 0.5), (95, 0.9), (94, 0.98), (93, 1.06), (75, 2.5), (50, 4.5), (0, 4.5)];
    for (free, times) in table {
        let rate = log_pace(&input(free)).compaction_per_second;
        let expected = (times * 120.0 * MIB as f64) as u64;
        assert!(rate.abs_diff(expected) <= 1, "{free} free: {rate} in place of {expected}");
    }
    // Between 94 and 93 free chunks pressure is 0.125.
    let unknown = LogPaceInput { cost: 0.0, ..input(75) };
    assert_eq!(log_pace(&unknown).compaction_per_second, 100 * MIB);
    let bounded = LogPaceInput { compaction_max_per_second: 7, ..input(75) };
    assert_eq!(log_pace(&bounded).compaction_per_second, 7);
}

#[test]
fn compaction_makes_up_for_what_is_missing_although_nothing_is_consumed() {
    let at = |free| {
        let idle = LogPaceInput { consumed_per_second: 0, freed_per_second: 0, cost: 2.0, ..input(free) };
        log_pace(&idle).compaction_per_second
    };
    // 50 chunks in 10 s, a freed byte for two written ones.
    assert_eq!((at(50), at(75), at(100)), (10 * MIB, 5 * MIB / 2, MIB));
}

#[test]
fn users_have_no_limit_below_half_the_pressure_and_half_of_what_is_freed_at_the_highest() {
    let at = |free| log_pace(&input(free)).users_per_second;
    assert_eq!([at(6_400), at(100), at(75)], [u64::MAX; 3]);
    // A chunk further, a 25th of the way: 24 chunks in 0.08 s, and 98 % of what is freed.
    let expected = (20.0 * 0.98 + 24.0 / 0.08) * MIB as f64;
    assert!(at(74).abs_diff(expected as u64) <= 1, "{}", at(74));
    assert_eq!((at(50), at(0)), (10 * MIB, 10 * MIB));
    let nothing = LogPaceInput { freed_per_second: 0, ..input(50) };
    assert_eq!(log_pace(&nothing).users_per_second, MIB);
    let without = LogPaceInput { compaction_max_per_second: 0, ..input(50) };
    let expected = LogPaceRates { users_per_second: u64::MAX, compaction_per_second: 0, reads_in_flight: 4 };
    assert_eq!(log_pace(&without), expected);
}

#[test]
fn a_sub_compaction_reads_one_value_at_once_beside_many_reads_unless_space_is_short() {
    for (free, reads_per_second, reads_in_flight) in
        [(90, 0, 4), (90, 999, 4), (90, 1_000, 1), (76, 50_000, 1), (75, 50_000, 4), (50, 50_000, 4)]
    {
        let rates = log_pace(&LogPaceInput { reads_per_second, ..input(free) });
        assert_eq!(rates.reads_in_flight, reads_in_flight, "{free} free, {reads_per_second} reads");
    }
}

proptest! {
    #[test]
    fn fewer_free_chunks_make_users_no_faster_and_compaction_no_slower(
        pool in 64..200_000u32, stores in 1..33u32, free in any::<u32>(), consumed in 0..1u64 << 32,
        freed in 0..1u64 << 32, cost in 0.0..100.0f64,
    ) {
        let limits = SpaceLimits::new(pool, stores.min(pool / 16), 1);
        let free = free % (2 * limits.start);
        let input = LogPaceInput {
            limits, free, consumed_per_second: consumed, freed_per_second: freed, cost, ..input(0)
        };
        let (more, less) = (log_pace(&input), log_pace(&LogPaceInput { free: free.saturating_sub(1), ..input }));
        prop_assert!(less.users_per_second <= more.users_per_second && less.users_per_second > 0);
        prop_assert!(less.compaction_per_second >= more.compaction_per_second);
        prop_assert!(more.compaction_per_second > 0);
    }
}

#[test]
fn the_meter_gives_rates_of_a_second_and_the_cost_of_some_chunks() {
    let mut meter = LogPaceMeter::new(1 << 20, 6_400);
    let mut totals = LogPaceTotals { consumed_bytes: 900 * MIB, ..LogPaceTotals::default() };
    meter.sample(Nanos::from_millis(0), totals);
    assert_eq!((meter.consumed_per_second(), meter.cost()), (0, 0.0), "what was before is not known");
    // Ten seconds of 10 MiB of users, 30 MiB of compaction and 40 MiB that it empties.
    for look in 1..=500 {
        totals.consumed_bytes += MIB / 5;
        totals.compacted_bytes += 3 * MIB / 5;
        totals.emptied_bytes += 4 * MIB / 5;
        totals.reads += 2;
        meter.sample(Nanos::from_millis(20 * look), totals);
        // Again at the same time: nothing new.
        meter.sample(Nanos::from_millis(20 * look), totals);
        assert_eq!(meter.cost() > 0.0, look >= 21, "{look}");
    }
    let near = |found: u64, expected: u64| found.abs_diff(expected) * 20 < expected;
    assert!(near(meter.consumed_per_second(), 10 * MIB), "{}", meter.consumed_per_second());
    assert!(near(meter.freed_per_second(), 10 * MIB), "{}", meter.freed_per_second());
    assert!(near(meter.reads_per_second(), 100), "{}", meter.reads_per_second());
    assert!((meter.cost() - 3.0).abs() < 0.05, "{}", meter.cost());
    // Then the heads of the logs have half as much live data: another cost, within 100 chunks.
    for look in 501..=1_000 {
        totals.compacted_bytes += 2 * MIB / 5;
        totals.emptied_bytes += 4 * MIB / 5;
        meter.sample(Nanos::from_millis(20 * look), totals);
    }
    assert!((meter.cost() - 1.0).abs() < 0.05, "{}", meter.cost());
    assert!(meter.consumed_per_second() < MIB / 100);
    // While it writes and empties nothing, it frees nothing.
    totals.compacted_bytes += 1_000 * MIB;
    meter.sample(Nanos::from_millis(21_000), totals);
    assert_eq!(meter.freed_per_second(), 0);
}

/// A pool, and a device whose bandwidth users and compaction share in proportion of what they want to write.
struct Model {
    limits: SpaceLimits,
    chunk_bytes: u32,
    /// What the device writes, in bytes a second.
    device: f64,
    /// The live part of the chunks at the heads.
    live: f64,
    totals: LogPaceTotals,
    meter: LogPaceMeter,
    now: Nanos,
    /// The free chunks, were nothing written since the start.
    free_at_start: u32,
}

/// What happened in a step.
#[derive(Clone, Copy, Debug)]
struct Step {
    /// What users wrote, in bytes a second.
    users: f64,
    /// Their limit, at most what the device gives.
    limit: f64,
    pressure: f64,
    free: u32,
}

/// The time between two looks, without and with pressure.
const STEPS: [Nanos; 2] = [Nanos::from_millis(20), Nanos::from_millis(2)];

impl Model {
    fn new(device: u64, live: f64) -> Model {
        // A disk of 40 GB: 594 chunks between F_start and F_pass.
        let (limits, chunk_bytes) = (SpaceLimits::new(76_000, 32, 1), 512 << 10);
        Model {
            limits,
            chunk_bytes,
            device: device as f64,
            live,
            totals: LogPaceTotals::default(),
            meter: LogPaceMeter::new(chunk_bytes, limits.pool),
            now: Nanos(0),
            free_at_start: limits.start + 200,
        }
    }

    /// The free chunks: a log takes whole ones, and a chunk is free when all of its live contents were written elsewhere.
    fn free(&self) -> u32 {
        let chunk_bytes = u64::from(self.chunk_bytes);
        let taken = self.totals.consumed_bytes.div_ceil(chunk_bytes)
            + self.totals.compacted_bytes.div_ceil(chunk_bytes);
        let emptied = self.totals.emptied_bytes / chunk_bytes;
        (u64::from(self.free_at_start) + emptied).saturating_sub(taken) as u32
    }

    /// One step in which users want so many bytes a second.
    fn step(&mut self, wanted: u64) -> Step {
        self.meter.sample(self.now, self.totals);
        let free = self.free();
        let rates = log_pace(&LogPaceInput {
            limits: self.limits,
            chunk_bytes: self.chunk_bytes,
            free,
            consumed_per_second: self.meter.consumed_per_second(),
            freed_per_second: self.meter.freed_per_second(),
            cost: self.meter.cost(),
            reads_per_second: self.meter.reads_per_second(),
            compaction_max_per_second: u64::MAX,
        });
        // Passes stop users, whatever their rate.
        let may_begin = free >= self.limits.pass;
        let users = if may_begin { wanted.min(rates.users_per_second) as f64 } else { 0.0 };
        let compaction = if free < self.limits.start { rates.compaction_per_second as f64 } else { 0.0 };
        let share = (self.device / (users + compaction).max(1.0)).min(1.0);
        let pressure = self.limits.pressure(free);
        let time = STEPS[usize::from(pressure > 0.0)];
        let seconds = time.0 as f64 / 1e9;
        self.totals.consumed_bytes += (users * share * seconds) as u64;
        self.totals.compacted_bytes += (compaction * share * seconds) as u64;
        let chunk_bytes = u64::from(self.chunk_bytes);
        let emptied = (self.totals.compacted_bytes as f64 / (self.live * chunk_bytes as f64)) as u64;
        self.totals.emptied_bytes = emptied * chunk_bytes;
        self.now = self.now + time;
        let limit = (rates.users_per_second as f64).min(self.device);
        Step { users: users * share, limit, pressure, free }
    }

    /// So many seconds in which users want so many bytes a second.
    fn run(&mut self, seconds: u64, wanted: u64) -> Vec<Step> {
        let end = self.now + Nanos::from_secs(seconds);
        std::iter::from_fn(|| (self.now < end).then(|| self.step(wanted))).collect()
    }
}

#[test]
fn free_space_settles_at_an_eighth_of_the_pressure_if_the_device_keeps_up() {
    // Users and device in MiB a second, live part: the cost is 1, 1, 4, 9, 9.
    for (wanted, device, live) in
        [(50, 500, 0.5), (200, 2_000, 0.5), (100, 1_000, 0.8), (40, 600, 0.9), (150, 2_000, 0.9)]
    {
        let mut model = Model::new(device * MIB, live);
        let steps = model.run(300, wanted * MIB);
        let at = format!("{wanted} of {device}, {live} live");
        let settled = &steps[steps.len() / 2..];
        // No limit delays users, and compaction leaves them the device: they have what they want, in the end all of it.
        let wanted = (wanted * MIB) as f64;
        assert!(steps.iter().all(|step| step.limit >= wanted && step.users >= 0.9 * wanted), "{at}");
        assert!(settled.iter().all(|step| step.users >= wanted), "{at}");
        let pressures = || settled.iter().map(|step| step.pressure);
        let mean = pressures().sum::<f64>() / settled.len() as f64;
        let (lowest, highest) = (pressures().fold(1.0, f64::min), pressures().fold(0.0, f64::max));
        assert!((mean - 0.125).abs() < 0.002, "{at}: mean {mean}");
        assert!(lowest > 0.12 && highest < 0.13, "{at}: {lowest} to {highest}");
    }
}

#[test]
fn users_slow_down_to_what_the_device_keeps_up_with_and_are_never_stopped() {
    for (wanted, device, live) in [(1_000, 600, 0.8), (200, 600, 0.8), (2_000, 2_000, 0.9), (400, 150, 0.5)] {
        let mut model = Model::new(device * MIB, live);
        let steps = model.run(300, wanted * MIB);
        let at = format!("{wanted} of {device}, {live} live");
        // Of each byte of users the device writes as many more as it costs to free one.
        let sustainable = device as f64 * MIB as f64 * (1.0 - live);
        let least_free = steps.iter().map(|step| step.free).min().unwrap();
        let changes = steps.windows(2).map(|pair| {
            let (before, after) = (pair[0].limit, pair[1].limit);
            (before / after).max(after / before)
        });
        let change = changes.fold(1.0, f64::max);
        let settled = &steps[steps.len() / 2..];
        let mean = settled.iter().map(|step| step.users).sum::<f64>() / settled.len() as f64;
        let least = settled.iter().map(|step| step.users).fold(f64::MAX, f64::min);
        let most = settled.iter().map(|step| step.users).fold(0.0, f64::max);
        assert!(least_free > model.limits.pass, "{at}: {least_free} free");
        assert!(mean >= 0.98 * sustainable && mean <= 1.02 * sustainable, "{at}: {mean} of {sustainable}");
        assert!(least >= 0.9 * mean && most <= 1.1 * mean, "{at}: {least} to {most}, mean {mean}");
        assert!(change <= 1.25, "{at}: a limit {change} times that before");
    }
}

#[test]
fn bursts_and_rests_neither_stop_users_nor_leave_compaction_at_rest() {
    let mut model = Model::new(1_000 * MIB, 0.8);
    let mut slowest = f64::MAX;
    for _ in 0..20 {
        // Ten seconds of 300 MiB/s, of which compaction would need 1,500: and then little.
        for step in model.run(10, 300 * MIB) {
            assert!(step.free > model.limits.pass, "{step:?}");
            slowest = slowest.min(step.users);
        }
        model.run(30, 5 * MIB);
    }
    assert!(slowest > 150.0 * MIB as f64, "{slowest}");
    // What users left at high pressure is made up for without them.
    model.run(60, 1_000 * MIB);
    let before = model.limits.pressure(model.free());
    model.run(120, 0);
    let after = model.limits.pressure(model.free());
    assert!(before > 0.5 && after < 0.1, "{before} to {after}");
}
