//! Commands that are completed at once: parsed, executed and answered in one pass over a group of capsules.
//!
//! ```text
//!   whole capsules ──check, begin lookups──▶ group ──advance lookups──▶ each: execute ──▶ data, completion
//!                                                                         │ None
//!                                                                         └──▶ command_handler
//! ```
//! In: the head of the bytes, and a [`DirectBackend`]. Out: bytes consumed, completions, requests of those commands that
//! must wait. Invariants: a group has at most [`GROUP_COMMANDS_MAX`] commands, and no other PDU between them; they begin
//! in the order of the host; a command takes one of the ways, never both; no two commands of a group that are completed at once
//! have the same identifier.

use super::pdu_receive::ReceiveStep;
use super::state::{Capsule, Connection, ConnectionState};
use crate::command_plan::{BlockCommand, BlockOp, CapsuleData, CommandContext, InFlight, IoCommand};
use crate::counters::CountedOperation;
use crate::direct::{DirectBackend, DirectOperation, DirectStage};
use crate::io_request::{IoRequest, LbaRange, RequestOutcome};
use crate::namespace_info::NamespaceKind;
use crate::{io_commands, kv_commands, nvm_commands};
use octokv_base::{BufferPool, Lba, Nanos, ShortKey};
use octokv_wire::kv::KvCommand;
use octokv_wire::nvm::{self, NvmCommand};
use octokv_wire::pdu::PlainCapsule;
use octokv_wire::queue_entry::FABRICS_OPCODE;
use octokv_wire::send_buffer::COPY_BYTES_MAX;
use octokv_wire::vendor::VendorCommand;
use octokv_wire::{SglKind, Sqe};
use smallvec::SmallVec;

/// Commands whose memory accesses overlap.
const GROUP_COMMANDS_MAX: usize = 16;

/// What the short way needs of a checked command, apart for each command set: a group has one namespace. Checked commands are not
/// kept, so one that takes the long way after all is checked again there.
trait DirectCommand<'a, D: DirectBackend>: Sized {
    /// What the backend has begun for a command.
    type Begun;

    /// Stands for a command that takes the long way.
    const LONG_WAY: Self;

    /// Checks a command. `None` if it takes the long way: it fails, or waits, as one whose data is not in the capsule.
    fn check(capsule: &PlainCapsule<'a>, context: &CommandContext<'_>) -> Option<Self>;

    /// Begins what the command will access. `None` if it takes the long way.
    fn begin(&self, direct: &mut D) -> Option<Self::Begun>;

    /// Advances the commands of a group.
    fn advance(begun: &mut [Self::Begun], direct: &mut D);

    /// Executes and completes the command, if it need not wait. Gives the bytes of its data; `None` if it has to take the long way.
    fn complete(
        &self,
        begun: &Self::Begun,
        sqe: &Sqe,
        connection: &mut Connection,
        pool: &BufferPool,
        direct: &mut D,
    ) -> Option<usize>;
}

/// A command of a group. What has begun for it is in a list beside the group, in the same order.
struct GroupedCommand<'a, C> {
    capsule: PlainCapsule<'a>,
    command: C,
}

impl<C> GroupedCommand<'_, C> {
    #[inline(always)]
    fn id(&self) -> u16 {
        self.capsule.sqe.command_id()
    }
}

/// Whether an identifier is in a group twice.
#[cold]
fn has_repeated_id<C>(group: &[GroupedCommand<'_, C>]) -> bool {
    let mut earlier = group.iter().enumerate().map(|(index, command)| (command.id(), &group[..index]));
    earlier.any(|(id, earlier)| earlier.iter().any(|command| command.id() == id))
}

/// A command on a key.
struct KeyCommand<'a> {
    key: CommandKey<'a>,
    operation: KeyOperation<'a>,
}

/// The key of a command.
enum CommandKey<'a> {
    /// In the SQE, in two parts.
    Sqe(ShortKey),
    /// In the data of a vendor command.
    Data(&'a [u8]),
}

impl CommandKey<'_> {
    #[inline]
    fn as_bytes(&self) -> &[u8] {
        match self {
            CommandKey::Sqe(key) => key.as_bytes(),
            CommandKey::Data(key) => key,
        }
    }
}

/// What a command does with its key.
enum KeyOperation<'a> {
    Retrieve { limit_bytes: u32 },
    Execute(DirectOperation<'a>),
}

/// A read of blocks.
struct ReadCommand {
    range: LbaRange,
    bytes: u32,
}

/// The data of a command, if its capsule has it.
#[inline]
fn complete_data(sgl: SglKind, data: &[u8], bytes: u32) -> Option<&[u8]> {
    match CapsuleData::check(sgl, data, bytes) {
        Ok(CapsuleData::Complete(data)) => Some(data),
        Ok(CapsuleData::Requested) | Err(_) => None,
    }
}

impl<'a, D: DirectBackend> DirectCommand<'a, D> for KeyCommand<'a> {
    type Begun = D::Lookup;

    const LONG_WAY: KeyCommand<'a> =
        KeyCommand { key: CommandKey::Data(&[]), operation: KeyOperation::Execute(DirectOperation::Exist) };

    #[inline(always)]
    fn check(capsule: &PlainCapsule<'a>, context: &CommandContext<'_>) -> Option<KeyCommand<'a>> {
        let sgl = capsule.sqe.sgl.check().ok()?;
        let (key, operation) = match kv_commands::check(capsule.sqe, sgl, context).ok()? {
            IoCommand::KeyValue(command, _) => match command {
                KvCommand::Retrieve { key, limit_bytes } => (key, KeyOperation::Retrieve { limit_bytes }),
                KvCommand::Store { key, options, value_bytes } => {
                    let value = complete_data(sgl, capsule.data, value_bytes)?;
                    (key, KeyOperation::Execute(DirectOperation::Store { mode: options.mode, value }))
                }
                KvCommand::Delete { key } => (key, KeyOperation::Execute(DirectOperation::Delete)),
                KvCommand::Exist { key } => (key, KeyOperation::Execute(DirectOperation::Exist)),
                KvCommand::Flush | KvCommand::List { .. } => return None,
            },
            IoCommand::Vendor(command, _) => {
                let data = complete_data(sgl, capsule.data, command.host_data_bytes() as u32)?;
                let (key, value) = data.split_at(usize::from(command.key_bytes()));
                let operation = match command {
                    VendorCommand::Retrieve { limit_bytes, .. } => KeyOperation::Retrieve { limit_bytes },
                    VendorCommand::Store { options, .. } => {
                        KeyOperation::Execute(DirectOperation::Store { mode: options.mode, value })
                    }
                    VendorCommand::Delete { .. } => KeyOperation::Execute(DirectOperation::Delete),
                    VendorCommand::Exist { .. } => KeyOperation::Execute(DirectOperation::Exist),
                    VendorCommand::List { .. } => return None,
                };
                return Some(KeyCommand { key: CommandKey::Data(key), operation });
            }
            IoCommand::Iterator(_) | IoCommand::Block(_) => return None,
        };
        Some(KeyCommand { key: CommandKey::Sqe(key), operation })
    }

    #[inline(always)]
    fn begin(&self, direct: &mut D) -> Option<D::Lookup> {
        direct.begin_lookup(self.key.as_bytes())
    }

    #[inline(always)]
    fn advance(begun: &mut [D::Lookup], direct: &mut D) {
        direct.advance_lookups(begun, DirectStage::Entries);
        direct.advance_lookups(begun, DirectStage::Records);
    }

    #[inline(always)]
    fn complete(
        &self,
        lookup: &D::Lookup,
        sqe: &Sqe,
        connection: &mut Connection,
        pool: &BufferPool,
        direct: &mut D,
    ) -> Option<usize> {
        let (command_id, namespace, key) = (sqe.command_id(), sqe.namespace(), self.key.as_bytes());
        let operation = match self.operation {
            KeyOperation::Retrieve { limit_bytes } => {
                let in_flight = InFlight::Retrieve { limit_bytes };
                let (mut sent_bytes, writer) = (0, &mut connection.pdu_writer);
                let exists = direct.retrieve(key, lookup, |value| {
                    let value_bytes = value.as_bytes().len();
                    sent_bytes = value_bytes.min(limit_bytes as usize);
                    let dw0 = io_commands::data_dw0(in_flight, value_bytes);
                    writer.write_data_and_success(command_id, value, sent_bytes, dw0, pool)
                })?;
                connection.counters.count_operation(CountedOperation::Retrieve);
                match exists {
                    true => connection.counters.count_sent_data(in_flight, sent_bytes),
                    false => {
                        let outcome = RequestOutcome::NotFound;
                        connection.complete_command((command_id, 0), namespace, in_flight, outcome);
                    }
                }
                return Some(sent_bytes);
            }
            KeyOperation::Execute(operation) => operation,
        };
        let outcome = direct.execute(key, lookup, operation)?;
        let (counted, in_flight, bytes) = match operation {
            DirectOperation::Store { value, .. } => {
                let value_bytes = value.len() as u32;
                (CountedOperation::Store { value_bytes }, InFlight::Store, value.len())
            }
            DirectOperation::Delete => (CountedOperation::Delete, InFlight::Delete { namespace }, 0),
            DirectOperation::Exist => {
                let return_length = matches!(self.key, CommandKey::Data(_));
                (CountedOperation::Exist, InFlight::Exist { return_length }, 0)
            }
        };
        connection.counters.count_operation(counted);
        connection.complete_command((command_id, 0), namespace, in_flight, outcome);
        Some(bytes)
    }
}

impl<'a, D: DirectBackend> DirectCommand<'a, D> for ReadCommand {
    type Begun = ();

    const LONG_WAY: ReadCommand = ReadCommand { range: LbaRange { lba: Lba(0), blocks: 0 }, bytes: 0 };

    #[inline(always)]
    fn check(capsule: &PlainCapsule<'a>, context: &CommandContext<'_>) -> Option<ReadCommand> {
        // Of the check that follows, the compiler keeps what concerns this opcode.
        if capsule.sqe.opcode != nvm::opcode::READ {
            return None;
        }
        let sgl = capsule.sqe.sgl.check().ok()?;
        match nvm_commands::check(capsule.sqe, sgl, context).ok()? {
            IoCommand::Block(BlockCommand { command: NvmCommand::Read { range }, range_bytes, .. }) => {
                Some(ReadCommand { range, bytes: range_bytes })
            }
            _ => None,
        }
    }

    #[inline(always)]
    fn begin(&self, direct: &mut D) -> Option<()> {
        direct.prefetch_blocks(self.range).then_some(())
    }

    #[inline(always)]
    fn advance(_: &mut [()], _: &mut D) {}

    #[inline(always)]
    fn complete(
        &self,
        (): &(),
        sqe: &Sqe,
        connection: &mut Connection,
        pool: &BufferPool,
        direct: &mut D,
    ) -> Option<usize> {
        let in_flight = InFlight::Blocks(BlockOp::Read { lba: self.range.lba, bytes: self.bytes });
        let writer = &mut connection.pdu_writer;
        direct.read_blocks(self.range, |blocks| {
            let blocks_bytes = blocks.as_bytes().len();
            let dw0 = io_commands::data_dw0(in_flight, blocks_bytes);
            writer.write_data_and_success(sqe.command_id(), blocks, blocks_bytes, dw0, pool)
        })?;
        connection.counters.count_operation(CountedOperation::Read);
        connection.counters.count_sent_data(in_flight, self.bytes as usize);
        Some(self.bytes as usize)
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
    #[inline]
    pub(super) fn receive_group<D: DirectBackend>(
        &mut self,
        now: Nanos,
        bytes: &[u8],
        pool: &BufferPool,
        requests: &mut Vec<IoRequest>,
        direct: &mut D,
    ) -> Option<ReceiveStep> {
        self.target.namespace_directory.refresh(&mut self.namespaces);
        let first = PlainCapsule::recognize(bytes, self.in_capsule_bytes_max())?;
        match self.namespaces.get(first.sqe.namespace())?.kind {
            NamespaceKind::KeyValue { .. } => {
                self.receive_group_of::<KeyCommand<'_>, D>(now, bytes, pool, requests, direct)
            }
            NamespaceKind::Block { .. } => {
                self.receive_group_of::<ReadCommand, D>(now, bytes, pool, requests, direct)
            }
        }
    }

    /// [`Connection::receive_group`] for the command set of the first capsule's namespace. REQUIRES: the namespaces are current.
    #[inline(never)]
    fn receive_group_of<'a, C: DirectCommand<'a, D>, D: DirectBackend>(
        &mut self,
        now: Nanos,
        bytes: &'a [u8],
        pool: &BufferPool,
        requests: &mut Vec<IoRequest>,
        direct: &mut D,
    ) -> Option<ReceiveStep> {
        let namespace = PlainCapsule::recognize(bytes, self.in_capsule_bytes_max())?.sqe.namespace();
        if !direct.select(namespace) {
            return None;
        }
        let mut group = SmallVec::<[GroupedCommand<'a, C>; GROUP_COMMANDS_MAX]>::new();
        let mut begun = SmallVec::<[C::Begun; GROUP_COMMANDS_MAX]>::new();
        // What fails all commands of the namespace is reported by the long way.
        let context = self.command_context(namespace).ok()?;
        let data_bytes_max = context.config.in_capsule_bytes;
        let mut rest = bytes;
        while group.len() < GROUP_COMMANDS_MAX
            && let Some(capsule) = PlainCapsule::recognize(rest, data_bytes_max)
            && capsule.sqe.opcode != FABRICS_OPCODE
            && capsule.sqe.namespace() == namespace
        {
            rest = &rest[capsule.pdu_bytes()..];
            let Some(command) = C::check(&capsule, &context) else {
                group.push(GroupedCommand { capsule, command: C::LONG_WAY });
                break;
            };
            group.push(GroupedCommand { capsule, command });
            // From where it is now: a key in the SQE is copied there.
            match group.last().and_then(|grouped| grouped.command.begin(direct)) {
                Some(begun_command) => begun.push(begun_command),
                None => break,
            }
        }
        if group.is_empty() {
            return None;
        }
        if group.len() > 1 {
            // A set of remainders is cheap, and usually as large as the group.
            let id_bits = group.iter().fold(0_u64, |bits, command| bits | 1 << (command.id() % 64));
            if id_bits.count_ones() as usize != group.len() && has_repeated_id(&group) {
                // The slots of the long way refuse all but the first.
                begun.clear();
            }
            C::advance(&mut begun, direct);
        }
        direct.begin_execution();
        let (mut consumed_bytes, mut completed, mut data_bytes) = (0, 0, 0);
        let mut stalled = None;
        let (mut unsent_bytes, mut unsent_bytes_max) = (self.unsent_bytes(), self.unsent_bytes_max(pool));
        for (index, GroupedCommand { capsule, command }) in group.iter().enumerate() {
            // What may not begin now, the long way delays or refuses.
            if unsent_bytes <= unsent_bytes_max
                && self.slots.may_take(capsule.sqe.command_id())
                && let Some(begun) = begun.get(index)
                && let Some(bytes) = command.complete(begun, capsule.sqe, self, pool, direct)
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
            match self.handle_command(now, sqe, data, pool, requests) {
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
}
