//! Units that must not be mixed up: each is a number that says what it counts.

use std::fmt;
use std::ops::{Add, Sub};

/// A point in time, or a span, in nanoseconds. The zero point is the driver's: boot for the real
/// clock, the start of the world for the virtual one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

impl Nanos {
    /// The earliest time there is.
    pub const ZERO: Nanos = Nanos(0);
    /// Later than any time that will come.
    pub const NEVER: Nanos = Nanos(u64::MAX);

    /// A span of whole microseconds.
    pub const fn from_micros(micros: u64) -> Nanos {
        Nanos(micros * 1_000)
    }
    /// A span of whole milliseconds.
    pub const fn from_millis(millis: u64) -> Nanos {
        Nanos(millis * 1_000_000)
    }
    /// A span of whole seconds.
    pub const fn from_secs(secs: u64) -> Nanos {
        Nanos(secs * 1_000_000_000)
    }
    /// The span in seconds.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }
    /// So many times the span.
    pub const fn times(self, count: usize) -> Nanos {
        Nanos(self.0.saturating_mul(count as u64))
    }
    /// The span since `earlier`, zero where `earlier` is later.
    pub fn since(self, earlier: Nanos) -> Nanos {
        Nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add for Nanos {
    type Output = Nanos;
    fn add(self, span: Nanos) -> Nanos {
        Nanos(self.0.saturating_add(span.0))
    }
}

impl Sub for Nanos {
    type Output = Nanos;
    fn sub(self, span: Nanos) -> Nanos {
        self.since(span)
    }
}

/// A logical block address on one device: the index of a block of the device's own block size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lba(pub u64);

/// The name of a namespace within a subsystem: 1 and up (NVMe Base 2.1, 3.2.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamespaceId(pub u32);

impl fmt::Display for NamespaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}
