//! Bug injection: a thread-local switch for deliberate bugs, which tests enable to prove that a checker detects them.

/// Defines `inject`, `injected` and `is_injected` for a crate's enumeration of bugs. With the crate's feature
/// `bug-injection`, and in its unit tests, `inject` enables a bug for the calling thread. Otherwise, `is_injected` is constant `false` and
/// the compiler removes every injected bug.
#[macro_export]
macro_rules! define_bug_injection {
    ($bug:ty) => {
        #[cfg(any(test, feature = "bug-injection"))]
        thread_local! {
            static INJECTED: std::cell::Cell<Option<$bug>> = const { std::cell::Cell::new(None) };
        }

        /// Enables one bug for the calling thread; `None` disables it.
        #[cfg(any(test, feature = "bug-injection"))]
        pub fn inject(bug: Option<$bug>) {
            INJECTED.set(bug);
        }

        /// The bug that is enabled for the calling thread.
        #[cfg(any(test, feature = "bug-injection"))]
        pub fn injected() -> Option<$bug> {
            INJECTED.get()
        }

        /// Whether `bug` is enabled for the calling thread.
        #[cfg(any(test, feature = "bug-injection"))]
        pub fn is_injected(bug: $bug) -> bool {
            INJECTED.get() == Some(bug)
        }

        /// Always false: the feature `bug-injection` is off.
        #[cfg(not(any(test, feature = "bug-injection")))]
        #[inline(always)]
        pub const fn is_injected(_: $bug) -> bool {
            false
        }
    };
}
