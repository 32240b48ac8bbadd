//! Pacing: how fast compaction writes, and how fast writers may, so that these slow down little by little to what compaction can keep up with. Pure.
//!
//! ```text
//!   pressure   0 ── below every soft limit ──▶ 1 at a hard limit: the highest of level 0, pending bytes, memtables and space
//!   writers    may write at fast × (slow ÷ fast)^pressure: from what the device takes down to a part of what compaction drains; and, of the space that is left,
//!              what compaction frees, less the less there is
//!   compaction from the speed that ends the work in a given time, up to that of the device at a pressure of one half
//! ```
//! The limit of writers falls without steps, and is never 0. `common/write_throttle.rs` keeps them to it.
//!
//! Invariants: with more pressure, no writer is faster and no compaction slower. Tested below, also in a closed loop.

use octokv_base::Nanos;

/// Where pressure begins and where it ends, and what follows from it.
#[derive(Clone, Debug)]
pub struct PacingSettings {
    /// Runs of level 0 ([`super::tree_version::TreeVersion::level0_runs`]) from which on writers are delayed.
    pub level0_soft: usize,
    /// Runs of level 0 at which the delay is the longest.
    pub level0_hard: usize,
    /// Pending bytes ([`super::compaction_choice::pending_bytes`]) from which on writers are delayed.
    pub pending_soft_bytes: u64,
    /// Pending bytes at which the delay is the longest.
    pub pending_hard_bytes: u64,
    /// The part of the memory for memtables, in thousandths, from which on writers are delayed.
    pub memory_soft_permille: u64,
    /// Space for puts below which writers are delayed, in bytes; at 0 the delay is the longest.
    pub space_soft_bytes: u64,
    /// The time in which compaction ends its work if nothing is written.
    pub catch_up: Nanos,
    /// The least speed of compactions, in bytes a second.
    pub compaction_min: u64,
    /// The same of those with tables that are mostly tombstones: until they end, a seek steps over each tombstone and what it replaced.
    pub tombstones_min: u64,
    /// What the device writes at most, in bytes a second.
    pub device_max: u64,
    /// What compactions may write at most, in bytes a second. With 0 there are none: then only memory delays writers, since nothing else would decrease.
    pub compaction_max: u64,
}

impl Default for PacingSettings {
    fn default() -> PacingSettings {
        PacingSettings {
            level0_soft: 8,
            level0_hard: 32,
            pending_soft_bytes: 4 << 30,
            pending_hard_bytes: 64 << 30,
            memory_soft_permille: 600,
            space_soft_bytes: 256 << 20,
            catch_up: Nanos::from_secs(5),
            compaction_min: 16 << 20,
            tombstones_min: 128 << 20,
            device_max: 2 << 30,
            compaction_max: u64::MAX,
        }
    }
}

/// What was observed of a tree.
#[derive(Clone, Copy, Debug, Default)]
pub struct PacingInput {
    /// The runs of level 0.
    pub level0_runs: usize,
    /// What compactions have to read until all levels have reached their targets, in bytes.
    pub pending_bytes: u64,
    /// The bytes of all memtables.
    pub memory_bytes: u64,
    /// The bytes that memtables may have.
    pub memory_bytes_max: u64,
    /// The bytes that puts may use before they wait for space; [`u64::MAX`] if there is nothing to collect, so that no delay makes any.
    pub spare_bytes: u64,
    /// What users wrote of late, in bytes a second.
    pub written_per_second: u64,
    /// The space that flushes and compactions freed of late beside what they wrote, in bytes a second.
    pub reclaimed_per_second: u64,
    /// What flushes and compactions took out of memtables and level 0 of late, in bytes of users a second; 0 if unknown.
    pub drained_per_second: u64,
}

/// How fast things may go.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// What compactions may write, in bytes a second.
    pub compaction_per_second: u64,
    /// What users may write, in bytes a second; [`u64::MAX`] without pressure.
    pub users_per_second: u64,
    /// How far compaction is on the way to all that the device gives, from 0 to 1.
    pub urgency: f64,
}

impl Pace {
    /// The bytes a second of work that has to end in time at `calm` of them: up to `most`.
    pub fn hastened(&self, calm: u64, most: u64) -> u64 {
        let calm = calm.min(most);
        calm + ((most - calm) as f64 * self.urgency) as u64
    }
}

/// Writers use the space that is left in so long, if compaction frees none.
const SPACE_TIME: Nanos = Nanos::from_secs(2);
/// The least that users may write at the highest pressure, in bytes a second.
const USERS_MIN: f64 = (1 << 20) as f64;
/// At the highest pressure users get this part of what is drained.
const DRAINED_SHARE: f64 = 0.5;

/// How far `value` is on the way from `soft` to `hard`, from 0 to 1.
fn part(value: u64, soft: u64, hard: u64) -> f64 {
    let way = hard.saturating_sub(soft).max(1);
    (value.saturating_sub(soft) as f64 / way as f64).min(1.0)
}

/// The pressure on writers, from 0 to 1: that of the work that compaction is behind, and that of space.
fn pressures(input: &PacingInput, settings: &PacingSettings) -> (f64, f64) {
    let soft_bytes =
        u128::from(input.memory_bytes_max) * u128::from(settings.memory_soft_permille.min(1000)) / 1000;
    let level0 = part(input.level0_runs as u64, settings.level0_soft as u64, settings.level0_hard as u64);
    let pending = part(input.pending_bytes, settings.pending_soft_bytes, settings.pending_hard_bytes);
    let memory = part(input.memory_bytes, soft_bytes as u64, input.memory_bytes_max);
    let used_of_soft = settings.space_soft_bytes.saturating_sub(input.spare_bytes);
    let space = part(used_of_soft, 0, settings.space_soft_bytes);
    match settings.compaction_max {
        0 => (memory, 0.0),
        _ => (level0.max(pending).max(memory), space),
    }
}

/// What users may write so that space is left until compaction has freed some: as much as it frees with half of the soft limit left, and twice that at the limit.
fn users_by_space(input: &PacingInput, settings: &PacingSettings) -> u64 {
    let left = input.spare_bytes as f64 / settings.space_soft_bytes.max(1) as f64;
    let unfreed = input.spare_bytes as f64 * 1e9 / SPACE_TIME.0 as f64;
    (2.0 * left * input.reclaimed_per_second as f64 + unfreed).max(USERS_MIN) as u64
}

/// How fast compactions and writers may go.
pub fn pace(input: &PacingInput, settings: &PacingSettings) -> Pace {
    let (work, space) = pressures(input, settings);
    let pressure = work.max(space);
    let drained = match input.drained_per_second {
        0 => settings.compaction_min.min(settings.compaction_max) as f64,
        drained => drained as f64,
    };
    let slow = (drained * DRAINED_SHARE).max(USERS_MIN);
    let fast = (settings.device_max as f64).max(input.written_per_second as f64).max(slow);
    let users_by_work = match work > 0.0 {
        true => (fast * (slow / fast).powf(work)) as u64,
        false => u64::MAX,
    };
    let users_per_second = match space > 0.0 {
        true => users_by_work.min(users_by_space(input, settings)),
        false => users_by_work,
    };
    // All of the device at a pressure of one half; without pressure the speed that ends the work in time beside new writes.
    let catch_up_seconds = (settings.catch_up.0 as f64 / 1e9).max(0.001);
    let needed = input.pending_bytes as f64 / catch_up_seconds + input.written_per_second as f64;
    let calm = needed.max(settings.compaction_min as f64) as u64;
    let pace = Pace { compaction_per_second: 0, users_per_second, urgency: (2.0 * pressure).min(1.0) };
    let compaction_per_second = pace.hastened(calm, settings.device_max).min(settings.compaction_max);
    Pace { compaction_per_second, ..pace }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn input() -> PacingInput {
        PacingInput {
            level0_runs: 2,
            pending_bytes: 1 << 30,
            memory_bytes: 10 << 20,
            memory_bytes_max: 100 << 20,
            spare_bytes: u64::MAX,
            written_per_second: 50 << 20,
            reclaimed_per_second: 30 << 20,
            drained_per_second: 100 << 20,
        }
    }

    fn highest_pressure(input: &PacingInput, settings: &PacingSettings) -> f64 {
        let (work, space) = pressures(input, settings);
        work.max(space)
    }

    #[test]
    fn pressure_is_that_of_the_worst_of_four() {
        let settings = PacingSettings::default();
        let (mebibyte, gibibyte) = (1 << 20, 1 << 30);
        //  want  level 0  pending         memory
        let table = [
            (0.0, 2, gibibyte, 10 * mebibyte),
            (0.0, 8, 4 * gibibyte, 60 * mebibyte),
            (0.5, 20, gibibyte, 10 * mebibyte),
            (0.5, 20, 34 * gibibyte, 80 * mebibyte),
            (0.5, 2, 34 * gibibyte, 10 * mebibyte),
            (0.25, 2, gibibyte, 70 * mebibyte),
            (1.0, 32, gibibyte, 10 * mebibyte),
            (1.0, 2, 100 * gibibyte, 10 * mebibyte),
            (1.0, 2, gibibyte, 100 * mebibyte),
        ];
        for (want, level0_runs, pending_bytes, memory_bytes) in table {
            let input = PacingInput { level0_runs, pending_bytes, memory_bytes, ..input() };
            let found = highest_pressure(&input, &settings);
            assert!((found - want).abs() < 1e-6, "{found} instead of {want} for {input:?}");
        }
        for (want, spare_bytes) in [(0.0, 256 * mebibyte), (0.25, 192 * mebibyte), (1.0, 0)] {
            let found = highest_pressure(&PacingInput { spare_bytes, ..input() }, &settings);
            assert!((found - want).abs() < 1e-6, "{found} instead of {want} with {spare_bytes} B");
        }
    }

    #[test]
    fn users_have_no_limit_below_the_soft_limits_and_half_of_what_is_drained_at_the_hard_ones() {
        let settings = PacingSettings::default();
        assert_eq!(pace(&input(), &settings).users_per_second, u64::MAX);
        let full = PacingInput { level0_runs: 1000, pending_bytes: u64::MAX, ..input() };
        assert!(pace(&full, &settings).users_per_second.abs_diff(50 << 20) < 1000);
        let unknown = PacingInput { drained_per_second: 0, ..full };
        assert!(pace(&unknown, &settings).users_per_second.abs_diff(8 << 20) < 1000);
        let nothing = PacingInput { drained_per_second: 1, ..full };
        assert!(pace(&nothing, &settings).users_per_second.abs_diff(1 << 20) < 1000);
    }

    #[test]
    fn users_have_what_is_freed_once_half_of_the_space_is_left_and_never_nothing() {
        let settings = PacingSettings { space_soft_bytes: 100 << 20, ..PacingSettings::default() };
        let at = |spare_bytes, reclaimed_per_second| {
            let input = PacingInput { spare_bytes, reclaimed_per_second, ..input() };
            pace(&input, &settings).users_per_second
        };
        assert_eq!(at(100 << 20, 0), u64::MAX);
        assert_eq!(at(50 << 20, 0), 25 << 20, "it lasts two seconds");
        assert_eq!(at(50 << 20, 40 << 20), (40 + 25) << 20);
        assert_eq!(at(25 << 20, 40 << 20), (20 << 20) + (25 << 19));
        assert_eq!(at(0, 1 << 30), 1 << 20);
    }

    #[test]
    fn compaction_ends_its_work_in_time_and_gets_everything_at_half_pressure() {
        let settings = PacingSettings::default();
        let at = |pending_bytes, level0_runs| {
            let input = PacingInput { pending_bytes, level0_runs, written_per_second: 0, ..input() };
            pace(&input, &settings).compaction_per_second
        };
        assert_eq!(at(0, 0), settings.compaction_min);
        assert_eq!(at(1 << 30, 0), (1 << 30) / 5);
        assert_eq!(at(0, 20), settings.device_max);
    }

    #[test]
    fn compaction_keeps_to_its_bound_at_any_pressure_and_without_compaction_only_memory_limits() {
        let bounded = |compaction_max| PacingSettings { compaction_max, ..PacingSettings::default() };
        let urgent = PacingInput { level0_runs: 32, pending_bytes: 100 << 30, ..input() };
        for (compaction_max, input, want) in [
            (1 << 20, input(), 1 << 20),
            (1 << 20, urgent, 1 << 20),
            (1 << 30, urgent, 1 << 30),
            (u64::MAX, urgent, 2 << 30),
            (0, urgent, 0),
        ] {
            assert_eq!(pace(&input, &bounded(compaction_max)).compaction_per_second, want);
        }
        assert_eq!(highest_pressure(&urgent, &bounded(1)), 1.0);
        assert_eq!(pace(&urgent, &bounded(0)).users_per_second, u64::MAX);
        let full = PacingInput { memory_bytes: 100 << 20, ..urgent };
        assert!(highest_pressure(&full, &bounded(0)) == 1.0);
    }

    proptest! {
        #[test]
        fn more_of_anything_never_makes_writers_faster_or_compaction_slower(
            numbers in any::<[u32; 7]>(), more in any::<[u32; 4]>(),
        ) {
            let settings = PacingSettings::default();
            let [level0, pending, memory, max, spare, written, drained] = numbers.map(u64::from);
            let less = PacingInput {
                level0_runs: (level0 % 50) as usize,
                pending_bytes: pending << 8,
                memory_bytes: memory,
                memory_bytes_max: max,
                spare_bytes: spare,
                written_per_second: written,
                reclaimed_per_second: written,
                drained_per_second: drained,
            };
            let more = PacingInput {
                level0_runs: less.level0_runs + (more[0] % 10) as usize,
                pending_bytes: less.pending_bytes + (u64::from(more[1]) << 6),
                memory_bytes: less.memory_bytes + u64::from(more[2]),
                spare_bytes: less.spare_bytes.saturating_sub(u64::from(more[3])),
                ..less
            };
            let (before, after) = (pace(&less, &settings), pace(&more, &settings));
            prop_assert!(before.users_per_second >= after.users_per_second && after.users_per_second > 0);
            prop_assert!(before.compaction_per_second <= after.compaction_per_second);
            prop_assert!(after.compaction_per_second <= settings.device_max.max(settings.compaction_min));
        }
    }

    /// Writers that want `wanted` bytes a second, on a device of `device` bytes a second that writes each byte of a user `amplification` times. Gives what they
    /// wrote in each of the last 200 of 400 steps of 100 ms, whether memory was ever full, and the highest quotient of two limits in turn then.
    fn closed_loop(wanted: u64, device: u64, amplification: u64) -> (Vec<u64>, bool, f64) {
        let settings = PacingSettings { device_max: device, ..PacingSettings::default() };
        let (memory_bytes_max, table_bytes) = (256 << 20, 32 << 20);
        let (mut memory, mut level0) = (0u64, 0u64);
        let (mut written, mut drained) = (0, 0);
        let (mut history, mut was_full, mut limits) = (Vec::new(), false, Vec::new());
        for step in 0..400 {
            let input = PacingInput {
                level0_runs: (level0 / table_bytes) as usize,
                pending_bytes: level0 * (amplification - 1),
                memory_bytes: memory,
                memory_bytes_max,
                spare_bytes: u64::MAX,
                written_per_second: written,
                reclaimed_per_second: 0,
                drained_per_second: drained,
            };
            let pace = pace(&input, &settings);
            was_full |= memory >= memory_bytes_max;
            written = wanted.min(pace.users_per_second);
            let arrives = (written / 10).min(memory_bytes_max - memory);
            // Journal and flush come first; compaction has the rest, up to its pace.
            let flushes = memory.min((device / 10).saturating_sub(arrives));
            let rest = (device / 10).saturating_sub(arrives + flushes).min(pace.compaction_per_second / 10);
            let compacts = (rest / (amplification - 1)).min(level0);
            memory = memory + arrives - flushes;
            level0 = level0 + flushes - compacts;
            drained = (drained * 9 + compacts * 10) / 10;
            if step >= 200 {
                history.push(arrives * 10);
                limits.push(pace.users_per_second.min(device) as f64);
            }
        }
        let changes = limits.windows(2).map(|pair| (pair[0] / pair[1]).max(pair[1] / pair[0]));
        (history, was_full, changes.fold(1.0, f64::max))
    }

    #[test]
    fn writers_slow_down_to_what_the_device_keeps_up_with_and_never_stop() {
        let mebibyte = 1 << 20;
        // What the device can keep up with is a twelfth of its speed: journal, flush, ten times compaction.
        for (wanted, device) in [(1000, 600), (200, 600), (2000, 2000), (40, 600)] {
            let (wanted, device) = (wanted * mebibyte, device * mebibyte);
            let (history, was_full, change) = closed_loop(wanted, device, 11);
            let most = (device / 12).min(wanted);
            let mean = history.iter().sum::<u64>() / history.len() as u64;
            let (least, highest) = (history.iter().min().unwrap(), history.iter().max().unwrap());
            assert!(!was_full, "{wanted} of {device}: memory was full");
            assert!(mean * 10 >= most * 7, "{wanted} of {device}: {mean} instead of {most}");
            assert!(least * 3 >= mean && *highest <= 3 * mean, "{wanted} of {device}: {least} to {highest}");
            assert!(change <= 1.5, "{wanted} of {device}: a limit {change} times that before");
        }
    }
}
