//! Admin commands: each is answered at once, from what the controller and the target know.
//!
//! In: an entry, the data of its capsule and the time. Out: a [`AdminResult`], and its data in `page`. Event requests and aborts, which
//! touch the queue itself, are the connection's.

use crate::admin_context::{AdminContext, AdminResult};
use crate::controller::{ControllerState, ControllerType};
use crate::{features, identify, log_pages};
use octokv_base::Nanos;
use octokv_wire::fabrics::{ControllerCapabilities, ControllerConfiguration, FabricsCommand, property};
use octokv_wire::queue_entry::{FABRICS_OPCODE, admin};
use octokv_wire::{Sqe, Status};

/// Does an admin command other than event requests and aborts, which came with `data`; what goes back is put
/// into `page`.
pub(crate) fn execute(
    context: &AdminContext<'_>,
    now: Nanos,
    sqe: &Sqe,
    data: &[u8],
    page: &mut Vec<u8>,
) -> AdminResult {
    let result = match sqe.opcode {
        FABRICS_OPCODE => fabrics(context, sqe),
        admin::KEEP_ALIVE => Ok(AdminResult::success()), // Any command is a sign of life.
        _ if !accepts_admin_commands(context) => Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry()),
        admin::IDENTIFY => identify::identify(context, sqe, page).map(|()| AdminResult::success()),
        admin::GET_LOG_PAGE => log_pages::get_log_page(context, sqe, page).map(|()| AdminResult::success()),
        admin::GET_FEATURES => features::get_feature(context, sqe, page),
        admin::SET_FEATURES => features::set_feature(context, now, sqe, data),
        _ => Err(Status::INVALID_OPCODE.do_not_retry()),
    };
    result.unwrap_or_else(|status| {
        page.clear();
        AdminResult::failed(status)
    })
}

/// Before it is enabled a controller takes only Fabrics commands and signs of life.
pub(crate) fn accepts_admin_commands(context: &AdminContext<'_>) -> bool {
    matches!(context.controller.epoch().state, ControllerState::Ready | ControllerState::ShutDown)
}

fn fabrics(context: &AdminContext<'_>, sqe: &Sqe) -> Result<AdminResult, Status> {
    match FabricsCommand::check(sqe)? {
        FabricsCommand::PropertyGet { offset, is_64_bit } => get_property(context, offset, is_64_bit),
        FabricsCommand::PropertySet { offset, is_64_bit: false, value } if offset == property::CC => {
            context.controller.write_cc(ControllerConfiguration(value as u32));
            Ok(AdminResult::success())
        }
        FabricsCommand::PropertySet { .. } => Err(Status::INVALID_FIELD.do_not_retry()),
        FabricsCommand::Connect(_) => Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry()),
        FabricsCommand::Disconnect => Err(Status::DISCONNECT_INVALID_QUEUE.do_not_retry()),
        // No host is asked to authenticate.
        FabricsCommand::AuthenticationSend | FabricsCommand::AuthenticationReceive => {
            Err(Status::INVALID_OPCODE.do_not_retry())
        }
    }
}

/// What an entry writes to CC, where that asks for a normal shutdown.
pub(crate) fn parse_normal_shutdown(sqe: &Sqe) -> Option<ControllerConfiguration> {
    const NORMAL: u8 = 1;
    match FabricsCommand::check(sqe) {
        Ok(FabricsCommand::PropertySet { offset: property::CC, is_64_bit: false, value })
            if sqe.opcode == FABRICS_OPCODE =>
        {
            let written = ControllerConfiguration(value as u32);
            (written.shn() == NORMAL).then_some(written)
        }
        _ => None,
    }
}

fn get_property(context: &AdminContext<'_>, offset: u32, is_64_bit: bool) -> Result<AdminResult, Status> {
    let value = match (offset, is_64_bit) {
        (property::CAP, true) => capabilities(context).encode(),
        (property::VS, false) => u64::from(identify::NVME_VERSION),
        (property::CC, false) => u64::from(context.controller.lock_inner().configuration.0),
        (property::CSTS, false) => u64::from(context.controller.csts()),
        // Hosts may look at the subsystem reset and the ready times, which this target does not have.
        (property::NSSR | property::CRTO, false) => 0,
        // Without "do not retry": nvme-cli 2.3 walks through all registers and knows only the bare status for absent.
        _ => return Err(Status::INVALID_FIELD),
    };
    Ok(AdminResult { status: Status::SUCCESS, dw0: value as u32, dw1: (value >> 32) as u32 })
}

fn capabilities(context: &AdminContext<'_>) -> ControllerCapabilities {
    ControllerCapabilities {
        queue_entries_max: u32::from(context.target.config().queue_depth),
        ready_timeout_half_seconds: 30,
        nvm: true,
        command_sets: context.controller.controller_type == ControllerType::Io,
    }
}
