//! What was done, counted: by each connection for itself, added up for its controller and the target.
//!
//! A connection counts in plain integers ([`Counts`]) and adds them to the shared [`Statistics`] at its
//! ticks and at its end, so that cores do not share a cache line per command. Readers see the past
//! within one tick.

use crate::io_request::RequestOperation;
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
    /// Read commands, of blocks.
    block_reads,
    /// Write commands, of blocks.
    block_writes,
    /// Compare and Verify commands.
    block_checks,
    /// Write Zeroes commands.
    block_zeroes,
    /// Dataset Management commands that gave ranges back.
    deallocations,
    /// Bytes of blocks that were sent to hosts, or that hosts had compared.
    read_bytes,
    /// Bytes of blocks that hosts sent for Write commands.
    written_bytes,
    /// Admin commands, Fabrics commands included.
    admin_commands,
    /// Bytes of values that hosts sent for Store commands.
    stored_bytes,
    /// Bytes of values and listings that were sent to hosts.
    retrieved_bytes,
    /// Answers "key does not exist", "key exists" and "compare failure": no errors.
    misses,
    /// Commands that failed otherwise.
    errors,
    /// Values and blocks that could not be read back, or written.
    media_errors,
    /// Data digests that were wrong.
    digest_errors,
    /// Connections that ended because of what the host sent.
    transport_faults,
    /// Controllers that ended because their host fell silent.
    keep_alive_expired,
}

impl Counts {
    /// One more that the engine is asked.
    #[inline]
    pub(crate) fn count_operation(&mut self, operation: &RequestOperation) {
        match operation {
            RequestOperation::Store { value_bytes, .. } => {
                self.stores += 1;
                self.stored_bytes += u64::from(*value_bytes);
            }
            RequestOperation::Retrieve { .. } => self.retrieves += 1,
            RequestOperation::Delete { .. } => self.deletes += 1,
            RequestOperation::Exist { .. } => self.exists += 1,
            RequestOperation::List { .. } => self.lists += 1,
            RequestOperation::Flush => self.flushes += 1,
            RequestOperation::Read { .. } => self.block_reads += 1,
            RequestOperation::Write { data, .. } => {
                self.block_writes += 1;
                self.written_bytes += data.len() as u64;
            }
            RequestOperation::Compare { data, .. } => {
                self.block_checks += 1;
                self.read_bytes += data.len() as u64;
            }
            RequestOperation::Verify { .. } => self.block_checks += 1,
            RequestOperation::WriteZeroes { .. } => self.block_zeroes += 1,
            RequestOperation::Deallocate { .. } => self.deallocations += 1,
        }
    }
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
