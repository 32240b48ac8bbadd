//! Which flows are dense, and how often their requests go back behind the others (OctoFAS §4.3.2).
//!
//! ```text
//!   requests in the window   f1 ▪▪           sparse     mean of those that are sparse: 2
//!                            f2 ▪▪▪▪▪▪▪▪     dense      B = alpha × 8 ÷ 2
//!   mean of all              ─────│  × 1.1
//! ```
//! In: the flows' figures of a window. Out: for each flow whether it is dense, and its backwardings B.
//!
//! The paper says that flows of low intensity are sparse and those of high intensity dense, and not where one ends. Here a
//! flow is dense when it is more than a tenth above the mean of those that are active. The mean, because it needs no
//! setting and leaves somebody below it whenever somebody is above, so B always has something to be measured by; the tenth,
//! because equal flows never measure equal, and one of them would be dense by chance in each window. So
//! none is dense where one is alone or all are alike. A flow of which nothing was answered is not active, takes no part in
//! means, and is sparse: it may be the one that starves.
//!
//! Intensities are the node's, over all cores: so a flow counts once wherever its requests ran, and what the paper adds for
//! those that have moved is in them.
//!
//! Tests: tables below.

use crate::config::SchedConfig;
use crate::metrics::{IntervalMetrics, TenantIntervalMetrics};

/// Dense is who is above the mean by more than `MARGIN.0 ÷ MARGIN.1` of it.
const DENSE_MARGIN: (u128, u128) = (1, 10);

/// Whether F is at or below its threshold (OctoFAS §4.2.1).
pub fn is_unfair(metrics: &IntervalMetrics, config: &SchedConfig) -> bool {
    metrics.fairness <= config.fairness
}

/// For each flow, whether it is dense.
pub fn classify_dense(tenants: &[TenantIntervalMetrics]) -> Vec<bool> {
    let active = tenants.iter().filter(|tenant| tenant.requests > 0).count() as u128;
    let sum: u128 = tenants.iter().map(|tenant| u128::from(tenant.requests)).sum();
    // In whole numbers: flows that are alike must not differ by how a mean was rounded.
    let least = sum.saturating_mul(DENSE_MARGIN.0 + DENSE_MARGIN.1);
    let is_dense = |requests: u64| u128::from(requests).saturating_mul(active * DENSE_MARGIN.1) > least;
    tenants.iter().map(|tenant| is_dense(tenant.requests)).collect()
}

/// For each flow its backwardings: B = alpha × intensity ÷ mean intensity of active sparse flows, to the nearest whole
/// number, at most `requeues_max`; 0 for a sparse one.
pub fn requeue_counts(tenants: &[TenantIntervalMetrics], dense: &[bool], config: &SchedConfig) -> Vec<u32> {
    let sparse = || tenants.iter().zip(dense).filter(|(flow, dense)| !**dense && flow.requests > 0);
    let count = sparse().count();
    let mean = sparse().map(|(tenant, _)| tenant.intensity).sum::<f64>() / count.max(1) as f64;
    let of = |(tenant, dense): (&TenantIntervalMetrics, &bool)| {
        if !dense || count == 0 {
            return 0;
        }
        // A float that is no u32 becomes the nearest one, or 0 where it is no number.
        ((config.alpha * tenant.intensity / mean).round() as u32).min(config.requeues_max)
    };
    tenants.iter().zip(dense).map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{IntervalCounters, TenantId, compute_metrics};

    /// Flows of so many requests in a second.
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
            // Who is dense, of flows with so many requests.
            (&[], &[]),
            (&[], &[1_000_000]),
            (&[], &[0, 0]),
            (&[], &[0, 500]), // The other is not active: this one is alone.
            (&[], &[500, 500, 500]),
            (&[], &[500, 505, 495]), // Alike, but for chance.
            (&[], &[90, 110]),       // A tenth above the mean, and not more.
            (&[1], &[90, 111]),
            (&[1], &[2, 8]), // OctoFAS's two flows.
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
            // B, of flows with so many requests, at this alpha and at most so many.
            (&[0, 8], &[2, 8], 2.0, 15),
            (&[0, 4], &[2, 8], 1.0, 15),
            (&[0, 5], &[2, 8], 1.25, 15),
            (&[0, 0], &[2, 8], 0.0, 15),
            (&[0, 15], &[2, 8], 100.0, 15),
            (&[0, 0], &[2, 8], 100.0, 0),
            (&[0, 15], &[1, u64::MAX], 100.0, 15),
            (&[0, 0, 6, 0], &[1, 3, 12, 0], 1.0, 15), // The resting flow is not in the mean of 2.
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
