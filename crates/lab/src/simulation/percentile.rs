//! Percentiles of latencies: nearest ranks.
//!
//! In: latencies. Out: one of them.

/// A percentile by the nearest rank, in microseconds; `per_mille` of 1000 is the maximum. NaN without a value.
pub fn percentile_us(values_ns: &[u32], per_mille: usize) -> f64 {
    let mut sorted = values_ns.to_vec();
    sorted.sort_unstable();
    let rank = (sorted.len() * per_mille).div_ceil(1000).max(1) - 1;
    sorted.get(rank).map_or(f64::NAN, |&ns| f64::from(ns) / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_ranks() {
        let values: Vec<u32> = (1..=2_000).rev().map(|us| us * 1000).collect();
        let found = [500, 990, 999, 1000].map(|per_mille| percentile_us(&values, per_mille));
        assert_eq!(found, [1_000.0, 1_980.0, 1_998.0, 2_000.0]);
        assert_eq!((percentile_us(&[7_000], 500), percentile_us(&[], 500).is_nan()), (7.0, true));
    }
}
