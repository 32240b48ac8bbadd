//! Get Log Page: errors, health, firmware, changed namespaces, effects, access, discovery.
//!
//! Pages are built whole, which is rare and small, and cut at the offset that the host asked for. What a
//! host asks for is bounded by the longest transfer.

use crate::admin::View;
use crate::controller::Purpose;
use crate::identify::namespace_ids;
use octokv_base::NamespaceId;
use octokv_wire::command::{FABRICS, admin, csi};
use octokv_wire::discovery::{self, Entry, SubsystemKind};
use octokv_wire::log::{self, AnaGroup, AnaState, Effects, Health, Request, id};
use octokv_wire::{Sqe, Status, extension, kv};
use std::net::{IpAddr, SocketAddr};
use zerocopy::IntoBytes;
use zerocopy::byteorder::little_endian::{U16, U128};

const INVALID_FIELD: Status = Status::INVALID_FIELD.do_not_retry();
const IO_PAGES: [u8; 8] = [
    id::SUPPORTED,
    id::ERROR,
    id::HEALTH,
    id::FIRMWARE,
    id::CHANGED_NAMESPACES,
    id::EFFECTS,
    id::ANA,
    id::DISCOVERY,
];
/// The one ANA group of all namespaces, on a path that is as good as any.
const ANA_GROUP: u32 = 1;

/// Fills `out` with what a Get Log Page asks for.
pub(crate) fn get(view: &View<'_>, sqe: &Sqe, out: &mut Vec<u8>) -> Result<(), Status> {
    let request = Request::check(sqe)?;
    if request.bytes > u64::from(view.target.settings().value_bytes_max) {
        return Err(INVALID_FIELD);
    }
    let page = page(view, &request)?;
    out.resize(request.bytes as usize, 0);
    log::window(&page, request.offset, out);
    if !request.retain_event {
        view.controller.book().events.log_was_read(request.id);
    }
    Ok(())
}

fn page(view: &View<'_>, request: &Request) -> Result<Vec<u8>, Status> {
    let is_io = view.controller.purpose == Purpose::Io;
    Ok(match request.id {
        id::SUPPORTED if is_io => log::Supported::of(&IO_PAGES[..IO_PAGES.len() - 1]).as_bytes().to_vec(),
        id::SUPPORTED => log::Supported::of(&[id::SUPPORTED, id::DISCOVERY]).as_bytes().to_vec(),
        id::DISCOVERY if !is_io => discovery_page(view),
        id::ERROR if is_io => view.target.errors.entries().as_bytes().to_vec(),
        id::HEALTH if is_io => health(view).as_bytes().to_vec(),
        id::FIRMWARE if is_io => log::firmware(&view.target.settings().firmware).to_vec(),
        id::CHANGED_NAMESPACES if is_io => changed(view, request),
        id::EFFECTS if is_io => effects(request.csi)?,
        id::ANA if is_io => {
            let groups_only = request.specific & 1 != 0;
            let namespaces = if groups_only { Vec::new() } else { namespace_ids(view) };
            let state = AnaState::Optimized;
            log::ana(0, &[AnaGroup { id: ANA_GROUP, changes: 0, state, namespaces: &namespaces }])
        }
        _ => return Err(Status::INVALID_LOG_PAGE.do_not_retry()),
    })
}

/// The changed namespaces. Only a read from the start that lets the event go empties the list.
fn changed(view: &View<'_>, request: &Request) -> Vec<u8> {
    let book = &mut *view.controller.book();
    let changed = book.events.changed();
    if request.offset == 0 && !request.retain_event {
        book.events.forget_changed();
    }
    match changed {
        Some(ids) => log::changed_namespaces(&ids.into_iter().map(NamespaceId).collect::<Vec<_>>()),
        None => {
            let mut page = vec![0; 4096];
            page[..4].fill(0xff);
            page
        }
    }
}

fn health(view: &View<'_>) -> Health {
    const ROOM_TEMPERATURE_KELVIN: u16 = 300;
    const UNIT_BYTES: u64 = 512_000;
    let counts = view.target.statistics();
    let number = |value: u64| U128::new(u128::from(value));
    let mut health = Health::zeroed();
    health.temperature = U16::new(ROOM_TEMPERATURE_KELVIN);
    health.spare = 100;
    health.units_read = number(counts.retrieved_bytes.div_ceil(UNIT_BYTES));
    health.units_written = number(counts.stored_bytes.div_ceil(UNIT_BYTES));
    health.reads = number(counts.retrieves + counts.lists + counts.exists);
    health.writes = number(counts.stores + counts.deletes);
    health.media_errors = number(counts.media_errors);
    health.errors = number(view.target.errors.count());
    health
}

/// Which commands there are. Without this page Linux lets only the superuser pass commands through.
fn effects(command_set: u8) -> Result<Vec<u8>, Status> {
    let mut effects = Effects::zeroed();
    for opcode in [
        admin::GET_LOG_PAGE,
        admin::IDENTIFY,
        admin::ABORT,
        admin::SET_FEATURES,
        admin::GET_FEATURES,
        admin::ASYNC_EVENT_REQUEST,
        admin::KEEP_ALIVE,
        FABRICS,
    ] {
        effects.admin(opcode, 0);
    }
    match command_set {
        csi::NVM => {}
        csi::KEY_VALUE => {
            let reading = [kv::opcode::FLUSH, kv::opcode::RETRIEVE, kv::opcode::LIST, kv::opcode::EXIST];
            reading.into_iter().for_each(|opcode| effects.io(opcode, 0));
            let long = [extension::opcode::RETRIEVE, extension::opcode::LIST, extension::opcode::EXIST];
            long.into_iter().for_each(|opcode| effects.io(opcode, 0));
            for opcode in
                [kv::opcode::STORE, kv::opcode::DELETE, extension::opcode::STORE, extension::opcode::DELETE]
            {
                effects.io(opcode, log::CHANGES_CONTENT);
            }
        }
        _ => return Err(INVALID_FIELD),
    }
    Ok(effects.as_bytes().to_vec())
}

fn discovery_page(view: &View<'_>) -> Vec<u8> {
    let listeners = view.target.listeners();
    let entry = |(index, &address): (usize, &SocketAddr)| {
        Some(Entry {
            kind: SubsystemKind::Storage,
            subsystem: view.target.settings().nqn.clone(),
            address: reachable(address, view.local)?,
            port_id: index as u16 + 1,
        })
    };
    let entries: Vec<Entry> = listeners.addresses.iter().enumerate().filter_map(entry).collect();
    discovery::encode(listeners.generation, &entries)
}

/// How the host that is connected to `local` reaches a listener: at its address, or, where it listens on
/// every address, at the one the host has found. `None` where that is of the other family.
fn reachable(listener: SocketAddr, local: SocketAddr) -> Option<SocketAddr> {
    let (at, found) = (listener.ip().to_canonical(), local.ip().to_canonical());
    if !at.is_unspecified() {
        return Some(SocketAddr::new(at, listener.port()));
    }
    let takes = match at {
        IpAddr::V4(_) => found.is_ipv4(),
        IpAddr::V6(_) => true, // Also IPv4, mapped.
    };
    takes.then(|| SocketAddr::new(found, listener.port()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_are_told_as_the_host_can_reach_them() {
        let table = [
            ("10.0.0.1:4420", "10.0.0.9:5", Some("10.0.0.1:4420")),
            ("0.0.0.0:4420", "10.0.0.9:5", Some("10.0.0.9:4420")),
            ("0.0.0.0:4420", "[fe80::1]:5", None),
            ("[::]:4421", "[fd00::1]:5", Some("[fd00::1]:4421")),
            ("[::]:4421", "[::ffff:10.0.0.9]:5", Some("10.0.0.9:4421")),
            ("[fd00::2]:1", "10.0.0.9:5", Some("[fd00::2]:1")),
        ];
        for (listener, local, want) in table {
            let got = reachable(listener.parse().unwrap(), local.parse().unwrap());
            assert_eq!(got, want.map(|address| address.parse().unwrap()), "{listener} from {local}");
        }
    }
}
