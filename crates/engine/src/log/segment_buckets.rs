//! A segment image on the device: the entries of a segment in a chain of buckets, as one append to the key log.
//!
//! ```text
//!   bucket 0, of one unit                                    bucket i, of one unit
//!    0 magic "KB"               28 bytes of entries u32        0 magic 0xC5
//!    2 format u8, 1             32 durable lag u32             1 i
//!    3 flags u8                 36 key log head u32            2 offset here of the first entry that begins here u16; 0xffff: none
//!    4 CRC-32C u32              40 value log head u32          4 CRC-32C u32
//!    8 partition u32            44 next key chunk u32          8 entries, continued
//!   12 segment u32              48 next value chunk u32
//!   16 sequence u48             52 value tail: index u32       flags of bucket 0
//!   22 buckets u8               56 value tail: granule u32       1 marker: no segment   2, 4 first, second image of a split
//!   23 depth u8                 60 keys u40                      8 entries of the segment were lost
//!   24 incarnation u32          65 live granules u40
//!                               70 bytes of entries u40
//!                               75 previous image: segment u32
//!                               79 previous image: buckets u8
//!                               80 entries; behind the last one, 0xff to the end of the image
//! ```
//! The checksum of a bucket covers it without itself, exclusive or its seed. Bucket 0 has the seed of its place
//! ([`super::log_place::checksum_seed`]); bucket i the low 32 bits of mix(seed of its place · 2^32 + checksum of bucket 0), mix being
//! SplitMix64's: an image that was overwritten from its front leaves no buckets that pass for those of the new one. Integers are little-endian.
//!
//! Invariants: checking takes any bytes. A damaged bucket costs the entries that lie in it, wholly or in part, and no other: a run of
//! intact buckets is decoded from the first entry that begins in it. If bucket 0 is damaged, the checksum that binds the others is read
//! from it or, if that does not bind them, computed.
//! Tested in `segment_buckets_tests.rs`.

use super::hash_prefix::SegmentNumber;
use super::log_place::{ChecksumKind, ChunkIndex, ChunkNumber, checksum_seed};
use super::segment_entry::{ENTRIES_END, SEGMENT_ENTRY_BYTES_MAX};
use super::segment_image::SegmentImage;
use super::segment_ref::CHAIN_MAX;
use octokv_base::Crc32c;
use octokv_base::prng::mix64;
use std::borrow::Cow;
use std::mem::offset_of;
use std::ops::Range;
use zerocopy::byteorder::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The header of bucket 0, in bytes.
pub const FIRST_BUCKET_HEADER_BYTES: usize = 80;
/// The header of any other bucket, in bytes.
pub const NEXT_BUCKET_HEADER_BYTES: usize = 8;
/// The sequence numbers of images are lower: 48 bits.
pub const SEQUENCE_LIMIT: u64 = 1 << 48;
/// The totals of a store are lower: 40 bits.
pub const TOTAL_LIMIT: u64 = 1 << 40;

const MAGIC: [u8; 2] = *b"KB";
const FORMAT: u8 = 1;
const NEXT_BUCKET_MAGIC: u8 = 0xc5;
const FLAG_MARKER: u8 = 1;
const FLAG_SPLIT_FIRST: u8 = 2;
const FLAG_SPLIT_SECOND: u8 = 4;
const FLAG_LOST: u8 = 8;
/// The offset of the first entry in a bucket in which none begins.
const NO_ENTRY: u16 = 0xffff;
/// What follows the last entry, to compare many bytes at once.
const PADDING: [u8; 256] = [ENTRIES_END; 256];
/// The checksum, in both kinds of headers.
const CRC_AT: Range<usize> = 4..8;

/// The header of bucket 0 on the device, little-endian.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct FirstBucketLayout {
    magic: [u8; 2],
    format: u8,
    flags: u8,
    crc: U32,
    partition: U32,
    segment: U32,
    sequence: [u8; 6],
    chain: u8,
    depth: u8,
    incarnation: U32,
    entry_bytes: U32,
    durable_lag: U32,
    key_head: U32,
    value_head: U32,
    next_key_chunk: U32,
    next_value_chunk: U32,
    value_tail_index: U32,
    value_tail_granule: U32,
    keys: [u8; 5],
    live_granules: [u8; 5],
    total_entry_bytes: [u8; 5],
    previous_segment: U32,
    previous_chain: u8,
}
const _: () = assert!(size_of::<FirstBucketLayout>() == FIRST_BUCKET_HEADER_BYTES);
const _: () = assert!(offset_of!(FirstBucketLayout, crc) == CRC_AT.start);
const _: () = assert!(offset_of!(FirstBucketLayout, incarnation) == 24);
const _: () = assert!(offset_of!(FirstBucketLayout, keys) == 60);
const _: () = assert!(offset_of!(FirstBucketLayout, previous_chain) == 79);

/// The header of any other bucket on the device, little-endian.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct NextBucketLayout {
    magic: u8,
    position: u8,
    first_entry: U16,
    crc: U32,
}
const _: () = assert!(size_of::<NextBucketLayout>() == NEXT_BUCKET_HEADER_BYTES);
const _: () = assert!(offset_of!(NextBucketLayout, crc) == CRC_AT.start);

/// What an image is in its key log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageRole {
    /// A segment.
    Segment,
    /// No segment: it states heads, tails and what is durable. It has one bucket and no entries.
    Marker,
    /// The segment that was split, of which the next image has the other half.
    SplitFirst,
    /// The new segment of a split.
    SplitSecond,
}

/// The keys and bytes of a store, each below [`TOTAL_LIMIT`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreTotals {
    /// Keys, without tombstones.
    pub keys: u64,
    /// Granules of the records of all values.
    pub live_granules: u64,
    /// Bytes of all entries.
    pub entry_bytes: u64,
}

/// The image before an image in the key log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PreviousImage {
    /// Its segment; [`SegmentNumber::MARKER`] of a marker, and without one before.
    pub segment: SegmentNumber,
    /// Its buckets; 0 without one.
    pub chain: u8,
}

impl PreviousImage {
    /// What the first image of a store says.
    pub const NONE: PreviousImage = PreviousImage { segment: SegmentNumber::MARKER, chain: 0 };
}

/// A place in a value log that begins a granule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ValueTailPlace {
    /// The chunk in the log.
    pub index: ChunkIndex,
    /// The granule, counted from the start of the chunk.
    pub granule: u32,
}

/// What the header of an image says, besides the lengths of the image itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageState {
    /// What it is.
    pub role: ImageRole,
    /// The segment; [`SegmentNumber::MARKER`] exactly in a marker.
    pub segment: SegmentNumber,
    /// The bits of the prefix that name the segment; 0 in a marker.
    pub depth: u8,
    /// The number of the image in its key log, without gaps, below [`SEQUENCE_LIMIT`].
    pub sequence: u64,
    /// The opening of the volume that wrote it.
    pub incarnation: u32,
    /// The sequence number minus that of the last image that was known to be durable; at most the sequence number.
    pub durable_lag: u32,
    /// The lowest chunk in use of the key log.
    pub key_head: ChunkIndex,
    /// The lowest chunk in use of the value log.
    pub value_head: ChunkIndex,
    /// The chunk that will follow this image's chunk.
    pub next_key_chunk: ChunkNumber,
    /// The chunk that will follow the value tail's chunk.
    pub next_value_chunk: ChunkNumber,
    /// Where the values end whose writes are complete: every value of the image lies before it.
    pub value_tail: ValueTailPlace,
    /// The store after this image.
    pub totals: StoreTotals,
    /// The image before.
    pub previous: PreviousImage,
}

/// The validated header of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageHead {
    /// What it says of the store.
    pub state: ImageState,
    /// The buckets of the image, 1 to [`CHAIN_MAX`].
    pub chain: u8,
    /// The bytes of its entries.
    pub entry_bytes: u32,
    /// Whether entries of the segment were lost before it was written.
    pub is_lost: bool,
}

/// Where an image begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImagePlace {
    /// The volume.
    pub volume_id: u64,
    /// The partition of the store.
    pub partition: u32,
    /// The chunk in the store's key log.
    pub index: ChunkIndex,
    /// The unit, counted from the start of the chunk.
    pub unit: u32,
    /// The bytes of a unit: one bucket.
    pub unit_bytes: u32,
}

impl ImagePlace {
    /// The seed of the checksum of a bucket, as a first one.
    fn seed(&self, bucket: usize) -> u32 {
        let unit = self.unit.wrapping_add(bucket as u32);
        checksum_seed(self.volume_id, self.partition, ChecksumKind::Bucket, self.index, unit)
    }

    /// The seed of the checksum of a bucket behind a first one with this checksum.
    fn next_seed(&self, bucket: usize, first_crc: u32) -> u32 {
        mix64(u64::from(self.seed(bucket)) << 32 | u64::from(first_crc)) as u32
    }
}

/// The bytes for entries in an image of so many buckets.
pub fn image_capacity_bytes(chain: u8, unit_bytes: u32) -> usize {
    let next = usize::from(chain.saturating_sub(1));
    let first_bytes = unit_bytes as usize - FIRST_BUCKET_HEADER_BYTES;
    first_bytes + next * (unit_bytes as usize - NEXT_BUCKET_HEADER_BYTES)
}

/// The buckets of an image with so many bytes of entries, each of one unit; `None` if it would have more than [`CHAIN_MAX`].
pub fn image_units(entry_bytes: usize, unit_bytes: u32) -> Option<u8> {
    let first_bytes = unit_bytes as usize - FIRST_BUCKET_HEADER_BYTES;
    let next =
        entry_bytes.saturating_sub(first_bytes).div_ceil(unit_bytes as usize - NEXT_BUCKET_HEADER_BYTES);
    u8::try_from(next + 1).ok().filter(|&chain| chain <= CHAIN_MAX)
}

/// Encodes an image. REQUIRES: fields within their limits.
///
/// # Panics
/// If `out` is not as long as the image, in whole units.
pub fn encode_image(out: &mut [u8], state: &ImageState, image: &SegmentImage, place: ImagePlace) {
    let unit_bytes = place.unit_bytes as usize;
    let chain = image_units(image.entry_bytes(), place.unit_bytes).expect("an image has at most 63 buckets");
    assert_eq!(out.len(), usize::from(chain) * unit_bytes, "the bytes of an image");
    debug_assert!(state.sequence < SEQUENCE_LIMIT && u64::from(state.durable_lag) <= state.sequence);
    let layout = encode_header(state, image, chain, place.partition);
    let mut entries = image.bytes();
    let mut starts = image.starts().iter().map(|&start| start as usize).peekable();
    for (position, bucket) in out.chunks_exact_mut(unit_bytes).enumerate() {
        let header_bytes = header_bytes(position);
        let from = image.entry_bytes() - entries.len();
        while starts.next_if(|&start| start < from).is_some() {}
        let (header, payload) = bucket.split_at_mut(header_bytes);
        match position {
            0 => header.copy_from_slice(layout.as_bytes()),
            _ => {
                let first_entry = starts.peek().map(|&start| start - from + header_bytes);
                let first_entry = first_entry.filter(|&at| at < unit_bytes).map_or(NO_ENTRY, |at| at as u16);
                let layout = NextBucketLayout {
                    magic: NEXT_BUCKET_MAGIC,
                    position: position as u8,
                    first_entry: first_entry.into(),
                    crc: U32::ZERO,
                };
                header.copy_from_slice(layout.as_bytes());
            }
        }
        let (here, behind) = entries.split_at(entries.len().min(payload.len()));
        payload[..here.len()].copy_from_slice(here);
        payload[here.len()..].fill(ENTRIES_END);
        entries = behind;
    }
    seal_buckets(out, place);
}

fn encode_header(state: &ImageState, image: &SegmentImage, chain: u8, partition: u32) -> FirstBucketLayout {
    let role = match state.role {
        ImageRole::Segment => 0,
        ImageRole::Marker => FLAG_MARKER,
        ImageRole::SplitFirst => FLAG_SPLIT_FIRST,
        ImageRole::SplitSecond => FLAG_SPLIT_SECOND,
    };
    FirstBucketLayout {
        magic: MAGIC,
        format: FORMAT,
        flags: role | if image.is_lost() { FLAG_LOST } else { 0 },
        crc: U32::ZERO,
        partition: partition.into(),
        segment: state.segment.0.into(),
        sequence: low_bytes(state.sequence),
        chain,
        depth: state.depth,
        incarnation: state.incarnation.into(),
        entry_bytes: (image.entry_bytes() as u32).into(),
        durable_lag: state.durable_lag.into(),
        key_head: state.key_head.0.into(),
        value_head: state.value_head.0.into(),
        next_key_chunk: state.next_key_chunk.0.into(),
        next_value_chunk: state.next_value_chunk.0.into(),
        value_tail_index: state.value_tail.index.0.into(),
        value_tail_granule: state.value_tail.granule.into(),
        keys: low_bytes(state.totals.keys),
        live_granules: low_bytes(state.totals.live_granules),
        total_entry_bytes: low_bytes(state.totals.entry_bytes),
        previous_segment: state.previous.segment.0.into(),
        previous_chain: state.previous.chain,
    }
}

/// Writes the checksums of all buckets.
pub(super) fn seal_buckets(out: &mut [u8], place: ImagePlace) {
    let mut first_crc = 0;
    for (position, bucket) in out.chunks_exact_mut(place.unit_bytes as usize).enumerate() {
        let seed = if position == 0 { place.seed(0) } else { place.next_seed(position, first_crc) };
        let crc = content_crc(bucket) ^ seed;
        bucket[CRC_AT].copy_from_slice(&crc.to_le_bytes());
        first_crc = if position == 0 { crc } else { first_crc };
    }
}

/// The checksum of a bucket without its checksum field.
fn content_crc(bucket: &[u8]) -> u32 {
    let mut crc = Crc32c::new();
    crc.update(&bucket[..CRC_AT.start]);
    crc.update(&bucket[CRC_AT.end..]);
    crc.finish()
}

fn stored_crc(bucket: &[u8]) -> u32 {
    let [a, b, c, d] = [0, 1, 2, 3].map(|byte| bucket[CRC_AT.start + byte]);
    u32::from_le_bytes([a, b, c, d])
}

fn header_bytes(position: usize) -> usize {
    if position == 0 { FIRST_BUCKET_HEADER_BYTES } else { NEXT_BUCKET_HEADER_BYTES }
}

fn low_bytes<const N: usize>(value: u64) -> [u8; N] {
    debug_assert!(value >> (8 * N) == 0);
    let bytes = value.to_le_bytes();
    std::array::from_fn(|byte| bytes[byte])
}

fn of_low_bytes(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

/// Bytes read from a key log, not validated.
#[derive(Clone, Copy)]
pub struct UncheckedBuckets<'a> {
    /// The bytes, from the start of the image on; more than the image has do not matter.
    pub bytes: &'a [u8],
    /// The place from which they were read.
    pub place: ImagePlace,
}

/// An image of which some buckets may be damaged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckedImage {
    /// The header, if bucket 0 is intact.
    pub head: Option<ImageHead>,
    /// The damaged buckets: bit i is bucket i.
    pub damaged: u64,
    /// The entries that lie in intact buckets alone. Lost entries are stated if the image states them, or a bucket is damaged.
    pub entries: SegmentImage,
}

impl<'a> UncheckedBuckets<'a> {
    /// The header, by bucket 0 alone; `None` if that is not the first bucket of an image at this place.
    pub fn head(&self) -> Option<ImageHead> {
        let bucket = self.bucket(0).filter(|bucket| self.is_first_intact(bucket))?;
        let (layout, _) = FirstBucketLayout::ref_from_prefix(bucket).ok()?;
        let role = match layout.flags & !FLAG_LOST {
            0 => ImageRole::Segment,
            FLAG_MARKER => ImageRole::Marker,
            FLAG_SPLIT_FIRST => ImageRole::SplitFirst,
            FLAG_SPLIT_SECOND => ImageRole::SplitSecond,
            _ => return None,
        };
        let state = ImageState {
            role,
            segment: SegmentNumber(layout.segment.get()),
            depth: layout.depth,
            sequence: of_low_bytes(&layout.sequence),
            incarnation: layout.incarnation.get(),
            durable_lag: layout.durable_lag.get(),
            key_head: ChunkIndex(layout.key_head.get()),
            value_head: ChunkIndex(layout.value_head.get()),
            next_key_chunk: ChunkNumber(layout.next_key_chunk.get()),
            next_value_chunk: ChunkNumber(layout.next_value_chunk.get()),
            value_tail: ValueTailPlace {
                index: ChunkIndex(layout.value_tail_index.get()),
                granule: layout.value_tail_granule.get(),
            },
            totals: StoreTotals {
                keys: of_low_bytes(&layout.keys),
                live_granules: of_low_bytes(&layout.live_granules),
                entry_bytes: of_low_bytes(&layout.total_entry_bytes),
            },
            previous: PreviousImage {
                segment: SegmentNumber(layout.previous_segment.get()),
                chain: layout.previous_chain,
            },
        };
        let head = ImageHead {
            state,
            chain: layout.chain,
            entry_bytes: layout.entry_bytes.get(),
            is_lost: layout.flags & FLAG_LOST != 0,
        };
        let is_known = layout.magic == MAGIC && layout.format == FORMAT;
        let is_of_store = layout.partition.get() == self.place.partition;
        (is_known && is_of_store && head.is_consistent(self.place.unit_bytes)).then_some(head)
    }

    /// Which buckets are intact, of an image that should have so many, and the entries in them. Whatever the bytes are, this is an answer.
    pub fn check(&self, expected_chain: u8) -> CheckedImage {
        let chain = usize::from(expected_chain.min(CHAIN_MAX));
        let mut head = self.head().filter(|head| usize::from(head.chain) == chain);
        let mut damaged = (0..chain).fold(0, |damaged, bucket| {
            let is_intact = if bucket == 0 { head.is_some() } else { self.is_next_intact(bucket) };
            damaged | u64::from(!is_intact) << bucket
        });
        let is_damaged = |damaged: u64, bucket: usize| damaged >> bucket & 1 == 1;
        let entry_bytes = head.map_or(0, |head| head.entry_bytes as usize).min(self.bytes.len());
        let mut entries = SegmentImage::with_capacity(entry_bytes);
        let mut bucket = 0;
        while bucket < chain {
            let run_end = (bucket..chain).find(|&next| is_damaged(damaged, next)).unwrap_or(chain);
            if let Err(malformed) = self.decode_run(bucket..run_end, chain, &mut entries) {
                damaged |= 1 << malformed;
                bucket = malformed + 1;
            } else {
                bucket = run_end + 1;
            }
        }
        // Every entry is there, but there are not as many bytes as the header has: it is not theirs.
        if damaged == 0 && head.is_some_and(|head| head.entry_bytes as usize != entries.entry_bytes()) {
            damaged = 1;
        }
        head = head.filter(|_| damaged & 1 == 0);
        entries.set_lost(damaged != 0 || head.is_some_and(|head| head.is_lost));
        CheckedImage { head, damaged, entries }
    }

    fn bucket(&self, position: usize) -> Option<&'a [u8]> {
        let unit_bytes = self.place.unit_bytes as usize;
        self.bytes.get(position * unit_bytes..(position + 1) * unit_bytes)
    }

    fn is_first_intact(&self, bucket: &[u8]) -> bool {
        content_crc(bucket) ^ self.place.seed(0) == stored_crc(bucket)
    }

    /// Whether a bucket other than bucket 0 is part of the image.
    fn is_next_intact(&self, position: usize) -> bool {
        let Some((first, bucket)) = self.bucket(0).zip(self.bucket(position)) else { return false };
        let Ok((layout, _)) = NextBucketLayout::ref_from_prefix(bucket) else { return false };
        let found = content_crc(bucket) ^ layout.crc.get();
        let is_bound_to = |first_crc| found == self.place.next_seed(position, first_crc);
        layout.magic == NEXT_BUCKET_MAGIC
            && usize::from(layout.position) == position
            && (is_bound_to(stored_crc(first)) || is_bound_to(content_crc(first) ^ self.place.seed(0)))
    }

    /// Decodes the entries that begin in a run of intact buckets and lie in it as a whole. The run ends before a damaged bucket or at the
    /// end of the image.
    ///
    /// # Errors
    /// A bucket whose bytes are no entries although its checksum is right.
    fn decode_run(&self, run: Range<usize>, chain: usize, entries: &mut SegmentImage) -> Result<(), usize> {
        let Some((first, first_entry)) = self.first_entry(run.clone())? else { return Ok(()) };
        let payload_of = |position: usize| {
            let from = if position == first { first_entry } else { header_bytes(position) };
            self.bucket(position).and_then(|bucket| bucket.get(from..)).unwrap_or(&[])
        };
        // The payload of the run from its first entry on.
        let payload = match first + 1 == run.end {
            true => Cow::Borrowed(payload_of(first)),
            false => Cow::Owned((first..run.end).map(payload_of).collect::<Vec<_>>().concat()),
        };
        let end = entries.push_encoded(&payload);
        let rest = &payload[end..];
        // The end of the entries; or one that continues in a damaged bucket; or nothing that a writer leaves.
        let is_end = rest.chunks(PADDING.len()).all(|part| part == &PADDING[..part.len()]);
        let is_cut = run.end < chain && rest.len() < SEGMENT_ENTRY_BYTES_MAX;
        if is_end || is_cut {
            return Ok(());
        }
        let bucket_ends = (first..run.end).scan(0, |bytes, position| {
            *bytes += payload_of(position).len();
            Some(*bytes)
        });
        let bucket = first + bucket_ends.take_while(|&bucket_end| bucket_end <= end).count();
        Err(bucket.min(run.end - 1))
    }

    /// The first bucket of a run in which an entry begins, and where in it; `None` if none begins in the run.
    ///
    /// # Errors
    /// A bucket that has its first entry outside of itself.
    fn first_entry(&self, run: Range<usize>) -> Result<Option<(usize, usize)>, usize> {
        for position in run {
            if position == 0 {
                return Ok(Some((0, FIRST_BUCKET_HEADER_BYTES)));
            }
            let layout =
                self.bucket(position).and_then(|bucket| NextBucketLayout::ref_from_prefix(bucket).ok());
            match layout.map_or(NO_ENTRY, |(layout, _)| layout.first_entry.get()) {
                NO_ENTRY => {}
                at if (NEXT_BUCKET_HEADER_BYTES..self.place.unit_bytes as usize).contains(&at.into()) => {
                    return Ok(Some((position, at.into())));
                }
                _ => return Err(position),
            }
        }
        Ok(None)
    }
}

impl ImageHead {
    /// Whether the fields are those of an image. A valid checksum does not imply valid fields.
    fn is_consistent(&self, unit_bytes: u32) -> bool {
        let ImageState { role, segment, depth, sequence, durable_lag, .. } = self.state;
        let is_segment = match role {
            ImageRole::Marker => segment == SegmentNumber::MARKER && depth == 0 && self.entry_bytes == 0,
            ImageRole::Segment => segment.is_at_depth(depth),
            ImageRole::SplitFirst | ImageRole::SplitSecond => {
                let is_second = role == ImageRole::SplitSecond;
                // The new segment's number has the highest bit of its depth.
                depth > 0 && segment.is_at_depth(depth) && (segment.0 >> (depth - 1) == 1) == is_second
            }
        };
        is_segment
            && u64::from(durable_lag) <= sequence
            && image_units(self.entry_bytes as usize, unit_bytes) == Some(self.chain)
            && self.state.previous.chain <= CHAIN_MAX
    }
}
