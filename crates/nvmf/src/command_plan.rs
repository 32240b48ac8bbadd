//! What a command of an I/O queue needs, what the engine is asked for it, and how it is completed.

use crate::io_request::{RequestOperation, StoreMode};
use crate::namespace_info::NamespaceInfo;
use octokv_base::{Buffer, Key, Lba, NamespaceId};
use octokv_wire::fabrics::ControllerConfiguration;
use octokv_wire::vendor::VendorCommand;
use octokv_wire::{SglKind, Status};

/// What a command is looked at with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CommandContext<'a> {
    /// The namespace that it is for.
    pub namespace: &'a NamespaceInfo,
    /// What its data pointer says.
    pub sgl: SglKind,
    /// No listing is longer.
    pub listing_bytes_max: u32,
    /// MDTS: no command on blocks has more.
    pub transfer_bytes_max: u64,
    /// Whether writes may stay in a volatile cache.
    pub write_cache_enabled: bool,
}

/// What a command whose data is under way will be.
#[derive(Debug)]
pub(crate) enum PendingCommand {
    /// On keys.
    KeyValue(PendingKvCommand),
    /// On blocks.
    Block(PendingNvmCommand),
}

impl PendingCommand {
    /// Whether the engine keeps the data's buffer; others only look at the data.
    pub fn needs_owned_buffer(&self) -> bool {
        match self {
            PendingCommand::KeyValue(pending) => pending.needs_owned_buffer(),
            PendingCommand::Block(pending) => pending.needs_owned_buffer(),
        }
    }
}

/// What a command whose data is under way will be.
#[derive(Debug)]
pub(crate) enum PendingKvCommand {
    /// A Store whose key came with the entry.
    Store { key: Key, mode: StoreMode, value_bytes: u32 },
    /// A command of the extension: its key leads its data.
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

/// What a command whose data is under way will be.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PendingNvmCommand {
    /// Write.
    Write { lba: Lba, force_unit_access: bool },
    /// Compare.
    Compare { lba: Lba },
    /// Dataset Management that gives ranges back, of a namespace of so many blocks.
    Deallocate { blocks: u64 },
}

impl PendingNvmCommand {
    pub fn needs_owned_buffer(self) -> bool {
        !matches!(self, PendingNvmCommand::Deallocate { .. })
    }
}

/// What a command needs before it can be asked of the engine.
#[derive(Debug)]
pub(crate) enum CommandPlan {
    /// Nothing more.
    Submit(RequestOperation, InFlight),
    /// So many bytes of data, in a buffer laid out so.
    ReceiveData { pending: PendingCommand, layout: PayloadLayout, bytes: u32 },
    /// Nothing at all: there is nothing to do.
    Complete(Status),
}

/// What becomes of a command whose data is here.
#[derive(Debug)]
pub(crate) enum CommandAction {
    /// The engine's.
    Submit(RequestOperation, InFlight),
    /// Answered.
    Complete(Status),
}

/// Where bytes of a command's data go in its buffer: the first `split` at the place of the key behind an
/// engine's record header, the others from `value_at` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PayloadLayout {
    /// How many bytes of key lead the data.
    pub key_bytes: u32,
    /// Where the bytes behind them begin in the buffer.
    pub value_offset: u32,
}

impl PayloadLayout {
    /// For data that is taken as it is.
    pub const PLAIN: PayloadLayout = PayloadLayout { key_bytes: 0, value_offset: 0 };

    /// Where byte `position` of the data goes, and how many that follow it lie beside it.
    pub fn locate(&self, position: u32) -> (usize, usize) {
        if position < self.key_bytes {
            let at = octokv_base::key::RECORD_HEADER_BYTES + position as usize;
            (at, (self.key_bytes - position) as usize)
        } else {
            ((self.value_offset + (position - self.key_bytes)) as usize, usize::MAX)
        }
    }

    /// The buffer that `bytes` of data need.
    pub fn buffer_bytes(&self, bytes: u32) -> usize {
        self.value_offset as usize + (bytes - self.key_bytes) as usize
    }

    /// Copies `data` to where it goes, beginning with its byte `position`.
    pub fn copy(&self, buffer: &mut [u8], mut position: u32, mut data: &[u8]) {
        while !data.is_empty() {
            let (at, run) = self.locate(position);
            let (now, later) = data.split_at(run.min(data.len()));
            buffer[at..at + now.len()].copy_from_slice(now);
            position += now.len() as u32;
            data = later;
        }
    }
}

/// What a request at the engine is answered with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InFlight {
    /// Store.
    Store,
    /// Retrieve, with the host's limit.
    Retrieve { limit_bytes: u32 },
    /// Delete; the namespace's configuration rules what a missing key means.
    Delete { namespace: NamespaceId },
    /// Exist; only the extension's command tells the value's length.
    Exist { return_length: bool },
    /// List, with the host's limit.
    List { limit_bytes: u32 },
    /// Flush of a Key Value namespace.
    Flush,
    /// Anything on blocks.
    Blocks(BlockOp),
    /// The write of CC that shuts the controller down: so many flushes are out, and then, if CC is still
    /// what it was, it becomes this.
    ShutDown { flushes_left: u32, cc_before: ControllerConfiguration, cc_written: ControllerConfiguration },
}

impl InFlight {
    /// The most bytes of data that the answer brings.
    pub fn response_bytes_max(self) -> u64 {
        match self {
            InFlight::Retrieve { limit_bytes } | InFlight::List { limit_bytes } => u64::from(limit_bytes),
            InFlight::Blocks(BlockOp::Read { bytes, .. }) => u64::from(bytes),
            InFlight::Store
            | InFlight::Delete { .. }
            | InFlight::Exist { .. }
            | InFlight::Flush
            | InFlight::Blocks(_)
            | InFlight::ShutDown { .. } => 0,
        }
    }
}

/// What a request at the engine does to blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockOp {
    /// Read, so many bytes.
    Read { lba: Lba, bytes: u32 },
    /// Compare or Verify.
    Check { lba: Lba },
    /// Write, Write Zeroes or Deallocate.
    Modify { lba: Lba },
    /// Flush.
    Flush,
}

impl BlockOp {
    /// The first block that it is about.
    pub fn lba(self) -> Lba {
        match self {
            BlockOp::Read { lba, .. } | BlockOp::Check { lba } | BlockOp::Modify { lba } => lba,
            BlockOp::Flush => Lba(0),
        }
    }
}

/// A completion, and the data in front of it.
#[derive(Debug)]
pub(crate) struct CommandResult {
    pub status: Status,
    pub dw0: u32,
    /// The buffer, and where in it the data begins and ends.
    pub data: Option<(Buffer, usize, usize)>,
}

impl CommandResult {
    pub fn from_status(status: Status, dw0: u32) -> CommandResult {
        CommandResult { status, dw0, data: None }
    }

    pub fn with_data(buffer: Buffer, from: usize, bytes: usize, dw0: u32) -> CommandResult {
        let data = (bytes > 0).then_some((buffer, from, from + bytes));
        CommandResult { status: Status::SUCCESS, dw0, data }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leading_key_is_copied_behind_the_record_header() {
        let layout = PayloadLayout { key_bytes: 20, value_offset: 128 };
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
