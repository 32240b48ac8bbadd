//! Salvage: scans a device whose volume recovery cannot load, and reports each structure and record that is left.
//!
//! In: the device. Out: findings in block order, to a [`VerifyObserver`], and their totals. Writes nothing; holds one
//! window of the device and one structure at a time, so its memory does not grow with the device.
//!
//! ```text
//!   superblocks ─▶ step through the rest:  OKVJ ─▶ journal batch     intact: passed over
//!   (the newest      by units, or           OKVC ─▶ image, and those behind it
//!    intact one)     by blocks without      OKVR, KR ─▶ record       damaged: one step further
//!                    any superblock         else ─▶ blank or unrecognized
//! ```
//! The index is not available, so obsolete records are findings too. A record states its own location; without a
//! superblock that also gives the unit. With a superblock, structures of other volume ids are unrecognized.
//! Tested in `tests/hash_salvage.rs`, and with arbitrary images in `tests/hash_corrupt_images.rs`.

use super::checkpoint::{IMAGE_HEADER_BYTES, UncheckedImage};
use super::index::{INDEX_ENTRY_BYTES, RECORD_UNITS_MAX};
use super::journal::IndexChange;
use super::piece_list::{find_damage, load_pieces, record_units_of_list};
use super::superblock::HashSuperblock;
use crate::common::journal::{JournalEntry, UncheckedBatch};
use crate::common::record::{
    HEADER_AND_KEY_BYTES_MAX, RecordFlags, RecordHeader, UncheckedRecord, record_bytes,
};
use crate::common::superblock::SUPERBLOCK_AREA_BYTES;
use crate::common::superblock_io::{SlotError, newest, read_slots, slot_lba};
use crate::common::unit_reader::UnitReader;
use crate::verify_report::{Finding, FindingKind, ProblemKind, SalvageReport, VerifyObserver};
use octokv_base::{Buffer, Key, Lba};
use octokv_device::{Device, DeviceError};

/// Bytes per read of the scan.
const WINDOW_BYTES: u64 = 1 << 20;
/// The longest checkpoint image that is read, in bytes: 4 M entries.
const IMAGE_BYTES_MAX: u64 = 64 << 20;
/// Checkpoint images begin at multiples of this many bytes from the start of their area.
const IMAGE_ALIGNMENT: u64 = INDEX_ENTRY_BYTES as u64;
const _: () = assert!(IMAGE_HEADER_BYTES.is_multiple_of(INDEX_ENTRY_BYTES));
/// The unit sizes that a volume can have, in bytes.
const UNIT_BYTES: [u64; 4] = [512, 1024, 2048, 4096];

/// Scans a device and reports the intact and damaged structures of a volume.
pub(super) async fn salvage(device: &dyn Device, observer: &mut impl VerifyObserver) -> SalvageReport {
    let block_bytes = u64::from(device.geometry().block_bytes);
    let device_bytes = device.geometry().bytes();
    let mut scan = Scan {
        device,
        observer,
        report: SalvageReport::default(),
        block_bytes,
        unit_bytes: None,
        volume_id: None,
        end: device_bytes,
        window: Buffer::zeroed(0),
        window_start: 0,
    };
    scan.superblocks().await;
    let (mut at, blocks) = (SUPERBLOCK_AREA_BYTES.min(scan.end), scan.end / block_bytes);
    while at < scan.end {
        at = scan.step(at).await;
        scan.observer.blocks_scanned((at / block_bytes).min(blocks), blocks);
    }
    scan.report
}

struct Scan<'a, O> {
    device: &'a dyn Device,
    observer: &'a mut O,
    report: SalvageReport,
    block_bytes: u64,
    /// Known if a superblock is intact.
    unit_bytes: Option<u64>,
    /// Known if a superblock is intact: structures of other volumes are then left out.
    volume_id: Option<u64>,
    /// The first byte after the volume, or after the device.
    end: u64,
    window: Buffer,
    window_start: u64,
}

impl<O: VerifyObserver> Scan<'_, O> {
    fn found(&mut self, at: u64, kind: FindingKind) {
        let report = &mut self.report;
        match &kind {
            FindingKind::Superblock { .. } => report.superblocks += 1,
            FindingKind::CheckpointImage { .. } => report.checkpoint_images += 1,
            FindingKind::JournalBatch { .. } => report.journal_batches += 1,
            FindingKind::Record { value_bytes, .. } => {
                report.records += 1;
                report.value_bytes += value_bytes;
            }
            FindingKind::Unreadable(_) => report.unreadable_blocks += 1,
            FindingKind::NoSuperblock(_)
            | FindingKind::DamagedImage
            | FindingKind::DamagedBatch
            | FindingKind::DamagedRecord { .. } => report.damaged += 1,
        }
        self.observer.found(&Finding { lba: at / self.block_bytes, kind });
    }

    async fn superblocks(&mut self) {
        let Ok(slots) = read_slots::<HashSuperblock>(self.device).await else { return };
        for (slot, found) in slots.iter().enumerate() {
            let at = slot_lba(self.device, slot as u64).0 * self.block_bytes;
            self.found(
                at,
                match found {
                    Ok(superblock) => FindingKind::Superblock { generation: superblock.generation },
                    Err(SlotError::Content(error)) => FindingKind::NoSuperblock(*error),
                    Err(SlotError::Device(error)) => FindingKind::Unreadable(*error),
                },
            );
        }
        if let Some(superblock) = newest(&slots) {
            let unit_bytes = u64::from(superblock.layout.unit_bytes);
            self.end = self.end.min(superblock.layout.units() * unit_bytes);
            self.volume_id = Some(superblock.volume_id);
            self.unit_bytes = Some(unit_bytes).filter(|unit_bytes| *unit_bytes >= self.block_bytes);
        }
    }

    /// Bytes from one start of a structure to the next possible one.
    fn step_bytes(&self) -> u64 {
        self.unit_bytes.unwrap_or(self.block_bytes)
    }

    fn is_of_volume(&self, volume_id: u64) -> bool {
        self.volume_id.is_none_or(|id| id == volume_id)
    }

    /// Reads up to `bytes` from the byte `at`, whatever its alignment; fewer at the end of the volume.
    async fn read(&self, at: u64, bytes: u64) -> Result<Vec<u8>, DeviceError> {
        let bytes = bytes.min(self.end.saturating_sub(at));
        let within = at % self.block_bytes;
        let buffer = Buffer::zeroed((within + bytes).next_multiple_of(self.block_bytes) as usize);
        let buffer = self.device.read(Lba(at / self.block_bytes), buffer).await.into_read()?;
        Ok(buffer[within as usize..(within + bytes) as usize].to_vec())
    }

    /// The bytes of the step at `at`, from the window. REQUIRES: `at` is a multiple of the block size.
    async fn bytes_of_step(&mut self, at: u64) -> Result<&[u8], DeviceError> {
        let bytes = self.step_bytes().min(self.end - at);
        let held = self.window_start..self.window_start + self.window.len() as u64;
        if !(held.contains(&at) && at + bytes <= held.end) {
            let window_bytes = WINDOW_BYTES.min(self.end - at) / self.block_bytes * self.block_bytes;
            let window = Buffer::zeroed(window_bytes as usize);
            self.window = match self.device.read(Lba(at / self.block_bytes), window).await.into_read() {
                Ok(window) => window,
                // A part of it may be readable.
                Err(_) => {
                    let step = Buffer::zeroed(bytes.next_multiple_of(self.block_bytes) as usize);
                    let step = self.device.read(Lba(at / self.block_bytes), step).await.into_read();
                    step.inspect_err(|_| self.window = Buffer::zeroed(0))?
                }
            };
            self.window_start = at;
        }
        let start = (at - self.window_start) as usize;
        Ok(&self.window[start..(start + bytes as usize).min(self.window.len())])
    }

    /// Reports the structure that begins at `at`, if any, and gives where the next may begin.
    async fn step(&mut self, at: u64) -> u64 {
        let (step, block_bytes) = (self.step_bytes(), self.block_bytes);
        let bytes = match self.bytes_of_step(at).await {
            Ok(bytes) => bytes,
            Err(error) => {
                self.found(at, FindingKind::Unreadable(error));
                return at + step;
            }
        };
        let is_blank = bytes.iter().all(|&byte| byte == 0);
        let has_image =
            (0..bytes.len()).step_by(IMAGE_ALIGNMENT as usize).any(|at| bytes[at..].starts_with(b"OKVC"));
        let magic: [u8; 4] = bytes.get(..4).and_then(|magic| magic.try_into().ok()).unwrap_or_default();
        let next = match &magic {
            b"OKVJ" => self.batch(at).await,
            b"OKVR" | [b'K', b'R', 2, _] => self.record(at).await,
            _ if has_image => self.images(at).await,
            _ => None,
        };
        next.unwrap_or_else(|| {
            let blocks = step / block_bytes;
            match is_blank {
                true => self.report.blank_blocks += blocks,
                false => self.report.unrecognized_blocks += blocks,
            }
            at + step
        })
    }

    /// Reports the journal batch at `at`; `None` if it belongs to another volume.
    async fn batch(&mut self, at: u64) -> Option<u64> {
        let bytes = match self.read(at, IndexChange::BATCH_BYTES_MAX as u64).await {
            Ok(bytes) => bytes,
            // A block behind a short batch may be the unreadable one.
            Err(_) => self.read(at, self.step_bytes()).await.unwrap_or_default(),
        };
        let units = UNIT_BYTES.into_iter().filter(|&unit| self.unit_bytes.is_none_or(|known| known == unit));
        let found = units.filter(|&unit| unit >= self.block_bytes).find_map(|unit| {
            let batch = UncheckedBatch(&bytes).check::<IndexChange>(unit as u32)?;
            Some((batch.header, batch.entries.len() as u64, u64::from(batch.units) * unit))
        });
        let Some((header, entries, batch_bytes)) = found else {
            self.found(at, FindingKind::DamagedBatch);
            return Some(at + self.step_bytes());
        };
        let (volume_id, batch) = (header.volume_id, header.batch);
        if !self.is_of_volume(volume_id) {
            return None;
        }
        self.found(at, FindingKind::JournalBatch { volume_id, batch, entries });
        Some(at + batch_bytes)
    }

    /// Reports the record at `at`; `None` if it belongs to another volume.
    async fn record(&mut self, at: u64) -> Option<u64> {
        let next = at + self.step_bytes();
        let front = match self.read(at, HEADER_AND_KEY_BYTES_MAX as u64).await {
            Ok(front) => front,
            // A block behind a short record may be the unreadable one.
            Err(_) => self.read(at, self.step_bytes()).await.unwrap_or_default(),
        };
        let Some((header, key)) = self.record_header(&front, at) else {
            self.found(at, FindingKind::DamagedRecord { key: None, problem: ProblemKind::Header });
            return Some(next);
        };
        let identity = header.identity;
        if !self.is_of_volume(identity.volume_id) {
            return None;
        }
        let record = match self.unit_of(&header, at) {
            None => Err(ProblemKind::WrongRecord),
            Some(unit) => self.record_value(at, unit, &header, key.len()).await,
        };
        match record {
            Ok((value_bytes, end)) => {
                let (volume_id, sequence) = (identity.volume_id, identity.sequence);
                self.found(at, FindingKind::Record { volume_id, key, value_bytes, sequence });
                Some(end)
            }
            Err(problem) => {
                self.found(at, FindingKind::DamagedRecord { key: Some(key), problem });
                Some(next)
            }
        }
    }

    /// The header and key of a record that begins at `at`. A header of version 2 is intact at its location only, which depends on
    /// the unit.
    fn record_header(&self, front: &[u8], at: u64) -> Option<(RecordHeader, Key)> {
        let units = UNIT_BYTES.into_iter().filter(|&unit| self.unit_bytes.is_none_or(|known| known == unit));
        let mut headers = units
            .filter(|&unit| unit >= self.block_bytes && at.is_multiple_of(unit))
            .filter_map(|unit| UncheckedRecord { bytes: front, location: at / unit }.header().ok());
        let (header, key) = headers.next()?;
        Some((header, Key::new(key)?))
    }

    /// The unit in bytes with which a record's own location is where it was found.
    fn unit_of(&self, header: &RecordHeader, at: u64) -> Option<u64> {
        let is_there = |unit: &u64| header.identity.location.checked_mul(*unit) == Some(at);
        match self.unit_bytes {
            Some(unit) => Some(unit).filter(is_there),
            None => UNIT_BYTES.into_iter().filter(|&unit| unit >= self.block_bytes).find(is_there),
        }
    }

    /// Checks a record's value. Gives its length and the first byte after the record.
    async fn record_value(
        &self,
        at: u64,
        unit: u64,
        header: &RecordHeader,
        key_bytes: usize,
    ) -> Result<(u64, u64), ProblemKind> {
        if header.meta.flags.contains(RecordFlags::PIECES) {
            return self.record_in_pieces(at, unit, header).await;
        }
        let bytes = record_bytes(key_bytes, header.value_bytes) as u64;
        let units = bytes.div_ceil(unit);
        if units > RECORD_UNITS_MAX || at + bytes > self.end {
            return Err(ProblemKind::Value);
        }
        let record = self.read(at, bytes).await.map_err(|_| ProblemKind::Unreadable)?;
        let value = header.value_range(&record).map_err(|_| ProblemKind::Value)?;
        Ok((value.len() as u64, at + units * unit))
    }

    /// Checks the pieces of a record. Gives the length of its value and the first byte after the record.
    async fn record_in_pieces(
        &self,
        at: u64,
        unit: u64,
        header: &RecordHeader,
    ) -> Result<(u64, u64), ProblemKind> {
        let record_bytes = record_units_of_list(header, unit as usize) * unit;
        let bytes = self.read(at, record_bytes).await.map_err(|_| ProblemKind::Unreadable)?;
        let reader = UnitReader::new(self.device, unit as u32);
        let end = at + record_bytes;
        let units = 0..self.end / unit;
        let pieces =
            load_pieces(reader, &units, header, &bytes).await.map_err(|_| ProblemKind::Unreadable)?;
        let pieces = pieces.map_err(|_| ProblemKind::Value)?;
        match find_damage(reader, &pieces, header.value_bytes).await {
            Ok(None) => Ok((header.value_bytes as u64, end)),
            Ok(Some(_)) => Err(ProblemKind::Value),
            Err(_) => Err(ProblemKind::Unreadable),
        }
    }

    /// Reports the checkpoint images that begin in the step at `at` or follow those without a gap; `None` if there
    /// are none of the volume.
    async fn images(&mut self, at: u64) -> Option<u64> {
        let (step, mut offset, mut has_found) = (self.step_bytes(), at, false);
        let mut end_of_search = at + step;
        while offset < end_of_search.min(self.end) {
            offset += match self.image(offset).await {
                Some(bytes) => {
                    has_found = true;
                    // The next image may begin anywhere in the step in which this one ends.
                    end_of_search = (offset + bytes).next_multiple_of(step);
                    bytes
                }
                None => IMAGE_ALIGNMENT,
            };
        }
        has_found.then_some(end_of_search)
    }

    /// Reports the image at a byte and gives how many bytes to pass over; `None` if there is none of the volume.
    async fn image(&mut self, at: u64) -> Option<u64> {
        let header = self.read(at, IMAGE_HEADER_BYTES as u64).await.ok()?;
        let bytes = UncheckedImage(&header).claimed_bytes()? as u64;
        let volume_id = u64::from_le_bytes(header.get(8..16)?.try_into().expect("eight bytes"));
        if !self.is_of_volume(volume_id) {
            return None;
        }
        let is_possible = bytes <= IMAGE_BYTES_MAX && at + bytes <= self.end;
        let image = match is_possible {
            true => self.read(at, bytes).await.unwrap_or_default(),
            false => Vec::new(),
        };
        match UncheckedImage(&image).check() {
            Some((header, slots)) => {
                let entries = (slots.len() / INDEX_ENTRY_BYTES) as u64;
                let (checkpoint_id, partition) = (header.checkpoint_id, header.partition);
                self.found(at, FindingKind::CheckpointImage { volume_id, checkpoint_id, partition, entries });
                Some(bytes)
            }
            // Its length may be what is damaged.
            None => {
                self.found(at, FindingKind::DamagedImage);
                Some(IMAGE_HEADER_BYTES as u64)
            }
        }
    }
}
