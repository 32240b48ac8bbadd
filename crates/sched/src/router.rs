//! Where the next request of a core runs: here, or on the core that its plan names.
//!
//! ```text
//!   install(plan) ──▶ [ budget │ budget │ … ]  one for each core that takes
//!                         route() ─▶ Here │ Move(core)       refill() at each window
//!   requests:   h h m h h h m h h h m h h h m …              4 of 15: evenly, not the first 4
//! ```
//! In: a [`CorePlan`], then one call for each request that may be moved. Out: a [`Route`]. Owned by one core; passive.
//!
//! Whether a request moves is told by an error accumulator (as a line is drawn on a grid), where to by turns, or by
//! the smooth weighted turns of nginx: whoever is furthest behind its share goes next. Nothing is random, so runs repeat.
//!
//! Invariants: within a window no core gets more than its budget; of any requests in a row, the moved ones are within one of
//! their share while budgets last; without a plan, or when it is used up, the answer is one comparison; nothing is
//! allocated after [`Router::new`]. Tests below.

use crate::ids::CoreId;
use crate::migration_plan::{CorePlan, Order};

/// Where a request runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// On the core of its connection.
    Here,
    /// On this one.
    Move(CoreId),
}

#[derive(Clone, Copy, Debug)]
struct Taker {
    core: CoreId,
    budget: u64,
    left: u64,
    /// How far it is behind its share, in events times the sum of budgets.
    behind: i128,
}

/// One core's part of a plan, as it is carried out.
#[derive(Debug)]
pub struct Router {
    /// Of all budgets.
    left: u64,
    /// So many of every `of` requests move.
    moving: u64,
    of: u64,
    error: u64,
    takers: Vec<Taker>,
    order: Order,
    next: usize,
}

impl Router {
    /// One that keeps everything here, on a node of so many cores.
    pub fn new(cores: usize) -> Router {
        let takers = Vec::with_capacity(cores);
        Router { left: 0, moving: 0, of: 0, error: 0, takers, order: Order::RoundRobin, next: 0 }
    }

    /// Begins a window with a plan; a plan without shares keeps everything here.
    ///
    /// # Panics
    /// Where the plan sends more events than it has, or to more cores than the node has.
    pub fn install(&mut self, plan: &CorePlan) {
        assert!(plan.shares.len() <= self.takers.capacity(), "a plan of another node");
        let moving = plan.leaving();
        assert!(moving <= plan.of_events && plan.of_events < u64::MAX / 2, "{plan:?}");
        // Who was next stays so where a plan goes on, so that short windows do not prefer the first core.
        let goes_on = self.takers.iter().map(|taker| taker.core).eq(plan.shares.iter().map(|share| share.to));
        if !goes_on {
            self.next = 0;
            self.error = plan.of_events / 2;
        }
        self.takers.clear();
        self.takers.extend(plan.shares.iter().map(|share| Taker {
            core: share.to,
            budget: share.events,
            left: share.events,
            behind: 0,
        }));
        self.order = plan.order;
        (self.moving, self.of) = (moving, plan.of_events);
        self.error = self.error.min(plan.of_events.saturating_sub(1));
        self.left = moving;
    }

    /// Begins a window with the same plan.
    pub fn refill(&mut self) {
        self.takers.iter_mut().for_each(|taker| taker.left = taker.budget);
        self.left = self.moving;
    }

    /// Whether any request may move before the next window.
    pub fn is_open(&self) -> bool {
        self.left > 0
    }

    /// Where the next request of a flow that moves runs. For one that does not, do not ask.
    #[inline]
    pub fn route(&mut self) -> Route {
        if self.left == 0 {
            return Route::Here;
        }
        self.error += self.moving;
        if self.error < self.of {
            return Route::Here;
        }
        self.error -= self.of;
        self.left -= 1;
        Route::Move(match self.order {
            Order::RoundRobin => self.in_turn(),
            Order::Proportional => self.furthest_behind(),
        })
    }

    fn in_turn(&mut self) -> CoreId {
        loop {
            let at = self.next;
            self.next = if at + 1 == self.takers.len() { 0 } else { at + 1 };
            let taker = &mut self.takers[at];
            if taker.left > 0 {
                taker.left -= 1;
                return taker.core;
            }
        }
    }

    fn furthest_behind(&mut self) -> CoreId {
        let mut best: Option<usize> = None;
        for at in 0..self.takers.len() {
            self.takers[at].behind += i128::from(self.takers[at].budget);
            let further = best.is_none_or(|best| self.takers[at].behind > self.takers[best].behind);
            if self.takers[at].left > 0 && further {
                best = Some(at);
            }
        }
        let best = best.expect("the budgets' sum is not used up");
        let taker = &mut self.takers[best];
        taker.behind -= i128::from(self.moving);
        taker.left -= 1;
        taker.core
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::migration_plan::Share;

    fn plan(of_events: u64, order: Order, shares: &[(u16, u64)]) -> CorePlan {
        let shares = shares.iter().map(|&(to, events)| Share { to: CoreId(to), events }).collect();
        CorePlan { of_events, shares, order }
    }

    fn router(plan: &CorePlan) -> Router {
        let mut router = Router::new(8);
        router.install(plan);
        router
    }

    /// Where so many requests run; 0 is here.
    fn course(router: &mut Router, requests: usize) -> Vec<u16> {
        let core = |route| match route {
            Route::Here => 0,
            Route::Move(core) => core.0,
        };
        (0..requests).map(|_| core(router.route())).collect()
    }

    #[test]
    fn without_a_plan_everything_runs_here() {
        let router = &mut Router::new(4);
        assert!(!router.is_open());
        assert_eq!(course(router, 3), [0, 0, 0]);
        router.refill();
        assert_eq!(course(router, 3), [0, 0, 0]);
        router.install(&plan(2, Order::RoundRobin, &[(1, 2)]));
        assert_eq!(course(router, 1), [1]);
        router.install(&CorePlan::default());
        assert!(!router.is_open());
        assert_eq!(course(router, 3), [0, 0, 0], "and again when a plan ends");
    }

    #[test]
    fn moves_are_spread_over_the_window() {
        use Order::{Proportional, RoundRobin};
        // (events, order, shares), where so many requests run.
        let table: &[(&[u16], CorePlan)] = &[
            (&[0, 0, 1, 0, 0, 0, 0, 1, 0, 0], plan(10, RoundRobin, &[(1, 2)])),
            (&[1, 0, 2, 0, 1, 0, 2, 0], plan(8, RoundRobin, &[(1, 2), (2, 2)])),
            (&[1, 2, 1, 2, 2, 2], plan(6, RoundRobin, &[(1, 2), (2, 4)])),
            (&[2, 1, 2, 2, 1, 2], plan(6, Proportional, &[(1, 2), (2, 4)])),
            (&[1, 1, 2, 1, 3, 1, 1], plan(7, Proportional, &[(1, 5), (2, 1), (3, 1)])),
            (&[3, 0, 3, 0], plan(4, Proportional, &[(3, 2)])),
        ];
        for (want, plan) in table {
            let router = &mut router(plan);
            assert_eq!(course(router, want.len()), *want, "{plan:?}");
            assert!(!router.is_open());
            assert_eq!(course(router, 5), [0; 5], "no budget is left: {plan:?}");
            router.refill();
            let again = course(router, want.len());
            assert_eq!(again.iter().filter(|&&core| core > 0).count() as u64, plan.leaving(), "{plan:?}");
        }
    }

    #[test]
    fn any_row_of_requests_moves_its_share() {
        let random = &mut octokv_base::Random::new(9);
        for _ in 0..500 {
            let shares: Vec<(u16, u64)> =
                (1..=random.below(6) as u16 + 1).map(|core| (core, random.below(200) + 1)).collect();
            let moving: u64 = shares.iter().map(|share| share.1).sum();
            let order = if random.one_in(2) { Order::RoundRobin } else { Order::Proportional };
            let plan = plan(moving + random.below(1000), order, &shares);
            let course = course(&mut router(&plan), plan.of_events as usize);
            let (mut got, mut all) = (vec![0; 8], 0);
            for (requests, &core) in (1..).zip(&course) {
                all += u64::from(core > 0);
                let share = moving as f64 * requests as f64 / plan.of_events as f64;
                assert!((all as f64 - share).abs() <= 1.0, "{plan:?} after {requests}");
                got[usize::from(core)] += 1;
                for &(core, events) in shares.iter().filter(|_| order == Order::Proportional) {
                    let part = all as f64 * events as f64 / moving as f64;
                    let off = (got[usize::from(core)] as f64 - part).abs();
                    assert!(off < 2.0, "{plan:?} after {requests}: core {core} is off by {off}");
                }
            }
            assert!(shares.iter().all(|&(core, events)| got[usize::from(core)] == events), "{plan:?}");
        }
    }

    #[test]
    fn a_plan_that_goes_on_goes_on_in_turn() {
        let plan = plan(4, Order::RoundRobin, &[(1, 1), (2, 1), (3, 1)]);
        let router = &mut router(&plan);
        let mut got = [0; 4];
        for _ in 0..300 {
            // Of each window only two requests come.
            course(router, 2).into_iter().for_each(|core| got[usize::from(core)] += 1);
            router.install(&plan);
        }
        assert_eq!(got, [150, 150, 150, 150], "the first core is not preferred");
    }

    #[test]
    #[should_panic(expected = "CorePlan")]
    fn a_plan_that_sends_more_than_there_is_is_a_bug() {
        router(&plan(3, Order::RoundRobin, &[(1, 4)]));
    }
}
