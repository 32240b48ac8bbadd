//! The synchronization types of the model-checked modules: std's and parking_lot's, or loom's with the feature `loom`.
//!
//! A module whose interleavings are model checked takes its atomics and its lock from here and nowhere else. Tested by
//! `make loom`.

#[cfg(feature = "loom")]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(feature = "loom")]
pub(crate) use modelled::Mutex;

#[cfg(not(feature = "loom"))]
pub(crate) use parking_lot::Mutex;
#[cfg(not(feature = "loom"))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering, fence};

#[cfg(feature = "loom")]
mod modelled {
    use loom::sync::MutexGuard;

    /// The model of a parking_lot mutex, which has no poisoning.
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Mutex<T> {
            Mutex(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().expect("no thread panics with the lock held")
        }
    }
}
