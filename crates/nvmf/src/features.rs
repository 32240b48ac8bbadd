//! Get and Set Features: which there are, what they hold, which may change.
//!
//! Nothing is saved over a restart: Set with the save bit is refused. A feature that is not in the table
//! is an invalid field.

use crate::admin_commands::{Reply, View};
use crate::config::NamespaceInfo;
use crate::controller::Purpose;
use octokv_base::{NamespaceId, Nanos};
use octokv_wire::queue_entry::{csi, feature};
use octokv_wire::{Sqe, Status, log_page};

/// Values of features that only their own Get reads.
#[derive(Debug, Default)]
pub(crate) struct Features {
    arbitration: u32,
    error_recovery: u32,
    write_atomicity: u32,
    temperature: u32,
    /// What the host says of itself: bytes 0 to 2 of host behaviour support.
    host_behavior: [u8; 3],
}

/// The extended host identifier: data of feature 81h.
const HOST_ID_BYTES: u32 = 16;
/// Data of feature 16h.
const HOST_BEHAVIOR_BYTES: usize = 512;

const INVALID_FIELD: Status = Status::INVALID_FIELD.do_not_retry();

/// What SEL of Get Features asks for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Select {
    Current,
    Default,
    Capabilities,
}

fn exists(id: u8, purpose: Purpose) -> bool {
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
        | feature::HOST_IDENTIFIER => purpose == Purpose::Io,
        _ => false,
    }
}

fn is_changeable(id: u8) -> bool {
    !matches!(id, feature::HOST_IDENTIFIER | feature::POWER_MANAGEMENT)
}

/// The features of a controller, and the scope of each: log 12h.
pub(crate) fn supported(purpose: Purpose) -> impl Iterator<Item = (u8, u32)> {
    (0..=u8::MAX).filter(move |&id| exists(id, purpose)).map(|id| match id {
        feature::KV_CONFIGURATION | feature::ERROR_RECOVERY => (id, log_page::SCOPE_NAMESPACE),
        _ => (id, log_page::SCOPE_CONTROLLER),
    })
}

/// Get Features.
pub(crate) fn get(view: &View<'_>, sqe: &Sqe, page: &mut Vec<u8>) -> Result<Reply, Status> {
    let (id, select) = (sqe.cdw10.get() as u8, sqe.cdw10.get() >> 8 & 7);
    if !exists(id, view.controller.purpose) {
        return Err(INVALID_FIELD);
    }
    let select = match select {
        0 => Select::Current,
        1 | 2 => Select::Default, // Nothing is saved: the saved value is the default.
        3 => Select::Capabilities,
        _ => return Err(INVALID_FIELD),
    };
    if select == Select::Capabilities {
        let per_namespace = u32::from(id == feature::KV_CONFIGURATION) << 1;
        return Ok(Reply::dword(per_namespace | u32::from(is_changeable(id)) << 2));
    }
    if id == feature::HOST_IDENTIFIER {
        if sqe.cdw11.get() & 1 == 0 {
            return Err(INVALID_FIELD); // Only the 128-bit form exists over Fabrics.
        }
        page.extend_from_slice(&view.controller.host.id[..HOST_ID_BYTES as usize]);
        return Ok(Reply::success());
    }
    let current = select == Select::Current;
    if id == feature::HOST_BEHAVIOR {
        page.resize(HOST_BEHAVIOR_BYTES, 0);
        if current {
            page[..3].copy_from_slice(&view.controller.book().features.host_behavior);
        }
        return Ok(Reply::success());
    }
    let book = view.controller.book();
    Ok(Reply::dword(match id {
        feature::QUEUES => granted_queues(view, u32::MAX - 1),
        feature::WRITE_CACHE if current => u32::from(view.controller.write_cache()),
        feature::WRITE_CACHE => 1,
        feature::KEEP_ALIVE if current => view.controller.keep_alive_ms(),
        feature::ASYNC_EVENTS if current => book.events.wanted,
        feature::ARBITRATION if current => book.features.arbitration,
        feature::ERROR_RECOVERY if current => book.features.error_recovery,
        feature::WRITE_ATOMICITY if current => book.features.write_atomicity,
        feature::TEMPERATURE if current => book.features.temperature,
        feature::KV_CONFIGURATION if current => {
            drop(book);
            let first = namespaces_of(view, sqe)?[0];
            return Ok(Reply::dword(u32::from(view.controller.missing_fails(first))));
        }
        _ => 0,
    }))
}

/// Set Features.
pub(crate) fn set(view: &View<'_>, now: Nanos, sqe: &Sqe, data: &[u8]) -> Result<Reply, Status> {
    let (cdw10, value) = (sqe.cdw10.get(), sqe.cdw11.get());
    let id = cdw10 as u8;
    if !exists(id, view.controller.purpose) {
        return Err(INVALID_FIELD);
    }
    if cdw10 & 1 << 31 != 0 {
        return Err(Status::FEATURE_NOT_SAVEABLE.do_not_retry());
    }
    if id == feature::KEEP_ALIVE {
        return set_keep_alive(view, now, value);
    }
    if id == feature::KV_CONFIGURATION {
        let ids = namespaces_of(view, sqe)?;
        view.controller.set_missing_fails(ids.into_iter(), value & 1 != 0);
        return Ok(Reply::success());
    }
    let mut book = view.controller.book();
    match id {
        feature::QUEUES => return Ok(Reply::dword(set_queues(view, value)?)),
        // Hosts may wish for events that never come.
        feature::ASYNC_EVENTS => book.events.wanted = value,
        feature::ARBITRATION => book.features.arbitration = value,
        feature::ERROR_RECOVERY => book.features.error_recovery = value,
        feature::WRITE_ATOMICITY => book.features.write_atomicity = value,
        feature::TEMPERATURE => book.features.temperature = value,
        feature::WRITE_CACHE => view.controller.set_write_cache(value & 1 != 0),
        feature::HOST_BEHAVIOR => {
            // It has to come in the capsule: nothing is asked for on an admin queue.
            let said = data.get(..HOST_BEHAVIOR_BYTES).ok_or(Status::INVALID_SGL_LENGTH.do_not_retry())?;
            book.features.host_behavior = [said[0], said[1], said[2]];
        }
        // There is one power state and one profile: only what is so may be set.
        feature::POWER_MANAGEMENT if value & 0x1f == 0 => {}
        feature::COMMAND_SET_PROFILE if value & 0x1ff == 0 => {}
        feature::COMMAND_SET_PROFILE => return Err(Status::COMMAND_SET_REJECTED.do_not_retry()),
        feature::HOST_IDENTIFIER => return Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry()),
        _ => return Err(INVALID_FIELD),
    }
    Ok(Reply::success())
}

fn set_keep_alive(view: &View<'_>, now: Nanos, milliseconds: u32) -> Result<Reply, Status> {
    if !view.target.keep_alive_is_possible(milliseconds) {
        return Err(Status::KEEP_ALIVE_INVALID.do_not_retry());
    }
    view.controller.set_keep_alive(milliseconds, now);
    Ok(Reply::success())
}

fn set_queues(view: &View<'_>, asked: u32) -> Result<u32, Status> {
    if asked & 0xffff == 0xffff || asked >> 16 == 0xffff {
        return Err(INVALID_FIELD);
    }
    Ok(granted_queues(view, asked))
}

/// The queues that a host gets which asks for so many, submission and completion, 0's based.
fn granted_queues(view: &View<'_>, asked: u32) -> u32 {
    let most = u32::from(view.target.settings().io_queues_max - 1);
    most.min(asked & 0xffff) | most.min(asked >> 16) << 16
}

/// The Key Value namespaces that a feature of theirs is meant for; at least one.
fn namespaces_of(view: &View<'_>, sqe: &Sqe) -> Result<Vec<NamespaceId>, Status> {
    const ALL: NamespaceId = NamespaceId(u32::MAX);
    let (asked, namespaces) = (sqe.namespace(), view.target.namespaces());
    let is_meant =
        |one: &&NamespaceInfo| (asked == ALL || one.id == asked) && one.command_set() == csi::KEY_VALUE;
    let ids: Vec<NamespaceId> = namespaces.iter().filter(is_meant).map(|one| one.id).collect();
    if ids.is_empty() { Err(Status::INVALID_NAMESPACE.do_not_retry()) } else { Ok(ids) }
}
