//! The discovery log page: addresses of subsystems (NVMe Base 2.1, 5.1.12.3.1; log 70h).
//!
//! ```text
//! 0     generation u64   8 records u64   16 format u16 = 0                       1024 B
//! 1024  each entry: 0 transport 1 family 2 subtype 3 requirements 4 port u16 6 controller u16
//!       8 admin entries u16  10 flags u16  32 service [32]  256 subsystem [256]  512 address [256]  768 security  1024 B
//! ```

use crate::nqn;
use std::mem::offset_of;
use std::net::{IpAddr, SocketAddr};
use zerocopy::byteorder::little_endian::{U16, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Length of the header and of each entry, in bytes.
pub const RECORD_BYTES: usize = 1024;
const TRANSPORT_TCP: u8 = 3;
const FAMILY_IPV4: u8 = 1;
const FAMILY_IPV6: u8 = 2;
const SECURE_CHANNEL_NOT_REQUIRED: u8 = 2;
const DYNAMIC_CONTROLLER: u16 = 0xffff;
const ADMIN_QUEUE_ENTRIES: u16 = 32;
/// EFLAGS bit DUPRETINFO: every entry with this bit returns the same information.
const EFLAGS_DUPRETINFO: u16 = 1 << 0;
/// EFLAGS bit EPCSD: the discovery controller supports persistent connections with a keep alive timeout.
const EFLAGS_EPCSD: u16 = 1 << 1;

/// Subsystem type of an entry (SUBTYPE).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum SubsystemKind {
    /// Another discovery service.
    Referral = 1,
    /// A subsystem with namespaces.
    Storage = 2,
    /// This discovery service.
    Current = 3,
}

/// One entry: a subsystem at an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiscoveryEntry {
    /// Subsystem type (SUBTYPE).
    pub kind: SubsystemKind,
    /// NQN of the subsystem.
    pub subsystem: String,
    /// Address and TCP port (TRADDR, TRSVCID).
    pub address: SocketAddr,
    /// Port of the subsystem (PORTID).
    pub port_id: u16,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone)]
#[repr(C)]
struct HeaderLayout {
    generation: U64,
    records: U64,
    format: U16,
    rest: [u8; 1006],
}
const _: () = assert!(size_of::<HeaderLayout>() == RECORD_BYTES);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone)]
#[repr(C)]
struct EntryLayout {
    transport: u8,
    family: u8,
    kind: u8,
    requirements: u8,
    port_id: U16,
    controller_id: U16,
    admin_entries: U16,
    flags: U16,
    zero_12: [u8; 20],
    service: [u8; 32],
    zero_64: [u8; 192],
    subsystem: [u8; 256],
    address: [u8; 256],
    security: u8,
    zero_769: [u8; 255],
}
const _: () = assert!(size_of::<EntryLayout>() == RECORD_BYTES);
const _: () = assert!(offset_of!(EntryLayout, service) == 32);
const _: () = assert!(offset_of!(EntryLayout, subsystem) == 256);
const _: () = assert!(offset_of!(EntryLayout, security) == 768);

/// Encodes the whole page; [`crate::log_page::copy_from_offset`] cuts out the requested part.
pub fn encode(generation: u64, entries: &[DiscoveryEntry]) -> Vec<u8> {
    let mut header = HeaderLayout::new_zeroed();
    header.generation = U64::new(generation);
    header.records = U64::new(entries.len() as u64);
    let mut page = Vec::with_capacity(RECORD_BYTES * (1 + entries.len()));
    page.extend_from_slice(header.as_bytes());
    for entry in entries {
        let mut layout = EntryLayout::new_zeroed();
        layout.transport = TRANSPORT_TCP;
        layout.family = if entry.address.is_ipv4() { FAMILY_IPV4 } else { FAMILY_IPV6 };
        layout.kind = entry.kind as u8;
        layout.requirements = SECURE_CHANNEL_NOT_REQUIRED;
        layout.port_id = U16::new(entry.port_id);
        layout.controller_id = U16::new(DYNAMIC_CONTROLLER);
        layout.admin_entries = U16::new(ADMIN_QUEUE_ENTRIES);
        layout.flags = U16::new(match entry.kind {
            SubsystemKind::Current => EFLAGS_DUPRETINFO | EFLAGS_EPCSD,
            SubsystemKind::Referral | SubsystemKind::Storage => 0,
        });
        crate::identify_page::encode_text(&mut layout.service, &entry.address.port().to_string());
        layout.subsystem = nqn::encode(&entry.subsystem);
        crate::identify_page::encode_text(&mut layout.address, &entry.address.ip().to_string());
        page.extend_from_slice(layout.as_bytes());
    }
    page
}

/// Header of the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiscoveryHeader {
    /// Generation counter: it changes with every change of the page.
    pub generation: u64,
    /// Number of entries.
    pub records: u64,
}

/// Decodes the header of `page`; `None` if it is truncated or of a format other than 0.
pub fn decode_header(page: &[u8]) -> Option<DiscoveryHeader> {
    let (header, _) = HeaderLayout::ref_from_prefix(page).ok()?;
    let known = header.format.get() == 0;
    known.then(|| DiscoveryHeader { generation: header.generation.get(), records: header.records.get() })
}

/// Iterates over the entries with a known subsystem type and a valid TCP address; skips all others.
pub fn decode_entries(page: &[u8]) -> impl Iterator<Item = DiscoveryEntry> + '_ {
    let records = decode_header(page).map_or(0, |s| usize::try_from(s.records).unwrap_or(usize::MAX));
    let bodies = page.get(RECORD_BYTES..).unwrap_or_default().chunks_exact(RECORD_BYTES);
    bodies.take(records).filter_map(decode_entry)
}

fn decode_entry(bytes: &[u8]) -> Option<DiscoveryEntry> {
    let layout = EntryLayout::ref_from_bytes(bytes).ok()?;
    let kind = match layout.kind {
        1 => SubsystemKind::Referral,
        2 => SubsystemKind::Storage,
        3 => SubsystemKind::Current,
        _ => return None,
    };
    if layout.transport != TRANSPORT_TCP {
        return None;
    }
    let ip: IpAddr = crate::identify_page::decode_text(&layout.address).parse().ok()?;
    let port: u16 = crate::identify_page::decode_text(&layout.service).parse().ok()?;
    let subsystem = nqn::decode(&layout.subsystem).ok()?.to_string();
    Some(DiscoveryEntry {
        kind,
        subsystem,
        address: SocketAddr::new(ip, port),
        port_id: layout.port_id.get(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Prng;

    fn sample() -> Vec<DiscoveryEntry> {
        let entry = |kind, name: &str, address: &str| DiscoveryEntry {
            kind,
            subsystem: name.to_string(),
            address: address.parse().unwrap(),
            port_id: 1,
        };
        vec![
            entry(SubsystemKind::Current, nqn::DISCOVERY, "127.0.0.1:4420"),
            entry(SubsystemKind::Storage, "nqn.2026-11.io.octokv:node", "[::1]:4421"),
        ]
    }

    #[test]
    fn the_page_round_trips() {
        let page = encode(7, &sample());
        assert_eq!(page.len(), 3 * RECORD_BYTES);
        assert_eq!(decode_header(&page), Some(DiscoveryHeader { generation: 7, records: 2 }));
        assert_eq!(decode_entries(&page).collect::<Vec<_>>(), sample());
        assert_eq!(page[1024..1036], [3, 1, 3, 2, 1, 0, 255, 255, 32, 0, 3, 0]);
        assert_eq!(page[2048..2060], [3, 2, 2, 2, 1, 0, 255, 255, 32, 0, 0, 0]);
        assert_eq!(&page[1024 + 32..1024 + 40], b"4420    ");
        assert_eq!(&page[2048 + 512..2048 + 516], b"::1 ");
    }

    #[test]
    fn random_pages_never_panic() {
        let mut random = Prng::new(8);
        let good = encode(1, &sample());
        for _ in 0..3_000 {
            let mut page = good.clone();
            for _ in 0..8 {
                let at = random.below(page.len() as u64) as usize;
                page[at] = random.next_u64() as u8;
            }
            page.truncate(random.below(page.len() as u64 + 1) as usize);
            let _ = decode_entries(&page).count();
        }
    }
}
