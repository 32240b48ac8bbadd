//! Routes each request of a core: local execution, or the core that the migration plan selects.
//!
//! ```text
//!   install(plan) ──▶ [ budget │ budget │ … ]  one for each receiving core
//!                         route() ─▶ Local │ Offload(core)   refill() at each interval
//!   requests:   l l o l l l o l l l o l l l o …              4 of 15: spread evenly, not the first 4
//! ```
//! In: a [`CoreMigrations`], then one call for each request that may migrate. Out: a [`RoutingDecision`]. Owned by one
//! core; passive.
//!
//! An error accumulator (as in Bresenham's line algorithm) decides whether a request migrates. Its destination follows
//! round robin, or nginx's smooth weighted round robin: the receiver with the greatest deficit is next. Nothing is
//! random, so runs repeat.
//!
//! Invariants: within an interval no core receives more than its budget; in any sequence of requests, the number of
//! migrated ones is within one of its share while budgets last; without a plan, or with a used-up one, the decision
//! costs one comparison; nothing is allocated after [`Router::new`]. Tests below.

use crate::ids::CoreId;
use crate::migration_plan::{CoreMigrations, SpreadOrder};

/// Where a request executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoutingDecision {
    /// On the core of its connection.
    Local,
    /// On this core.
    Offload(CoreId),
}

#[derive(Clone, Copy, Debug)]
struct Receiver {
    core: CoreId,
    budget: u64,
    remaining: u64,
    /// Deficit against its share, in events × the sum of budgets.
    deficit: i128,
}

/// A core's part of a migration plan and its progress.
#[derive(Debug)]
pub struct Router {
    /// Sum of the remaining budgets.
    remaining: u64,
    /// This many of every `events_expected` requests migrate.
    quota_total: u64,
    events_expected: u64,
    error_accumulator: u64,
    receivers: Vec<Receiver>,
    order: SpreadOrder,
    next_receiver: usize,
}

impl Router {
    /// Creates a router that keeps all requests local, on a node with this many cores.
    pub fn new(cores: usize) -> Router {
        let receivers = Vec::with_capacity(cores);
        Router {
            remaining: 0,
            quota_total: 0,
            events_expected: 0,
            error_accumulator: 0,
            receivers,
            order: SpreadOrder::RoundRobin,
            next_receiver: 0,
        }
    }

    /// Starts an interval with a plan; a plan without quotas keeps all requests local.
    ///
    /// # Panics
    /// If the plan migrates more events than it expects, or has more receivers than the node has other cores.
    pub fn install(&mut self, plan: &CoreMigrations) {
        assert!(plan.quotas.len() <= self.receivers.capacity(), "more receivers than other cores");
        let moving = plan.leaving();
        assert!(moving <= plan.events_expected && plan.events_expected < u64::MAX / 2, "{plan:?}");
        // If the plan continues, so does the round robin: otherwise short intervals would favour the first core.
        let goes_on =
            self.receivers.iter().map(|receiver| receiver.core).eq(plan.quotas.iter().map(|quota| quota.to));
        if !goes_on {
            self.next_receiver = 0;
            self.error_accumulator = plan.events_expected / 2;
        }
        self.receivers.clear();
        self.receivers.extend(plan.quotas.iter().map(|quota| Receiver {
            core: quota.to,
            budget: quota.events,
            remaining: quota.events,
            deficit: 0,
        }));
        self.order = plan.order;
        (self.quota_total, self.events_expected) = (moving, plan.events_expected);
        self.error_accumulator = self.error_accumulator.min(plan.events_expected.saturating_sub(1));
        self.remaining = moving;
    }

    /// Starts an interval with the same plan.
    pub fn refill(&mut self) {
        self.receivers.iter_mut().for_each(|receiver| receiver.remaining = receiver.budget);
        self.remaining = self.quota_total;
    }

    /// Whether a request can still migrate in this interval.
    pub fn may_offload(&self) -> bool {
        self.remaining > 0
    }

    /// Routes the next request of a tenant that migrates. REQUIRES: the tenant's rule has `migrates`.
    #[inline]
    pub fn route(&mut self) -> RoutingDecision {
        if self.remaining == 0 {
            return RoutingDecision::Local;
        }
        self.error_accumulator += self.quota_total;
        if self.error_accumulator < self.events_expected {
            return RoutingDecision::Local;
        }
        self.error_accumulator -= self.events_expected;
        self.remaining -= 1;
        RoutingDecision::Offload(match self.order {
            SpreadOrder::RoundRobin => self.next_round_robin(),
            SpreadOrder::Proportional => self.next_by_deficit(),
        })
    }

    fn next_round_robin(&mut self) -> CoreId {
        loop {
            let at = self.next_receiver;
            self.next_receiver = if at + 1 == self.receivers.len() { 0 } else { at + 1 };
            let receiver = &mut self.receivers[at];
            if receiver.remaining > 0 {
                receiver.remaining -= 1;
                return receiver.core;
            }
        }
    }

    fn next_by_deficit(&mut self) -> CoreId {
        let mut best: Option<usize> = None;
        for at in 0..self.receivers.len() {
            self.receivers[at].deficit += i128::from(self.receivers[at].budget);
            let further = best.is_none_or(|best| self.receivers[at].deficit > self.receivers[best].deficit);
            if self.receivers[at].remaining > 0 && further {
                best = Some(at);
            }
        }
        let best = best.expect("the sum of the budgets is above 0");
        let receiver = &mut self.receivers[best];
        receiver.deficit -= i128::from(self.quota_total);
        receiver.remaining -= 1;
        receiver.core
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::migration_plan::MigrationQuota;

    fn plan(events_expected: u64, order: SpreadOrder, quotas: &[(u16, u64)]) -> CoreMigrations {
        let quotas = quotas.iter().map(|&(to, events)| MigrationQuota { to: CoreId(to), events }).collect();
        CoreMigrations { events_expected, quotas, order }
    }

    fn router(plan: &CoreMigrations) -> Router {
        let mut router = Router::new(8);
        router.install(plan);
        router
    }

    /// The executing core of each of so many requests; 0 is local.
    fn placements(router: &mut Router, requests: usize) -> Vec<u16> {
        let core = |route| match route {
            RoutingDecision::Local => 0,
            RoutingDecision::Offload(core) => core.0,
        };
        (0..requests).map(|_| core(router.route())).collect()
    }

    #[test]
    fn without_a_plan_every_request_runs_locally() {
        let router = &mut Router::new(4);
        assert!(!router.may_offload());
        assert_eq!(placements(router, 3), [0, 0, 0]);
        router.refill();
        assert_eq!(placements(router, 3), [0, 0, 0]);
        router.install(&plan(2, SpreadOrder::RoundRobin, &[(1, 2)]));
        assert_eq!(placements(router, 1), [1]);
        router.install(&CoreMigrations::default());
        assert!(!router.may_offload());
        assert_eq!(placements(router, 3), [0, 0, 0], "and again when a plan ends");
    }

    #[test]
    fn offloads_are_spread_over_the_interval() {
        use SpreadOrder::{Proportional, RoundRobin};
        // (events, order, quotas) and the executing core of each request.
        let table: &[(&[u16], CoreMigrations)] = &[
            (&[0, 0, 1, 0, 0, 0, 0, 1, 0, 0], plan(10, RoundRobin, &[(1, 2)])),
            (&[1, 0, 2, 0, 1, 0, 2, 0], plan(8, RoundRobin, &[(1, 2), (2, 2)])),
            (&[1, 2, 1, 2, 2, 2], plan(6, RoundRobin, &[(1, 2), (2, 4)])),
            (&[2, 1, 2, 2, 1, 2], plan(6, Proportional, &[(1, 2), (2, 4)])),
            (&[1, 1, 2, 1, 3, 1, 1], plan(7, Proportional, &[(1, 5), (2, 1), (3, 1)])),
            (&[3, 0, 3, 0], plan(4, Proportional, &[(3, 2)])),
        ];
        for (want, plan) in table {
            let router = &mut router(plan);
            assert_eq!(placements(router, want.len()), *want, "{plan:?}");
            assert!(!router.may_offload());
            assert_eq!(placements(router, 5), [0; 5], "no budget is left: {plan:?}");
            router.refill();
            let again = placements(router, want.len());
            assert_eq!(again.iter().filter(|&&core| core > 0).count() as u64, plan.leaving(), "{plan:?}");
        }
    }

    #[test]
    fn any_sequence_of_requests_offloads_its_share() {
        let random = &mut octokv_base::Prng::new(9);
        for _ in 0..500 {
            let quotas: Vec<(u16, u64)> =
                (1..=random.below(6) as u16 + 1).map(|core| (core, random.below(200) + 1)).collect();
            let moving: u64 = quotas.iter().map(|quota| quota.1).sum();
            let order = if random.one_in(2) { SpreadOrder::RoundRobin } else { SpreadOrder::Proportional };
            let plan = plan(moving + random.below(1000), order, &quotas);
            let executed_on = placements(&mut router(&plan), plan.events_expected as usize);
            let (mut got, mut all) = (vec![0; 8], 0);
            for (requests, &core) in (1..).zip(&executed_on) {
                all += u64::from(core > 0);
                let share = moving as f64 * requests as f64 / plan.events_expected as f64;
                assert!((all as f64 - share).abs() <= 1.0, "{plan:?} after {requests}");
                got[usize::from(core)] += 1;
                for &(core, events) in quotas.iter().filter(|_| order == SpreadOrder::Proportional) {
                    let part = all as f64 * events as f64 / moving as f64;
                    let off = (got[usize::from(core)] as f64 - part).abs();
                    assert!(off < 2.0, "{plan:?} after {requests}: core {core} is off by {off}");
                }
            }
            assert!(quotas.iter().all(|&(core, events)| got[usize::from(core)] == events), "{plan:?}");
        }
    }

    #[test]
    fn a_repeated_plan_continues_the_round_robin() {
        let plan = plan(4, SpreadOrder::RoundRobin, &[(1, 1), (2, 1), (3, 1)]);
        let router = &mut router(&plan);
        let mut got = [0; 4];
        for _ in 0..300 {
            // Each interval has two requests only.
            placements(router, 2).into_iter().for_each(|core| got[usize::from(core)] += 1);
            router.install(&plan);
        }
        assert_eq!(got, [150, 150, 150, 150], "the first core is not preferred");
    }

    #[test]
    #[should_panic(expected = "CoreMigrations")]
    fn a_plan_that_sends_more_than_there_is_is_a_bug() {
        router(&plan(3, SpreadOrder::RoundRobin, &[(1, 4)]));
    }
}
