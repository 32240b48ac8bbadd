//! The inputs and the result of an admin command.

use crate::controller::Controller;
use crate::subsystem::Target;
use octokv_wire::Status;
use std::net::SocketAddr;

/// The state that an admin command reads or changes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdminContext<'a> {
    pub target: &'a Target,
    pub controller: &'a Controller,
    /// The local address of the connection: where the host reached the target.
    pub local_address: SocketAddr,
}

/// The status and dwords of an admin command's completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AdminResult {
    pub status: Status,
    pub dw0: u32,
    pub dw1: u32,
}

impl AdminResult {
    pub fn success() -> AdminResult {
        AdminResult::with_dw0(0)
    }
    pub fn with_dw0(dw0: u32) -> AdminResult {
        AdminResult { status: Status::SUCCESS, dw0, dw1: 0 }
    }
    pub fn failed(status: Status) -> AdminResult {
        AdminResult { status, dw0: 0, dw1: 0 }
    }
}
