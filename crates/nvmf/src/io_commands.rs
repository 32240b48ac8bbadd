//! Dispatches commands of an I/O queue to the command set of their namespace.
//!
//! In: an SQE and its namespace; later its data, then the engine's outcome. Out: an [`IoCommand`], a [`CommandPlan`], a
//! [`CommandAction`], a [`CommandResult`]. Stateless. The namespace's command set alone determines the
//! meaning of an opcode; `kv_commands` and `nvm_commands` decode it.

use crate::command_plan::{
    CheckedCommand, CommandAction, CommandContext, CommandPlan, CommandResult, InFlight, IoCommand,
    PayloadLayout, PendingCommand,
};
use crate::io_request::RequestOutcome;
use crate::namespace_info::NamespaceKind;
use crate::{iterator_commands, kv_commands, nvm_commands};
use octokv_base::{Buffer, NamespaceId};
use octokv_wire::{Sqe, Status};

/// Checks the command of an SQE.
///
/// # Errors
/// The status with which the command fails if its SQE is invalid.
#[inline]
pub(crate) fn check(sqe: &Sqe, context: &CommandContext<'_>) -> Result<CheckedCommand, Status> {
    let sgl = sqe.sgl.check()?;
    let command = match context.namespace.kind {
        NamespaceKind::KeyValue { .. } => kv_commands::check(sqe, sgl, context)?,
        NamespaceKind::Block { .. } => nvm_commands::check(sqe, sgl, context)?,
    };
    let (namespace, namespace_serial) = (context.namespace.id, context.namespace_serial);
    Ok(CheckedCommand { command, namespace, namespace_serial, sgl })
}

/// The next step of a checked command on the long way. REQUIRES: it is none over iterators, which need their controller.
#[inline]
pub(crate) fn plan(checked: &CheckedCommand) -> CommandPlan {
    match checked.command {
        IoCommand::KeyValue(command, record) => kv_commands::plan(command, record, checked.namespace),
        IoCommand::Vendor(command, record) => kv_commands::plan_vendor(command, record),
        IoCommand::Block(command) => nvm_commands::plan(command),
        IoCommand::Iterator(command) => unreachable!("{command:?} is planned with its controller"),
    }
}

impl PendingCommand {
    /// The action for a command whose data is in `buffer`, in the layout of its plan.
    pub fn into_action(self, layout: PayloadLayout, buffer: Buffer, namespace: NamespaceId) -> CommandAction {
        match self {
            PendingCommand::KeyValue(pending) => {
                kv_commands::build_action(pending, layout, buffer, namespace)
            }
            PendingCommand::Iterator(pending) => iterator_commands::build_action(pending, &buffer),
            PendingCommand::Block(pending) => nvm_commands::build_action(pending, buffer),
        }
    }

    /// The action for a command that only reads its data; see [`PendingCommand::needs_owned_buffer`].
    pub fn into_action_from(self, data: &[u8], namespace: NamespaceId) -> CommandAction {
        match self {
            PendingCommand::KeyValue(pending) => kv_commands::build_action_from(pending, data, namespace),
            PendingCommand::Iterator(pending) => iterator_commands::build_action(pending, data),
            PendingCommand::Block(pending) => nvm_commands::build_action_from(pending, data),
        }
    }
}

/// DW0 of the completion of a command whose data has `bytes` bytes at the engine: a value's length, of which the host's
/// buffer may hold less.
#[inline]
pub(crate) fn data_dw0(in_flight: InFlight, bytes: usize) -> u32 {
    match in_flight {
        InFlight::Retrieve { .. } => bytes as u32,
        _ => 0,
    }
}

/// Translates the engine's outcome to a completion. `delete_missing_is_error` is feature 20h of a
/// namespace.
///
/// # Panics
/// If the outcome is not one of the command's operation.
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
