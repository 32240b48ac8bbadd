//! Key Value commands: from an entry to what the engine is asked, and from its answer to a completion.
//!
//! In: the entry of a command on a Key Value namespace, later its data. Out: a [`Plan`], then an
//! [`Operation`]; at the end a status and DW0. Nothing is held here. The iterators' opcodes, which this
//! target does not have yet, are invalid.
//!
//! Statuses are those of the KV command set (1.1), table by table; hosts that round CDW10 up or leave
//! junk in reserved fields are served.

use crate::command_slots::{Landing, Running};
use crate::config::NamespaceInfo;
use crate::io_commands::{Answer, Context, Intent as AnyIntent, Launch, Plan};
use crate::io_request::{Operation, Outcome, StoreMode};
use octokv_base::{Buffer, Key, NamespaceId, key::RECORD_HEADER_BYTES, value_offset};
use octokv_wire::{Sqe, Status, kv, vendor};

/// What a command whose data is under way will be.
#[derive(Debug)]
pub(crate) enum Intent {
    /// A Store whose key came with the entry.
    Store { key: Key, mode: StoreMode, value_bytes: u32 },
    /// A command of the extension: its key leads its data.
    Long { command: vendor::Command },
}

impl Intent {
    pub fn keeps_data(&self) -> bool {
        match self {
            Intent::Store { .. } => true,
            Intent::Long { command } => matches!(command, vendor::Command::Store { .. }),
        }
    }
}

/// The plan for an entry on a Key Value namespace.
#[inline]
pub(crate) fn plan(sqe: &Sqe, context: &Context<'_>) -> Result<Plan, Status> {
    let (namespace, sgl_bytes) = (context.namespace, context.sgl.bytes());
    let listing_max = context.listing_bytes_max;
    if sqe.opcode & 0x80 != 0 {
        return plan_long(sqe, namespace, listing_max);
    }
    Ok(match kv::Command::check(sqe)? {
        kv::Command::Flush => Plan::Launch(Operation::Flush, Running::Flush),
        kv::Command::Store { key, options, value_bytes } => {
            check_value_bytes(value_bytes, namespace)?;
            let landing = Landing { split: 0, value_at: value_offset(key.len()) as u32 };
            let intent = Intent::Store { key, mode: options.mode, value_bytes };
            Plan::Data { intent: AnyIntent::KeyValue(intent), landing, bytes: value_bytes }
        }
        kv::Command::Retrieve { key, limit_bytes } => {
            let limit_bytes = limit_bytes.min(sgl_bytes);
            Plan::Launch(Operation::Retrieve { key, limit_bytes }, Running::Retrieve { limit_bytes })
        }
        kv::Command::Delete { key } => {
            Plan::Launch(Operation::Delete { key }, Running::Delete { namespace: namespace.id })
        }
        kv::Command::Exist { key } => {
            Plan::Launch(Operation::Exist { key }, Running::Exist { tell_length: false })
        }
        kv::Command::List { start, limit_bytes } => {
            let limit_bytes = list_limit(limit_bytes.min(sgl_bytes), listing_max)?;
            let operation = Operation::List { start, limit_bytes, long_keys: false };
            Plan::Launch(operation, Running::List { limit_bytes })
        }
    })
}

fn plan_long(sqe: &Sqe, namespace: &NamespaceInfo, transfer_max: u32) -> Result<Plan, Status> {
    let mut command = vendor::Command::check(sqe)?;
    let key_bytes = command.key_bytes();
    if key_bytes > namespace.key_value_limits().1.max(kv::KEY_BYTES_MAX as u16) {
        return Err(Status::KV_INVALID_KEY_SIZE.do_not_retry());
    }
    let mut landing = Landing::PLAIN;
    match &mut command {
        vendor::Command::Store { value_bytes, .. } => {
            check_value_bytes(*value_bytes, namespace)?;
            let value_at = value_offset(usize::from(key_bytes)) as u32;
            landing = Landing { split: u32::from(key_bytes), value_at };
        }
        vendor::Command::List { limit_bytes, .. } => {
            *limit_bytes = list_limit(*limit_bytes, transfer_max)?;
        }
        vendor::Command::Retrieve { .. } | vendor::Command::Delete { .. } | vendor::Command::Exist { .. } => {
        }
    }
    // A value's and a key's bounds were checked: their sum is far below 2^32.
    let bytes = command.host_data_bytes() as u32;
    Ok(Plan::Data { intent: AnyIntent::KeyValue(Intent::Long { command }), landing, bytes })
}

fn check_value_bytes(value_bytes: u32, namespace: &NamespaceInfo) -> Result<(), Status> {
    if value_bytes > namespace.key_value_limits().0 {
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

/// What to ask of the engine, now that the data is in `buffer`, laid out as its plan said.
pub(crate) fn launch(intent: Intent, buffer: Buffer, namespace: NamespaceId) -> Launch {
    match intent {
        Intent::Store { key, mode, value_bytes } => {
            Launch::Ask(Operation::Store { key, mode, record: buffer, value_bytes }, Running::Store)
        }
        Intent::Long { command: vendor::Command::Store { options, key_bytes, value_bytes } } => {
            let from = RECORD_HEADER_BYTES;
            let key = key_of(&buffer[from..from + usize::from(key_bytes)]);
            let operation = Operation::Store { key, mode: options.mode, record: buffer, value_bytes };
            Launch::Ask(operation, Running::Store)
        }
        Intent::Long { .. } => launch_from(intent, &buffer, namespace),
    }
}

/// What to ask of the engine for a command of the extension, other than Store, whose data is `data`.
pub(crate) fn launch_from(intent: Intent, data: &[u8], namespace: NamespaceId) -> Launch {
    let Intent::Long { command } = intent else { unreachable!("{intent:?} keeps its buffer") };
    let key = key_of(&data[..usize::from(command.key_bytes())]);
    let (operation, running) = match command {
        vendor::Command::Retrieve { limit_bytes, .. } => {
            (Operation::Retrieve { key, limit_bytes }, Running::Retrieve { limit_bytes })
        }
        vendor::Command::List { limit_bytes, .. } => {
            let operation = Operation::List { start: key, limit_bytes, long_keys: true };
            (operation, Running::List { limit_bytes })
        }
        vendor::Command::Delete { .. } => (Operation::Delete { key }, Running::Delete { namespace }),
        vendor::Command::Exist { .. } => (Operation::Exist { key }, Running::Exist { tell_length: true }),
        vendor::Command::Store { .. } => unreachable!("a Store keeps its buffer"),
    };
    Launch::Ask(operation, running)
}

fn key_of(bytes: &[u8]) -> Key {
    // `extension::Command::check` lets no longer key through.
    Key::new(bytes).expect("a key within the bound of the room `base`")
}

/// How the engine's outcome is told. `missing_fails` says whether Delete of a missing key does.
///
/// # Panics
/// When the outcome is one of another operation: only our own mistake.
#[inline]
pub(crate) fn answer(
    running: Running,
    outcome: Outcome,
    missing_fails: impl Fn(NamespaceId) -> bool,
) -> Answer {
    match (running, outcome) {
        (Running::Store, Outcome::Stored)
        | (Running::Delete { .. }, Outcome::Deleted)
        | (Running::Flush, Outcome::Flushed) => Answer::of(Status::SUCCESS, 0),
        (Running::Retrieve { limit_bytes }, Outcome::Value { buffer, offset, bytes }) => {
            let sent = bytes.min(limit_bytes as usize);
            Answer::with(buffer, offset, sent, bytes as u32)
        }
        (Running::List { limit_bytes }, Outcome::Listing { buffer, bytes }) => {
            assert!(bytes <= limit_bytes as usize, "a listing of {bytes} B where {limit_bytes} B were asked");
            Answer::with(buffer, 0, bytes, 0)
        }
        (Running::Exist { tell_length }, Outcome::Exists { value_bytes }) => {
            Answer::of(Status::SUCCESS, if tell_length { value_bytes } else { 0 })
        }
        (Running::Delete { namespace }, Outcome::NotFound) if !missing_fails(namespace) => {
            Answer::of(Status::SUCCESS, 0)
        }
        (running, outcome) => Answer::of(failure(running, &outcome), 0),
    }
}

fn failure(running: Running, outcome: &Outcome) -> Status {
    match outcome {
        Outcome::NotFound => Status::KV_KEY_DOES_NOT_EXIST,
        Outcome::AlreadyExists => Status::KV_KEY_EXISTS,
        Outcome::CapacityExceeded => Status::KV_CAPACITY_EXCEEDED,
        Outcome::InvalidValueSize => Status::KV_INVALID_VALUE_SIZE,
        Outcome::InvalidKeySize => Status::KV_INVALID_KEY_SIZE,
        Outcome::Unrecovered => Status::KV_UNRECOVERED_ERROR,
        Outcome::NotReady => Status::NAMESPACE_NOT_READY,
        Outcome::Busy => Status::COMMAND_INTERRUPTED,
        Outcome::Stored
        | Outcome::Value { .. }
        | Outcome::Deleted
        | Outcome::Exists { .. }
        | Outcome::Listing { .. }
        | Outcome::Flushed
        | Outcome::Blocks { .. }
        | Outcome::Written
        | Outcome::Verified
        | Outcome::Different
        | Outcome::WriteFault => unreachable!("{running:?} ended as {outcome:?}"),
    }
}
