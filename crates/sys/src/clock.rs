//! Clocks: CLOCK_MONOTONIC for time points, the processor's tick counter for durations, and the wall clock.
//!
//! [`now`] goes through the vDSO (about 25 ns); [`ticks`] is one instruction (about 8 ns). A [`TscCalibration`] converts
//! ticks to nanoseconds; it calibrates against [`now`] without waiting.
//!
//! Unsafe code: `clock_gettime` and the counter instruction. Tested below.

use octokv_base::{Nanos, UnixTime};
use std::time::SystemTime;

/// Wall-clock time; 0 if the system's clock is before 1970.
pub fn wall() -> UnixTime {
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    UnixTime(since_1970.map_or(0, |time| time.as_millis() as u64))
}

/// Nanoseconds since boot.
pub fn now() -> Nanos {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid timespec that lives through the call; CLOCK_MONOTONIC always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    Nanos(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

/// The processor's tick counter (TSC, on aarch64 CNTVCT). Only differences are meaningful, through a [`TscCalibration`].
#[cfg(target_arch = "x86_64")]
pub fn ticks() -> u64 {
    // SAFETY: RDTSC exists on every x86-64 processor and only reads a counter.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// The processor's tick counter (TSC, on aarch64 CNTVCT). Only differences are meaningful, through a [`TscCalibration`].
#[cfg(target_arch = "aarch64")]
pub fn ticks() -> u64 {
    let count: u64;
    // SAFETY: Linux lets user space read the virtual counter; reading it has no effect.
    unsafe { std::arch::asm!("mrs {}, cntvct_el0", out(reg) count, options(nomem, nostack)) };
    count
}

/// The length of a tick: the ratio of [`now`] to [`ticks`] since the calibration was created. On x86-64 a tick is one of
/// the TSC, on aarch64 one of CNTVCT.
#[derive(Clone, Copy, Debug)]
pub struct TscCalibration {
    start_ticks: u64,
    start: Nanos,
}

impl TscCalibration {
    /// Starts a calibration.
    pub fn new() -> TscCalibration {
        TscCalibration { start_ticks: ticks(), start: now() }
    }

    /// Converts `count` ticks to a duration. Exact to parts per thousand once the calibration is a millisecond old.
    pub fn ticks_to_nanos(&self, count: u64) -> Nanos {
        let elapsed_ticks = ticks().saturating_sub(self.start_ticks).max(1);
        let elapsed = now().since(self.start);
        Nanos((u128::from(count) * u128::from(elapsed.0) / u128::from(elapsed_ticks)) as u64)
    }
}

impl Default for TscCalibration {
    fn default() -> TscCalibration {
        TscCalibration::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_and_the_clock_agree() {
        let calibration = TscCalibration::new();
        let (start_ticks, start) = (ticks(), now());
        while now().since(start) < Nanos::from_millis(5) {}
        let span = now().since(start).0 as f64;
        let by_ticks = calibration.ticks_to_nanos(ticks() - start_ticks).0 as f64;
        assert!((by_ticks / span - 1.0).abs() < 0.05, "{by_ticks} ns by ticks, {span} ns by the clock");
    }
}
