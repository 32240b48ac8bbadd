//! Valid submission queue entries; an attacker then changes any field.

use octokv_base::{NamespaceId, ShortKey};
use octokv_wire::kv::{KvCommand, StoreOptions};
use octokv_wire::queue_entry::admin;
use octokv_wire::{Sgl, Sqe, vendor};

/// The namespace under attack.
pub const NSID: NamespaceId = NamespaceId(1);

fn key_of(bytes: &[u8]) -> ShortKey {
    ShortKey::new(bytes).expect("at most 16 bytes")
}

/// A Store of `value_bytes` bytes with this SGL.
pub fn store(id: u16, key: &[u8], value_bytes: u32, sgl: Sgl) -> Sqe {
    let options = StoreOptions::default();
    let mut sqe = KvCommand::Store { key: key_of(key), options, value_bytes }.encode(id, NSID);
    sqe.sgl = sgl;
    sqe
}

/// A Store with in-capsule data.
pub fn store_in_capsule(id: u16, key: &[u8], value: &[u8]) -> Sqe {
    let bytes = value.len() as u32;
    store(id, key, bytes, Sgl::in_capsule(bytes))
}

/// A Store whose data the node requests with R2Ts.
pub fn store_by_r2t(id: u16, key: &[u8], value_bytes: u32) -> Sqe {
    store(id, key, value_bytes, Sgl::transport(value_bytes))
}

/// A Retrieve into a buffer of `limit_bytes`.
pub fn retrieve(id: u16, key: &[u8], limit_bytes: u32) -> Sqe {
    let mut sqe = KvCommand::Retrieve { key: key_of(key), limit_bytes }.encode(id, NSID);
    sqe.sgl = Sgl::transport(limit_bytes);
    sqe
}

/// An Exist.
pub fn exist(id: u16, key: &[u8]) -> Sqe {
    KvCommand::Exist { key: key_of(key) }.encode(id, NSID)
}

/// A Delete.
pub fn delete(id: u16, key: &[u8]) -> Sqe {
    KvCommand::Delete { key: key_of(key) }.encode(id, NSID)
}

/// A Flush.
pub fn flush(id: u16) -> Sqe {
    KvCommand::Flush.encode(id, NSID)
}

/// A List from key `start` into a buffer of `limit_bytes`.
pub fn list(id: u16, start: &[u8], limit_bytes: u32) -> Sqe {
    let mut sqe = KvCommand::List { start: key_of(start), limit_bytes }.encode(id, NSID);
    sqe.sgl = Sgl::transport(limit_bytes);
    sqe
}

/// A vendor-specific command with in-capsule data, the key first.
pub fn vendor_command(id: u16, command: vendor::VendorCommand, data_bytes: u32) -> Sqe {
    let mut sqe = command.encode(id, NSID);
    sqe.sgl = Sgl::in_capsule(data_bytes);
    sqe
}

/// Identify with this CNS and a buffer of 4096 bytes.
pub fn identify(id: u16, cns: u32) -> Sqe {
    let mut sqe = Sqe::new(admin::IDENTIFY, id);
    sqe.nsid = NSID.0.into();
    sqe.cdw10 = cns.into();
    sqe.sgl = Sgl::transport(4096);
    sqe
}

/// Get Log Page with a buffer of `bytes` bytes.
pub fn log_page(id: u16, page: u8, bytes: u32) -> Sqe {
    let mut sqe = Sqe::new(admin::GET_LOG_PAGE, id);
    let dwords = (bytes / 4).saturating_sub(1);
    sqe.cdw10 = (u32::from(page) | dwords << 16).into();
    sqe.cdw11 = (dwords >> 16).into();
    sqe.sgl = Sgl::transport(bytes);
    sqe
}

/// A Keep Alive.
pub fn keep_alive(id: u16) -> Sqe {
    Sqe::new(admin::KEEP_ALIVE, id)
}

/// An Asynchronous Event Request.
pub fn async_event_request(id: u16) -> Sqe {
    Sqe::new(admin::ASYNC_EVENT_REQUEST, id)
}

/// An Abort of command identifier `command` on queue `queue`.
pub fn abort(id: u16, queue: u16, command: u16) -> Sqe {
    let mut sqe = Sqe::new(admin::ABORT, id);
    sqe.cdw10 = (u32::from(queue) | u32::from(command) << 16).into();
    sqe
}

/// A pseudo-random value, determined by `seed`.
pub fn random_value(seed: u64, bytes: usize) -> Vec<u8> {
    let mut value = vec![0; bytes];
    octokv_base::Prng::new(seed).fill(&mut value);
    value
}
