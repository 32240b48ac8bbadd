//! The images of a key log in their order, from one on.
//!
//! ```text
//!   chunk of index 5      │ 41 │ 42      │ 43 │ 44 │░░│       the image 45 did not fit into the rest of the chunk
//!   chunk of index 6      │ 45 │ 46 ▓▓▓▓ │ 47 │ …             46 is damaged: a step without a head, if 47 or later prove that it was durable
//! ```
//! In: where the first image is expected, and what precedes it. Out: a [`LogStep`] for each image, a gap, or the end.
//!
//! Invariants: steps have ascending sequence numbers, without gaps but for those that are reported; an intact step has only intact buckets,
//! and heads, tails and chunks that agree with the steps before.
//! Tested in `replay_tests.rs`.

use super::hash_prefix::SegmentNumber;
use super::known_chunks::KnownChunks;
use super::log_place::{ChunkIndex, ChunkNumber, LogPlace};
use super::log_window::LogWindow;
use super::segment_buckets::{ImageRole, ImageState, PreviousImage, UncheckedBuckets, ValueTailPlace};
use super::segment_image::SegmentImage;
use super::tail_check::{ExpectedImage, FoundHead, KeyLogView, TailVerdict, judge_tail};
use crate::bug_injection::{self, InjectedBug};
use crate::open_error::{IndexMismatch, OpenError};

/// An image of a key log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogStep {
    /// Where it begins.
    pub at: LogPlace,
    /// What its header says. Without one, role, segment and sequence are its own, the depth is 0, and the rest is from the image behind it.
    pub state: ImageState,
    /// Its buckets.
    pub chain: u8,
    /// Whether its header is intact.
    pub has_head: bool,
    /// Whether a bucket is damaged.
    pub is_damaged: bool,
}

impl LogStep {
    /// The last image that it states to be durable.
    pub fn stated_durable(&self) -> u64 {
        if self.has_head { self.state.sequence - u64::from(self.state.durable_lag) } else { 0 }
    }

    /// What the image behind it says of it.
    pub fn as_previous(&self) -> PreviousImage {
        PreviousImage { segment: self.state.segment, chain: self.chain }
    }
}

/// The next image of a key log, or why there is none.
#[derive(Debug)]
pub enum CursorStep {
    /// An image, with the entries in its intact buckets.
    Image(LogStep, SegmentImage),
    /// Durable images that are lost. The next step, if there is one, is behind them.
    Gap,
    /// The log ends.
    End {
        /// Whether all units were readable that could have proven the contrary.
        is_certain: bool,
    },
}

/// Where a cursor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CursorPosition {
    /// The next image.
    pub expected: ExpectedImage,
    /// The value tail of the image before.
    pub value_tail: ValueTailPlace,
}

/// Walks over the images of a key log.
pub struct LogCursor<'a> {
    window: LogWindow<'a>,
    volume_id: u64,
    partition: u32,
    position: CursorPosition,
    /// The chunks of the key log, and of the value log.
    keys: KnownChunks,
    values: KnownChunks,
    /// The last image that is known to be durable, by the checkpoint or a step.
    durable_through: u64,
    /// Whether the image before has no head: a chunk of the value log may be unknown.
    is_behind_headless: bool,
    /// Whether the cursor has passed a gap. An image behind it that contradicts those before is another gap then, and no error.
    has_gap: bool,
    has_ended: bool,
}

impl<'a> LogCursor<'a> {
    /// A cursor before an image.
    pub fn new(
        window: LogWindow<'a>,
        (volume_id, partition): (u64, u32),
        position: CursorPosition,
        (keys, values): (KnownChunks, KnownChunks),
        durable_through: u64,
    ) -> LogCursor<'a> {
        LogCursor {
            window,
            volume_id,
            partition,
            position,
            keys,
            values,
            durable_through,
            is_behind_headless: false,
            has_gap: false,
            has_ended: false,
        }
    }

    /// Where it is.
    pub fn position(&self) -> CursorPosition {
        self.position
    }

    /// Goes back to an earlier position of this cursor, which lies before any gap. The chunks and the durable sequence that it has learnt are
    /// kept.
    pub fn go_back(&mut self, position: CursorPosition) {
        self.position = position;
        (self.is_behind_headless, self.has_ended) = (false, false);
    }

    /// The last image that is known to be durable.
    pub fn durable_through(&self) -> u64 {
        self.durable_through
    }

    /// The chunks of the key log.
    pub fn keys(&self) -> &KnownChunks {
        &self.keys
    }

    /// The chunks of the value log.
    pub fn values(&self) -> &KnownChunks {
        &self.values
    }

    /// The units that it reads.
    pub fn window(&self) -> &LogWindow<'a> {
        &self.window
    }

    /// The next image. Behind the end, the end.
    ///
    /// # Errors
    /// An error of the device that decides and says nothing of the medium; [`IndexMismatch::LogImage`].
    pub async fn next(&mut self) -> Result<CursorStep, OpenError> {
        if self.has_ended {
            return Ok(CursorStep::End { is_certain: true });
        }
        let expected = self.position.expected;
        let found = self.find(expected).await;
        let Some((found, damaged, entries)) = found else {
            return self.judge(expected, None, SegmentImage::new()).await;
        };
        if damaged != 0 {
            return self.judge(expected, Some(found), entries).await;
        }
        self.accept(step_of(found, false), entries)
    }

    /// The expected image, at its place or at the front of the next chunk: its head, its damaged buckets and its entries.
    async fn find(&mut self, expected: ExpectedImage) -> Option<(FoundHead, u64, SegmentImage)> {
        let mut log = self.view();
        let places = [Some(expected.at), log.next_chunk(expected.at)];
        for at in places.into_iter().flatten() {
            let head = log.head_at(at).await;
            let is_any = bug_injection::is_injected(InjectedBug::LogOldIncarnation);
            let is_expected = |sequence, incarnation| {
                sequence == expected.sequence && (incarnation >= expected.incarnation || is_any)
            };
            let head = head.filter(|head| is_expected(head.state.sequence, head.state.incarnation));
            if let Some(head) = head {
                let place = log.image_place(at);
                let bytes = log.window.load(at, head.chain.into()).await;
                let checked = UncheckedBuckets { bytes, place }.check(head.chain);
                // A header with a valid checksum and other entries than it says is none, as for any reader.
                if let Some(head) = checked.head {
                    return Some((FoundHead { at, head }, checked.damaged, checked.entries));
                }
            }
        }
        None
    }

    async fn judge(
        &mut self,
        expected: ExpectedImage,
        found: Option<FoundHead>,
        entries: SegmentImage,
    ) -> Result<CursorStep, OpenError> {
        let durable_through = self.durable_through;
        let verdict = judge_tail(self.view(), expected, found, durable_through).await?;
        match (verdict, found) {
            (TailVerdict::DamagedBuckets { durable_through }, Some(found)) => {
                self.durable_through = self.durable_through.max(durable_through);
                self.accept(step_of(found, true), entries)
            }
            (TailVerdict::DamagedHead { durable_through, at, image, next }, _) => {
                self.durable_through = self.durable_through.max(durable_through);
                let state = self.state_before(&next.head.state, at, image);
                let step = LogStep { at, state, chain: image.chain, has_head: false, is_damaged: true };
                self.move_behind(&step);
                Ok(CursorStep::Image(step, entries))
            }
            (TailVerdict::Gap { resume, chunks }, _) => {
                self.pass_gap(resume, &chunks);
                Ok(CursorStep::Gap)
            }
            (TailVerdict::End { is_certain }, _) => {
                self.has_ended = true;
                Ok(CursorStep::End { is_certain })
            }
            (TailVerdict::DamagedBuckets { .. }, None) => {
                unreachable!("an image without a head has no intact one")
            }
        }
    }

    /// The state that an image without a header is taken to have left: that of the image behind it, as far as that is one of this place. Heads
    /// that it stated may be durable, and chunks before them in use by other stores.
    fn state_before(&self, next: &ImageState, at: LogPlace, image: PreviousImage) -> ImageState {
        let is_marker = image.segment == SegmentNumber::MARKER;
        let tail = next.value_tail;
        let is_known = tail.granule <= self.window.layout().chunk_granules()
            && tail >= self.position.value_tail
            && (self.values.is_before(tail.index) || self.values.get(tail.index).is_some());
        let value_tail = if is_known { tail } else { self.position.value_tail };
        ImageState {
            role: if is_marker { ImageRole::Marker } else { ImageRole::Segment },
            segment: image.segment,
            depth: 0,
            sequence: self.position.expected.sequence,
            key_head: next.key_head.min(at.index),
            value_head: next.value_head.min(value_tail.index),
            value_tail,
            ..*next
        }
    }

    /// Goes on at the first image behind a gap. Without one, or if the chunks up to it contradict those that are known, the log ends.
    fn pass_gap(&mut self, resume: Option<FoundHead>, chunks: &[ChunkNumber]) {
        (self.has_gap, self.has_ended) = (true, true);
        let Some(resume) = resume else { return };
        let mut last = self.position.expected.at.index;
        while let Some((next, _)) = self.keys.behind(last) {
            last = next;
        }
        for &chunk in chunks {
            if !self.keys.note_behind(last, chunk) {
                return;
            }
            last = ChunkIndex(last.0 + 1);
        }
        self.has_ended = false;
        let expected = &mut self.position.expected;
        (expected.sequence, expected.at) = (resume.head.state.sequence, resume.at);
    }

    /// Takes an image whose header is intact.
    fn accept(&mut self, step: LogStep, entries: SegmentImage) -> Result<CursorStep, OpenError> {
        let ImageState { sequence, incarnation, value_tail, .. } = step.state;
        if !self.agrees(&step) {
            return self.contradiction(&step);
        }
        self.move_behind(&step);
        let expected = &mut self.position.expected;
        expected.incarnation = incarnation;
        self.position.value_tail = value_tail;
        self.is_behind_headless = false;
        self.durable_through = self.durable_through.max(step.stated_durable());
        debug_assert_eq!(expected.sequence, sequence + 1);
        Ok(CursorStep::Image(step, entries))
    }

    fn move_behind(&mut self, step: &LogStep) {
        let at = LogPlace { unit: step.at.unit + u32::from(step.chain), ..step.at };
        let expected = &mut self.position.expected;
        (expected.sequence, expected.at) = (step.state.sequence + 1, at);
        self.is_behind_headless = !step.has_head;
    }

    /// Notes the chunks that an image names. False if its heads, tail or chunks contradict the images before.
    fn agrees(&mut self, step: &LogStep) -> bool {
        let ImageState { key_head, value_head, next_key_chunk, next_value_chunk, value_tail, .. } =
            step.state;
        // Where the value log was before the checkpoint does not matter any more.
        let has_chunk =
            self.values.is_before(value_tail.index) || self.values.get(value_tail.index).is_some();
        key_head <= step.at.index
            && value_head <= value_tail.index
            && value_tail >= self.position.value_tail
            && value_tail.granule <= self.window.layout().chunk_granules()
            && has_chunk
            && self.keys.note_behind(step.at.index, next_key_chunk)
            && self.values.note_behind(value_tail.index, next_value_chunk)
    }

    /// An image that contradicts those before. Behind a damaged header, which may have named a chunk of the value log, that is a gap.
    fn contradiction(&mut self, step: &LogStep) -> Result<CursorStep, OpenError> {
        let ImageState { sequence, value_tail, .. } = step.state;
        if self.is_behind_headless && self.values.get(value_tail.index).is_none() || self.has_gap {
            (self.has_gap, self.has_ended) = (true, true);
            return Ok(CursorStep::Gap);
        }
        let unit = self.window.layout().unit_of(step.at.chunk, step.at.unit);
        let lba = self.window.reader().lba(unit).0;
        Err(OpenError::Inconsistent { lba, mismatch: IndexMismatch::LogImage { sequence } })
    }

    fn view(&mut self) -> KeyLogView<'_, 'a> {
        let (volume_id, partition) = (self.volume_id, self.partition);
        KeyLogView { window: &mut self.window, chunks: &self.keys, volume_id, partition }
    }
}

fn step_of(found: FoundHead, is_damaged: bool) -> LogStep {
    let FoundHead { at, head } = found;
    LogStep { at, state: head.state, chain: head.chain, has_head: true, is_damaged }
}
