//! What a command of an I/O queue needs and how it is answered, whichever command set it is of.
//!
//! In: an entry on a namespace; later its data, then the engine's outcome. Out: a [`CommandPlan`], an operation,
//! an [`Answer`]. Nothing is held here. The namespace's command set alone says what an opcode means: `kv`
//! and `nvm` read it.

use crate::command_plan::{
    CommandAction, CommandContext, CommandPlan, CommandResult, InFlight, PendingCommand,
};
use crate::io_request::RequestOutcome;
use crate::namespace_info::NamespaceKind;
use crate::{kv_commands, nvm_commands};
use octokv_base::{Buffer, NamespaceId};
use octokv_wire::{Sqe, Status};

/// The plan for an entry.
#[inline]
pub(crate) fn plan(sqe: &Sqe, context: &CommandContext<'_>) -> Result<CommandPlan, Status> {
    match context.namespace.kind {
        NamespaceKind::KeyValue { .. } => kv_commands::plan(sqe, context),
        NamespaceKind::Block { block_bytes } => nvm_commands::plan(sqe, context, block_bytes),
    }
}

impl PendingCommand {
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
