//! The interface between a connection and the engine: requests and outcomes.
//!
//! An [`IoRequest`] owns the data of its operation; the connection keeps only the slot. The engine returns
//! exactly one [`RequestOutcome`] for every request, through
//! [`Connection::complete`](crate::Connection::complete), also after the connection has closed. Only a
//! shutdown has several requests in one slot: a flush of each namespace.

use crate::iterator_turns::{IteratorTurn, IteratorTurns};
use octokv_base::{Buffer, DataBuffer, Key, Lba, NamespaceId};
use std::any::Any;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

pub use octokv_wire::kv::StoreMode;
pub use octokv_wire::nvm::LbaRange;

/// A validated command with all of its data, for the engine to execute.
#[derive(Debug)]
pub struct IoRequest {
    /// Identifies the command in [`Connection::complete`](crate::Connection::complete): below the queue's
    /// entries, and reused after the command's last request is completed.
    pub slot: u16,
    /// The namespace; it existed when the command was accepted.
    pub namespace: NamespaceId,
    /// The operation and its data.
    pub operation: RequestOperation,
}

/// An iterator of an engine, which the engine alone looks into. It ends when the last clone is dropped.
#[derive(Clone)]
pub struct IteratorHandle(pub Arc<dyn Any + Send + Sync>);

impl fmt::Debug for IteratorHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("IteratorHandle")
    }
}

/// An iterator for one command, whose turn it is until this is dropped.
#[derive(Debug)]
pub struct IteratorCall {
    handle: IteratorHandle,
    _turn: IteratorTurn,
}

impl IteratorCall {
    /// REQUIRES: the turn is one of this iterator and has come.
    pub(crate) fn new(handle: IteratorHandle, turn: IteratorTurn) -> IteratorCall {
        IteratorCall { handle, _turn: turn }
    }
}

impl Deref for IteratorCall {
    type Target = IteratorHandle;

    fn deref(&self) -> &IteratorHandle {
        &self.handle
    }
}

impl From<IteratorHandle> for IteratorCall {
    /// A call in no order with others: for tests of backends.
    fn from(handle: IteratorHandle) -> IteratorCall {
        IteratorCall::new(handle, Arc::<IteratorTurns>::default().take())
    }
}

/// What a new iterator yields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IteratorRequest {
    /// The lowest key; empty for no bound.
    pub lower: Key,
    /// The key below which all keys are, not below `lower`; empty for no bound.
    pub upper: Key,
    /// Whether the highest key comes first.
    pub reverse: bool,
    /// Whether values are left out.
    pub keys_only: bool,
}

/// An operation on a namespace. Keys are never empty, except the start of a List and the bounds of an iterator.
#[derive(Debug)]
pub enum RequestOperation {
    /// Writes a value.
    Store {
        /// The key: 1 byte to the namespace's `key_bytes_max`.
        key: Key,
        /// Whether the key may, must or must not exist.
        mode: StoreMode,
        /// Holds the value from [`RecordLayout::value_offset`](octokv_base::RecordLayout::value_offset) on.
        record: Buffer,
        /// Length of the value in bytes.
        value_bytes: u32,
    },
    /// Reads a value.
    Retrieve {
        /// The key to look up.
        key: Key,
        /// Length of the host's buffer in bytes; the outcome reports the full length of a longer value.
        limit_bytes: u32,
    },
    /// Removes a key and its value.
    Delete {
        /// The key to remove.
        key: Key,
    },
    /// Tests whether a key exists.
    Exist {
        /// The key to look up.
        key: Key,
    },
    /// Lists keys from `start` (inclusive), or from the first one if `start` is empty.
    List {
        /// The first key in the listing's order; it need not exist.
        start: Key,
        /// The longest list in bytes, its header included.
        limit_bytes: u32,
        /// Whether to list keys of more than 16 bytes, which only the vendor command can represent.
        long_keys: bool,
    },
    /// Creates an iterator over what the namespace has now.
    CreateIterator(Box<IteratorRequest>),
    /// Reads the next pairs of an iterator. No other request of that iterator exists meanwhile.
    NextPairs {
        /// The iterator.
        iterator: IteratorCall,
        /// The longest list of pairs in bytes, its header included.
        limit_bytes: u32,
        /// The most pairs, at least 1.
        pairs_max: u32,
    },
    /// Moves an iterator to the first key from `key` on, in its direction. No other request of that iterator exists meanwhile.
    SeekIterator {
        /// The iterator.
        iterator: IteratorCall,
        /// The key; it need not exist.
        key: Key,
    },
    /// Makes all acknowledged writes durable; for both command sets.
    Flush,
    /// Reads blocks. For this and the operations below the target has checked that the blocks exist.
    Read {
        /// The blocks to read.
        range: LbaRange,
    },
    /// Writes blocks.
    Write {
        /// The first block.
        lba: Lba,
        /// The blocks' contents; its length is a multiple of the block size.
        data: Buffer,
        /// Complete only after the blocks are durable.
        force_unit_access: bool,
    },
    /// Compares blocks with data.
    Compare {
        /// The first block.
        lba: Lba,
        /// The expected contents; its length is a multiple of the block size.
        data: Buffer,
    },
    /// Makes blocks read as zeros.
    WriteZeroes {
        /// The blocks to zero.
        range: LbaRange,
        /// Complete only after the zeros are durable.
        force_unit_access: bool,
        /// Whether the blocks' space may be freed.
        deallocate: bool,
    },
    /// Deallocates blocks: their space may be freed, and they may then read as zeros.
    Deallocate {
        /// The blocks to deallocate; no range is empty.
        ranges: Vec<LbaRange>,
    },
    /// Checks that blocks are readable.
    Verify {
        /// The blocks to check.
        range: LbaRange,
    },
}

impl RequestOperation {
    /// The key of an operation on one key.
    pub fn key(&self) -> Option<&Key> {
        match self {
            RequestOperation::Store { key, .. }
            | RequestOperation::Retrieve { key, .. }
            | RequestOperation::Delete { key }
            | RequestOperation::Exist { key } => Some(key),
            RequestOperation::List { .. }
            | RequestOperation::CreateIterator(_)
            | RequestOperation::NextPairs { .. }
            | RequestOperation::SeekIterator { .. }
            | RequestOperation::Flush
            | RequestOperation::Read { .. }
            | RequestOperation::Write { .. }
            | RequestOperation::Compare { .. }
            | RequestOperation::WriteZeroes { .. }
            | RequestOperation::Deallocate { .. }
            | RequestOperation::Verify { .. } => None,
        }
    }
}

/// The outcome of a request.
#[derive(Debug)]
pub enum RequestOutcome {
    /// The value is stored, with the durability that is configured.
    Stored,
    /// The value, at `offset` of `buffer`; at least `min(bytes, limit)` bytes of it.
    Value {
        /// Holds the value; released after its last byte was sent.
        buffer: DataBuffer,
        /// Offset of the value in the buffer.
        offset: usize,
        /// The value's full length in bytes, which may exceed the host's buffer.
        bytes: usize,
    },
    /// The key is removed.
    Deleted,
    /// The key exists.
    Exists {
        /// Length of its value in bytes.
        value_bytes: u32,
    },
    /// The listed keys in the layout of the List command, at the start of `buffer`.
    Listing {
        /// Holds the list; released after its last byte was sent.
        buffer: Buffer,
        /// Length of the list in bytes.
        bytes: usize,
    },
    /// The iterator, at its first pair.
    IteratorCreated(IteratorHandle),
    /// The namespace has as many iterators as it may have.
    TooManyIterators,
    /// The next pairs of an iterator in the layout of the Next command, at the start of `buffer`.
    Pairs {
        /// Holds the pairs; released after the last byte was sent.
        buffer: Buffer,
        /// Length of the list in bytes.
        bytes: usize,
        /// The number of pairs.
        count: u32,
        /// Whether none follows.
        is_end: bool,
    },
    /// The next pair is longer than the host's buffer, and the iterator stays before it.
    PairTooLarge {
        /// The length of a buffer with room for it, in bytes.
        buffer_bytes: u32,
    },
    /// The iterator was moved.
    Sought,
    /// The iterator was not used for so long that it has ended.
    IteratorExpired,
    /// All acknowledged writes are durable.
    Flushed,
    /// The blocks of a Read, at the start of `buffer`.
    Blocks {
        /// Holds the blocks; released after its last byte was sent.
        buffer: Buffer,
    },
    /// The blocks are written, zeroed or deallocated, durably if the request forced unit access.
    Written,
    /// The blocks equal the compared data, or are readable.
    Verified,
    /// The blocks differ from the compared data.
    Mismatch,
    /// The blocks could not be written.
    WriteFault,
    /// The key does not exist.
    NotFound,
    /// The key exists, and the mode is add-only.
    AlreadyExists,
    /// No space is left.
    CapacityExceeded,
    /// The value is longer than the engine supports.
    InvalidValueSize,
    /// The key is longer than the engine supports.
    InvalidKeySize,
    /// The media failed, or a checksum does not match.
    Unrecovered,
    /// One of several devices, which has the key or is needed for all of them, is not available.
    DeviceUnavailable,
    /// The namespace is not open: not yet, or not any more.
    NotReady,
    /// The engine is overloaded; the host may retry.
    Busy,
}
