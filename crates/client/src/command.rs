//! Commands, responses, and commands encoded for a queue.
//!
//! A caller's [`Command`] becomes an [`EncodedCommand`] (`encode`), a queue entry and its data, and its completion a
//! [`Response`] ([`crate::completion`]). A command that is not of the namespace's command set fails before it is sent.

use crate::controller_info::ControllerInfo;
use crate::error::Error;
use octokv_base::{Buffer, Key, Lba};
use octokv_wire::Sqe;
use octokv_wire::iterator;
use octokv_wire::kv::StoreMode;
use octokv_wire::nvm::LbaRange;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// A value to store.
#[derive(Debug)]
pub enum Value<'a> {
    /// Borrowed bytes: copied before `submit` returns.
    Slice(&'a [u8]),
    /// Shared bytes: sent without a copy.
    Shared(Arc<[u8]>),
    /// The bytes `from..to` of a buffer: sent without a copy.
    Buffer {
        /// Buffer that contains the value.
        buffer: Buffer,
        /// Start of the value, in bytes.
        from: usize,
        /// End of the value, in bytes.
        to: usize,
    },
}

impl Value<'_> {
    /// The bytes of the value.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Value::Slice(bytes) => bytes,
            Value::Shared(bytes) => bytes,
            Value::Buffer { buffer, from, to } => &buffer[*from..*to],
        }
    }
}

/// An iterator of the node. It ends with the connection on which it was created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteIterator {
    /// Its identifier at the controller.
    pub(crate) id: u32,
    /// The connection epoch of its creation: later, the identifier may be another iterator's.
    pub(crate) connection_epoch: u64,
}

/// One command of a caller.
#[derive(Debug)]
pub enum Command<'a> {
    /// Stores a value.
    Store {
        /// Key of the value.
        key: Key,
        /// Value to store.
        value: Value<'a>,
        /// Condition on the presence of the key.
        mode: StoreMode,
    },
    /// Reads a value.
    Retrieve {
        /// Key of the value.
        key: Key,
        /// Maximum bytes to read; `u32::MAX` for the maximum of a command.
        limit_bytes: u32,
    },
    /// Deletes a key.
    Delete {
        /// Key to delete.
        key: Key,
    },
    /// Tests whether a key exists, and reads the length of its value.
    Exist {
        /// Key to test.
        key: Key,
    },
    /// Lists keys, in the namespace's order.
    List {
        /// First key, inclusive; empty for the beginning.
        start: Key,
        /// Maximum length of the list, in bytes.
        limit_bytes: u32,
    },
    /// Creates an iterator over the namespace as it is now.
    CreateIterator {
        /// Lowest key; empty for no bound.
        lower: Key,
        /// Key below which all keys are; empty for no bound.
        upper: Key,
        /// Whether the highest key comes first.
        reverse: bool,
        /// Whether values are left out.
        keys_only: bool,
    },
    /// Reads the next pairs of an iterator.
    NextPairs {
        /// The iterator.
        iterator: RemoteIterator,
        /// Maximum length of the pairs with their headers, in bytes.
        limit_bytes: u32,
        /// Maximum number of pairs, at least 1.
        pairs_max: u32,
    },
    /// Moves an iterator to the first key from `key` on, in its direction.
    SeekIterator {
        /// The iterator.
        iterator: RemoteIterator,
        /// Key; it need not exist.
        key: Key,
    },
    /// Ends an iterator.
    DestroyIterator {
        /// The iterator.
        iterator: RemoteIterator,
    },
    /// Makes all acknowledged writes durable, in a namespace of either command set.
    Flush,
    /// Reads blocks.
    Read {
        /// Blocks to read.
        range: LbaRange,
        /// Destination, exactly as long as the blocks; `None` for a buffer of the session's pool.
        buffer: Option<Buffer>,
    },
    /// Writes blocks.
    Write {
        /// First block.
        lba: Lba,
        /// Data, whole blocks.
        data: Value<'a>,
        /// Whether the command completes only when the blocks are durable (FUA).
        force_unit_access: bool,
    },
    /// Compares blocks with data.
    Compare {
        /// First block.
        lba: Lba,
        /// Data, whole blocks.
        data: Value<'a>,
    },
    /// Sets blocks to zero.
    WriteZeroes {
        /// Blocks to zero.
        range: LbaRange,
        /// Whether the command completes only when the zeros are durable (FUA).
        force_unit_access: bool,
        /// Whether the node may deallocate the blocks.
        deallocate: bool,
    },
    /// Deallocates blocks.
    Deallocate {
        /// Ranges to deallocate, at most 256.
        ranges: &'a [LbaRange],
    },
    /// Verifies that blocks are readable, without a data transfer.
    Verify {
        /// Blocks to verify.
        range: LbaRange,
    },
}

impl Command<'_> {
    /// Checks that the command may be submitted in a connection epoch: in another one, the identifier of its iterator may be
    /// another iterator's.
    #[inline]
    pub(crate) fn check_epoch(&self, connection_epoch: u64) -> Result<(), Error> {
        match self {
            Command::NextPairs { iterator, .. }
            | Command::SeekIterator { iterator, .. }
            | Command::DestroyIterator { iterator }
                if iterator.connection_epoch != connection_epoch =>
            {
                Err(Error::UnknownIterator)
            }
            _ => Ok(()),
        }
    }

    /// Upper bound of the buffer memory that the command occupies while in flight, in bytes: its data, or the longest
    /// data of its response.
    pub(crate) fn buffer_bytes(&self, info: &ControllerInfo) -> usize {
        let of_value_max = |limit_bytes: u32| limit_bytes.min(info.value_bytes_max()) as usize;
        match self {
            Command::Store { key, value, .. } => key.len() + value.bytes().len(),
            Command::Retrieve { limit_bytes, .. } | Command::List { limit_bytes, .. } => {
                of_value_max(*limit_bytes)
            }
            Command::NextPairs { limit_bytes, .. } => (*limit_bytes).min(info.pairs_bytes_max()) as usize,
            Command::CreateIterator { lower, upper, .. } => {
                iterator::BOUNDS_HEADER_BYTES + lower.len() + upper.len()
            }
            Command::Write { data, .. } | Command::Compare { data, .. } => data.bytes().len(),
            Command::Read { range, .. } => {
                info.blocks.map_or(0, |blocks| blocks.block_bytes as usize * range.blocks as usize)
            }
            Command::Deallocate { ranges } => std::mem::size_of_val(*ranges),
            Command::Delete { key } | Command::Exist { key } | Command::SeekIterator { key, .. } => key.len(),
            Command::DestroyIterator { .. }
            | Command::Flush
            | Command::WriteZeroes { .. }
            | Command::Verify { .. } => 0,
        }
    }
}

/// Data of a response. Dropping it returns the memory to the session's pool.
#[derive(Default)]
pub struct ResponseData {
    buffer: Option<Buffer>,
    bytes: usize,
}

impl ResponseData {
    pub(crate) fn new(buffer: Option<Buffer>, bytes: usize) -> ResponseData {
        ResponseData { buffer, bytes }
    }

    /// The buffer that holds the data: the caller's, if the command had one. `None` if no data was received.
    pub fn into_buffer(self) -> Option<Buffer> {
        let mut buffer = self.buffer?;
        buffer.set_len(self.bytes);
        Some(buffer)
    }

    /// The buffer at its full length, whatever part of it holds received data.
    pub(crate) fn into_raw_buffer(self) -> Option<Buffer> {
        self.buffer
    }
}

impl Deref for ResponseData {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.buffer.as_ref().map_or(&[], |buffer| &buffer[..self.bytes])
    }
}

impl fmt::Debug for ResponseData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ResponseData({} B)", self.bytes)
    }
}

/// Result of a command that the node executed.
#[derive(Debug)]
pub enum Response {
    /// The value is stored.
    Stored,
    /// The value, or its first bytes up to the command's limit.
    Value {
        /// First bytes of the value.
        data: ResponseData,
        /// Full length of the value, in bytes.
        full_bytes: u32,
    },
    /// The key was deleted.
    Deleted,
    /// The key exists.
    Exists {
        /// Length of the value, in bytes; `None` if the node does not support the vendor command that returns
        /// it.
        value_bytes: Option<u32>,
    },
    /// A key list, to be read with [`octokv_wire::kv::UncheckedKeyList`].
    Keys {
        /// The list.
        list: ResponseData,
    },
    /// The iterator is created.
    IteratorCreated(RemoteIterator),
    /// Pairs of an iterator, to be read with [`octokv_wire::iterator::PairList`].
    Pairs {
        /// The pairs.
        pairs: ResponseData,
    },
    /// The iterator is moved, or ended.
    IteratorChanged,
    /// All acknowledged writes are durable.
    Flushed,
    /// The key does not exist.
    NotFound,
    /// The key exists and the Store was add only.
    AlreadyExists,
    /// All blocks that were read.
    Blocks {
        /// Content of the blocks.
        data: ResponseData,
    },
    /// The blocks are written, zeroed or deallocated.
    Written {
        /// The buffer of the written data, if the command had one and it is sent completely.
        buffer: Option<Buffer>,
    },
    /// The blocks are readable, or equal the compared data.
    Verified,
    /// The blocks differ from the compared data.
    CompareFailed,
    /// For block commands: the node was busy, or the data digest did not match. Nothing changed, or the
    /// received data is unusable: a retry may succeed.
    Retry {
        /// The buffer to write from or read into, if the command had one.
        buffer: Option<Buffer>,
    },
}

/// Purpose of a command in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandKind {
    /// Command of the initiator itself: initialization, keep alive or shutdown.
    Internal,
    /// [`Command::Store`].
    Store,
    /// [`Command::Retrieve`].
    Retrieve {
        /// Limit as sent, in bytes.
        limit_bytes: u32,
    },
    /// [`Command::Delete`].
    Delete,
    /// [`Command::Exist`].
    Exist {
        /// Whether DW0 of the completion is the length of the value.
        returns_length: bool,
    },
    /// [`Command::List`].
    List,
    /// [`Command::CreateIterator`].
    CreateIterator,
    /// [`Command::NextPairs`].
    NextPairs,
    /// [`Command::SeekIterator`] or [`Command::DestroyIterator`].
    ChangeIterator,
    /// [`Command::Flush`].
    Flush,
    /// Asynchronous Event Request. It has no deadline.
    AsyncEvent,
    /// [`Command::Read`].
    Read {
        /// Length of all blocks, in bytes.
        bytes: u32,
    },
    /// [`Command::Write`].
    Write,
    /// [`Command::Compare`].
    Compare,
    /// [`Command::WriteZeroes`] or [`Command::Deallocate`].
    ZeroOrDeallocate,
    /// [`Command::Verify`].
    Verify,
}

impl CommandKind {
    /// Whether the initiator issued the command itself.
    pub fn is_internal(self) -> bool {
        matches!(self, CommandKind::Internal | CommandKind::AsyncEvent)
    }

    /// Whether it is a block command.
    pub fn is_block_command(self) -> bool {
        match self {
            CommandKind::Read { .. }
            | CommandKind::Write
            | CommandKind::Compare
            | CommandKind::ZeroOrDeallocate
            | CommandKind::Verify => true,
            CommandKind::Internal | CommandKind::AsyncEvent | CommandKind::Flush => false,
            CommandKind::Store
            | CommandKind::Retrieve { .. }
            | CommandKind::Delete
            | CommandKind::Exist { .. }
            | CommandKind::List
            | CommandKind::CreateIterator
            | CommandKind::NextPairs
            | CommandKind::ChangeIterator => false,
        }
    }

    /// Whether executing it twice is safe: it changes nothing, or only what ends with the connection.
    pub fn is_retryable(self) -> bool {
        match self {
            CommandKind::Retrieve { .. }
            | CommandKind::Exist { .. }
            | CommandKind::List
            | CommandKind::CreateIterator
            | CommandKind::NextPairs
            | CommandKind::ChangeIterator
            | CommandKind::Flush => true,
            CommandKind::Read { .. } | CommandKind::Compare | CommandKind::Verify => true,
            CommandKind::Store
            | CommandKind::Delete
            | CommandKind::Write
            | CommandKind::ZeroOrDeallocate
            | CommandKind::Internal
            | CommandKind::AsyncEvent => false,
        }
    }
}

/// A command encoded for a queue: its entry without command identifier and data pointer, and its data.
#[derive(Debug)]
pub struct EncodedCommand<'a> {
    /// Submission queue entry.
    pub sqe: Sqe,
    /// Purpose of the command.
    pub kind: CommandKind,
    /// Key at the start of the data.
    pub key: Option<Key>,
    /// Value, or other data, after the key.
    pub value: Option<Value<'a>>,
    /// Maximum data of the response, in bytes.
    pub response_bytes_max: u32,
    /// Destination of the response data; `None` for a buffer of the pool.
    pub read_buffer: Option<Buffer>,
}

impl<'a> EncodedCommand<'a> {
    /// A command of the initiator itself, without host data.
    pub fn internal(sqe: Sqe, response_bytes_max: u32) -> EncodedCommand<'a> {
        EncodedCommand::without_data(sqe, CommandKind::Internal, response_bytes_max)
    }

    /// A command without host data.
    pub fn without_data(sqe: Sqe, kind: CommandKind, response_bytes_max: u32) -> EncodedCommand<'a> {
        EncodedCommand { sqe, kind, key: None, value: None, response_bytes_max, read_buffer: None }
    }

    /// Length of the data that the host sends, in bytes.
    pub fn host_data_bytes(&self) -> usize {
        let key = self.key.as_ref().map_or(0, Key::len);
        key + self.value.as_ref().map_or(0, |value| value.bytes().len())
    }
}
