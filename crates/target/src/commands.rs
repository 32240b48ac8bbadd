//! What a connection does with a command: refuse it, answer it, ask for its data, or hand it on.
//!
//! In: an entry and its capsule. Out: a completion, an R2T, or a [`Request`]; `Ok(Some(stall))` when it
//! must be given again later, and then nothing has changed.

use crate::admin::{self, View};
use crate::connection::{Closing, Connection, IoQueue, Stall, State};
use crate::controller::{Controller, Purpose};
use crate::errors::Failure;
use crate::intake::{Capsule, transfer_budget};
use crate::kv::{self, Intent, Plan};
use crate::request::{Operation, Request};
use crate::slots::{Landing, Phase, Slots, Transfer};
use crate::statistics::Counts;
use crate::subsystem::Refusal;
use octokv_base::{NamespaceId, Nanos, Pool};
use octokv_wire::command::{FABRICS, admin as opcode};
use octokv_wire::fabrics::{
    self, ATTRIBUTE_NO_FLOW_CONTROL, CONNECT_DATA_BYTES, Connected, UncheckedConnectData,
};
use octokv_wire::{Fault, SglKind, Sqe, Status, extension};
use std::sync::Arc;

type Taken = Result<Option<Stall>, Fault>;

/// Unsent bytes above which a connection that is not yet anybody's takes no further command.
const UNCONNECTED_BYTES_MAX: u64 = 4096;
const DONE: Taken = Ok(None);
/// Memory for pages that a connection keeps between admin commands, in bytes.
const PAGE_KEEP_BYTES: usize = 8192;

impl Connection {
    /// Does what a command asks, as far as it can be done now.
    pub(crate) fn take_command(
        &mut self,
        now: Nanos,
        sqe: &Sqe,
        capsule: Capsule<'_>,
        pool: &Pool,
        requests: &mut Vec<Request>,
    ) -> Taken {
        // What is at the engine counts as if it were answered: a host that does not read holds no more.
        let owed = self.replies.outbox.bytes() as u64 + self.slots.answer_bytes();
        let most = match self.state() {
            State::AwaitConnect { .. } => UNCONNECTED_BYTES_MAX,
            _ => self.target.settings().outbox_bytes_max as u64,
        };
        if owed > most {
            return Ok(Some(Stall::Outbox));
        }
        match self.state() {
            State::AwaitConnect { .. } => {
                self.connect(now, sqe, capsule);
                return DONE;
            }
            State::Admin(_) | State::Discovery(_) | State::Io(_) => {}
            State::AwaitIcReq { .. } | State::Terminating { .. } | State::Closed => {
                unreachable!("a command was let through in {:?}", self.state())
            }
        }
        let command_id = sqe.command_id();
        if self.slots.is_full() {
            // With nothing at the engine only the host could free a slot, by data behind this command.
            let running = self.slots.running() > 0;
            return if running { Ok(Some(Stall::Slots)) } else { Err(Fault::QueueOverrun { command_id }) };
        }
        if self.slots.has(command_id) {
            self.refuse(sqe, Status::COMMAND_ID_CONFLICT.do_not_retry());
            return DONE;
        }
        if capsule.is_damaged {
            self.counts.digest_errors += 1;
            self.refuse(sqe, Status::TRANSIENT_TRANSPORT_ERROR);
            return DONE;
        }
        if matches!(self.state(), State::Io(_)) {
            if sqe.opcode == FABRICS {
                self.io_fabrics(now, sqe);
                return DONE;
            }
            return match self.take_io(sqe, capsule.data, pool, requests) {
                Ok(stall) => Ok(stall),
                Err(status) => {
                    self.refuse(sqe, status);
                    DONE
                }
            };
        }
        self.take_admin(now, sqe);
        DONE
    }

    /// A command of an I/O queue.
    #[inline]
    fn take_io(
        &mut self,
        sqe: &Sqe,
        data: &[u8],
        pool: &Pool,
        requests: &mut Vec<Request>,
    ) -> Result<Option<Stall>, Status> {
        let sgl = sqe.sgl.check()?;
        let id = sqe.namespace();
        let (index, namespace) = self.target.namespace(id).ok_or(Status::INVALID_NAMESPACE.do_not_retry())?;
        let transfer_max = self.target.settings().value_bytes_max;
        match kv::plan(sqe, index as u32, namespace, sgl.bytes(), transfer_max)? {
            Plan::Launch(operation, running) => {
                let slot = self.slots.take(sqe.command_id(), Phase::Running(running));
                self.push(slot, id, operation, requests);
                Ok(None)
            }
            Plan::Data { intent, landing, bytes } => {
                let in_capsule = match sgl {
                    SglKind::InCapsule { bytes: there } if there as usize > data.len() => {
                        return Err(Status::INVALID_SGL_LENGTH.do_not_retry());
                    }
                    _ if bytes > sgl.bytes() => return Err(Status::INVALID_SGL_LENGTH.do_not_retry()),
                    SglKind::InCapsule { .. } => &data[..bytes as usize],
                    SglKind::Transport { .. } if bytes > 0 => {
                        self.expect_data(sqe.command_id(), intent, landing, bytes, pool);
                        return Ok(None);
                    }
                    SglKind::None | SglKind::Transport { .. } => &[],
                };
                let stall = self.launch(sqe.command_id(), id, intent, landing, in_capsule, pool, requests);
                // The buffer would have to come from transfers whose data is behind this command.
                let mine = self.slots.receiving_bytes();
                if stall.is_some() && mine > transfer_budget(pool.budget_bytes(), true) {
                    return Err(Status::COMMAND_INTERRUPTED);
                }
                Ok(stall)
            }
        }
    }

    /// A command whose data comes later: its R2T goes out when there is a buffer.
    fn expect_data(&mut self, command_id: u16, intent: Intent, landing: Landing, bytes: u32, pool: &Pool) {
        let transfer = Transfer { intent, landing, expected: bytes, received: 0, damaged: false };
        self.slots.take(command_id, Phase::Waiting(transfer));
        self.grant(pool);
    }

    /// A command all of whose data is `data`.
    #[allow(clippy::too_many_arguments)] // One command's parts; a struct for one call says no more.
    fn launch(
        &mut self,
        command_id: u16,
        id: NamespaceId,
        intent: Intent,
        landing: Landing,
        data: &[u8],
        pool: &Pool,
        requests: &mut Vec<Request>,
    ) -> Option<Stall> {
        let (operation, running) = match intent {
            Intent::Long { namespace, command } if !matches!(command, extension::Command::Store { .. }) => {
                kv::launch_keyed(command, data, namespace)
            }
            Intent::Store { .. } | Intent::Long { .. } => {
                let Some(mut buffer) = pool.take(landing.buffer_bytes(data.len() as u32)) else {
                    return Some(Stall::Buffers);
                };
                landing.copy(&mut buffer, 0, data);
                let (_, operation, running) = kv::launch(intent, buffer);
                (operation, running)
            }
        };
        let slot = self.slots.take(command_id, Phase::Running(running));
        self.push(slot, id, operation, requests);
        None
    }

    /// The data of a slot's command is here.
    pub(crate) fn launch_received(&mut self, slot: u16, requests: &mut Vec<Request>) {
        let Phase::Receiving(transfer, buffer) = self.slots.set(slot, Phase::Free) else {
            unreachable!("slot {slot} has no data");
        };
        let (index, operation, running) = kv::launch(transfer.intent, buffer);
        self.slots.set(slot, Phase::Running(running));
        let id = self.target.namespaces()[index as usize].id;
        self.push(slot, id, operation, requests);
    }

    #[inline]
    fn push(&mut self, slot: u16, namespace: NamespaceId, operation: Operation, requests: &mut Vec<Request>) {
        count(&mut self.counts, &operation);
        requests.push(Request { slot: u32::from(slot), namespace, operation });
    }

    /// A Fabrics command on an I/O queue: only Disconnect means something there.
    fn io_fabrics(&mut self, now: Nanos, sqe: &Sqe) {
        self.counts.admin_commands += 1;
        match fabrics::Command::check(sqe) {
            Ok(fabrics::Command::Disconnect) => {
                self.respond(sqe.command_id(), Status::SUCCESS, 0, 0);
                self.linger(now, Closing::Disconnected);
            }
            Ok(fabrics::Command::Connect(_)) => {
                self.refuse(sqe, Status::COMMAND_SEQUENCE_ERROR.do_not_retry());
            }
            Ok(
                fabrics::Command::PropertyGet { .. }
                | fabrics::Command::PropertySet { .. }
                | fabrics::Command::AuthenticationSend
                | fabrics::Command::AuthenticationReceive,
            ) => self.refuse(sqe, Status::INVALID_OPCODE.do_not_retry()),
            Err(status) => self.refuse(sqe, status),
        }
    }

    fn connect(&mut self, now: Nanos, sqe: &Sqe, capsule: Capsule<'_>) {
        self.counts.admin_commands += 1;
        if let Err(refusal) = self.try_connect(now, sqe, capsule) {
            self.respond(sqe.command_id(), refusal.status, refusal.dw0, 0);
        }
    }

    fn try_connect(&mut self, now: Nanos, sqe: &Sqe, capsule: Capsule<'_>) -> Result<(), Refusal> {
        let connect = match fabrics::Command::check(sqe) {
            Ok(fabrics::Command::Connect(connect)) if sqe.opcode == FABRICS => connect,
            _ => return Err(Refusal::of(Status::COMMAND_SEQUENCE_ERROR)),
        };
        if capsule.is_damaged {
            self.counts.digest_errors += 1;
            return Err(Refusal { status: Status::TRANSIENT_TRANSPORT_ERROR, dw0: 0 });
        }
        let data = capsule.data.get(..CONNECT_DATA_BYTES).and_then(UncheckedConnectData::new);
        let data = data.ok_or(Refusal::of(Status::INVALID_SGL_LENGTH))?.check()?;
        if !self.has_room {
            return Err(Refusal { status: Status::CONNECT_CONTROLLER_BUSY, dw0: 0 });
        }
        let admission = self.target.admit(now, &connect, &data)?;
        let controller = admission.controller;
        let no_flow_control = connect.attributes & ATTRIBUTE_NO_FLOW_CONTROL != 0;
        // `admit` has bounded the entries by settings of 16 bits.
        let entries = connect.entries as u16;
        self.replies.set_queue(entries, !no_flow_control);
        self.slots = Slots::new(entries);
        let connected = Connected { controller_id: controller.id, authentication_required: false };
        self.set_state(match (connect.queue_id, controller.purpose) {
            (0, Purpose::Io) => State::Admin(controller),
            (0, Purpose::Discovery) => State::Discovery(controller),
            (id, _) => State::Io(IoQueue { controller, id, generation: admission.generation }),
        });
        self.respond(sqe.command_id(), Status::SUCCESS, connected.encode(), 0);
        Ok(())
    }

    /// A command of an admin queue.
    fn take_admin(&mut self, now: Nanos, sqe: &Sqe) {
        self.counts.admin_commands += 1;
        let Some(controller) = self.state().controller().cloned() else {
            unreachable!("an admin command in {:?}", self.state());
        };
        let view = View { target: &Arc::clone(&self.target), controller: &controller, local: self.local };
        match sqe.opcode {
            opcode::ASYNC_EVENT_REQUEST => self.hold_event_request(&view, sqe),
            opcode::ABORT => self.abort(&view, sqe),
            _ => self.answer_admin(&view, now, sqe),
        }
    }

    fn answer_admin(&mut self, view: &View<'_>, now: Nanos, sqe: &Sqe) {
        let mut page = std::mem::take(&mut self.page);
        page.clear();
        let generation = view.controller.life().generation;
        let reply = admin::execute(view, now, sqe, &mut page);
        if !reply.status.is_success() {
            self.refuse(sqe, reply.status);
        } else {
            // A host that wants less than the page gets the start of it.
            let wanted = sqe.sgl.check().map_or(0, SglKind::bytes) as usize;
            self.replies.copy(sqe.command_id(), &page[..page.len().min(wanted)]);
            self.respond(sqe.command_id(), reply.status, reply.dw0, reply.dw1);
        }
        if page.capacity() <= PAGE_KEEP_BYTES {
            self.page = page;
        }
        if view.controller.life().generation != generation {
            self.slots.drop_events();
        }
        // A log that was read may have held back the next notice.
        self.tell_events();
    }

    fn hold_event_request(&mut self, view: &View<'_>, sqe: &Sqe) {
        if !admin::may_serve(view) {
            self.refuse(sqe, Status::COMMAND_SEQUENCE_ERROR.do_not_retry());
        } else if self.slots.events() >= usize::from(self.target.settings().event_requests_max) {
            self.refuse(sqe, Status::EVENT_LIMIT_EXCEEDED.do_not_retry());
        } else {
            self.slots.take(sqe.command_id(), Phase::Event);
            self.tell_events();
        }
    }

    /// Aborts an event request; a command at the engine ends by itself, soon.
    fn abort(&mut self, view: &View<'_>, sqe: &Sqe) {
        if !admin::may_serve(view) {
            return self.refuse(sqe, Status::COMMAND_SEQUENCE_ERROR.do_not_retry());
        }
        let (queue_id, command_id) = (sqe.cdw10.get() as u16, (sqe.cdw10.get() >> 16) as u16);
        const NOT_ABORTED: u32 = 1;
        let slot = if queue_id == 0 { self.slots.event(Some(command_id)) } else { None };
        if let Some(slot) = slot {
            self.slots.release(slot);
            self.respond(command_id, Status::ABORT_REQUESTED, 0, 0);
        }
        let dw0 = if slot.is_some() { 0 } else { NOT_ABORTED };
        self.respond(sqe.command_id(), Status::SUCCESS, dw0, 0);
    }

    /// Completes event requests with the notices that are ready.
    pub(crate) fn tell_events(&mut self) {
        let Some(controller) = self.state().controller().cloned() else { return };
        self.tell_events_of(&controller);
    }

    fn tell_events_of(&mut self, controller: &Controller) {
        while let Some(slot) = self.slots.event(None) {
            let Some(event) = controller.book().events.next() else { return };
            let (command_id, _) = self.slots.release(slot);
            self.respond(command_id, Status::SUCCESS, event, 0);
        }
    }

    /// Fails a command, and notes it in the error log.
    fn refuse(&mut self, sqe: &Sqe, status: Status) {
        let queue_id = match self.state() {
            State::Io(queue) => queue.id,
            _ => 0,
        };
        let (command_id, nsid) = (sqe.command_id(), sqe.nsid.get());
        self.target.errors.note(Failure { queue_id, command_id, nsid, status });
        self.respond(command_id, status, 0, 0);
    }

    /// A completion.
    #[inline]
    pub(crate) fn respond(&mut self, command_id: u16, status: Status, dw0: u32, dw1: u32) {
        if !status.is_success() {
            let is_miss = status.is(Status::KV_KEY_DOES_NOT_EXIST) || status.is(Status::KV_KEY_EXISTS);
            let counter = if is_miss { &mut self.counts.misses } else { &mut self.counts.errors };
            *counter += 1;
        }
        self.replies.respond(command_id, status, dw0, dw1);
    }
}

#[inline]
fn count(counts: &mut Counts, operation: &Operation) {
    match operation {
        Operation::Store { value_bytes, .. } => {
            counts.stores += 1;
            counts.stored_bytes += u64::from(*value_bytes);
        }
        Operation::Retrieve { .. } => counts.retrieves += 1,
        Operation::Delete { .. } => counts.deletes += 1,
        Operation::Exist { .. } => counts.exists += 1,
        Operation::List { .. } => counts.lists += 1,
        Operation::Flush => counts.flushes += 1,
    }
}
