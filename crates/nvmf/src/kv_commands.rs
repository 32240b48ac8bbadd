//! Key Value commands: translates SQEs to requests and outcomes to completions.
//!
//! In: the SQE of a command on a Key Value namespace, later its data. Out: an [`IoCommand`], a [`CommandPlan`], then a
//! [`RequestOperation`]; at the end a status and DW0. Stateless. Commands over iterators are checked here; the rest of their
//! way is in `iterator_commands`.
//!
//! Statuses are those of the Key Value Command Set 1.3. Deployed hosts round CDW10 up and leave other
//! values in reserved fields: both are accepted.

use crate::command_plan::{
    CommandAction, CommandContext, CommandPlan, CommandResult, InFlight, IoCommand, PayloadLayout,
    PendingCommand, PendingKvCommand,
};
use crate::io_request::{RequestOperation, RequestOutcome};
use crate::namespace_info::NamespaceInfo;
use octokv_base::{Buffer, Key, NamespaceId, RecordLayout};
use octokv_wire::iterator::{self, IteratorCommand};
use octokv_wire::kv::{self, KvCommand};
use octokv_wire::vendor::VendorCommand;
use octokv_wire::{SglKind, Sqe, Status};

/// Checks a command on a Key Value namespace.
///
/// # Errors
/// The status with which the command fails if its SQE is invalid or exceeds the namespace's limits.
#[inline]
pub(crate) fn check(sqe: &Sqe, sgl: SglKind, context: &CommandContext<'_>) -> Result<IoCommand, Status> {
    let (namespace, sgl_bytes) = (context.namespace, sgl.bytes());
    // A list is at most as long as a value.
    let listing_bytes_max = context.config.value_bytes_max;
    let limits = namespace.key_value_limits();
    if sqe.opcode & 0x80 != 0 {
        if limits.has_iterators && IteratorCommand::has_opcode(sqe.opcode) {
            return check_iterator(sqe, sgl_bytes, namespace).map(IoCommand::Iterator);
        }
        let command = check_vendor(sqe, namespace, listing_bytes_max)?;
        return Ok(IoCommand::Vendor(command, limits.record_layout));
    }
    let mut command = KvCommand::check(sqe)?;
    match &mut command {
        KvCommand::Retrieve { limit_bytes, .. } => *limit_bytes = (*limit_bytes).min(sgl_bytes),
        KvCommand::Store { value_bytes, .. } => check_value_bytes(*value_bytes, namespace)?,
        KvCommand::List { limit_bytes, .. } => {
            *limit_bytes = list_limit((*limit_bytes).min(sgl_bytes), listing_bytes_max)?;
        }
        KvCommand::Flush | KvCommand::Delete { .. } | KvCommand::Exist { .. } => {}
    }
    Ok(IoCommand::KeyValue(command, limits.record_layout))
}

fn check_iterator(sqe: &Sqe, sgl_bytes: u32, namespace: &NamespaceInfo) -> Result<IteratorCommand, Status> {
    let limits = namespace.key_value_limits();
    let mut command = IteratorCommand::check(sqe)?;
    match &mut command {
        IteratorCommand::Next { limit_bytes, .. } => {
            // The longest pair has room.
            let bytes_max =
                iterator::buffer_bytes_for(limits.key_bytes_max.into(), limits.value_bytes_max as usize);
            *limit_bytes = (*limit_bytes).min(sgl_bytes).min(bytes_max as u32);
            if (*limit_bytes as usize) < iterator::PAIRS_HEADER_BYTES {
                return Err(Status::INVALID_FIELD.do_not_retry());
            }
        }
        IteratorCommand::Seek { key_bytes, .. } if *key_bytes > limits.key_bytes_max => {
            return Err(Status::KV_INVALID_KEY_SIZE.do_not_retry());
        }
        IteratorCommand::Create { .. } | IteratorCommand::Seek { .. } | IteratorCommand::Destroy { .. } => {}
    }
    Ok(command)
}

fn check_vendor(
    sqe: &Sqe,
    namespace: &NamespaceInfo,
    listing_bytes_max: u32,
) -> Result<VendorCommand, Status> {
    let mut command = VendorCommand::check(sqe)?;
    if command.key_bytes() > namespace.key_value_limits().key_bytes_max.max(kv::KEY_BYTES_MAX as u16) {
        return Err(Status::KV_INVALID_KEY_SIZE.do_not_retry());
    }
    match &mut command {
        VendorCommand::Store { value_bytes, .. } => check_value_bytes(*value_bytes, namespace)?,
        VendorCommand::List { limit_bytes, .. } => {
            *limit_bytes = list_limit(*limit_bytes, listing_bytes_max)?;
        }
        VendorCommand::Retrieve { .. } | VendorCommand::Delete { .. } | VendorCommand::Exist { .. } => {}
    }
    Ok(command)
}

/// The next step of a standard command.
#[inline]
pub(crate) fn plan(command: KvCommand, record: RecordLayout, namespace: NamespaceId) -> CommandPlan {
    match command {
        KvCommand::Flush => CommandPlan::Submit(RequestOperation::Flush, InFlight::Flush),
        KvCommand::Store { key, options, value_bytes } => {
            let layout =
                PayloadLayout { value_offset: record.value_offset(key.len()) as u32, ..PayloadLayout::PLAIN };
            let pending = PendingKvCommand::Store { key: key.into(), mode: options.mode, value_bytes };
            CommandPlan::ReceiveData {
                pending: PendingCommand::KeyValue(pending),
                layout,
                bytes: value_bytes,
            }
        }
        KvCommand::Retrieve { key, limit_bytes } => CommandPlan::Submit(
            RequestOperation::Retrieve { key: key.into(), limit_bytes },
            InFlight::Retrieve { limit_bytes },
        ),
        KvCommand::Delete { key } => {
            CommandPlan::Submit(RequestOperation::Delete { key: key.into() }, InFlight::Delete { namespace })
        }
        KvCommand::Exist { key } => CommandPlan::Submit(
            RequestOperation::Exist { key: key.into() },
            InFlight::Exist { return_length: false },
        ),
        KvCommand::List { start, limit_bytes } => {
            let operation = RequestOperation::List { start: start.into(), limit_bytes, long_keys: false };
            CommandPlan::Submit(operation, InFlight::List { limit_bytes })
        }
    }
}

/// The next step of a vendor command: its key has to arrive.
pub(crate) fn plan_vendor(command: VendorCommand, record: RecordLayout) -> CommandPlan {
    let key_bytes = command.key_bytes();
    let layout = match command {
        VendorCommand::Store { .. } => PayloadLayout {
            key_bytes,
            key_offset: record.key_offset() as u16,
            value_offset: record.value_offset(usize::from(key_bytes)) as u32,
        },
        _ => PayloadLayout::PLAIN,
    };
    CommandPlan::ReceiveData {
        pending: PendingCommand::KeyValue(PendingKvCommand::Vendor { command }),
        layout,
        // Value and key are within their limits, so their sum is far below 2^32.
        bytes: command.host_data_bytes() as u32,
    }
}

fn check_value_bytes(value_bytes: u32, namespace: &NamespaceInfo) -> Result<(), Status> {
    if value_bytes > namespace.key_value_limits().value_bytes_max {
        return Err(Status::KV_INVALID_VALUE_SIZE.do_not_retry());
    }
    Ok(())
}

fn list_limit(limit_bytes: u32, transfer_bytes_max: u32) -> Result<u32, Status> {
    if limit_bytes < kv::LIST_HEADER_BYTES as u32 {
        return Err(Status::INVALID_FIELD.do_not_retry());
    }
    Ok(limit_bytes.min(transfer_bytes_max))
}

/// The action for a command whose data is in `buffer`, in the layout of its plan.
pub(crate) fn build_action(
    pending: PendingKvCommand,
    layout: PayloadLayout,
    buffer: Buffer,
    namespace: NamespaceId,
) -> CommandAction {
    match pending {
        PendingKvCommand::Store { key, mode, value_bytes } => CommandAction::Submit(
            RequestOperation::Store { key, mode, record: buffer, value_bytes },
            InFlight::Store,
        ),
        PendingKvCommand::Vendor { command: VendorCommand::Store { options, key_bytes, value_bytes } } => {
            let from = usize::from(layout.key_offset);
            let key = key_from_bytes(&buffer[from..from + usize::from(key_bytes)]);
            let operation = RequestOperation::Store { key, mode: options.mode, record: buffer, value_bytes };
            CommandAction::Submit(operation, InFlight::Store)
        }
        PendingKvCommand::Vendor { .. } => build_action_from(pending, &buffer, namespace),
    }
}

/// The action for a vendor command other than Store, whose key is `data`.
pub(crate) fn build_action_from(
    pending: PendingKvCommand,
    data: &[u8],
    namespace: NamespaceId,
) -> CommandAction {
    let PendingKvCommand::Vendor { command } = pending else { unreachable!("{pending:?} owns its buffer") };
    let key = key_from_bytes(&data[..usize::from(command.key_bytes())]);
    let (operation, in_flight) = match command {
        VendorCommand::Retrieve { limit_bytes, .. } => {
            (RequestOperation::Retrieve { key, limit_bytes }, InFlight::Retrieve { limit_bytes })
        }
        VendorCommand::List { limit_bytes, .. } => {
            let operation = RequestOperation::List { start: key, limit_bytes, long_keys: true };
            (operation, InFlight::List { limit_bytes })
        }
        VendorCommand::Delete { .. } => (RequestOperation::Delete { key }, InFlight::Delete { namespace }),
        VendorCommand::Exist { .. } => {
            (RequestOperation::Exist { key }, InFlight::Exist { return_length: true })
        }
        VendorCommand::Store { .. } => unreachable!("a Store owns its buffer"),
    };
    CommandAction::Submit(operation, in_flight)
}

fn key_from_bytes(bytes: &[u8]) -> Key {
    // `VendorCommand::check` and `check_vendor` reject longer keys.
    Key::new(bytes).expect("a key of at most KEY_BYTES_MAX bytes")
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
    match (in_flight, outcome) {
        (InFlight::Store, RequestOutcome::Stored)
        | (InFlight::Delete { .. }, RequestOutcome::Deleted)
        | (InFlight::Flush, RequestOutcome::Flushed) => CommandResult::from_status(Status::SUCCESS, 0),
        (InFlight::Retrieve { limit_bytes }, RequestOutcome::Value { buffer, offset, bytes }) => {
            let sent = bytes.min(limit_bytes as usize);
            CommandResult::with_data(buffer, offset, sent, bytes as u32)
        }
        (InFlight::List { limit_bytes }, RequestOutcome::Listing { buffer, bytes }) => {
            assert!(bytes <= limit_bytes as usize, "a list of {bytes} B for a limit of {limit_bytes} B");
            CommandResult::with_data(buffer.into(), 0, bytes, 0)
        }
        (InFlight::Exist { return_length }, RequestOutcome::Exists { value_bytes }) => {
            CommandResult::from_status(Status::SUCCESS, if return_length { value_bytes } else { 0 })
        }
        (InFlight::Delete { namespace }, RequestOutcome::NotFound) if !delete_missing_is_error(namespace) => {
            CommandResult::from_status(Status::SUCCESS, 0)
        }
        (in_flight, outcome) => CommandResult::from_status(error_status(in_flight, &outcome), 0),
    }
}

pub(crate) fn error_status(in_flight: InFlight, outcome: &RequestOutcome) -> Status {
    match outcome {
        RequestOutcome::NotFound => Status::KV_KEY_DOES_NOT_EXIST,
        RequestOutcome::AlreadyExists => Status::KV_KEY_EXISTS,
        RequestOutcome::CapacityExceeded => Status::KV_CAPACITY_EXCEEDED,
        RequestOutcome::InvalidValueSize => Status::KV_INVALID_VALUE_SIZE,
        RequestOutcome::InvalidKeySize => Status::KV_INVALID_KEY_SIZE,
        RequestOutcome::Unrecovered => Status::KV_UNRECOVERED_ERROR,
        RequestOutcome::DeviceUnavailable => Status::DEVICE_UNAVAILABLE.do_not_retry(),
        RequestOutcome::NotReady => Status::NAMESPACE_NOT_READY,
        RequestOutcome::Busy => Status::COMMAND_INTERRUPTED,
        RequestOutcome::Stored
        | RequestOutcome::Value { .. }
        | RequestOutcome::Deleted
        | RequestOutcome::Exists { .. }
        | RequestOutcome::Listing { .. }
        | RequestOutcome::IteratorCreated(_)
        | RequestOutcome::TooManyIterators
        | RequestOutcome::Pairs { .. }
        | RequestOutcome::PairTooLarge { .. }
        | RequestOutcome::Sought
        | RequestOutcome::IteratorExpired
        | RequestOutcome::Flushed
        | RequestOutcome::Blocks { .. }
        | RequestOutcome::Written
        | RequestOutcome::Verified
        | RequestOutcome::Mismatch
        | RequestOutcome::WriteFault => unreachable!("{in_flight:?} completed with {outcome:?}"),
    }
}
