//! Admin commands: each is answered at once, from what the controller and the target know.
//!
//! In: an entry, the data of its capsule and the time. Out: a [`Reply`], and its data in `page`. Event requests and aborts, which
//! touch the queue itself, are the connection's.

use crate::controller::{Condition, Controller, Purpose};
use crate::subsystem::Target;
use crate::{features, identify, log_pages};
use octokv_base::Nanos;
use octokv_wire::fabrics::{Capabilities, Command, Configuration, property};
use octokv_wire::queue_entry::{FABRICS, admin};
use octokv_wire::{Sqe, Status};
use std::net::SocketAddr;

/// What an admin command may look at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    pub target: &'a Target,
    pub controller: &'a Controller,
    /// The address that the host has connected to.
    pub local: SocketAddr,
}

/// How an admin command ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    pub status: Status,
    pub dw0: u32,
    pub dw1: u32,
}

impl Reply {
    pub fn success() -> Reply {
        Reply::dword(0)
    }
    pub fn dword(dw0: u32) -> Reply {
        Reply { status: Status::SUCCESS, dw0, dw1: 0 }
    }
    pub fn failed(status: Status) -> Reply {
        Reply { status, dw0: 0, dw1: 0 }
    }
}

/// Does an admin command other than event requests and aborts, which came with `data`; what goes back is put
/// into `page`.
pub(crate) fn execute(view: &View<'_>, now: Nanos, sqe: &Sqe, data: &[u8], page: &mut Vec<u8>) -> Reply {
    let reply = match sqe.opcode {
        FABRICS => fabrics(view, sqe),
        admin::KEEP_ALIVE => Ok(Reply::success()), // Any command is a sign of life.
        _ if !may_serve(view) => Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry()),
        admin::IDENTIFY => identify::identify(view, sqe, page).map(|()| Reply::success()),
        admin::GET_LOG_PAGE => log_pages::get(view, sqe, page).map(|()| Reply::success()),
        admin::GET_FEATURES => features::get(view, sqe, page),
        admin::SET_FEATURES => features::set(view, now, sqe, data),
        _ => Err(Status::INVALID_OPCODE.do_not_retry()),
    };
    reply.unwrap_or_else(|status| {
        page.clear();
        Reply::failed(status)
    })
}

/// Before it is enabled a controller takes only Fabrics commands and signs of life.
pub(crate) fn may_serve(view: &View<'_>) -> bool {
    matches!(view.controller.life().condition, Condition::Ready | Condition::ShutDown)
}

fn fabrics(view: &View<'_>, sqe: &Sqe) -> Result<Reply, Status> {
    match Command::check(sqe)? {
        Command::PropertyGet { offset, wide } => get_property(view, offset, wide),
        Command::PropertySet { offset, wide: false, value } if offset == property::CC => {
            view.controller.configure(Configuration(value as u32));
            Ok(Reply::success())
        }
        Command::PropertySet { .. } => Err(Status::INVALID_FIELD.do_not_retry()),
        Command::Connect(_) => Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry()),
        Command::Disconnect => Err(Status::DISCONNECT_INVALID_QUEUE.do_not_retry()),
        // No host is asked to authenticate.
        Command::AuthenticationSend | Command::AuthenticationReceive => {
            Err(Status::INVALID_OPCODE.do_not_retry())
        }
    }
}

/// What an entry writes to CC, where that asks for a normal shutdown.
pub(crate) fn normal_shutdown(sqe: &Sqe) -> Option<Configuration> {
    const NORMAL: u8 = 1;
    match Command::check(sqe) {
        Ok(Command::PropertySet { offset: property::CC, wide: false, value }) if sqe.opcode == FABRICS => {
            let written = Configuration(value as u32);
            (written.shutdown() == NORMAL).then_some(written)
        }
        _ => None,
    }
}

fn get_property(view: &View<'_>, offset: u32, wide: bool) -> Result<Reply, Status> {
    let value = match (offset, wide) {
        (property::CAP, true) => capabilities(view).encode(),
        (property::VS, false) => u64::from(identify::NVME_VERSION),
        (property::CC, false) => u64::from(view.controller.book().configuration.0),
        (property::CSTS, false) => u64::from(view.controller.status_property()),
        // Hosts may look at the subsystem reset and the ready times, which this target does not have.
        (property::NSSR | property::CRTO, false) => 0,
        // Without "do not retry": nvme-cli 2.3 walks through all registers and knows only the bare status for absent.
        _ => return Err(Status::INVALID_FIELD),
    };
    Ok(Reply { status: Status::SUCCESS, dw0: value as u32, dw1: (value >> 32) as u32 })
}

fn capabilities(view: &View<'_>) -> Capabilities {
    Capabilities {
        queue_entries_max: u32::from(view.target.settings().queue_depth),
        timeout_halves: 30,
        nvm: true,
        command_sets: view.controller.purpose == Purpose::Io,
    }
}
