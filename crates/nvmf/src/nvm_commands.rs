//! Commands on blocks: from an entry to what the engine is asked, and from its answer to a completion.
//!
//! In: the entry of a command on a namespace of blocks, later its data. Out: a [`Plan`], then an
//! [`Operation`] on blocks that exist; at the end a status. Nothing is held here.
//!
//! Statuses are those of the NVM command set (1.1). Fields that say nothing here (protection, hints,
//! streams, limited retry) are let pass; a fused command is refused, since half of it would be wrong.

use crate::command_slots::{Landing, Running};
use crate::io_commands::{Answer, Context, Intent as AnyIntent, Launch, Plan};
use crate::io_request::{Operation, Outcome, Range};
use octokv_base::{Buffer, Lba};
use octokv_wire::nvm::{self, Command, RANGE_BYTES};
use octokv_wire::{SglKind, Sqe, Status};

/// The bits of an entry's flags that make it half of a fused command.
const FUSED: u8 = 3;

/// What a command whose data is under way will be.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Intent {
    /// Write.
    Write { lba: Lba, force_unit_access: bool },
    /// Compare.
    Compare { lba: Lba },
    /// Dataset Management that gives ranges back, of a namespace of so many blocks.
    Deallocate { blocks: u64 },
}

impl Intent {
    pub fn keeps_data(self) -> bool {
        !matches!(self, Intent::Deallocate { .. })
    }
}

/// What a request at the engine does to blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Read, so many bytes.
    Read { lba: Lba, bytes: u32 },
    /// Compare or Verify.
    Check { lba: Lba },
    /// Write, Write Zeroes or Deallocate.
    Change { lba: Lba },
    /// Flush.
    Flush,
}

impl Work {
    /// The first block that it is about.
    pub fn lba(self) -> Lba {
        match self {
            Work::Read { lba, .. } | Work::Check { lba } | Work::Change { lba } => lba,
            Work::Flush => Lba(0),
        }
    }
}

const INVALID_FIELD: Status = Status::INVALID_FIELD.do_not_retry();
const LBA_OUT_OF_RANGE: Status = Status::LBA_OUT_OF_RANGE.do_not_retry();

fn check_range(range: Range, blocks: u64) -> Result<(), Status> {
    match range.lba.0.checked_add(u64::from(range.blocks)) {
        Some(end) if end <= blocks => Ok(()),
        Some(_) | None => Err(LBA_OUT_OF_RANGE),
    }
}

/// The plan for an entry on a namespace of blocks of this size.
#[inline]
pub(crate) fn plan(sqe: &Sqe, context: &Context<'_>, block_bytes: u32) -> Result<Plan, Status> {
    let command = Command::check(sqe)?;
    if sqe.flags & FUSED != 0 {
        return Err(INVALID_FIELD);
    }
    let blocks = context.namespace.size_bytes / u64::from(block_bytes);
    // The bytes of a range that exists and that one command may be about.
    let bytes_of = |range: Range| {
        let bytes = u64::from(range.blocks) * u64::from(block_bytes);
        if bytes > context.transfer_bytes_max {
            return Err(INVALID_FIELD);
        }
        check_range(range, blocks)?;
        Ok(bytes as u32)
    };
    let data =
        |intent, bytes| Ok(Plan::Data { intent: AnyIntent::Block(intent), landing: Landing::PLAIN, bytes });
    let launch = |operation, work| Ok(Plan::Launch(operation, Running::Blocks(work)));
    match command {
        Command::Flush => launch(Operation::Flush, Work::Flush),
        Command::Read { range } => {
            let bytes = bytes_of(range)?;
            match context.sgl {
                SglKind::Transport { bytes: room } if room >= bytes => {
                    launch(Operation::Read { range }, Work::Read { lba: range.lba, bytes })
                }
                SglKind::InCapsule { .. } => Err(Status::INVALID_SGL_TYPE.do_not_retry()),
                SglKind::Transport { .. } | SglKind::None => Err(Status::INVALID_SGL_LENGTH.do_not_retry()),
            }
        }
        Command::Write { range, force_unit_access } => {
            let force_unit_access = force_unit_access || !context.write_cache;
            data(Intent::Write { lba: range.lba, force_unit_access }, bytes_of(range)?)
        }
        Command::Compare { range } => data(Intent::Compare { lba: range.lba }, bytes_of(range)?),
        Command::WriteZeroes { range, force_unit_access, deallocate } => {
            bytes_of(range)?;
            let force_unit_access = force_unit_access || !context.write_cache;
            let operation = Operation::WriteZeroes { range, force_unit_access, deallocate };
            launch(operation, Work::Change { lba: range.lba })
        }
        Command::Verify { range } => {
            bytes_of(range)?;
            launch(Operation::Verify { range }, Work::Check { lba: range.lba })
        }
        // Hints about how ranges will be used: there is nothing to do with them.
        Command::DatasetManagement { deallocate: false, .. } => Ok(Plan::Answer(Status::SUCCESS)),
        Command::DatasetManagement { ranges, deallocate: true } => {
            data(Intent::Deallocate { blocks }, ranges * RANGE_BYTES as u32)
        }
    }
}

/// What to ask of the engine, now that the data is in `buffer`.
pub(crate) fn launch(intent: Intent, data: Buffer) -> Launch {
    match intent {
        Intent::Write { lba, force_unit_access } => {
            let operation = Operation::Write { lba, data, force_unit_access };
            Launch::Ask(operation, Running::Blocks(Work::Change { lba }))
        }
        Intent::Compare { lba } => {
            Launch::Ask(Operation::Compare { lba, data }, Running::Blocks(Work::Check { lba }))
        }
        Intent::Deallocate { .. } => launch_from(intent, &data),
    }
}

/// What to ask of the engine for a Dataset Management with this data.
pub(crate) fn launch_from(intent: Intent, data: &[u8]) -> Launch {
    let Intent::Deallocate { blocks } = intent else { unreachable!("{intent:?} keeps its buffer") };
    let ranges: Vec<Range> = nvm::decode_ranges(data).filter(|range| range.blocks > 0).collect();
    if let Some(status) = ranges.iter().find_map(|&range| check_range(range, blocks).err()) {
        return Launch::Answer(status);
    }
    let Some(lba) = ranges.first().map(|range| range.lba) else { return Launch::Answer(Status::SUCCESS) };
    Launch::Ask(Operation::Deallocate { ranges }, Running::Blocks(Work::Change { lba }))
}

/// How the engine's outcome is told.
///
/// # Panics
/// When the outcome is one of another operation: only our own mistake.
#[inline]
pub(crate) fn answer(work: Work, outcome: Outcome) -> Answer {
    let status = match (work, outcome) {
        (Work::Read { bytes, .. }, Outcome::Blocks { buffer }) => {
            return Answer::with(buffer, 0, bytes as usize, 0);
        }
        (Work::Change { .. }, Outcome::Written)
        | (Work::Check { .. }, Outcome::Verified)
        | (Work::Flush, Outcome::Flushed) => Status::SUCCESS,
        (Work::Check { .. }, Outcome::Different) => Status::MEDIA_COMPARE_FAILURE.do_not_retry(),
        (Work::Change { .. } | Work::Flush, Outcome::WriteFault | Outcome::Unrecovered) => {
            Status::MEDIA_WRITE_FAULT
        }
        (Work::Read { .. } | Work::Check { .. }, Outcome::Unrecovered) => Status::MEDIA_UNRECOVERED_READ,
        (_, Outcome::CapacityExceeded) => Status::KV_CAPACITY_EXCEEDED,
        (_, Outcome::NotReady) => Status::NAMESPACE_NOT_READY,
        (_, Outcome::Busy) => Status::COMMAND_INTERRUPTED,
        (work, outcome) => unreachable!("{work:?} ended as {outcome:?}"),
    };
    Answer::of(status, 0)
}
