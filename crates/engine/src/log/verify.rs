//! Verification: reads every segment image and every value that an entry names, and checks them; changes nothing.
//!
//! In: a device with a volume that is not open. Out: what cannot be read back as it was written. A damaged bucket is one problem, and so is a
//! value; keys whose entries were in the bucket are not known.
//! Tested in `tests/log_damage.rs`.

use super::core::LogCore;
use super::hash_prefix::SegmentNumber;
use super::log_place::LogKind;
use super::open::volume_of;
use super::record_reads::RecordRead;
use super::recovery::recover_volume;
use super::segment_buckets::{ImagePlace, UncheckedBuckets};
use super::segment_entry::{EntryContents, ValuePlace};
use super::segment_image::SegmentImage;
use super::segment_ref::SegmentRef;
use super::settings::LogSettings;
use super::store::Store;
use crate::open_error::OpenError;
use crate::verify_report::{ProblemKind, RecordProblem, VerifyFailure, VerifyObserver, VerifyReport};
use crate::{Durability, EngineError, OpenConfig, WallClock};
use octokv_base::{BufferPool, Key};
use octokv_device::Device;
use std::rc::Rc;
use std::sync::Arc;

/// Keys between two reports to the observer.
const KEYS_PER_REPORT: u64 = 64;

/// Verifies the volume on a device, and reports to `observer` as it goes on.
///
/// # Errors
/// If recovery cannot load the volume: why.
pub async fn verify(
    device: &Rc<dyn Device>,
    pool: &BufferPool,
    observer: &mut impl VerifyObserver,
) -> Result<VerifyReport, VerifyFailure> {
    let verified = verify_volume(device, pool, observer).await;
    verified.map_err(|reason| VerifyFailure { reason, remains: None })
}

async fn verify_volume(
    device: &Rc<dyn Device>,
    pool: &BufferPool,
    observer: &mut impl VerifyObserver,
) -> Result<VerifyReport, OpenError> {
    let recovered = recover_volume(&**device).await?;
    // Only what it has in memory is used: nothing is written.
    let config = OpenConfig {
        durability: Durability::PowerSafe,
        cores: 1,
        cache_bytes: 0,
        prepare_bytes: 0,
        compact_bytes_per_second: 0,
        tree: OpenConfig::TREE,
        swap_gap: OpenConfig::SWAP_GAP,
        clock: WallClock::default(),
        tokens: None,
    };
    let superblock = recovered.superblock;
    let mut report = VerifyReport {
        dropped_entries: recovered.stores.iter().map(|store| store.rejected).sum(),
        damaged_copies: recovered.damaged_copies,
        is_clean_shutdown: superblock.is_clean_shutdown,
        ..VerifyReport::default()
    };
    let settings = LogSettings::new(&superblock.layout, &config);
    let volume = volume_of(recovered, superblock, device.geometry().block_bytes, config, settings);
    let statistics = volume.statistics();
    (report.used_bytes, report.capacity_bytes) = (statistics.used_bytes, statistics.capacity_bytes);
    let core = LogCore::new(Arc::clone(&volume), Rc::clone(device), pool.clone());
    for store in &volume.stores {
        let (segments, is_lost) = {
            let state = store.state.lock();
            (state.table.segments(), state.is_lost)
        };
        if is_lost {
            let lba = volume.lba(volume.layout().chunks_start_unit).0;
            report.problems.push(RecordProblem { device: None, lba, key: None, kind: ProblemKind::Bucket });
            continue;
        }
        for segment in 0..segments {
            // Segments have 32 bits.
            let image = store.state.lock().table.get(SegmentNumber(segment as u32));
            if !image.is_empty() {
                core.verify_segment(store, image, &mut report, observer).await?;
            }
        }
    }
    observer.keys_verified(report.keys, report.keys);
    Ok(report)
}

impl LogCore {
    /// Reads an image and the values of its entries.
    async fn verify_segment(
        &self,
        store: &Store,
        image: SegmentRef,
        report: &mut VerifyReport,
        observer: &mut impl VerifyObserver,
    ) -> Result<(), OpenError> {
        let all = self.volume.statistics().keys;
        let entries = self.verify_buckets(store, image, report).await?;
        for entry in entries.iter() {
            let problem = |unit, kind| RecordProblem {
                device: None,
                lba: self.volume.lba(unit).0,
                key: Key::new(entry.key),
                kind,
            };
            match &entry.contents {
                EntryContents::Tombstone => continue,
                EntryContents::Value { at: ValuePlace::Nowhere, .. } => {}
                EntryContents::LostValue { .. } => {
                    report.problems.push(problem(image.unit(), ProblemKind::Value));
                }
                EntryContents::Value { .. } => match self.read_record(store, &entry, u64::MAX).await {
                    Ok(RecordRead::Value(_, value)) => report.value_bytes += value.len() as u64,
                    Ok(RecordRead::Damaged(unit) | RecordRead::Unowned(unit)) => {
                        report.problems.push(problem(unit, ProblemKind::Value));
                    }
                    // Nothing is opened while it is read.
                    Ok(RecordRead::Reused) => {
                        report.problems.push(problem(image.unit(), ProblemKind::WrongRecord))
                    }
                    Err(EngineError::Device { .. }) => {
                        report.problems.push(problem(image.unit(), ProblemKind::Unreadable));
                    }
                    Err(error) => return Err(error.into()),
                },
            }
            report.keys += 1;
            if report.keys.is_multiple_of(KEYS_PER_REPORT) {
                observer.keys_verified(report.keys, all.max(report.keys));
            }
        }
        Ok(())
    }

    /// The entries of an image; its damaged buckets are problems.
    async fn verify_buckets(
        &self,
        store: &Store,
        image: SegmentRef,
        report: &mut VerifyReport,
    ) -> Result<SegmentImage, OpenError> {
        let unit_bytes = self.volume.layout().unit_bytes;
        let (mut bytes, mut unreadable) = (Vec::new(), 0_u64);
        for bucket in 0..image.chain() {
            match self.read_units(image.unit() + u64::from(bucket), 1, store.id).await {
                Ok(buffer) => bytes.extend_from_slice(&buffer),
                Err(EngineError::Device { .. }) => {
                    unreadable |= 1 << bucket;
                    bytes.resize(bytes.len() + unit_bytes as usize, 0);
                }
                Err(error) => return Err(error.into()),
            }
        }
        let owner = self.volume.pool.owner_of(image.unit());
        let owner = owner.filter(|(owner, _)| (owner.partition, owner.kind) == (store.id, LogKind::Keys));
        let lba_of = |bucket: u8| self.volume.lba(image.unit() + u64::from(bucket)).0;
        let Some((owner, unit)) = owner else {
            report.problems.push(RecordProblem {
                device: None,
                lba: lba_of(0),
                key: None,
                kind: ProblemKind::WrongRecord,
            });
            return Ok(SegmentImage::new());
        };
        let volume_id = self.volume.fixed().volume_id;
        let place = ImagePlace { volume_id, partition: store.id, index: owner.index, unit, unit_bytes };
        let checked = UncheckedBuckets { bytes: &bytes, place }.check(image.chain());
        for bucket in (0..image.chain()).filter(|bucket| checked.damaged >> bucket & 1 == 1) {
            let is_unreadable = unreadable >> bucket & 1 == 1;
            let kind = if is_unreadable { ProblemKind::Unreadable } else { ProblemKind::Bucket };
            report.problems.push(RecordProblem { device: None, lba: lba_of(bucket), key: None, kind });
        }
        Ok(checked.entries)
    }
}
