//! Where the images of a key log end: whether an image that is not there, or not intact, was ever durable.
//!
//! ```text
//!   … │ q - 1 │ q ▓▓ │ q + 1 │ q + 2, states that q is durable │ …      damage: the image before it names the segment and buckets of q
//!   … │ q - 1 │ q ▓▓ │ ▓▓▓▓▓ │ q + 2, states that q is durable │ …      a gap: the segments of q and q + 1 are not known
//!   … │ q - 1 │ q ▓▓ │ q + 1 │  (nothing states that q is durable)      the end: a batch that was not acknowledged
//! ```
//! In: the place at which image q is expected. Out: a [`TailVerdict`].
//!
//! Limit: if all images of a chunk are damaged, nothing names the chunk behind it, and the log ends there. A chunk has two images at least, so
//! the store would be lost otherwise.
//!
//! Invariants: only an image behind q, of an incarnation not below the current one, or the checkpoint, proves that q was durable. An error of
//! the device that says nothing of the medium does not end a log and makes no gap: the caller fails with it, and may try again.
//! Tested in `replay_tests.rs`.

use super::known_chunks::KnownChunks;
use super::log_place::{ChunkIndex, ChunkNumber, LogPlace};
use super::log_window::LogWindow;
use super::segment_buckets::{ImageHead, ImagePlace, PreviousImage, UncheckedBuckets};
use crate::lsm::table::io::is_media_error;
use octokv_device::DeviceError;

/// The most bytes of images that leave as one batch; a batch of one image may have more.
pub const BATCH_BYTES_MAX: u32 = 128 << 10;
/// Batches behind an image in which a proof of it is looked for: the rest of its own, two in flight, and the first that states it.
const BATCHES_LOOKED_AT: u32 = 4;

/// An image that is expected at the tail of a key log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpectedImage {
    /// Its number.
    pub sequence: u64,
    /// The lowest incarnation that it may have.
    pub incarnation: u32,
    /// Where it lies if it fits there. The unit may be the end of the chunk.
    pub at: LogPlace,
}

/// A key log in which images are looked for.
pub struct KeyLogView<'w, 'a> {
    /// Its units.
    pub window: &'w mut LogWindow<'a>,
    /// Its chunks.
    pub chunks: &'w KnownChunks,
    /// The volume.
    pub volume_id: u64,
    /// The partition of the store.
    pub partition: u32,
}

/// An image whose first bucket is intact, and where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundHead {
    /// Its place.
    pub at: LogPlace,
    /// Its header.
    pub head: ImageHead,
}

/// What became of an image that is not at its place as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TailVerdict {
    /// It was not durable: the log ends before it.
    End {
        /// Whether all that could prove the contrary was readable.
        is_certain: bool,
    },
    /// It was durable and is damaged; its first bucket is intact.
    DamagedBuckets {
        /// The last image that is proven to be durable.
        durable_through: u64,
    },
    /// It was durable, and its first bucket is damaged. The image behind it says what it was.
    DamagedHead {
        /// The last image that is proven to be durable.
        durable_through: u64,
        /// Where it begins.
        at: LogPlace,
        /// What it was.
        image: PreviousImage,
        /// The image behind it.
        next: FoundHead,
    },
    /// It was durable, and nothing says what it was: nor may the images behind it be known.
    Gap {
        /// The first image behind it that was found.
        resume: Option<FoundHead>,
        /// The chunks behind the known ones, up to that of the image.
        chunks: Vec<ChunkNumber>,
    },
}

impl KeyLogView<'_, '_> {
    /// The place of an image here.
    pub fn image_place(&self, at: LogPlace) -> ImagePlace {
        let (volume_id, partition) = (self.volume_id, self.partition);
        ImagePlace {
            volume_id,
            partition,
            index: at.index,
            unit: at.unit,
            unit_bytes: self.window.layout().unit_bytes,
        }
    }

    /// The header of an image that begins at a place and lies in its chunk.
    pub async fn head_at(&mut self, at: LogPlace) -> Option<ImageHead> {
        let place = self.image_place(at);
        let rest = self.window.layout().chunk_units.checked_sub(at.unit).filter(|&rest| rest > 0)?;
        let bytes = self.window.load(at, 1).await;
        UncheckedBuckets { bytes, place }.head().filter(|head| u32::from(head.chain) <= rest)
    }

    /// The first place of the chunk behind, if that is known.
    pub fn next_chunk(&self, at: LogPlace) -> Option<LogPlace> {
        let (index, chunk) = self.chunks.behind(at.index)?;
        Some(LogPlace { index, chunk, unit: 0 })
    }
}

/// Fails with an error that says nothing of the medium, if there is one.
fn fail_with_passing(errors: impl IntoIterator<Item = DeviceError>) -> Result<(), DeviceError> {
    match errors.into_iter().find(|&error| !is_media_error(error)) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

/// What is behind an expected image.
#[derive(Default)]
struct FoundBehind {
    /// The last image that is stated to be durable.
    durable_through: Option<u64>,
    /// The image q + 1, of the highest incarnation.
    next: Option<FoundHead>,
    /// The first image of the highest incarnation.
    first: Option<FoundHead>,
    /// The chunks behind the known ones that were looked at.
    chunks: Vec<ChunkNumber>,
    /// Of a unit up to the proof.
    errors: Vec<DeviceError>,
}

/// Judges an image of which the first bucket (`found` is `None`) or another one is not intact. `known_durable` is the last image that is
/// known to be durable.
///
/// # Errors
/// An error that says nothing of the medium, of units without which there is no verdict.
pub async fn judge_tail(
    mut log: KeyLogView<'_, '_>,
    expected: ExpectedImage,
    found: Option<FoundHead>,
    known_durable: u64,
) -> Result<TailVerdict, DeviceError> {
    let own_errors = own_errors(&mut log, expected.at, found).await;
    let behind = look_behind(&mut log, expected, found).await;
    let is_durable = expected.sequence <= known_durable;
    let durable_through = behind.durable_through.or(is_durable.then_some(known_durable));
    let Some(durable_through) = durable_through else {
        let is_certain = behind.errors.is_empty() && own_errors.is_empty();
        fail_with_passing(own_errors)?;
        return Ok(TailVerdict::End { is_certain });
    };
    if found.is_some() {
        return Ok(TailVerdict::DamagedBuckets { durable_through });
    }
    let place = behind.next.and_then(|next| place_before(&log, expected.at, next));
    if let Some((at, next)) = place.zip(behind.next) {
        let image = next.head.state.previous;
        return Ok(TailVerdict::DamagedHead { durable_through, at, image, next });
    }
    fail_with_passing(own_errors.into_iter().chain(behind.errors))?;
    let resume = behind.first;
    Ok(TailVerdict::Gap { resume, chunks: behind.chunks })
}

/// The errors of the units in which the expected image was looked for.
async fn own_errors(
    log: &mut KeyLogView<'_, '_>,
    at: LogPlace,
    found: Option<FoundHead>,
) -> Vec<DeviceError> {
    let next = log.next_chunk(at);
    let places = match found {
        Some(found) => [Some((found.at, u32::from(found.head.chain))), None],
        None => [Some((at, 1)), next.map(|next| (next, 1))],
    };
    let mut errors = Vec::new();
    for (at, units) in places.into_iter().flatten() {
        log.window.load(at, units).await;
        errors.extend(log.window.error_in(at, units));
    }
    errors
}

/// Looks at each unit behind an expected image as at the first bucket of one, up to the first proof.
async fn look_behind(
    log: &mut KeyLogView<'_, '_>,
    expected: ExpectedImage,
    found: Option<FoundHead>,
) -> FoundBehind {
    let layout = *log.window.layout();
    let image_units_max = u32::from(layout.chain_max());
    let units_max = BATCHES_LOOKED_AT * (BATCH_BYTES_MAX / layout.unit_bytes).max(image_units_max);
    let mut behind = FoundBehind::default();
    let mut at = match found {
        Some(found) => LogPlace { unit: found.at.unit + u32::from(found.head.chain), ..found.at },
        None => expected.at,
    };
    let mut named: Option<(ChunkIndex, ChunkNumber)> = None;
    for _ in 0..units_max {
        if at.unit >= layout.chunk_units {
            let next = at.index.0.checked_add(1).map(ChunkIndex);
            let of_image = named.filter(|(index, _)| Some(*index) == next);
            match (log.next_chunk(at), of_image) {
                (Some(known), _) => at = known,
                (None, Some((index, chunk))) => {
                    behind.chunks.push(chunk);
                    at = LogPlace { index, chunk, unit: 0 };
                }
                (None, None) => break,
            }
        }
        let head = log.head_at(at).await;
        let head = head.filter(|head| {
            let state = &head.state;
            state.sequence > expected.sequence && state.incarnation >= expected.incarnation
        });
        behind.errors.extend(log.window.error_in(at, 1));
        if let Some(head) = head {
            let (found, state) = (FoundHead { at, head }, head.state);
            let is_later = |other: Option<FoundHead>| {
                other.is_none_or(|other| other.head.state.incarnation < state.incarnation)
            };
            if is_later(behind.first) {
                behind.first = Some(found);
            }
            if state.sequence == expected.sequence + 1 && is_later(behind.next) {
                behind.next = Some(found);
            }
            if state.next_key_chunk.0 < layout.chunks {
                named = at.index.0.checked_add(1).map(|index| (ChunkIndex(index), state.next_key_chunk));
            }
            let stated = state.sequence - u64::from(state.durable_lag);
            if stated >= expected.sequence {
                behind.durable_through = Some(stated);
                break;
            }
        }
        at.unit += 1;
    }
    behind
}

/// Where the image before `next` begins, which is expected at a place, or in the next chunk if it did not fit there. `None` if the image
/// behind it contradicts both.
fn place_before(log: &KeyLogView<'_, '_>, at: LogPlace, next: FoundHead) -> Option<LogPlace> {
    let chain = u32::from(next.head.state.previous.chain);
    let end = at.unit + chain;
    let chunk_units = log.window.layout().chunk_units;
    let behind = log.next_chunk(at);
    if chain == 0 {
        return None;
    }
    if next.at.index == at.index {
        return (next.at.unit == end).then_some(at);
    }
    let behind = behind.filter(|behind| behind.index == next.at.index)?;
    match next.at.unit {
        0 => (end <= chunk_units).then_some(at),
        unit => (unit == chain).then_some(behind),
    }
}
