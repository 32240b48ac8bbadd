//! The switch for bugs that a room plants in itself, so that tests can see what should find them go red.

/// Makes `plant`, `planted` and `is` for a room's enumeration of bugs. With the room's feature `planted-bugs` a bug is
/// planted for the calling thread; without it `is` is constant and the room has no trace of them.
#[macro_export]
macro_rules! planted_bugs {
    ($bug:ty) => {
        #[cfg(feature = "planted-bugs")]
        thread_local! {
            static PLANTED: std::cell::Cell<Option<$bug>> = const { std::cell::Cell::new(None) };
        }

        /// Plants a bug for this thread, or with `None` takes it out.
        #[cfg(feature = "planted-bugs")]
        pub fn plant(bug: Option<$bug>) {
            PLANTED.set(bug);
        }

        /// The bug that is planted for this thread.
        #[cfg(feature = "planted-bugs")]
        pub fn planted() -> Option<$bug> {
            PLANTED.get()
        }

        /// Whether this bug is planted.
        #[cfg(feature = "planted-bugs")]
        pub fn is(bug: $bug) -> bool {
            PLANTED.get() == Some(bug)
        }

        /// Whether this bug is planted: never.
        #[cfg(not(feature = "planted-bugs"))]
        #[inline(always)]
        pub const fn is(_: $bug) -> bool {
            false
        }
    };
}
