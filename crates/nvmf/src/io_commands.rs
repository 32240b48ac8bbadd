//! What a command of an I/O queue needs and how it is answered, whichever command set it is of.
//!
//! In: an entry on a namespace; later its data, then the engine's outcome. Out: a [`CommandPlan`], an operation,
//! an [`Answer`]. Nothing is held here. The namespace's command set alone says what an opcode means: `kv`
//! and `nvm` read it.

use crate::command_slots::{InFlight, PayloadLayout};
use crate::config::{NamespaceInfo, NamespaceKind};
use crate::io_request::{RequestOperation, RequestOutcome};
use crate::{kv_commands, nvm_commands};
use octokv_base::{Buffer, NamespaceId};
use octokv_wire::{SglKind, Sqe, Status};

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
    KeyValue(kv_commands::PendingKvCommand),
    /// On blocks.
    Block(nvm_commands::PendingNvmCommand),
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

/// The plan for an entry.
#[inline]
pub(crate) fn plan(sqe: &Sqe, context: &CommandContext<'_>) -> Result<CommandPlan, Status> {
    match context.namespace.kind {
        NamespaceKind::KeyValue { .. } => kv_commands::plan(sqe, context),
        NamespaceKind::Block { block_bytes } => nvm_commands::plan(sqe, context, block_bytes),
    }
}

impl PendingCommand {
    /// Whether the engine keeps the data's buffer; others only look at the data.
    pub fn needs_owned_buffer(&self) -> bool {
        match self {
            PendingCommand::KeyValue(pending) => pending.needs_owned_buffer(),
            PendingCommand::Block(pending) => pending.needs_owned_buffer(),
        }
    }

    /// Its data is in `buffer`, laid out as the plan said.
    pub fn into_action(self, buffer: Buffer, namespace: NamespaceId) -> CommandAction {
        match self {
            PendingCommand::KeyValue(pending) => kv_commands::build_action(pending, buffer, namespace),
            PendingCommand::Block(pending) => nvm_commands::build_action(pending, buffer),
        }
    }

    /// Its data is `data`, which need not be kept.
    pub fn into_action_from(self, data: &[u8], namespace: NamespaceId) -> CommandAction {
        match self {
            PendingCommand::KeyValue(pending) => kv_commands::build_action_from(pending, data, namespace),
            PendingCommand::Block(pending) => nvm_commands::build_action_from(pending, data),
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

/// How the engine's outcome is told. `missing_fails` says whether Delete of a missing key does.
///
/// # Panics
/// When the outcome is one of another operation: only our own mistake.
#[inline]
pub(crate) fn command_result(
    in_flight: InFlight,
    outcome: RequestOutcome,
    delete_missing_is_error: impl Fn(NamespaceId) -> bool,
) -> CommandResult {
    match in_flight {
        InFlight::Blocks(op) => nvm_commands::command_result(op, outcome),
        _ => kv_commands::command_result(in_flight, outcome, delete_missing_is_error),
    }
}
