//! Adaptive concurrency limit of a core's fair queue: as few requests in flight as keep the core busy, at most the
//! configured maximum.
//!
//! ```text
//!   adjustment period, by the part of its time in which the core had no work while requests waited for a slot
//!   more than a quarter  ─▶ double the limit       it starts at one, so that it finds the smallest sufficient limit
//!   more than 2 %, twice ─▶ a quarter more
//!   less than 1/2 %      ─▶ after the back-off, a quarter fewer        if that starves the core: restore, double back-off
//!   between              ─▶ unchanged
//!   one tenant for long  ─▶ the maximum, as long as that lasts
//! ```
//! In: the tenant of each request that begins, and the begin and end of reactor iterations. Out: the limit. Passive,
//! one per core.
//!
//! Requests in flight cannot be reordered, so a queue with more requests in flight than waiting orders nothing. The
//! required number depends on the bottleneck. If it is the device, the core waits for it, and the limit grows to the
//! maximum. If it is the core, the device completes sooner than the core submits, a few requests keep it busy, and
//! with 32 of them no request would ever wait in the queue: requests would then execute in socket order, regardless of
//! weights. A tenant that is alone gets the maximum: fairness does not apply, and a device that writes many requests
//! at once needs less time for each.
//!
//! A greater limit is not always better, since requests that begin together end together, and the core then waits for
//! all of them at once. A limit above `RESTART_ABOVE` is therefore searched again from one, once in
//! `RESTART_AFTER_PERIODS` periods.
//!
//! Invariants: the limit is between 1 and the maximum; time without work and without waiting requests does not count;
//! under a constant load, a limit that is too small is probed in at most one of `PROBE_BACKOFF_MAX` periods. Tests
//! below.

use crate::ids::TenantId;
use octokv_base::Nanos;

/// Length of an adjustment period: some hundred requests of a busy core, and shorter than a sampling interval.
const ADJUST_PERIOD: Nanos = Nanos::from_millis(5);
/// Divisors of a period: above a quarter of it without work the limit doubles; the other bounds follow.
const DOUBLE_IDLE_DIVISOR: u64 = 4;
const GROW_IDLE_DIVISOR: u64 = 50;
const SHRINK_IDLE_DIVISOR: u64 = 200;
/// Maximum number of periods between two probes with a smaller limit.
const PROBE_BACKOFF_MAX: u32 = 64;
/// A limit above this is searched again after `RESTART_AFTER_PERIODS` periods, which costs a few of them.
const RESTART_ABOVE: u32 = 8;
const RESTART_AFTER_PERIODS: u32 = 400;

/// A tenant counts as alone after so many periods without another: a light tenant sends rarely.
const SOLE_TENANT_AFTER_PERIODS: u32 = 40;

/// The last change of the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LastChange {
    Grown,
    Shrunk,
}

/// See the module header.
#[derive(Clone, Debug)]
pub struct ConcurrencyLimit {
    /// The limit found, the configured maximum, and whether a single tenant is active.
    limit: u32,
    limit_max: u32,
    has_sole_tenant: bool,
    /// Consecutive periods in which requests of at most one tenant began.
    single_tenant_periods: u32,
    /// Begin of the last iteration, and whether the time since counts, as time without work or not.
    iteration_began_at: Nanos,
    is_counted: bool,
    was_idle: bool,
    /// The tenant of the last request that began, and whether requests of several tenants began in this period.
    last_tenant: Option<TenantId>,
    has_several_tenants: bool,
    /// Current period: the time counted so far, and the part of it without work.
    counted_time: Nanos,
    idle_time: Nanos,
    /// Consecutive periods with little time without work, and the number that triggers a probe.
    calm_periods: u32,
    probe_backoff: u32,
    last_change: LastChange,
    /// Whether the previous period had too much time without work.
    was_starved: bool,
    /// Periods since the last search from one.
    periods_since_restart: u32,
}

impl ConcurrencyLimit {
    /// Creates a limit of at most `limit_max`.
    ///
    /// # Panics
    /// If `limit_max` is 0.
    pub fn new(limit_max: u32) -> ConcurrencyLimit {
        assert!(limit_max > 0, "the maximum is 0");
        ConcurrencyLimit {
            limit: 1,
            limit_max,
            has_sole_tenant: true,
            single_tenant_periods: SOLE_TENANT_AFTER_PERIODS,
            iteration_began_at: Nanos::ZERO,
            is_counted: false,
            was_idle: false,
            last_tenant: None,
            has_several_tenants: false,
            counted_time: Nanos::ZERO,
            idle_time: Nanos::ZERO,
            calm_periods: 0,
            probe_backoff: 1,
            last_change: LastChange::Grown,
            was_starved: false,
            periods_since_restart: 0,
        }
    }

    /// The number of requests that may be in flight now.
    #[inline]
    pub fn get(&self) -> u32 {
        if self.has_sole_tenant { self.limit_max } else { self.limit }
    }

    /// Changes the maximum. The same maximum has no effect.
    pub fn set_max(&mut self, limit_max: u32) {
        if limit_max != self.limit_max {
            *self = ConcurrencyLimit {
                iteration_began_at: self.iteration_began_at,
                ..ConcurrencyLimit::new(limit_max)
            };
        }
    }

    /// A reactor iteration begins.
    #[inline]
    pub fn begin_iteration(&mut self, now: Nanos) {
        let span = now.since(std::mem::replace(&mut self.iteration_began_at, now));
        if self.is_counted {
            self.counted_time = self.counted_time + span;
            if self.was_idle {
                self.idle_time = self.idle_time + span;
            }
            if self.counted_time >= ADJUST_PERIOD {
                self.adjust();
            }
        }
    }

    /// A request of a tenant begins.
    #[inline]
    pub fn request_began(&mut self, tenant: TenantId) {
        self.has_several_tenants |= self.last_tenant.is_some_and(|last| last != tenant);
        self.last_tenant = Some(tenant);
    }

    /// A reactor iteration ended: whether it did work, whether requests are in flight, and whether others wait for a
    /// slot.
    #[inline]
    pub fn end_iteration(&mut self, worked: bool, runs: bool, waits: bool) {
        (self.was_idle, self.is_counted) = (!worked, if worked { runs } else { waits });
    }

    /// The end of this period, if all time until then counts.
    pub fn period_ends_at(&self) -> Nanos {
        self.iteration_began_at + ADJUST_PERIOD.since(self.counted_time)
    }

    /// Suspends the adjustment while the queue is not used.
    pub fn pause(&mut self) {
        self.is_counted = false;
    }

    fn adjust(&mut self) {
        let (length, idle_time) =
            (std::mem::take(&mut self.counted_time).0, std::mem::take(&mut self.idle_time).0);
        let mixed = std::mem::take(&mut self.has_several_tenants);
        self.single_tenant_periods =
            if mixed { 0 } else { (self.single_tenant_periods + 1).min(SOLE_TENANT_AFTER_PERIODS) };
        // Periods at the maximum give no information about the limit found before.
        if std::mem::replace(
            &mut self.has_sole_tenant,
            self.single_tenant_periods == SOLE_TENANT_AFTER_PERIODS,
        ) || self.has_sole_tenant
        {
            return;
        }
        self.periods_since_restart =
            if self.limit > RESTART_ABOVE { self.periods_since_restart + 1 } else { 0 };
        let (is_above, quarter) =
            (|part: u64| idle_time.saturating_mul(part) > length, (self.limit / 4).max(1));
        let was_short = std::mem::replace(&mut self.was_starved, is_above(GROW_IDLE_DIVISOR));
        if self.limit > RESTART_ABOVE && self.periods_since_restart >= RESTART_AFTER_PERIODS {
            (
                self.limit,
                self.calm_periods,
                self.probe_backoff,
                self.last_change,
                self.periods_since_restart,
            ) = (1, 0, 1, LastChange::Grown, 0);
        } else if is_above(DOUBLE_IDLE_DIVISOR) || (was_short && self.was_starved) {
            self.was_starved = false;
            // A probe too low, its aftermath, or a new load.
            self.probe_backoff = match self.last_change {
                LastChange::Shrunk => (self.probe_backoff * 2).min(PROBE_BACKOFF_MAX),
                LastChange::Grown if is_above(DOUBLE_IDLE_DIVISOR) => 1,
                LastChange::Grown => self.probe_backoff,
            };
            let step = if is_above(DOUBLE_IDLE_DIVISOR) { self.limit } else { quarter };
            self.limit = self.limit.saturating_add(step).min(self.limit_max);
            (self.calm_periods, self.last_change) = (0, LastChange::Grown);
        } else if is_above(SHRINK_IDLE_DIVISOR) {
            self.calm_periods = 0;
        } else {
            self.calm_periods = self.calm_periods.saturating_add(1);
            if self.calm_periods >= self.probe_backoff && self.limit > 1 {
                self.limit -= quarter;
                (self.calm_periods, self.last_change) = (0, LastChange::Shrunk);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The limit after each of so many periods of a core with requests of two tenants, which is without work for this
    /// part of the time at each limit.
    fn limits_over_time(
        limit: &mut ConcurrencyLimit,
        intervals: usize,
        without: impl Fn(u32) -> f64,
    ) -> Vec<u32> {
        let mut limits = Vec::new();
        for _ in 0..intervals {
            let idle = Nanos((ADJUST_PERIOD.0 as f64 * without(limit.get())) as u64);
            let begun = limit.iteration_began_at;
            [1, 2].into_iter().for_each(|tenant| limit.request_began(TenantId(tenant)));
            limit.end_iteration(false, true, true);
            limit.begin_iteration(begun + idle);
            limit.end_iteration(true, true, true);
            limit.begin_iteration(begun + ADJUST_PERIOD);
            limits.push(limit.get());
        }
        limits
    }

    /// A limit below `needed` leaves the core without work, in proportion to the deficit.
    fn idle_part_below(needed: u32) -> impl Fn(u32) -> f64 {
        move |limit| f64::from(needed.saturating_sub(limit)) / f64::from(needed)
    }

    #[test]
    fn the_limit_converges_to_the_smallest_that_keeps_the_core_busy() {
        let limit = &mut ConcurrencyLimit::new(32);
        assert_eq!(limit.get(), 32, "no other tenant is active");
        assert_eq!(limits_over_time(limit, 6, idle_part_below(3))[..], [1, 2, 4, 3, 2, 4]);
        let later = limits_over_time(limit, 1000, idle_part_below(3));
        let few = later.iter().filter(|&&limit| limit < 3).count();
        assert!(later.iter().all(|limit| (2..=4).contains(limit)), "{later:?}");
        assert!(few <= 1000 / PROBE_BACKOFF_MAX as usize + 7, "{few} trials with fewer");
        assert_eq!(
            limits_over_time(limit, 40, idle_part_below(40)).last(),
            Some(&32),
            "and all of them if the device is the bottleneck"
        );
        assert_eq!(limits_over_time(&mut ConcurrencyLimit::new(2), 4, idle_part_below(40))[..], [1, 2, 2, 2]);
        assert_eq!(
            limits_over_time(&mut ConcurrencyLimit::new(8), 4, |_| 0.005)[..],
            [1, 1, 1, 1],
            "little, and not none"
        );
    }

    #[test]
    fn a_changed_load_is_followed_after_a_long_backoff() {
        let limit = &mut ConcurrencyLimit::new(32);
        limits_over_time(limit, 600, idle_part_below(3));
        let grows = limits_over_time(limit, 25, idle_part_below(30));
        assert!(grows.iter().any(|&limit| limit >= 30), "{grows:?}");
        let shrinks = limits_over_time(limit, 150, idle_part_below(3));
        assert!(shrinks.iter().any(|&limit| limit <= 4), "{shrinks:?}");
    }

    #[test]
    fn a_high_limit_is_searched_again_from_one() {
        let limit = &mut ConcurrencyLimit::new(32);
        // From ten on as bad as possible, and good below.
        let crooked = |limit: u32| if limit >= 10 { 0.05 } else { idle_part_below(3)(limit) };
        limits_over_time(limit, 25, idle_part_below(30));
        let stuck = limits_over_time(limit, 350, crooked);
        assert!(stuck.iter().all(|&limit| limit > 10), "{stuck:?}");
        let found = limits_over_time(limit, 200, crooked);
        assert!(found.iter().skip(100).all(|&limit| limit <= 4), "{found:?}");
    }

    #[test]
    fn a_sole_tenant_gets_the_maximum_and_the_found_limit_is_kept() {
        let limit = &mut ConcurrencyLimit::new(32);
        let found = *limits_over_time(limit, 100, idle_part_below(3)).last().unwrap_or(&0);
        for interval in 1..SOLE_TENANT_AFTER_PERIODS + 3 {
            let begun = limit.iteration_began_at;
            limit.request_began(TenantId(2));
            limit.end_iteration(true, true, true);
            limit.begin_iteration(begun + ADJUST_PERIOD);
            assert_eq!(limit.get() == 32, interval >= SOLE_TENANT_AFTER_PERIODS, "{interval}");
        }
        let again = limits_over_time(limit, 2, idle_part_below(3));
        assert!(again[0] <= found, "{again:?}, {found} before");
    }

    #[test]
    fn a_device_bound_core_reaches_its_depth_beside_a_rare_tenant() {
        let limit = &mut ConcurrencyLimit::new(32);
        let mut seen = Vec::new();
        for interval in 0..600 {
            let (begun, idle) = (
                limit.iteration_began_at,
                Nanos((ADJUST_PERIOD.0 as f64 * idle_part_below(30)(limit.get())) as u64),
            );
            limit.request_began(TenantId(1));
            if interval % 5 == 0 {
                limit.request_began(TenantId(2));
                limit.request_began(TenantId(1));
            }
            limit.end_iteration(false, true, true);
            limit.begin_iteration(begun + idle);
            limit.end_iteration(true, true, true);
            limit.begin_iteration(begun + ADJUST_PERIOD);
            seen.push(limit.get());
        }
        let enough = seen.iter().skip(100).filter(|&&limit| limit >= 24).count();
        assert!(enough >= 450, "{enough} of 500: {seen:?}");
    }

    #[test]
    fn the_limit_grows_while_no_request_completes() {
        let limit = &mut ConcurrencyLimit::new(32);
        limits_over_time(limit, 100, idle_part_below(2));
        let few = limit.get();
        for _ in 0..5 {
            limit.end_iteration(false, true, true);
            assert_eq!(limit.period_ends_at(), limit.iteration_began_at + ADJUST_PERIOD);
            limit.begin_iteration(limit.iteration_began_at + ADJUST_PERIOD);
        }
        assert!(few <= 3 && limit.get() == 32, "{few}, then {}", limit.get());
        let before = limit.get();
        limit.end_iteration(false, true, true);
        limit.pause();
        limit.begin_iteration(limit.iteration_began_at + ADJUST_PERIOD.times(100));
        assert_eq!(limit.get(), before, "a paused queue does not count");
    }

    #[test]
    fn idle_time_without_waiting_requests_is_not_counted() {
        let limit = &mut ConcurrencyLimit::new(32);
        for iteration in 1..100 {
            [1, 2].into_iter().for_each(|tenant| limit.request_began(TenantId(tenant)));
            limit.begin_iteration(ADJUST_PERIOD.times(iteration));
            limit.end_iteration(iteration % 2 == 0, false, false);
        }
        assert_eq!(limit.get(), 32);
    }

    #[test]
    fn an_equal_maximum_keeps_the_limit_and_another_restarts_the_search() {
        let limit = &mut ConcurrencyLimit::new(32);
        let found = *limits_over_time(limit, 4, idle_part_below(9)).last().unwrap_or(&0);
        limit.set_max(32);
        assert_eq!(limit.get(), found);
        limit.set_max(16);
        assert_eq!(limit.get(), 16);
    }
}
