//! Commands that are completed at once: parsed, executed and answered in one pass over a group of capsules.
//!
//! ```text
//!   whole capsules ──check, begin lookups──▶ group ──advance lookups──▶ each: execute ──▶ data, completion
//!                                                                         │ None
//!                                                                         └──▶ command_handler, as checked
//! ```
//! In: the head of the bytes, and a [`DirectBackend`]. Out: bytes consumed, completions, requests of those commands that
//! must wait. Invariants: a group has at most [`GROUP_COMMANDS_MAX`] commands, and no other PDU between them; they begin
//! in the order of the host; a command takes one of the ways, never both.

use super::pdu_receive::ReceiveStep;
use super::state::{Capsule, Connection, ConnectionState};
use crate::command_plan::{BlockCommand, BlockOp, CapsuleData, CheckedCommand, InFlight, IoCommand};
use crate::counters::CountedOperation;
use crate::direct::{DirectBackend, DirectOperation, DirectStage};
use crate::io_commands;
use crate::io_request::{IoRequest, LbaRange, RequestOutcome};
use octokv_base::{BufferPool, DataRef, Nanos};
use octokv_wire::Status;
use octokv_wire::kv::KvCommand;
use octokv_wire::nvm::NvmCommand;
use octokv_wire::pdu::PlainCapsule;
use octokv_wire::queue_entry::FABRICS_OPCODE;
use octokv_wire::send_buffer::COPY_BYTES_MAX;
use octokv_wire::vendor::VendorCommand;
use smallvec::SmallVec;

/// Commands whose memory accesses overlap.
const GROUP_COMMANDS_MAX: usize = 16;

/// A command of a group.
struct GroupedCommand<'a, L> {
    capsule: PlainCapsule<'a>,
    checked: Result<CheckedCommand, Status>,
    target: DirectTarget<L>,
}

/// What a command of a group will access.
#[derive(Clone, Copy)]
enum DirectTarget<L> {
    /// It takes the long way.
    LongWay,
    Key(L),
    Blocks,
}

/// A command that may be completed at once, with its data.
enum DirectCommand<'a> {
    Retrieve { key: &'a [u8], limit_bytes: u32 },
    Execute { key: &'a [u8], operation: DirectOperation<'a>, in_flight: InFlight },
    Read { range: LbaRange, bytes: u32 },
}

impl<'a> DirectCommand<'a> {
    /// A checked command, and what follows its SQE in the capsule. `None` if it takes the long way, as one whose data is not
    /// in the capsule.
    #[inline(always)]
    fn new(checked: &'a CheckedCommand, data: &'a [u8]) -> Option<DirectCommand<'a>> {
        let complete_data = |bytes| match CapsuleData::check(checked.sgl, data, bytes) {
            Ok(CapsuleData::Complete(data)) => Some(data),
            Ok(CapsuleData::Requested) | Err(_) => None,
        };
        let delete = InFlight::Delete { namespace: checked.namespace };
        Some(match &checked.command {
            IoCommand::KeyValue(command, _) => match command {
                KvCommand::Retrieve { key, limit_bytes } => {
                    DirectCommand::Retrieve { key: key.as_bytes(), limit_bytes: *limit_bytes }
                }
                KvCommand::Store { key, options, value_bytes } => {
                    let value = complete_data(*value_bytes)?;
                    let operation = DirectOperation::Store { mode: options.mode, value };
                    DirectCommand::Execute { key: key.as_bytes(), operation, in_flight: InFlight::Store }
                }
                KvCommand::Delete { key } => DirectCommand::Execute {
                    key: key.as_bytes(),
                    operation: DirectOperation::Delete,
                    in_flight: delete,
                },
                KvCommand::Exist { key } => DirectCommand::Execute {
                    key: key.as_bytes(),
                    operation: DirectOperation::Exist,
                    in_flight: InFlight::Exist { return_length: false },
                },
                KvCommand::Flush | KvCommand::List { .. } => return None,
            },
            IoCommand::Vendor(command, _) => {
                let data = complete_data(command.host_data_bytes() as u32)?;
                let (key, value) = data.split_at(usize::from(command.key_bytes()));
                match *command {
                    VendorCommand::Retrieve { limit_bytes, .. } => {
                        DirectCommand::Retrieve { key, limit_bytes }
                    }
                    VendorCommand::Store { options, .. } => {
                        let operation = DirectOperation::Store { mode: options.mode, value };
                        DirectCommand::Execute { key, operation, in_flight: InFlight::Store }
                    }
                    VendorCommand::Delete { .. } => {
                        DirectCommand::Execute { key, operation: DirectOperation::Delete, in_flight: delete }
                    }
                    VendorCommand::Exist { .. } => DirectCommand::Execute {
                        key,
                        operation: DirectOperation::Exist,
                        in_flight: InFlight::Exist { return_length: true },
                    },
                    VendorCommand::List { .. } => return None,
                }
            }
            IoCommand::Block(BlockCommand { command: NvmCommand::Read { range }, range_bytes, .. }) => {
                DirectCommand::Read { range: *range, bytes: *range_bytes }
            }
            IoCommand::Block(_) => return None,
        })
    }
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
    #[inline(never)]
    pub(super) fn receive_group<D: DirectBackend>(
        &mut self,
        now: Nanos,
        bytes: &[u8],
        pool: &BufferPool,
        requests: &mut Vec<IoRequest>,
        direct: &mut D,
    ) -> Option<ReceiveStep> {
        let first = PlainCapsule::recognize(bytes, self.in_capsule_bytes_max())?;
        let namespace = first.sqe.namespace();
        if !direct.select(namespace) {
            return None;
        }
        let mut group = SmallVec::<[GroupedCommand<'_, D::Lookup>; GROUP_COMMANDS_MAX]>::new();
        self.target.namespace_directory.refresh(&mut self.namespaces);
        let data_bytes_max = self.in_capsule_bytes_max();
        let mut rest = bytes;
        while group.len() < GROUP_COMMANDS_MAX
            && let Some(capsule) = PlainCapsule::recognize(rest, data_bytes_max)
            && capsule.sqe.opcode != FABRICS_OPCODE
            && capsule.sqe.namespace() == namespace
        {
            let checked = self.check_current_io_command(capsule.sqe);
            let target = begin(&checked, capsule.data, direct);
            group.push(GroupedCommand { capsule, checked, target });
            if matches!(target, DirectTarget::LongWay) {
                break;
            }
            rest = &rest[capsule.pdu_bytes()..];
        }
        if group.is_empty() {
            return None;
        }
        if group.len() > 1 {
            for stage in [DirectStage::Entries, DirectStage::Records] {
                for command in &mut group {
                    if let DirectTarget::Key(lookup) = &mut command.target {
                        direct.advance_lookup(lookup, stage);
                    }
                }
            }
        }
        direct.begin_execution();
        let (mut consumed_bytes, mut completed, mut data_bytes) = (0, 0, 0);
        let mut stalled = None;
        let (mut unsent_bytes, mut unsent_bytes_max) = (self.unsent_bytes(), self.unsent_bytes_max(pool));
        for GroupedCommand { capsule, checked, target } in &group {
            // What may not begin now, the long way delays or refuses.
            if unsent_bytes <= unsent_bytes_max
                && self.slots.may_take(capsule.sqe.command_id())
                && let Some(bytes) = self.complete_at_once(capsule, checked, target, pool, direct)
            {
                completed += 1;
                data_bytes += bytes as u64;
                consumed_bytes += capsule.pdu_bytes();
                let before = std::mem::replace(&mut unsent_bytes, self.unsent_bytes());
                if unsent_bytes - before > COPY_BYTES_MAX as u64 {
                    // A buffer is reserved for its data, so less is free.
                    unsent_bytes_max = self.unsent_bytes_max(pool);
                }
                continue;
            }
            let (sqe, data) = (capsule.sqe, Capsule { data: capsule.data, has_bad_digest: false });
            match self.handle_command(now, sqe, data, Some(*checked), pool, requests) {
                Ok(None) => {
                    consumed_bytes += capsule.pdu_bytes();
                    (unsent_bytes, unsent_bytes_max) = (self.unsent_bytes(), self.unsent_bytes_max(pool));
                }
                Ok(Some(stall)) => {
                    stalled = Some(stall);
                    break;
                }
                Err(error) => {
                    self.terminate(now, error, &bytes[consumed_bytes..][..capsule.pdu_bytes().min(128)]);
                    consumed_bytes = bytes.len();
                    break;
                }
            }
        }
        direct.end_execution(completed, data_bytes);
        Some(match stalled {
            // What is consumed counts first; the next step finds the stalled command at the head.
            Some(stall) if consumed_bytes == 0 => ReceiveStep::Stalled(stall),
            _ => ReceiveStep::Consumed(consumed_bytes),
        })
    }

    /// Executes and completes a command, if it need not wait. Gives the bytes of its data; `None` if it has to take the long
    /// way.
    #[inline]
    fn complete_at_once<D: DirectBackend>(
        &mut self,
        capsule: &PlainCapsule<'_>,
        checked: &Result<CheckedCommand, Status>,
        target: &DirectTarget<D::Lookup>,
        pool: &BufferPool,
        direct: &mut D,
    ) -> Option<usize> {
        let Ok(checked) = checked else { return None };
        let (command_id, namespace) = (capsule.sqe.command_id(), checked.namespace);
        match (DirectCommand::new(checked, capsule.data), target) {
            (Some(DirectCommand::Retrieve { key, limit_bytes }), DirectTarget::Key(lookup)) => {
                let in_flight = InFlight::Retrieve { limit_bytes };
                let (mut sent_bytes, writer) = (0, &mut self.pdu_writer);
                let mut receive = |value: DataRef<'_>| {
                    let value_bytes = value.as_bytes().len();
                    sent_bytes = value_bytes.min(limit_bytes as usize);
                    let dw0 = io_commands::data_dw0(in_flight, value_bytes);
                    writer.write_data_and_success(command_id, value, sent_bytes, dw0, pool)
                };
                let exists = direct.retrieve(key, lookup, &mut receive)?;
                self.counters.count_operation(CountedOperation::Retrieve);
                match exists {
                    true => self.counters.count_sent_data(in_flight, sent_bytes),
                    false => {
                        self.complete_command(command_id, namespace, in_flight, RequestOutcome::NotFound);
                    }
                }
                Some(sent_bytes)
            }
            (Some(DirectCommand::Execute { key, operation, in_flight }), DirectTarget::Key(lookup)) => {
                let outcome = direct.execute(key, lookup, operation)?;
                let (counted, bytes) = match operation {
                    DirectOperation::Store { value, .. } => {
                        (CountedOperation::Store { value_bytes: value.len() as u32 }, value.len())
                    }
                    DirectOperation::Delete => (CountedOperation::Delete, 0),
                    DirectOperation::Exist => (CountedOperation::Exist, 0),
                };
                self.counters.count_operation(counted);
                self.complete_command(command_id, namespace, in_flight, outcome);
                Some(bytes)
            }
            (Some(DirectCommand::Read { range, bytes }), DirectTarget::Blocks) => {
                let in_flight = InFlight::Blocks(BlockOp::Read { lba: range.lba, bytes });
                let writer = &mut self.pdu_writer;
                let mut receive = |blocks: DataRef<'_>| {
                    let blocks_bytes = blocks.as_bytes().len();
                    let dw0 = io_commands::data_dw0(in_flight, blocks_bytes);
                    writer.write_data_and_success(command_id, blocks, blocks_bytes, dw0, pool)
                };
                direct.read_blocks(range, &mut receive)?;
                self.counters.count_operation(CountedOperation::Read);
                self.counters.count_sent_data(in_flight, bytes as usize);
                Some(bytes as usize)
            }
            _ => None,
        }
    }
}

/// Begins what a command will access.
#[inline]
fn begin<D: DirectBackend>(
    checked: &Result<CheckedCommand, Status>,
    data: &[u8],
    direct: &mut D,
) -> DirectTarget<D::Lookup> {
    let Ok(checked) = checked else { return DirectTarget::LongWay };
    let is_begun = match DirectCommand::new(checked, data) {
        Some(DirectCommand::Retrieve { key, .. } | DirectCommand::Execute { key, .. }) => {
            direct.begin_lookup(key).map(DirectTarget::Key)
        }
        Some(DirectCommand::Read { range, .. }) => {
            direct.prefetch_blocks(range).then_some(DirectTarget::Blocks)
        }
        None => None,
    };
    is_begun.unwrap_or(DirectTarget::LongWay)
}
