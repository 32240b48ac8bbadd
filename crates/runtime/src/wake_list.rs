//! The cores whose sleep a `notify` has ended, for a driver that runs many cores in one thread (`crate::simulated`).
//!
//! In: the cores, by number, from the [`crate::CoreWaker`] of each. Out: the same, to the thread that runs them.
//! Invariant: a core is listed once for each sleep that a `notify` ends.

use std::sync::{Arc, Mutex, PoisonError};

/// The numbers of woken cores, in the order of their wake-ups.
#[derive(Debug, Default)]
pub(crate) struct WakeList(Mutex<Vec<u32>>);

/// The place of one core in a [`WakeList`].
#[derive(Debug)]
pub(crate) struct WakeListEntry {
    wake_list: Arc<WakeList>,
    core: u32,
}

impl WakeList {
    /// The entry by which `core` is listed.
    pub(crate) fn entry(wake_list: &Arc<WakeList>, core: u32) -> WakeListEntry {
        WakeListEntry { wake_list: Arc::clone(wake_list), core }
    }

    /// Moves the listed cores to the end of `out`.
    pub(crate) fn take(&self, out: &mut Vec<u32>) {
        out.append(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl WakeListEntry {
    /// Lists the core.
    pub(crate) fn list(&self) {
        self.wake_list.0.lock().unwrap_or_else(PoisonError::into_inner).push(self.core);
    }
}
