//! Accepts the commands of a connection: rejects, completes, requests data for, or submits each.
//!
//! In: an SQE and its capsule. Out: a completion, an R2T, or an [`IoRequest`]; or `Ok(Some(stall))` if the
//! command must be passed again later, in which case nothing has changed.

use super::pdu_receive::ReceiveStep;
use super::state::{Capsule, CloseReason, Connection, ConnectionState, IoQueue, StallReason};
use super::transfers::transfer_budget;
use crate::command_plan::{
    CapsuleData, CheckedCommand, CommandAction, CommandContext, CommandPlan, InFlight, IoCommand,
    PayloadLayout, PendingCommand,
};
use crate::command_slots::{CommandSlots, SlotState, Transfer};
use crate::controller::ControllerType;
use crate::io_commands;
use crate::io_request::{IoRequest, RequestOperation};
use crate::iterator_commands;
use crate::namespace_info::NamespaceKind;
use crate::subsystem::ConnectError;
use octokv_base::{BufferPool, NamespaceId, Nanos};
use octokv_wire::fabrics::{
    self, ATTRIBUTE_NO_FLOW_CONTROL, CONNECT_DATA_BYTES, ConnectResponse, UncheckedConnectData,
};
use octokv_wire::iterator::IteratorCommand;
use octokv_wire::kv::KvCommand;
use octokv_wire::pdu::PlainCapsule;
use octokv_wire::queue_entry::FABRICS_OPCODE;
use octokv_wire::{PduError, SglKind, Sqe, Status};

type AcceptResult = Result<Option<StallReason>, PduError>;

/// The most unsent bytes with which a connection that is not yet connected accepts a command.
const UNCONNECTED_BYTES_MAX: u64 = 4096;
const ACCEPTED: AcceptResult = Ok(None);
impl Connection {
    /// Accepts one command as far as that is possible now.
    ///
    /// # Errors
    /// A protocol violation that ends the connection: more commands than the queue has entries.
    pub(super) fn handle_command(
        &mut self,
        now: Nanos,
        sqe: &Sqe,
        capsule: Capsule<'_>,
        pool: &BufferPool,
        requests: &mut Vec<IoRequest>,
    ) -> AcceptResult {
        if !self.has_response_space(pool) {
            return Ok(Some(StallReason::SendBuffer));
        }
        match self.state() {
            ConnectionState::AwaitConnect { .. } => {
                self.handle_connect(now, sqe, capsule);
                return ACCEPTED;
            }
            ConnectionState::Admin(_) | ConnectionState::Discovery(_) | ConnectionState::Io(_) => {}
            ConnectionState::AwaitIcReq { .. }
            | ConnectionState::Terminating { .. }
            | ConnectionState::Closed => {
                unreachable!("a command arrived in {:?}", self.state())
            }
        }
        let command_id = sqe.command_id();
        if self.slots.is_full() {
            // With no request in flight, only data behind this command could free a slot.
            let has_in_flight = self.slots.in_flight() > 0;
            return if has_in_flight {
                Ok(Some(StallReason::Slots))
            } else {
                Err(PduError::QueueOverrun { command_id })
            };
        }
        if self.slots.is_id_in_use(command_id) && !self.release_conflicting_event(sqe) {
            self.fail_command(sqe, Status::COMMAND_ID_CONFLICT.do_not_retry());
            return ACCEPTED;
        }
        if capsule.has_bad_digest {
            self.counters.digest_errors += 1;
            self.fail_command(sqe, Status::TRANSIENT_TRANSPORT_ERROR);
            return ACCEPTED;
        }
        if matches!(self.state(), ConnectionState::Io(_)) {
            if sqe.opcode == FABRICS_OPCODE {
                self.handle_io_fabrics(now, sqe);
                return ACCEPTED;
            }
            return Ok(self.submit_or_fail(sqe, capsule.data, pool, requests));
        }
        self.handle_admin_command(now, sqe, capsule.data, requests);
        ACCEPTED
    }

    /// Accepts a command of an I/O queue from a capsule without digests. `None`, and nothing has changed, if the command is
    /// none that just takes a slot: [`Connection::handle_command`] has to see it. REQUIRES: the connection is an I/O queue.
    #[inline]
    pub(super) fn handle_plain_capsule(
        &mut self,
        capsule: &PlainCapsule<'_>,
        pool: &BufferPool,
        requests: &mut Vec<IoRequest>,
    ) -> Option<ReceiveStep> {
        let sqe = capsule.sqe;
        let is_usual = sqe.opcode != FABRICS_OPCODE
            && self.slots.may_take(sqe.command_id())
            && self.has_response_space(pool);
        if !is_usual {
            return None;
        }
        Some(match self.submit_or_fail(sqe, capsule.data, pool, requests) {
            None => ReceiveStep::Consumed(capsule.pdu_bytes()),
            Some(stall) => ReceiveStep::Stalled(stall),
        })
    }

    /// Submits a command of an I/O queue, or completes it with its error.
    #[inline]
    fn submit_or_fail(
        &mut self,
        sqe: &Sqe,
        data: &[u8],
        pool: &BufferPool,
        requests: &mut Vec<IoRequest>,
    ) -> Option<StallReason> {
        let checked = self.check_io_command(sqe);
        // By reference: a checked command is large.
        let submitted = match &checked {
            Ok(checked) => self.submit_checked(sqe, checked, data, pool, requests),
            Err(status) => Err(*status),
        };
        match submitted {
            Ok(stall) => stall,
            Err(status) => {
                self.fail_command(sqe, status);
                None
            }
        }
    }

    /// Whether the send buffer has space for another response.
    #[inline]
    pub(super) fn has_response_space(&self, pool: &BufferPool) -> bool {
        self.unsent_bytes() <= self.unsent_bytes_max(pool)
    }

    /// The bytes of unsent responses. Those of requests in flight count, which bounds the memory of a host that does not read.
    #[inline]
    pub(super) fn unsent_bytes(&self) -> u64 {
        self.pdu_writer.send_buffer.unsent_bytes() as u64 + self.slots.response_bytes()
    }

    /// The most unsent bytes with which a command is accepted.
    #[inline]
    pub(super) fn unsent_bytes_max(&self, pool: &BufferPool) -> u64 {
        match self.state() {
            ConnectionState::AwaitConnect { .. } => UNCONNECTED_BYTES_MAX,
            // A connection may hold at most as much as is free (dynamic thresholds, Choudhury and Hahne,
            // 1998): of n connections that do not read, each holds at most 1/(n+1) of the pool.
            _ => self.target.config().send_buffer_bytes_max.min(pool.free_bytes()) as u64,
        }
    }

    /// Releases an event request, without a completion, whose command identifier a Fabrics command reuses.
    ///
    /// SPDK's host forgets its event requests at shutdown and reuses their identifiers for the property
    /// commands of the shutdown, which would fail with an identifier conflict.
    #[cold]
    fn release_conflicting_event(&mut self, sqe: &Sqe) -> bool {
        let event_slot = self.slots.find_event_request(Some(sqe.command_id()));
        let released_slot = event_slot.filter(|_| sqe.opcode == FABRICS_OPCODE);
        if let Some(slot) = released_slot {
            self.slots.release(slot);
        }
        released_slot.is_some()
    }

    /// Checks a command of an I/O queue.
    ///
    /// # Errors
    /// The status with which the command fails.
    #[inline]
    fn check_io_command(&mut self, sqe: &Sqe) -> Result<CheckedCommand, Status> {
        self.target.namespace_directory.refresh(&mut self.namespaces);
        io_commands::check(sqe, &self.command_context(sqe.namespace())?)
    }

    /// What checks the commands of an I/O queue on a namespace. REQUIRES: the namespaces were refreshed since they arrived.
    ///
    /// # Errors
    /// The status with which all of them fail.
    #[inline]
    pub(super) fn command_context(&self, namespace: NamespaceId) -> Result<CommandContext<'_>, Status> {
        let entry = self.namespaces.entry(namespace);
        let entry = entry.ok_or(Status::INVALID_NAMESPACE.do_not_retry())?;
        if let Some(status) = entry.ana_error {
            return Err(status);
        }
        let ConnectionState::Io(queue) = self.state() else {
            unreachable!("an I/O command in {:?}", self.state())
        };
        if !queue.all_command_sets && matches!(entry.info.kind, NamespaceKind::KeyValue { .. }) {
            return Err(Status::INVALID_NAMESPACE.do_not_retry());
        }
        Ok(CommandContext {
            namespace: &entry.info,
            namespace_serial: entry.serial,
            config: self.target.config(),
            transfer_bytes_max: self.target.transfer_bytes_max(),
            write_cache_enabled: queue.controller.is_write_cache_enabled(),
        })
    }

    /// Submits a checked command of an I/O queue.
    #[inline]
    fn submit_checked(
        &mut self,
        sqe: &Sqe,
        checked: &CheckedCommand,
        data: &[u8],
        pool: &BufferPool,
        requests: &mut Vec<IoRequest>,
    ) -> Result<Option<StallReason>, Status> {
        let CheckedCommand { namespace, namespace_serial, sgl, .. } = *checked;
        if let IoCommand::KeyValue(KvCommand::Store { key, options, value_bytes }, layout) = checked.command
            && let Ok(CapsuleData::Complete(data)) = CapsuleData::check(sgl, data, value_bytes)
            && let Some(mut record) = pool.take(layout.value_offset(key.len()) + data.len())
        {
            // The usual Store: as below, with fewer moves.
            record[layout.value_offset(key.len())..].copy_from_slice(data);
            let slot = self.slots.take_in_flight(sqe.command_id(), namespace, InFlight::Store);
            let operation =
                RequestOperation::Store { key: key.into(), mode: options.mode, record, value_bytes };
            self.push_request(slot, namespace, operation, requests);
            return Ok(None);
        }
        if let IoCommand::Iterator(command) = checked.command {
            return match self.plan_iterator((command, sgl), namespace, namespace_serial)? {
                Some(plan) => self.follow_plan(plan, sqe, checked, data, pool, requests),
                None => Ok(Some(StallReason::IteratorTurn)),
            };
        }
        self.follow_plan(io_commands::plan(checked), sqe, checked, data, pool, requests)
    }

    /// Does the next step of a command.
    #[inline(always)] // The plan is then no value: its parts go where they are needed.
    fn follow_plan(
        &mut self,
        plan: CommandPlan,
        sqe: &Sqe,
        checked: &CheckedCommand,
        data: &[u8],
        pool: &BufferPool,
        requests: &mut Vec<IoRequest>,
    ) -> Result<Option<StallReason>, Status> {
        let CheckedCommand { namespace, namespace_serial, sgl, .. } = *checked;
        match plan {
            CommandPlan::Submit(operation, in_flight) => {
                let slot = self.slots.take_in_flight(sqe.command_id(), namespace, in_flight);
                self.push_request(slot, namespace, operation, requests);
                Ok(None)
            }
            CommandPlan::Complete(status) => {
                self.respond(sqe.command_id(), status, 0, 0);
                Ok(None)
            }
            CommandPlan::ReceiveData { pending, layout, bytes } => {
                let in_capsule = match CapsuleData::check(sgl, data, bytes)? {
                    CapsuleData::Complete(data) => data,
                    CapsuleData::Requested => {
                        let now = self.last_tick_at;
                        let transfer =
                            Transfer::new(namespace, namespace_serial, pending, layout, bytes, now);
                        self.slots.take(sqe.command_id(), SlotState::AwaitingBuffer(transfer));
                        self.grant_transfers(pool);
                        return Ok(None);
                    }
                };
                let stall = self.submit(sqe, pending, layout, in_capsule, pool, requests);
                // The missing buffer could only come from transfers whose data is queued behind this
                // command.
                let receiving_bytes = self.slots.receiving_bytes();
                if stall.is_some() && receiving_bytes > transfer_budget(pool.budget_bytes(), true) {
                    return Err(Status::COMMAND_INTERRUPTED);
                }
                Ok(stall)
            }
        }
    }

    /// The next step of a command over iterators; `None` if others on the same iterator have to end first.
    ///
    /// # Errors
    /// The status with which it fails.
    #[cold]
    fn plan_iterator(
        &mut self,
        command: (IteratorCommand, SglKind),
        namespace: NamespaceId,
        namespace_serial: u64,
    ) -> Result<Option<CommandPlan>, Status> {
        let ConnectionState::Io(queue) = &self.state else {
            unreachable!("an I/O command in {:?}", self.state())
        };
        let iterators_max = self.target.config().iterators_max;
        let namespace = (namespace, namespace_serial);
        let (now, waiting) = (self.last_tick_at, &mut self.waiting_turn);
        iterator_commands::plan(command, &queue.controller, iterators_max, namespace, now, waiting)
    }

    /// Submits a command whose data is complete in `data`, or returns the missing resource.
    fn submit(
        &mut self,
        sqe: &Sqe,
        pending: PendingCommand,
        layout: PayloadLayout,
        data: &[u8],
        pool: &BufferPool,
        requests: &mut Vec<IoRequest>,
    ) -> Option<StallReason> {
        let namespace = sqe.namespace();
        let action = if pending.needs_owned_buffer() {
            let Some(mut buffer) = pool.take(layout.buffer_bytes(data.len() as u32)) else {
                return Some(StallReason::Buffers);
            };
            layout.copy(&mut buffer, 0, data);
            pending.into_action(layout, buffer, namespace)
        } else {
            pending.into_action_from(data, namespace)
        };
        match action {
            CommandAction::Submit(operation, in_flight) => {
                let slot = self.slots.take_in_flight(sqe.command_id(), namespace, in_flight);
                self.push_request(slot, namespace, operation, requests);
            }
            CommandAction::Complete(status) if status.is_success() => {
                self.respond(sqe.command_id(), status, 0, 0)
            }
            CommandAction::Complete(status) => self.fail_command(sqe, status),
        }
        None
    }

    /// Submits a command after the last byte of its data was received.
    pub(super) fn submit_received(&mut self, slot: u16, requests: &mut Vec<IoRequest>) {
        let SlotState::Receiving(transfer, buffer) = self.slots.set_state(slot, SlotState::Free) else {
            unreachable!("slot {slot} receives no data");
        };
        let Transfer { namespace, namespace_serial, pending, layout, .. } = transfer;
        self.target.namespace_directory.refresh(&mut self.namespaces);
        // The namespace may have been removed meanwhile, and its identifier reused.
        let is_same_namespace =
            self.namespaces.entry(namespace).is_some_and(|entry| entry.serial == namespace_serial);
        let action = if is_same_namespace {
            pending.into_action(layout, buffer, namespace)
        } else {
            CommandAction::Complete(Status::INVALID_NAMESPACE.do_not_retry())
        };
        match action {
            CommandAction::Submit(operation, in_flight) => {
                self.slots.set_state(slot, SlotState::InFlight(in_flight));
                self.slots.set_namespace(slot, namespace);
                self.push_request(slot, namespace, operation, requests);
            }
            CommandAction::Complete(status) => {
                let (command_id, _) = self.slots.release(slot);
                if !status.is_success() {
                    self.record_failure(command_id, namespace, None, status);
                }
                self.respond(command_id, status, 0, 0);
            }
        }
    }

    /// A Fabrics command on an I/O queue: Disconnect is the only valid one.
    fn handle_io_fabrics(&mut self, now: Nanos, sqe: &Sqe) {
        self.counters.admin_commands += 1;
        match fabrics::FabricsCommand::check(sqe) {
            Ok(fabrics::FabricsCommand::Disconnect) => {
                self.respond(sqe.command_id(), Status::SUCCESS, 0, 0);
                self.close_after_drain(now, CloseReason::Disconnected);
            }
            Ok(fabrics::FabricsCommand::Connect(_)) => {
                self.fail_command(sqe, Status::COMMAND_SEQUENCE_ERROR.do_not_retry());
            }
            Ok(
                fabrics::FabricsCommand::PropertyGet { .. }
                | fabrics::FabricsCommand::PropertySet { .. }
                | fabrics::FabricsCommand::AuthenticationSend
                | fabrics::FabricsCommand::AuthenticationReceive,
            ) => self.fail_command(sqe, Status::INVALID_OPCODE.do_not_retry()),
            Err(status) => self.fail_command(sqe, status),
        }
    }

    fn handle_connect(&mut self, now: Nanos, sqe: &Sqe, capsule: Capsule<'_>) {
        self.counters.admin_commands += 1;
        if let Err(error) = self.try_connect(now, sqe, capsule) {
            self.connect_error = Some(error.status);
            self.respond(sqe.command_id(), error.status, error.dw0, 0);
        }
    }

    fn try_connect(&mut self, now: Nanos, sqe: &Sqe, capsule: Capsule<'_>) -> Result<(), ConnectError> {
        let connect = match fabrics::FabricsCommand::check(sqe) {
            Ok(fabrics::FabricsCommand::Connect(connect)) if sqe.opcode == FABRICS_OPCODE => connect,
            _ => return Err(ConnectError::from_status(Status::COMMAND_SEQUENCE_ERROR)),
        };
        if capsule.has_bad_digest {
            self.counters.digest_errors += 1;
            return Err(ConnectError { status: Status::TRANSIENT_TRANSPORT_ERROR, dw0: 0 });
        }
        let data = capsule.data.get(..CONNECT_DATA_BYTES).and_then(UncheckedConnectData::new);
        let data = data.ok_or(ConnectError::from_status(Status::INVALID_SGL_LENGTH))?.check()?;
        self.set_host_nqn(data.host);
        if !self.within_connection_limit {
            return Err(ConnectError { status: Status::CONNECT_CONTROLLER_BUSY, dw0: 0 });
        }
        let admission = self.target.admit_queue(now, &connect, &data)?;
        let controller = admission.controller;
        let no_flow_control = connect.attributes & ATTRIBUTE_NO_FLOW_CONTROL != 0;
        // `admit_queue` limits the entries to a 16-bit setting.
        let entries = connect.entries as u16;
        self.pdu_writer.set_queue(entries, !no_flow_control);
        self.slots = CommandSlots::new(entries);
        let connected = ConnectResponse { controller_id: controller.id, authentication_required: false };
        self.set_state(match (connect.queue_id, controller.controller_type) {
            (0, ControllerType::Io) => ConnectionState::Admin(controller),
            (0, ControllerType::Discovery) => ConnectionState::Discovery(controller),
            (id, _) => {
                let all_command_sets = controller.are_all_command_sets_enabled();
                ConnectionState::Io(IoQueue {
                    controller,
                    id,
                    generation: admission.generation,
                    all_command_sets,
                })
            }
        });
        self.respond(sqe.command_id(), Status::SUCCESS, connected.encode(), 0);
        Ok(())
    }
}
