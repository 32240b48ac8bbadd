//! The progress of one scan: the pairs that it has read, each checked as it comes.
//! In: the first key and the number of pairs, then pairs in the order of their arrival. Out: counts, or why a pair is wrong.
//! Invariant: keys ascend from the first key on; with verification, each value is that of its key.

use crate::error::BenchError;
use crate::values;
use crate::workload_state::WorkloadState;
use octokv_base::Key;

/// One scan, of the operation that a stream executes. A stream reuses it, so that scans do not allocate.
#[derive(Clone, Debug, Default)]
pub(crate) struct ScanProgress {
    start: Vec<u8>,
    last_key: Vec<u8>,
    pairs_max: u32,
    /// Pairs read.
    pub pairs: u32,
    /// Bytes of their values.
    pub value_bytes: u64,
    /// Whether the first pair has the first key.
    pub found: bool,
}

impl ScanProgress {
    /// Begins a scan of `pairs_max` pairs from `start` on.
    pub fn begin(&mut self, start: &[u8], pairs_max: u32) {
        self.start.clear();
        self.start.extend_from_slice(start);
        self.last_key.clear();
        (self.pairs_max, self.pairs, self.value_bytes, self.found) = (pairs_max, 0, 0, false);
    }

    /// Pairs that the scan still needs.
    pub fn pairs_left(&self) -> u32 {
        self.pairs_max - self.pairs
    }

    /// Receives the next pair.
    ///
    /// # Errors
    /// [`BenchError::WrongOrder`]; with verification, [`BenchError::WrongValue`].
    pub fn receive(&mut self, shared: &WorkloadState, key: &[u8], value: &[u8]) -> Result<(), BenchError> {
        let config = &shared.config;
        let follows = if self.pairs == 0 { key >= &self.start[..] } else { key > &self.last_key[..] };
        if !follows || self.pairs == self.pairs_max {
            return Err(BenchError::WrongOrder { from: self.start_key(), pairs: self.pairs });
        }
        let is_of = |index: u64| {
            key.len() == config.key_bytes(index)
                && value.len() == config.value_bytes(index)
                && shared.values.matches(index, value)
        };
        if config.verify && !values::index_of(key).is_some_and(is_of) {
            let key = Key::new(key).unwrap_or_else(|| self.start_key());
            return Err(BenchError::WrongValue { key, have_bytes: value.len() });
        }
        self.found |= key == self.start;
        self.pairs += 1;
        self.value_bytes += value.len() as u64;
        self.last_key.clear();
        self.last_key.extend_from_slice(key);
        Ok(())
    }

    fn start_key(&self) -> Key {
        Key::new(&self.start).expect("it is the key of an index")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::BenchConfig;
    use crate::workload::Workload;
    use crate::workload_state::test_state;

    /// The result of a scan of 3 pairs from key 5 on that receives these indices, each with the value of the second one.
    fn scanned(pairs: &[(u64, u64)], verify: bool) -> (ScanProgress, Result<(), BenchError>) {
        let shared = test_state(BenchConfig { verify, ..BenchConfig::default() }, Workload::ScanRandom);
        let (config, mut scan) = (&shared.config, ScanProgress::default());
        scan.begin(config.key(5).as_bytes(), 3);
        for &(key, of) in pairs {
            let mut value = vec![0; config.value_bytes(of)];
            shared.values.fill(of, &mut value);
            if let Err(error) = scan.receive(&shared, config.key(key).as_bytes(), &value) {
                return (scan, Err(error));
            }
        }
        (scan, Ok(()))
    }

    #[test]
    fn pairs_in_order_count() {
        let (scan, result) = scanned(&[(5, 5), (6, 6), (9, 9)], true);
        assert_eq!((result, scan.pairs_left(), scan.found), (Ok(()), 0, true));
        assert_eq!(scan.value_bytes, 3 * 16384);
        let (scan, result) = scanned(&[(6, 6)], true);
        assert_eq!((result, scan.pairs_left(), scan.found), (Ok(()), 2, false));
    }

    #[test]
    fn a_pair_out_of_order_or_with_another_value_ends_the_scan() {
        let order = |pairs: &[(u64, u64)]| match scanned(pairs, false) {
            (_, Err(BenchError::WrongOrder { pairs, .. })) => Some(pairs),
            (_, Ok(())) => None,
            (_, other) => panic!("{other:?}"),
        };
        assert_eq!(order(&[(4, 4)]), Some(0), "below its first key");
        assert_eq!(order(&[(5, 5), (5, 5)]), Some(1), "twice");
        assert_eq!(order(&[(5, 5), (7, 7), (6, 6)]), Some(2), "descending");
        assert_eq!(order(&[(5, 5), (6, 6), (7, 7), (8, 8)]), Some(3), "more than were wanted");
        assert_eq!(order(&[(5, 6), (6, 6)]), None, "values are not verified");
        let (_, wrong) = scanned(&[(5, 5), (6, 7)], true);
        let key = BenchConfig::default().key(6);
        assert_eq!(wrong, Err(BenchError::WrongValue { key, have_bytes: 16384 }));
    }
}
