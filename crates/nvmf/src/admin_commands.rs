//! Executes admin commands from the state of the controller and the target.
//!
//! In: an SQE, its in-capsule data and the time. Out: an [`AdminResult`], and its data in `page`. The
//! connection handles event requests and aborts itself, since they need the queue.

use crate::admin_context::{AdminContext, AdminResult};
use crate::controller::{ControllerState, ControllerType};
use crate::{features, identify, log_pages};
use octokv_base::Nanos;
use octokv_wire::fabrics::{ControllerCapabilities, ControllerConfiguration, FabricsCommand, property};
use octokv_wire::queue_entry::{FABRICS_OPCODE, admin};
use octokv_wire::{Sqe, Status};

/// Executes an admin command other than event requests and aborts; `data` is its in-capsule data, `page`
/// receives the data for the host.
pub(crate) fn execute(
    context: &AdminContext<'_>,
    now: Nanos,
    sqe: &Sqe,
    data: &[u8],
    page: &mut Vec<u8>,
) -> AdminResult {
    let result = match sqe.opcode {
        FABRICS_OPCODE => fabrics(context, sqe),
        admin::KEEP_ALIVE => Ok(AdminResult::success()), // Receiving it has recorded the activity.
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

/// Whether the controller accepts admin commands: before it is enabled only Fabrics commands and Keep
/// Alive.
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
        // Connect never requires authentication.
        FabricsCommand::AuthenticationSend | FabricsCommand::AuthenticationReceive => {
            Err(Status::INVALID_OPCODE.do_not_retry())
        }
    }
}

/// The value of CC if the SQE writes CC with a normal shutdown.
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
        // Neither subsystem reset nor ready timeouts are supported, but hosts read the properties.
        (property::NSSR | property::CRTO, false) => 0,
        // Without "do not retry": nvme-cli 2.3 reads all registers, and takes only the bare status for an
        // absent one.
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
