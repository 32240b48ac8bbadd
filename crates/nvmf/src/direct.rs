//! What a connection needs to complete commands at once, without a slot, a request and a task: run to completion.
//!
//! In: keys and blocks of the commands in a group, then each operation. Out: its outcome, or `None` if the command has to
//! take the long way: [`IoRequest`](crate::IoRequest) and [`Connection::complete`](crate::Connection::complete). Both
//! ways parse, check, count and answer commands by the same functions. `connection::direct_path` has the order of calls.

use crate::io_request::{LbaRange, RequestOutcome, StoreMode};
use octokv_base::{DataRef, NamespaceId, Received};

/// The next step of the lookups of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectStage {
    /// Index entries are prefetched.
    Entries,
    /// Indexes are read, and records prefetched.
    Records,
}

/// A change or a test of a key whose outcome has no data.
#[derive(Clone, Copy, Debug)]
pub enum DirectOperation<'a> {
    /// Writes a value.
    Store {
        /// Whether the key may, must or must not exist.
        mode: StoreMode,
        /// The value.
        value: &'a [u8],
    },
    /// Removes the key.
    Delete,
    /// Tests whether the key exists.
    Exist,
}

/// Executes commands at once. Keys have 1 to [`KEY_BYTES_MAX`](octokv_base::KEY_BYTES_MAX) bytes.
///
/// A read calls `receive` at most once with the data, which nothing changes meanwhile. What it asks for ([`Received::Lent`]) is the
/// next loan of the connection, whose bytes the backend holds until they are sent.
///
/// `None` from any operation means that nothing has changed and the command takes the long way.
pub trait DirectBackend {
    /// The lookup of one key.
    type Lookup;

    /// Whether commands may be executed at once now: nothing has to schedule them.
    fn is_open(&self) -> bool;
    /// Chooses the namespace of the commands that follow. False if none of them may be executed at once.
    fn select(&mut self, namespace: NamespaceId) -> bool;
    /// Begins the lookup of a key; `None` if commands on keys of this namespace take the long way.
    fn begin_lookup(&mut self, key: &[u8]) -> Option<Self::Lookup>;
    /// Advances the lookups of a group.
    fn advance_lookups(&mut self, lookups: &mut [Self::Lookup], stage: DirectStage);
    /// Prefetches blocks. False if reads of this namespace take the long way.
    fn prefetch_blocks(&mut self, range: LbaRange) -> bool;
    /// The operations that follow, up to `end_execution`, are those of one group.
    fn begin_execution(&mut self);
    /// Calls `receive` with a key's value. False if the key does not exist.
    fn retrieve(
        &mut self,
        key: &[u8],
        lookup: &Self::Lookup,
        receive: impl FnMut(DataRef<'_>) -> Received,
    ) -> Option<bool>;
    /// Executes an operation on a key.
    fn execute(
        &mut self,
        key: &[u8],
        lookup: &Self::Lookup,
        operation: DirectOperation<'_>,
    ) -> Option<RequestOutcome>;
    /// Calls `receive` with blocks, which exist.
    fn read_blocks(&mut self, range: LbaRange, receive: impl FnMut(DataRef<'_>) -> Received) -> Option<()>;
    /// `commands` commands of the group were completed, with `bytes` bytes of data to or from the host.
    fn end_execution(&mut self, commands: usize, bytes: u64);
}

/// Every command takes the long way.
#[derive(Clone, Copy, Debug, Default)]
pub struct LongWay;

impl DirectBackend for LongWay {
    type Lookup = ();

    fn is_open(&self) -> bool {
        false
    }
    fn select(&mut self, _: NamespaceId) -> bool {
        false
    }
    fn begin_lookup(&mut self, _: &[u8]) -> Option<()> {
        None
    }
    fn advance_lookups(&mut self, _: &mut [()], _: DirectStage) {}
    fn prefetch_blocks(&mut self, _: LbaRange) -> bool {
        false
    }
    fn begin_execution(&mut self) {}
    fn retrieve(&mut self, _: &[u8], (): &(), _: impl FnMut(DataRef<'_>) -> Received) -> Option<bool> {
        None
    }
    fn execute(&mut self, _: &[u8], (): &(), _: DirectOperation<'_>) -> Option<RequestOutcome> {
        None
    }
    fn read_blocks(&mut self, _: LbaRange, _: impl FnMut(DataRef<'_>) -> Received) -> Option<()> {
        None
    }
    fn end_execution(&mut self, _: usize, _: u64) {}
}
