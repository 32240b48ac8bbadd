//! Log pages (NVMe Base 2.1, 5.1.12).
//!
//! The controller builds a page whole; [`copy_from_offset`] copies the requested part, zero padded.

use crate::queue_entry::{Sqe, admin};
use crate::status::Status;
use octokv_base::NamespaceId;
use std::mem::offset_of;
use zerocopy::byteorder::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Log page identifiers (LID).
pub mod id {
    /// Supported log pages.
    pub const SUPPORTED: u8 = 0x00;
    /// Error information.
    pub const ERROR: u8 = 0x01;
    /// SMART and health.
    pub const HEALTH: u8 = 0x02;
    /// Firmware slots.
    pub const FIRMWARE: u8 = 0x03;
    /// Changed namespaces.
    pub const CHANGED_NAMESPACES: u8 = 0x04;
    /// Supported commands and their effects.
    pub const EFFECTS: u8 = 0x05;
    /// Asymmetric namespace access.
    pub const ANA: u8 = 0x0c;
    /// Supported features and their effects.
    pub const FEATURES: u8 = 0x12;
    /// Supported management interface commands and their effects.
    pub const MANAGEMENT: u8 = 0x13;
    /// Discovery.
    pub const DISCOVERY: u8 = 0x70;
    /// Partitions of a Key Value namespace; vendor specific ([`crate::partition_log`]).
    pub const PARTITIONS: u8 = 0xc0;
    /// Devices of a Key Value namespace; vendor specific ([`crate::device_log`]).
    pub const DEVICES: u8 = 0xc1;
}

/// The fields of Get Log Page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogPageRequest {
    /// Log page identifier, as in [`id`].
    pub id: u8,
    /// Log specific field, 7 bits.
    pub log_specific: u8,
    /// Retain asynchronous event (RAE): reading the page does not clear its event.
    pub retain_event: bool,
    /// Number of bytes, a multiple of 4.
    pub bytes: u64,
    /// Offset in the page, in bytes.
    pub offset: u64,
    /// Command set identifier, if the page has one.
    pub csi: u8,
    /// Namespace; 0 or FFFFFFFFh for the controller.
    pub namespace: NamespaceId,
}

impl LogPageRequest {
    /// Decodes an entry.
    ///
    /// # Errors
    /// [`Status::INVALID_FIELD`] for an offset that is not a multiple of 4 or is an index, which no supported
    /// page has.
    pub fn check(sqe: &Sqe) -> Result<LogPageRequest, Status> {
        let (cdw10, cdw11, cdw14) = (sqe.cdw10.get(), sqe.cdw11.get(), sqe.cdw14.get());
        let dwords = u64::from(cdw10 >> 16) | u64::from(cdw11 & 0xffff) << 16;
        let offset = u64::from(sqe.cdw12.get()) | u64::from(sqe.cdw13.get()) << 32;
        if !offset.is_multiple_of(4) || cdw14 & (1 << 23) != 0 {
            return Err(Status::INVALID_FIELD.do_not_retry());
        }
        Ok(LogPageRequest {
            id: cdw10 as u8,
            log_specific: (cdw10 >> 8) as u8 & 0x7f,
            retain_event: cdw10 & (1 << 15) != 0,
            bytes: (dwords + 1) * 4,
            offset,
            csi: (cdw14 >> 24) as u8,
            namespace: sqe.namespace(),
        })
    }

    /// Encodes the entry, its data pointer left empty.
    pub fn encode(&self, command_id: u16) -> Sqe {
        let mut sqe = Sqe::new(admin::GET_LOG_PAGE, command_id);
        let dwords = (self.bytes / 4).saturating_sub(1);
        let retain = if self.retain_event { 1 << 15 } else { 0 };
        sqe.nsid = U32::new(self.namespace.0);
        sqe.cdw10 = U32::new(
            u32::from(self.id) | u32::from(self.log_specific & 0x7f) << 8 | retain | (dwords as u32) << 16,
        );
        sqe.cdw11 = U32::new((dwords >> 16) as u32 & 0xffff);
        sqe.cdw12 = U32::new(self.offset as u32);
        sqe.cdw13 = U32::new((self.offset >> 32) as u32);
        sqe.cdw14 = U32::new(u32::from(self.csi) << 24);
        sqe
    }
}

/// Fills `out` with `page` from `offset`, zero padded beyond its end.
pub fn copy_from_offset(page: &[u8], offset: u64, out: &mut [u8]) {
    let from = usize::try_from(offset).unwrap_or(usize::MAX).min(page.len());
    let bytes = (page.len() - from).min(out.len());
    out[..bytes].copy_from_slice(&page[from..from + bytes]);
    out[bytes..].fill(0);
}

/// Log 00h: one dword per page, bit 0 if it is supported.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone)]
#[repr(C)]
pub struct SupportedLogPages([U32; 256]);
const _: () = assert!(size_of::<SupportedLogPages>() == 1024);

impl SupportedLogPages {
    /// A page that lists these log pages.
    pub fn with_pages(pages: &[u8]) -> SupportedLogPages {
        let mut all = SupportedLogPages::new_zeroed();
        for &page in pages {
            all.0[usize::from(page)] = U32::new(1);
        }
        all
    }
}

/// Log 01h: one error.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
pub struct ErrorEntry {
    /// Error count since manufacture, from 1; 0 for an empty entry.
    pub count: U64,
    /// Queue of the failed command.
    pub queue_id: U16,
    /// Identifier of the failed command.
    pub command_id: U16,
    /// Status field of the failed command.
    pub status: U16,
    /// Byte and bit of the invalid parameter in the command, FFFFh for none.
    pub location: U16,
    /// First LBA; octokv sets 0.
    pub lba: U64,
    /// Namespace of the failed command.
    pub nsid: U32,
    zero_28: u8,
    /// Transport type: 3 TCP.
    pub transport: u8,
    zero_30: [u8; 34],
}
const _: () = assert!(size_of::<ErrorEntry>() == 64);

impl ErrorEntry {
    /// An empty entry.
    pub fn empty() -> ErrorEntry {
        ErrorEntry::new_zeroed()
    }
}

/// Log 02h: SMART and health information.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone)]
#[repr(C)]
pub struct HealthLog {
    /// Critical warning bits.
    pub warnings: u8,
    /// Temperature, in kelvin.
    pub temperature: U16,
    /// Available spare capacity, in percent.
    pub spare: u8,
    /// Available spare threshold, in percent.
    pub spare_threshold: u8,
    /// Percentage of the endurance used.
    pub used: u8,
    zero_6: [u8; 26],
    /// Data read, in units of 1000 × 512 B.
    pub units_read: U128,
    /// Data written, in units of 1000 × 512 B.
    pub units_written: U128,
    /// Number of read commands.
    pub reads: U128,
    /// Number of write commands.
    pub writes: U128,
    /// Controller busy time, in minutes.
    pub busy_minutes: U128,
    /// Number of power cycles.
    pub power_cycles: U128,
    /// Time powered on, in hours.
    pub power_hours: U128,
    /// Number of unsafe shutdowns.
    pub unsafe_shutdowns: U128,
    /// Number of unrecovered media and data integrity errors.
    pub media_errors: U128,
    /// Number of error log entries since manufacture.
    pub errors: U128,
    zero_192: [u8; 320],
}
const _: () = assert!(size_of::<HealthLog>() == 512);
const _: () = assert!(offset_of!(HealthLog, units_read) == 32);
const _: () = assert!(offset_of!(HealthLog, errors) == 176);

impl HealthLog {
    /// A page of zeros.
    pub fn zeroed() -> HealthLog {
        HealthLog::new_zeroed()
    }
}

/// Encodes log 03h: one firmware slot, active, read only.
pub fn encode_firmware_slots(revision: &str) -> [u8; 512] {
    let mut page = [0; 512];
    page[0] = 1;
    crate::identify_page::encode_text(&mut page[8..16], revision);
    page
}

/// Encodes log 04h: namespaces changed since the log was last read; FFFFFFFFh alone if more than 1024.
pub fn encode_changed_namespaces(changed: &[NamespaceId]) -> Vec<u8> {
    let mut page = vec![0; 4096];
    if changed.len() > 1024 {
        page[..4].fill(0xff);
        return page;
    }
    for (slot, id) in page.chunks_exact_mut(4).zip(changed) {
        slot.copy_from_slice(&id.0.to_le_bytes());
    }
    page
}

/// Log 05h: supported commands and their effects.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone)]
#[repr(C)]
pub struct CommandEffectsLog {
    /// Admin commands, by opcode.
    pub admin: [U32; 256],
    /// I/O commands, by opcode.
    pub io: [U32; 256],
    zero_2048: [u8; 2048],
}
const _: () = assert!(size_of::<CommandEffectsLog>() == 4096);

/// Effects bit CSUPP: supported.
pub const SUPPORTED: u32 = 1;
/// Effects bit LBCC: changes the content of the namespace.
pub const CHANGES_CONTENT: u32 = 1 << 1;

/// Effects bits CSP and FSP: scope of one namespace.
pub const SCOPE_NAMESPACE: u32 = 1 << 20;
/// Effects bits CSP and FSP: scope of the controller.
pub const SCOPE_CONTROLLER: u32 = 1 << 21;

/// Length of logs 12h and 13h, in bytes.
pub const FEATURES_BYTES: usize = 4096;

/// Encodes log 12h: supported features, each with its scope.
pub fn encode_features(supported: impl Iterator<Item = (u8, u32)>) -> Vec<u8> {
    let mut page = vec![0; FEATURES_BYTES];
    for (feature, scope) in supported {
        let at = usize::from(feature) * 4;
        page[at..at + 4].copy_from_slice(&(SUPPORTED | scope).to_le_bytes());
    }
    page
}

impl CommandEffectsLog {
    /// A page without commands.
    pub fn zeroed() -> Box<CommandEffectsLog> {
        Box::new(CommandEffectsLog::new_zeroed())
    }
    /// Marks an admin command as supported.
    pub fn support_admin(&mut self, opcode: u8, effects: u32) {
        self.admin[usize::from(opcode)] = U32::new(SUPPORTED | effects);
    }
    /// Marks an I/O command as supported.
    pub fn support_io(&mut self, opcode: u8, effects: u32) {
        self.io[usize::from(opcode)] = U32::new(SUPPORTED | effects);
    }
}

/// ANA state of a namespace group on a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum AnaState {
    /// Optimized path.
    Optimized = 1,
    /// Working path with lower performance.
    NonOptimized = 2,
    /// Temporarily inaccessible on this path.
    Inaccessible = 3,
    /// Permanently inaccessible on this path.
    PersistentLoss = 4,
    /// In transition: retry.
    Change = 15,
}

/// One group of the ANA log.
#[derive(Clone, Debug)]
pub struct AnaGroup<'a> {
    /// Group identifier, from 1.
    pub id: u32,
    /// Number of state changes of this group.
    pub change_count: u64,
    /// Current state.
    pub state: AnaState,
    /// Namespaces of the group, ascending.
    pub namespaces: &'a [NamespaceId],
}

/// Encodes log 0Ch: `{changes u64, groups u16, 6 zeros}`, then per group `{id u32, namespaces u32, changes
/// u64, state u8, 15 zeros, nsid u32 each}`.
pub fn encode_ana(changes: u64, groups: &[AnaGroup<'_>]) -> Vec<u8> {
    let mut page = Vec::with_capacity(16 + groups.len() * 32);
    page.extend_from_slice(&changes.to_le_bytes());
    page.extend_from_slice(&(groups.len() as u16).to_le_bytes());
    page.extend_from_slice(&[0; 6]);
    for group in groups {
        page.extend_from_slice(&group.id.to_le_bytes());
        page.extend_from_slice(&(group.namespaces.len() as u32).to_le_bytes());
        page.extend_from_slice(&group.change_count.to_le_bytes());
        page.push(group.state as u8);
        page.extend_from_slice(&[0; 15]);
        group.namespaces.iter().for_each(|id| page.extend_from_slice(&id.0.to_le_bytes()));
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Prng;

    #[test]
    fn requests_round_trip() {
        let request = LogPageRequest {
            id: id::EFFECTS,
            log_specific: 3,
            retain_event: true,
            bytes: 4096,
            offset: 0x1_0000_0004,
            csi: 1,
            namespace: NamespaceId(u32::MAX),
        };
        let sqe = request.encode(1);
        assert_eq!((sqe.cdw10.get(), sqe.cdw14.get()), (0x03ff_8305, 0x0100_0000));
        assert_eq!(LogPageRequest::check(&sqe), Ok(request));
        let odd = LogPageRequest { offset: 2, ..request }.encode(1);
        assert!(LogPageRequest::check(&odd).unwrap_err().is(Status::INVALID_FIELD));
    }

    #[test]
    fn bytes_beyond_the_page_are_zero() {
        let mut out = [9; 4];
        for (offset, want) in [(0, [1, 2, 3, 0]), (2, [3, 0, 0, 0]), (u64::MAX, [0; 4])] {
            copy_from_offset(&[1, 2, 3], offset, &mut out);
            assert_eq!(out, want);
        }
    }

    #[test]
    fn pages_have_the_specified_offsets() {
        let mut effects = CommandEffectsLog::zeroed();
        effects.support_io(0x81, CHANGES_CONTENT);
        effects.support_admin(2, 0);
        assert_eq!((effects.as_bytes()[8], effects.as_bytes()[1024 + 4 * 0x81]), (1, 3));
        assert_eq!(SupportedLogPages::with_pages(&[1, 0x70]).as_bytes()[4 * 0x70], 1);
        assert_eq!(encode_firmware_slots("0.1")[..12], *b"\x01\0\0\0\0\0\0\x000.1 ");
        let groups =
            [AnaGroup { id: 1, change_count: 2, state: AnaState::Optimized, namespaces: &[NamespaceId(7)] }];
        let page = encode_ana(3, &groups);
        assert_eq!((page.len(), page[0], page[8], page[16], page[20]), (52, 3, 1, 1, 1));
        assert_eq!((page[24], page[32], page[48]), (2, 1, 7));
        assert_eq!(encode_changed_namespaces(&[NamespaceId(2)])[..8], [2, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(encode_changed_namespaces(&[NamespaceId(1); 1025])[..5], [255, 255, 255, 255, 0]);
    }

    #[test]
    fn random_requests_never_panic() {
        let mut random = Prng::new(6);
        for _ in 0..10_000 {
            let mut bytes = [0; 64];
            random.fill(&mut bytes);
            if let Ok(request) = LogPageRequest::check(&Sqe::from_bytes(&bytes)) {
                copy_from_offset(&bytes, request.offset, &mut [0; 8]);
            }
        }
    }
}
