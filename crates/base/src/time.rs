//! Time in nanoseconds, as one type for time points and durations, and wall-clock time.

use std::ops::{Add, Sub};

/// A point in time or a duration, in nanoseconds. Time points count from a zero that the driver defines: boot
/// for the kernel's clock, the start of the run for the simulated clock.
///
/// Arithmetic saturates: a sum never exceeds [`Nanos::NEVER`], and `a - b` is zero if `b` is larger. A late
/// timer or a clock read on another core must not panic a reactor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

impl Nanos {
    /// The earliest time point, and the empty duration.
    pub const ZERO: Nanos = Nanos(0);
    /// Later than every time point: the deadline of an event that does not occur.
    pub const NEVER: Nanos = Nanos(u64::MAX);

    /// A duration of whole microseconds.
    pub const fn from_micros(micros: u64) -> Nanos {
        Nanos(micros * 1_000)
    }
    /// A duration of whole milliseconds.
    pub const fn from_millis(millis: u64) -> Nanos {
        Nanos(millis * 1_000_000)
    }
    /// A duration of whole seconds.
    pub const fn from_secs(secs: u64) -> Nanos {
        Nanos(secs * 1_000_000_000)
    }
    /// The duration in seconds.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }
    /// The duration multiplied by `count`, saturating.
    pub const fn times(self, count: usize) -> Nanos {
        Nanos(self.0.saturating_mul(count as u64))
    }
    /// The duration from `earlier` to `self`; zero if `earlier` is later.
    pub fn since(self, earlier: Nanos) -> Nanos {
        Nanos(self.0.saturating_sub(earlier.0))
    }
}

/// A point in wall-clock time, in milliseconds since 1970 UTC. It may jump; durations are measured in [`Nanos`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnixTime(pub u64);

impl UnixTime {
    /// Later than every point in time: the expiry of what does not expire.
    pub const NEVER: UnixTime = UnixTime(u64::MAX);
}

impl Add for Nanos {
    type Output = Nanos;
    fn add(self, duration: Nanos) -> Nanos {
        Nanos(self.0.saturating_add(duration.0))
    }
}

impl Sub for Nanos {
    type Output = Nanos;
    /// The same as [`Nanos::since`]: zero if `earlier` is later.
    fn sub(self, earlier: Nanos) -> Nanos {
        self.since(earlier)
    }
}
