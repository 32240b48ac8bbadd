//! Builds the Identify pages of controllers and namespaces, with the fields that Linux and SPDK require.

use crate::admin_context::AdminContext;
use crate::controller::{ControllerType, is_namespace_visible};
use crate::error_log;
use crate::namespace_info::ANA_GROUPS_MAX;
use crate::namespace_info::{NamespaceInfo, NamespaceKind};
use octokv_wire::identify::{
    self as page, IdentifyRequest, NamespaceDescriptor, cns, controller_type, encode_text, oncs,
};
use octokv_wire::queue_entry::{csi, event};
use octokv_wire::vendor::{self, VendorCapabilities};
use octokv_wire::{Sqe, Status, kv, nqn};
use zerocopy::IntoBytes;
use zerocopy::byteorder::little_endian::{U16, U32, U64};

/// VS: the version of the base specification that controllers report, 2.0.
pub(crate) const NVME_VERSION: u32 = 0x0002_0000;
/// VER: the version of the Key Value Command Set, 1.3.
const KV_VERSION: u32 = 0x0001_0300;
/// Block size in which a Key Value namespace reports its capacity in CNS 00h.
const KV_BLOCK_BYTES: u32 = 4096;
/// MNAN, and the lowest NN: hosts size their tables by them. More namespaces may be added while a host is
/// connected.
const NAMESPACES_MAX: u32 = 1024;
/// ANATT: the longest ANA transition.
const ANA_TRANSITION_SECONDS_MAX: u8 = 10;
/// ANACAP: all ANA states are reported, and a namespace's group is constant while it is attached.
const ANA_CAPABILITIES: u8 = 0b0101_1111;
/// VWC: a volatile write cache exists; Flush with NSID FFFFFFFFh is not supported.
const VOLATILE_WRITE_CACHE: u8 = 1 | 0b10 << 1;

const INVALID_FIELD: Status = Status::INVALID_FIELD.do_not_retry();
const INVALID_NAMESPACE: Status = Status::INVALID_NAMESPACE.do_not_retry();

/// Appends the requested Identify page to `out`.
///
/// # Errors
/// An invalid field for an unsupported CNS or CSI; an invalid namespace for an unknown or invisible one.
pub(crate) fn identify(context: &AdminContext<'_>, sqe: &Sqe, out: &mut Vec<u8>) -> Result<(), Status> {
    let request = IdentifyRequest::from_sqe(sqe);
    if context.controller.controller_type == ControllerType::Discovery && request.cns != cns::CONTROLLER {
        return Err(INVALID_FIELD);
    }
    let csi_is = |csi| request.csi == csi;
    match request.cns {
        cns::CONTROLLER => out.extend_from_slice(controller_page(context).as_bytes()),
        cns::NAMESPACE | cns::ALLOCATED => write_namespace_page(context, &request, out, |namespace, out| {
            out.extend_from_slice(nvm_namespace_page(namespace).as_bytes());
            Ok(())
        })?,
        cns::NAMESPACE_LIST | cns::ALLOCATED_LIST => write_namespace_list(context, &request, |_| true, out)?,
        cns::NAMESPACE_LIST_OF_SET | cns::ALLOCATED_LIST_OF_SET
            if csi_is(csi::NVM) || csi_is(csi::KEY_VALUE) =>
        {
            write_namespace_list(context, &request, |namespace| csi_is(namespace.command_set()), out)?
        }
        cns::DESCRIPTORS => {
            let namespace = visible_namespace(context, &request)?;
            let ids = [
                NamespaceDescriptor::Nguid(namespace.nguid),
                NamespaceDescriptor::CommandSet(namespace.command_set()),
            ];
            out.extend_from_slice(&page::encode_descriptors(&ids));
        }
        cns::NAMESPACE_OF_SET if csi_is(csi::NVM) || csi_is(csi::KEY_VALUE) => {
            write_namespace_page(context, &request, out, |namespace, out| match namespace.command_set() {
                set if !csi_is(set) => Err(INVALID_FIELD),
                csi::KEY_VALUE => {
                    out.extend_from_slice(kv_namespace_page(namespace).as_bytes());
                    Ok(())
                }
                // No protection information, no further formats: all fields are 0.
                _ => {
                    out.resize(page::PAGE_BYTES, 0);
                    Ok(())
                }
            })?
        }
        cns::CONTROLLER_OF_SET if csi_is(csi::KEY_VALUE) => {
            let mut limits = page::IdentifyKvController::zeroed();
            limits.version = U32::new(KV_VERSION);
            out.extend_from_slice(limits.as_bytes());
        }
        cns::CONTROLLER_OF_SET if csi_is(csi::NVM) => {
            out.extend_from_slice(nvm_controller_page(context).as_bytes());
        }
        cns::NAMESPACE_INDEPENDENT => write_namespace_page(context, &request, out, |namespace, out| {
            let mut independent = page::IdentifyNamespaceIndependent::zeroed();
            independent.sharing = 1;
            independent.ana_group = U32::new(namespace.ana_group);
            independent.status = 1;
            out.extend_from_slice(independent.as_bytes());
            Ok(())
        })?,
        cns::CONTROLLERS_OF_NAMESPACE => {
            visible_namespace(context, &request)?;
            write_controller_list(context, request.controller_id, out);
        }
        cns::CONTROLLERS => write_controller_list(context, request.controller_id, out),
        cns::COMMAND_SETS => {
            let mut sets = page::CommandSetCombinations::zeroed();
            sets.combinations[0] = U64::new(1 << csi::NVM | 1 << csi::KEY_VALUE);
            out.extend_from_slice(sets.as_bytes());
        }
        _ => return Err(INVALID_FIELD),
    }
    Ok(())
}

/// The request's namespace, if it is visible to the host.
fn visible_namespace(context: &AdminContext<'_>, request: &IdentifyRequest) -> Result<NamespaceInfo, Status> {
    let cc = context.controller.lock_inner().configuration;
    let namespaces = context.target.namespaces();
    let visible = namespaces.get(request.namespace).filter(|namespace| is_namespace_visible(cc, namespace));
    visible.cloned().ok_or(INVALID_NAMESPACE)
}

/// Appends the page of the request's namespace; zeros for an unused identifier of 1 to NN.
fn write_namespace_page(
    context: &AdminContext<'_>,
    request: &IdentifyRequest,
    out: &mut Vec<u8>,
    page: impl Fn(&NamespaceInfo, &mut Vec<u8>) -> Result<(), Status>,
) -> Result<(), Status> {
    match visible_namespace(context, request) {
        Ok(namespace) => page(&namespace, out),
        Err(_) if (1..=namespace_id_max(context)).contains(&request.namespace.0) => {
            out.resize(page::PAGE_BYTES, 0);
            Ok(())
        }
        Err(status) => Err(status),
    }
}

/// The features of the vendor commands that the namespaces have.
fn vendor_features(context: &AdminContext<'_>) -> u32 {
    let has_iterators = context.target.namespaces().iter().any(|info| info.key_value_limits().has_iterators);
    let has_tokens = context.target.namespaces().iter().any(|info| info.tokens.is_some());
    let bit = |is_set, bit| if is_set { bit } else { 0 };
    vendor::FEATURE_LONG_KEYS
        | bit(has_iterators, vendor::FEATURE_ITERATORS)
        | bit(has_tokens, vendor::FEATURE_DEVICE_TOKENS)
}

/// NN: the highest namespace identifier that hosts must expect.
fn namespace_id_max(context: &AdminContext<'_>) -> u32 {
    let namespaces = context.target.namespaces();
    namespaces.iter().next_back().map_or(0, |namespace| namespace.id.0).max(NAMESPACES_MAX)
}

/// Appends the list of visible and `wanted` namespaces whose identifiers are above the request's.
fn write_namespace_list(
    context: &AdminContext<'_>,
    request: &IdentifyRequest,
    wanted: impl Fn(&NamespaceInfo) -> bool,
    out: &mut Vec<u8>,
) -> Result<(), Status> {
    let after = request.namespace.0;
    if after >= u32::MAX - 1 {
        return Err(INVALID_NAMESPACE);
    }
    let cc = context.controller.lock_inner().configuration;
    let namespaces = context.target.namespaces();
    let ids =
        namespaces.iter().filter(|info| is_namespace_visible(cc, info) && wanted(info)).map(|info| info.id);
    out.extend_from_slice(page::NamespaceIdList::above(after, ids).as_bytes());
    Ok(())
}

fn write_controller_list(context: &AdminContext<'_>, from: u16, out: &mut Vec<u8>) {
    const IDS_MAX: usize = 2047;
    let reports = context.target.controllers();
    let ids = reports
        .iter()
        .filter(|report| report.controller_type == ControllerType::Io && report.id >= from)
        .map(|report| report.id);
    let ids: Vec<u16> = ids.take(IDS_MAX).collect();
    out.extend_from_slice(&(ids.len() as u16).to_le_bytes());
    ids.iter().for_each(|id| out.extend_from_slice(&id.to_le_bytes()));
    out.resize(page::PAGE_BYTES, 0);
}

fn controller_page(context: &AdminContext<'_>) -> Box<page::IdentifyController> {
    let config = context.target.config();
    let is_io = context.controller.controller_type == ControllerType::Io;
    let mut fields = page::IdentifyController::zeroed();
    encode_text(&mut fields.serial, &config.serial);
    encode_text(&mut fields.model, &config.model);
    encode_text(&mut fields.firmware, &config.firmware);
    fields.multi_path = 1 << 1; // Several controllers.
    fields.data_pages_log2 = config.transfer_pages_log2();
    fields.controller_id = U16::new(context.controller.id);
    fields.version = U32::new(NVME_VERSION);
    let io_events = event::NAMESPACE_CHANGED_BIT | event::ANA_CHANGED_BIT;
    fields.events = U32::new(if is_io { io_events } else { event::DISCOVERY_CHANGED_BIT });
    fields.attributes = U32::new(1); // 128-bit host identifiers.
    fields.controller_type = if is_io { controller_type::IO } else { controller_type::DISCOVERY };
    fields.abort_limit = 3;
    fields.event_limit = config.event_requests_max.saturating_sub(1);
    fields.firmware_slots = 1 << 1 | 1; // One slot, read only.
    fields.log_attributes = 1 << 1 | 1 << 2 | 1 << 5; // Effects, long offsets, scopes and the log of supported logs.
    fields.error_entries = error_log::ERROR_LOG_ENTRIES as u8 - 1;
    fields.keep_alive_granularity = U16::new(1);
    fields.sqe_sizes = 0x66; // 2^6 bytes, required and maximum.
    fields.cqe_sizes = 0x44; // 2^4 bytes, required and maximum.
    fields.commands_max = U16::new(config.queue_depth);
    fields.sgl_support = U32::new(1 | 1 << 20); // Any alignment; data in the capsule.
    fields.command_capsule_units = U32::new((64 + config.in_capsule_bytes) / 16);
    fields.response_capsule_units = U32::new(1);
    fields.sgl_descriptors_max = 1;
    fields.fabrics_commands = U16::new(1); // Disconnect.
    if is_io {
        fields.subsystem = nqn::encode(&config.nqn);
        fields.namespace_id_max = U32::new(namespace_id_max(context));
        fields.namespaces_max = U32::new(NAMESPACES_MAX.max(context.target.namespaces().len() as u32));
        fields.multi_path |= 1 << 3; // ANA reporting.
        fields.ana_transition_seconds = ANA_TRANSITION_SECONDS_MAX;
        fields.ana_capabilities = ANA_CAPABILITIES;
        fields.ana_group_id_max = U32::new(ANA_GROUPS_MAX);
        fields.ana_groups = U32::new(ANA_GROUPS_MAX);
        fields.nvm_commands =
            U16::new(oncs::COMPARE | oncs::DATASET_MANAGEMENT | oncs::WRITE_ZEROES | oncs::VERIFY);
        fields.write_cache = VOLATILE_WRITE_CACHE;
        fields.set_vendor_capabilities(&VendorCapabilities {
            version: vendor::VERSION,
            key_bytes_max: config.key_bytes_max,
            features: vendor_features(context),
        });
    } else {
        fields.subsystem = nqn::encode(nqn::DISCOVERY);
    }
    fields
}

/// Limits Verify and Write Zeroes as if they transferred data.
fn nvm_controller_page(context: &AdminContext<'_>) -> Box<page::IdentifyNvmController> {
    let mut limits = page::IdentifyNvmController::zeroed();
    limits.verify_pages_log2 = context.target.config().transfer_pages_log2();
    limits.zeroes_pages_log2 = limits.verify_pages_log2;
    limits
}

/// The namespace in blocks. Key Value namespaces have this page too: SPDK's host drops a namespace whose NCAP
/// is 0. DLFEAT is 0, since the contents of deallocated blocks depend on the device.
fn nvm_namespace_page(namespace: &NamespaceInfo) -> Box<page::IdentifyNamespace> {
    let block_bytes = match namespace.kind {
        NamespaceKind::Block { block_bytes } => block_bytes,
        NamespaceKind::KeyValue { .. } => KV_BLOCK_BYTES,
    };
    let block = u64::from(block_bytes);
    let mut fields = page::IdentifyNamespace::zeroed();
    fields.size = U64::new((namespace.size_bytes / block).max(1));
    fields.capacity = fields.size;
    fields.used = U64::new(namespace.used_bytes().div_ceil(block).min(fields.size.get()));
    fields.sharing = 1;
    fields.ana_group = U32::new(namespace.ana_group);
    fields.nguid = namespace.nguid;
    fields.block_formats[0] = [0, 0, block_bytes.ilog2() as u8, 0];
    fields
}

fn kv_namespace_page(namespace: &NamespaceInfo) -> Box<page::IdentifyKvNamespace> {
    let mut fields = page::IdentifyKvNamespace::zeroed();
    fields.size_bytes = U64::new(namespace.size_bytes);
    fields.used_bytes = U64::new(namespace.used_bytes());
    fields.sharing = 1;
    fields.ana_group = U32::new(namespace.ana_group);
    fields.nguid = namespace.nguid;
    fields.kv_formats[0].key_bytes_max = U16::new(kv::KEY_BYTES_MAX as u16);
    fields.kv_formats[0].value_bytes_max = U32::new(namespace.key_value_limits().value_bytes_max);
    fields
}
