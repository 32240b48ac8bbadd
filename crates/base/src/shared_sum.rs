//! A sum of counters, each of which somebody else updates.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The sum of shared counters. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct SharedSum(Arc<[Arc<AtomicU64>]>);

impl SharedSum {
    /// A sum that never changes.
    pub fn constant(value: u64) -> SharedSum {
        SharedSum::from(Arc::new(AtomicU64::new(value)))
    }

    /// The sum now. Counters that change meanwhile have their values of before or after.
    pub fn get(&self) -> u64 {
        self.0.iter().fold(0, |sum, counter| sum.wrapping_add(counter.load(Ordering::Relaxed)))
    }
}

impl From<Arc<AtomicU64>> for SharedSum {
    fn from(counter: Arc<AtomicU64>) -> SharedSum {
        SharedSum(Arc::new([counter]))
    }
}

/// The sum of sums.
impl FromIterator<SharedSum> for SharedSum {
    fn from_iter<I: IntoIterator<Item = SharedSum>>(sums: I) -> SharedSum {
        SharedSum(sums.into_iter().flat_map(|sum| sum.0.to_vec()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_follows_its_counters() {
        let counter = Arc::new(AtomicU64::new(3));
        let sum: SharedSum =
            [SharedSum::from(Arc::clone(&counter)), SharedSum::constant(10)].into_iter().collect();
        assert_eq!((sum.get(), SharedSum::default().get()), (13, 0));
        counter.store(5, Ordering::Relaxed);
        assert_eq!(sum.clone().get(), 15);
    }
}
