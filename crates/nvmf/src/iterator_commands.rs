//! Commands over iterators: translates SQEs and their data to requests, and outcomes to completions.
//!
//! In: a checked [`IteratorCommand`], its data, and the iterators of the controller. Out: a [`CommandPlan`], then a
//! [`RequestOperation`]; at the end a status, DW0 and DW1.

use crate::command_plan::{
    CommandAction, CommandPlan, CommandResult, InFlight, PayloadLayout, PendingCommand,
    PendingIteratorCommand,
};
use crate::controller::Controller;
use crate::io_request::{IteratorCall, IteratorHandle, IteratorRequest, RequestOperation, RequestOutcome};
use crate::iterator_turns::IteratorTurn;
use crate::kv_commands;
use octokv_base::{Key, NamespaceId, Nanos};
use octokv_wire::iterator::{IteratorBounds, IteratorCommand};
use octokv_wire::{SglKind, Status};

/// The next step of a command of a host whose controller this is; `None` if it has to wait until others on its iterator have
/// ended. Its turn is then kept in `waiting`, for the next call with the same command.
///
/// # Errors
/// [`Status::UNKNOWN_ITERATOR`], [`Status::TOO_MANY_ITERATORS`].
pub(crate) fn plan(
    (command, sgl): (IteratorCommand, SglKind),
    controller: &Controller,
    iterators_max: usize,
    (namespace, namespace_serial): (NamespaceId, u64),
    now: Nanos,
    waiting: &mut Option<IteratorTurn>,
) -> Result<Option<CommandPlan>, Status> {
    let unknown = || Status::UNKNOWN_ITERATOR.do_not_retry();
    let receive = |pending| CommandPlan::ReceiveData {
        pending: PendingCommand::Iterator(pending),
        layout: PayloadLayout::PLAIN,
        bytes: u32::from(command.host_data_bytes()),
    };
    match command {
        IteratorCommand::Create { reverse, keys_only, .. } => {
            // Those that are being created are counted when they are there.
            if controller.lock_iterators().len() >= iterators_max {
                return Err(Status::TOO_MANY_ITERATORS);
            }
            Ok(Some(receive(PendingIteratorCommand::Create { reverse, keys_only, namespace_serial })))
        }
        IteratorCommand::Seek { iterator, .. } if matches!(sgl, SglKind::Transport { .. }) => {
            let found = controller.lock_iterators().find(iterator, namespace, now);
            let (handle, turns) = found.ok_or_else(unknown)?;
            Ok(Some(receive(PendingIteratorCommand::Seek { handle, turns, turn: None })))
        }
        IteratorCommand::Seek { iterator, .. } | IteratorCommand::Next { iterator, .. } => {
            let mut iterators = controller.lock_iterators();
            let (handle, turns) = iterators.find(iterator, namespace, now).ok_or_else(unknown)?;
            drop(iterators);
            let turn = waiting.take().filter(|turn| turn.is_of(&turns)).unwrap_or_else(|| turns.take());
            if !turn.has_come() {
                *waiting = Some(turn);
                return Ok(None);
            }
            Ok(Some(match command {
                IteratorCommand::Next { limit_bytes, pairs_max, .. } => {
                    let iterator = IteratorCall::new(handle, turn);
                    let operation = RequestOperation::NextPairs { iterator, limit_bytes, pairs_max };
                    CommandPlan::Submit(operation, InFlight::NextPairs { limit_bytes })
                }
                _ => receive(PendingIteratorCommand::Seek { handle, turns, turn: Some(turn) }),
            }))
        }
        IteratorCommand::Destroy { iterator } => {
            let ended = controller.lock_iterators().remove(iterator, namespace);
            ended.map(|_| Some(CommandPlan::Complete(Status::SUCCESS))).ok_or_else(unknown)
        }
    }
}

/// The action for a command whose data has arrived.
pub(crate) fn build_action(pending: PendingIteratorCommand, data: &[u8]) -> CommandAction {
    // Both were checked against KEY_BYTES_MAX.
    let key = |bytes| Key::new(bytes).expect("a key of at most KEY_BYTES_MAX bytes");
    match pending {
        PendingIteratorCommand::Create { reverse, keys_only, namespace_serial } => {
            match IteratorBounds::check(data) {
                Ok(bounds) => {
                    let (lower, upper) = (key(bounds.lower), key(bounds.upper));
                    let request = Box::new(IteratorRequest { lower, upper, reverse, keys_only });
                    let in_flight = InFlight::CreateIterator { namespace_serial };
                    CommandAction::Submit(RequestOperation::CreateIterator(request), in_flight)
                }
                Err(status) => CommandAction::Complete(status),
            }
        }
        PendingIteratorCommand::Seek { handle, turns, turn } => {
            let turn = turn.unwrap_or_else(|| turns.take());
            if !turn.has_come() {
                // Its connection cannot wait: it has consumed the command.
                return CommandAction::Complete(Status::COMMAND_INTERRUPTED);
            }
            let iterator = IteratorCall::new(handle, turn);
            let operation = RequestOperation::SeekIterator { iterator, key: key(data) };
            CommandAction::Submit(operation, InFlight::SeekIterator)
        }
    }
}

/// Translates the engine's outcome to a completion. `keep` takes a new iterator on the namespace of a serial number, and gives its
/// identifier, or the status with which the command fails.
///
/// # Panics
/// If the outcome is not one of the command's operation.
pub(crate) fn command_result(
    in_flight: InFlight,
    outcome: RequestOutcome,
    keep: impl FnOnce(IteratorHandle, u64) -> Result<u32, Status>,
) -> CommandResult {
    match (in_flight, outcome) {
        (InFlight::CreateIterator { namespace_serial }, RequestOutcome::IteratorCreated(handle)) => {
            match keep(handle, namespace_serial) {
                Ok(id) => CommandResult::from_status(Status::SUCCESS, id),
                Err(status) => CommandResult::from_status(status, 0),
            }
        }
        (InFlight::CreateIterator { .. }, RequestOutcome::TooManyIterators) => {
            CommandResult::from_status(Status::TOO_MANY_ITERATORS, 0)
        }
        (InFlight::SeekIterator, RequestOutcome::Sought) => CommandResult::from_status(Status::SUCCESS, 0),
        (InFlight::NextPairs { limit_bytes }, RequestOutcome::Pairs { buffer, bytes, count, is_end }) => {
            assert!(bytes <= limit_bytes as usize, "{bytes} B of pairs for a limit of {limit_bytes} B");
            let result = CommandResult::with_data(buffer.into(), 0, bytes, count);
            CommandResult { dw1: u32::from(is_end), ..result }
        }
        (InFlight::NextPairs { .. }, RequestOutcome::PairTooLarge { buffer_bytes }) => {
            CommandResult::from_status(Status::PAIR_TOO_LARGE.do_not_retry(), buffer_bytes)
        }
        (InFlight::NextPairs { .. } | InFlight::SeekIterator, RequestOutcome::IteratorExpired) => {
            CommandResult::from_status(Status::UNKNOWN_ITERATOR.do_not_retry(), 0)
        }
        (in_flight, outcome) => CommandResult::from_status(kv_commands::error_status(in_flight, &outcome), 0),
    }
}
