//! Checkpoints: the whole index, written beside ongoing operations, so that the journal can be truncated.
//!
//! ```text
//!   area    the images of all partitions, one after another as a stream of bytes, in two copies
//!   image   0 magic "OKVC"        8 volume u64      24 partition u32   32 applied u64 (entry)
//!           4 CRC-32C u32        16 checkpoint u64  28 entries u32     40 zero u64
//!          48 entries, 16 bytes each, as crate::hash::index draws them
//! ```
//! The checksum covers bytes 8 to the end of the entries. The checkpoint is fuzzy: each partition is copied under its
//! lock at a different time; "applied" is the last journal entry in it, and replay skips its entries up to that number.
//!
//! Order: the images to the area that is not in use, flush, a new superblock, flush; only then may the journal before
//! the checkpoint's start be overwritten. A crash before the superblock is durable leaves the old checkpoint with its
//! journal. Tested below and in `tests/hash_power_loss.rs`, maintenance in `tests/hash_maintenance.rs`.

use super::commit_queue::PoisonGuard;
use super::engine::HashEngine;
use super::index::{INDEX_ENTRY_BYTES, IndexEntry};
use super::superblock::Checkpoint;
use super::superblock_io::write_superblock;
use super::volume::CHECKPOINT_LOCK;
use crate::EngineError;
use crate::bug_injection::{self, InjectedBug};
use octokv_base::{Buffer, Nanos, crc32c};
use octokv_runtime::{ReactorHandle, trim_heap};
use std::mem::offset_of;
use std::sync::atomic::Ordering;
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC: [u8; 4] = *b"OKVC";
/// The fixed part of an image, in bytes.
pub const IMAGE_HEADER_BYTES: usize = 48;

/// The header of an image on the device, little-endian.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ImageLayout {
    magic: [u8; 4],
    crc: U32,
    volume_id: U64,
    checkpoint_id: U64,
    partition: U32,
    entries: U32,
    applied_through: U64,
    zero: U64,
}
const _: () = assert!(size_of::<ImageLayout>() == IMAGE_HEADER_BYTES);
/// The first byte that the checksum covers.
const CHECKED_FROM: usize = offset_of!(ImageLayout, volume_id);

/// Bytes per write of a checkpoint.
const CHUNK_BYTES: usize = 256 * 1024;
/// The time from a change to the maintenance after it, at most.
const MAINTENANCE_DELAY: Nanos = Nanos::from_millis(20);
/// The pause after a failed checkpoint.
const RETRY_DELAY: Nanos = Nanos::from_secs(1);

/// The header of a partition's image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartitionImageHeader {
    /// The volume's random number.
    pub volume_id: u64,
    /// The number of the checkpoint.
    pub checkpoint_id: u64,
    /// The index partition, from 0.
    pub partition: u32,
    /// The number of the last journal entry that the image includes.
    pub applied_through: u64,
}

/// Appends the image of a partition to `bytes`.
pub fn encode(bytes: &mut Vec<u8>, header: &PartitionImageHeader, entries: &[IndexEntry]) {
    let start = bytes.len();
    let layout = ImageLayout {
        magic: MAGIC,
        crc: U32::ZERO,
        volume_id: header.volume_id.into(),
        checkpoint_id: header.checkpoint_id.into(),
        partition: header.partition.into(),
        entries: (entries.len() as u32).into(),
        applied_through: header.applied_through.into(),
        zero: U64::ZERO,
    };
    bytes.extend_from_slice(layout.as_bytes());
    entries.iter().for_each(|entry| bytes.extend_from_slice(&entry.to_bytes()));
    let crc = crc32c(&bytes[start + CHECKED_FROM..]);
    bytes[start + 4..start + 8].copy_from_slice(&crc.to_le_bytes());
}

/// Bytes read from a checkpoint area, not validated.
pub struct UncheckedImage<'a>(pub &'a [u8]);

impl<'a> UncheckedImage<'a> {
    /// The length of the image at the front by its unverified header; `None` without the magic.
    pub fn claimed_bytes(&self) -> Option<usize> {
        let (layout, _) = ImageLayout::ref_from_prefix(self.0).ok()?;
        let entries_bytes = layout.entries.get() as usize * INDEX_ENTRY_BYTES;
        (layout.magic == MAGIC).then_some(IMAGE_HEADER_BYTES + entries_bytes)
    }

    /// The header of the image at the front and the bytes of its entries, if its checksum is valid.
    pub fn check(self) -> Option<(PartitionImageHeader, &'a [u8])> {
        let bytes = self.0.get(..self.claimed_bytes()?)?;
        let (layout, _) = ImageLayout::ref_from_prefix(bytes).ok()?;
        if crc32c(&bytes[CHECKED_FROM..]) != layout.crc.get() {
            return None;
        }
        let header = PartitionImageHeader {
            volume_id: layout.volume_id.get(),
            checkpoint_id: layout.checkpoint_id.get(),
            partition: layout.partition.get(),
            applied_through: layout.applied_through.get(),
        };
        Some((header, &bytes[IMAGE_HEADER_BYTES..]))
    }
}

/// Streams bytes into both copies of an area.
struct AreaWriter<'a> {
    engine: &'a HashEngine,
    area: u8,
    pending: Vec<u8>,
    written: u64,
}

impl AreaWriter<'_> {
    /// Writes the pending bytes in whole chunks, `at_end` all of them.
    async fn write(&mut self, at_end: bool) -> Result<(), EngineError> {
        let volume = &self.engine.volume;
        let unit = volume.unit_bytes();
        while self.pending.len() >= CHUNK_BYTES || (at_end && !self.pending.is_empty()) {
            let take = self.pending.len().min(CHUNK_BYTES);
            let mut copies = [(); 2].map(|()| Buffer::zeroed(take.next_multiple_of(unit)));
            copies.iter_mut().for_each(|copy| copy[..take].copy_from_slice(&self.pending[..take]));
            self.pending.drain(..take);
            let at = |copy| volume.layout().area_start_unit(self.area, copy) + self.written / unit as u64;
            let [first, second] = copies;
            let first = self.engine.device.write(volume.lba(at(0)), first);
            let second = self.engine.device.write(volume.lba(at(1)), second);
            let (first, second) = (first.await, second.await);
            first.result.and(second.result)?;
            self.written += take as u64;
        }
        Ok(())
    }
}

impl HashEngine {
    /// Writes a checkpoint and truncates the journal. With `clean`, the superblock records a clean shutdown. REQUIRES: no
    /// operation follows a clean checkpoint.
    ///
    /// # Errors
    /// Device failures. A failed image write leaves the previous checkpoint valid; a failure after that makes the volume
    /// read-only. [`EngineError::ReadOnly`] if it already is.
    pub async fn checkpoint(&self, clean: bool) -> Result<(), EngineError> {
        let _guard = self.volume.maintenance_locks.lock(CHECKPOINT_LOCK).await;
        self.write_checkpoint(clean).await
    }

    /// Writes a checkpoint if `needed` still holds when no other is being written.
    pub(super) async fn checkpoint_if(&self, needed: impl Fn() -> bool) -> Result<(), EngineError> {
        let _guard = self.volume.maintenance_locks.lock(CHECKPOINT_LOCK).await;
        match needed() {
            true => self.write_checkpoint(false).await,
            false => Ok(()),
        }
    }

    async fn write_checkpoint(&self, clean: bool) -> Result<(), EngineError> {
        let volume = &self.volume;
        if volume.volatile {
            return Ok(());
        }
        if volume.commits.has_failed() {
            return Err(EngineError::ReadOnly);
        }
        let mut position = volume.commits.replay_from();
        let mut superblock = *volume.superblock.lock();
        let (area, id) = (1 - superblock.checkpoint.area.unwrap_or(1), volume.next_checkpoint_id());
        // If this is dropped half-way, its writes may still reach the area during the next checkpoint.
        let poison_guard = PoisonGuard(&volume.commits);
        let mut writer = AreaWriter { engine: self, area, pending: Vec::new(), written: 0 };
        let mut image_entries = Vec::new();
        for (index, partition) in volume.partitions.iter().enumerate() {
            let applied = {
                let state = partition.state.lock();
                image_entries.clear();
                image_entries.extend(state.table.iter_from(0));
                state.applied_through
            };
            let header = PartitionImageHeader {
                volume_id: volume.volume_id(),
                checkpoint_id: id,
                partition: index as u32,
                applied_through: applied,
            };
            encode(&mut writer.pending, &header, &image_entries);
            if let Err(error) = writer.write(false).await {
                poison_guard.disarm();
                return Err(error);
            }
        }
        if let Err(error) = writer.write(true).await {
            poison_guard.disarm();
            return Err(error);
        }
        if bug_injection::is_injected(InjectedBug::CheckpointClaimsTooMuch) {
            position = volume.commits.replay_from();
        }
        self.device.flush().await.result?;
        superblock.generation += 1;
        superblock.is_clean_shutdown = clean;
        superblock.checkpoint = Checkpoint {
            area: Some(area),
            id,
            bytes: writer.written,
            journal_unit: position.unit,
            batch: position.batch,
            entry: position.entry.saturating_sub(1),
            incarnation: superblock.incarnation,
        };
        // After a failure it is unknown which superblock is on the device, and which part of the journal it needs.
        write_superblock(&*self.device, &superblock).await?;
        poison_guard.disarm();
        *volume.superblock.lock() = superblock;
        volume.commits.release_before(position);
        volume.checkpoints.fetch_add(1, Ordering::Relaxed);
        drop((writer, image_entries));
        // Tables that grew since the last checkpoint have fragmented the heap.
        trim_heap();
        Ok(())
    }

    /// Background maintenance: writes a checkpoint when one is due, flushes deferred changes, and writes a durability
    /// marker. Ends when the volume is read-only; at once for a volatile device. REQUIRES: exactly one core runs it while
    /// the volume is open. `report` receives each error; a failed checkpoint is retried after `RETRY_DELAY`.
    pub async fn maintain(&self, handle: &ReactorHandle, mut report: impl FnMut(EngineError)) {
        let commits = &self.volume.commits;
        let mut pause = MAINTENANCE_DELAY;
        while !self.volume.volatile && !commits.has_failed() {
            commits.wait_unmarked_changes().await;
            handle.sleep(pause).await;
            pause = MAINTENANCE_DELAY;
            if commits.has_failed() {
                break;
            }
            if commits.is_checkpoint_due()
                && let Err(error) = self.checkpoint_if(|| commits.is_checkpoint_due()).await
            {
                report(error);
                pause = RETRY_DELAY;
            }
            let result = match self.flush_deferred().await {
                Ok(()) => self.write_durability_marker().await,
                Err(error) => Err(error),
            };
            if let Err(error) = result {
                report(error);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::index::RecordRef;
    use super::*;

    #[test]
    fn an_image_gives_back_its_entries_and_a_flipped_bit_is_found() {
        let header =
            PartitionImageHeader { volume_id: 1, checkpoint_id: 2, partition: 3, applied_through: 4 };
        let written = [IndexEntry::new(9, RecordRef { location: 5, units: 6, fingerprint: 7 })];
        let mut bytes = Vec::new();
        encode(&mut bytes, &header, &written);
        let (found, entries) = UncheckedImage(&bytes).check().unwrap();
        assert_eq!((found, entries), (header, &written[0].to_bytes()[..]));
        for bit in 0..bytes.len() * 8 {
            let mut corrupted = bytes.clone();
            corrupted[bit / 8] ^= 1 << (bit % 8);
            assert!(UncheckedImage(&corrupted).check().is_none(), "bit {bit}");
        }
        for len in 0..bytes.len() {
            assert!(UncheckedImage(&bytes[..len]).check().is_none());
        }
    }
}
