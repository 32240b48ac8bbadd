//! Commands and answers: how a caller's command becomes a queue entry and a completion its answer.
//!
//! Keys of up to 16 bytes go by the standard commands; longer ones, and what only the extension can say
//! (a value's length without the value, long keys in a listing), by octokv's vendor commands where the
//! controller announces them. Commands on blocks are those of the NVM command set (`block`). A command that is
//! not of the namespace's command set is refused here.

use crate::block_commands;
use crate::controller_init::ControllerInfo;
use crate::error::Error;
use crate::queue_pair::CommandCompletion;
use octokv_base::{Buffer, Key, Lba, NamespaceId};
use octokv_wire::kv::{self, StoreMode, StoreOptions};
use octokv_wire::nvm::LbaRange;
use octokv_wire::{Sqe, Status, vendor};
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

    /// The entry and data of a command, for a namespace of these facts.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn new(
        command: Command<'a>,
        namespace: NamespaceId,
        info: &ControllerInfo,
    ) -> Result<EncodedCommand<'a>, Error> {
        if let Command::Flush = command {
            return Ok(encode_standard(&kv::KvCommand::Flush, CommandKind::Flush, 0, namespace));
        }
        match &info.blocks {
            Some(blocks) => block_commands::encode(command, namespace, info, blocks),
            None => EncodedCommand::for_kv_namespace(command, namespace, info),
        }
    }

    fn for_kv_namespace(
        command: Command<'a>,
        namespace: NamespaceId,
        info: &ControllerInfo,
    ) -> Result<EncodedCommand<'a>, Error> {
        match command {
            Command::Store { key, value, mode } => encode_store(key, value, mode, namespace, info),
            Command::Retrieve { key, limit_bytes } => {
                let limit_bytes = limit_bytes.min(info.read_bytes_max());
                let kind = CommandKind::Retrieve { limit_bytes };
                if needs_vendor_command(&key, info)? {
                    let command =
                        vendor::VendorCommand::Retrieve { key_bytes: key.len() as u16, limit_bytes };
                    return Ok(encode_long_key(command, key, kind, limit_bytes, namespace));
                }
                let command = kv::KvCommand::Retrieve { key, limit_bytes };
                Ok(encode_standard(&command, kind, limit_bytes, namespace))
            }
            Command::Delete { key } => {
                if needs_vendor_command(&key, info)? {
                    let command = vendor::VendorCommand::Delete { key_bytes: key.len() as u16 };
                    return Ok(encode_long_key(command, key, CommandKind::Delete, 0, namespace));
                }
                Ok(encode_standard(&kv::KvCommand::Delete { key }, CommandKind::Delete, 0, namespace))
            }
            Command::Exist { key } => {
                if needs_vendor_command(&key, info)? || info.supports_long_keys() {
                    let kind = CommandKind::Exist { returns_length: true };
                    let command = vendor::VendorCommand::Exist { key_bytes: key.len() as u16 };
                    return Ok(encode_long_key(command, key, kind, 0, namespace));
                }
                let kind = CommandKind::Exist { returns_length: false };
                Ok(encode_standard(&kv::KvCommand::Exist { key }, kind, 0, namespace))
            }
            Command::List { start, limit_bytes } => {
                let limit_bytes = limit_bytes.min(info.read_bytes_max());
                if info.supports_long_keys() {
                    let key_bytes = start.len() as u16;
                    let command = vendor::VendorCommand::List { key_bytes, limit_bytes };
                    return Ok(encode_long_key(command, start, CommandKind::List, limit_bytes, namespace));
                }
                if start.len() > kv::KEY_BYTES_MAX {
                    return Err(Error::KeyLength { have: start.len(), max: kv::KEY_BYTES_MAX });
                }
                let command = kv::KvCommand::List { start, limit_bytes };
                Ok(encode_standard(&command, CommandKind::List, limit_bytes, namespace))
            }
            Command::Flush => Ok(encode_standard(&kv::KvCommand::Flush, CommandKind::Flush, 0, namespace)),
            Command::Read { .. }
            | Command::Write { .. }
            | Command::Compare { .. }
            | Command::WriteZeroes { .. }
            | Command::Deallocate { .. }
            | Command::Verify { .. } => Err(Error::NotBlockNamespace),
        }
    }

    /// Bytes that the host sends.
    pub fn host_data_bytes(&self) -> usize {
        let key = self.key.as_ref().map_or(0, Key::len);
        key + self.value.as_ref().map_or(0, |value| value.bytes().len())
    }
}

/// Whether the key needs the extension.
fn needs_vendor_command(key: &Key, info: &ControllerInfo) -> Result<bool, Error> {
    let (have, max) = (key.len(), info.key_bytes_max());
    if have == 0 || have > max {
        return Err(Error::KeyLength { have, max });
    }
    Ok(have > info.standard_key_bytes_max())
}

fn encode_store<'a>(
    key: Key,
    value: Value<'a>,
    mode: StoreMode,
    namespace: NamespaceId,
    info: &ControllerInfo,
) -> Result<EncodedCommand<'a>, Error> {
    let (have, max) = (value.bytes().len() as u64, u64::from(info.value_bytes_max()));
    if have > max {
        return Err(Error::ValueLength { have, max });
    }
    let (value_bytes, options) = (have as u32, StoreOptions { mode, do_not_compress: false });
    let mut encoded = if needs_vendor_command(&key, info)? {
        let command = vendor::VendorCommand::Store { options, key_bytes: key.len() as u16, value_bytes };
        encode_long_key(command, key, CommandKind::Store, 0, namespace)
    } else {
        encode_standard(&kv::KvCommand::Store { key, options, value_bytes }, CommandKind::Store, 0, namespace)
    };
    encoded.value = Some(value);
    Ok(encoded)
}

fn encode_standard<'a>(
    command: &kv::KvCommand,
    kind: CommandKind,
    incoming_bytes: u32,
    to: NamespaceId,
) -> EncodedCommand<'a> {
    EncodedCommand::without_data(command.encode(0, to), kind, incoming_bytes)
}

fn encode_long_key<'a>(
    command: vendor::VendorCommand,
    key: Key,
    kind: CommandKind,
    incoming_bytes: u32,
    to: NamespaceId,
) -> EncodedCommand<'a> {
    let key = (!key.is_empty()).then_some(key);
    EncodedCommand { key, ..EncodedCommand::without_data(command.encode(0, to), kind, incoming_bytes) }
}

/// The answer of a completion and the data that came before it.
///
/// # Errors
/// What the node's status, or the lack of data, means.
pub fn decode_response(completion: CommandCompletion) -> Result<Response, Error> {
    let CommandCompletion { kind, cqe, data, digest_ok, host_buffer: host, .. } = completion;
    let (status, dw0) = (cqe.status(), cqe.dw0.get());
    if kind.is_block_command() && (is_transient(status) || (status.is_success() && !digest_ok)) {
        return Ok(Response::Retry { buffer: host.or(data.buffer) });
    }
    if !status.is_success() {
        return decode_error_status(kind, status);
    }
    if !digest_ok {
        return Err(Error::DataDigest);
    }
    Ok(match kind {
        CommandKind::Store => Response::Stored,
        CommandKind::Retrieve { limit_bytes } => {
            let (said, came) = (dw0.min(limit_bytes), data.len() as u32);
            if said != came {
                return Err(Error::DataLength { expected_bytes: said, received_bytes: came });
            }
            Response::Value { data, full_bytes: dw0 }
        }
        CommandKind::Delete => Response::Deleted,
        CommandKind::Exist { returns_length: with_length } => {
            Response::Exists { value_bytes: with_length.then_some(dw0) }
        }
        CommandKind::List => Response::Keys { list: data },
        CommandKind::Flush | CommandKind::Internal | CommandKind::AsyncEvent => Response::Flushed,
        CommandKind::Read { bytes } if data.len() as u32 != bytes => {
            return Err(Error::DataLength { expected_bytes: bytes, received_bytes: data.len() as u32 });
        }
        CommandKind::Read { .. } => Response::Blocks { data },
        CommandKind::Write | CommandKind::ZeroOrDeallocate => Response::Written { buffer: host },
        CommandKind::Compare | CommandKind::Verify => Response::Verified,
    })
}

/// Whether the same command may succeed a little later.
fn is_transient(status: Status) -> bool {
    let passing =
        [Status::NAMESPACE_NOT_READY, Status::COMMAND_INTERRUPTED, Status::TRANSIENT_TRANSPORT_ERROR];
    passing.into_iter().any(|passing| status.is(passing))
}

fn decode_error_status(kind: CommandKind, status: Status) -> Result<Response, Error> {
    let plain = Status::new(status.code_type(), status.code());
    if kind.is_block_command() {
        // The codes from 80h on mean other things than for keys.
        return match plain {
            block_commands::COMPARE_FAILURE => Ok(Response::CompareFailed),
            Status::MEDIA_UNRECOVERED_READ => Err(Error::UnrecoveredRead),
            _ => Err(Error::Status(status)),
        };
    }
    Err(match plain {
        Status::KV_KEY_DOES_NOT_EXIST => return Ok(Response::NotFound),
        Status::KV_KEY_EXISTS => return Ok(Response::AlreadyExists),
        Status::KV_CAPACITY_EXCEEDED => Error::CapacityExceeded,
        Status::NAMESPACE_NOT_READY | Status::COMMAND_INTERRUPTED => Error::Busy,
        Status::KV_UNRECOVERED_ERROR | Status::MEDIA_UNRECOVERED_READ => Error::UnrecoveredRead,
        Status::TRANSIENT_TRANSPORT_ERROR => Error::DataDigest,
        _ => Error::Status(status),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_wire::Cqe;
    use octokv_wire::vendor::VendorCapabilities;

    fn key(bytes: usize) -> Key {
        Key::new(&vec![b'k'; bytes]).unwrap()
    }

    fn facts(long: Option<u16>) -> ControllerInfo {
        let features = vendor::FEATURE_LONG_KEYS;
        let announcement =
            long.map(|key_bytes_max| VendorCapabilities { version: 1, key_bytes_max, features });
        ControllerInfo { vendor_capabilities: announcement, ..ControllerInfo::for_tests() }
    }

    #[test]
    fn the_key_chooses_the_command() {
        let opcode = |command, long| {
            EncodedCommand::new(command, NamespaceId(1), &facts(long)).map(|encoded| encoded.sqe.opcode)
        };
        let store = |key| Command::Store { key, value: Value::Slice(b"v"), mode: StoreMode::Upsert };
        assert_eq!(opcode(store(key(16)), Some(1024)), Ok(kv::opcode::STORE));
        assert_eq!(opcode(store(key(17)), Some(1024)), Ok(vendor::opcode::STORE));
        assert_eq!(opcode(store(key(17)), None), Err(Error::KeyLength { have: 17, max: 16 }));
        assert_eq!(opcode(store(key(65)), Some(64)), Err(Error::KeyLength { have: 65, max: 64 }));
        assert_eq!(opcode(store(key(0)), Some(64)), Err(Error::KeyLength { have: 0, max: 64 }));
        assert_eq!(opcode(Command::Exist { key: key(4) }, None), Ok(kv::opcode::EXIST));
        assert_eq!(opcode(Command::Exist { key: key(4) }, Some(64)), Ok(vendor::opcode::EXIST));
        let list = |start| Command::List { start, limit_bytes: 64 };
        assert_eq!(opcode(list(key(0)), None), Ok(kv::opcode::LIST));
        assert_eq!(opcode(list(key(0)), Some(64)), Ok(vendor::opcode::LIST));
    }

    #[test]
    fn a_value_beyond_the_limit_is_refused_before_it_is_sent() {
        let value = vec![0; facts(None).value_bytes_max() as usize + 1];
        let command = Command::Store { key: key(1), value: Value::Slice(&value), mode: StoreMode::Upsert };
        let error = EncodedCommand::new(command, NamespaceId(1), &facts(None)).unwrap_err();
        assert!(matches!(error, Error::ValueLength { .. }));
    }

    #[test]
    fn statuses_become_responses_or_errors() {
        let completion = |kind, cqe| CommandCompletion {
            token: 0,
            kind,
            cqe,
            data: ResponseData::default(),
            digest_ok: true,
            host_buffer: None,
        };
        let of =
            |status: Status| decode_response(completion(CommandKind::Store, Cqe::new(0, 0, status, 0, 0)));
        assert!(matches!(of(Status::SUCCESS), Ok(Response::Stored)));
        assert!(matches!(of(Status::KV_KEY_DOES_NOT_EXIST.do_not_retry()), Ok(Response::NotFound)));
        assert!(matches!(of(Status::KV_KEY_EXISTS), Ok(Response::AlreadyExists)));
        assert_eq!(of(Status::KV_CAPACITY_EXCEEDED).unwrap_err(), Error::CapacityExceeded);
        assert_eq!(of(Status::INVALID_FIELD).unwrap_err(), Error::Status(Status::INVALID_FIELD));
        let cqe = Cqe::new(0, 0, Status::SUCCESS, 10, 0);
        let short = decode_response(completion(CommandKind::Retrieve { limit_bytes: 100 }, cqe));
        assert_eq!(short.unwrap_err(), Error::DataLength { expected_bytes: 10, received_bytes: 0 });
    }
}
