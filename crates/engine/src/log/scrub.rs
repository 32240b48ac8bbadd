//! The scrub: everything that a get can read is read and verified in the background, a few bytes at a time, so that damage is found before a user needs it.
//!
//! ```text
//!   pass ─▶ store ─▶ segment, in ring order ─▶ image ─▶ value of each live entry ─▶ next segment … ─▶ rest until the next pass is due
//!                                                └──────┴─ after each 64 KiB: pause
//! ```
//! In: a rate, a reactor's timer. Out: counts of damage, and reports of where it is.
//! Invariants: it writes nothing, and holds no lock and no segment; one read of it is in flight; damage counts only if a second lookup finds it as well, so
//! that what a write or compaction replaced meanwhile does not count; superseded images and records, tombstones and expired values are not read, since no get
//! reads them. An error of the device or a lack of memory costs the segment its turn in this pass, and nothing else.
//! Tested in `tests/log_scrub.rs`.

use super::core::LogCore;
use super::hash_prefix::HashPrefix;
use super::record_reads::RecordRead;
use super::segment_entry::{EntryContents, SegmentEntry, ValuePlace};
use super::segment_reads::{FoundImage, ImageLookup, ReadRepeats};
use super::store::Store;
use super::value_record::VALUE_PIECE_BYTES;
use crate::EngineError;
use crate::common::background_task::ErrorReports;
use crate::common::media_errors::is_media_error;
use octokv_base::{Lba, Nanos};
use octokv_runtime::{ReactorHandle, yield_now};
use std::sync::atomic::Ordering;

/// The bytes that are read between two pauses.
const STEP_BYTES: u64 = 64 << 10;
/// The longest sleep: a scrub ends so soon after its volume is closed or read-only.
const SLEEP_MAX: Nanos = Nanos::from_secs(1);
/// An image or a value that was replaced so often while it was looked at is left to the next pass.
const LOOKUPS_MAX: u32 = 8;
/// Damaged places that a pass reports. It counts all of them.
const REPORTS_PER_PASS: u64 = 16;

/// Why a scrub does not go on.
enum ScrubStop {
    /// The volume is closed or read-only.
    Ended,
    /// The device failed, or there was no memory.
    Failed(EngineError),
}

impl From<EngineError> for ScrubStop {
    fn from(error: EngineError) -> ScrubStop {
        ScrubStop::Failed(error)
    }
}

/// The scrub of a volume, with its pace.
struct Scrub<'a, F> {
    core: &'a LogCore,
    handle: &'a ReactorHandle,
    report: F,
    errors: ErrorReports<F>,
    /// Read since the last pause.
    unpaid_bytes: u64,
}

impl LogCore {
    /// Scrubs the volume, pass after pass, until it is closed or read-only.
    pub(super) async fn run_scrub(&self, handle: &ReactorHandle, report: impl Fn(EngineError) + Copy) {
        if self.volume.scrub.rate() == 0 {
            return;
        }
        let errors = ErrorReports::new(report);
        let mut scrub = Scrub { core: self, handle, report, errors, unpaid_bytes: 0 };
        let mut due = handle.now();
        loop {
            let is_open = scrub.sleep_until(due).await.is_ok();
            due = handle.now() + self.volume.settings.scrub_interval;
            if !is_open || scrub.run_pass().await.is_err() {
                return;
            }
        }
    }
}

impl<F: Fn(EngineError)> Scrub<'_, F> {
    /// Sleeps until a time.
    async fn sleep_until(&self, due: Nanos) -> Result<(), ScrubStop> {
        let volume = &self.core.volume;
        loop {
            if volume.is_read_only() || volume.is_closing.load(Ordering::Acquire) {
                return Err(ScrubStop::Ended);
            }
            let now = self.handle.now();
            if now >= due {
                return Ok(());
            }
            self.handle.sleep_until(due.min(now + SLEEP_MAX)).await;
        }
    }

    /// Counts bytes that were read, and pauses for as long as the rate takes for them.
    async fn pay(&mut self, bytes: u64) -> Result<(), ScrubStop> {
        let state = &self.core.volume.scrub;
        state.add_read_bytes(bytes);
        self.unpaid_bytes += bytes;
        if self.unpaid_bytes < STEP_BYTES {
            yield_now().await;
            return Ok(());
        }
        let nanos = u128::from(self.unpaid_bytes) * 1_000_000_000 / u128::from(state.rate().max(1));
        self.unpaid_bytes = 0;
        let pause = Nanos(u64::try_from(nanos).unwrap_or(u64::MAX >> 1));
        self.sleep_until(self.handle.now() + pause).await
    }

    /// Reports where damage is that was not counted yet.
    fn report_damage(&self, unit: u64, store: &Store) {
        if self.core.volume.scrub.found() < REPORTS_PER_PASS {
            (self.report)(self.core.corrupt(unit, store.id));
        }
    }

    /// Scrubs all stores. Each opening begins with another one, so that short openings come to all of them.
    async fn run_pass(&mut self) -> Result<(), ScrubStop> {
        let volume = &self.core.volume;
        let first = volume.fixed().incarnation as usize % volume.stores.len();
        for store in volume.stores[first..].iter().chain(&volume.stores[..first]) {
            let mut next = Some(HashPrefix::MIN);
            // A lost store serves nothing, and is counted as such.
            while let Some(prefix) = next.filter(|_| !store.state.lock().is_lost) {
                next = match self.scrub_segment(store, prefix).await {
                    Ok(next) => next,
                    Err(ScrubStop::Ended) => return Err(ScrubStop::Ended),
                    Err(ScrubStop::Failed(error)) => {
                        if error != EngineError::NoMemory {
                            self.errors.failed(error);
                        }
                        volume.scrub.add_skipped_segment();
                        self.sleep_until(self.handle.now() + super::maintenance::RETRY_DELAY).await?;
                        next_prefix(store, prefix)
                    }
                };
            }
        }
        volume.scrub.end_pass();
        self.errors.succeeded();
        Ok(())
    }

    /// Verifies the segment of a prefix. Gives the prefix of the next one.
    async fn scrub_segment(
        &mut self,
        store: &Store,
        prefix: HashPrefix,
    ) -> Result<Option<HashPrefix>, ScrubStop> {
        let (image, next) = self.scrub_image(store, prefix).await?;
        if let Some(image) = image {
            for entry in image.entries.iter() {
                self.scrub_value(store, entry.key, &image).await?;
            }
        }
        Ok(next)
    }

    /// Verifies the image of a segment. Gives it, unless there is none to look at.
    async fn scrub_image(
        &mut self,
        store: &Store,
        prefix: HashPrefix,
    ) -> Result<(Option<FoundImage>, Option<HashPrefix>), ScrubStop> {
        let volume = &self.core.volume;
        let mut suspect = None;
        for _ in 0..LOOKUPS_MAX {
            let (unit, damaged, found) =
                match self.core.read_image(store, prefix, &mut ReadRepeats::default()).await {
                    Ok(ImageLookup { level, image }) => {
                        let next = level.next_prefix(prefix);
                        let Some(image) = image else { return Ok((None, next)) };
                        let bytes = u64::from(image.chain) * u64::from(volume.layout().unit_bytes);
                        self.pay(bytes).await?;
                        if image.damaged == 0 {
                            return Ok((Some(image), next));
                        }
                        let first = image.unit + u64::from(image.damaged.trailing_zeros());
                        (first, image.damaged.count_ones(), (Some(image), next))
                    }
                    // Another segment's image.
                    Err(EngineError::Corrupt { lba, .. }) => {
                        (volume.unit_of(Lba(lba)), 1, (None, next_prefix(store, prefix)))
                    }
                    Err(error) => return Err(error.into()),
                };
            if suspect.replace(unit) == Some(unit) {
                self.report_damage(unit, store);
                volume.scrub.add_damaged_buckets(damaged);
                return Ok(found);
            }
        }
        Ok((None, next_prefix(store, prefix)))
    }

    /// Verifies the value of a key of an image, or of a later one of the segment.
    async fn scrub_value(&mut self, store: &Store, key: &[u8], image: &FoundImage) -> Result<(), ScrubStop> {
        let (mut suspect, mut newer) = (None, None::<FoundImage>);
        let prefix = self.core.prefix_in(store, key);
        for _ in 0..LOOKUPS_MAX {
            let image = newer.as_ref().unwrap_or(image);
            let Some(entry) = image.entries.find(key) else { return Ok(()) };
            let damaged = match &entry.contents {
                EntryContents::LostValue { .. } if self.core.is_live(&entry) => Some(image.unit),
                EntryContents::Value { at, .. } if self.core.is_live(&entry) => match at {
                    ValuePlace::Nowhere => return Ok(()),
                    _ => match self.scrub_record(store, &entry, image.opens).await? {
                        RecordState::Intact => return Ok(()),
                        RecordState::Replaced => {
                            self.core.volume.counters.repeated_reads.fetch_add(1, Ordering::Relaxed);
                            None
                        }
                        RecordState::Damaged(unit) => Some(unit),
                    },
                },
                // A get does not read it.
                _ => return Ok(()),
            };
            if let Some(unit) = damaged
                && suspect.replace(unit) == Some(unit)
            {
                self.report_damage(unit, store);
                self.core.volume.scrub.add_damaged_value();
                return Ok(());
            }
            newer = match self.core.read_image(store, prefix, &mut ReadRepeats::default()).await {
                Ok(ImageLookup { image: Some(image), .. }) => Some(image),
                // The key was deleted; or its image was damaged meanwhile, which is left to the next pass.
                Ok(ImageLookup { image: None, .. }) | Err(EngineError::Corrupt { .. }) => return Ok(()),
                Err(error) => return Err(error.into()),
            };
        }
        Ok(())
    }

    /// Verifies the record of an entry, of a long value piece by piece.
    async fn scrub_record(
        &mut self,
        store: &Store,
        entry: &SegmentEntry<'_>,
        opens: u64,
    ) -> Result<RecordState, ScrubStop> {
        let value_bytes = entry.contents.value_bytes();
        let mut from = 0;
        while from < value_bytes {
            let to = value_bytes.min(from + VALUE_PIECE_BYTES as u32);
            match self.core.read_record_part(store, entry, from..to, opens).await {
                // Whole units around it, in most cases.
                Ok(RecordRead::Value(buffer, _)) => self.pay(buffer.len() as u64).await?,
                Ok(RecordRead::Reused) => return Ok(RecordState::Replaced),
                Ok(RecordRead::Damaged(unit) | RecordRead::Unowned(unit)) => {
                    return Ok(RecordState::Damaged(unit));
                }
                Err(EngineError::Device { error, .. }) if is_media_error(error) => {
                    return Ok(RecordState::Damaged(self.core.first_unit_of(entry)));
                }
                Err(error) => return Err(error.into()),
            }
            from = to;
        }
        Ok(RecordState::Intact)
    }
}

/// What the scrub found of a record.
enum RecordState {
    Intact,
    /// A chunk of it was opened again: the entry was replaced.
    Replaced,
    /// It is not what the entry names. The unit is its first.
    Damaged(u64),
}

/// The prefix of the segment behind that of a prefix, as the segments are now.
fn next_prefix(store: &Store, prefix: HashPrefix) -> Option<HashPrefix> {
    store.state.lock().table.level().next_prefix(prefix)
}
