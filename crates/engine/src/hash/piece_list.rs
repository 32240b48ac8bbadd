//! The lists of values in pieces: what a record of such a value has, and where its pieces are.
//!
//! ```text
//!   list    0 entries u32    4 zeros to 16    16 entries            in the record, behind its key, in place of the value
//!   node    as a list, in units of its own
//!   entry   0 location u64 (unit)   8 units u32 (bit 31: a node, the last entry of its list)   12 CRC-32C u32
//! ```
//! A piece's checksum covers its part of the value, a node's its list; that of the record's list is the record's. Invariant: no list
//! is longer than the value's units need, so that reading one ends. Tested below.

use super::superblock::VALUE_BYTES_MAX;
use crate::common::allocator::Extent;
use crate::common::record::RecordHeader;
use crate::common::unit_reader::UnitReader;
use octokv_base::crc32c;
use octokv_device::DeviceError;
use std::ops::Range;
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The longest piece, in bytes.
pub(super) const PIECE_BYTES_MAX: usize = 128 << 10;
/// The flag of an entry that is a node.
const IS_NODE: u32 = 1 << 31;

/// The front of a list on the device, little-endian.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ListLayout {
    entries: U32,
    zeros: [u8; 12],
}

/// An entry of a list on the device, little-endian.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct EntryLayout {
    location: U64,
    units: U32,
    crc: U32,
}

pub(super) const LIST_BYTES: usize = size_of::<ListLayout>();
pub(super) const ENTRY_BYTES: usize = size_of::<EntryLayout>();
const _: () = assert!(LIST_BYTES == 16 && ENTRY_BYTES == 16);

/// A run of units with the checksum of what it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub extent: Extent,
    pub crc: u32,
}

/// A list as it lies in a record or a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PieceList {
    pub pieces: Vec<Piece>,
    /// The node with the rest.
    pub next: Option<Piece>,
}

/// The bytes of a list with so many entries.
pub(super) fn list_bytes(entries: usize) -> usize {
    LIST_BYTES + entries * ENTRY_BYTES
}

impl PieceList {
    fn entries(&self) -> usize {
        self.pieces.len() + usize::from(self.next.is_some())
    }

    /// Encodes the list at the front of `bytes`, and gives its length.
    pub fn encode(&self, bytes: &mut [u8]) -> usize {
        let end = list_bytes(self.entries());
        let front = ListLayout { entries: (self.entries() as u32).into(), zeros: [0; 12] };
        bytes[..LIST_BYTES].copy_from_slice(front.as_bytes());
        let nodes = self.next.iter().map(|node| (node, IS_NODE));
        let entries = self.pieces.iter().map(|piece| (piece, 0)).chain(nodes);
        for ((piece, flag), place) in entries.zip(bytes[LIST_BYTES..end].chunks_exact_mut(ENTRY_BYTES)) {
            let entry = EntryLayout {
                location: piece.extent.location.into(),
                units: (piece.extent.units as u32 | flag).into(),
                crc: piece.crc.into(),
            };
            place.copy_from_slice(entry.as_bytes());
        }
        end
    }

    /// The list at the front of `bytes`, if its checksum is `crc`.
    pub fn decode(bytes: &[u8], crc: u32) -> Option<PieceList> {
        let (front, _) = ListLayout::ref_from_prefix(bytes).ok()?;
        let end = LIST_BYTES.checked_add((front.entries.get() as usize).checked_mul(ENTRY_BYTES)?)?;
        if crc32c(bytes.get(..end)?) != crc {
            return None;
        }
        let mut list = PieceList::default();
        for entry in bytes[LIST_BYTES..end].chunks_exact(ENTRY_BYTES) {
            let entry = EntryLayout::read_from_bytes(entry).ok()?;
            let units = u64::from(entry.units.get() & !IS_NODE);
            let piece =
                Piece { extent: Extent { location: entry.location.get(), units }, crc: entry.crc.get() };
            if units == 0 || list.next.is_some() {
                return None;
            }
            match entry.units.get() & IS_NODE == 0 {
                true => list.pieces.push(piece),
                false => list.next = Some(piece),
            }
        }
        Some(list)
    }
}

/// The list in a record, or in its front, if it is intact.
pub(super) fn list_of(header: &RecordHeader, record: &[u8]) -> Option<PieceList> {
    PieceList::decode(record.get(header.value_offset()..)?, header.stored_crc())
}

/// All pieces of a value, and the nodes of its list.
#[derive(Debug, Default)]
pub(super) struct Pieces {
    /// In the order of the value.
    pub pieces: Vec<Piece>,
    pub nodes: Vec<Extent>,
    /// The units of the pieces.
    value_units: u64,
}

impl Pieces {
    /// Takes in a list, and gives the node that follows. `None` if the pieces are more or longer than those of a value of
    /// `value_bytes`, or outside `units`.
    pub fn add(
        &mut self,
        list: PieceList,
        value_bytes: usize,
        unit_bytes: usize,
        units: &Range<u64>,
    ) -> Option<Option<Piece>> {
        let is_within = |extent: &Extent| {
            let end = extent.location.checked_add(extent.units);
            units.contains(&extent.location) && end.is_some_and(|end| end <= units.end)
        };
        let is_possible = |piece: &Piece| {
            is_within(&piece.extent) && piece.extent.units as usize * unit_bytes <= PIECE_BYTES_MAX
        };
        // Only what is new is looked at: a value may have half a million pieces, in thousands of lists.
        self.value_units += list.pieces.iter().map(|piece| piece.extent.units).sum::<u64>();
        let is_last = list.next.is_none();
        let wanted = value_bytes.div_ceil(unit_bytes) as u64;
        if value_bytes as u64 > VALUE_BYTES_MAX
            || !list.pieces.iter().all(is_possible)
            || self.value_units > wanted
            || (is_last && self.value_units != wanted)
        {
            return None;
        }
        // Each list has a piece, so there are at most as many nodes as units.
        if let Some(node) = &list.next {
            if !is_within(&node.extent) || node.extent.units != 1 || list.pieces.is_empty() {
                return None;
            }
            self.nodes.push(node.extent);
        }
        self.pieces.extend(list.pieces);
        Some(list.next)
    }

    /// All space of the value but the record's.
    pub fn extents(&self) -> impl Iterator<Item = Extent> + '_ {
        self.pieces.iter().map(|piece| piece.extent).chain(self.nodes.iter().copied())
    }

    /// The parts of the value that pieces have, in their order.
    pub fn ranges(
        &self,
        value_bytes: usize,
        unit_bytes: usize,
    ) -> impl Iterator<Item = (Piece, Range<usize>)> {
        let mut start = 0;
        self.pieces.iter().map(move |&piece| {
            let end = (start + piece.extent.units as usize * unit_bytes).min(value_bytes);
            let range = start..end;
            start = end;
            (piece, range)
        })
    }
}

/// The first unit of what is damaged: a record, a node or a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DamagedAt(pub u64);

/// The pieces of a record on a volume that is not open; or what of its list is damaged.
///
/// # Errors
/// The device's.
pub(super) async fn load_pieces(
    reader: UnitReader<'_>,
    units: &Range<u64>,
    header: &RecordHeader,
    record: &[u8],
) -> Result<Result<Pieces, DamagedAt>, DeviceError> {
    let unit = reader.unit_bytes();
    let mut pieces = Pieces::default();
    let (mut at, mut list) = (header.identity.location, list_of(header, record));
    loop {
        let added = list.and_then(|list| pieces.add(list, header.value_bytes, unit, units));
        match added {
            None => return Ok(Err(DamagedAt(at))),
            Some(None) => return Ok(Ok(pieces)),
            Some(Some(node)) => {
                at = node.extent.location;
                let bytes = reader.read(at, 0, node.extent.units as usize * unit).await?;
                list = PieceList::decode(&bytes, node.crc);
            }
        }
    }
}

/// The first piece of a value that is not what was written, if any.
///
/// # Errors
/// The device's.
pub(super) async fn find_damage(
    reader: UnitReader<'_>,
    pieces: &Pieces,
    value_bytes: usize,
) -> Result<Option<DamagedAt>, DeviceError> {
    for (piece, range) in pieces.ranges(value_bytes, reader.unit_bytes()) {
        if crc32c(&reader.read(piece.extent.location, 0, range.len()).await?) != piece.crc {
            return Ok(Some(DamagedAt(piece.extent.location)));
        }
    }
    Ok(None)
}

/// The units of a record with a list: those that key and two entries need.
pub(super) fn record_units_of_list(header: &RecordHeader, unit_bytes: usize) -> u64 {
    (header.value_offset() + list_bytes(2)).div_ceil(unit_bytes) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Prng;

    fn piece(location: u64, units: u64) -> Piece {
        Piece { extent: Extent { location, units }, crc: (location as u32).wrapping_mul(3) }
    }

    #[test]
    fn a_list_gives_back_its_entries_and_a_flipped_bit_is_found() {
        for next in [None, Some(piece(9, 1))] {
            let list = PieceList { pieces: vec![piece(5, 2), piece(8, 1)], next };
            let mut bytes = vec![0xaa; 512];
            let end = list.encode(&mut bytes);
            assert_eq!(end, 16 + 16 * list.entries());
            let crc = crc32c(&bytes[..end]);
            assert_eq!(PieceList::decode(&bytes, crc), Some(list));
            for bit in 0..end * 8 {
                let mut damaged = bytes.clone();
                damaged[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(PieceList::decode(&damaged, crc), None, "bit {bit}");
            }
        }
    }

    #[test]
    fn no_bytes_panic() {
        let mut random = Prng::new(1);
        for _ in 0..20_000 {
            let mut bytes: Vec<u8> = (0..random.below(100)).map(|_| random.next_u64() as u8).collect();
            if let Some(front) = bytes.get_mut(..4) {
                front.copy_from_slice(&(random.below(8) as u32).to_le_bytes());
            }
            let entries = bytes.first().map_or(0, |&count| usize::from(count));
            let crc = bytes.get(..list_bytes(entries)).map_or(0, crc32c);
            if let Some(list) = PieceList::decode(&bytes, crc) {
                let _ = Pieces::default().add(list, random.below(5_000) as usize, 512, &(10..10_000));
            }
        }
    }

    #[test]
    fn pieces_that_are_not_a_values_are_refused() {
        let add = |pieces: &[Piece], next, value_bytes| {
            let list = PieceList { pieces: pieces.to_vec(), next };
            Pieces::default().add(list, value_bytes, 512, &(100..1_000))
        };
        assert_eq!(add(&[piece(100, 2), piece(999, 1)], None, 1_500), Some(None));
        assert_eq!(add(&[piece(100, 2)], None, 1_500), None, "too few");
        assert_eq!(add(&[piece(100, 2), piece(200, 2)], None, 1_500), None, "too many");
        assert_eq!(add(&[piece(99, 3)], None, 1_500), None, "outside");
        assert_eq!(add(&[piece(999, 3)], None, 1_500), None, "over the end");
        assert_eq!(add(&[piece(u64::MAX, 3)], None, 1_500), None, "far outside");
        assert_eq!(add(&[piece(100, 2)], Some(piece(200, 1)), 1_500), Some(Some(piece(200, 1))));
        assert_eq!(add(&[piece(100, 2)], Some(piece(999, 2)), 1_500), None, "a node over the end");
        assert_eq!(add(&[piece(100, 257)], None, 257 * 512), None, "longer than a piece");
        assert_eq!(add(&[], Some(piece(200, 1)), 1_500), None, "a node after nothing, perhaps itself");
        assert_eq!(add(&[piece(100, 2)], Some(piece(200, 2)), 1_500), None, "a node of two units");
        assert_eq!(add(&[piece(100, 2)], Some(piece(200, 1)), (256 << 20) + 1), None, "too long a value");
    }

    #[test]
    fn the_parts_of_a_value_follow_each_other() {
        let pieces = Pieces { pieces: vec![piece(1, 2), piece(9, 1), piece(4, 1)], ..Pieces::default() };
        let ranges: Vec<_> = pieces.ranges(1_600, 512).map(|(_, range)| range).collect();
        assert_eq!(ranges, [0..1_024, 1_024..1_536, 1_536..1_600]);
        assert_eq!(pieces.extents().map(|extent| extent.units).sum::<u64>(), 4);
    }
}
