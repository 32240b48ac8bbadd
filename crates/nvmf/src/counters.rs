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
    /// Create, Next and Seek commands of iterators.
    iterator_commands,
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
    /// Bytes of values, lists and pairs sent to hosts.
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
    /// Counts bytes of a command's data that were sent to the host.
    #[inline]
    pub(crate) fn count_sent_data(&mut self, in_flight: InFlight, bytes: usize) {
        let sent = match in_flight {
            InFlight::Blocks(_) => &mut self.read_bytes,
            _ => &mut self.retrieved_bytes,
        };
        *sent += bytes as u64;
    }

    /// Counts an operation of a command that was accepted.
    #[inline(always)] // Most callers know the operation: one addition.
    pub(crate) fn count_operation(&mut self, operation: CountedOperation) {
        match operation {
            CountedOperation::Store { value_bytes } => {
                self.stores += 1;
                self.stored_bytes += u64::from(value_bytes);
            }
            CountedOperation::Retrieve => self.retrieves += 1,
            CountedOperation::Delete => self.deletes += 1,
            CountedOperation::Exist => self.exists += 1,
            CountedOperation::List => self.lists += 1,
            CountedOperation::Iterator => self.iterator_commands += 1,
            CountedOperation::Flush => self.flushes += 1,
            CountedOperation::Read => self.block_reads += 1,
            CountedOperation::Write { bytes } => {
                self.block_writes += 1;
                self.written_bytes += bytes;
            }
            CountedOperation::Compare { bytes } => {
                self.block_checks += 1;
                self.read_bytes += bytes;
            }
            CountedOperation::Verify => self.block_checks += 1,
            CountedOperation::WriteZeroes => self.block_zeroes += 1,
            CountedOperation::Deallocate => self.deallocations += 1,
        }
    }
}

/// What counts of an operation; bytes are those of its data.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CountedOperation {
    Store { value_bytes: u32 },
    Retrieve,
    Delete,
    Exist,
    List,
    Iterator,
    Flush,
    Read,
    Write { bytes: u64 },
    Compare { bytes: u64 },
    Verify,
    WriteZeroes,
    Deallocate,
}

impl From<&RequestOperation> for CountedOperation {
    #[inline]
    fn from(operation: &RequestOperation) -> CountedOperation {
        match operation {
            RequestOperation::Store { value_bytes, .. } => {
                CountedOperation::Store { value_bytes: *value_bytes }
            }
            RequestOperation::Retrieve { .. } => CountedOperation::Retrieve,
            RequestOperation::Delete { .. } => CountedOperation::Delete,
            RequestOperation::Exist { .. } => CountedOperation::Exist,
            RequestOperation::List { .. } => CountedOperation::List,
            RequestOperation::CreateIterator(_)
            | RequestOperation::NextPairs { .. }
            | RequestOperation::SeekIterator { .. } => CountedOperation::Iterator,
            RequestOperation::Flush => CountedOperation::Flush,
            RequestOperation::Read { .. } => CountedOperation::Read,
            RequestOperation::Write { data, .. } => CountedOperation::Write { bytes: data.len() as u64 },
            RequestOperation::Compare { data, .. } => CountedOperation::Compare { bytes: data.len() as u64 },
            RequestOperation::Verify { .. } => CountedOperation::Verify,
            RequestOperation::WriteZeroes { .. } => CountedOperation::WriteZeroes,
            RequestOperation::Deallocate { .. } => CountedOperation::Deallocate,
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
