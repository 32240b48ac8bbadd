//! The commit of changes: dirty segments leave as a batch of images, one append to the key log.
//!
//! ```text
//!   claim     under the lock: places, totals, headers, copies of the images        a leader, one at a time
//!   write     checksums, then one device write, two if the batch crosses chunks
//!   flush     a shared one, if acknowledged writes survive power loss
//!   publish   under the lock: table, counts, waiters                               in the order of the batches
//! ```
//! In: changes that wait. Out: their publication. Invariants: a change is published with all changes of its segment before it; images of a
//! store are durable in their order before they are published, or, with [`Durability::Completed`], written. Between claim and
//! publication a failure, or a leader that is dropped, makes the volume read-only.
//! Tested in `tests/log_conformance.rs` and `tests/log_power_loss.rs`.

use super::batch_state::{BatchTurn, BatchWait, BatchWaiterId, ChangeTicket};
use super::busy_segments::ChangeSource;
use super::core::{LogCore, device_error};
use super::hash_prefix::SegmentNumber;
use super::log_layout::MARKER_UNITS;
use super::log_place::{ChunkIndex, LogPlace};
use super::segment_buckets::{ImagePlace, ImageRole, ValueTailPlace, encode_image, image_units};
use super::segment_image::SegmentImage;
use super::segment_ref::SegmentRef;
use super::space_limits::ChunkPurpose;
use super::store::{ClaimedImage, EntryChange, Store, StoreState};
use super::tail_check::BATCH_BYTES_MAX;
use super::volume::LogVolume;
use crate::bug_injection::{self, InjectedBug};
use crate::common::waker_batch::WakerBatch;
use crate::{Durability, EngineError};
use octokv_base::Buffer;
use octokv_device::DeviceError;
use smallvec::SmallVec;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

/// A batch whose images have their places.
struct ClaimedBatch {
    number: u64,
    images: Vec<ClaimedImage>,
    last_sequence: u64,
}

/// What a batch is made of beside dirty segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BatchStart {
    /// Nothing.
    Segments,
    /// A marker, also if there are no dirty segments.
    Marker,
}

/// A waiter for a commit. Dropping it passes its turn on.
struct CommitWait<'a> {
    store: &'a Store,
    wait: BatchWait,
    waiter: Option<BatchWaiterId>,
}

impl CommitWait<'_> {
    fn poll(&mut self, context: &Context<'_>) -> Poll<BatchTurn> {
        self.store.state.lock().batches.poll(self.wait, &mut self.waiter, context)
    }
}

impl Drop for CommitWait<'_> {
    fn drop(&mut self) {
        if let Some(waiter) = self.waiter.take() {
            let wakers = self.store.state.lock().batches.forget(waiter);
            wakers.wake();
        }
    }
}

/// A batch that is claimed and not published: dropping it makes the volume read-only, unless it was disarmed.
struct UnpublishedBatch<'a>(Option<&'a LogVolume>);

impl Drop for UnpublishedBatch<'_> {
    fn drop(&mut self) {
        if let Some(volume) = self.0 {
            volume.fail();
        }
    }
}

/// The images of a batch while it is claimed.
struct BatchBuilder<'a> {
    core: &'a LogCore,
    completed: ValueTailPlace,
    sequence: u64,
    images: Vec<ClaimedImage>,
    tickets: Vec<ChangeTicket>,
    bytes: usize,
}

impl BatchBuilder<'_> {
    fn unit_bytes(&self) -> usize {
        self.core.volume.layout().unit_bytes as usize
    }

    /// Whether the batch has space for one more image of so many buckets: one always has.
    fn has_room(&self, chain: u8) -> bool {
        self.images.is_empty()
            || self.bytes + usize::from(chain) * self.unit_bytes() <= BATCH_BYTES_MAX as usize
    }

    /// Adds an image at a place that was appended last.
    fn push(
        &mut self,
        state: &mut StoreState,
        place: LogPlace,
        role: ImageRole,
        segment: SegmentNumber,
        (image, changes, source): (SegmentImage, Vec<EntryChange>, ChangeSource),
    ) {
        let volume = &self.core.volume;
        let chain = self.chain_of(&image);
        state.add_to_totals(&changes, volume.layout());
        self.sequence += 1;
        let completed = self.next_stated(state);
        let incarnation = volume.fixed().incarnation;
        let header = state.image_state(role, segment, chain, completed, incarnation, self.sequence);
        self.bytes += usize::from(chain) * self.unit_bytes();
        self.images.push(ClaimedImage { segment, place, state: header, image, chain, changes, source });
    }

    fn chain_of(&self, image: &SegmentImage) -> u8 {
        let unit_bytes = self.core.volume.layout().unit_bytes;
        image_units(image.entry_bytes(), unit_bytes)
            .expect("no change makes an image longer than the longest")
    }

    /// Where values end whose writes are complete, but at most one chunk behind the last image's.
    fn next_stated(&self, state: &StoreState) -> ValueTailPlace {
        let next = ChunkIndex(state.stated_value_chunk.0 + 1);
        match self.completed.index > next {
            true => ValueTailPlace { index: next, granule: 0 },
            false => self.completed,
        }
    }

    /// Adds a marker; false, and nothing has changed, if there is no space.
    fn add_marker(&mut self, state: &mut StoreState) -> bool {
        let Some(place) = append_to_keys(state, KeyAppend::Marker, &self.core.volume) else { return false };
        let nothing = (SegmentImage::new(), Vec::new(), ChangeSource::Compaction);
        self.push(state, place, ImageRole::Marker, SegmentNumber::MARKER, nothing);
        true
    }

    /// Adds the markers without which an image would skip chunks of the value log.
    fn add_markers(&mut self, state: &mut StoreState) -> bool {
        while self.completed.index.0 > state.stated_value_chunk.0 + 1 {
            if !self.add_marker(state) {
                return false;
            }
        }
        true
    }

    /// Adds both halves of a split that waits; false, and nothing has changed, if there is no space for both.
    fn add_split(&mut self, state: &mut StoreState) -> bool {
        let Some(split) = state.split.as_mut().filter(|split| !split.is_claimed) else { return true };
        let volume = &self.core.volume;
        let halves = [&split.low, &split.high].map(|half| self.chain_of(half));
        let units: u32 = halves.iter().map(|&chain| u32::from(chain)).sum();
        let has_room = state.keys.tail().unit + units <= volume.layout().image_units();
        // One hop at most: two of the longest images fit into a chunk.
        if !has_room && volume.pool.free() == 0 {
            return false;
        }
        split.is_claimed = true;
        let (segment, ticket) = (split.segment, split.ticket);
        let images = [split.low.clone(), split.high.clone()];
        let child = state.table.level().next_segment();
        let roles = [(ImageRole::SplitFirst, segment), (ImageRole::SplitSecond, child)];
        for (((role, segment), image), chain) in roles.into_iter().zip(images).zip(halves) {
            let Some(place) = append_to_keys(state, KeyAppend::Image { chain }, volume) else {
                // Another store took the last chunk between the halves.
                volume.note_failure();
                return false;
            };
            self.push(state, place, role, segment, (image, Vec::new(), ChangeSource::Compaction));
        }
        self.tickets.push(ticket);
        true
    }

    /// Adds dirty segments until the batch is full; false if there is no space for one.
    fn add_dirty(&mut self, state: &mut StoreState) -> bool {
        while let Some(segment) = state.busy.next_dirty() {
            let image = state.busy.image(segment).clone();
            let chain = self.chain_of(&image);
            if !self.has_room(chain) {
                return true;
            }
            let Some(place) = append_to_keys(state, KeyAppend::Image { chain }, &self.core.volume) else {
                return false;
            };
            let claimed = state.busy.claim(segment);
            self.tickets.push(claimed.ticket);
            self.push(state, place, ImageRole::Segment, segment, (image, claimed.changes, claimed.source));
        }
        true
    }
}

/// An append to a key log.
#[derive(Clone, Copy)]
enum KeyAppend {
    /// A segment image of `chain` buckets.
    Image { chain: u8 },
    /// An image without a segment, which states the heads of both logs.
    Marker,
}

/// Allocates space at the tail of the key log: from the chunks of users, or from those reserved for other purposes if the writer needs more than its pass
/// allowed for.
fn append_to_keys(state: &mut StoreState, append: KeyAppend, volume: &LogVolume) -> Option<LogPlace> {
    let purposes =
        [ChunkPurpose::User, ChunkPurpose::Delete, ChunkPurpose::Compaction, ChunkPurpose::KeyCompaction];
    let pool = &volume.pool;
    let place = purposes.iter().find_map(|&purpose| match append {
        KeyAppend::Image { chain } => state.keys.append_image(chain.into(), pool, purpose),
        KeyAppend::Marker => state.keys.append(MARKER_UNITS, pool, purpose),
    });
    volume.passes.set_key_tail(state.keys.partition(), state.keys.tail().unit, pool);
    place
}

impl LogCore {
    /// Returns when what `wait` names is published. Leads batches when it is this waiter's turn.
    ///
    /// # Errors
    /// [`EngineError::ReadOnly`] after a failed write; no space for the images, which stay as they are.
    pub(super) async fn commit(&self, store: &Store, wait: BatchWait) -> Result<(), EngineError> {
        let mut waiter = CommitWait { store, wait, waiter: None };
        loop {
            match poll_fn(|context| waiter.poll(context)).await {
                BatchTurn::Published => return Ok(()),
                BatchTurn::ReadOnly => return Err(EngineError::ReadOnly),
                BatchTurn::Lead => self.lead(store, BatchStart::Segments).await?,
            }
        }
    }

    /// Appends a marker: an image without entries whose header has the heads of both logs, the value tail and the last durable image.
    /// Does nothing while another batch is being claimed or written, since the header of its images says the same.
    ///
    /// # Errors
    /// As for [`LogCore::commit`].
    pub(super) async fn append_marker(&self, store: &Store) -> Result<(), EngineError> {
        let may_lead = store.state.lock().batches.try_lead();
        match may_lead {
            true => self.lead(store, BatchStart::Marker).await,
            false => Ok(()),
        }
    }

    /// Leads one batch. REQUIRES: it is this caller's turn, and nothing was awaited since.
    async fn lead(&self, store: &Store, start: BatchStart) -> Result<(), EngineError> {
        let (claimed, wakers) = self.claim(store, start);
        wakers.wake();
        match claimed {
            Ok(Some(batch)) => self.write_batch(store, batch).await,
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Claims dirty segments for a batch; `None` if there is nothing to write.
    fn claim(
        &self,
        store: &Store,
        start: BatchStart,
    ) -> (Result<Option<ClaimedBatch>, EngineError>, WakerBatch) {
        let mut guard = store.state.lock();
        let state = &mut *guard;
        // Under the lock: all records that entries of images refer to are completed.
        let completed = store.tail.lock().completed();
        let sequence = state.batches.claimed_sequence();
        let mut batch = BatchBuilder {
            core: self,
            completed,
            sequence,
            images: Vec::new(),
            tickets: Vec::new(),
            bytes: 0,
        };
        let has_space = batch.add_markers(state)
            && (start == BatchStart::Segments || batch.add_marker(state))
            && batch.add_split(state)
            && batch.add_dirty(state);
        if batch.images.is_empty() {
            let wakers = state.batches.step_down();
            let no_space = Err(device_error(DeviceError::NoSpace, store.id));
            return (if has_space { Ok(None) } else { no_space }, wakers);
        }
        let BatchBuilder { images, tickets, sequence: last_sequence, .. } = batch;
        let number = state.batches.claim(tickets, last_sequence);
        state.note_heads_stated(last_sequence);
        (Ok(Some(ClaimedBatch { number, images, last_sequence })), WakerBatch::default())
    }

    /// Writes a claimed batch, makes it durable if it has to be, and publishes it.
    ///
    /// # Errors
    /// [`EngineError::ReadOnly`]: the volume is, after a failure.
    async fn write_batch(&self, store: &Store, batch: ClaimedBatch) -> Result<(), EngineError> {
        let volume = &self.volume;
        let mut poison = UnpublishedBatch(Some(volume));
        let writes = self.encode_batch(store, &batch);
        let writes: SmallVec<[_; 2]> =
            writes.into_iter().map(|(unit, buffer)| self.device.write(volume.lba(unit), buffer)).collect();
        for write in writes {
            if write.await.result.is_err() {
                return Err(EngineError::ReadOnly);
            }
        }
        let wakers = store.state.lock().batches.written(batch.number);
        wakers.wake();
        let is_durable = volume.settings.durability == Durability::PowerSafe;
        let mut published_early = None;
        if bug_injection::is_injected(InjectedBug::PublishBeforeDurable) {
            poll_fn(|context| store.state.lock().batches.poll_predecessor(batch.number, context)).await?;
            let state = &mut *store.state.lock();
            published_early = Some(state.publish_images(&batch.images, volume.layout(), &volume.pool));
        }
        let is_flushed = is_durable && !bug_injection::is_injected(InjectedBug::SkipFlush);
        if is_flushed && volume.flushes.flush(&*self.device).await.is_err() {
            return Err(EngineError::ReadOnly);
        }
        poll_fn(|context| store.state.lock().batches.poll_predecessor(batch.number, context)).await?;
        let (wakers, used, freed, opens) = {
            let state = &mut *store.state.lock();
            // The chunks of the images were opened before this, and have live images from now on.
            let opens = volume.pool.opens_now();
            let (mut wakers, used) = published_early
                .unwrap_or_else(|| state.publish_images(&batch.images, volume.layout(), &volume.pool));
            wakers.append(state.batches.published(batch.number, is_durable));
            let freed = if is_durable { state.release_retired(&volume.pool) } else { 0 };
            (wakers, used, freed, opens)
        };
        volume.add_used(used);
        if freed > 0 {
            volume.passes.chunks_freed(&volume.pool);
        }
        poison.0 = None;
        wakers.wake();
        volume.counters.batches.fetch_add(1, Ordering::Relaxed);
        let markers =
            batch.images.iter().filter(|image| image.segment == SegmentNumber::MARKER).count() as u64;
        volume.counters.markers.fetch_add(markers, Ordering::Relaxed);
        volume.counters.images.fetch_add(batch.images.len() as u64 - markers, Ordering::Relaxed);
        debug_assert!(store.state.lock().batches.published_sequence() >= batch.last_sequence);
        self.keep_recent(store, batch.images, opens);
        Ok(())
    }

    /// Keeps the images of a published batch in memory that users changed, and those of which it has an older one.
    fn keep_recent(&self, store: &Store, images: Vec<ClaimedImage>, opens: u64) {
        let mut recent = self.recent.borrow_mut();
        for claimed in images.into_iter().filter(|claimed| claimed.state.role == ImageRole::Segment) {
            if claimed.source == ChangeSource::User || recent.has(store.id, claimed.segment) {
                let unit = self.volume.layout().unit_of(claimed.place.chunk, claimed.place.unit);
                let place = SegmentRef::new(unit, claimed.chain);
                recent.keep(store.id, claimed.segment, place, opens, Rc::new(claimed.image));
            }
        }
    }

    /// The bytes of a batch, each run of adjacent images as one buffer, with the first unit of each.
    fn encode_batch(&self, store: &Store, batch: &ClaimedBatch) -> SmallVec<[(u64, Buffer); 2]> {
        let layout = self.volume.layout();
        let mut runs: SmallVec<[(u64, Buffer); 2]> = SmallVec::new();
        let mut rest = &batch.images[..];
        while let Some(first) = rest.first() {
            let chunk = first.place.chunk;
            let count = rest.iter().take_while(|image| image.place.chunk == chunk).count();
            let (run, behind) = rest.split_at(count);
            let units: u32 = run.iter().map(|image| u32::from(image.chain)).sum();
            let bytes = units as usize * layout.unit_bytes as usize;
            // A batch has been claimed: it is written, whatever the budget says.
            let mut buffer = self.pool.take(bytes).unwrap_or_else(|| Buffer::zeroed(bytes));
            let mut at = 0;
            for image in run {
                let end = at + usize::from(image.chain) * layout.unit_bytes as usize;
                let place = ImagePlace {
                    volume_id: self.volume.fixed().volume_id,
                    partition: store.id,
                    index: image.place.index,
                    unit: image.place.unit,
                    unit_bytes: layout.unit_bytes,
                };
                encode_image(&mut buffer[at..end], &image.state, &image.image, place);
                at = end;
            }
            runs.push((layout.unit_of(chunk, first.place.unit), buffer));
            rest = behind;
        }
        runs
    }
}
