//! Identify: what a controller and its namespaces say of themselves (NVMe Base 2.1, 5.1.13).
//!
//! Each page is 4096 bytes and a type here; `zerocopy::IntoBytes::as_bytes` gives the bytes to send and
//! [`read`] the page of bytes that came. Fields that octokv does not use are zero and have no name.

use crate::command::{Sqe, admin};
use crate::extension::{ANNOUNCEMENT_BYTES, ANNOUNCEMENT_OFFSET, Announcement};
use octokv_base::NamespaceId;
use std::mem::offset_of;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of every page.
pub const PAGE_BYTES: usize = 4096;

/// Which page (CNS).
pub mod cns {
    /// Namespace, NVM command set.
    pub const NAMESPACE: u8 = 0x00;
    /// Controller.
    pub const CONTROLLER: u8 = 0x01;
    /// Active namespaces above CDW1.
    pub const NAMESPACE_LIST: u8 = 0x02;
    /// Identification descriptors of a namespace.
    pub const DESCRIPTORS: u8 = 0x03;
    /// Namespace, of a command set.
    pub const NAMESPACE_OF_SET: u8 = 0x05;
    /// Controller, of a command set.
    pub const CONTROLLER_OF_SET: u8 = 0x06;
    /// Active namespaces of a command set above CDW1.
    pub const NAMESPACE_LIST_OF_SET: u8 = 0x07;
    /// Namespace, independent of command sets.
    pub const NAMESPACE_INDEPENDENT: u8 = 0x08;
    /// Allocated namespaces above CDW1.
    pub const ALLOCATED_LIST: u8 = 0x10;
    /// Combinations of command sets.
    pub const COMMAND_SETS: u8 = 0x1c;
}

/// The fields of an Identify command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Which page, as in [`cns`].
    pub cns: u8,
    /// Command set, where the page has one.
    pub csi: u8,
    /// Controller, where the page asks for one.
    pub controller_id: u16,
    /// Namespace, or where a list starts.
    pub namespace: NamespaceId,
}

impl Request {
    /// Of an entry.
    pub fn of(sqe: &Sqe) -> Request {
        let (cdw10, cdw11) = (sqe.cdw10.get(), sqe.cdw11.get());
        Request {
            cns: cdw10 as u8,
            csi: (cdw11 >> 24) as u8,
            controller_id: (cdw10 >> 16) as u16,
            namespace: sqe.namespace(),
        }
    }

    /// The entry, its data pointer left empty.
    pub fn encode(&self, command_id: u16) -> Sqe {
        let mut sqe = Sqe::new(admin::IDENTIFY, command_id);
        sqe.nsid = U32::new(self.namespace.0);
        sqe.cdw10 = U32::new(u32::from(self.cns) | u32::from(self.controller_id) << 16);
        sqe.cdw11 = U32::new(u32::from(self.csi) << 24);
        sqe
    }
}

/// The page in `bytes`, or `None` when they are too few.
pub fn read<T: FromBytes + Immutable + KnownLayout + Unaligned>(bytes: &[u8]) -> Option<&T> {
    T::ref_from_prefix(bytes).ok().map(|(page, _)| page)
}

/// Kinds of controllers (CNTRLTYPE).
pub mod controller_type {
    /// I/O controller.
    pub const IO: u8 = 1;
    /// Discovery controller.
    pub const DISCOVERY: u8 = 2;
}

/// CNS 01h: the controller.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone)]
#[repr(C)]
pub struct Controller {
    /// PCI vendor id; 0 where there is none.
    pub vendor_id: U16,
    /// PCI subsystem vendor id.
    pub subsystem_vendor_id: U16,
    /// Serial number, ASCII, spaces behind.
    pub serial: [u8; 20],
    /// Model number, ASCII, spaces behind.
    pub model: [u8; 40],
    /// Firmware revision, ASCII, spaces behind.
    pub firmware: [u8; 8],
    /// Recommended arbitration burst.
    pub arbitration_burst: u8,
    /// IEEE OUI.
    pub ieee_oui: [u8; 3],
    /// CMIC: bit 1 several controllers, bit 3 ANA.
    pub multi_path: u8,
    /// MDTS: the most data of one command is 2^this × 4 KiB; 0 no limit.
    pub data_pages_log2: u8,
    /// CNTLID.
    pub controller_id: U16,
    /// VER.
    pub version: U32,
    zero_84: [u8; 8],
    /// OAES: events that can be asked for, as in [`crate::command::event`].
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
    /// OACS.
    pub admin_commands: U16,
    /// ACL: aborts at a time, 0's based.
    pub abort_limit: u8,
    /// AERL: event requests at a time, 0's based.
    pub event_limit: u8,
    /// FRMW: bit 0 slot 1 is read only, bits 3:1 slots.
    pub firmware_slots: u8,
    /// LPA: bit 1 effects log, bit 2 extended log data, bit 3 telemetry, bit 5 all pages.
    pub log_attributes: u8,
    /// ELPE: error log entries, 0's based.
    pub error_entries: u8,
    zero_263: [u8; 3],
    /// WCTEMP, in kelvin.
    pub warning_temperature: U16,
    /// CCTEMP, in kelvin.
    pub critical_temperature: U16,
    zero_270: [u8; 50],
    /// KAS: granularity of the keep alive timer, in units of 100 ms.
    pub keep_alive_granularity: U16,
    zero_322: [u8; 20],
    /// ANATT: seconds that a change of ANA state may take.
    pub ana_seconds: u8,
    /// ANACAP.
    pub ana_capabilities: u8,
    /// ANAGRPMAX.
    pub ana_group_max: U32,
    /// NANAGRPID.
    pub ana_groups: U32,
    zero_352: [u8; 160],
    /// SQES: bits 3:0 required, bits 7:4 most, log2 of bytes.
    pub sqe_sizes: u8,
    /// CQES, as SQES.
    pub cqe_sizes: u8,
    /// MAXCMD: the most commands at once on a queue.
    pub commands_max: U16,
    /// NN: the highest namespace identifier.
    pub namespaces: U32,
    /// ONCS.
    pub nvm_commands: U16,
    /// FUSES.
    pub fused: U16,
    /// FNA.
    pub format: u8,
    /// VWC: bit 0 a volatile cache, bits 2:1 flush with all namespaces.
    pub write_cache: u8,
    zero_526: [u8; 10],
    /// SGLS: bits 1:0 supported, bit 20 offset in capsule.
    pub sgl_support: U32,
    /// MNAN: the most namespaces allowed.
    pub namespaces_max: U32,
    zero_544: [u8; 224],
    /// SUBNQN.
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
    /// MSDBD: SGL descriptors per command.
    pub sgl_descriptors_max: u8,
    /// OFCS: bit 0 Disconnect.
    pub fabrics_commands: U16,
    zero_1806: [u8; 242],
    /// Power state 0.
    pub power_state: [u8; 32],
    zero_2080: [u8; 992],
    /// Vendor specific, octokv's announcement first.
    announcement: [u8; ANNOUNCEMENT_BYTES],
    vendor: [u8; 1008],
}
const _: () = assert!(size_of::<Controller>() == PAGE_BYTES);
const _: () = assert!(offset_of!(Controller, data_pages_log2) == 77);
const _: () = assert!(offset_of!(Controller, events) == 92);
const _: () = assert!(offset_of!(Controller, controller_type) == 111);
const _: () = assert!(offset_of!(Controller, admin_commands) == 256);
const _: () = assert!(offset_of!(Controller, warning_temperature) == 266);
const _: () = assert!(offset_of!(Controller, keep_alive_granularity) == 320);
const _: () = assert!(offset_of!(Controller, ana_seconds) == 342);
const _: () = assert!(offset_of!(Controller, sqe_sizes) == 512);
const _: () = assert!(offset_of!(Controller, namespaces) == 516);
const _: () = assert!(offset_of!(Controller, sgl_support) == 536);
const _: () = assert!(offset_of!(Controller, subsystem) == 768);
const _: () = assert!(offset_of!(Controller, command_capsule_units) == 1792);
const _: () = assert!(offset_of!(Controller, power_state) == 2048);
const _: () = assert!(offset_of!(Controller, announcement) == ANNOUNCEMENT_OFFSET);

impl Controller {
    /// A page of zeros.
    pub fn zeroed() -> Box<Controller> {
        Box::new(Controller::new_zeroed())
    }

    /// Puts octokv's announcement in.
    pub fn announce(&mut self, announcement: &Announcement) {
        self.announcement = announcement.encode();
    }

    /// octokv's announcement, where there is one.
    pub fn announcement(&self) -> Option<Announcement> {
        Announcement::decode(&self.announcement)
    }

    /// How much data an I/O command may carry in its capsule, in bytes.
    pub fn capsule_data_bytes(&self) -> u32 {
        self.command_capsule_units.get().saturating_mul(16).saturating_sub(64)
    }

    /// The most data of one command, in bytes, where there is a limit, with 4 KiB pages.
    pub fn data_bytes_max(&self) -> Option<u64> {
        (self.data_pages_log2 != 0).then(|| 4096u64.saturating_mul(1u64 << self.data_pages_log2.min(40)))
    }
}

/// Fills an ASCII field: the text, cut where the field ends, then spaces.
pub fn set_text(field: &mut [u8], text: &str) {
    field.fill(b' ');
    let bytes = &text.as_bytes()[..text.len().min(field.len())];
    for (to, &from) in field.iter_mut().zip(bytes) {
        *to = if (0x20..0x7f).contains(&from) { from } else { b'?' };
    }
}

/// The text of an ASCII field without the spaces or zeros behind it.
pub fn text(field: &[u8]) -> String {
    String::from_utf8_lossy(field).trim_end_matches([' ', '\0']).to_string()
}

/// CNS 00h: a namespace as the NVM command set sees it. For a Key Value namespace the sizes must not be
/// 0, or SPDK's host drops it.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone)]
#[repr(C)]
pub struct Namespace {
    /// NSZE, in blocks.
    pub size: U64,
    /// NCAP, in blocks.
    pub capacity: U64,
    /// NUSE, in blocks.
    pub used: U64,
    /// NSFEAT.
    pub features: u8,
    /// NLBAF, 0's based.
    pub formats: u8,
    /// FLBAS.
    pub format: u8,
    zero_27: [u8; 3],
    /// NMIC: bit 0 shared.
    pub sharing: u8,
    zero_31: [u8; 61],
    /// ANAGRPID.
    pub ana_group: U32,
    zero_96: [u8; 8],
    /// NGUID.
    pub nguid: [u8; 16],
    /// EUI64.
    pub eui64: [u8; 8],
    /// LBAF: {metadata bytes u16, log2 of block bytes u8, performance u8}.
    pub block_formats: [[u8; 4]; 64],
    zero_384: [u8; 3712],
}
const _: () = assert!(size_of::<Namespace>() == PAGE_BYTES);
const _: () = assert!(offset_of!(Namespace, ana_group) == 92);
const _: () = assert!(offset_of!(Namespace, nguid) == 104);
const _: () = assert!(offset_of!(Namespace, block_formats) == 128);

impl Namespace {
    /// A page of zeros.
    pub fn zeroed() -> Box<Namespace> {
        Box::new(Namespace::new_zeroed())
    }
}

/// One key-value format of a namespace.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy, Debug)]
#[repr(C)]
pub struct KvFormat {
    /// KVKML: the longest key, in bytes, at most 16.
    pub key_bytes_max: U16,
    zero_2: u8,
    /// Additional options.
    pub options: u8,
    /// KVVML: the longest value, in bytes.
    pub value_bytes_max: U32,
    /// MNK: the most keys; 0 no limit.
    pub keys_max: U32,
    zero_12: [u8; 4],
}

/// CNS 05h, CSI 01h: a Key Value namespace.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone)]
#[repr(C)]
pub struct KvNamespace {
    /// NSZE, in bytes.
    pub size_bytes: U64,
    zero_8: [u8; 8],
    /// NUSE, in bytes.
    pub used_bytes: U64,
    /// NSFEAT.
    pub features: u8,
    /// NKVF: formats, 0's based.
    pub formats: u8,
    /// NMIC: bit 0 shared.
    pub sharing: u8,
    /// RESCAP.
    pub reservations: u8,
    /// FPI.
    pub format_progress: u8,
    /// KVFC: bits 3:0 the format in use.
    pub format: u8,
    zero_30: [u8; 2],
    /// NOVG: optimal granularity of values, in bytes; 0 unknown.
    pub value_granularity_bytes: U32,
    /// ANAGRPID.
    pub ana_group: U32,
    zero_40: [u8; 3],
    /// NSATTR.
    pub attributes: u8,
    /// NVMSETID.
    pub nvm_set: U16,
    /// ENDGID.
    pub endurance_group: U16,
    /// NGUID.
    pub nguid: [u8; 16],
    /// EUI64.
    pub eui64: [u8; 8],
    /// KVF.
    pub kv_formats: [KvFormat; 16],
    zero_328: [u8; 3768],
}
const _: () = assert!(size_of::<KvNamespace>() == PAGE_BYTES);
const _: () = assert!(size_of::<KvFormat>() == 16);
const _: () = assert!(offset_of!(KvNamespace, format) == 29);
const _: () = assert!(offset_of!(KvNamespace, ana_group) == 36);
const _: () = assert!(offset_of!(KvNamespace, nguid) == 48);
const _: () = assert!(offset_of!(KvNamespace, kv_formats) == 72);

impl KvNamespace {
    /// A page of zeros.
    pub fn zeroed() -> Box<KvNamespace> {
        Box::new(KvNamespace::new_zeroed())
    }
}

/// CNS 06h, CSI 01h: the controller's Key Value limits.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone)]
#[repr(C)]
pub struct KvController {
    /// VER of the command set.
    pub version: U32,
    zero_4: [u8; 4092],
}
const _: () = assert!(size_of::<KvController>() == PAGE_BYTES);

impl KvController {
    /// A page of zeros.
    pub fn zeroed() -> Box<KvController> {
        Box::new(KvController::new_zeroed())
    }
}

/// CNS 08h: a namespace, independent of command sets.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone)]
#[repr(C)]
pub struct NamespaceIndependent {
    /// NSFEAT.
    pub features: u8,
    /// NMIC: bit 0 shared.
    pub sharing: u8,
    /// RESCAP.
    pub reservations: u8,
    /// FPI.
    pub format_progress: u8,
    /// ANAGRPID.
    pub ana_group: U32,
    /// NSATTR.
    pub attributes: u8,
    zero_9: u8,
    /// NVMSETID.
    pub nvm_set: U16,
    /// ENDGID.
    pub endurance_group: U16,
    /// NSTAT: bit 0 ready.
    pub status: u8,
    zero_15: [u8; 4081],
}
const _: () = assert!(size_of::<NamespaceIndependent>() == PAGE_BYTES);
const _: () = assert!(offset_of!(NamespaceIndependent, status) == 14);

impl NamespaceIndependent {
    /// A page of zeros.
    pub fn zeroed() -> Box<NamespaceIndependent> {
        Box::new(NamespaceIndependent::new_zeroed())
    }
}

/// CNS 02h and 07h: namespaces that are above a given one, ascending, 0 behind the last.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone)]
#[repr(C)]
pub struct NamespaceList([U32; 1024]);
const _: () = assert!(size_of::<NamespaceList>() == PAGE_BYTES);

impl NamespaceList {
    /// Of the first 1024 of `all` (ascending) that are above `after`.
    pub fn above(after: u32, all: impl Iterator<Item = NamespaceId>) -> Box<NamespaceList> {
        let mut list = Box::new(NamespaceList::new_zeroed());
        for (slot, id) in list.0.iter_mut().zip(all.filter(|id| id.0 > after)) {
            *slot = U32::new(id.0);
        }
        list
    }

    /// The namespaces in it.
    pub fn ids(&self) -> impl Iterator<Item = NamespaceId> + '_ {
        self.0.iter().map(|id| NamespaceId(id.get())).take_while(|id| id.0 != 0)
    }
}

/// CNS 1Ch: combinations of I/O command sets, each a bit vector (bit 0 NVM, bit 1 Key Value).
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone)]
#[repr(C)]
pub struct CommandSets {
    /// The combinations.
    pub combinations: [U64; 512],
}
const _: () = assert!(size_of::<CommandSets>() == PAGE_BYTES);

impl CommandSets {
    /// A page of zeros.
    pub fn zeroed() -> Box<CommandSets> {
        Box::new(CommandSets::new_zeroed())
    }
}

/// An identification descriptor of a namespace, CNS 03h.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Descriptor {
    /// NIDT 1.
    Eui64([u8; 8]),
    /// NIDT 2.
    Nguid([u8; 16]),
    /// NIDT 3.
    Uuid([u8; 16]),
    /// NIDT 4: the command set identifier.
    CommandSet(u8),
}

/// The page of these descriptors, as many as have room.
pub fn encode_descriptors(descriptors: &[Descriptor]) -> [u8; PAGE_BYTES] {
    let mut page = [0; PAGE_BYTES];
    let mut at = 0;
    for descriptor in descriptors {
        let (kind, id): (u8, &[u8]) = match descriptor {
            Descriptor::Eui64(id) => (1, id),
            Descriptor::Nguid(id) => (2, id),
            Descriptor::Uuid(id) => (3, id),
            Descriptor::CommandSet(csi) => (4, std::slice::from_ref(csi)),
        };
        let Some(slot) = page.get_mut(at..at + 4 + id.len()) else { break };
        slot[0] = kind;
        slot[1] = id.len() as u8;
        slot[4..].copy_from_slice(id);
        at += 4 + id.len();
    }
    page
}

/// The descriptors of a page; those of unknown type or wrong length are passed over.
pub fn decode_descriptors(page: &[u8]) -> Vec<Descriptor> {
    let mut found = Vec::new();
    let mut rest = page;
    while let Some((&[kind, len, _, _], after)) = rest.split_first_chunk::<4>() {
        let Some(id) = after.get(..usize::from(len)) else { break };
        if kind == 0 {
            break;
        }
        rest = &after[usize::from(len)..];
        let descriptor = match kind {
            1 => id.try_into().ok().map(Descriptor::Eui64),
            2 => id.try_into().ok().map(Descriptor::Nguid),
            3 => id.try_into().ok().map(Descriptor::Uuid),
            4 if len == 1 => Some(Descriptor::CommandSet(id[0])),
            _ => None,
        };
        found.extend(descriptor);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Random;

    #[test]
    fn requests_come_back_as_they_went() {
        let request = Request { cns: 5, csi: 1, controller_id: 7, namespace: NamespaceId(9) };
        let sqe = request.encode(1);
        assert_eq!((sqe.cdw10.get(), sqe.cdw11.get()), (0x0007_0005, 0x0100_0000));
        assert_eq!(Request::of(&sqe), request);
    }

    #[test]
    fn the_controller_page_carries_the_announcement_and_limits() {
        let mut page = Controller::zeroed();
        let announcement = Announcement { version: 1, key_bytes_max: 1024, features: 1 };
        page.announce(&announcement);
        page.command_capsule_units = U32::new((16384 + 64) / 16);
        page.data_pages_log2 = 9;
        set_text(&mut page.serial, "OKV\u{e9}");
        let bytes = page.as_bytes();
        assert_eq!(&bytes[3072..3076], b"OKV1");
        assert_eq!(&bytes[4..10], b"OKV?? ");
        let read: &Controller = read(bytes).unwrap();
        assert_eq!(read.announcement(), Some(announcement));
        assert_eq!((read.capsule_data_bytes(), read.data_bytes_max()), (16384, Some(2 << 20)));
        assert_eq!(text(&read.serial), "OKV??");
        assert!(super::read::<Controller>(&bytes[1..]).is_none());
    }

    #[test]
    fn lists_start_above_a_namespace() {
        let all = || [1, 3, 9].into_iter().map(NamespaceId);
        let list = NamespaceList::above(1, all());
        assert_eq!(list.ids().collect::<Vec<_>>(), [NamespaceId(3), NamespaceId(9)]);
        assert_eq!(NamespaceList::above(u32::MAX, all()).ids().count(), 0);
    }

    #[test]
    fn descriptors_come_back_as_they_went() {
        let all = [
            Descriptor::Eui64([1; 8]),
            Descriptor::Nguid([2; 16]),
            Descriptor::Uuid([3; 16]),
            Descriptor::CommandSet(1),
        ];
        let page = encode_descriptors(&all);
        assert_eq!(page[..5], [1, 8, 0, 0, 1]);
        assert_eq!(decode_descriptors(&page), all);
    }

    #[test]
    fn random_pages_never_panic() {
        let mut random = Random::new(5);
        let mut page = vec![0; PAGE_BYTES];
        for _ in 0..500 {
            random.fill(&mut page);
            let cut = random.below(PAGE_BYTES as u64 + 1) as usize;
            let _ = decode_descriptors(&page[..cut]);
            let controller: &Controller = read(&page).unwrap();
            let _ = (controller.announcement(), controller.data_bytes_max(), controller.capsule_data_bytes());
            let _ = text(&controller.model);
        }
    }
}
