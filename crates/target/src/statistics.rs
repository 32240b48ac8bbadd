//! What was done, counted: by each connection for itself, added up for its controller and the target.
//!
//! A connection counts in plain integers ([`Counts`]) and adds them to the shared [`Statistics`] at its
//! ticks and at its end, so that cores do not share a cache line per command. Readers see the past
//! within one tick.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Numbers of what happened.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counts {
            $($(#[$doc])* pub $name: u64,)*
        }

        /// [`Counts`] that several cores add to.
        #[derive(Debug, Default)]
        pub struct Statistics {
            $($name: AtomicU64,)*
        }

        impl Statistics {
            /// Adds `counts` and makes them zero.
            pub fn absorb(&self, counts: &mut Counts) {
                $(if counts.$name != 0 { self.$name.fetch_add(counts.$name, Ordering::Relaxed); })*
                *counts = Counts::default();
            }

            /// The numbers now.
            pub fn read(&self) -> Counts {
                Counts { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counts! {
    /// Store commands.
    stores,
    /// Retrieve commands.
    retrieves,
    /// Delete commands.
    deletes,
    /// Exist commands.
    exists,
    /// List commands.
    lists,
    /// Flush commands.
    flushes,
    /// Admin commands, Fabrics commands included.
    admin_commands,
    /// Bytes of values that hosts sent for Store commands.
    stored_bytes,
    /// Bytes of values and listings that were sent to hosts.
    retrieved_bytes,
    /// Answers "key does not exist" and "key exists": no errors.
    misses,
    /// Commands that failed otherwise.
    errors,
    /// Values that could not be read back.
    media_errors,
    /// Data digests that were wrong.
    digest_errors,
    /// Connections that ended because of what the host sent.
    transport_faults,
    /// Controllers that ended because their host fell silent.
    keep_alive_expired,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absorbed_counts_add_up_once() {
        let statistics = Statistics::default();
        let mut counts = Counts { stores: 2, errors: 1, ..Counts::default() };
        statistics.absorb(&mut counts);
        statistics.absorb(&mut counts);
        counts.stores = 3;
        statistics.absorb(&mut counts);
        assert_eq!(statistics.read(), Counts { stores: 5, errors: 1, ..Counts::default() });
    }
}
