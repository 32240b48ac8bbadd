//! A rate that is not exceeded, kept as one point in time.
//!
//! ```text
//!   now          full at                          a request of `amount` moves "full at" on by amount ÷ rate
//!   ──┼────────────┼──────┼──▶ time               and may go while "full at" is no later than now + burst
//!     └── burst ──────────┘
//! ```
//! In: amounts that were let through. Out: from when on the next may go. This is the generic cell rate algorithm (ITU-T
//! I.371) with amounts; a token bucket that owes is the same thing with a level that must be refilled.
//!
//! Invariant: over any span `t` the amounts are together no more than `rate × (t + burst)` and the last of them. Whole
//! numbers: what a division leaves over is kept for the next. Tested in `tests`.

use octokv_base::Nanos;

const NS_PER_S: u128 = 1_000_000_000;
/// No request has more bytes; one that says so counts as this.
const AMOUNT_MAX: u64 = 1 << 32;

/// One limit of one flow.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gcra {
    rate_per_s: u64,
    burst: Nanos,
    theoretical_arrival: Nanos,
    /// What of amount × 1 s did not make a nanosecond yet, below `rate_per_s`.
    remainder: u64,
}

impl Gcra {
    /// One with nothing saved up: one request may go at once. `rate_per_s` is above 0.
    pub(super) fn new(rate_per_s: u64, burst: Nanos, now: Nanos) -> Gcra {
        Gcra { rate_per_s, burst, theoretical_arrival: now + burst, remainder: 0 }
    }

    /// Whether it says the same as another would.
    pub(super) fn matches(&self, rate_per_s: u64, burst: Nanos) -> bool {
        (self.rate_per_s, self.burst) == (rate_per_s, burst)
    }

    /// From when on the next request may go.
    pub(super) fn conforms_at(&self) -> Nanos {
        self.theoretical_arrival - self.burst
    }

    /// A request went.
    pub(super) fn charge(&mut self, amount: u64, now: Nanos) {
        if self.theoretical_arrival < now {
            (self.theoretical_arrival, self.remainder) = (now, 0);
        }
        let scaled = u128::from(amount.min(AMOUNT_MAX)) * NS_PER_S + u128::from(self.remainder);
        let rate = u128::from(self.rate_per_s);
        // Both fit: 2^32 × 10^9 is below 2^62, and the rest is below the rate.
        self.theoretical_arrival = self.theoretical_arrival + Nanos((scaled / rate) as u64);
        self.remainder = (scaled % rate) as u64;
    }
}
