//! Counts what the keys of a device took and gave, so that its amplification is known.
//!
//! In: operations that succeeded, on any core. Out: their bytes. The cores share the counters of a device: two atomic additions an operation at most.

use crate::KeyTraffic;
use std::sync::atomic::{AtomicU64, Ordering};

/// The traffic of one device.
#[derive(Default)]
pub(super) struct TrafficCounters {
    put_bytes: AtomicU64,
    got_bytes: AtomicU64,
}

impl TrafficCounters {
    /// Notes a put that stored keys and values of so many bytes.
    pub fn note_put(&self, bytes: usize) {
        self.put_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Notes a read of so many bytes.
    pub fn note_get(&self, bytes: usize) {
        self.got_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// The bytes so far.
    pub fn get(&self) -> KeyTraffic {
        KeyTraffic {
            put_bytes: self.put_bytes.load(Ordering::Relaxed),
            got_bytes: self.got_bytes.load(Ordering::Relaxed),
        }
    }
}
