//! How many requests of a core's fair queue run at a time: as few as keep the core at work, and at most the setting.
//!
//! ```text
//!   interval of work for requests, by how much of it the core had nothing to do while some waited for room
//!   more than a quarter  ─▶ twice as many          one at first, so that it finds the least that will do
//!   more than 2 %, twice ─▶ a quarter more
//!   less than 1/2 %      ─▶ patience passes, then a quarter fewer      fewer, then more again at once: twice the patience
//!   between              ─▶ as it is
//!   of one flow for long ─▶ the setting, as long as that is so
//! ```
//! In: whose requests begin, when turns begin, and how they ended. Out: the depth. Passive, one to a core.
//!
//! What runs cannot be ordered any more, so a queue that lets more run than wait orders nothing. How much has to run depends on
//! what is short. Where it is the device, a core waits for it, and the depth grows to the setting. Where it is the
//! core, the device is done before the core is, a few requests keep it busy, and with 32 of them no request would ever wait
//! for its turn: then the order of sockets would be that of tenants, whatever their weights. A flow that is alone has
//! the setting: there is nobody to be fair to, and a device that writes many requests at once does so for less.
//!
//! More is not always better, since what begins together ends together, and then the core waits for all of it at once. So where
//! it has come to many, it is looked for from one on again, once in `ANEW` intervals.
//!
//! Invariants: the depth is within 1 and the setting; time without work and without anybody who waits counts for nothing;
//! once the load stays the same, a depth that is too small is tried in one of `PATIENCE_MAX` intervals at most. Tests
//! below.

use crate::ids::TenantId;
use octokv_base::Nanos;

/// Of so much time is judged at a time: some hundred requests of a core that is short, and over before a window is.
const ADJUST_PERIOD: Nanos = Nanos::from_millis(5);
/// Parts of it without work above which more have to run, and below which fewer may do.
const DOUBLE_IDLE_DIVISOR: u64 = 4;
const GROW_IDLE_DIVISOR: u64 = 50;
const SHRINK_IDLE_DIVISOR: u64 = 200;
/// The most intervals between two trials with fewer.
const PROBE_BACKOFF_MAX: u32 = 64;
/// More than so many are looked for anew after so many intervals, which costs a few of them.
const RESTART_ABOVE: u32 = 8;
const RESTART_AFTER_PERIODS: u32 = 400;

/// A flow is alone after so many intervals without another: who asks for little asks seldom.
const SOLE_TENANT_AFTER_PERIODS: u32 = 40;

/// What was done last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LastChange {
    Grown,
    Shrunk,
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct ConcurrencyLimit {
    /// What was found, and the setting; and whether nobody else is there.
    limit: u32,
    limit_max: u32,
    has_sole_tenant: bool,
    /// Intervals in a row in which requests of one flow only began, or none.
    single_tenant_periods: u32,
    /// When the last turn began, and whether the time since then counts, as time without work or not.
    iteration_began_at: Nanos,
    is_counted: bool,
    was_idle: bool,
    /// Whose request began last, and whether those of this interval were of several flows.
    last_tenant: Option<TenantId>,
    has_several_tenants: bool,
    /// Of the interval that runs: how long it is so far, and how much of it without work.
    counted_time: Nanos,
    idle_time: Nanos,
    /// Intervals with little of that in a row, and how many there have to be.
    calm_periods: u32,
    probe_backoff: u32,
    last_change: LastChange,
    /// Whether the interval before had too much of it.
    was_starved: bool,
    /// Since it was last looked for from one on.
    periods_since_restart: u32,
}

impl ConcurrencyLimit {
    /// At most so many.
    ///
    /// # Panics
    /// Where nothing could run.
    pub fn new(most: u32) -> ConcurrencyLimit {
        assert!(most > 0, "nothing could run");
        ConcurrencyLimit {
            limit: 1,
            limit_max: most,
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

    /// So many may run now.
    #[inline]
    pub fn get(&self) -> u32 {
        if self.has_sole_tenant { self.limit_max } else { self.limit }
    }

    /// Another bound. One that is the same changes nothing.
    pub fn set_max(&mut self, most: u32) {
        if most != self.limit_max {
            *self = ConcurrencyLimit {
                iteration_began_at: self.iteration_began_at,
                ..ConcurrencyLimit::new(most)
            };
        }
    }

    /// A turn begins.
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

    /// A request of a flow begins.
    #[inline]
    pub fn request_began(&mut self, tenant: TenantId) {
        self.has_several_tenants |= self.last_tenant.is_some_and(|last| last != tenant);
        self.last_tenant = Some(tenant);
    }

    /// The turn has ended: whether anything was done, whether requests run, and whether others wait for room.
    #[inline]
    pub fn end_iteration(&mut self, worked: bool, runs: bool, waits: bool) {
        (self.was_idle, self.is_counted) = (!worked, if worked { runs } else { waits });
    }

    /// When this interval is over, if time counts until then.
    pub fn period_ends_at(&self) -> Nanos {
        self.iteration_began_at + ADJUST_PERIOD.since(self.counted_time)
    }

    /// The queue is not used for a while.
    pub fn pause(&mut self) {
        self.is_counted = false;
    }

    fn adjust(&mut self) {
        let (length, idle_time) =
            (std::mem::take(&mut self.counted_time).0, std::mem::take(&mut self.idle_time).0);
        let mixed = std::mem::take(&mut self.has_several_tenants);
        self.single_tenant_periods =
            if mixed { 0 } else { (self.single_tenant_periods + 1).min(SOLE_TENANT_AFTER_PERIODS) };
        // What was so with the setting says nothing of what was found.
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
            // One trial with fewer too many, or what is left of that, or another load.
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

    /// A core with requests of two flows, which is without work for this part of the time at each depth: the depth after
    /// each of so many intervals.
    fn limits_over_time(
        depth: &mut ConcurrencyLimit,
        intervals: usize,
        without: impl Fn(u32) -> f64,
    ) -> Vec<u32> {
        let mut course = Vec::new();
        for _ in 0..intervals {
            let idle = Nanos((ADJUST_PERIOD.0 as f64 * without(depth.get())) as u64);
            let begun = depth.iteration_began_at;
            [1, 2].into_iter().for_each(|tenant| depth.request_began(TenantId(tenant)));
            depth.end_iteration(false, true, true);
            depth.begin_iteration(begun + idle);
            depth.end_iteration(true, true, true);
            depth.begin_iteration(begun + ADJUST_PERIOD);
            course.push(depth.get());
        }
        course
    }

    /// Where less than so many leave the core a part without work, as many as are missing.
    fn idle_part_below(needed: u32) -> impl Fn(u32) -> f64 {
        move |depth| f64::from(needed.saturating_sub(depth)) / f64::from(needed)
    }

    #[test]
    fn the_limit_settles_at_the_least_that_keeps_the_core_busy() {
        let depth = &mut ConcurrencyLimit::new(32);
        assert_eq!(depth.get(), 32, "nobody else is there");
        assert_eq!(limits_over_time(depth, 6, idle_part_below(3))[..], [1, 2, 4, 3, 2, 4]);
        let later = limits_over_time(depth, 1000, idle_part_below(3));
        let few = later.iter().filter(|&&depth| depth < 3).count();
        assert!(later.iter().all(|depth| (2..=4).contains(depth)), "{later:?}");
        assert!(few <= 1000 / PROBE_BACKOFF_MAX as usize + 7, "{few} trials with fewer");
        assert_eq!(
            limits_over_time(depth, 40, idle_part_below(40)).last(),
            Some(&32),
            "and where the device is short, all"
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
        let depth = &mut ConcurrencyLimit::new(32);
        limits_over_time(depth, 600, idle_part_below(3));
        let grows = limits_over_time(depth, 25, idle_part_below(30));
        assert!(grows.iter().any(|&depth| depth >= 30), "{grows:?}");
        let shrinks = limits_over_time(depth, 150, idle_part_below(3));
        assert!(shrinks.iter().any(|&depth| depth <= 4), "{shrinks:?}");
    }

    #[test]
    fn a_high_limit_is_searched_again_from_one() {
        let depth = &mut ConcurrencyLimit::new(32);
        // From ten on as bad as it can be, and below well.
        let crooked = |depth: u32| if depth >= 10 { 0.05 } else { idle_part_below(3)(depth) };
        limits_over_time(depth, 25, idle_part_below(30));
        let stuck = limits_over_time(depth, 350, crooked);
        assert!(stuck.iter().all(|&depth| depth > 10), "{stuck:?}");
        let found = limits_over_time(depth, 200, crooked);
        assert!(found.iter().skip(100).all(|&depth| depth <= 4), "{found:?}");
    }

    #[test]
    fn a_sole_tenant_gets_the_maximum_and_the_found_limit_is_kept() {
        let depth = &mut ConcurrencyLimit::new(32);
        let found = *limits_over_time(depth, 100, idle_part_below(3)).last().unwrap_or(&0);
        for interval in 1..SOLE_TENANT_AFTER_PERIODS + 3 {
            let begun = depth.iteration_began_at;
            depth.request_began(TenantId(2));
            depth.end_iteration(true, true, true);
            depth.begin_iteration(begun + ADJUST_PERIOD);
            assert_eq!(depth.get() == 32, interval >= SOLE_TENANT_AFTER_PERIODS, "{interval}");
        }
        let again = limits_over_time(depth, 2, idle_part_below(3));
        assert!(again[0] <= found, "{again:?}, {found} before");
    }

    #[test]
    fn a_device_bound_core_reaches_its_depth_beside_a_rare_tenant() {
        let depth = &mut ConcurrencyLimit::new(32);
        let mut seen = Vec::new();
        for interval in 0..600 {
            let (begun, idle) = (
                depth.iteration_began_at,
                Nanos((ADJUST_PERIOD.0 as f64 * idle_part_below(30)(depth.get())) as u64),
            );
            depth.request_began(TenantId(1));
            if interval % 5 == 0 {
                depth.request_began(TenantId(2));
                depth.request_began(TenantId(1));
            }
            depth.end_iteration(false, true, true);
            depth.begin_iteration(begun + idle);
            depth.end_iteration(true, true, true);
            depth.begin_iteration(begun + ADJUST_PERIOD);
            seen.push(depth.get());
        }
        let enough = seen.iter().skip(100).filter(|&&depth| depth >= 24).count();
        assert!(enough >= 450, "{enough} of 500: {seen:?}");
    }

    #[test]
    fn the_limit_grows_while_no_request_completes() {
        let depth = &mut ConcurrencyLimit::new(32);
        limits_over_time(depth, 100, idle_part_below(2));
        let few = depth.get();
        for _ in 0..5 {
            depth.end_iteration(false, true, true);
            assert_eq!(depth.period_ends_at(), depth.iteration_began_at + ADJUST_PERIOD);
            depth.begin_iteration(depth.iteration_began_at + ADJUST_PERIOD);
        }
        assert!(few <= 3 && depth.get() == 32, "{few}, then {}", depth.get());
        let before = depth.get();
        depth.end_iteration(false, true, true);
        depth.pause();
        depth.begin_iteration(depth.iteration_began_at + ADJUST_PERIOD.times(100));
        assert_eq!(depth.get(), before, "while the queue is not used nothing counts");
    }

    #[test]
    fn idle_time_without_waiting_requests_is_not_counted() {
        let depth = &mut ConcurrencyLimit::new(32);
        for iteration in 1..100 {
            [1, 2].into_iter().for_each(|tenant| depth.request_began(TenantId(tenant)));
            depth.begin_iteration(ADJUST_PERIOD.times(iteration));
            depth.end_iteration(iteration % 2 == 0, false, false);
        }
        assert_eq!(depth.get(), 32);
    }

    #[test]
    fn an_equal_maximum_keeps_the_limit_and_another_restarts_the_search() {
        let depth = &mut ConcurrencyLimit::new(32);
        let found = *limits_over_time(depth, 4, idle_part_below(9)).last().unwrap_or(&0);
        depth.set_max(32);
        assert_eq!(depth.get(), found);
        depth.set_max(16);
        assert_eq!(depth.get(), 16);
    }
}
