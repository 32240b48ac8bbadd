//! Get and Set Features.
//!
//! Values are not saved across a restart: Set with the save bit fails. A feature that is not in the table
//! fails as an invalid field.

use crate::admin_context::{AdminContext, AdminResult};
use crate::controller::ControllerType;
use crate::namespace_info::NamespaceInfo;
use octokv_base::{NamespaceId, Nanos};
use octokv_wire::queue_entry::{csi, feature};
use octokv_wire::{Sqe, Status, log_page};

/// Data of feature 81h: the 128-bit host identifier.
const HOST_ID_BYTES: u32 = 16;
/// Data of feature 16h.
const HOST_BEHAVIOR_BYTES: usize = 512;

const INVALID_FIELD: Status = Status::INVALID_FIELD.do_not_retry();

/// SEL of Get Features; the saved value is the default.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FeatureSelect {
    Current,
    Default,
    Capabilities,
}

fn is_supported(id: u8, controller_type: ControllerType) -> bool {
    match id {
        feature::ASYNC_EVENTS | feature::KEEP_ALIVE => true,
        feature::ARBITRATION
        | feature::POWER_MANAGEMENT
        | feature::TEMPERATURE
        | feature::ERROR_RECOVERY
        | feature::WRITE_CACHE
        | feature::QUEUES
        | feature::WRITE_ATOMICITY
        | feature::HOST_BEHAVIOR
        | feature::COMMAND_SET_PROFILE
        | feature::KV_CONFIGURATION
        | feature::HOST_IDENTIFIER
        | feature::DEVICE_TOKENS => controller_type == ControllerType::Io,
        _ => false,
    }
}

fn is_changeable(id: u8) -> bool {
    !matches!(id, feature::HOST_IDENTIFIER | feature::POWER_MANAGEMENT)
}

/// The supported features of a controller type with their scopes, for log page 12h.
pub(crate) fn supported_features(controller_type: ControllerType) -> impl Iterator<Item = (u8, u32)> {
    (0..=u8::MAX).filter(move |&id| is_supported(id, controller_type)).map(|id| match id {
        feature::KV_CONFIGURATION | feature::ERROR_RECOVERY => (id, log_page::SCOPE_NAMESPACE),
        _ => (id, log_page::SCOPE_CONTROLLER),
    })
}

/// Executes Get Features.
///
/// # Errors
/// An invalid field for an unsupported feature or SEL; an invalid namespace for one without the feature.
pub(crate) fn get_feature(
    context: &AdminContext<'_>,
    sqe: &Sqe,
    page: &mut Vec<u8>,
) -> Result<AdminResult, Status> {
    let (id, select) = (sqe.cdw10.get() as u8, sqe.cdw10.get() >> 8 & 7);
    if !is_supported(id, context.controller.controller_type) {
        return Err(INVALID_FIELD);
    }
    let select = match select {
        0 => FeatureSelect::Current,
        1 | 2 => FeatureSelect::Default, // No value is saved: the saved value is the default.
        3 => FeatureSelect::Capabilities,
        _ => return Err(INVALID_FIELD),
    };
    if select == FeatureSelect::Capabilities {
        let per_namespace = u32::from(id == feature::KV_CONFIGURATION) << 1;
        return Ok(AdminResult::with_dw0(per_namespace | u32::from(is_changeable(id)) << 2));
    }
    if id == feature::HOST_IDENTIFIER {
        if sqe.cdw11.get() & 1 == 0 {
            return Err(INVALID_FIELD); // Only the 128-bit form exists over Fabrics.
        }
        page.extend_from_slice(&context.controller.host.id[..HOST_ID_BYTES as usize]);
        return Ok(AdminResult::success());
    }
    let current = select == FeatureSelect::Current;
    if id == feature::HOST_BEHAVIOR {
        page.resize(HOST_BEHAVIOR_BYTES, 0);
        if current {
            page[..3].copy_from_slice(&context.controller.lock_inner().features.host_behavior);
        }
        return Ok(AdminResult::success());
    }
    let inner = context.controller.lock_inner();
    Ok(AdminResult::with_dw0(match id {
        feature::QUEUES => granted_queues(context, u32::MAX - 1),
        feature::WRITE_CACHE if current => u32::from(context.controller.is_write_cache_enabled()),
        feature::WRITE_CACHE => 1,
        feature::KEEP_ALIVE if current => context.controller.keep_alive_ms(),
        feature::ASYNC_EVENTS if current => inner.async_events.enabled,
        feature::ARBITRATION if current => inner.features.arbitration,
        feature::ERROR_RECOVERY if current => inner.features.error_recovery,
        feature::WRITE_ATOMICITY if current => inner.features.write_atomicity,
        feature::DEVICE_TOKENS if current => u32::from(context.controller.token_weight.get() > 0),
        feature::TEMPERATURE if current => inner.features.temperature,
        feature::KV_CONFIGURATION if current => {
            drop(inner);
            let first = kv_namespaces(context, sqe)?[0];
            return Ok(AdminResult::with_dw0(u32::from(context.controller.delete_missing_is_error(first))));
        }
        _ => 0,
    }))
}

/// Executes Set Features.
///
/// # Errors
/// An invalid field for an unsupported feature or value; more specific statuses for the save bit, an excessive
/// keep-alive timeout, a command set profile, the host identifier and an unknown namespace.
pub(crate) fn set_feature(
    context: &AdminContext<'_>,
    now: Nanos,
    sqe: &Sqe,
    data: &[u8],
) -> Result<AdminResult, Status> {
    let (cdw10, value) = (sqe.cdw10.get(), sqe.cdw11.get());
    let id = cdw10 as u8;
    if !is_supported(id, context.controller.controller_type) {
        return Err(INVALID_FIELD);
    }
    if cdw10 & 1 << 31 != 0 {
        return Err(Status::FEATURE_NOT_SAVEABLE.do_not_retry());
    }
    if id == feature::KEEP_ALIVE {
        return set_keep_alive(context, now, value);
    }
    if id == feature::KV_CONFIGURATION {
        let ids = kv_namespaces(context, sqe)?;
        context.controller.set_delete_missing_is_error(ids.into_iter(), value & 1 != 0);
        return Ok(AdminResult::success());
    }
    if id == feature::DEVICE_TOKENS {
        context.target.set_token_share(context.controller, value & 1 != 0);
        return Ok(AdminResult::success());
    }
    let mut inner = context.controller.lock_inner();
    match id {
        feature::QUEUES => return Ok(AdminResult::with_dw0(set_queues(context, value)?)),
        // Bits of unsupported events are stored and have no effect.
        feature::ASYNC_EVENTS => inner.async_events.enabled = value,
        feature::ARBITRATION => inner.features.arbitration = value,
        feature::ERROR_RECOVERY => inner.features.error_recovery = value,
        feature::WRITE_ATOMICITY => inner.features.write_atomicity = value,
        feature::TEMPERATURE => inner.features.temperature = value,
        feature::WRITE_CACHE => context.controller.set_write_cache_enabled(value & 1 != 0),
        feature::HOST_BEHAVIOR => {
            // The data must be in the capsule: an admin queue sends no R2T.
            let received =
                data.get(..HOST_BEHAVIOR_BYTES).ok_or(Status::INVALID_SGL_LENGTH.do_not_retry())?;
            inner.features.host_behavior = [received[0], received[1], received[2]];
        }
        // There is one power state and one profile, so only their numbers are valid.
        feature::POWER_MANAGEMENT if value & 0x1f == 0 => {}
        feature::COMMAND_SET_PROFILE if value & 0x1ff == 0 => {}
        feature::COMMAND_SET_PROFILE => return Err(Status::COMMAND_SET_REJECTED.do_not_retry()),
        feature::HOST_IDENTIFIER => return Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry()),
        _ => return Err(INVALID_FIELD),
    }
    Ok(AdminResult::success())
}

fn set_keep_alive(context: &AdminContext<'_>, now: Nanos, milliseconds: u32) -> Result<AdminResult, Status> {
    if !context.target.is_keep_alive_allowed(milliseconds) {
        return Err(Status::KEEP_ALIVE_INVALID.do_not_retry());
    }
    context.controller.set_keep_alive(milliseconds, now);
    Ok(AdminResult::success())
}

fn set_queues(context: &AdminContext<'_>, requested: u32) -> Result<u32, Status> {
    if requested & 0xffff == 0xffff || requested >> 16 == 0xffff {
        return Err(INVALID_FIELD);
    }
    Ok(granted_queues(context, requested))
}

/// The granted submission and completion queues for this request, 0's based.
fn granted_queues(context: &AdminContext<'_>, requested: u32) -> u32 {
    let queues_max = u32::from(context.target.config().io_queues_max - 1);
    queues_max.min(requested & 0xffff) | queues_max.min(requested >> 16) << 16
}

/// The Key Value namespaces that a namespace-specific feature command addresses: one, or all for FFFFFFFFh.
///
/// # Errors
/// An invalid namespace if there are none.
fn kv_namespaces(context: &AdminContext<'_>, sqe: &Sqe) -> Result<Vec<NamespaceId>, Status> {
    const ALL: NamespaceId = NamespaceId(u32::MAX);
    let (requested, namespaces) = (sqe.namespace(), context.target.namespaces());
    let is_addressed = |info: &&NamespaceInfo| {
        (requested == ALL || info.id == requested) && info.command_set() == csi::KEY_VALUE
    };
    let ids: Vec<NamespaceId> = namespaces.iter().filter(is_addressed).map(|info| info.id).collect();
    if ids.is_empty() { Err(Status::INVALID_NAMESPACE.do_not_retry()) } else { Ok(ids) }
}
