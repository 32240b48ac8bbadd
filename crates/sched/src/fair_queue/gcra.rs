//! Rate limit as a theoretical arrival time: the generic cell rate algorithm.
//!
//! ```text
//!   now      arrival time                         a request of `amount` moves the arrival time by amount ÷ rate
//!   ──┼────────────┼──────┼──▶ time               and conforms while the arrival time is at most now + burst
//!     └── burst ──────────┘
//! ```
//! In: admitted amounts. Out: the time from which the next one conforms. This is ITU-T I.371 with amounts; a token
//! bucket with debt is the same with a level that must be refilled.
//!
//! Invariant: over any time `t` the sum of the amounts is no more than `rate × (t + burst)` plus the last amount.
//! Integers: the remainder of a division is carried to the next. Tested in `tests`.

use octokv_base::Nanos;

const NS_PER_S: u128 = 1_000_000_000;
/// Greatest amount of a request; a greater one is clamped.
const AMOUNT_MAX: u64 = 1 << 32;

/// One rate limit of one tenant.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gcra {
    rate_per_s: u64,
    burst: Nanos,
    theoretical_arrival: Nanos,
    /// The part of amount × 1 s that is less than a nanosecond, below `rate_per_s`.
    remainder: u64,
}

impl Gcra {
    /// Creates a limit without credit: one request conforms at once. REQUIRES: `rate_per_s` > 0.
    pub(super) fn new(rate_per_s: u64, burst: Nanos, now: Nanos) -> Gcra {
        Gcra { rate_per_s, burst, theoretical_arrival: now + burst, remainder: 0 }
    }

    /// Whether it has this rate and burst.
    pub(super) fn matches(&self, rate_per_s: u64, burst: Nanos) -> bool {
        (self.rate_per_s, self.burst) == (rate_per_s, burst)
    }

    /// The time from which the next request conforms.
    pub(super) fn conforms_at(&self) -> Nanos {
        self.theoretical_arrival - self.burst
    }

    /// Charges an admitted request.
    pub(super) fn charge(&mut self, amount: u64, now: Nanos) {
        if self.theoretical_arrival < now {
            (self.theoretical_arrival, self.remainder) = (now, 0);
        }
        let scaled = u128::from(amount.min(AMOUNT_MAX)) * NS_PER_S + u128::from(self.remainder);
        let rate = u128::from(self.rate_per_s);
        // Both fit: 2^32 × 10^9 is below 2^62, and the remainder is below the rate.
        self.theoretical_arrival = self.theoretical_arrival + Nanos((scaled / rate) as u64);
        self.remainder = (scaled % rate) as u64;
    }
}
