//! Images of versions, for checkpoints: the current version as a stream of images, each with its own checksum
//! ([`crate::common::image_stream`]), so that a damaged copy of one costs nothing as long as the other copy of that one is intact.
//!
//! ```text
//!   image   0 magic "OKVV"        24 flushed through u64     44 number of the image u32, from 0
//!           4 CRC-32C u32         32 last table u64          48 bytes of records u32
//!           8 volume u64          40 last segment u32        52 1 if it is the last, else 0, u32
//!          16 checkpoint u64                                 56 zero u64
//!          64 records, as crate::lsm::version_edit draws them: segments and their seals, tables, lost ranges
//! ```
//! The checksum covers bytes 8 to the end of the records. A version does not change, so its images agree although edits are made meanwhile: those whose
//! journal entry is behind the checkpoint's start are applied to what was loaded.
//!
//! Invariants: loading takes any bytes, and gives a version only if it is consistent. Tested below and in `version_model_tests.rs`.

use super::reclaim::ReclaimQueue;
use super::tree_version::{TreeVersion, VersionProblem};
use super::version_edit::{
    EDIT_BYTES_MAX, EditProblem, LEVELS, VersionEdit, push_lost, push_seal, push_segment, push_table,
};
use super::version_set::SegmentUsage;
use crate::common::image_stream::ImageFormat;
use crate::common::superblock::COUNT_MAX;
use octokv_base::crc32c;
use std::fmt;
use std::mem::offset_of;
use std::ops::Range;
use std::sync::Arc;
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC: [u8; 4] = *b"OKVV";
/// The fixed part of an image, in bytes.
pub const VERSION_IMAGE_HEADER_BYTES: usize = 64;
/// An image ends with the record that reaches these bytes.
const IMAGE_RECORDS_BYTES: usize = 256 << 10;

/// The header of an image on the device, little-endian.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct VersionImageLayout {
    magic: [u8; 4],
    crc: U32,
    volume_id: U64,
    checkpoint_id: U64,
    flushed_through: U64,
    last_table_id: U64,
    last_segment_id: U32,
    image: U32,
    records_bytes: U32,
    is_last: U32,
    zero: U64,
}
const _: () = assert!(size_of::<VersionImageLayout>() == VERSION_IMAGE_HEADER_BYTES);
/// The first byte that the checksum covers.
const CHECKED_FROM: usize = offset_of!(VersionImageLayout, volume_id);

/// Writes the images of a version, one after another.
pub struct VersionImageWriter {
    version: Arc<TreeVersion>,
    volume_id: u64,
    checkpoint_id: u64,
    /// The number of the next image.
    image: u32,
    segment_rank: usize,
    level: usize,
    table_rank: usize,
    lost_index: usize,
    is_finished: bool,
}

impl VersionImageWriter {
    /// Begins with the first image of a version.
    pub fn new(version: Arc<TreeVersion>, volume_id: u64, checkpoint_id: u64) -> VersionImageWriter {
        VersionImageWriter {
            version,
            volume_id,
            checkpoint_id,
            image: 0,
            segment_rank: 0,
            level: 0,
            table_rank: 0,
            lost_index: 0,
            is_finished: false,
        }
    }

    /// Appends the next image to `bytes`; false if there is none. There is at least one.
    pub fn append_image(&mut self, bytes: &mut Vec<u8>) -> bool {
        if self.is_finished {
            return false;
        }
        let start = bytes.len();
        bytes.resize(start + VERSION_IMAGE_HEADER_BYTES, 0);
        let records = start + VERSION_IMAGE_HEADER_BYTES;
        while bytes.len() - records < IMAGE_RECORDS_BYTES {
            if !self.append_record(bytes) {
                self.is_finished = true;
                break;
            }
        }
        let header = VersionImageLayout {
            magic: MAGIC,
            crc: U32::ZERO,
            volume_id: self.volume_id.into(),
            checkpoint_id: self.checkpoint_id.into(),
            flushed_through: self.version.flushed_through().into(),
            last_table_id: self.version.last_table_id().into(),
            last_segment_id: self.version.last_segment_id().into(),
            image: self.image.into(),
            records_bytes: ((bytes.len() - records) as u32).into(),
            is_last: u32::from(self.is_finished).into(),
            zero: U64::ZERO,
        };
        bytes[start..records].copy_from_slice(header.as_bytes());
        let crc = crc32c(&bytes[start + CHECKED_FROM..]);
        bytes[start + 4..start + 8].copy_from_slice(&crc.to_le_bytes());
        self.image += 1;
        true
    }

    /// Appends the records of the next segment, table or lost range.
    fn append_record(&mut self, bytes: &mut Vec<u8>) -> bool {
        if let Some(segment) = self.version.segments().nth(self.segment_rank) {
            self.segment_rank += 1;
            push_segment(bytes, &segment.meta);
            segment.seal.iter().for_each(|seal| push_seal(bytes, segment.meta.id(), seal));
            return true;
        }
        while self.level < LEVELS {
            let table = match self.level {
                0 => self.version.level0().get(self.table_rank),
                level => self.version.level(level).nth(self.table_rank),
            };
            if let Some(table) = table {
                self.table_rank += 1;
                push_table(bytes, self.level, table);
                return true;
            }
            (self.level, self.table_rank) = (self.level + 1, 0);
        }
        match self.version.lost().as_slice().get(self.lost_index) {
            Some(range) => {
                self.lost_index += 1;
                push_lost(bytes, range);
                true
            }
            None => false,
        }
    }
}

/// An image of a version, of unknown content.
pub struct VersionImageFormat;

impl ImageFormat for VersionImageFormat {
    const HEADER_BYTES: usize = VERSION_IMAGE_HEADER_BYTES;

    fn claimed_bytes(bytes: &[u8]) -> Option<usize> {
        let (header, _) = VersionImageLayout::ref_from_prefix(bytes).ok()?;
        let records_bytes = header.records_bytes.get() as usize;
        (header.magic == MAGIC && records_bytes <= IMAGE_RECORDS_BYTES + EDIT_BYTES_MAX)
            .then_some(VERSION_IMAGE_HEADER_BYTES + records_bytes)
    }
}

/// Why images are no version although their checksums are right: a bug wrote them, or an attacker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VersionImageProblem {
    /// The last image is missing.
    Incomplete,
    /// The images do not agree on what is in front of their records, or give a number that is none.
    Header,
    /// Records are damaged.
    Records(EditProblem),
    /// The version is not consistent.
    Version(VersionProblem),
}

impl fmt::Display for VersionImageProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VersionImageProblem::Incomplete => f.write_str("the image of the tree ends too early"),
            VersionImageProblem::Header => f.write_str("the image of the tree has contradictory headers"),
            VersionImageProblem::Records(problem) => write!(f, "the image of the tree: {problem}"),
            VersionImageProblem::Version(problem) => write!(f, "the image of the tree: {problem}"),
        }
    }
}

/// Puts a version together from its images.
pub struct VersionImageLoader {
    volume_id: u64,
    checkpoint_id: u64,
    reclaim: Arc<ReclaimQueue>,
    /// The first image's header.
    header: Option<VersionImageLayout>,
    images: u32,
    records: VersionEdit,
    is_complete: bool,
    problem: Option<VersionImageProblem>,
}

impl VersionImageLoader {
    /// Expects the first image. Tables and segments give their extents to `reclaim`; the caller empties the queue afterwards.
    pub fn new(volume_id: u64, checkpoint_id: u64, reclaim: Arc<ReclaimQueue>) -> VersionImageLoader {
        VersionImageLoader {
            volume_id,
            checkpoint_id,
            reclaim,
            header: None,
            images: 0,
            records: VersionEdit::default(),
            is_complete: false,
            problem: None,
        }
    }

    /// Whether the last image was loaded, or a problem found: no more images are wanted.
    pub fn is_done(&self) -> bool {
        self.is_complete || self.problem.is_some()
    }

    /// Loads the image at the front of `bytes`, and gives its length; `None` if it is not the next image, intact. REQUIRES: not done.
    pub fn load(&mut self, bytes: &[u8]) -> Option<usize> {
        assert!(!self.is_done(), "more images than there are");
        let image_bytes = VersionImageFormat::claimed_bytes(bytes)?;
        let image = bytes.get(..image_bytes)?;
        let (header, records) = VersionImageLayout::read_from_prefix(image).ok()?;
        if crc32c(&image[CHECKED_FROM..]) != header.crc.get()
            || header.volume_id.get() != self.volume_id
            || header.checkpoint_id.get() != self.checkpoint_id
            || header.image.get() != self.images
        {
            return None;
        }
        let first = self.header.get_or_insert(header);
        let numbers = |header: &VersionImageLayout| {
            (header.flushed_through, header.last_table_id, header.last_segment_id)
        };
        if numbers(first) != numbers(&header) || header.is_last.get() > 1 || header.zero.get() != 0 {
            self.problem = Some(VersionImageProblem::Header);
        } else if let Err(problem) = self.records.decode_records(records, &self.reclaim) {
            self.problem = Some(VersionImageProblem::Records(problem));
        }
        self.images += 1;
        self.is_complete = header.is_last.get() == 1;
        Some(image_bytes)
    }

    /// The version, whose tables and segments lie in these units.
    ///
    /// # Errors
    /// What is wrong with the images or with the version in them.
    pub fn finish(self, units: Range<u64>) -> Result<TreeVersion, VersionImageProblem> {
        if let Some(problem) = self.problem {
            return Err(problem);
        }
        let Some(header) = self.header.filter(|_| self.is_complete) else {
            return Err(VersionImageProblem::Incomplete);
        };
        if [header.flushed_through, header.last_table_id].iter().any(|number| number.get() > COUNT_MAX) {
            return Err(VersionImageProblem::Header);
        }
        let records = VersionEdit { flushed_through: Some(header.flushed_through.get()), ..self.records };
        let version = TreeVersion::default().edited(&records).map_err(VersionImageProblem::Version)?;
        let (last_table_id, last_segment_id) = (header.last_table_id.get(), header.last_segment_id.get());
        if version.last_table_id() > last_table_id || version.last_segment_id() > last_segment_id {
            return Err(VersionImageProblem::Header);
        }
        version.check_extents(units).map_err(VersionImageProblem::Version)?;
        SegmentUsage::of(&version).map_err(VersionImageProblem::Version)?;
        Ok(version.with_last_ids(last_table_id, last_segment_id))
    }
}

#[cfg(test)]
mod tests {
    use super::super::lost_ranges::LostRange;
    use super::super::table_meta::tests::table_fields;
    use super::super::table_meta::{SegmentMeta, SegmentSeal, TableFields, TableMeta};
    use super::*;
    use crate::common::allocator::Extent;
    use octokv_base::Prng;

    const VOLUME: u64 = 77;
    const CHECKPOINT: u64 = 5;

    /// A version of so many tables in every level, three segments and a lost range.
    fn example(tables_per_level: u64, queue: &Arc<ReclaimQueue>) -> TreeVersion {
        let mut edit = VersionEdit { flushed_through: Some(900), ..VersionEdit::default() };
        for id in 1..=tables_per_level * LEVELS as u64 {
            let key = id.to_be_bytes();
            let segment_bytes = if id % 2 == 0 { vec![(1, id), (3, 2 * id)] } else { Vec::new() };
            let table = TableMeta::new(&TableFields { segment_bytes, ..table_fields(id, &key, &key) }, queue);
            edit.added_tables.push(((id % LEVELS as u64) as usize, table));
        }
        for id in 1..=3 {
            let extent = Extent { location: (1 << 40) + u64::from(id), units: 1 };
            edit.added_segments.push(SegmentMeta::new(id, extent, queue));
        }
        edit.sealed_segments.push((2, SegmentSeal { units: 1, record_bytes: 10, last_sequence: 3 }));
        edit.added_lost.push(LostRange { first_key: vec![1], last_key: vec![2], newest_sequence: 4 });
        TreeVersion::default().edited(&edit).unwrap().with_last_ids(1 << 50, 9)
    }

    fn images(version: &TreeVersion) -> Vec<Vec<u8>> {
        let mut writer = VersionImageWriter::new(Arc::new(version.clone()), VOLUME, CHECKPOINT);
        let mut images = Vec::new();
        loop {
            // Behind other bytes, as in a stream.
            let mut bytes = vec![9; 3];
            if !writer.append_image(&mut bytes) {
                assert_eq!(bytes.len(), 3);
                return images;
            }
            images.push(bytes[3..].to_vec());
        }
    }

    fn load(images: &[Vec<u8>]) -> Result<TreeVersion, VersionImageProblem> {
        let mut loader = VersionImageLoader::new(VOLUME, CHECKPOINT, ReclaimQueue::new());
        for image in images {
            if loader.is_done() || loader.load(image).is_none() {
                break;
            }
        }
        loader.finish(0..1 << 41)
    }

    /// Everything that a version has.
    fn text(version: &TreeVersion) -> String {
        let segments: Vec<_> =
            version.segments().iter().map(|it| (it.meta.id(), it.meta.extent(), it.seal)).collect();
        let tables: Vec<_> = version.tables().collect();
        let ids = (version.last_table_id(), version.last_segment_id());
        format!("{version:?} {ids:?} {segments:?} {tables:?}")
    }

    #[test]
    fn a_version_round_trips_through_several_images() {
        let queue = ReclaimQueue::new();
        for (tables_per_level, several) in [(0, false), (1, false), (2000, true)] {
            let version = example(tables_per_level, &queue);
            let images = images(&version);
            assert_eq!(images.len() > 1, several);
            assert!(images.iter().all(|image| image.len() < 300 << 10));
            assert_eq!(text(&load(&images).unwrap()), text(&version));
        }
        let empty = TreeVersion::default();
        assert_eq!(text(&load(&images(&empty)).unwrap()), text(&empty));
    }

    #[test]
    fn a_flipped_bit_a_missing_or_another_image_is_found() {
        let queue = ReclaimQueue::new();
        let image = images(&example(1, &queue)).remove(0);
        let loader = |volume, checkpoint| VersionImageLoader::new(volume, checkpoint, ReclaimQueue::new());
        for bit in 0..image.len() * 8 {
            let mut wrong = image.clone();
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(loader(VOLUME, CHECKPOINT).load(&wrong), None, "bit {bit}");
        }
        for end in 0..image.len() {
            assert_eq!(loader(VOLUME, CHECKPOINT).load(&image[..end]), None);
        }
        assert_eq!(loader(VOLUME + 1, CHECKPOINT).load(&image), None);
        assert_eq!(loader(VOLUME, CHECKPOINT + 1).load(&image), None);
        let several = images(&example(2000, &queue));
        assert_eq!(loader(VOLUME, CHECKPOINT).load(&several[1]), None, "not the first");
        let first = &several[..1];
        assert_eq!(load(first).unwrap_err(), VersionImageProblem::Incomplete);
    }

    /// With a right checksum.
    fn changed(image: &[u8], change: impl FnOnce(&mut VersionImageLayout, &mut Vec<u8>)) -> Vec<u8> {
        let (mut header, records) = VersionImageLayout::read_from_prefix(image).unwrap();
        let mut records = records.to_vec();
        change(&mut header, &mut records);
        let mut image = [header.as_bytes(), &records].concat();
        let crc = crc32c(&image[CHECKED_FROM..]);
        image[4..8].copy_from_slice(&crc.to_le_bytes());
        image
    }

    #[test]
    fn what_is_inconsistent_in_intact_images_is_named() {
        let queue = ReclaimQueue::new();
        let image = images(&example(1, &queue)).remove(0);
        let problem = |change: &dyn Fn(&mut VersionImageLayout, &mut Vec<u8>)| {
            load(&[changed(&image, change)]).unwrap_err()
        };
        let with = |edit: VersionEdit| {
            problem(&|header: &mut VersionImageLayout, records: &mut Vec<u8>| {
                edit.encode(records);
                header.records_bytes = (records.len() as u32).into();
            })
        };
        let table = |fields: TableFields| VersionEdit {
            added_tables: vec![(1, TableMeta::new(&fields, &queue))],
            ..VersionEdit::default()
        };
        let key = 500u64.to_be_bytes();
        let fields = table_fields(500, &key, &key);
        let segment_bytes = vec![(8, 1)];
        let missing = VersionProblem::SegmentOfTableMissing { table: 500, segment: 8 };
        let cases = [
            (TableFields { segment_bytes, ..fields.clone() }, missing),
            (TableFields { id: 3, ..fields.clone() }, VersionProblem::TableTwice { id: 3 }),
            (
                TableFields { first_key: vec![], ..fields.clone() },
                VersionProblem::TablesOverlap { level: 1, before: 500, after: 1 },
            ),
            (
                TableFields { extent: Extent { location: 15, units: 1 }, ..fields.clone() },
                VersionProblem::ExtentsOverlap { location: 10, other_location: 15 },
            ),
            (
                TableFields { extent: Extent { location: 1 << 41, units: 1 }, ..fields.clone() },
                VersionProblem::ExtentOutside { location: 1 << 41 },
            ),
        ];
        for (fields, problem) in cases {
            assert_eq!(with(table(fields)), VersionImageProblem::Version(problem));
        }
        let too_high = with(table(TableFields { id: 1 << 51, ..fields }));
        assert_eq!(too_high, VersionImageProblem::Header, "higher than the last number given");
        for wrong in [
            |header: &mut VersionImageLayout| header.zero = 1.into(),
            |header: &mut VersionImageLayout| header.is_last = 2.into(),
            |header: &mut VersionImageLayout| header.last_table_id = u64::MAX.into(),
            |header: &mut VersionImageLayout| header.flushed_through = u64::MAX.into(),
        ] {
            assert_eq!(problem(&|header, _| wrong(header)), VersionImageProblem::Header);
        }
        let damaged = VersionImageProblem::Records(EditProblem::Kind(0));
        assert_eq!(problem(&|_, records: &mut Vec<u8>| records[0] = 0), damaged);
    }

    #[test]
    fn no_bytes_panic() {
        let queue = ReclaimQueue::new();
        let image = images(&example(3, &queue)).remove(0);
        let mut random = Prng::new(1);
        for _ in 0..3000 {
            let wrong = changed(&image, |_, records| {
                for _ in 0..=random.below(3) {
                    let at = random.below(records.len() as u64) as usize;
                    records[at] = random.next_u64() as u8;
                }
            });
            _ = load(&[wrong]);
            let mut bytes = vec![0; random.below(200) as usize];
            random.fill(&mut bytes);
            _ = load(&[[&MAGIC[..], &bytes].concat()]);
        }
    }
}
