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

use super::engine::HashCore;
use super::index::{INDEX_ENTRY_BYTES, IndexEntry};
use crate::EngineError;
use crate::bug_injection::{self, InjectedBug};
use crate::common::commit_queue::PoisonGuard;
use crate::common::group_commit::{checkpoint_if, flush_deferred, lock_checkpoint, write_durability_marker};
use crate::common::image_stream::{ImageFormat, ImageWriter};
use crate::common::superblock_io::write_superblock;
use crate::common::volume_layout::Checkpoint;
use octokv_base::{Nanos, crc32c};
use octokv_runtime::{ReactorHandle, trim_heap};
use std::cell::Cell;
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

/// The time from a change to the maintenance after it, at most.
const MAINTENANCE_DELAY: Nanos = Nanos::from_millis(20);
/// The pause after failed maintenance.
pub(super) const RETRY_DELAY: Nanos = Nanos::from_secs(1);

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

impl ImageFormat for PartitionImageHeader {
    const HEADER_BYTES: usize = IMAGE_HEADER_BYTES;
    fn claimed_bytes(bytes: &[u8]) -> Option<usize> {
        UncheckedImage(bytes).claimed_bytes()
    }
}

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

impl HashCore {
    /// Writes a checkpoint and truncates the journal. With `clean`, the superblock records a clean shutdown. REQUIRES: no
    /// operation follows a clean checkpoint.
    ///
    /// # Errors
    /// Device failures. A failed image write leaves the previous checkpoint valid; a failure after that makes the volume
    /// read-only. [`EngineError::ReadOnly`] if it already is.
    pub async fn checkpoint(&self, clean: bool) -> Result<(), EngineError> {
        let _guard = lock_checkpoint(self).await;
        self.write_images(clean).await
    }

    pub(super) async fn write_images(&self, clean: bool) -> Result<(), EngineError> {
        let volume = &self.volume;
        if volume.volatile {
            return Ok(());
        }
        if volume.commits.has_failed() {
            return Err(EngineError::ReadOnly);
        }
        let mut position = volume.commits.replay_from();
        let mut superblock = *volume.superblock.lock();
        let (area, id) = (superblock.checkpoint.next_area(), volume.next_checkpoint_id());
        // If this is dropped half-way, its writes may still reach the area during the next checkpoint.
        let poison_guard = PoisonGuard(&volume.commits);
        let starts = [0, 1].map(|copy| volume.lba(volume.layout().area_start_unit(area, copy)));
        let mut writer = ImageWriter::new(&*self.device, starts, volume.unit_bytes());
        let mut image_entries = Vec::new();
        for (index, partition) in volume.partitions.iter().enumerate() {
            let applied = {
                let state = partition.state.lock();
                image_entries.clear();
                image_entries.extend(state.table.iter_from(0));
                state.applied_through
            };
            let header = PartitionImageHeader {
                volume_id: volume.constants().volume_id,
                checkpoint_id: id,
                partition: index as u32,
                applied_through: applied,
            };
            encode(writer.pending(), &header, &image_entries);
            if let Err(error) = writer.write_chunks().await {
                poison_guard.disarm();
                return Err(error);
            }
        }
        let bytes = match writer.finish().await {
            Ok(bytes) => bytes,
            Err(error) => {
                poison_guard.disarm();
                return Err(error);
            }
        };
        if bug_injection::is_injected(InjectedBug::CheckpointClaimsTooMuch) {
            position = volume.commits.replay_from();
        }
        self.device.flush().await.result?;
        superblock.generation += 1;
        superblock.is_clean_shutdown = clean;
        superblock.checkpoint = Checkpoint {
            area: Some(area),
            id,
            bytes,
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
        drop(image_entries);
        // Tables that grew since the last checkpoint have fragmented the heap.
        trim_heap();
        Ok(())
    }

    /// Writes a checkpoint when one is due, flushes deferred changes, and writes a durability marker. Ends when the volume
    /// is read-only; at once for a volatile device. `report` receives each error; a failed checkpoint is retried after
    /// `RETRY_DELAY`. Counts its rounds, each of which follows changes, in `rounds`.
    pub(super) async fn run_maintenance(
        &self,
        handle: &ReactorHandle,
        rounds: &Cell<u64>,
        mut report: impl FnMut(EngineError),
    ) {
        let commits = &self.volume.commits;
        let mut pause = MAINTENANCE_DELAY;
        while !self.volume.volatile && !commits.has_failed() {
            commits.wait_unmarked_changes().await;
            handle.sleep(pause).await;
            rounds.set(rounds.get() + 1);
            pause = MAINTENANCE_DELAY;
            if commits.has_failed() {
                break;
            }
            if commits.is_checkpoint_due()
                && let Err(error) = checkpoint_if(self, || commits.is_checkpoint_due()).await
            {
                report(error);
                pause = RETRY_DELAY;
            }
            let result = match flush_deferred(self).await {
                Ok(()) => write_durability_marker(self).await,
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
