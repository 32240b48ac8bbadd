//! Identify pages that describe and list namespaces (NVMe Base 2.1, 5.1.13).
//!
//! The format rules are those of [`crate::identify`], which re-exports these pages.

use crate::identify_page::PAGE_BYTES;
use octokv_base::NamespaceId;
use std::mem::offset_of;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// CNS 00h: a namespace of the NVM command set. SPDK's host ignores a Key Value namespace whose sizes are 0
/// here.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone)]
#[repr(C)]
pub struct IdentifyNamespace {
    /// NSZE: size, in blocks.
    pub size: U64,
    /// NCAP: capacity, in blocks.
    pub capacity: U64,
    /// NUSE: used, in blocks.
    pub used: U64,
    /// NSFEAT: features.
    pub features: u8,
    /// NLBAF: number of LBA formats, 0's based.
    pub formats: u8,
    /// FLBAS: index of the LBA format in bits 3:0 and 6:5.
    pub format: u8,
    zero_27: [u8; 3],
    /// NMIC: bit 0 shared.
    pub sharing: u8,
    zero_31: [u8; 61],
    /// ANAGRPID: ANA group, from 1.
    pub ana_group: U32,
    zero_96: [u8; 8],
    /// NGUID: globally unique identifier; zeros for none.
    pub nguid: [u8; 16],
    /// EUI64: extended unique identifier; zeros for none.
    pub eui64: [u8; 8],
    /// LBAF: {metadata bytes u16, log2 of block bytes u8, performance u8}.
    pub block_formats: [[u8; 4]; 64],
    zero_384: [u8; 3712],
}
const _: () = assert!(size_of::<IdentifyNamespace>() == PAGE_BYTES);
const _: () = assert!(offset_of!(IdentifyNamespace, ana_group) == 92);
const _: () = assert!(offset_of!(IdentifyNamespace, nguid) == 104);
const _: () = assert!(offset_of!(IdentifyNamespace, block_formats) == 128);

impl IdentifyNamespace {
    /// A page of zeros.
    pub fn zeroed() -> Box<IdentifyNamespace> {
        Box::new(IdentifyNamespace::new_zeroed())
    }
}

/// One key value format of a namespace.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy, Debug)]
#[repr(C)]
pub struct KvFormat {
    /// KVKML: maximum key length, in bytes, at most 16.
    pub key_bytes_max: U16,
    zero_2: u8,
    /// Additional options.
    pub options: u8,
    /// KVVML: maximum value length, in bytes.
    pub value_bytes_max: U32,
    /// MNK: maximum number of keys; 0 for no limit.
    pub keys_max: U32,
    zero_12: [u8; 4],
}

/// CNS 05h, CSI 01h: a Key Value namespace.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone)]
#[repr(C)]
pub struct IdentifyKvNamespace {
    /// NSZE: size, in bytes.
    pub size_bytes: U64,
    zero_8: [u8; 8],
    /// NUSE: used, in bytes.
    pub used_bytes: U64,
    /// NSFEAT: features.
    pub features: u8,
    /// NKVF: number of key value formats, 0's based.
    pub formats: u8,
    /// NMIC: bit 0 shared.
    pub sharing: u8,
    /// RESCAP: reservation capabilities.
    pub reservations: u8,
    /// FPI: format progress.
    pub format_progress: u8,
    /// KVFC: bits 3:0 index of the format in use.
    pub format: u8,
    zero_30: [u8; 2],
    /// NOVG: optimal granularity of values, in bytes; 0 if unknown.
    pub value_granularity_bytes: U32,
    /// ANAGRPID: ANA group, from 1.
    pub ana_group: U32,
    zero_40: [u8; 3],
    /// NSATTR: bit 0 write protected.
    pub attributes: u8,
    /// NVMSETID: NVM set; 0 for none.
    pub nvm_set: U16,
    /// ENDGID: endurance group; 0 for none.
    pub endurance_group: U16,
    /// NGUID: globally unique identifier; zeros for none.
    pub nguid: [u8; 16],
    /// EUI64: extended unique identifier; zeros for none.
    pub eui64: [u8; 8],
    /// KVF: key value formats.
    pub kv_formats: [KvFormat; 16],
    zero_328: [u8; 3768],
}
const _: () = assert!(size_of::<IdentifyKvNamespace>() == PAGE_BYTES);
const _: () = assert!(size_of::<KvFormat>() == 16);
const _: () = assert!(offset_of!(IdentifyKvNamespace, format) == 29);
const _: () = assert!(offset_of!(IdentifyKvNamespace, ana_group) == 36);
const _: () = assert!(offset_of!(IdentifyKvNamespace, nguid) == 48);
const _: () = assert!(offset_of!(IdentifyKvNamespace, kv_formats) == 72);

impl IdentifyKvNamespace {
    /// A page of zeros.
    pub fn zeroed() -> Box<IdentifyKvNamespace> {
        Box::new(IdentifyKvNamespace::new_zeroed())
    }
}

/// CNS 08h: a namespace, independent of the command set.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone)]
#[repr(C)]
pub struct IdentifyNamespaceIndependent {
    /// NSFEAT: features.
    pub features: u8,
    /// NMIC: bit 0 shared.
    pub sharing: u8,
    /// RESCAP: reservation capabilities.
    pub reservations: u8,
    /// FPI: format progress.
    pub format_progress: u8,
    /// ANAGRPID: ANA group, from 1.
    pub ana_group: U32,
    /// NSATTR: bit 0 write protected.
    pub attributes: u8,
    zero_9: u8,
    /// NVMSETID: NVM set; 0 for none.
    pub nvm_set: U16,
    /// ENDGID: endurance group; 0 for none.
    pub endurance_group: U16,
    /// NSTAT: bit 0 ready.
    pub status: u8,
    zero_15: [u8; 4081],
}
const _: () = assert!(size_of::<IdentifyNamespaceIndependent>() == PAGE_BYTES);
const _: () = assert!(offset_of!(IdentifyNamespaceIndependent, status) == 14);

impl IdentifyNamespaceIndependent {
    /// A page of zeros.
    pub fn zeroed() -> Box<IdentifyNamespaceIndependent> {
        Box::new(IdentifyNamespaceIndependent::new_zeroed())
    }
}

/// CNS 02h and 07h: namespace identifiers above a given one, ascending, zero terminated.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone)]
#[repr(C)]
pub struct NamespaceIdList([U32; 1024]);
const _: () = assert!(size_of::<NamespaceIdList>() == PAGE_BYTES);

impl NamespaceIdList {
    /// The first 1024 identifiers of `all` above `after`. REQUIRES: `all` is ascending.
    pub fn above(after: u32, all: impl Iterator<Item = NamespaceId>) -> Box<NamespaceIdList> {
        let mut list = Box::new(NamespaceIdList::new_zeroed());
        for (slot, id) in list.0.iter_mut().zip(all.filter(|id| id.0 > after)) {
            *slot = U32::new(id.0);
        }
        list
    }

    /// Iterates over the identifiers.
    pub fn ids(&self) -> impl Iterator<Item = NamespaceId> + '_ {
        self.0.iter().map(|id| NamespaceId(id.get())).take_while(|id| id.0 != 0)
    }
}

/// Identification descriptor of a namespace, CNS 03h.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamespaceDescriptor {
    /// NIDT 1: extended unique identifier.
    Eui64([u8; 8]),
    /// NIDT 2: globally unique identifier.
    Nguid([u8; 16]),
    /// NIDT 3: UUID.
    Uuid([u8; 16]),
    /// NIDT 4: command set identifier.
    CommandSet(u8),
}

/// Encodes the page of these descriptors, as many as fit.
pub fn encode_descriptors(descriptors: &[NamespaceDescriptor]) -> [u8; PAGE_BYTES] {
    let mut page = [0; PAGE_BYTES];
    let mut at = 0;
    for descriptor in descriptors {
        let (kind, id): (u8, &[u8]) = match descriptor {
            NamespaceDescriptor::Eui64(id) => (1, id),
            NamespaceDescriptor::Nguid(id) => (2, id),
            NamespaceDescriptor::Uuid(id) => (3, id),
            NamespaceDescriptor::CommandSet(csi) => (4, std::slice::from_ref(csi)),
        };
        let Some(slot) = page.get_mut(at..at + 4 + id.len()) else { break };
        slot[0] = kind;
        slot[1] = id.len() as u8;
        slot[4..].copy_from_slice(id);
        at += 4 + id.len();
    }
    page
}

/// Decodes the descriptors of a page; skips unknown types and invalid lengths.
pub fn decode_descriptors(page: &[u8]) -> Vec<NamespaceDescriptor> {
    let mut found = Vec::new();
    let mut rest = page;
    while let Some((&[kind, len, _, _], after)) = rest.split_first_chunk::<4>() {
        let Some(id) = after.get(..usize::from(len)) else { break };
        if kind == 0 {
            break;
        }
        rest = &after[usize::from(len)..];
        let descriptor = match kind {
            1 => id.try_into().ok().map(NamespaceDescriptor::Eui64),
            2 => id.try_into().ok().map(NamespaceDescriptor::Nguid),
            3 => id.try_into().ok().map(NamespaceDescriptor::Uuid),
            4 if len == 1 => Some(NamespaceDescriptor::CommandSet(id[0])),
            _ => None,
        };
        found.extend(descriptor);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_start_above_a_namespace() {
        let all = || [1, 3, 9].into_iter().map(NamespaceId);
        let list = NamespaceIdList::above(1, all());
        assert_eq!(list.ids().collect::<Vec<_>>(), [NamespaceId(3), NamespaceId(9)]);
        assert_eq!(NamespaceIdList::above(u32::MAX, all()).ids().count(), 0);
    }

    #[test]
    fn descriptors_round_trip() {
        let all = [
            NamespaceDescriptor::Eui64([1; 8]),
            NamespaceDescriptor::Nguid([2; 16]),
            NamespaceDescriptor::Uuid([3; 16]),
            NamespaceDescriptor::CommandSet(1),
        ];
        let page = encode_descriptors(&all);
        assert_eq!(page[..5], [1, 8, 0, 0, 1]);
        assert_eq!(decode_descriptors(&page), all);
    }
}
