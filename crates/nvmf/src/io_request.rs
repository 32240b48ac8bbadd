//! What a connection asks of the engine, and what the engine answers.
//!
//! A [`IoRequest`] owns all that its operation needs; the connection keeps only the slot. Exactly one
//! [`RequestOutcome`] comes back for every request, through [`Connection::complete`](crate::Connection::complete),
//! also when the connection has closed meanwhile. Only a host's shutdown makes several requests of one slot: a
//! flush of each namespace.

use octokv_base::{Buffer, Key, Lba, NamespaceId};

pub use octokv_wire::kv::StoreMode;
pub use octokv_wire::nvm::LbaRange;

/// One command that is checked, complete, and now the engine's.
#[derive(Debug)]
pub struct IoRequest {
    /// Names the command to [`Connection::complete`](crate::Connection::complete); below the queue's
    /// size, and free again once the command's last request is completed.
    pub slot: u32,
    /// The namespace; always one of the target's.
    pub namespace: NamespaceId,
    /// What to do.
    pub operation: RequestOperation,
}

/// What to do with a namespace. Keys are never empty, except where a listing starts.
#[derive(Debug)]
pub enum RequestOperation {
    /// Keep a value.
    Store {
        /// Its name.
        key: Key,
        /// Whether the key may, must or must not exist.
        mode: StoreMode,
        /// Holds the value at [`octokv_base::value_offset`] of the key's length, to its end.
        record: Buffer,
        /// The value's length.
        value_bytes: u32,
    },
    /// Read a value.
    Retrieve {
        /// Its name.
        key: Key,
        /// The most bytes that the host has room for; the answer's full length is told nevertheless.
        limit_bytes: u32,
    },
    /// Forget a value.
    Delete {
        /// Its name.
        key: Key,
    },
    /// Ask whether a value is there.
    Exist {
        /// Its name.
        key: Key,
    },
    /// Name keys, from `start` (inclusive) or from the first when it is empty.
    List {
        /// Where to start in the listing's order.
        start: Key,
        /// The most bytes of the listing's buffer.
        limit_bytes: u32,
        /// Whether keys of more than 16 bytes may be named: only the extension's command can carry them.
        long_keys: bool,
    },
    /// Make durable everything acknowledged before; of either command set.
    Flush,
    /// Read blocks; the target has checked that they exist, for this and the operations below.
    Read {
        /// Which.
        range: LbaRange,
    },
    /// Write blocks.
    Write {
        /// The first.
        lba: Lba,
        /// Whole blocks, from its start to its end.
        data: Buffer,
        /// Answer only when they are durable.
        force_unit_access: bool,
    },
    /// Compare blocks with data.
    Compare {
        /// The first.
        lba: Lba,
        /// Whole blocks.
        data: Buffer,
    },
    /// Make blocks read as zeros.
    WriteZeroes {
        /// Which.
        range: LbaRange,
        /// Answer only when that is durable.
        force_unit_access: bool,
        /// Their space may be given back.
        deallocate: bool,
    },
    /// Blocks that are not wanted any more: their space may be given back, and they may read as zeros.
    Deallocate {
        /// Which; none is empty.
        ranges: Vec<LbaRange>,
    },
    /// Read blocks to see whether they can be read.
    Verify {
        /// Which.
        range: LbaRange,
    },
}

/// How a request ended.
#[derive(Debug)]
pub enum RequestOutcome {
    /// Stored, under the promise of durability that is in force.
    Stored,
    /// The value, at `offset` of `buffer`; at least `min(bytes, limit)` bytes of it.
    Value {
        /// What holds it; kept until the last byte has been sent.
        buffer: Buffer,
        /// Where in the buffer it begins.
        offset: usize,
        /// Its full length, which may be more than the host's limit.
        bytes: usize,
    },
    /// Deleted.
    Deleted,
    /// It exists.
    Exists {
        /// How long its value is.
        value_bytes: u32,
    },
    /// Keys, in the layout of the List command, at the start of `buffer`.
    Listing {
        /// What holds it.
        buffer: Buffer,
        /// How many bytes of it.
        bytes: usize,
    },
    /// Everything acknowledged before is durable.
    Flushed,
    /// The blocks of a Read, whole, at the start of `buffer`.
    Blocks {
        /// What holds them.
        buffer: Buffer,
    },
    /// Written, zeroed or deallocated, as durably as was asked.
    Written,
    /// The blocks hold what they were compared with, or can be read.
    Verified,
    /// The blocks hold something else.
    Mismatch,
    /// The blocks could not be written.
    WriteFault,
    /// No value has this key.
    NotFound,
    /// A value has this key already.
    AlreadyExists,
    /// No space is left.
    CapacityExceeded,
    /// A value longer than the engine keeps.
    InvalidValueSize,
    /// A key that the engine cannot keep.
    InvalidKeySize,
    /// The media failed, or what they gave back was not what was written.
    Unrecovered,
    /// The namespace is not up (yet, or any more).
    NotReady,
    /// Too much to do; the host may try again.
    Busy,
}
