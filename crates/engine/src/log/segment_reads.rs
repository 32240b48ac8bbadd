//! Segment images: read for a lookup, or held in memory for a change.
//!
//! ```text
//!   lookup   opens ─▶ place from the table ─▶ read ─▶ chunk opened meanwhile? again ─▶ buckets checked
//!   change   acquire ─▶ Load: read, as above │ Wait: for its reader │ Loaded ─▶ HeldSegment, until it is dropped
//! ```
//! In: prefixes of keys. Out: images. Invariants: a lookup gives the image that the table named at some moment of it; a held image has every
//! change that was made, published or not; a hold ends when it is dropped, and so do a read and a wait for it.
//! A bucket that is damaged costs its entries alone: the image is stated as lost then, which makes its absent keys fail.
//! Tested in `tests/log_conformance.rs`.

use super::busy_segments::{Acquired, SegmentTicket, SegmentTurn};
use super::core::LogCore;
use super::hash_prefix::{HashLevel, HashPrefix, SegmentNumber};
use super::log_place::LogKind;
use super::log_window::READ_ATTEMPTS;
use super::segment_buckets::{CheckedImage, ImagePlace, UncheckedBuckets};
use super::segment_image::SegmentImage;
use super::segment_ref::SegmentRef;
use super::store::{Store, StoreState};
use crate::EngineError;
use crate::common::media_errors::is_media_error;
use octokv_base::Buffer;
use octokv_runtime::yield_now;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

/// A reader that was overtaken by reuse of a chunk so many times lets others run before it repeats again.
const REPEATS_BEFORE_YIELD: u32 = 64;

/// A segment that an operation holds in memory.
pub(super) struct HeldSegment<'a> {
    store: &'a Store,
    pub segment: SegmentNumber,
}

impl<'a> HeldSegment<'a> {
    /// Calls `f` with the state of the store, whose busy segment it is.
    pub(super) fn with<R>(&self, f: impl FnOnce(&mut StoreState, SegmentNumber) -> R) -> R {
        f(&mut self.store.state.lock(), self.segment)
    }

    /// Takes over a hold that the caller has. REQUIRES: it ends with this.
    pub(super) fn new(store: &'a Store, segment: SegmentNumber) -> HeldSegment<'a> {
        HeldSegment { store, segment }
    }

    /// Ends the hold without leaving: a split has taken it over.
    pub(super) fn into_split(self) {
        std::mem::forget(self);
    }
}

impl Drop for HeldSegment<'_> {
    fn drop(&mut self) {
        let state = &mut *self.store.state.lock();
        state.busy.leave(self.segment, &mut state.table);
    }
}

/// A read of a segment that has to be held. Dropping it gives the read up.
struct SegmentLoad<'a> {
    store: &'a Store,
    segment: SegmentNumber,
    has_ended: bool,
}

impl SegmentLoad<'_> {
    fn end(mut self, image: Result<SegmentImage, EngineError>) {
        self.has_ended = true;
        let wakers = {
            let state = &mut *self.store.state.lock();
            state.busy.loaded(self.segment, image, &mut state.table)
        };
        wakers.wake();
    }
}

impl Drop for SegmentLoad<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            let wakers = {
                let state = &mut *self.store.state.lock();
                state.busy.abandon_load(self.segment, &mut state.table)
            };
            wakers.wake();
        }
    }
}

/// A wait for a segment. Dropping it gives the place up, or what was granted.
struct SegmentWait<'a> {
    store: &'a Store,
    ticket: Option<SegmentTicket>,
}

impl SegmentWait<'_> {
    fn poll(&mut self, context: &Context<'_>) -> Poll<SegmentTurn> {
        let ticket = self.ticket.as_ref().expect("a wait ends once");
        let turn = self.store.state.lock().busy.poll(ticket, context);
        if turn.is_ready() {
            self.ticket = None;
        }
        turn
    }
}

impl Drop for SegmentWait<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            let wakers = {
                let state = &mut *self.store.state.lock();
                state.busy.cancel(ticket, &mut state.table)
            };
            wakers.wake();
        }
    }
}

/// The image of a segment as a lookup found it.
pub(super) struct FoundImage {
    pub entries: Rc<SegmentImage>,
    /// Where it lies, for errors.
    pub unit: u64,
    /// The openings of chunks before it was looked up: what it refers to is read behind them.
    pub opens: u64,
    /// Its buckets.
    pub chain: u8,
    /// A bit for each bucket that is damaged.
    pub damaged: u64,
}

/// What a lookup of a segment found.
pub(super) struct ImageLookup {
    /// The state of linear hashing in which the segment was looked up.
    pub level: HashLevel,
    /// `None` if the segment has no image.
    pub image: Option<FoundImage>,
}

/// What a read of buckets found.
enum BucketsRead {
    /// The intact entries, and a bit for each damaged bucket.
    Entries(SegmentImage, u64),
    /// The chunk was opened again meanwhile.
    Reused,
    /// No log has the chunk.
    Unowned,
}

/// Repetitions of one operation that reuse of chunks overtakes.
#[derive(Default)]
pub(super) struct ReadRepeats {
    count: u32,
    /// A unit that was looked up, and whose chunk no log had when it was read.
    unowned: Option<u64>,
}

impl ReadRepeats {
    /// Counts one more.
    pub(super) async fn repeat(&mut self, core: &LogCore) {
        core.volume.counters.repeated_reads.fetch_add(1, Ordering::Relaxed);
        self.count += 1;
        if self.count >= REPEATS_BEFORE_YIELD {
            yield_now().await;
        }
    }

    /// Notes that no log has the chunk of a unit that was looked up: it was freed meanwhile. True if the last lookup gave the same, so
    /// that it is no race.
    pub(super) fn is_unowned_again(&mut self, unit: u64) -> bool {
        self.unowned.replace(unit) == Some(unit)
    }
}

impl LogCore {
    /// The published image of the segment of a prefix, of which the core may have a copy in memory.
    ///
    /// # Errors
    /// As for [`LogCore::read_image`].
    pub(super) async fn find_image(
        &self,
        store: &Store,
        prefix: HashPrefix,
        repeats: &mut ReadRepeats,
    ) -> Result<ImageLookup, EngineError> {
        if let Some(lookup) = self.find_recent(store, prefix) {
            return Ok(lookup);
        }
        let lookup = self.read_image(store, prefix, repeats).await?;
        if let Some(image) = lookup.image.as_ref().filter(|image| image.damaged == 0) {
            let (segment, _) = lookup.level.segment_of(prefix);
            let place = SegmentRef::new(image.unit, image.chain);
            self.recent.borrow_mut().keep(store.id, segment, place, image.opens, Rc::clone(&image.entries));
        }
        Ok(lookup)
    }

    /// The published image of the segment of a prefix, if the core has it in memory.
    fn find_recent(&self, store: &Store, prefix: HashPrefix) -> Option<ImageLookup> {
        let pool = &self.volume.pool;
        let opens = pool.opens_now();
        let state = store.state.lock();
        let level = state.table.level();
        let (segment, _) = level.segment_of(prefix);
        let place = state.table.get(segment);
        if place.is_empty() || state.is_lost {
            return None;
        }
        let entries = self.recent.borrow_mut().find(store.id, segment, place, pool)?;
        self.volume.counters.image_cache_hits.fetch_add(1, Ordering::Relaxed);
        let (unit, chain) = (place.unit(), place.chain());
        Some(ImageLookup { level, image: Some(FoundImage { entries, unit, opens, chain, damaged: 0 }) })
    }

    /// The published image of the segment of a prefix, read from the device. Repeats until no chunk was reused meanwhile.
    ///
    /// # Errors
    /// Device failures, no memory, and [`EngineError::Corrupt`] if the image is another segment's, or the store is lost.
    pub(super) async fn read_image(
        &self,
        store: &Store,
        prefix: HashPrefix,
        repeats: &mut ReadRepeats,
    ) -> Result<ImageLookup, EngineError> {
        loop {
            let opens = self.volume.pool.opens_now();
            let (level, image) = {
                let state = store.state.lock();
                if state.is_lost {
                    return Err(self.corrupt(self.volume.layout().chunks_start_unit, store.id));
                }
                let level = state.table.level();
                (level, state.table.get(level.segment_of(prefix).0))
            };
            if image.is_empty() {
                return Ok(ImageLookup { level, image: None });
            }
            let (segment, depth) = level.segment_of(prefix);
            match self.read_buckets(store, segment, depth, image, opens).await? {
                BucketsRead::Entries(entries, damaged) => {
                    let (unit, chain) = (image.unit(), image.chain());
                    let image = Some(FoundImage { entries: Rc::new(entries), unit, opens, chain, damaged });
                    return Ok(ImageLookup { level, image });
                }
                BucketsRead::Unowned if repeats.is_unowned_again(image.unit()) => {
                    return Err(self.corrupt(image.unit(), store.id));
                }
                BucketsRead::Reused | BucketsRead::Unowned => repeats.repeat(self).await,
            }
        }
    }

    /// The entries of an image.
    async fn read_buckets(
        &self,
        store: &Store,
        segment: SegmentNumber,
        depth: u8,
        image: SegmentRef,
        opens: u64,
    ) -> Result<BucketsRead, EngineError> {
        let pool = &self.volume.pool;
        let read = match self.read_units(image.unit(), image.chain().into(), store.id).await {
            // A lost block costs its bucket alone, as a damaged one does.
            Err(EngineError::Device { error, .. }) if is_media_error(error) => {
                Box::pin(self.read_buckets_apart(store, image)).await
            }
            read => read,
        };
        let owner = pool.owner_of(image.unit());
        if !pool.unopened_since(image.unit(), opens) {
            return Ok(BucketsRead::Reused);
        }
        let (bytes, corrupt) = (read?, || self.corrupt(image.unit(), store.id));
        let Some((owner, unit)) = owner else { return Ok(BucketsRead::Unowned) };
        if owner.partition != store.id || owner.kind != LogKind::Keys {
            return Err(corrupt());
        }
        let place = ImagePlace {
            volume_id: self.volume.fixed().volume_id,
            partition: store.id,
            index: owner.index,
            unit,
            unit_bytes: self.volume.layout().unit_bytes,
        };
        let CheckedImage { head, entries, damaged } =
            UncheckedBuckets { bytes: &bytes, place }.check(image.chain());
        // With a damaged bucket 0 there is no head to compare, and the other buckets serve.
        let is_other = head.is_some_and(|head| (head.state.segment, head.state.depth) != (segment, depth));
        match is_other {
            true => Err(corrupt()),
            false => Ok(BucketsRead::Entries(entries, damaged)),
        }
    }

    /// The buckets of an image, with zeros for those that the medium has lost.
    ///
    /// # Errors
    /// Device failures that say nothing of the medium; no memory.
    pub(super) async fn read_buckets_apart(
        &self,
        store: &Store,
        image: SegmentRef,
    ) -> Result<Buffer, EngineError> {
        let unit_bytes = self.volume.layout().unit_bytes as usize;
        let mut bytes = Buffer::zeroed(usize::from(image.chain()) * unit_bytes);
        for (unit, bucket) in (image.unit()..).zip(bytes.chunks_exact_mut(unit_bytes)) {
            match self.read_units(unit, 1, store.id).await {
                Ok(read) => bucket.copy_from_slice(&read),
                Err(EngineError::Device { error, .. }) if is_media_error(error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(bytes)
    }

    /// Holds the segment of a prefix. Reads its image unless it is in memory.
    ///
    /// # Errors
    /// As for [`LogCore::read_image`].
    pub(super) async fn acquire<'a>(
        &self,
        store: &'a Store,
        prefix: HashPrefix,
    ) -> Result<HeldSegment<'a>, EngineError> {
        loop {
            let (segment, acquired) = {
                let state = &mut *store.state.lock();
                if state.is_lost {
                    return Err(self.corrupt(self.volume.layout().chunks_start_unit, store.id));
                }
                let (segment, _) = state.table.level().segment_of(prefix);
                (segment, state.busy.acquire(segment, &mut state.table))
            };
            let turn = match acquired {
                Acquired::Loaded => SegmentTurn::Loaded,
                Acquired::Load => SegmentTurn::Load,
                Acquired::Wait(ticket) => {
                    let mut wait = SegmentWait { store, ticket: Some(ticket) };
                    poll_fn(|context| wait.poll(context)).await
                }
            };
            match turn {
                SegmentTurn::Loaded => return Ok(HeldSegment::new(store, segment)),
                SegmentTurn::Load => return self.load(store, segment).await,
                SegmentTurn::Retry => {}
                SegmentTurn::Failed(error) => return Err(error),
            }
        }
    }

    /// The same with an image that was looked up before, which is taken if it is the newest.
    ///
    /// # Errors
    /// As for [`LogCore::read_image`].
    pub(super) async fn acquire_with<'a>(
        &self,
        store: &'a Store,
        prefix: HashPrefix,
        image: Option<FoundImage>,
    ) -> Result<HeldSegment<'a>, EngineError> {
        if let Some(image) = image.filter(|image| image.damaged == 0)
            && let Some(held) = self.hold_found(store, prefix, image)
        {
            return Ok(held);
        }
        self.acquire(store, prefix).await
    }

    /// Holds the segment of a prefix with an image of it, unless that is not the newest.
    fn hold_found<'a>(
        &self,
        store: &'a Store,
        prefix: HashPrefix,
        image: FoundImage,
    ) -> Option<HeldSegment<'a>> {
        let state = &mut *store.state.lock();
        let (segment, _) = state.table.level().segment_of(prefix);
        let place = SegmentRef::new(image.unit, image.chain);
        // A busy segment has the lock bit in the table, so it is another place.
        let is_newest = state.table.get(segment) == place
            && self.volume.pool.unopened_since(image.unit, image.opens)
            && !state.is_lost;
        if !is_newest {
            return None;
        }
        state.busy.hold_loaded(segment, Rc::unwrap_or_clone(image.entries), &mut state.table);
        Some(HeldSegment::new(store, segment))
    }

    /// Reads the image of a segment that this operation has to read for all that wait for it.
    async fn load<'a>(
        &self,
        store: &'a Store,
        segment: SegmentNumber,
    ) -> Result<HeldSegment<'a>, EngineError> {
        let load = SegmentLoad { store, segment, has_ended: false };
        let opens = self.volume.pool.opens_now();
        let (image, depth) = {
            let state = store.state.lock();
            (state.table.get(segment), state.table.level().depth_of(segment))
        };
        if !image.is_empty()
            && let Some(entries) = self.recent.borrow_mut().find(store.id, segment, image, &self.volume.pool)
        {
            self.volume.counters.image_cache_hits.fetch_add(1, Ordering::Relaxed);
            load.end(Ok(SegmentImage::clone(&entries)));
            return Ok(HeldSegment::new(store, segment));
        }
        let mut entries = Ok(SegmentImage::new());
        for _ in 0..READ_ATTEMPTS {
            if image.is_empty() {
                break;
            }
            entries = match self.read_buckets(store, segment, depth, image, opens).await {
                Ok(BucketsRead::Entries(entries, _)) => Ok(entries),
                // The image of a locked segment is live, so nothing frees its chunk: it never was a log's.
                Ok(BucketsRead::Reused | BucketsRead::Unowned) => Err(self.corrupt(image.unit(), store.id)),
                Err(error) => Err(error),
            };
            // What a damaged bucket hides is lost with the next image.
            if !entries.as_ref().is_ok_and(SegmentImage::is_lost) {
                break;
            }
        }
        let error = entries.as_ref().err().copied();
        load.end(entries);
        match error {
            Some(error) => Err(error),
            None => Ok(HeldSegment::new(store, segment)),
        }
    }
}
