//! One command slot of a queue ([`crate::queue_pair`], which draws its states), and the data that it keeps for sending.

use crate::command::{CommandKind, Value};
use octokv_base::{Buffer, BufferPool, Key, Nanos};
use std::sync::Arc;

/// Data of a command that the send buffer may reference.
#[derive(Debug)]
pub(crate) enum Payload {
    None,
    Shared(Arc<[u8]>),
    Buffer { buffer: Buffer, from: usize, to: usize },
}

impl Payload {
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Payload::None => &[],
            Payload::Shared(bytes) => bytes,
            Payload::Buffer { buffer, from, to } => &buffer[*from..*to],
        }
    }

    pub(crate) fn into_buffer(self) -> Option<Buffer> {
        match self {
            Payload::None | Payload::Shared(_) => None,
            Payload::Buffer { buffer, .. } => Some(buffer),
        }
    }
}

/// State of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CommandSlotState {
    Free,
    Waiting,
    /// Completed, but the send buffer still references parts of its value.
    CompletedUnsent,
}

/// A slot, and the command in it.
#[derive(Debug)]
pub(crate) struct CommandSlot {
    pub(crate) state: CommandSlotState,
    pub(crate) token: u64,
    pub(crate) kind: CommandKind,
    pub(crate) deadline: Nanos,
    /// Offset of its capsule in the sent byte stream.
    pub(crate) stream_start: u64,
    pub(crate) key: Option<Key>,
    pub(crate) payload: Payload,
    /// Length of the data that the controller requests by R2T, in bytes, and the requested part of it.
    pub(crate) transfer_bytes: u32,
    pub(crate) requested_bytes: u32,
    pub(crate) unsent_parts: u32,
    /// Offset in the sent byte stream after its last byte so far.
    pub(crate) stream_end: u64,
    pub(crate) read_buffer: Option<Buffer>,
    pub(crate) response_bytes_max: u32,
    pub(crate) received_bytes: u32,
    pub(crate) digest_ok: bool,
}

impl CommandSlot {
    pub(crate) fn free() -> CommandSlot {
        CommandSlot {
            state: CommandSlotState::Free,
            token: 0,
            kind: CommandKind::Internal,
            deadline: Nanos::NEVER,
            stream_start: 0,
            key: None,
            payload: Payload::None,
            transfer_bytes: 0,
            requested_bytes: 0,
            unsent_parts: 0,
            stream_end: 0,
            read_buffer: None,
            response_bytes_max: 0,
            received_bytes: 0,
            digest_ok: true,
        }
    }
}

/// Keeps the value of a command until the send buffer references no part of it.
pub(crate) fn retain_payload(value: Value<'_>, pool: &BufferPool) -> Payload {
    match value {
        Value::Shared(bytes) => Payload::Shared(bytes),
        Value::Buffer { buffer, from, to } => Payload::Buffer { buffer, from, to },
        Value::Slice(bytes) => {
            let to = bytes.len();
            let mut buffer = pool.take(to).unwrap_or_else(|| Buffer::zeroed(to));
            buffer[..to].copy_from_slice(bytes);
            Payload::Buffer { buffer, from: 0, to }
        }
    }
}
