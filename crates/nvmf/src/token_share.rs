//! Tokens of the devices of a namespace for hosts: where they come from, and the part of each controller.
//!
//! ```text
//!   Set Features C0h ─▶ the controller has a share: its host's weight
//!   command on a key ─▶ device, kept in its slot ─▶ completion: DW1 31:16 = free tokens × weight ÷ weights of all that have shares
//! ```
//! In: the weights of hosts. Out: tokens for a completion. The shares say how much of what is free a host may send; which of the
//! requests of hosts is next on a core is decided by the node's fair queue alone, by the same weights, and the queue of the device keeps
//! its order. Each controller that asked for tokens has its host's weight, whether it sends commands or not: as long as others send none,
//! each completion gives a host its part of what is left, so that it takes nearly all in a few round trips.
//!
//! Invariant: `total` is the sum of the weights of all shares; a share that is dropped has none. Tested below.

use octokv_wire::device_log::DeviceLog;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The most tokens that a completion has.
const TOKENS_MAX: u32 = u16::MAX as u32;

/// The devices of a namespace that have tokens. Shared by all cores.
pub trait TokenSource: fmt::Debug + Send + Sync {
    /// The index of the device of a key.
    fn device_of(&self, key: &[u8]) -> u8;
    /// The free tokens of a device; 0 if there is none of this index.
    fn free_tokens(&self, device: u8) -> u32;
    /// The log page of all devices.
    fn device_log(&self) -> DeviceLog;
}

/// The share of one controller in the tokens of all devices.
#[derive(Debug)]
pub(crate) struct TokenShare {
    /// 0 if the controller has not asked for tokens.
    weight: AtomicU32,
    /// The weights of all controllers of the target.
    total: Arc<AtomicU32>,
}

impl TokenShare {
    /// No share.
    pub fn none(total: Arc<AtomicU32>) -> TokenShare {
        TokenShare { weight: AtomicU32::new(0), total }
    }

    /// Sets the weight; 0 gives up the share.
    pub fn set_weight(&self, weight: u32) {
        let before = self.weight.swap(weight, Ordering::Relaxed);
        // Modulo 2^32: the sum of all is right whatever the order.
        self.total.fetch_add(weight.wrapping_sub(before), Ordering::Relaxed);
    }

    /// Whether the controller has asked for tokens.
    #[inline]
    pub fn exists(&self) -> bool {
        self.weight.load(Ordering::Relaxed) > 0
    }

    /// The part of free tokens, at most 65535; 0 without a share.
    pub fn of(&self, free: u32) -> u32 {
        let weight = self.weight.load(Ordering::Relaxed);
        let total = self.total.load(Ordering::Relaxed).max(weight).max(1);
        let part = u64::from(free) * u64::from(weight) / u64::from(total);
        part.min(TOKENS_MAX.into()) as u32
    }
}

impl Drop for TokenShare {
    fn drop(&mut self) {
        self.set_weight(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_tokens_are_divided_by_weight_among_those_that_asked() {
        let total = Arc::new(AtomicU32::new(0));
        let [a, b, c] = [(); 3].map(|()| TokenShare::none(Arc::clone(&total)));
        assert_eq!((a.of(512), a.exists()), (0, false));
        a.set_weight(3);
        assert_eq!((a.of(512), a.exists()), (512, true));
        b.set_weight(1);
        assert_eq!((a.of(512), b.of(512), c.of(512)), (384, 128, 0));
        a.set_weight(1);
        assert_eq!((a.of(512), b.of(512)), (256, 256));
        drop(a);
        assert_eq!((b.of(3), b.of(u32::MAX)), (3, 65535));
        b.set_weight(0);
        assert_eq!(total.load(Ordering::Relaxed), 0);
    }
}
