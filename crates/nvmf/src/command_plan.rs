//! The value types of an I/O command on its way to the engine and back.
//!
//! ```text
//!   SQE ──check──▶ CheckedCommand ──plan──▶ CommandPlan::Submit ─────────────────────────▶ RequestOperation, InFlight
//!                        │            │     CommandPlan::ReceiveData ─ data ─▶ CommandAction ──▶ (same), or a status
//!                        │            └───▶ CommandPlan::Complete ─▶ status
//!                        └──at once──▶ completion (connection::direct_path)
//!   InFlight, RequestOutcome ──command_result──▶ CommandResult ─▶ data, completion
//! ```
//! `io_commands` dispatches; `kv_commands` and `nvm_commands` build and interpret these values.

use crate::config::SubsystemConfig;
use crate::io_request::{IteratorHandle, RequestOperation, StoreMode};
use crate::iterator_turns::{IteratorTurn, IteratorTurns};
use crate::namespace_info::NamespaceInfo;
use octokv_base::{DataBuffer, Key, Lba, NamespaceId, RecordLayout};
use octokv_wire::fabrics::ControllerConfiguration;
use octokv_wire::iterator::IteratorCommand;
use octokv_wire::kv::KvCommand;
use octokv_wire::nvm::NvmCommand;
use octokv_wire::vendor::VendorCommand;
use octokv_wire::{SglKind, Status};
use std::sync::Arc;

/// The inputs of checking a command, besides its SQE: the same for all commands of a namespace that arrive together.
#[derive(Clone, Copy)]
pub(crate) struct CommandContext<'a> {
    pub namespace: &'a NamespaceInfo,
    /// The serial number of the namespace.
    pub namespace_serial: u64,
    /// Limits of the target.
    pub config: &'a SubsystemConfig,
    /// MDTS in bytes: the longest data of a command on blocks.
    pub transfer_bytes_max: u64,
    /// Feature 06h: writes may stay in a volatile cache.
    pub write_cache_enabled: bool,
}

/// A command of an I/O queue whose SQE was checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CheckedCommand {
    pub command: IoCommand,
    /// The namespace of the command, and its serial number when the command was checked.
    pub namespace: NamespaceId,
    pub namespace_serial: u64,
    /// The decoded SGL descriptor.
    pub sgl: SglKind,
}

/// The command in a checked SQE, within the limits of its namespace. No response is longer than the host's buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum IoCommand {
    KeyValue(KvCommand, RecordLayout),
    /// Its key, of a length within the limits, is at the start of its data.
    Vendor(VendorCommand, RecordLayout),
    Iterator(IteratorCommand),
    Block(BlockCommand),
}

/// A command on blocks of a namespace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockCommand {
    pub command: NvmCommand,
    /// Bytes of its range; 0 without one.
    pub range_bytes: u32,
    /// Blocks of the namespace.
    pub namespace_blocks: u64,
}

/// A command that waits for its data.
#[derive(Debug)]
pub(crate) enum PendingCommand {
    KeyValue(PendingKvCommand),
    Iterator(PendingIteratorCommand),
    Block(PendingNvmCommand),
}

impl PendingCommand {
    /// Whether the engine takes ownership of the data's buffer; other commands only read the data.
    pub fn needs_owned_buffer(&self) -> bool {
        match self {
            PendingCommand::KeyValue(pending) => pending.needs_owned_buffer(),
            PendingCommand::Iterator(_) => false,
            PendingCommand::Block(pending) => pending.needs_owned_buffer(),
        }
    }
}

/// A Key Value command that waits for its data.
#[derive(Debug)]
pub(crate) enum PendingKvCommand {
    /// Store; the SQE holds the key.
    Store { key: Key, mode: StoreMode, value_bytes: u32 },
    /// A vendor command; its key precedes its data.
    Vendor { command: VendorCommand },
}

impl PendingKvCommand {
    pub fn needs_owned_buffer(&self) -> bool {
        match self {
            PendingKvCommand::Store { .. } => true,
            PendingKvCommand::Vendor { command } => matches!(command, VendorCommand::Store { .. }),
        }
    }
}

/// A command over iterators that waits for its data.
#[derive(Debug)]
pub(crate) enum PendingIteratorCommand {
    /// Create; the data is the bounds.
    Create { reverse: bool, keys_only: bool, namespace_serial: u64 },
    /// Seek; the data is the key. `turn`, which has come, is `None` while the data is requested: the host may send it behind
    /// other commands on the iterator.
    Seek { handle: IteratorHandle, turns: Arc<IteratorTurns>, turn: Option<IteratorTurn> },
}

/// An NVM command that waits for its data.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PendingNvmCommand {
    Write {
        lba: Lba,
        force_unit_access: bool,
    },
    Compare {
        lba: Lba,
    },
    /// Dataset Management with deallocation, on a namespace of `blocks` blocks.
    Deallocate {
        blocks: u64,
    },
}

impl PendingNvmCommand {
    pub fn needs_owned_buffer(self) -> bool {
        !matches!(self, PendingNvmCommand::Deallocate { .. })
    }
}

/// The next step of a command on the long way, after its SQE was checked.
#[derive(Debug)]
pub(crate) enum CommandPlan {
    /// Submit it to the engine; it needs no data.
    Submit(RequestOperation, InFlight),
    /// Receive `bytes` bytes of data into a buffer of this layout.
    ReceiveData { pending: PendingCommand, layout: PayloadLayout, bytes: u32 },
    /// Complete it: there is nothing to execute.
    Complete(Status),
}

/// Where a command's data is when its capsule has been received.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CapsuleData<'a> {
    /// All of it is in the capsule, or there is none.
    Complete(&'a [u8]),
    /// The host sends it on request.
    Requested,
}

impl<'a> CapsuleData<'a> {
    /// Finds the `bytes` bytes of a command's data; `data` is what follows the SQE in its capsule.
    ///
    /// # Errors
    /// The SGL describes less data than the command has, or more than the capsule.
    #[inline]
    pub fn check(sgl: SglKind, data: &'a [u8], bytes: u32) -> Result<CapsuleData<'a>, Status> {
        Ok(match sgl {
            SglKind::InCapsule { bytes: stated_bytes } if stated_bytes as usize > data.len() => {
                return Err(Status::INVALID_SGL_LENGTH.do_not_retry());
            }
            _ if bytes > sgl.bytes() => return Err(Status::INVALID_SGL_LENGTH.do_not_retry()),
            SglKind::InCapsule { .. } => CapsuleData::Complete(&data[..bytes as usize]),
            SglKind::Transport { .. } if bytes > 0 => CapsuleData::Requested,
            SglKind::None | SglKind::Transport { .. } => CapsuleData::Complete(&[]),
        })
    }
}

/// The next step of a command after its data was received.
#[derive(Debug)]
pub(crate) enum CommandAction {
    /// Submit it to the engine.
    Submit(RequestOperation, InFlight),
    /// Complete it without the engine.
    Complete(Status),
}

/// Maps a command's data to its buffer: the first `key_bytes` go to `key_offset`, behind the engine's record header, the
/// remaining ones to `value_offset` and on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PayloadLayout {
    /// Bytes of the key at the start of the data; 0 if the SQE holds the key.
    pub key_bytes: u16,
    /// Offset of the key in the buffer.
    pub key_offset: u16,
    /// Offset in the buffer of the data behind the key.
    pub value_offset: u32,
}

impl PayloadLayout {
    /// Data without a key, at the start of the buffer.
    pub const PLAIN: PayloadLayout = PayloadLayout { key_bytes: 0, key_offset: 0, value_offset: 0 };

    /// The buffer offset of byte `position` of the data, and how many bytes from there on are contiguous.
    pub fn locate(&self, position: u32) -> (usize, usize) {
        let key_bytes = u32::from(self.key_bytes);
        if position < key_bytes {
            (usize::from(self.key_offset) + position as usize, (key_bytes - position) as usize)
        } else {
            ((self.value_offset + (position - key_bytes)) as usize, usize::MAX)
        }
    }

    /// The buffer length that `bytes` bytes of data need.
    pub fn buffer_bytes(&self, bytes: u32) -> usize {
        self.value_offset as usize + (bytes - u32::from(self.key_bytes)) as usize
    }

    /// Copies `data`, which starts at byte `position` of the command's data, to its place in the buffer.
    pub fn copy(&self, buffer: &mut [u8], mut position: u32, mut data: &[u8]) {
        while !data.is_empty() {
            let (at, run) = self.locate(position);
            let (part, rest) = data.split_at(run.min(data.len()));
            buffer[at..at + part.len()].copy_from_slice(part);
            position += part.len() as u32;
            data = rest;
        }
    }
}

/// The fields of a submitted command that its completion needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InFlight {
    Store,
    /// Retrieve, limited to the host's buffer.
    Retrieve {
        limit_bytes: u32,
    },
    /// Delete; feature 20h of the namespace decides whether a missing key is an error.
    Delete {
        namespace: NamespaceId,
    },
    /// Exist; only the vendor command returns the value's length.
    Exist {
        return_length: bool,
    },
    /// List, limited to the host's buffer.
    List {
        limit_bytes: u32,
    },
    /// Create of an iterator on the namespace of this serial number.
    CreateIterator {
        namespace_serial: u64,
    },
    /// Next, limited to the host's buffer.
    NextPairs {
        limit_bytes: u32,
    },
    SeekIterator,
    /// Flush of a Key Value namespace.
    Flush,
    /// Any command of the NVM command set.
    Blocks(BlockOp),
    /// A write of CC with a shutdown: `flushes_left` flushes are in flight; after the last one CC changes
    /// from `cc_before` to `cc_written`, unless it has changed since.
    ShutDown {
        flushes_left: u32,
        cc_before: ControllerConfiguration,
        cc_written: ControllerConfiguration,
    },
}

impl InFlight {
    /// Whether the command is one over iterators.
    #[inline]
    pub fn is_of_iterator(self) -> bool {
        matches!(self, InFlight::CreateIterator { .. } | InFlight::NextPairs { .. } | InFlight::SeekIterator)
    }

    /// The most bytes of data that the response can have.
    pub fn response_bytes_max(self) -> u64 {
        match self {
            InFlight::Retrieve { limit_bytes }
            | InFlight::List { limit_bytes }
            | InFlight::NextPairs { limit_bytes } => u64::from(limit_bytes),
            InFlight::Blocks(BlockOp::Read { bytes, .. }) => u64::from(bytes),
            InFlight::Store
            | InFlight::Delete { .. }
            | InFlight::Exist { .. }
            | InFlight::CreateIterator { .. }
            | InFlight::SeekIterator
            | InFlight::Flush
            | InFlight::Blocks(_)
            | InFlight::ShutDown { .. } => 0,
        }
    }
}

/// The effect of a submitted NVM command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockOp {
    /// Read of `bytes` bytes.
    Read {
        lba: Lba,
        bytes: u32,
    },
    /// Compare or Verify.
    Check {
        lba: Lba,
    },
    /// Write, Write Zeroes or Deallocate.
    Modify {
        lba: Lba,
    },
    Flush,
}

impl BlockOp {
    /// The first block of the command; 0 for Flush.
    pub fn lba(self) -> Lba {
        match self {
            BlockOp::Read { lba, .. } | BlockOp::Check { lba } | BlockOp::Modify { lba } => lba,
            BlockOp::Flush => Lba(0),
        }
    }
}

/// A command's completion and the data that precedes it.
#[derive(Debug)]
pub(crate) struct CommandResult {
    pub status: Status,
    pub dw0: u32,
    pub dw1: u32,
    /// The buffer with the start and end offset of the data; `None` if there is none.
    pub data: Option<(DataBuffer, usize, usize)>,
}

impl CommandResult {
    pub fn from_status(status: Status, dw0: u32) -> CommandResult {
        CommandResult { status, dw0, dw1: 0, data: None }
    }

    pub fn with_data(buffer: DataBuffer, from: usize, bytes: usize, dw0: u32) -> CommandResult {
        let data = (bytes > 0).then_some((buffer, from, from + bytes));
        CommandResult { status: Status::SUCCESS, dw0, dw1: 0, data }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leading_key_is_copied_behind_the_record_header() {
        let layout = PayloadLayout { key_bytes: 20, key_offset: 48, value_offset: 128 };
        let mut buffer = vec![0; layout.buffer_bytes(50)];
        assert_eq!(buffer.len(), 158);
        let data: Vec<u8> = (1..=50).collect();
        layout.copy(&mut buffer, 0, &data[..7]);
        layout.copy(&mut buffer, 7, &data[7..33]);
        layout.copy(&mut buffer, 33, &data[33..]);
        assert_eq!(buffer[48..68], data[..20]);
        assert_eq!(buffer[128..], data[20..]);
    }
}
