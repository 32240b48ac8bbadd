//! What a connection does with a command: refuse it, answer it, ask for its data, or hand it on.
//!
//! In: an entry and its capsule. Out: a completion, an R2T, or a [`Request`]; `Ok(Some(stall))` when it
//! must be given again later, and then nothing has changed.

use crate::admin_commands::{self, View};
use crate::command_slots::{Landing, Phase, Running, Slots, Transfer};
use crate::config::NamespaceKind;
use crate::connection::{Closing, Connection, IoQueue, Stall, State};
use crate::controller::{Condition, Controller, Purpose};
use crate::error_log::Failure;
use crate::io_commands::{self, Context, Intent, Launch, Plan};
use crate::io_request::{Operation, Outcome, Request};
use crate::pdu_receive::{Capsule, transfer_budget};
use crate::subsystem::Refusal;
use octokv_base::{Lba, NamespaceId, Nanos, Pool};
use octokv_wire::fabrics::{
    self, ATTRIBUTE_NO_FLOW_CONTROL, CONNECT_DATA_BYTES, Configuration, Connected, UncheckedConnectData,
};
use octokv_wire::queue_entry::{FABRICS, admin as opcode};
use octokv_wire::{Fault, SglKind, Sqe, Status};
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
            // And no connection is owed more than is left for the others (the dynamic thresholds of Choudhury and
            // Hahne, 1998): however many do not read, as much as each of them holds is free.
            _ => self.target.settings().outbox_bytes_max.min(pool.free_bytes()) as u64,
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
        if self.slots.has(command_id) && !self.gives_up_event(sqe) {
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
        self.take_admin(now, sqe, capsule.data, requests);
        DONE
    }

    /// Whether a command has the identifier of an event request that waits, which then is over without an answer.
    /// SPDK's host forgets its event requests when it shuts a controller down, and gives their identifiers to the
    /// property commands that do it: refused, it could not shut down in order.
    #[cold]
    fn gives_up_event(&mut self, sqe: &Sqe) -> bool {
        let held = self.slots.event(Some(sqe.command_id()));
        let given_up = held.filter(|_| sqe.opcode == FABRICS);
        if let Some(slot) = given_up {
            self.slots.release(slot);
        }
        given_up.is_some()
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
        self.target.table.refresh(&mut self.namespaces);
        let entry = self.namespaces.entry(sqe.namespace());
        let entry = entry.ok_or(Status::INVALID_NAMESPACE.do_not_retry())?;
        if let Some(refusal) = entry.refusal {
            return Err(refusal);
        }
        let State::Io(queue) = self.state() else { unreachable!("an I/O command in {:?}", self.state()) };
        if !queue.all_sets && matches!(entry.info.kind, NamespaceKind::KeyValue { .. }) {
            return Err(Status::INVALID_NAMESPACE.do_not_retry());
        }
        let settings = self.target.settings();
        let context = Context {
            namespace: &entry.info,
            sgl,
            listing_bytes_max: settings.value_bytes_max,
            transfer_bytes_max: settings.transfer_bytes_max(),
            write_cache: queue.controller.write_cache(),
        };
        let (namespace, serial) = (entry.info.id, entry.serial);
        match io_commands::plan(sqe, &context)? {
            Plan::Launch(operation, running) => {
                let slot = self.slots.take(sqe.command_id(), Phase::Running(running));
                self.push(slot, namespace, operation, requests);
                Ok(None)
            }
            Plan::Answer(status) => {
                self.respond(sqe.command_id(), status, 0, 0);
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
                        let (expected, received, damaged, asked, open) = (bytes, 0, false, self.ticked, 0);
                        let transfer = Transfer {
                            namespace,
                            serial,
                            intent,
                            landing,
                            expected,
                            received,
                            asked,
                            open,
                            damaged,
                        };
                        self.slots.take(sqe.command_id(), Phase::Waiting(transfer));
                        self.grant(pool);
                        return Ok(None);
                    }
                    SglKind::None | SglKind::Transport { .. } => &[],
                };
                let stall = self.launch(sqe, intent, landing, in_capsule, pool, requests);
                // The buffer would have to come from transfers whose data is behind this command.
                let mine = self.slots.receiving_bytes();
                if stall.is_some() && mine > transfer_budget(pool.budget_bytes(), true) {
                    return Err(Status::COMMAND_INTERRUPTED);
                }
                Ok(stall)
            }
        }
    }

    /// A command all of whose data is `data`.
    fn launch(
        &mut self,
        sqe: &Sqe,
        intent: Intent,
        landing: Landing,
        data: &[u8],
        pool: &Pool,
        requests: &mut Vec<Request>,
    ) -> Option<Stall> {
        let namespace = sqe.namespace();
        let launch = if intent.keeps_data() {
            let Some(mut buffer) = pool.take(landing.buffer_bytes(data.len() as u32)) else {
                return Some(Stall::Buffers);
            };
            landing.copy(&mut buffer, 0, data);
            intent.launch(buffer, namespace)
        } else {
            intent.launch_from(data, namespace)
        };
        match launch {
            Launch::Ask(operation, running) => {
                let slot = self.slots.take(sqe.command_id(), Phase::Running(running));
                self.push(slot, namespace, operation, requests);
            }
            Launch::Answer(status) if status.is_success() => self.respond(sqe.command_id(), status, 0, 0),
            Launch::Answer(status) => self.refuse(sqe, status),
        }
        None
    }

    /// The data of a slot's command is here.
    pub(crate) fn launch_received(&mut self, slot: u16, requests: &mut Vec<Request>) {
        let Phase::Receiving(transfer, buffer) = self.slots.set(slot, Phase::Free) else {
            unreachable!("slot {slot} has no data");
        };
        let Transfer { namespace, serial, intent, .. } = transfer;
        self.target.table.refresh(&mut self.namespaces);
        // The namespace may have gone meanwhile, and another one have taken its identifier.
        let is_there = self.namespaces.entry(namespace).is_some_and(|entry| entry.serial == serial);
        let launch = if is_there {
            intent.launch(buffer, namespace)
        } else {
            Launch::Answer(Status::INVALID_NAMESPACE.do_not_retry())
        };
        match launch {
            Launch::Ask(operation, running) => {
                self.slots.set(slot, Phase::Running(running));
                self.push(slot, namespace, operation, requests);
            }
            Launch::Answer(status) => {
                let (command_id, _) = self.slots.release(slot);
                if !status.is_success() {
                    self.note_failure(command_id, namespace, None, status);
                }
                self.respond(command_id, status, 0, 0);
            }
        }
    }

    #[inline]
    fn push(&mut self, slot: u16, namespace: NamespaceId, operation: Operation, requests: &mut Vec<Request>) {
        self.counts.operation(&operation);
        self.slots.set_namespace(slot, namespace);
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
            self.refused = Some(refusal.status);
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
        self.name_host(data.host);
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
            (id, _) => {
                let all_sets = controller.all_sets();
                State::Io(IoQueue { controller, id, generation: admission.generation, all_sets })
            }
        });
        self.respond(sqe.command_id(), Status::SUCCESS, connected.encode(), 0);
        Ok(())
    }

    /// A command of an admin queue.
    fn take_admin(&mut self, now: Nanos, sqe: &Sqe, data: &[u8], requests: &mut Vec<Request>) {
        self.counts.admin_commands += 1;
        let Some(controller) = self.state().controller().cloned() else {
            unreachable!("an admin command in {:?}", self.state());
        };
        if let Some(written) = admin_commands::normal_shutdown(sqe)
            && self.begin_shutdown(&controller, sqe, written, requests)
        {
            return;
        }
        let view = View { target: &Arc::clone(&self.target), controller: &controller, local: self.local };
        match sqe.opcode {
            opcode::ASYNC_EVENT_REQUEST => self.hold_event_request(&view, sqe),
            opcode::ABORT => self.abort(&view, sqe),
            _ => self.answer_admin(&view, now, sqe, data),
        }
    }

    fn answer_admin(&mut self, view: &View<'_>, now: Nanos, sqe: &Sqe, data: &[u8]) {
        let mut page = std::mem::take(&mut self.page);
        page.clear();
        let generation = view.controller.life().generation;
        let reply = admin_commands::execute(view, now, sqe, data, &mut page);
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

    /// A host that shuts its controller down finds all that it was told is written durable when it is done:
    /// every namespace is flushed before. Says whether there is something to flush.
    fn begin_shutdown(
        &mut self,
        controller: &Controller,
        sqe: &Sqe,
        written: Configuration,
        requests: &mut Vec<Request>,
    ) -> bool {
        self.target.table.refresh(&mut self.namespaces);
        let namespaces = Arc::clone(&self.namespaces);
        let is_possible = controller.purpose == Purpose::Io
            && controller.life().condition == Condition::Ready
            && !namespaces.is_empty()
            && !self.slots.shuts_down();
        if is_possible {
            let before = controller.book().configuration;
            let running = Running::ShutDown { left: namespaces.len() as u32, before, written };
            let slot = self.slots.take(sqe.command_id(), Phase::Running(running));
            for namespace in namespaces.iter() {
                self.push(slot, namespace.id, Operation::Flush, requests);
            }
        }
        is_possible
    }

    /// A flush of a shutdown ended. One that failed is told where errors are: a shutdown cannot fail.
    pub(crate) fn note_flush(&mut self, outcome: &Outcome) {
        if matches!(outcome, Outcome::Unrecovered | Outcome::WriteFault) {
            self.counts.media_errors += 1;
        }
    }

    /// The last flush of a shutdown ended.
    pub(crate) fn end_shutdown(&mut self, command_id: u16, before: Configuration, written: Configuration) {
        let State::Admin(controller) = self.state() else {
            return; // The connection ended meanwhile.
        };
        let controller = Arc::clone(controller);
        let generation = controller.life().generation;
        // The host may have reset the controller meanwhile: that stays.
        let is_as_before = controller.book().configuration == before;
        if is_as_before {
            controller.configure(written);
        }
        self.respond(command_id, Status::SUCCESS, 0, 0);
        if controller.life().generation != generation {
            self.slots.drop_events();
        }
        self.tell_events();
    }

    fn hold_event_request(&mut self, view: &View<'_>, sqe: &Sqe) {
        if !admin_commands::may_serve(view) {
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
        if !admin_commands::may_serve(view) {
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
        self.note_failure(sqe.command_id(), sqe.namespace(), None, status);
        self.respond(sqe.command_id(), status, 0, 0);
    }

    /// Notes a command that failed in the error log.
    pub(crate) fn note_failure(
        &self,
        command_id: u16,
        namespace: NamespaceId,
        lba: Option<Lba>,
        status: Status,
    ) {
        let queue_id = match self.state() {
            State::Io(queue) => queue.id,
            _ => 0,
        };
        self.target.errors.note(Failure { queue_id, command_id, nsid: namespace.0, lba, status });
    }

    /// A completion.
    #[inline]
    pub(crate) fn respond(&mut self, command_id: u16, status: Status, dw0: u32, dw1: u32) {
        if !status.is_success() {
            let counter = if is_answer(status) { &mut self.counts.misses } else { &mut self.counts.errors };
            *counter += 1;
        }
        self.replies.respond(command_id, status, dw0, dw1);
    }
}

/// Whether a status that is no success is what the host asked for, and no error.
pub(crate) fn is_answer(status: Status) -> bool {
    status.is(Status::KV_KEY_DOES_NOT_EXIST)
        || status.is(Status::KV_KEY_EXISTS)
        || status.is(Status::MEDIA_COMPARE_FAILURE)
}
