//! The switch for bugs that a room plants in itself, so that tests can see what should find them go red.

/// Makes `inject`, `injected` and `is_injected` for a room's enumeration of bugs. With the room's feature `bug-injection` a bug is
/// planted for the calling thread; without it `is_injected` is constant and the room has no trace of them.
#[macro_export]
macro_rules! define_bug_injection {
    ($bug:ty) => {
        #[cfg(feature = "bug-injection")]
        thread_local! {
            static INJECTED: std::cell::Cell<Option<$bug>> = const { std::cell::Cell::new(None) };
        }

        /// Plants a bug for this thread, or with `None` takes it out.
        #[cfg(feature = "bug-injection")]
        pub fn inject(bug: Option<$bug>) {
            INJECTED.set(bug);
        }

        /// The bug that is planted for this thread.
        #[cfg(feature = "bug-injection")]
        pub fn injected() -> Option<$bug> {
            INJECTED.get()
        }

        /// Whether this bug is planted.
        #[cfg(feature = "bug-injection")]
        pub fn is_injected(bug: $bug) -> bool {
            INJECTED.get() == Some(bug)
        }

        /// Whether this bug is planted: never.
        #[cfg(not(feature = "bug-injection"))]
        #[inline(always)]
        pub const fn is_injected(_: $bug) -> bool {
            false
        }
    };
}
