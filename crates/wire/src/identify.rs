//! Identify pages of a controller (NVMe Base 2.1, 5.1.13).
//!
//! Each page is a type of 4096 bytes: `zerocopy::IntoBytes::as_bytes` encodes it and [`decode_page`] casts received bytes
//! to it. Fields that octokv does not use are zero and have no name. [`crate::identify_namespace`] has the pages of
//! namespaces and [`crate::identify_page`] the common parts; both are re-exported here.

pub use crate::identify_namespace::{
    IdentifyKvNamespace, IdentifyNamespace, IdentifyNamespaceIndependent, KvFormat, NamespaceDescriptor,
    NamespaceIdList, decode_descriptors, encode_descriptors,
};
pub use crate::identify_page::{PAGE_BYTES, decode_page, decode_text, encode_text};

use crate::queue_entry::{Sqe, admin};
use crate::vendor::{VENDOR_CAPABILITIES_BYTES, VENDOR_CAPABILITIES_OFFSET, VendorCapabilities};
use octokv_base::NamespaceId;
use std::mem::offset_of;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Controller or Namespace Structure (CNS): selects the page.
pub mod cns {
    /// Namespace of the NVM command set.
    pub const NAMESPACE: u8 = 0x00;
    /// Controller.
    pub const CONTROLLER: u8 = 0x01;
    /// Active namespaces with identifiers above CDW1.
    pub const NAMESPACE_LIST: u8 = 0x02;
    /// Identification descriptors of a namespace.
    pub const DESCRIPTORS: u8 = 0x03;
    /// Namespace of the command set CSI.
    pub const NAMESPACE_OF_SET: u8 = 0x05;
    /// Controller limits of the command set CSI.
    pub const CONTROLLER_OF_SET: u8 = 0x06;
    /// Active namespaces of the command set CSI with identifiers above CDW1.
    pub const NAMESPACE_LIST_OF_SET: u8 = 0x07;
    /// Namespace, independent of the command set.
    pub const NAMESPACE_INDEPENDENT: u8 = 0x08;
    /// Allocated namespaces with identifiers above CDW1.
    pub const ALLOCATED_LIST: u8 = 0x10;
    /// Allocated namespace of the NVM command set.
    pub const ALLOCATED: u8 = 0x11;
    /// Controllers attached to a namespace.
    pub const CONTROLLERS_OF_NAMESPACE: u8 = 0x12;
    /// Controllers of the subsystem.
    pub const CONTROLLERS: u8 = 0x13;
    /// Allocated namespaces of the command set CSI with identifiers above CDW1.
    pub const ALLOCATED_LIST_OF_SET: u8 = 0x1a;
    /// Supported combinations of I/O command sets.
    pub const COMMAND_SETS: u8 = 0x1c;
}

/// The fields of an Identify command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdentifyRequest {
    /// Page, as in [`cns`].
    pub cns: u8,
    /// Command set identifier, if the page has one.
    pub csi: u8,
    /// Controller identifier, if the page has one.
    pub controller_id: u16,
    /// Namespace, or the identifier above which a list starts.
    pub namespace: NamespaceId,
}

impl IdentifyRequest {
    /// Decodes an entry.
    pub fn from_sqe(sqe: &Sqe) -> IdentifyRequest {
        let (cdw10, cdw11) = (sqe.cdw10.get(), sqe.cdw11.get());
        IdentifyRequest {
            cns: cdw10 as u8,
            csi: (cdw11 >> 24) as u8,
            controller_id: (cdw10 >> 16) as u16,
            namespace: sqe.namespace(),
        }
    }

    /// Encodes the entry, its data pointer left empty.
    pub fn encode(&self, command_id: u16) -> Sqe {
        let mut sqe = Sqe::new(admin::IDENTIFY, command_id);
        sqe.nsid = U32::new(self.namespace.0);
        sqe.cdw10 = U32::new(u32::from(self.cns) | u32::from(self.controller_id) << 16);
        sqe.cdw11 = U32::new(u32::from(self.csi) << 24);
        sqe
    }
}

/// Controller types (CNTRLTYPE).
pub mod controller_type {
    /// I/O controller.
    pub const IO: u8 = 1;
    /// Discovery controller.
    pub const DISCOVERY: u8 = 2;
}

/// CNS 01h: the controller.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone)]
#[repr(C)]
pub struct IdentifyController {
    /// PCI vendor id; 0 for none.
    pub vendor_id: U16,
    /// PCI subsystem vendor id; 0 for none.
    pub subsystem_vendor_id: U16,
    /// Serial number, ASCII, space padded.
    pub serial: [u8; 20],
    /// Model number, ASCII, space padded.
    pub model: [u8; 40],
    /// Firmware revision, ASCII, space padded.
    pub firmware: [u8; 8],
    /// Recommended arbitration burst (RAB).
    pub arbitration_burst: u8,
    /// IEEE OUI of the vendor, least significant byte first.
    pub ieee_oui: [u8; 3],
    /// CMIC: bit 1 several controllers, bit 3 ANA.
    pub multi_path: u8,
    /// MDTS: the maximum data of one command is 2^this × 4 KiB; 0 for no limit.
    pub data_pages_log2: u8,
    /// Controller identifier (CNTLID).
    pub controller_id: U16,
    /// NVMe version (VER).
    pub version: U32,
    zero_84: [u8; 8],
    /// OAES: supported asynchronous events, bits of [`crate::queue_entry::event`].
    pub events: U32,
    /// CTRATT: bit 0 host identifiers of 128 bits.
    pub attributes: U32,
    zero_100: [u8; 11],
    /// CNTRLTYPE, as in [`controller_type`].
    pub controller_type: u8,
    zero_112: [u8; 16],
    /// CRDT1-3: command retry delays, in units of 100 ms.
    pub retry_delays: [U16; 3],
    zero_134: [u8; 122],
    /// OACS: optional admin commands.
    pub admin_commands: U16,
    /// ACL: maximum number of concurrent Aborts, 0's based.
    pub abort_limit: u8,
    /// AERL: maximum number of event requests, 0's based.
    pub event_limit: u8,
    /// FRMW: bit 0 slot 1 is read only, bits 3:1 number of slots.
    pub firmware_slots: u8,
    /// LPA: bit 1 effects log, bit 2 extended log data, bit 3 telemetry, bit 5 all pages.
    pub log_attributes: u8,
    /// ELPE: error log entries, 0's based.
    pub error_entries: u8,
    zero_263: [u8; 3],
    /// WCTEMP: warning temperature, in kelvin.
    pub warning_temperature: U16,
    /// CCTEMP: critical temperature, in kelvin.
    pub critical_temperature: U16,
    zero_270: [u8; 50],
    /// KAS: granularity of the keep alive timer, in units of 100 ms.
    pub keep_alive_granularity: U16,
    zero_322: [u8; 20],
    /// ANATT: maximum time of an ANA state change, in seconds.
    pub ana_transition_seconds: u8,
    /// ANACAP: supported ANA states.
    pub ana_capabilities: u8,
    /// ANAGRPMAX: largest ANA group identifier.
    pub ana_group_id_max: U32,
    /// NANAGRPID: number of ANA groups.
    pub ana_groups: U32,
    zero_352: [u8; 160],
    /// SQES: bits 3:0 required, bits 7:4 maximum entry size, log2 of bytes.
    pub sqe_sizes: u8,
    /// CQES, as SQES.
    pub cqe_sizes: u8,
    /// MAXCMD: maximum number of commands in flight on a queue.
    pub commands_max: U16,
    /// NN: largest namespace identifier.
    pub namespace_id_max: U32,
    /// ONCS: optional NVM commands, bits of [`oncs`].
    pub nvm_commands: U16,
    /// FUSES: fused operations.
    pub fused: U16,
    /// FNA: format attributes.
    pub format: u8,
    /// VWC: bit 0 a volatile cache, bits 2:1 flush with all namespaces.
    pub write_cache: u8,
    zero_526: [u8; 10],
    /// SGLS: bits 1:0 supported, bit 20 offset in capsule.
    pub sgl_support: U32,
    /// MNAN: maximum number of namespaces.
    pub namespaces_max: U32,
    zero_544: [u8; 224],
    /// SUBNQN: NQN of the subsystem.
    pub subsystem: [u8; 256],
    zero_1024: [u8; 768],
    /// IOCCSZ: capsule of an I/O command, in units of 16 B, the entry included.
    pub command_capsule_units: U32,
    /// IORCSZ: capsule of an I/O response, in units of 16 B.
    pub response_capsule_units: U32,
    /// ICDOFF: offset of in-capsule data, in units of 16 B.
    pub capsule_data_offset: U16,
    /// FCATT: bit 0 static controllers.
    pub fabrics_attributes: u8,
    /// MSDBD: maximum number of SGL descriptors per command.
    pub sgl_descriptors_max: u8,
    /// OFCS: bit 0 Disconnect.
    pub fabrics_commands: U16,
    zero_1806: [u8; 242],
    /// Power state descriptor 0.
    pub power_state: [u8; 32],
    zero_2080: [u8; 992],
    /// Vendor specific, octokv's capabilities first.
    vendor_capabilities: [u8; VENDOR_CAPABILITIES_BYTES],
    vendor: [u8; 1008],
}
const _: () = assert!(size_of::<IdentifyController>() == PAGE_BYTES);
const _: () = assert!(offset_of!(IdentifyController, data_pages_log2) == 77);
const _: () = assert!(offset_of!(IdentifyController, events) == 92);
const _: () = assert!(offset_of!(IdentifyController, controller_type) == 111);
const _: () = assert!(offset_of!(IdentifyController, admin_commands) == 256);
const _: () = assert!(offset_of!(IdentifyController, warning_temperature) == 266);
const _: () = assert!(offset_of!(IdentifyController, keep_alive_granularity) == 320);
const _: () = assert!(offset_of!(IdentifyController, ana_transition_seconds) == 342);
const _: () = assert!(offset_of!(IdentifyController, sqe_sizes) == 512);
const _: () = assert!(offset_of!(IdentifyController, namespace_id_max) == 516);
const _: () = assert!(offset_of!(IdentifyController, sgl_support) == 536);
const _: () = assert!(offset_of!(IdentifyController, subsystem) == 768);
const _: () = assert!(offset_of!(IdentifyController, command_capsule_units) == 1792);
const _: () = assert!(offset_of!(IdentifyController, power_state) == 2048);
const _: () = assert!(offset_of!(IdentifyController, vendor_capabilities) == VENDOR_CAPABILITIES_OFFSET);

impl IdentifyController {
    /// A page of zeros.
    pub fn zeroed() -> Box<IdentifyController> {
        Box::new(IdentifyController::new_zeroed())
    }

    /// Sets octokv's vendor capabilities.
    pub fn set_vendor_capabilities(&mut self, capabilities: &VendorCapabilities) {
        self.vendor_capabilities = capabilities.encode();
    }

    /// octokv's vendor capabilities; `None` for a controller of another vendor.
    pub fn vendor_capabilities(&self) -> Option<VendorCapabilities> {
        VendorCapabilities::decode(&self.vendor_capabilities)
    }

    /// Maximum data of an I/O command in its capsule, in bytes.
    pub fn capsule_data_bytes(&self) -> u32 {
        self.command_capsule_units.get().saturating_mul(16).saturating_sub(64)
    }

    /// Maximum data of one command with 4 KiB pages, in bytes; `None` for no limit.
    pub fn data_bytes_max(&self) -> Option<u64> {
        (self.data_pages_log2 != 0).then(|| 4096u64.saturating_mul(1u64 << self.data_pages_log2.min(40)))
    }
}

/// CNS 06h, CSI 01h: the controller's Key Value limits.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone)]
#[repr(C)]
pub struct IdentifyKvController {
    /// Version of the command set (VER).
    pub version: U32,
    zero_4: [u8; 4092],
}
const _: () = assert!(size_of::<IdentifyKvController>() == PAGE_BYTES);

impl IdentifyKvController {
    /// A page of zeros.
    pub fn zeroed() -> Box<IdentifyKvController> {
        Box::new(IdentifyKvController::new_zeroed())
    }
}

/// CNS 06h, CSI 00h: the controller's limits of NVM commands.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone)]
#[repr(C)]
pub struct IdentifyNvmController {
    /// VSL: maximum size of one Verify is 2^this × 4 KiB; 0 for no limit.
    pub verify_pages_log2: u8,
    /// WZSL: maximum size of one Write Zeroes, as VSL.
    pub zeroes_pages_log2: u8,
    /// WUSL: maximum size of one Write Uncorrectable, as VSL.
    pub uncorrectable_pages_log2: u8,
    /// DMRL: maximum number of ranges of one Dataset Management; 0 for no limit.
    pub ranges_max: u8,
    /// DMRSL: maximum number of blocks of one range; 0 for no limit.
    pub range_blocks_max: U32,
    /// DMSL: maximum number of blocks of all ranges; 0 for no limit.
    pub ranges_blocks_max: U64,
    zero_16: [u8; 4080],
}
const _: () = assert!(size_of::<IdentifyNvmController>() == PAGE_BYTES);

impl IdentifyNvmController {
    /// A page of zeros.
    pub fn zeroed() -> Box<IdentifyNvmController> {
        Box::new(IdentifyNvmController::new_zeroed())
    }
}

/// ONCS bits: optional NVM commands.
pub mod oncs {
    /// Compare.
    pub const COMPARE: u16 = 1 << 0;
    /// Dataset Management.
    pub const DATASET_MANAGEMENT: u16 = 1 << 2;
    /// Write Zeroes.
    pub const WRITE_ZEROES: u16 = 1 << 3;
    /// Verify.
    pub const VERIFY: u16 = 1 << 7;
}

/// CNS 1Ch: combinations of I/O command sets, each a bit vector (bit 0 NVM, bit 1 Key Value).
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone)]
#[repr(C)]
pub struct CommandSetCombinations {
    /// Combinations; 0 for an empty slot.
    pub combinations: [U64; 512],
}
const _: () = assert!(size_of::<CommandSetCombinations>() == PAGE_BYTES);

impl CommandSetCombinations {
    /// A page of zeros.
    pub fn zeroed() -> Box<CommandSetCombinations> {
        Box::new(CommandSetCombinations::new_zeroed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Prng;

    #[test]
    fn requests_round_trip() {
        let request = IdentifyRequest { cns: 5, csi: 1, controller_id: 7, namespace: NamespaceId(9) };
        let sqe = request.encode(1);
        assert_eq!((sqe.cdw10.get(), sqe.cdw11.get()), (0x0007_0005, 0x0100_0000));
        assert_eq!(IdentifyRequest::from_sqe(&sqe), request);
    }

    #[test]
    fn the_controller_page_carries_vendor_capabilities_and_limits() {
        let mut page = IdentifyController::zeroed();
        let capabilities = VendorCapabilities { version: 1, key_bytes_max: 1024, features: 1 };
        page.set_vendor_capabilities(&capabilities);
        page.command_capsule_units = U32::new((16384 + 64) / 16);
        page.data_pages_log2 = 9;
        encode_text(&mut page.serial, "OKV\u{e9}");
        let bytes = page.as_bytes();
        assert_eq!(&bytes[3072..3076], b"OKV1");
        assert_eq!(&bytes[4..10], b"OKV?? ");
        let read: &IdentifyController = decode_page(bytes).unwrap();
        assert_eq!(read.vendor_capabilities(), Some(capabilities));
        assert_eq!((read.capsule_data_bytes(), read.data_bytes_max()), (16384, Some(2 << 20)));
        assert_eq!(decode_text(&read.serial), "OKV??");
        assert!(super::decode_page::<IdentifyController>(&bytes[1..]).is_none());
    }

    #[test]
    fn random_pages_never_panic() {
        let mut random = Prng::new(5);
        let mut page = vec![0; PAGE_BYTES];
        for _ in 0..500 {
            random.fill(&mut page);
            let cut = random.below(PAGE_BYTES as u64 + 1) as usize;
            let _ = decode_descriptors(&page[..cut]);
            let controller: &IdentifyController = decode_page(&page).unwrap();
            let _ = (
                controller.vendor_capabilities(),
                controller.data_bytes_max(),
                controller.capsule_data_bytes(),
            );
            let _ = decode_text(&controller.model);
        }
    }
}
