//! The clock of a simulated host: true time with an offset and a drift.
//!
//! In: the simulation's time. Out: the time that the host's programs see. Invariants: a clock never goes back; with the
//! same offset and no drift, two clocks agree forever. Tested by the table below.

use octokv_base::Nanos;

/// The largest drift of a clock in either direction, in parts per million: half as fast, or one and a half times.
pub const CLOCK_DRIFT_MAX_PPM: i64 = 500_000;

const PPM: u128 = 1_000_000;

/// A clock. The default shows the simulation's time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimClock {
    /// A time at which the clock showed `local_base`.
    base: Nanos,
    local_base: Nanos,
    drift_ppm: i64,
}

impl SimClock {
    /// A clock that is `offset` ahead at time zero and gains `drift_ppm` microseconds per second; negative: loses.
    ///
    /// # Panics
    /// If the drift exceeds [`CLOCK_DRIFT_MAX_PPM`].
    pub fn new(offset: Nanos, drift_ppm: i64) -> SimClock {
        assert!(drift_ppm.abs() <= CLOCK_DRIFT_MAX_PPM, "drift of {drift_ppm} ppm");
        SimClock { base: Nanos::ZERO, local_base: offset, drift_ppm }
    }

    /// The time that the clock shows at `now`.
    pub fn local(&self, now: Nanos) -> Nanos {
        let elapsed = u128::from(now.since(self.base).0) * u128::from(self.rate_ppm()) / PPM;
        self.local_base + saturated(elapsed)
    }

    /// The first time at which the clock shows `local` or later; [`Nanos::NEVER`] for `NEVER`.
    pub fn true_time(&self, local: Nanos) -> Nanos {
        if local == Nanos::NEVER {
            return Nanos::NEVER;
        }
        let to_go = u128::from(local.since(self.local_base).0) * PPM;
        self.base + saturated(to_go.div_ceil(u128::from(self.rate_ppm())))
    }

    /// Changes the drift from `now` on. What the clock shows now stays.
    ///
    /// # Panics
    /// If the drift exceeds [`CLOCK_DRIFT_MAX_PPM`].
    pub fn set_drift(&mut self, now: Nanos, drift_ppm: i64) {
        *self = SimClock { base: now, local_base: self.local(now), ..SimClock::new(Nanos::ZERO, drift_ppm) };
    }

    /// Nanoseconds that the clock advances in a million.
    fn rate_ppm(&self) -> u64 {
        (PPM as u64).saturating_add_signed(self.drift_ppm)
    }
}

fn saturated(nanos: u128) -> Nanos {
    Nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_shows_offset_and_drift_and_its_inverse_is_exact() {
        let cases = [
            (SimClock::default(), 1_000, 1_000),
            (SimClock::new(Nanos(7), 0), 1_000, 1_007),
            (SimClock::new(Nanos(0), 500_000), 1_000, 1_500),
            (SimClock::new(Nanos(5), -500_000), 1_001, 505),
            (SimClock::new(Nanos(0), 1), 3_000_000_000, 3_000_003_000),
        ];
        for (clock, now, local) in cases {
            assert_eq!(clock.local(Nanos(now)), Nanos(local), "{clock:?}");
            let first = clock.true_time(Nanos(local));
            assert!(clock.local(first) >= Nanos(local) && first <= Nanos(now), "{clock:?}");
            assert!(clock.local(first - Nanos(1)) < Nanos(local), "{clock:?}");
            assert_eq!(clock.true_time(Nanos::NEVER), Nanos::NEVER);
        }
    }

    #[test]
    fn a_change_of_drift_is_continuous() {
        let mut clock = SimClock::new(Nanos(100), 200_000);
        let before = clock.local(Nanos(1_000));
        clock.set_drift(Nanos(1_000), -200_000);
        assert_eq!(clock.local(Nanos(1_000)), before);
        assert_eq!(clock.local(Nanos(2_000)), before + Nanos(800));
    }
}
