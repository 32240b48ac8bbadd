//! Commands of an admin queue: event requests, aborts and shutdown, which need the queue; `admin_commands`
//! executes the others.

use super::state::{Connection, ConnectionState};
use crate::admin_commands;
use crate::admin_context::AdminContext;
use crate::command_plan::InFlight;
use crate::command_slots::SlotState;
use crate::controller::{Controller, ControllerState, ControllerType};
use crate::io_request::{IoRequest, RequestOperation, RequestOutcome};
use octokv_base::Nanos;
use octokv_wire::fabrics::ControllerConfiguration;
use octokv_wire::queue_entry::admin as opcode;
use octokv_wire::{SglKind, Sqe, Status};
use std::sync::Arc;

/// Capacity of the page buffer that a connection keeps between admin commands, in bytes.
const PAGE_BUFFER_RETAIN_BYTES_MAX: usize = 8192;

impl Connection {
    /// Executes a command of an admin queue.
    pub(super) fn handle_admin_command(
        &mut self,
        now: Nanos,
        sqe: &Sqe,
        data: &[u8],
        requests: &mut Vec<IoRequest>,
    ) {
        self.counters.admin_commands += 1;
        let Some(controller) = self.state().controller().cloned() else {
            unreachable!("an admin command in {:?}", self.state());
        };
        if let Some(cc_written) = admin_commands::parse_normal_shutdown(sqe)
            && self.begin_shutdown(&controller, sqe, cc_written, requests)
        {
            return;
        }
        let context = AdminContext {
            target: &Arc::clone(&self.target),
            controller: &controller,
            local_address: self.local_address,
        };
        match sqe.opcode {
            opcode::ASYNC_EVENT_REQUEST => self.hold_event_request(&context, sqe),
            opcode::ABORT => self.handle_abort(&context, sqe),
            _ => self.execute_admin(&context, now, sqe, data),
        }
    }

    fn execute_admin(&mut self, context: &AdminContext<'_>, now: Nanos, sqe: &Sqe, data: &[u8]) {
        let mut page = std::mem::take(&mut self.page_buffer);
        page.clear();
        let generation = context.controller.epoch().generation;
        let result = admin_commands::execute(context, now, sqe, data, &mut page);
        if !result.status.is_success() {
            self.fail_command(sqe, result.status);
        } else {
            // If the host's buffer is shorter than the page, it gets the start of the page.
            let host_bytes = sqe.sgl.check().map_or(0, SglKind::bytes) as usize;
            self.pdu_writer.write_data_copy(sqe.command_id(), &page[..page.len().min(host_bytes)]);
            self.respond(sqe.command_id(), result.status, result.dw0, result.dw1);
        }
        if page.capacity() <= PAGE_BUFFER_RETAIN_BYTES_MAX {
            self.page_buffer = page;
        }
        if context.controller.epoch().generation != generation {
            self.slots.release_event_requests();
        }
        // Get Log Page may have unmasked an event.
        self.deliver_async_events();
    }

    /// Starts a normal shutdown: flushes every namespace before CSTS reports completion, so that all
    /// acknowledged writes are durable. Returns false if there is nothing to flush.
    fn begin_shutdown(
        &mut self,
        controller: &Controller,
        sqe: &Sqe,
        cc_written: ControllerConfiguration,
        requests: &mut Vec<IoRequest>,
    ) -> bool {
        self.target.namespace_directory.refresh(&mut self.namespaces);
        let namespaces = Arc::clone(&self.namespaces);
        let is_possible = controller.controller_type == ControllerType::Io
            && controller.epoch().state == ControllerState::Ready
            && !namespaces.is_empty()
            && !self.slots.has_pending_shutdown();
        if is_possible {
            let cc_before = controller.lock_inner().configuration;
            let in_flight =
                InFlight::ShutDown { flushes_left: namespaces.len() as u32, cc_before, cc_written };
            let slot = self.slots.take(sqe.command_id(), SlotState::InFlight(in_flight));
            for namespace in namespaces.iter() {
                self.slots.set_namespace(slot, namespace.id);
                self.push_request(slot, namespace.id, RequestOperation::Flush, requests);
            }
        }
        is_possible
    }

    /// Counts a failed flush of a shutdown as a media error; the shutdown itself cannot fail.
    pub(super) fn record_flush_result(&mut self, outcome: &RequestOutcome) {
        if matches!(outcome, RequestOutcome::Unrecovered | RequestOutcome::WriteFault) {
            self.counters.media_errors += 1;
        }
    }

    /// Writes CC after the last flush of a shutdown.
    pub(super) fn end_shutdown(
        &mut self,
        command_id: u16,
        cc_before: ControllerConfiguration,
        cc_written: ControllerConfiguration,
    ) {
        let ConnectionState::Admin(controller) = self.state() else {
            return; // The connection has ended.
        };
        let controller = Arc::clone(controller);
        let generation = controller.epoch().generation;
        // A reset of the controller since then takes precedence.
        let is_unchanged = controller.lock_inner().configuration == cc_before;
        if is_unchanged {
            controller.write_cc(cc_written);
        }
        self.respond(command_id, Status::SUCCESS, 0, 0);
        if controller.epoch().generation != generation {
            self.slots.release_event_requests();
        }
        self.deliver_async_events();
    }

    fn hold_event_request(&mut self, context: &AdminContext<'_>, sqe: &Sqe) {
        if !admin_commands::accepts_admin_commands(context) {
            self.fail_command(sqe, Status::COMMAND_SEQUENCE_ERROR.do_not_retry());
        } else if self.slots.event_request_count() >= usize::from(self.target.config().event_requests_max) {
            self.fail_command(sqe, Status::EVENT_LIMIT_EXCEEDED.do_not_retry());
        } else {
            self.slots.take(sqe.command_id(), SlotState::EventRequest);
            self.deliver_async_events();
        }
    }

    /// Aborts an event request. Commands at the engine are not aborted: they complete on their own.
    fn handle_abort(&mut self, context: &AdminContext<'_>, sqe: &Sqe) {
        if !admin_commands::accepts_admin_commands(context) {
            return self.fail_command(sqe, Status::COMMAND_SEQUENCE_ERROR.do_not_retry());
        }
        let (queue_id, command_id) = (sqe.cdw10.get() as u16, (sqe.cdw10.get() >> 16) as u16);
        const NOT_ABORTED: u32 = 1;
        let slot = if queue_id == 0 { self.slots.find_event_request(Some(command_id)) } else { None };
        if let Some(slot) = slot {
            self.slots.release(slot);
            self.respond(command_id, Status::ABORT_REQUESTED, 0, 0);
        }
        let dw0 = if slot.is_some() { 0 } else { NOT_ABORTED };
        self.respond(sqe.command_id(), Status::SUCCESS, dw0, 0);
    }

    /// Completes event requests with pending events.
    pub(super) fn deliver_async_events(&mut self) {
        let Some(controller) = self.state().controller().cloned() else { return };
        self.deliver_async_events_of(&controller);
    }

    fn deliver_async_events_of(&mut self, controller: &Controller) {
        while let Some(slot) = self.slots.find_event_request(None) {
            let Some(event) = controller.lock_inner().async_events.take_next() else { return };
            let (command_id, _) = self.slots.release(slot);
            self.respond(command_id, Status::SUCCESS, event, 0);
        }
    }
}
