//! Time: CLOCK_MONOTONIC for points in time, the processor's tick counter for spans.
//!
//! [`now`] goes through the vDSO (about 25 ns); [`ticks`] is one instruction (about 8 ns) and is turned
//! into nanoseconds by a [`TscCalibration`], which calibrates itself against [`now`] without ever waiting.

use octokv_base::Nanos;

/// Nanoseconds since boot.
pub fn now() -> Nanos {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid timespec that lives through the call; CLOCK_MONOTONIC always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    Nanos(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

/// The processor's tick counter. Only differences mean something, and only through a [`TscCalibration`].
#[cfg(target_arch = "x86_64")]
pub fn ticks() -> u64 {
    // SAFETY: RDTSC exists on every x86-64 processor and only reads a counter.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// The processor's tick counter. Only differences mean something, and only through a [`TscCalibration`].
#[cfg(target_arch = "aarch64")]
pub fn ticks() -> u64 {
    let count: u64;
    // SAFETY: Linux lets user space read the virtual counter; reading it has no effect.
    unsafe { std::arch::asm!("mrs {}, cntvct_el0", out(reg) count, options(nomem, nostack)) };
    count
}

/// How long a tick is: the ratio of [`now`] to [`ticks`] since this scale was made.
#[derive(Clone, Copy, Debug)]
pub struct TscCalibration {
    start_ticks: u64,
    start: Nanos,
}

impl TscCalibration {
    /// A scale that begins to calibrate here.
    pub fn new() -> TscCalibration {
        TscCalibration { start_ticks: ticks(), start: now() }
    }

    /// The span of `count` ticks. Right to the parts per thousand once the scale is a millisecond old.
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
