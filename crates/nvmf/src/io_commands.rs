//! What a command of an I/O queue needs and how it is answered, whichever command set it is of.
//!
//! In: an entry on a namespace; later its data, then the engine's outcome. Out: a [`Plan`], an operation,
//! an [`Answer`]. Nothing is held here. The namespace's command set alone says what an opcode means: `kv`
//! and `nvm` read it.

use crate::command_slots::{Landing, Running};
use crate::config::{NamespaceInfo, NamespaceKind};
use crate::io_request::{Operation, Outcome};
use crate::{kv_commands, nvm_commands};
use octokv_base::{Buffer, NamespaceId};
use octokv_wire::{SglKind, Sqe, Status};

/// What a command is looked at with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Context<'a> {
    /// The namespace that it is for.
    pub namespace: &'a NamespaceInfo,
    /// What its data pointer says.
    pub sgl: SglKind,
    /// No listing is longer.
    pub listing_bytes_max: u32,
    /// MDTS: no command on blocks has more.
    pub transfer_bytes_max: u64,
    /// Whether writes may stay in a volatile cache.
    pub write_cache: bool,
}

/// What a command whose data is under way will be.
#[derive(Debug)]
pub(crate) enum Intent {
    /// On keys.
    KeyValue(kv_commands::Intent),
    /// On blocks.
    Block(nvm_commands::Intent),
}

/// What a command needs before it can be asked of the engine.
#[derive(Debug)]
pub(crate) enum Plan {
    /// Nothing more.
    Launch(Operation, Running),
    /// So many bytes of data, in a buffer laid out so.
    Data { intent: Intent, landing: Landing, bytes: u32 },
    /// Nothing at all: there is nothing to do.
    Answer(Status),
}

/// What becomes of a command whose data is here.
#[derive(Debug)]
pub(crate) enum Launch {
    /// The engine's.
    Ask(Operation, Running),
    /// Answered.
    Answer(Status),
}

/// The plan for an entry.
#[inline]
pub(crate) fn plan(sqe: &Sqe, context: &Context<'_>) -> Result<Plan, Status> {
    match context.namespace.kind {
        NamespaceKind::KeyValue { .. } => kv_commands::plan(sqe, context),
        NamespaceKind::Block { block_bytes } => nvm_commands::plan(sqe, context, block_bytes),
    }
}

impl Intent {
    /// Whether the engine keeps the data's buffer; others only look at the data.
    pub fn keeps_data(&self) -> bool {
        match self {
            Intent::KeyValue(intent) => intent.keeps_data(),
            Intent::Block(intent) => intent.keeps_data(),
        }
    }

    /// Its data is in `buffer`, laid out as the plan said.
    pub fn launch(self, buffer: Buffer, namespace: NamespaceId) -> Launch {
        match self {
            Intent::KeyValue(intent) => kv_commands::launch(intent, buffer, namespace),
            Intent::Block(intent) => nvm_commands::launch(intent, buffer),
        }
    }

    /// Its data is `data`, which need not be kept.
    pub fn launch_from(self, data: &[u8], namespace: NamespaceId) -> Launch {
        match self {
            Intent::KeyValue(intent) => kv_commands::launch_from(intent, data, namespace),
            Intent::Block(intent) => nvm_commands::launch_from(intent, data),
        }
    }
}

/// A completion, and the data in front of it.
#[derive(Debug)]
pub(crate) struct Answer {
    pub status: Status,
    pub dw0: u32,
    /// The buffer, and where in it the data begins and ends.
    pub data: Option<(Buffer, usize, usize)>,
}

impl Answer {
    pub fn of(status: Status, dw0: u32) -> Answer {
        Answer { status, dw0, data: None }
    }

    pub fn with(buffer: Buffer, from: usize, bytes: usize, dw0: u32) -> Answer {
        let data = (bytes > 0).then_some((buffer, from, from + bytes));
        Answer { status: Status::SUCCESS, dw0, data }
    }
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
    match running {
        Running::Blocks(work) => nvm_commands::answer(work, outcome),
        _ => kv_commands::answer(running, outcome, missing_fails),
    }
}
