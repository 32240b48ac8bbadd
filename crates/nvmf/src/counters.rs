//! What was done, counted: by each connection for itself, added up for its controller and the target.
//!
//! A connection counters in plain integers ([`CounterSet`]) and adds them to the shared [`SharedCounters`] at its
//! ticks and at its end, so that cores do not share a cache line per command. Readers see the past
//! within one tick.

use crate::io_request::RequestOperation;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counter_set {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Numbers of what happened.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct CounterSet {
            $($(#[$doc])* pub $name: u64,)*
        }

        /// [`CounterSet`] that several cores add to.
        #[derive(Debug, Default)]
        pub struct SharedCounters {
            $($name: AtomicU64,)*
        }

        impl SharedCounters {
            /// Adds `counters` and makes them zero.
            pub fn add_and_reset(&self, counters: &mut CounterSet) {
                $(if counters.$name != 0 { self.$name.fetch_add(counters.$name, Ordering::Relaxed); })*
                *counters = CounterSet::default();
            }

            /// The numbers now.
            pub fn snapshot(&self) -> CounterSet {
                CounterSet { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counter_set! {
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

impl CounterSet {
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
        let shared = SharedCounters::default();
        let mut counters = CounterSet { stores: 2, errors: 1, ..CounterSet::default() };
        shared.add_and_reset(&mut counters);
        shared.add_and_reset(&mut counters);
        counters.stores = 3;
        shared.add_and_reset(&mut counters);
        assert_eq!(shared.snapshot(), CounterSet { stores: 5, errors: 1, ..CounterSet::default() });
    }
}
