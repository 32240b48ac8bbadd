//! NVM commands: translates SQEs to requests and outcomes to completions.
//!
//! In: the SQE of a command on a block namespace, later its data. Out: an [`IoCommand`], a [`CommandPlan`], then a
//! [`RequestOperation`] on blocks that exist; at the end a status. Stateless.
//!
//! Statuses are those of the NVM Command Set 1.1. Fields without effect here (protection information,
//! hints, streams, limited retry) are ignored; fused commands fail, since they would not be atomic.

use crate::command_plan::{
    BlockCommand, BlockOp, CommandAction, CommandContext, CommandPlan, CommandResult, InFlight, IoCommand,
    PayloadLayout, PendingCommand, PendingNvmCommand,
};
use crate::io_request::{LbaRange, RequestOperation, RequestOutcome};
use crate::namespace_info::NamespaceKind;
use octokv_base::Buffer;
use octokv_wire::nvm::{self, NvmCommand, RANGE_BYTES};
use octokv_wire::{SglKind, Sqe, Status};

/// FUSE in the SQE's flags: not 0 for a fused command.
const FUSE_BITS: u8 = 3;

const INVALID_FIELD: Status = Status::INVALID_FIELD.do_not_retry();
const LBA_OUT_OF_RANGE: Status = Status::LBA_OUT_OF_RANGE.do_not_retry();

fn check_range(range: LbaRange, blocks: u64) -> Result<(), Status> {
    match range.lba.0.checked_add(u64::from(range.blocks)) {
        Some(end) if end <= blocks => Ok(()),
        Some(_) | None => Err(LBA_OUT_OF_RANGE),
    }
}

/// Checks a command on a block namespace.
///
/// # Errors
/// The status with which the command fails if its SQE is invalid, or its range exceeds MDTS or the
/// namespace.
#[inline]
pub(crate) fn check(sqe: &Sqe, sgl: SglKind, context: &CommandContext<'_>) -> Result<IoCommand, Status> {
    let NamespaceKind::Block { block_bytes } = context.namespace.kind else {
        unreachable!("a block command on {:?}", context.namespace.kind)
    };
    let mut command = NvmCommand::check(sqe)?;
    if sqe.flags & FUSE_BITS != 0 {
        return Err(INVALID_FIELD);
    }
    let namespace_blocks = context.namespace.size_bytes >> block_bytes.trailing_zeros();
    let range = match &mut command {
        NvmCommand::Read { range } | NvmCommand::Compare { range } | NvmCommand::Verify { range } => {
            Some(*range)
        }
        NvmCommand::Write { range, force_unit_access }
        | NvmCommand::WriteZeroes { range, force_unit_access, .. } => {
            *force_unit_access |= !context.write_cache_enabled;
            Some(*range)
        }
        NvmCommand::Flush | NvmCommand::DatasetManagement { .. } => None,
    };
    let mut range_bytes = 0;
    if let Some(range) = range {
        let bytes = u64::from(range.blocks) * u64::from(block_bytes);
        if bytes > context.transfer_bytes_max {
            return Err(INVALID_FIELD);
        }
        check_range(range, namespace_blocks)?;
        range_bytes = bytes as u32;
    }
    if matches!(command, NvmCommand::Read { .. }) {
        match sgl {
            SglKind::Transport { bytes } if bytes >= range_bytes => {}
            SglKind::InCapsule { .. } => return Err(Status::INVALID_SGL_TYPE.do_not_retry()),
            SglKind::Transport { .. } | SglKind::None => {
                return Err(Status::INVALID_SGL_LENGTH.do_not_retry());
            }
        }
    }
    Ok(IoCommand::Block(BlockCommand { command, range_bytes, namespace_blocks }))
}

/// The next step of a command.
#[inline]
pub(crate) fn plan(checked: BlockCommand) -> CommandPlan {
    let BlockCommand { command, range_bytes: bytes, namespace_blocks } = checked;
    let receive_data = |pending, bytes| CommandPlan::ReceiveData {
        pending: PendingCommand::Block(pending),
        layout: PayloadLayout::PLAIN,
        bytes,
    };
    let submit = |operation, op| CommandPlan::Submit(operation, InFlight::Blocks(op));
    match command {
        NvmCommand::Flush => submit(RequestOperation::Flush, BlockOp::Flush),
        NvmCommand::Read { range } => {
            submit(RequestOperation::Read { range }, BlockOp::Read { lba: range.lba, bytes })
        }
        NvmCommand::Write { range, force_unit_access } => {
            receive_data(PendingNvmCommand::Write { lba: range.lba, force_unit_access }, bytes)
        }
        NvmCommand::Compare { range } => receive_data(PendingNvmCommand::Compare { lba: range.lba }, bytes),
        NvmCommand::WriteZeroes { range, force_unit_access, deallocate } => {
            let operation = RequestOperation::WriteZeroes { range, force_unit_access, deallocate };
            submit(operation, BlockOp::Modify { lba: range.lba })
        }
        NvmCommand::Verify { range } => {
            submit(RequestOperation::Verify { range }, BlockOp::Check { lba: range.lba })
        }
        // Dataset Management without deallocation is a hint, which this target ignores.
        NvmCommand::DatasetManagement { deallocate: false, .. } => CommandPlan::Complete(Status::SUCCESS),
        NvmCommand::DatasetManagement { ranges, deallocate: true } => {
            let pending = PendingNvmCommand::Deallocate { blocks: namespace_blocks };
            receive_data(pending, ranges * RANGE_BYTES as u32)
        }
    }
}

/// The action for a command whose data is in `data`.
pub(crate) fn build_action(pending: PendingNvmCommand, data: Buffer) -> CommandAction {
    match pending {
        PendingNvmCommand::Write { lba, force_unit_access } => {
            let operation = RequestOperation::Write { lba, data, force_unit_access };
            CommandAction::Submit(operation, InFlight::Blocks(BlockOp::Modify { lba }))
        }
        PendingNvmCommand::Compare { lba } => CommandAction::Submit(
            RequestOperation::Compare { lba, data },
            InFlight::Blocks(BlockOp::Check { lba }),
        ),
        PendingNvmCommand::Deallocate { .. } => build_action_from(pending, &data),
    }
}

/// The action for a Dataset Management with deallocation, whose ranges are in `data`.
pub(crate) fn build_action_from(pending: PendingNvmCommand, data: &[u8]) -> CommandAction {
    let PendingNvmCommand::Deallocate { blocks } = pending else {
        unreachable!("{pending:?} owns its buffer")
    };
    let ranges: Vec<LbaRange> = nvm::decode_ranges(data).filter(|range| range.blocks > 0).collect();
    if let Some(status) = ranges.iter().find_map(|&range| check_range(range, blocks).err()) {
        return CommandAction::Complete(status);
    }
    let Some(lba) = ranges.first().map(|range| range.lba) else {
        return CommandAction::Complete(Status::SUCCESS);
    };
    CommandAction::Submit(RequestOperation::Deallocate { ranges }, InFlight::Blocks(BlockOp::Modify { lba }))
}

/// Translates the engine's outcome to a completion.
///
/// # Panics
/// If the outcome is not one of the command's operation.
#[inline]
pub(crate) fn command_result(op: BlockOp, outcome: RequestOutcome) -> CommandResult {
    let status = match (op, outcome) {
        (BlockOp::Read { bytes, .. }, RequestOutcome::Blocks { buffer }) => {
            return CommandResult::with_data(buffer.into(), 0, bytes as usize, 0);
        }
        (BlockOp::Modify { .. }, RequestOutcome::Written)
        | (BlockOp::Check { .. }, RequestOutcome::Verified)
        | (BlockOp::Flush, RequestOutcome::Flushed) => Status::SUCCESS,
        (BlockOp::Check { .. }, RequestOutcome::Mismatch) => Status::MEDIA_COMPARE_FAILURE.do_not_retry(),
        (
            BlockOp::Modify { .. } | BlockOp::Flush,
            RequestOutcome::WriteFault | RequestOutcome::Unrecovered,
        ) => Status::MEDIA_WRITE_FAULT,
        (BlockOp::Read { .. } | BlockOp::Check { .. }, RequestOutcome::Unrecovered) => {
            Status::MEDIA_UNRECOVERED_READ
        }
        (_, RequestOutcome::CapacityExceeded) => Status::KV_CAPACITY_EXCEEDED,
        (_, RequestOutcome::NotReady) => Status::NAMESPACE_NOT_READY,
        (_, RequestOutcome::Busy) => Status::COMMAND_INTERRUPTED,
        (op, outcome) => unreachable!("{op:?} completed with {outcome:?}"),
    };
    CommandResult::from_status(status, 0)
}
