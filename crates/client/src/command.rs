//! Commands and answers: how a caller's command becomes a queue entry and a completion its answer.
//!
//! Keys of up to 16 bytes go by the standard commands; longer ones, and what only the extension can say
//! (a value's length without the value, long keys in a listing), by octokv's vendor commands where the
//! controller announces them. Commands on blocks are those of the NVM command set (`block`). A command that is
//! not of the namespace's command set is refused here.

use octokv_base::{Buffer, Key, Lba};
use octokv_wire::Sqe;
use octokv_wire::kv::StoreMode;
use octokv_wire::nvm::LbaRange;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// A value to store.
#[derive(Debug)]
pub enum Value<'a> {
    /// Bytes of the caller: copied before `submit` returns.
    Slice(&'a [u8]),
    /// Shared bytes: sent from where they are.
    Shared(Arc<[u8]>),
    /// The bytes `from..to` of a buffer: sent from where they are.
    Buffer {
        /// The buffer.
        buffer: Buffer,
        /// Where the value begins.
        from: usize,
        /// Where it ends.
        to: usize,
    },
}

impl Value<'_> {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Value::Slice(bytes) => bytes,
            Value::Shared(bytes) => bytes,
            Value::Buffer { buffer, from, to } => &buffer[*from..*to],
        }
    }
}

/// One command.
#[derive(Debug)]
pub enum Command<'a> {
    /// Store a value.
    Store {
        /// Where.
        key: Key,
        /// What.
        value: Value<'a>,
        /// How.
        mode: StoreMode,
    },
    /// Read a value.
    Retrieve {
        /// Which.
        key: Key,
        /// The most bytes to read; `u32::MAX` for all that a command can carry.
        limit_bytes: u32,
    },
    /// Remove a value.
    Delete {
        /// Which.
        key: Key,
    },
    /// Ask whether there is a value, and how long it is.
    Exist {
        /// Which.
        key: Key,
    },
    /// List keys, in the namespace's order.
    List {
        /// Where to start, this key included; empty for the beginning.
        start: Key,
        /// Bytes of the list.
        limit_bytes: u32,
    },
    /// Make everything acknowledged durable; of a namespace of either kind.
    Flush,
    /// Read blocks.
    Read {
        /// Which.
        range: LbaRange,
        /// Where to put them; its length is theirs. None for a buffer of the session's pool.
        buffer: Option<Buffer>,
    },
    /// Write blocks.
    Write {
        /// The first.
        lba: Lba,
        /// Whole blocks.
        data: Value<'a>,
        /// Answer only when they are durable.
        force_unit_access: bool,
    },
    /// Compare blocks with data.
    Compare {
        /// The first.
        lba: Lba,
        /// Whole blocks.
        data: Value<'a>,
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
    /// Say that what blocks hold is not wanted any more.
    Deallocate {
        /// Which; at most 256 ranges.
        ranges: &'a [LbaRange],
    },
    /// See whether blocks can be read.
    Verify {
        /// Which.
        range: LbaRange,
    },
}

/// Bytes that came with an answer. Dropping it gives the memory back to the session's pool.
#[derive(Default)]
pub struct ResponseData {
    buffer: Option<Buffer>,
    bytes: usize,
}

impl ResponseData {
    pub(crate) fn new(buffer: Option<Buffer>, bytes: usize) -> ResponseData {
        ResponseData { buffer, bytes }
    }

    /// The buffer that they came into: the caller's, where one was given. None where no bytes came.
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
        write!(f, "Data({} B)", self.bytes)
    }
}

/// What the node answered.
#[derive(Debug)]
pub enum Response {
    /// The value is stored.
    Stored,
    /// The value, or as much of it as was asked for.
    Value {
        /// Its first bytes.
        data: ResponseData,
        /// Its full length, in bytes.
        full_bytes: u32,
    },
    /// The value is gone.
    Deleted,
    /// There is a value.
    Exists {
        /// Its length, where the node can say it.
        value_bytes: Option<u32>,
    },
    /// Keys, as [`octokv_wire::kv::UncheckedList`] reads them.
    Keys {
        /// The list.
        list: ResponseData,
    },
    /// Everything acknowledged is durable.
    Flushed,
    /// There is no such key.
    NotFound,
    /// There is a value already, and the Store was add only.
    AlreadyExists,
    /// The blocks that were read, all of them.
    Blocks {
        /// What they hold.
        data: ResponseData,
    },
    /// The blocks are written, zeroed or given up.
    Written {
        /// The buffer that they were sent from, where they were.
        buffer: Option<Buffer>,
    },
    /// The blocks can be read; or they hold what they were compared with.
    Verified,
    /// The blocks hold something else than they were compared with.
    CompareFailed,
    /// Of commands on blocks: the node was busy, or the data's digest was wrong. Nothing was done, or what
    /// came is of no use: ask again.
    Retry {
        /// What was to be written, where it came in a buffer, or what was to be read into.
        buffer: Option<Buffer>,
    },
}

/// What a command in flight is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandKind {
    /// A step of the setup, keep alive, or shutdown: the initiator's own.
    Internal,
    /// [`Command::MapStore`].
    Store,
    /// [`Command::Retrieve`] of at most so many bytes.
    Retrieve {
        /// The limit that was sent.
        limit_bytes: u32,
    },
    /// [`Command::Delete`].
    Delete,
    /// [`Command::Exist`], asked so that DW0 is the value's length, or not.
    Exist {
        /// DW0 is the length.
        returns_length: bool,
    },
    /// [`Command::List`].
    List,
    /// [`Command::Flush`].
    Flush,
    /// An event request: it has no deadline.
    AsyncEvent,
    /// [`Command::Read`] of so many bytes.
    Read {
        /// All of the blocks.
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
    /// Whether it is the initiator's own.
    pub fn is_internal(self) -> bool {
        matches!(self, CommandKind::Internal | CommandKind::AsyncEvent)
    }

    /// Whether it is a command on blocks.
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
            | CommandKind::List => false,
        }
    }

    /// Whether carrying it out twice, or not knowing whether it was, harms nobody.
    pub fn is_retryable(self) -> bool {
        match self {
            CommandKind::Retrieve { .. }
            | CommandKind::Exist { .. }
            | CommandKind::List
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

/// A command ready for a queue: its entry without identifier and data pointer, and its data.
#[derive(Debug)]
pub struct EncodedCommand<'a> {
    /// The entry.
    pub sqe: Sqe,
    /// What it is for.
    pub kind: CommandKind,
    /// A key that is the first part of the data.
    pub key: Option<Key>,
    /// The value, or other data, behind the key.
    pub value: Option<Value<'a>>,
    /// The most data that may come back, in bytes.
    pub response_bytes_max: u32,
    /// Where to put it, if not into a buffer of the pool.
    pub read_buffer: Option<Buffer>,
}

impl<'a> EncodedCommand<'a> {
    /// A command without data of the host's, of the initiator itself.
    pub fn internal(sqe: Sqe, incoming_bytes: u32) -> EncodedCommand<'a> {
        EncodedCommand::without_data(sqe, CommandKind::Internal, incoming_bytes)
    }

    /// A command without data of the host's.
    pub fn without_data(sqe: Sqe, kind: CommandKind, incoming_bytes: u32) -> EncodedCommand<'a> {
        EncodedCommand {
            sqe,
            kind,
            key: None,
            value: None,
            response_bytes_max: incoming_bytes,
            read_buffer: None,
        }
    }

    /// Bytes that the host sends.
    pub fn host_data_bytes(&self) -> usize {
        let key = self.key.as_ref().map_or(0, Key::len);
        key + self.value.as_ref().map_or(0, |value| value.bytes().len())
    }
}
