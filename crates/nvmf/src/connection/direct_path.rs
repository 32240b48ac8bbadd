//! Commands that are completed at once: parsed, executed and answered in one pass over a group of capsules.
//!
//! ```text
//!   whole capsules ──plan, begin lookups──▶ group ──advance lookups──▶ each: execute ──▶ completion
//!                                                                        │ None
//!                                                                        └──▶ command_handler, with the same plan
//! ```
//! In: the head of the bytes, and a [`DirectBackend`]. Out: bytes consumed, completions, requests of those commands that
//! must wait. Invariants: a group has at most [`GROUP_COMMANDS_MAX`] commands, and no other PDU between them; they begin
//! in the order of the host; a command takes one of the ways, never both.

use super::pdu_receive::ReceiveStep;
use super::state::{Capsule, Connection, ConnectionState};
use crate::command_plan::{
    CapsuleData, CommandPlan, InFlight, PendingCommand, PendingKvCommand, PlannedCommand,
};
use crate::direct::{DirectBackend, DirectOperation, DirectStage};
use crate::io_request::{IoRequest, RequestOperation, RequestOutcome};
use octokv_base::{BufferPool, Nanos};
use octokv_wire::pdu::{PduHeader, PduType, UncheckedCommonHeader};
use octokv_wire::queue_entry::FABRICS_OPCODE;
use octokv_wire::{Sqe, Status};
use smallvec::SmallVec;

/// Commands whose memory accesses overlap.
const GROUP_COMMANDS_MAX: usize = 16;

/// A command of a group.
struct GroupedCommand<'a, L> {
    sqe: &'a Sqe,
    data: &'a [u8],
    /// Length of its capsule in bytes.
    pdu_bytes: usize,
    /// `None` once it takes the long way.
    planned: Option<Result<PlannedCommand, Status>>,
    target: DirectTarget<L>,
}

/// What a command of a group will access.
enum DirectTarget<L> {
    /// It takes the long way.
    LongWay,
    Key(L),
    Blocks,
}

impl Connection {
    /// Whether the next bytes may be a group: capsules of an I/O queue without digests.
    #[inline]
    pub(super) fn accepts_groups(&self) -> bool {
        let params = &self.pdu_writer.params;
        self.is_at_pdu_head()
            && matches!(self.state(), ConnectionState::Io(_))
            && !params.header_digest
            && !params.data_digest
    }

    /// Receives the capsules at the head of the bytes. `None` if there is none that this file handles.
    pub(super) fn receive_group<D: DirectBackend>(
        &mut self,
        now: Nanos,
        bytes: &[u8],
        pool: &BufferPool,
        requests: &mut Vec<IoRequest>,
        direct: &mut D,
    ) -> Option<ReceiveStep> {
        let mut group = SmallVec::<[GroupedCommand<'_, D::Lookup>; GROUP_COMMANDS_MAX]>::new();
        let mut scanned_bytes = 0;
        while group.len() < GROUP_COMMANDS_MAX {
            let Some(command) = self.scan_capsule(&bytes[scanned_bytes..], direct) else { break };
            scanned_bytes += command.pdu_bytes;
            let is_last = matches!(command.target, DirectTarget::LongWay);
            group.push(command);
            if is_last {
                break;
            }
        }
        if group.is_empty() {
            return None;
        }
        if group.len() > 1 {
            for stage in [DirectStage::Entries, DirectStage::Records] {
                for command in &mut group {
                    if let (Some(Ok(planned)), DirectTarget::Key(lookup)) =
                        (&command.planned, &mut command.target)
                    {
                        direct.advance_lookup(planned.namespace, lookup, stage);
                    }
                }
            }
        }
        direct.begin_execution();
        let (mut consumed_bytes, mut completed) = (0, 0);
        let mut stalled = None;
        for command in &mut group {
            if self.complete_at_once(command, pool, direct) {
                completed += 1;
                consumed_bytes += command.pdu_bytes;
                continue;
            }
            let GroupedCommand { sqe, data, pdu_bytes, ref mut planned, .. } = *command;
            let planned = planned.take();
            let capsule = Capsule { data, has_bad_digest: false };
            match self.handle_command(now, sqe, capsule, planned, pool, requests) {
                Ok(None) => consumed_bytes += pdu_bytes,
                Ok(Some(stall)) => {
                    stalled = Some(stall);
                    break;
                }
                Err(error) => {
                    self.terminate(now, error, &bytes[consumed_bytes..][..pdu_bytes.min(128)]);
                    consumed_bytes = bytes.len();
                    break;
                }
            }
        }
        direct.end_execution(completed);
        Some(match stalled {
            // What is consumed counts first; the next step finds the stalled command at the head.
            Some(stall) if consumed_bytes == 0 => ReceiveStep::Stalled(stall),
            _ => ReceiveStep::Consumed(consumed_bytes),
        })
    }

    /// The command in the capsule at the head of the bytes. `None` if that is another PDU, incomplete, invalid, or a Fabrics
    /// command.
    #[inline]
    fn scan_capsule<'a, D: DirectBackend>(
        &mut self,
        bytes: &'a [u8],
        direct: &mut D,
    ) -> Option<GroupedCommand<'a, D::Lookup>> {
        let layout = self.check_pdu(UncheckedCommonHeader::new(bytes)?).ok()?;
        let pdu_bytes = layout.pdu_bytes();
        if layout.pdu_type != PduType::CapsuleCommand || bytes.len() < pdu_bytes {
            return None;
        }
        let Ok(PduHeader::Command(sqe)) = layout.decode_header(bytes) else { return None };
        if sqe.opcode == FABRICS_OPCODE {
            return None;
        }
        let data = &bytes[layout.prefix_bytes as usize..][..layout.data_bytes as usize];
        let planned = self.plan_io_command(sqe);
        let target = match &planned {
            Ok(PlannedCommand { namespace, plan, .. }) => match plan {
                CommandPlan::Submit(
                    RequestOperation::Retrieve { key, .. }
                    | RequestOperation::Delete { key }
                    | RequestOperation::Exist { key },
                    _,
                )
                | CommandPlan::ReceiveData {
                    pending: PendingCommand::KeyValue(PendingKvCommand::Store { key, .. }),
                    ..
                } => direct.begin_lookup(*namespace, key).map_or(DirectTarget::LongWay, DirectTarget::Key),
                CommandPlan::Submit(RequestOperation::Read { range }, _)
                    if direct.prefetch_blocks(*namespace, *range) =>
                {
                    DirectTarget::Blocks
                }
                _ => DirectTarget::LongWay,
            },
            Err(_) => DirectTarget::LongWay,
        };
        Some(GroupedCommand { sqe, data, pdu_bytes, planned: Some(planned), target })
    }

    /// Executes and completes a command, if it need not wait. False if it has to take the long way.
    #[inline]
    fn complete_at_once<D: DirectBackend>(
        &mut self,
        command: &GroupedCommand<'_, D::Lookup>,
        pool: &BufferPool,
        direct: &mut D,
    ) -> bool {
        let command_id = command.sqe.command_id();
        let Some(Ok(PlannedCommand { plan, namespace, sgl, .. })) = &command.planned else { return false };
        // What may not begin now, the long way delays or refuses.
        if matches!(command.target, DirectTarget::LongWay)
            || !self.has_response_space(pool)
            || self.slots.is_full()
            || self.slots.is_id_in_use(command_id)
        {
            return false;
        }
        match (plan, &command.target) {
            (CommandPlan::Submit(operation, in_flight), target) => {
                let limit_bytes = in_flight.response_bytes_max() as usize;
                let (mut value_bytes, writer) = (0, &mut self.pdu_writer);
                let mut receive = |data: &[u8]| {
                    value_bytes = data.len();
                    writer.write_data(command_id, &data[..data.len().min(limit_bytes)], pool)
                };
                let done = match (operation, target) {
                    (RequestOperation::Retrieve { key, .. }, DirectTarget::Key(lookup)) => {
                        match direct.retrieve(*namespace, key, lookup, &mut receive) {
                            Some(true) => Ok(()),
                            Some(false) => Err(RequestOutcome::NotFound),
                            None => return false,
                        }
                    }
                    (RequestOperation::Read { range }, DirectTarget::Blocks) => {
                        match direct.read_blocks(*namespace, *range, &mut receive) {
                            Some(()) => Ok(()),
                            None => return false,
                        }
                    }
                    (operation, DirectTarget::Key(lookup)) => {
                        let (key, direct_operation) = match operation {
                            RequestOperation::Delete { key } => (key, DirectOperation::Delete),
                            RequestOperation::Exist { key } => (key, DirectOperation::Exist),
                            _ => return false,
                        };
                        match direct.execute(*namespace, key, lookup, direct_operation) {
                            Some(outcome) => Err(outcome),
                            None => return false,
                        }
                    }
                    _ => return false,
                };
                self.counters.count_operation(operation);
                match done {
                    Ok(()) => self.complete_written_data(command_id, *in_flight, value_bytes),
                    Err(outcome) => self.complete_command(command_id, *namespace, *in_flight, outcome),
                }
                true
            }
            (
                CommandPlan::ReceiveData {
                    pending: PendingCommand::KeyValue(PendingKvCommand::Store { key, mode, value_bytes }),
                    bytes,
                    ..
                },
                DirectTarget::Key(lookup),
            ) => {
                let Ok(CapsuleData::Complete(value)) = CapsuleData::check(*sgl, command.data, *bytes) else {
                    return false;
                };
                let operation = DirectOperation::Store { mode: *mode, value };
                let Some(outcome) = direct.execute(*namespace, key, lookup, operation) else { return false };
                self.counters.count_store(*value_bytes);
                self.complete_command(command_id, *namespace, InFlight::Store, outcome);
                true
            }
            _ => false,
        }
    }
}
