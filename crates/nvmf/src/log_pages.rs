//! Get Log Page: errors, health, firmware, changed namespaces, effects, access, features, discovery.
//!
//! Pages are built whole, which is rare and small, and cut at the offset that the host asked for. What a
//! host asks for is bounded by the longest transfer.

use crate::admin_commands::View;
use crate::config::NamespaceInfo;
use crate::controller::{Purpose, sees};
use crate::features;
use crate::health::SPARE_THRESHOLD_PERCENT;
use octokv_base::NamespaceId;
use octokv_wire::discovery::{self, Entry, SubsystemKind};
use octokv_wire::log_page::{self, AnaGroup, Effects, Health, Request, id};
use octokv_wire::queue_entry::{FABRICS, admin, csi};
use octokv_wire::{Sqe, Status, kv, nqn, nvm, vendor};
use std::net::{IpAddr, SocketAddr};
use zerocopy::IntoBytes;
use zerocopy::byteorder::little_endian::{U16, U128};

const INVALID_FIELD: Status = Status::INVALID_FIELD.do_not_retry();
const IO_PAGES: [u8; 9] = [
    id::SUPPORTED,
    id::ERROR,
    id::HEALTH,
    id::FIRMWARE,
    id::CHANGED_NAMESPACES,
    id::EFFECTS,
    id::ANA,
    id::FEATURES,
    id::MANAGEMENT,
];
const DISCOVERY_PAGES: [u8; 6] =
    [id::SUPPORTED, id::ERROR, id::EFFECTS, id::FEATURES, id::MANAGEMENT, id::DISCOVERY];

/// Fills `out` with what a Get Log Page asks for.
pub(crate) fn get(view: &View<'_>, sqe: &Sqe, out: &mut Vec<u8>) -> Result<(), Status> {
    let request = Request::check(sqe)?;
    if request.bytes > u64::from(view.target.settings().value_bytes_max) {
        return Err(INVALID_FIELD);
    }
    let page = page(view, &request)?;
    out.resize(request.bytes as usize, 0);
    log_page::window(&page, request.offset, out);
    if !request.retain_event {
        view.controller.book().events.log_was_read(request.id);
    }
    Ok(())
}

fn page(view: &View<'_>, request: &Request) -> Result<Vec<u8>, Status> {
    let is_io = view.controller.purpose == Purpose::Io;
    let pages: &[u8] = if is_io { &IO_PAGES } else { &DISCOVERY_PAGES };
    if !pages.contains(&request.id) {
        return Err(Status::INVALID_LOG_PAGE.do_not_retry());
    }
    Ok(match request.id {
        id::SUPPORTED => log_page::Supported::of(pages).as_bytes().to_vec(),
        id::ERROR => view.target.errors.entries().as_bytes().to_vec(),
        id::HEALTH => health(view).as_bytes().to_vec(),
        id::FIRMWARE => log_page::firmware(&view.target.settings().firmware).to_vec(),
        id::CHANGED_NAMESPACES => changed(view, request),
        id::EFFECTS if is_io => effects(request.csi)?,
        id::EFFECTS => admin_effects().as_bytes().to_vec(),
        id::ANA => access(view, request),
        id::FEATURES => log_page::features(features::supported(view.controller.purpose)),
        // There is no management interface.
        id::MANAGEMENT => vec![0; log_page::FEATURES_BYTES],
        id::DISCOVERY => discovery_page(view),
        other => unreachable!("log {other:02x}h is listed and has no page"),
    })
}

/// The groups and, unless only they are asked for, the namespaces in them that this host sees.
fn access(view: &View<'_>, request: &Request) -> Vec<u8> {
    let groups_only = request.specific & 1 != 0;
    let cc = view.controller.book().configuration;
    let table = view.target.namespaces();
    let members = |group: u32| -> Vec<NamespaceId> {
        let is_member = |one: &&NamespaceInfo| !groups_only && one.ana_group == group && sees(cc, one);
        table.iter().filter(is_member).map(|one| one.id).collect()
    };
    let lists: Vec<_> = table.groups().map(|(id, group)| (id, group, members(id))).collect();
    let mut groups = Vec::with_capacity(lists.len());
    for (id, group, namespaces) in &lists {
        groups.push(AnaGroup { id: *id, changes: group.changes, state: group.state, namespaces });
    }
    log_page::ana(table.ana_changes(), &groups)
}

/// The changed namespaces. Only a read from the start that lets the event go empties the list.
fn changed(view: &View<'_>, request: &Request) -> Vec<u8> {
    let book = &mut *view.controller.book();
    let changed = book.events.changed();
    if request.offset == 0 && !request.retain_event {
        book.events.forget_changed();
    }
    match changed {
        Some(ids) => log_page::changed_namespaces(&ids.into_iter().map(NamespaceId).collect::<Vec<_>>()),
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
    let (counts, facts) = (view.target.statistics(), view.target.health());
    let number = |value: u64| U128::new(u128::from(value));
    let mut health = Health::zeroed();
    health.temperature = U16::new(ROOM_TEMPERATURE_KELVIN);
    health.warnings = facts.warnings();
    health.spare = facts.available_spare_percent;
    health.spare_threshold = SPARE_THRESHOLD_PERCENT;
    health.units_read = number((counts.retrieved_bytes + counts.read_bytes).div_ceil(UNIT_BYTES));
    health.units_written = number((counts.stored_bytes + counts.written_bytes).div_ceil(UNIT_BYTES));
    let reads = counts.retrieves + counts.lists + counts.exists;
    health.reads = number(reads + counts.block_reads + counts.block_checks);
    health.writes = number(counts.stores + counts.deletes + counts.block_writes);
    health.busy_minutes = number(facts.busy_seconds / 60);
    health.power_cycles = number(facts.power_cycles);
    health.power_hours = number(facts.power_on_seconds / 3600);
    health.unsafe_shutdowns = number(facts.unsafe_shutdowns);
    health.media_errors = number(counts.media_errors);
    health.errors = number(view.target.errors.count());
    health
}

/// The admin commands.
fn admin_effects() -> Box<Effects> {
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
        effects.admin(opcode, log_page::SCOPE_CONTROLLER);
    }
    effects
}

/// Which commands there are. Without this page Linux lets only the superuser pass commands through.
fn effects(command_set: u8) -> Result<Vec<u8>, Status> {
    let mut effects = admin_effects();
    let (reading, writing): (&[u8], &[u8]) = match command_set {
        csi::NVM => (
            &[nvm::opcode::FLUSH, nvm::opcode::READ, nvm::opcode::COMPARE, nvm::opcode::VERIFY],
            &[nvm::opcode::WRITE, nvm::opcode::WRITE_ZEROES, nvm::opcode::DATASET_MANAGEMENT],
        ),
        csi::KEY_VALUE => (
            &[
                kv::opcode::FLUSH,
                kv::opcode::RETRIEVE,
                kv::opcode::LIST,
                kv::opcode::EXIST,
                vendor::opcode::RETRIEVE,
                vendor::opcode::LIST,
                vendor::opcode::EXIST,
            ],
            &[kv::opcode::STORE, kv::opcode::DELETE, vendor::opcode::STORE, vendor::opcode::DELETE],
        ),
        _ => return Err(INVALID_FIELD),
    };
    // Without a scope, which need not be told: Linux 6.1 takes it for an unusual effect and says so.
    reading.iter().for_each(|&opcode| effects.io(opcode, 0));
    writing.iter().for_each(|&opcode| effects.io(opcode, log_page::CHANGES_CONTENT));
    Ok(effects.as_bytes().to_vec())
}

/// This discovery service and, where the host may connect to it, the subsystem, at each listener; then
/// other discovery services.
fn discovery_page(view: &View<'_>) -> Vec<u8> {
    let (places, hosts) = view.target.discovery_facts();
    let settings = view.target.settings();
    let is_shown = hosts.allows(&view.controller.host.nqn);
    let mut entries = Vec::new();
    for (index, &listener) in places.listeners.iter().enumerate() {
        let Some(address) = reachable(listener, view.local) else { continue };
        let port_id = index as u16 + 1;
        let entry = |kind, name: &str| Entry { kind, subsystem: name.to_owned(), address, port_id };
        entries.push(entry(SubsystemKind::Current, nqn::DISCOVERY));
        if is_shown {
            entries.push(entry(SubsystemKind::Storage, &settings.nqn));
        }
    }
    let first = places.listeners.len() + 1;
    entries.extend(places.referrals.iter().zip(first..).map(|(&address, port_id)| Entry {
        kind: SubsystemKind::Referral,
        subsystem: nqn::DISCOVERY.to_owned(),
        address,
        port_id: port_id as u16,
    }));
    discovery::encode(places.generation, &entries)
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
