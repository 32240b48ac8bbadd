//! What an admin command reads, and how it ends.

use crate::controller::Controller;
use crate::subsystem::Target;
use octokv_wire::Status;
use std::net::SocketAddr;

/// What an admin command may look at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdminContext<'a> {
    pub target: &'a Target,
    pub controller: &'a Controller,
    /// The address that the host has connected to.
    pub local_address: SocketAddr,
}

/// How an admin command ends.
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
