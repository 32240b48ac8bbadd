//! Compaction of a key log: the images of its head chunk that are live move to the tail (LEED §3.3).
//!
//! ```text
//!   head chunk ─▶ pieces of 1 MiB ─▶ image that the table names?   no: garbage
//!                                      segment not busy: held with the image that was read, dirty
//!                                      busy: awaited, and looked at again
//!   ─▶ published ─▶ live images of the chunk = 0?   no: damaged headers hid some; the table is swept for them
//!   ─▶ the head advances, which the next image or marker states
//! ```
//! In: a store whose key log has a sealed chunk. Out: a head that is one chunk further, or an error and the same head.
//! Invariants: the head passes a chunk only when the table names nothing in it, and no batch in flight has an image there. An image of
//! which entries were lost stays one; a bucket that cannot be read three times is lost, and costs its entries alone.
//! Tested in `compaction_tests.rs`.

use super::batch_state::{BatchWait, ChangeTicket};
use super::busy_segments::ChangeSource;
use super::compaction_rounds::RoundEnd;
use super::core::LogCore;
use super::hash_prefix::SegmentNumber;
use super::log_place::{ChunkIndex, ChunkNumber, LogKind};
use super::pinned_chunks::is_passing_error;
use super::segment_buckets::{ImageHead, ImagePlace, ImageRole, UncheckedBuckets, image_units};
use super::segment_image::SegmentImage;
use super::segment_ref::SegmentRef;
use super::space_pass::CompactionSpace;
use super::store::{Store, StoreState};
use crate::EngineError;
use crate::common::media_errors::is_media_error;
use crate::common::work_slice::WorkSlice;
use futures_util::future::{OptionFuture, join};
use octokv_base::Buffer;
use std::sync::atomic::Ordering;

/// The bytes of one read of a chunk. More than the longest image of 63 units of 4 KiB.
pub(super) const CHUNK_READ_BYTES: u32 = 1 << 20;
/// The images of about so many bytes are handled before others have their turn.
const MARK_BYTES: u32 = 64 << 10;
/// What cannot be read intact in so many attempts is damaged.
pub(super) const DAMAGE_READS: u32 = 3;

/// An image that may be live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ImageToMove {
    segment: SegmentNumber,
    /// Where it lies.
    image: SegmentRef,
}

impl ImageToMove {
    /// Whether the table still names it.
    fn is_live(&self, state: &StoreState) -> bool {
        let is_segment = u64::from(self.segment.0) < state.table.segments();
        is_segment && state.table.get(self.segment).with_lock(false) == self.image
    }
}

/// Bytes read from a sealed key chunk. They do not change until the compaction of this log frees the chunk.
struct ChunkPiece {
    index: ChunkIndex,
    /// The first unit.
    first: u32,
    bytes: Result<Buffer, EngineError>,
}

/// What became of an image in a chunk that was read.
enum ImageStep {
    /// It is garbage, or it is damaged: the sweep moves it then.
    Left,
    /// Its segment is dirty.
    Marked(ChangeTicket),
    /// Others have its segment.
    Busy,
}

impl LogCore {
    /// Runs one round of key compaction, and further ones while `goes_on` returns true. A round appends the live images of the head chunk again and
    /// advances the head.
    ///
    /// # Errors
    /// Device failures, no memory. The head is where the last round left it, and a further round goes on.
    pub(super) async fn compact_keys(
        &self,
        store: &Store,
        goes_on: &dyn Fn() -> bool,
    ) -> Result<RoundEnd, EngineError> {
        let (mut ahead, mut has_advanced) = (None, false);
        let end = loop {
            let volume = &self.volume;
            let space = volume.passes.begin_compaction(&volume.pool, CompactionSpace::KeyRound);
            let Some(_space) = space else { break RoundEnd::Paused { has_moved: false } };
            let end = self.key_round(store, &mut ahead, goes_on).await;
            let end = self.end_round(store, LogKind::Keys, end).await?;
            has_advanced |= end == RoundEnd::Advanced;
            if end != RoundEnd::Advanced || ahead.is_none() {
                break end;
            }
        };
        Ok(if has_advanced { RoundEnd::Advanced } else { end })
    }

    /// One round. `ahead` is the first piece of the head chunk, if that was prefetched; afterwards that of the next head, if its round follows.
    async fn key_round(
        &self,
        store: &Store,
        ahead: &mut Option<ChunkPiece>,
        goes_on: &dyn Fn() -> bool,
    ) -> Result<RoundEnd, EngineError> {
        let (head, behind) = {
            let state = store.state.lock();
            let mut sealed = state.keys.sealed();
            (sealed.next(), sealed.next())
        };
        let Some((index, chunk)) = head else { return Ok(RoundEnd::NoChunk) };
        let first = ahead.take().filter(|piece| (piece.index, piece.first) == (index, 0));
        // Images of batches in flight are not counted yet, and those in `behind` may not be written.
        self.commit_all(store).await?;
        if !self.is_chunk_empty(chunk) {
            let behind = || behind.filter(|_| goes_on());
            *ahead = self.move_images(store, (index, chunk), first, behind).await?;
            self.commit_all(store).await?;
        }
        if !self.is_chunk_empty(chunk) {
            self.sweep_images(store, index, chunk).await?;
            self.commit_all(store).await?;
        }
        if !self.is_chunk_empty(chunk) {
            // The table names nothing in it, which the count has to say, too.
            return Err(self.corrupt(self.volume.layout().unit_of(chunk, 0), store.id));
        }
        store.state.lock().advance_head(LogKind::Keys, ChunkIndex(index.0 + 1), &self.volume.pool);
        Ok(RoundEnd::Advanced)
    }

    /// Returns when all changes of a store so far are published.
    ///
    /// # Errors
    /// As for [`LogCore::commit`].
    pub(super) async fn commit_all(&self, store: &Store) -> Result<(), EngineError> {
        let next = store.state.lock().batches.next_ticket();
        self.commit(store, BatchWait::AllBefore(next)).await
    }

    /// Whether nothing in a chunk is live. False if that is not counted.
    pub(super) fn is_chunk_empty(&self, chunk: ChunkNumber) -> bool {
        self.volume.pool.live_of(chunk).is_some_and(|live| live.records == 0)
    }

    fn image_place(&self, store: &Store, index: ChunkIndex, unit: u32) -> ImagePlace {
        ImagePlace {
            volume_id: self.volume.fixed().volume_id,
            partition: store.id,
            index,
            unit,
            unit_bytes: self.volume.layout().unit_bytes,
        }
    }

    /// Moves the live images of a chunk whose headers are intact. `next` is its first piece, if that was prefetched. Prefetches each following piece while
    /// the images of the current one are published, at last the first piece of the chunk `behind`, if there is one, and returns that.
    async fn move_images(
        &self,
        store: &Store,
        (index, chunk): (ChunkIndex, ChunkNumber),
        mut next: Option<ChunkPiece>,
        behind: impl Fn() -> Option<(ChunkIndex, ChunkNumber)>,
    ) -> Result<Option<ChunkPiece>, EngineError> {
        let layout = self.volume.layout();
        let (mut unit, mut busy, mut slice) = (0, Vec::new(), WorkSlice::default());
        while unit < layout.chunk_units {
            let piece = match next.take() {
                Some(piece) => piece,
                None => self.read_piece(store, (index, chunk), unit).await,
            };
            let units = self.piece_units(unit);
            let bytes = match piece.bytes {
                Ok(bytes) => bytes,
                // The sweep reads what lies there, image by image.
                Err(EngineError::Device { .. }) => {
                    unit += units;
                    continue;
                }
                Err(error) => return Err(error),
            };
            let (mut passed, mut last) = (0, None);
            while passed < units {
                let rest = &bytes[(passed * layout.unit_bytes) as usize..];
                let (marked, ticket) =
                    self.mark_images(store, (index, chunk, unit + passed), rest, &mut busy);
                last = ticket.or(last);
                passed += marked;
                slice.count_bytes(u64::from(marked * layout.unit_bytes)).await;
                if marked == 0 {
                    break;
                }
            }
            drop(bytes);
            unit += passed;
            let published = async {
                match last {
                    Some(ticket) => self.commit(store, BatchWait::Change(ticket)).await,
                    None => Ok(()),
                }
            };
            let following = match unit < layout.chunk_units {
                true => Some(((index, chunk), unit)),
                false => behind().map(|behind| (behind, 0)),
            };
            let read = OptionFuture::from(following.map(|(chunk, unit)| self.read_piece(store, chunk, unit)));
            let (published, piece) = join(published, read).await;
            published?;
            next = piece;
        }
        for image in busy {
            self.move_busy_image(store, image).await?;
        }
        Ok(next)
    }

    /// The units that are read of a chunk from one on.
    fn piece_units(&self, first: u32) -> u32 {
        let layout = self.volume.layout();
        (layout.chunk_units - first).min(CHUNK_READ_BYTES / layout.unit_bytes)
    }

    /// Reads a chunk from a unit on.
    async fn read_piece(
        &self,
        store: &Store,
        (index, chunk): (ChunkIndex, ChunkNumber),
        first: u32,
    ) -> ChunkPiece {
        let units = self.piece_units(first);
        let bytes = self.read_units(self.volume.layout().unit_of(chunk, first), units, store.id).await;
        ChunkPiece { index, first, bytes }
    }

    /// Makes the segments dirty whose images lie in units of a chunk from one on, and adds those that others have to `busy`. Gives the units
    /// that were passed, those of some [`MARK_BYTES`], and the last change. An image that does not end in the bytes is left to the next read:
    /// none is passed if that is the first.
    fn mark_images(
        &self,
        store: &Store,
        (index, chunk, first): (ChunkIndex, ChunkNumber, u32),
        bytes: &[u8],
        busy: &mut Vec<ImageToMove>,
    ) -> (u32, Option<ChangeTicket>) {
        let layout = self.volume.layout();
        let units = (bytes.len() / layout.unit_bytes as usize) as u32;
        let is_last = first + units == layout.chunk_units;
        let (mut at, mut last) = (0, None);
        let most = units.min(MARK_BYTES / layout.unit_bytes);
        while at < most {
            let place = self.image_place(store, index, first + at);
            let buckets = UncheckedBuckets { bytes: &bytes[(at * layout.unit_bytes) as usize..], place };
            let Some(head) = buckets.head() else {
                at += 1;
                continue;
            };
            if at + u32::from(head.chain) > units && !is_last {
                break;
            }
            if head.state.role != ImageRole::Marker {
                let image = SegmentRef::new(layout.unit_of(chunk, first + at), head.chain);
                let image = ImageToMove { segment: head.state.segment, image };
                match self.mark_image(store, image, &buckets, &head) {
                    ImageStep::Left => {}
                    ImageStep::Marked(ticket) => last = Some(ticket),
                    ImageStep::Busy => busy.push(image),
                }
            }
            at += u32::from(head.chain);
        }
        (at.min(units), last)
    }

    fn mark_image(
        &self,
        store: &Store,
        image: ImageToMove,
        buckets: &UncheckedBuckets<'_>,
        head: &ImageHead,
    ) -> ImageStep {
        if !image.is_live(&store.state.lock()) {
            return ImageStep::Left;
        }
        let checked = buckets.check(head.chain);
        match checked.damaged == 0 {
            true => self.mark_loaded(store, image, checked.entries),
            false => ImageStep::Left,
        }
    }

    /// Makes a segment dirty with the image that was read, if the table still names that.
    fn mark_loaded(&self, store: &Store, image: ImageToMove, entries: SegmentImage) -> ImageStep {
        let state = &mut *store.state.lock();
        if !image.is_live(state) {
            return ImageStep::Left;
        }
        if state.busy.is_busy(image.segment) {
            return ImageStep::Busy;
        }
        state.busy.hold_loaded(image.segment, entries, &mut state.table);
        let ticket = self.mark_moved(state, image.segment);
        state.busy.leave(image.segment, &mut state.table);
        ImageStep::Marked(ticket)
    }

    /// Makes a segment dirty that the caller holds.
    fn mark_moved(&self, state: &mut StoreState, segment: SegmentNumber) -> ChangeTicket {
        self.drop_stale_entries(state, segment);
        let entry_bytes = state.busy.image(segment).entry_bytes();
        let units = image_units(entry_bytes, self.volume.layout().unit_bytes).unwrap_or(0);
        let counters = &self.volume.counters;
        counters.moved_images.fetch_add(1, Ordering::Relaxed);
        counters.compaction_image_units.fetch_add(units.into(), Ordering::Relaxed);
        state.busy.mark_dirty(segment, None, ChangeSource::Compaction, &mut state.batches)
    }

    /// Moves the image of a segment that others had, unless they have replaced it meanwhile.
    async fn move_busy_image(&self, store: &Store, image: ImageToMove) -> Result<(), EngineError> {
        loop {
            let prefix = {
                let state = store.state.lock();
                if !image.is_live(&state) {
                    return Ok(());
                }
                state.table.level().range_of(image.segment).first
            };
            let held = self.acquire(store, prefix).await?;
            let wait = held.with(|state, segment| {
                let is_same = segment == image.segment && image.is_live(state);
                // A change that is not published yet has an image of its own.
                is_same.then(|| {
                    state.busy.last_change(segment).unwrap_or_else(|| self.mark_moved(state, segment))
                })
            });
            drop(held);
            if let Some(ticket) = wait {
                self.commit(store, BatchWait::Change(ticket)).await?;
            }
        }
    }

    /// Moves the images in a chunk that the table names: those that a damaged header hid, and those with a damaged bucket.
    ///
    /// # Errors
    /// Of the device, for those that it failed to read: the others were moved. As for [`LogCore::compact_keys`].
    pub(super) async fn sweep_images(
        &self,
        store: &Store,
        index: ChunkIndex,
        chunk: ChunkNumber,
    ) -> Result<(), EngineError> {
        let (mut page, mut failure) = (0, None);
        loop {
            let images = {
                let state = store.state.lock();
                if page >= state.table.page_count() {
                    return failure.map_or(Ok(()), Err);
                }
                self.images_of_page(&state, page, chunk)
            };
            for image in images {
                let unit = self.volume.pool.chunk_of(image.image.unit()).map_or(0, |(_, unit)| unit);
                let place = self.image_place(store, index, unit);
                let entries = match self.read_damaged_image(store, image, place).await {
                    Err(error) if is_passing_error(&error) => {
                        failure = Some(error);
                        continue;
                    }
                    entries => entries?,
                };
                if matches!(self.mark_loaded(store, image, entries), ImageStep::Busy) {
                    self.move_busy_image(store, image).await?;
                }
            }
            page += 1;
        }
    }

    /// The images of a page of the table that lie in a chunk.
    fn images_of_page(&self, state: &StoreState, page: usize, chunk: ChunkNumber) -> Vec<ImageToMove> {
        let (first, count) = state.table.page_segments(page);
        let segments = (first.0..first.0 + count).map(SegmentNumber);
        let images = segments
            .map(|segment| ImageToMove { segment, image: state.table.get(segment).with_lock(false) })
            .filter(|image| !image.image.is_empty());
        let is_in = |image: &ImageToMove| {
            self.volume.pool.chunk_of(image.image.unit()).is_some_and(|(of_image, _)| of_image == chunk)
        };
        images.filter(is_in).collect()
    }

    /// Reads an image until it is intact, or as often as damage has to be seen: its intact buckets then, stated as lost.
    async fn read_damaged_image(
        &self,
        store: &Store,
        image: ImageToMove,
        place: ImagePlace,
    ) -> Result<SegmentImage, EngineError> {
        let ImageToMove { segment, image } = image;
        let mut read = None;
        for _ in 0..DAMAGE_READS {
            match self.read_units(image.unit(), image.chain().into(), store.id).await {
                Ok(bytes) => {
                    let checked = UncheckedBuckets { bytes: &bytes, place }.check(image.chain());
                    let is_intact = checked.damaged == 0;
                    read = Some(checked);
                    if is_intact {
                        break;
                    }
                }
                Err(EngineError::Device { error, .. }) if is_media_error(error) => {}
                Err(error) => return Err(error),
            }
        }
        let checked = match read {
            Some(checked) => checked,
            None => {
                let bytes = self.read_buckets_apart(store, image).await?;
                UncheckedBuckets { bytes: &bytes, place }.check(image.chain())
            }
        };
        match checked.head.is_some_and(|head| head.state.segment != segment) {
            true => Err(self.corrupt(image.unit(), store.id)),
            false => Ok(checked.entries),
        }
    }
}
