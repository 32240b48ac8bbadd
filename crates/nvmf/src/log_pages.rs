//! Get Log Page: errors, health, firmware, changed namespaces, effects, ANA, features, discovery.
//!
//! Each page is built whole, since reads are rare and pages small, and then cut at the requested offset.
//! The requested length is limited by the longest transfer.

use crate::admin_context::AdminContext;
use crate::controller::{ControllerType, is_namespace_visible};
use crate::features;
use crate::health::SPARE_THRESHOLD_PERCENT;
use crate::namespace_info::NamespaceInfo;
use octokv_base::NamespaceId;
use octokv_wire::discovery::{self, DiscoveryEntry, SubsystemKind};
use octokv_wire::log_page::{self, AnaGroup, CommandEffectsLog, HealthLog, LogPageRequest, id};
use octokv_wire::queue_entry::{FABRICS_OPCODE, admin, csi};
use octokv_wire::{Sqe, Status, kv, nqn, nvm, vendor};
use std::net::{IpAddr, SocketAddr};
use zerocopy::IntoBytes;
use zerocopy::byteorder::little_endian::{U16, U128};

const INVALID_FIELD: Status = Status::INVALID_FIELD.do_not_retry();
const IO_LOG_PAGES: [u8; 10] = [
    id::SUPPORTED,
    id::ERROR,
    id::HEALTH,
    id::FIRMWARE,
    id::CHANGED_NAMESPACES,
    id::EFFECTS,
    id::ANA,
    id::FEATURES,
    id::MANAGEMENT,
    id::DEVICES,
];
const DISCOVERY_LOG_PAGES: [u8; 6] =
    [id::SUPPORTED, id::ERROR, id::EFFECTS, id::FEATURES, id::MANAGEMENT, id::DISCOVERY];

/// Replaces `out` with the requested part of a log page.
///
/// # Errors
/// An invalid log page for an unsupported one; an invalid field for an invalid offset, a length beyond the
/// longest transfer, or an unsupported command set.
pub(crate) fn get_log_page(context: &AdminContext<'_>, sqe: &Sqe, out: &mut Vec<u8>) -> Result<(), Status> {
    let request = LogPageRequest::check(sqe)?;
    if request.bytes > u64::from(context.target.config().value_bytes_max) {
        return Err(INVALID_FIELD);
    }
    let page = build_page(context, &request)?;
    out.resize(request.bytes as usize, 0);
    log_page::copy_from_offset(&page, request.offset, out);
    if !request.retain_event {
        context.controller.lock_inner().async_events.unmask_log(request.id);
    }
    Ok(())
}

fn build_page(context: &AdminContext<'_>, request: &LogPageRequest) -> Result<Vec<u8>, Status> {
    let is_io = context.controller.controller_type == ControllerType::Io;
    let pages: &[u8] = if is_io { &IO_LOG_PAGES } else { &DISCOVERY_LOG_PAGES };
    if !pages.contains(&request.id) {
        return Err(Status::INVALID_LOG_PAGE.do_not_retry());
    }
    Ok(match request.id {
        id::SUPPORTED => log_page::SupportedLogPages::with_pages(pages).as_bytes().to_vec(),
        id::ERROR => context.target.error_log.entries().as_bytes().to_vec(),
        id::HEALTH => health_page(context).as_bytes().to_vec(),
        id::FIRMWARE => log_page::encode_firmware_slots(&context.target.config().firmware).to_vec(),
        id::CHANGED_NAMESPACES => changed_namespaces_page(context, request),
        id::EFFECTS if is_io => effects_page(request.csi)?,
        id::EFFECTS => admin_effects().as_bytes().to_vec(),
        id::ANA => ana_page(context, request),
        id::FEATURES => {
            log_page::encode_features(features::supported_features(context.controller.controller_type))
        }
        // There is no management interface.
        id::MANAGEMENT => vec![0; log_page::FEATURES_BYTES],
        id::DEVICES => devices_page(context, request)?,
        id::DISCOVERY => discovery_page(context),
        other => unreachable!("log page {other:02x}h is listed but not built"),
    })
}

/// The ANA groups with, unless RGO is set, their namespaces that the host sees.
fn ana_page(context: &AdminContext<'_>, request: &LogPageRequest) -> Vec<u8> {
    let groups_only = request.log_specific & 1 != 0;
    let cc = context.controller.lock_inner().configuration;
    let namespaces = context.target.namespaces();
    let members = |group: u32| -> Vec<NamespaceId> {
        let is_member =
            |info: &&NamespaceInfo| !groups_only && info.ana_group == group && is_namespace_visible(cc, info);
        namespaces.iter().filter(is_member).map(|info| info.id).collect()
    };
    let lists: Vec<_> = namespaces.groups().map(|(id, group)| (id, group, members(id))).collect();
    let mut groups = Vec::with_capacity(lists.len());
    for (id, group, namespaces) in &lists {
        groups.push(AnaGroup { id: *id, change_count: group.change_count, state: group.state, namespaces });
    }
    log_page::encode_ana(namespaces.ana_change_count(), &groups)
}

/// The changed namespaces. A read from offset 0 without RAE clears the list.
fn changed_namespaces_page(context: &AdminContext<'_>, request: &LogPageRequest) -> Vec<u8> {
    let inner = &mut *context.controller.lock_inner();
    let changed = inner.async_events.changed_namespaces();
    if request.offset == 0 && !request.retain_event {
        inner.async_events.clear_changed_namespaces();
    }
    match changed {
        Some(ids) => {
            log_page::encode_changed_namespaces(&ids.into_iter().map(NamespaceId).collect::<Vec<_>>())
        }
        None => {
            let mut page = vec![0; 4096];
            page[..4].fill(0xff);
            page
        }
    }
}

/// The devices of a namespace, with the tokens that are free for this host.
///
/// # Errors
/// An invalid namespace if the host does not see it; an invalid log page if its devices have no tokens.
fn devices_page(context: &AdminContext<'_>, request: &LogPageRequest) -> Result<Vec<u8>, Status> {
    let cc = context.controller.lock_inner().configuration;
    let namespaces = context.target.namespaces();
    let info = namespaces.get(request.namespace).filter(|info| is_namespace_visible(cc, info));
    let info = info.ok_or(Status::INVALID_NAMESPACE.do_not_retry())?;
    let shares = info.tokens.as_ref().ok_or(Status::INVALID_LOG_PAGE.do_not_retry())?;
    Ok(shares.device_log(context.controller.share_owner()).encode())
}

fn health_page(context: &AdminContext<'_>) -> HealthLog {
    const ROOM_TEMPERATURE_KELVIN: u16 = 300;
    const UNIT_BYTES: u64 = 512_000;
    let (counters, health) = (context.target.counters(), context.target.health());
    let number = |value: u64| U128::new(u128::from(value));
    let mut log = HealthLog::zeroed();
    log.temperature = U16::new(ROOM_TEMPERATURE_KELVIN);
    log.warnings = health.critical_warnings();
    log.spare = health.available_spare_percent;
    log.spare_threshold = SPARE_THRESHOLD_PERCENT;
    log.units_read = number((counters.retrieved_bytes + counters.read_bytes).div_ceil(UNIT_BYTES));
    log.units_written = number((counters.stored_bytes + counters.written_bytes).div_ceil(UNIT_BYTES));
    let reads = counters.retrieves + counters.lists + counters.exists + counters.iterator_commands;
    log.reads = number(reads + counters.block_reads + counters.block_checks);
    log.writes = number(counters.stores + counters.deletes + counters.block_writes);
    log.busy_minutes = number(health.busy_seconds / 60);
    log.power_cycles = number(health.power_cycles);
    log.power_hours = number(health.power_on_seconds / 3600);
    log.unsafe_shutdowns = number(health.unsafe_shutdowns);
    log.media_errors = number(counters.media_errors);
    log.errors = number(context.target.error_log.total_count());
    log
}

/// The effects of admin commands.
fn admin_effects() -> Box<CommandEffectsLog> {
    let mut effects = CommandEffectsLog::zeroed();
    for opcode in [
        admin::GET_LOG_PAGE,
        admin::IDENTIFY,
        admin::ABORT,
        admin::SET_FEATURES,
        admin::GET_FEATURES,
        admin::ASYNC_EVENT_REQUEST,
        admin::KEEP_ALIVE,
        FABRICS_OPCODE,
    ] {
        effects.support_admin(opcode, log_page::SCOPE_CONTROLLER);
    }
    effects
}

/// The supported commands and their effects. Without this page Linux restricts passthrough to the
/// superuser.
fn effects_page(command_set: u8) -> Result<Vec<u8>, Status> {
    let mut effects = admin_effects();
    let (readers, writers): (&[u8], &[u8]) = match command_set {
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
    // Without a scope, which is optional: Linux 6.1 logs a warning for effects with one.
    readers.iter().for_each(|&opcode| effects.support_io(opcode, 0));
    writers.iter().for_each(|&opcode| effects.support_io(opcode, log_page::CHANGES_CONTENT));
    Ok(effects.as_bytes().to_vec())
}

/// This discovery service and, if the host has access, the subsystem, at each listener; then the referrals.
fn discovery_page(context: &AdminContext<'_>) -> Vec<u8> {
    let (addresses, hosts) = context.target.discovery_snapshot();
    let config = context.target.config();
    let is_shown = hosts.allows(&context.controller.host.nqn);
    let mut entries = Vec::new();
    for (index, &listener) in addresses.listeners.iter().enumerate() {
        let Some(address) = reachable_address(listener, context.local_address) else { continue };
        let port_id = index as u16 + 1;
        let entry = |kind, name: &str| DiscoveryEntry { kind, subsystem: name.to_owned(), address, port_id };
        entries.push(entry(SubsystemKind::Current, nqn::DISCOVERY));
        if is_shown {
            entries.push(entry(SubsystemKind::Storage, &config.nqn));
        }
    }
    let first = addresses.listeners.len() + 1;
    entries.extend(addresses.referrals.iter().zip(first..).map(|(&address, port_id)| DiscoveryEntry {
        kind: SubsystemKind::Referral,
        subsystem: nqn::DISCOVERY.to_owned(),
        address,
        port_id: port_id as u16,
    }));
    discovery::encode(addresses.generation, &entries)
}

/// The address of a listener as a host connected to `local` can reach it: the listener's own, or `local`'s
/// if the listener has a wildcard address. `None` if the address families differ.
fn reachable_address(listener: SocketAddr, local: SocketAddr) -> Option<SocketAddr> {
    let (listen_ip, local_ip) = (listener.ip().to_canonical(), local.ip().to_canonical());
    if !listen_ip.is_unspecified() {
        return Some(SocketAddr::new(listen_ip, listener.port()));
    }
    let accepts = match listen_ip {
        IpAddr::V4(_) => local_ip.is_ipv4(),
        IpAddr::V6(_) => true, // IPv4-mapped addresses too.
    };
    accepts.then(|| SocketAddr::new(local_ip, listener.port()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_are_reported_as_the_host_can_reach_them() {
        let table = [
            ("10.0.0.1:4420", "10.0.0.9:5", Some("10.0.0.1:4420")),
            ("0.0.0.0:4420", "10.0.0.9:5", Some("10.0.0.9:4420")),
            ("0.0.0.0:4420", "[fe80::1]:5", None),
            ("[::]:4421", "[fd00::1]:5", Some("[fd00::1]:4421")),
            ("[::]:4421", "[::ffff:10.0.0.9]:5", Some("10.0.0.9:4421")),
            ("[fd00::2]:1", "10.0.0.9:5", Some("[fd00::2]:1")),
        ];
        for (listener, local, want) in table {
            let got = reachable_address(listener.parse().unwrap(), local.parse().unwrap());
            assert_eq!(got, want.map(|address| address.parse().unwrap()), "{listener} from {local}");
        }
    }
}
