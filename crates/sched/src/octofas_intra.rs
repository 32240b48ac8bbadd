//! OctoFAS intra-core scheduling: which tenants are dense, and how often their requests are requeued behind the others
//! (OctoFAS §4.3.2).
//!
//! ```text
//!   requests in the interval  t1 ▪▪           sparse     mean of the sparse tenants: 2
//!                             t2 ▪▪▪▪▪▪▪▪     dense      B = alpha × 8 ÷ 2
//!   mean of all               ─────│  × 1.1
//! ```
//! In: the tenants' metrics of an interval. Out: for each tenant whether it is dense, and its requeue count B.
//!
//! The paper calls tenants of low intensity sparse and those of high intensity dense, without a boundary. Here a tenant
//! is dense if its intensity is more than a tenth above the mean of the active tenants. The mean needs no setting and
//! leaves at least one tenant below whenever one is above, so B always has a reference. The tenth is a margin, because
//! equal tenants never measure equal and one of them would be dense by chance in each interval. A single tenant, or
//! tenants that are all alike, are therefore never dense. A tenant without a completed request is inactive: it does not
//! count in means, and it is sparse, because it may be the one that starves.
//!
//! Intensities are those of the node, over all cores: a tenant counts once wherever its requests executed, which
//! includes the paper's correction for migrated requests.
//!
//! Tests: tables below.

use crate::config::SchedConfig;
use crate::metrics::{IntervalMetrics, TenantIntervalMetrics};

/// A tenant is dense above the mean × (1 + `.0 ÷ .1`).
const DENSE_MARGIN: (u128, u128) = (1, 10);

/// Whether F is at or below its threshold (OctoFAS §4.2.1).
pub fn is_unfair(metrics: &IntervalMetrics, config: &SchedConfig) -> bool {
    metrics.fairness <= config.fairness
}

/// For each tenant, whether it is dense.
pub fn classify_dense(tenants: &[TenantIntervalMetrics]) -> Vec<bool> {
    let active = tenants.iter().filter(|tenant| tenant.requests > 0).count() as u128;
    let sum: u128 = tenants.iter().map(|tenant| u128::from(tenant.requests)).sum();
    // Integers: rounding of the mean must not separate equal tenants.
    let least = sum.saturating_mul(DENSE_MARGIN.0 + DENSE_MARGIN.1);
    let is_dense = |requests: u64| u128::from(requests).saturating_mul(active * DENSE_MARGIN.1) > least;
    tenants.iter().map(|tenant| is_dense(tenant.requests)).collect()
}

/// For each tenant its requeue count: B = alpha × intensity ÷ mean intensity of the active sparse tenants, rounded, at
/// most `requeues_max`; 0 for a sparse tenant.
pub fn requeue_counts(tenants: &[TenantIntervalMetrics], dense: &[bool], config: &SchedConfig) -> Vec<u32> {
    let sparse = || tenants.iter().zip(dense).filter(|(tenant, dense)| !**dense && tenant.requests > 0);
    let count = sparse().count();
    let mean = sparse().map(|(tenant, _)| tenant.intensity).sum::<f64>() / count.max(1) as f64;
    let of = |(tenant, dense): (&TenantIntervalMetrics, &bool)| {
        if !dense || count == 0 {
            return 0;
        }
        // The cast saturates: a float outside of `u32` becomes the nearest value, NaN becomes 0.
        ((config.alpha * tenant.intensity / mean).round() as u32).min(config.requeues_max)
    };
    tenants.iter().zip(dense).map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{IntervalCounters, TenantId, compute_metrics};

    /// Tenants with these numbers of requests in one second.
    fn tenants_of(requests: &[u64]) -> Vec<TenantIntervalMetrics> {
        let tenant = |(index, &requests): (usize, &u64)| TenantIntervalMetrics {
            tenant: TenantId(index as u32),
            requests_by_core: vec![requests],
            requests,
            intensity: requests as f64,
            bytes_per_s: 0.0,
            response_time: None,
            slowdown: None,
        };
        requests.iter().enumerate().map(tenant).collect()
    }

    #[test]
    fn tenants_well_above_the_mean_are_dense() {
        let table: &[(&[u64], &[u64])] = &[
            // Requests of each tenant, and which tenants are dense.
            (&[], &[]),
            (&[], &[1_000_000]),
            (&[], &[0, 0]),
            (&[], &[0, 500]), // The other is not active: this one is alone.
            (&[], &[500, 500, 500]),
            (&[], &[500, 505, 495]), // Alike, but for chance.
            (&[], &[90, 110]),       // A tenth above the mean, and not more.
            (&[1], &[90, 111]),
            (&[1], &[2, 8]), // OctoFAS's two tenants.
            (&[1], &[2, 8, 0]),
            (&[0], &[800, 1, 1, 1]),
            (&[1, 3], &[10, 100, 10, 100]),
            (&[2], &[100, 100, 400]),
            (&[1], &[0, u64::MAX, 1]),
        ];
        for (want, requests) in table {
            let dense = classify_dense(&tenants_of(requests));
            let got: Vec<u64> = (0..).zip(&dense).filter(|(_, dense)| **dense).map(|(at, _)| at).collect();
            assert_eq!(got, *want, "{requests:?}");
        }
    }

    #[test]
    fn requeues_are_proportional_to_intensity() {
        let requeues = |requests: &[u64], alpha: f64, requeues_max: u32| {
            let (tenants, config) =
                (tenants_of(requests), SchedConfig { alpha, requeues_max, ..SchedConfig::default() });
            requeue_counts(&tenants, &classify_dense(&tenants), &config)
        };
        let table: &[(&[u32], &[u64], f64, u32)] = &[
            // Requests of each tenant, B of each, alpha, and the maximum.
            (&[0, 8], &[2, 8], 2.0, 15),
            (&[0, 4], &[2, 8], 1.0, 15),
            (&[0, 5], &[2, 8], 1.25, 15),
            (&[0, 0], &[2, 8], 0.0, 15),
            (&[0, 15], &[2, 8], 100.0, 15),
            (&[0, 0], &[2, 8], 100.0, 0),
            (&[0, 15], &[1, u64::MAX], 100.0, 15),
            (&[0, 0, 6, 0], &[1, 3, 12, 0], 1.0, 15), // The idle tenant is not in the mean of 2.
            (&[0, 0, 3], &[4, 12, 20], 1.0, 15),      // Sparse ones of 4 and 12: 20 ÷ 8 is 2.5.
            (&[0, 0], &[5, 5], 1.0, 15),
            (&[0], &[5], 1.0, 15),
            (&[0, 0], &[0, 0], 1.0, 15),
        ];
        for (want, requests, alpha, most) in table {
            assert_eq!(requeues(requests, *alpha, *most), *want, "{requests:?} {alpha}");
        }
    }

    #[test]
    fn unfair_at_or_below_the_threshold() {
        for (fairness, unfair) in [(0.0, true), (0.9, true), (0.91, false), (1.0, false)] {
            let mut metrics = compute_metrics(&IntervalCounters::default());
            metrics.fairness = fairness;
            assert_eq!(is_unfair(&metrics, &SchedConfig::default()), unfair, "{fairness}");
        }
    }
}
