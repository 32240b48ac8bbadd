//! Slices of background work: after each, the requests of its core have their turn.
//!
//! A flush or a compaction computes for seconds: it merges, copies, and checks sums. A slice is some 50 µs of that on a core of a few GHz, counted in bytes and entries, so that
//! the same work has the same slices everywhere, in the simulator too.

use octokv_runtime::yield_now;

/// The bytes of a slice.
const SLICE_BYTES: u64 = 64 << 10;
/// An entry takes as long as so many bytes, apart from its own: it is compared, allocated and encoded.
const ENTRY_BYTES: u64 = 512;

/// The work since the last yield.
#[derive(Debug, Default)]
pub struct WorkSlice {
    bytes: u64,
}

impl WorkSlice {
    /// Counts an entry of so many bytes, and yields if the slice is over.
    pub async fn count_entry(&mut self, bytes: usize) {
        self.count_bytes(ENTRY_BYTES + bytes as u64).await;
    }

    /// Counts bytes that were copied or checked, and yields if the slice is over.
    pub async fn count_bytes(&mut self, bytes: u64) {
        self.bytes += bytes;
        if self.bytes >= SLICE_BYTES {
            self.bytes = 0;
            yield_now().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn a_slice_ends_after_many_entries_or_many_bytes() {
        let entries_until_yield = |bytes| {
            let mut slice = WorkSlice::default();
            (1..).find(|_| slice.count_entry(bytes).now_or_never().is_none())
        };
        assert_eq!(entries_until_yield(0), Some(128));
        assert_eq!(entries_until_yield(512), Some(64));
        assert_eq!(entries_until_yield(1 << 20), Some(1));
        let mut slice = WorkSlice::default();
        assert!(slice.count_bytes(SLICE_BYTES).now_or_never().is_none());
        assert!(slice.count_bytes(SLICE_BYTES - 1).now_or_never().is_some(), "a new slice has begun");
    }
}
