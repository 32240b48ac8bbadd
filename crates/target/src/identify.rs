//! Identify: what a controller and its namespaces say of themselves, as Linux and SPDK need it.

use crate::admin::View;
use crate::controller::Purpose;
use crate::errors;
use crate::settings::NamespaceInfo;
use octokv_base::NamespaceId;
use octokv_wire::command::{csi, event};
use octokv_wire::extension::{self, Announcement};
use octokv_wire::identify::{self as page, Descriptor, Request, cns, controller_type, set_text};
use octokv_wire::{Sqe, Status, kv, nqn};
use zerocopy::IntoBytes;
use zerocopy::byteorder::little_endian::{U16, U32, U64};

/// The version of the base specification that controllers follow: 2.0.
pub(crate) const NVME_VERSION: u32 = 0x0002_0000;
/// The version of the Key Value command set.
const KV_VERSION: u32 = 0x0001_0300;
/// What a Key Value namespace's size is counted in where a host asks for blocks.
const BLOCK_BYTES_LOG2: u8 = 12;
/// Controllers attached to a namespace, and controllers of the subsystem.
const CNS_CONTROLLERS_OF_NAMESPACE: u8 = 0x12;
const CNS_CONTROLLERS: u8 = 0x13;
/// The allocated namespace, and allocated namespaces of a command set.
const CNS_ALLOCATED: u8 = 0x11;
const CNS_ALLOCATED_LIST_OF_SET: u8 = 0x1a;

const INVALID_FIELD: Status = Status::INVALID_FIELD.do_not_retry();
const INVALID_NAMESPACE: Status = Status::INVALID_NAMESPACE.do_not_retry();

/// Fills `out` with the page that an Identify asks for.
pub(crate) fn identify(view: &View<'_>, sqe: &Sqe, out: &mut Vec<u8>) -> Result<(), Status> {
    let request = Request::of(sqe);
    if view.controller.purpose == Purpose::Discovery && request.cns != cns::CONTROLLER {
        return Err(INVALID_FIELD);
    }
    match request.cns {
        cns::CONTROLLER => out.extend_from_slice(controller(view).as_bytes()),
        cns::NAMESPACE | CNS_ALLOCATED => {
            out.extend_from_slice(block_view(named(view, &request)?).as_bytes())
        }
        cns::NAMESPACE_LIST => list(view, &request, all_sets(view), out)?,
        cns::ALLOCATED_LIST => list(view, &request, true, out)?,
        cns::NAMESPACE_LIST_OF_SET | CNS_ALLOCATED_LIST_OF_SET => match request.csi {
            csi::KEY_VALUE => list(view, &request, true, out)?,
            csi::NVM => list(view, &request, false, out)?,
            _ => return Err(INVALID_FIELD),
        },
        cns::DESCRIPTORS => {
            let namespace = named(view, &request)?;
            let ids = [Descriptor::Nguid(namespace.nguid), Descriptor::CommandSet(csi::KEY_VALUE)];
            out.extend_from_slice(&page::encode_descriptors(&ids));
        }
        cns::NAMESPACE_OF_SET if request.csi == csi::KEY_VALUE => {
            out.extend_from_slice(kv_view(named(view, &request)?).as_bytes());
        }
        cns::CONTROLLER_OF_SET if request.csi == csi::KEY_VALUE => {
            let mut limits = page::KvController::zeroed();
            limits.version = U32::new(KV_VERSION);
            out.extend_from_slice(limits.as_bytes());
        }
        // No limits of its own.
        cns::CONTROLLER_OF_SET if request.csi == csi::NVM => out.resize(page::PAGE_BYTES, 0),
        cns::NAMESPACE_INDEPENDENT => {
            named(view, &request)?;
            let mut independent = page::NamespaceIndependent::zeroed();
            independent.sharing = 1;
            independent.status = 1;
            out.extend_from_slice(independent.as_bytes());
        }
        CNS_CONTROLLERS_OF_NAMESPACE => {
            named(view, &request)?;
            controllers(view, request.controller_id, out);
        }
        CNS_CONTROLLERS => controllers(view, request.controller_id, out),
        cns::COMMAND_SETS => {
            let mut sets = page::CommandSets::zeroed();
            sets.combinations[0] = U64::new(1 << csi::NVM | 1 << csi::KEY_VALUE);
            out.extend_from_slice(sets.as_bytes());
        }
        _ => return Err(INVALID_FIELD),
    }
    Ok(())
}

fn named<'a>(view: &View<'a>, request: &Request) -> Result<&'a NamespaceInfo, Status> {
    view.target.namespace(request.namespace).map(|(_, namespace)| namespace).ok_or(INVALID_NAMESPACE)
}

/// Whether the host turned all command sets on. One that did not knows of blocks alone, and must not
/// take a Key Value namespace for a disk.
fn all_sets(view: &View<'_>) -> bool {
    view.controller.book().configuration.command_set() == 6
}

fn list(view: &View<'_>, request: &Request, shown: bool, out: &mut Vec<u8>) -> Result<(), Status> {
    let after = request.namespace.0;
    if after >= u32::MAX - 1 {
        return Err(INVALID_NAMESPACE);
    }
    let all = view.target.namespaces().iter().map(|namespace| namespace.id).filter(|_| shown);
    out.extend_from_slice(page::NamespaceList::above(after, all).as_bytes());
    Ok(())
}

fn controllers(view: &View<'_>, from: u16, out: &mut Vec<u8>) {
    const IDS_MAX: usize = 2047;
    let reports = view.target.controllers();
    let ids = reports.iter().filter(|one| one.purpose == Purpose::Io && one.id >= from).map(|one| one.id);
    let ids: Vec<u16> = ids.take(IDS_MAX).collect();
    out.extend_from_slice(&(ids.len() as u16).to_le_bytes());
    ids.iter().for_each(|id| out.extend_from_slice(&id.to_le_bytes()));
    out.resize(page::PAGE_BYTES, 0);
}

fn controller(view: &View<'_>) -> Box<page::Controller> {
    let settings = view.target.settings();
    let is_io = view.controller.purpose == Purpose::Io;
    let mut it = page::Controller::zeroed();
    set_text(&mut it.serial, &settings.serial);
    set_text(&mut it.model, &settings.model);
    set_text(&mut it.firmware, &settings.firmware);
    it.multi_path = 1 << 1; // Several controllers.
    it.data_pages_log2 = settings.value_bytes_max.div_ceil(4096).next_power_of_two().ilog2().max(1) as u8;
    it.controller_id = U16::new(view.controller.id);
    it.version = U32::new(NVME_VERSION);
    let notices = if is_io { event::NAMESPACE_CHANGED_BIT } else { event::DISCOVERY_CHANGED_BIT };
    it.events = U32::new(notices);
    it.attributes = U32::new(1); // 128-bit host identifiers.
    it.controller_type = if is_io { controller_type::IO } else { controller_type::DISCOVERY };
    it.abort_limit = 3;
    it.event_limit = settings.event_requests_max.saturating_sub(1);
    it.firmware_slots = 1 << 1 | 1; // One, read only.
    it.log_attributes = 1 << 1 | 1 << 2 | 1 << 5; // Effects, long offsets, the log of logs.
    it.error_entries = errors::ENTRIES as u8 - 1;
    it.keep_alive_granularity = U16::new(1);
    it.sqe_sizes = 0x66;
    it.cqe_sizes = 0x44;
    it.commands_max = U16::new(settings.queue_depth);
    it.sgl_support = U32::new(1 | 1 << 20); // Of any alignment; data in the capsule.
    it.command_capsule_units = U32::new((64 + settings.in_capsule_bytes) / 16);
    it.response_capsule_units = U32::new(1);
    it.sgl_descriptors_max = 1;
    it.fabrics_commands = U16::new(1); // Disconnect.
    if is_io {
        it.subsystem = nqn::encode(&settings.nqn);
        let highest = view.target.namespaces().last().map_or(0, |namespace| namespace.id.0);
        it.namespaces = U32::new(highest);
        it.namespaces_max = U32::new(view.target.namespaces().len() as u32);
        it.announce(&Announcement {
            version: extension::VERSION,
            key_bytes_max: settings.key_bytes_max,
            features: extension::FEATURE_LONG_KEYS,
        });
    } else {
        it.subsystem = nqn::encode(nqn::DISCOVERY);
    }
    it
}

/// A Key Value namespace in blocks: SPDK's host drops one whose capacity is zero.
fn block_view(namespace: &NamespaceInfo) -> Box<page::Namespace> {
    let blocks = |bytes: u64| bytes >> BLOCK_BYTES_LOG2;
    let mut it = page::Namespace::zeroed();
    it.size = U64::new(blocks(namespace.size_bytes).max(1));
    it.capacity = it.size;
    it.used = U64::new(blocks(namespace.used()).min(it.size.get()));
    it.sharing = 1;
    it.nguid = namespace.nguid;
    it.block_formats[0] = [0, 0, BLOCK_BYTES_LOG2, 0];
    it
}

fn kv_view(namespace: &NamespaceInfo) -> Box<page::KvNamespace> {
    let mut it = page::KvNamespace::zeroed();
    it.size_bytes = U64::new(namespace.size_bytes);
    it.used_bytes = U64::new(namespace.used());
    it.sharing = 1;
    it.nguid = namespace.nguid;
    it.kv_formats[0].key_bytes_max = U16::new(kv::KEY_BYTES_MAX as u16);
    it.kv_formats[0].value_bytes_max = U32::new(namespace.value_bytes_max);
    it
}

/// The namespaces of a target, for the logs that name them.
pub(crate) fn namespace_ids(view: &View<'_>) -> Vec<NamespaceId> {
    view.target.namespaces().iter().map(|namespace| namespace.id).collect()
}
