//! Counters of commands, bytes and errors, per connection and summed per controller and target.
//!
//! A connection counts in plain integers ([`CounterSet`]) and adds them to [`SharedCounters`] at its ticks
//! and at its end, so commands of different cores share no cache line. Readers lag by at most one tick.

use crate::command_plan::InFlight;
use crate::io_request::RequestOperation;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counter_set {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counter values since the start of a connection, controller or target.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct CounterSet {
            $($(#[$doc])* pub $name: u64,)*
        }

        /// A [`CounterSet`] that several cores add to.
        #[derive(Debug, Default)]
        pub struct SharedCounters {
            $($name: AtomicU64,)*
        }

        impl SharedCounters {
            /// Adds `counters` to the sums and resets it to zero.
            pub fn add_and_reset(&self, counters: &mut CounterSet) {
                $(if counters.$name != 0 { self.$name.fetch_add(counters.$name, Ordering::Relaxed); })*
                *counters = CounterSet::default();
            }

            /// The sums now. Counters that change meanwhile may be inconsistent with each other.
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
    /// Read commands of the NVM command set.
    block_reads,
    /// Write commands of the NVM command set.
    block_writes,
    /// Compare and Verify commands.
    block_checks,
    /// Write Zeroes commands.
    block_zeroes,
    /// Dataset Management commands with deallocation.
    deallocations,
    /// Bytes of blocks sent to hosts, or received for Compare.
    read_bytes,
    /// Bytes of blocks received for Write.
    written_bytes,
    /// Admin and Fabrics commands.
    admin_commands,
    /// Bytes of values received for Store.
    stored_bytes,
    /// Bytes of values and lists sent to hosts.
    retrieved_bytes,
    /// Completions with "key does not exist", "key exists" or "compare failure", which are not errors.
    negative_results,
    /// Completions with any other error status.
    errors,
    /// Values and blocks that could not be read or written.
    media_errors,
    /// Data digest mismatches.
    digest_errors,
    /// Connections that ended with a C2HTermReq.
    transport_faults,
    /// Controllers that ended by a keep-alive timeout.
    keep_alive_expired,
}

impl CounterSet {
    /// Counts a Store of so many bytes.
    #[inline]
    pub(crate) fn count_store(&mut self, value_bytes: u32) {
        self.stores += 1;
        self.stored_bytes += u64::from(value_bytes);
    }

    /// Counts bytes of a command's data that were sent to the host.
    #[inline]
    pub(crate) fn count_sent_data(&mut self, in_flight: InFlight, bytes: usize) {
        let sent = match in_flight {
            InFlight::Blocks(_) => &mut self.read_bytes,
            _ => &mut self.retrieved_bytes,
        };
        *sent += bytes as u64;
    }

    /// Counts a request to the engine.
    #[inline]
    pub(crate) fn count_operation(&mut self, operation: &RequestOperation) {
        match operation {
            RequestOperation::Store { value_bytes, .. } => self.count_store(*value_bytes),
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
