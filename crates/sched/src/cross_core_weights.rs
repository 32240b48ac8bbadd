//! Per-core weights of tenants, adjusted so that the service from all cores together approaches the configured weights.
//!
//! ```text
//!   weights 1 : 1        core 0    core 1     together
//!   a on both            1/2       1          1.5          every core by itself is fair
//!   b on core 0          1/2       -          0.5
//!
//!   a's weight on core 0 is reduced, interval by interval:
//!   a                    1/17      1          1.06
//!   b                    16/17     -          0.94
//! ```
//! In: for each tenant its weight, and on each core the service it received in the interval, whether it was backlogged
//! there, and its weight there. Out: its weights on each core for the next interval, for [`FairQueue::set_weight`].
//! Pure.
//!
//! Cores share nothing while they serve, so the adjustment happens between intervals. On each core, the tenants that
//! were backlogged there are compared by their service from all cores divided by their configured weight: a tenant with
//! less than the others that it meets there gains weight there, a tenant with more loses weight. The adjustment has
//! converged if, on every core, the backlogged tenants served there have equal service per weight, and tenants with
//! more are served elsewhere. This is weighted max-min fairness: no tenant can gain without a loss of a tenant that has less.
//! The weights of a core are then scaled so that they equal the configuration on average, since only their ratios
//! count.
//!
//! # Limits
//! - A weight on a core is at least 1/16 and at most 16 times its configured value, so no tenant starves and two
//!   tenants are at most 256 apart; the example above ends at that bound (256 : 1), closer to equal than the table
//!   shows.
//! - It changes by at most a factor of 2 per interval, and less near the target (the example is at 1.04 : 0.96 after a
//!   dozen intervals), so a change of load is corrected over several intervals, and service missed before is not
//!   compensated.
//! - Tenants that share no core, directly or through a chain of others, cannot be balanced: that takes migration.
//! - Rate limits (operations or bytes per second) apply to each core by itself. Divide a limit over all cores among
//!   them.
//! - A tenant that is not backlogged on a core has all the service that it requests there; its weight returns to the
//!   configured value, from above only once no tenant is backlogged there. If it then requests more, it may have too
//!   much for some intervals.
//!
//! Charging a tenant on one core for its service on others is the idea of DSFQ (Wang and Merchant 2007), which adjusts
//! at each request and needs the other cores' service that often. Tests: tables and random cores below, served
//! as a fluid.
//!
//! [`FairQueue::set_weight`]: crate::fair_queue::FairQueue::set_weight

use crate::fair_queue::{WEIGHT_MAX, WEIGHT_UNIT};

/// Greatest factor between a weight on a core and its configured value, in both directions.
const WEIGHT_FACTOR_MAX: f64 = 16.0;
/// Greatest factor by which a weight changes from one interval to the next.
const STEP_FACTOR_MAX: f64 = 2.0;

/// The service of one tenant on one core in one interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CoreUsage {
    /// CPU or device time charged to its requests there.
    pub served_ns: u64,
    /// Whether requests of it waited there for most of the interval.
    pub was_backlogged: bool,
    /// Its weight there, in [`WEIGHT_UNIT`]s; 0 for the configured weight.
    pub weight: u32,
}

/// The service of one tenant on all cores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantUsage {
    /// Configured weight, 1 to 1000.
    pub weight: u32,
    /// Service by core.
    pub cores: Vec<CoreUsage>,
}

impl TenantUsage {
    fn total_served_ns(&self) -> f64 {
        self.cores.iter().map(|core| core.served_ns as f64).sum()
    }

    fn nominal_weight(&self) -> f64 {
        f64::from(self.weight.max(1)) * f64::from(WEIGHT_UNIT)
    }

    /// Its weight on a core ÷ its configured weight.
    fn weight_factor(&self, core: usize) -> f64 {
        match self.cores.get(core).map_or(0, |core| core.weight) {
            0 => 1.0,
            weight => f64::from(weight) / self.nominal_weight(),
        }
    }
}

/// Computes the weights of the next interval by tenant and core, in [`WEIGHT_UNIT`]s.
pub fn core_weights(tenants: &[TenantUsage]) -> Vec<Vec<u32>> {
    let count = tenants.iter().map(|tenant| tenant.cores.len()).max().unwrap_or(0);
    let times: Vec<Vec<f64>> = (0..count).map(|core| weight_factors_on(core, tenants)).collect();
    let weight = |tenant: &TenantUsage, times: f64| {
        let weight = tenant.nominal_weight() * times.clamp(1.0 / WEIGHT_FACTOR_MAX, WEIGHT_FACTOR_MAX);
        (weight.round() as u32).clamp(1, WEIGHT_MAX)
    };
    let of_tenant = |(at, tenant): (usize, &TenantUsage)| {
        times.iter().map(|on_core| weight(tenant, on_core[at])).collect()
    };
    tenants.iter().enumerate().map(of_tenant).collect()
}

/// For each tenant, the weight on a core ÷ the configured weight in the next interval.
fn weight_factors_on(core: usize, tenants: &[TenantUsage]) -> Vec<f64> {
    let waits = |tenant: &TenantUsage| tenant.cores.get(core).is_some_and(|core| core.was_backlogged);
    let there = || tenants.iter().filter(|tenant| waits(tenant));
    let somebody_waits = there().next().is_some();
    let served: f64 = there().map(TenantUsage::total_served_ns).sum();
    let mean = served / there().map(TenantUsage::nominal_weight).sum::<f64>();
    let wanted = |tenant: &TenantUsage| {
        let factor = if mean > 0.0 { mean * tenant.nominal_weight() / tenant.total_served_ns() } else { 1.0 };
        tenant.weight_factor(core) * factor.clamp(1.0 / STEP_FACTOR_MAX, STEP_FACTOR_MAX)
    };
    let logs: f64 = there().map(|tenant| wanted(tenant).ln()).sum();
    let level = (logs / there().count().max(1) as f64).exp();
    let next = |tenant: &TenantUsage| match waits(tenant) {
        true => wanted(tenant) / level,
        // Its service is sufficient while others are backlogged: with less weight it might not be.
        false if somebody_waits && tenant.weight_factor(core) > 1.0 => tenant.weight_factor(core),
        // Half of the way back.
        false => tenant.weight_factor(core).sqrt(),
    };
    tenants.iter().map(next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Prng;

    const INTERVAL_NS: f64 = 1e9;

    /// Serves one interval with cores as fluids: `demands[tenant][core]` in parts of a core.
    fn serve(tenants: &mut [TenantUsage], demands: &[Vec<f64>]) {
        (0..demands[0].len()).for_each(|core| serve_on(core, tenants, demands));
    }

    fn serve_on(core: usize, tenants: &mut [TenantUsage], demands: &[Vec<f64>]) {
        let weight = |at: usize| tenants[at].weight_factor(core) * tenants[at].nominal_weight();
        let (mut capacity, mut got) = (1.0, vec![0.0; tenants.len()]);
        let mut open: Vec<usize> = (0..got.len()).filter(|&at| demands[at][core] > 0.0).collect();
        while !open.is_empty() {
            let unit = capacity / open.iter().map(|&at| weight(at)).sum::<f64>();
            let (full, rest): (Vec<usize>, Vec<usize>) =
                open.iter().partition(|&&at| demands[at][core] <= weight(at) * unit);
            if full.is_empty() {
                rest.iter().for_each(|&at| got[at] = weight(at) * unit);
                break;
            }
            for at in full {
                got[at] = demands[at][core];
                capacity -= got[at];
            }
            open = rest;
        }
        for ((tenant, got), demands) in tenants.iter_mut().zip(got).zip(demands) {
            tenant.cores[core].served_ns = (got * INTERVAL_NS) as u64;
            tenant.cores[core].was_backlogged = demands[core] > got + 1e-9;
        }
    }

    /// The service of each tenant, in parts of a core, after so many intervals.
    fn converged(tenants: &mut [TenantUsage], demands: &[Vec<f64>], intervals: usize) -> Vec<f64> {
        serve(tenants, demands);
        for _ in 0..intervals {
            for (tenant, weights) in core_weights(tenants).into_iter().enumerate() {
                for (core, weight) in tenants[tenant].cores.iter_mut().zip(weights) {
                    core.weight = weight;
                }
            }
            serve(tenants, demands);
        }
        tenants.iter().map(|tenant| tenant.total_served_ns() / INTERVAL_NS).collect()
    }

    fn tenants(weights: &[u32], cores: usize) -> Vec<TenantUsage> {
        let tenant = |&weight: &u32| TenantUsage { weight, cores: vec![CoreUsage::default(); cores] };
        weights.iter().map(tenant).collect()
    }

    #[test]
    fn tenants_approach_their_weights_over_all_cores() {
        const ALL: f64 = 9.0;
        // Expected service, weights, and the demand of each tenant on each core.
        type CrossCoreRow = (&'static [f64], &'static [u32], &'static [&'static [f64]]);
        let table: &[CrossCoreRow] = &[
            (&[0.5, 0.5], &[1, 1], &[&[ALL], &[ALL]]),
            (&[2.0 / 7.0, 4.0 / 7.0, 8.0 / 7.0], &[1, 2, 4], &[&[ALL, ALL], &[ALL, ALL], &[ALL, ALL]]),
            (&[1.0, 1.0], &[1, 1], &[&[ALL, ALL], &[ALL, 0.0]]),
            (&[0.667, 0.667, 0.667], &[1, 1, 1], &[&[ALL, ALL], &[ALL, 0.0], &[0.0, ALL]]),
            (&[0.5, 1.0, 0.5], &[1, 3, 1], &[&[ALL, ALL], &[ALL, 0.0], &[0.0, ALL]]),
            (
                &[1.0, 0.5, 0.5, 1.0],
                &[1, 1, 1, 9],
                &[&[ALL, ALL, 0.0], &[0.0, ALL, 0.0], &[0.0, ALL, 0.0], &[0.0, 0.0, ALL]],
            ),
            (&[1.8, 0.2], &[1, 1], &[&[ALL, ALL], &[0.2, 0.0]]),
            (&[0.3, 0.2], &[1, 9], &[&[0.1, 0.2], &[0.2, 0.0]]),
            (&[0.0, 1.0], &[1, 1], &[&[0.0], &[ALL]]),
        ];
        for (want, weights, demands) in table {
            let demands: Vec<Vec<f64>> = demands.iter().map(|demands| demands.to_vec()).collect();
            let got = converged(&mut tenants(weights, demands[0].len()), &demands, 60);
            for (got, want) in got.iter().zip(*want) {
                assert!((got - want).abs() <= 0.01, "{got} not {want}: {weights:?} {demands:?}");
            }
        }
    }

    #[test]
    fn the_least_served_tenant_never_gets_less_than_without_adjustment() {
        let random = &mut Prng::new(21);
        for _ in 0..500 {
            let (count, cores) = (random.below(5) as usize + 1, random.below(4) as usize + 1);
            let weights: Vec<u32> = (0..count).map(|_| random.below(4) as u32 + 1).collect();
            let demand = |random: &mut Prng| [0.0, 0.2, 9.0, 9.0][random.below(4) as usize];
            let demands: Vec<Vec<f64>> =
                (0..count).map(|_| (0..cores).map(|_| demand(random)).collect()).collect();
            let least = |intervals: usize| {
                let got = converged(&mut tenants(&weights, cores), &demands, intervals);
                // A tenant within a twentieth of its demand counts as satisfied.
                let wants = |at: &usize| demands[*at].iter().sum::<f64>() > got[*at] * 1.05;
                let part = |at: usize| got[at] / f64::from(weights[at]);
                (0..count).filter(wants).map(part).reduce(f64::min)
            };
            if let (Some(before), Some(after)) = (least(0), least(30)) {
                assert!(after >= before * 0.98, "{before} {after}: {weights:?} {demands:?}");
            }
        }
    }

    #[test]
    fn weights_return_when_no_tenant_is_backlogged() {
        let all = vec![vec![9.0, 9.0], vec![9.0, 0.0]];
        let tenants = &mut tenants(&[1, 1], 2);
        converged(tenants, &all, 12);
        assert!(tenants[1].cores[0].weight >= 20 * tenants[0].cores[0].weight, "{tenants:?}");
        converged(tenants, &[vec![0.1, 0.1], vec![0.1, 0.0]], 12);
        let mut weights = tenants.iter().flat_map(|tenant| &tenant.cores).map(|core| core.weight);
        assert!(weights.all(|weight| weight.abs_diff(WEIGHT_UNIT) < WEIGHT_UNIT / 100), "{tenants:?}");
    }

    #[test]
    fn extreme_service_and_weights_stay_within_the_weight_range() {
        assert!(core_weights(&[]).is_empty());
        let core = |served_ns, waited, weight| CoreUsage { served_ns, was_backlogged: waited, weight };
        let of = |weight, cores: &[CoreUsage]| TenantUsage { weight, cores: cores.to_vec() };
        let weights = core_weights(&[
            of(0, &[core(u64::MAX, true, u32::MAX), core(0, true, 1)]),
            of(u32::MAX, &[core(0, true, 1), core(u64::MAX, false, u32::MAX)]),
            of(1, &[]),
        ]);
        assert!(weights.iter().flatten().all(|weight| (1..=WEIGHT_MAX).contains(weight)), "{weights:?}");
        assert!(weights.iter().all(|weights| weights.len() == 2));
    }
}
