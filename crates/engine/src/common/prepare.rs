//! Preparation: which never-written space of a volume is written with zeros next, ahead of its use, and how long the pause
//! after it is.
//!
//! The first write to a part of a file that was only allocated changes the file system's metadata, and the next flush commits
//! the file system's journal. A write of zeros in the background pays for that beforehand.
//!
//! ```text
//!   record area   ▓▓▓▓▓▓▓▓▓▓▓░░░░░░░░░░░░░░░░·················   ▓ in use   ░ prepared   · never written
//!                            ▲ next allocation ▲ next chunk
//!                            └──── lead ───────┘  at most the share of this front
//! ```
//! In: at the opening the ranges that the device reports as never written; at each step the state of the allocator, of the
//! journal and of the checkpoints. Out: the chunk to prepare next, or none. Does no I/O and reads no clock. Invariant: what
//! is prepared and not used yet exceeds neither the configured bytes nor the part of an area that is used next; a chunk is
//! named once. Nothing here keeps a chunk from being overwritten: who writes the zeros reserves it first
//! ([`crate::hash`], `prepare.rs` there).
//! Tested below by tables and a model of an allocator.

use super::allocator::SpaceAllocator;
use octokv_base::Nanos;
use std::ops::Range;

/// The longest chunk, in bytes: long enough that its file system transaction is shared by many records.
const CHUNK_BYTES_MAX: u64 = 1 << 20;
/// The chunks that fit in the configured bytes, and in an area, at least.
const CHUNKS_MIN: u64 = 16;
/// The part of the configured bytes that is prepared in each copy of the journal: one in so many.
const JOURNAL_DIVISOR: u64 = 16;
/// A lead of less than the wanted one by this factor is urgent.
const URGENT_DIVISOR: u64 = 16;
/// The chunks that a search for never-written space looks at, at most: it runs on a core that serves requests.
const VISITS_MAX: usize = 2048;
/// The pause after a chunk, as a multiple of the time that it took: if it was urgent, and otherwise.
const PAUSE_FACTORS: [u64; 2] = [1, 3];
/// The least and the longest pause after a chunk.
const PAUSE_LIMITS: [Nanos; 2] = [Nanos::from_micros(100), Nanos::from_millis(200)];

/// A part of a volume that is prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrepareArea {
    /// The records.
    Records,
    /// A copy (0, 1) of the journal, a ring.
    Journal {
        /// The copy.
        copy: u8,
    },
    /// A copy (0, 1) of a checkpoint area (0, 1).
    Images {
        /// The area.
        area: u8,
        /// The copy.
        copy: u8,
    },
}

/// Where the areas of a volume are, in units, and how much of them is prepared.
#[derive(Clone, Debug)]
pub struct PrepareConfig {
    /// Bytes that are prepared ahead, at most; above 0.
    pub ahead_bytes: u64,
    /// Bytes per unit.
    pub unit_bytes: u32,
    /// The number of cores that allocate.
    pub cores: usize,
    /// The areas besides the records, and their units.
    pub areas: Vec<(PrepareArea, Range<u64>)>,
}

/// What is used next, and how much of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextUse {
    /// The unit after the last batch, from the start of a copy of the journal.
    pub journal_unit: u32,
    /// The area of the next checkpoint.
    pub images_area: u8,
    /// The units that a checkpoint needs now, at most.
    pub images_units: u64,
}

/// A chunk to prepare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrepareChunk {
    /// Its area.
    pub area: PrepareArea,
    /// Its units, from the start of the volume.
    pub units: Range<u64>,
    /// Whether its use is near.
    pub is_urgent: bool,
}

/// The never-written chunks of an area.
struct UnwrittenChunks {
    area: PrepareArea,
    units: Range<u64>,
    chunk_units: u64,
    /// A bit per chunk: 1 = a part of it was never written.
    words: Vec<u64>,
    remaining: u64,
}

impl UnwrittenChunks {
    fn new(area: PrepareArea, units: Range<u64>, chunk_units_max: u64) -> UnwrittenChunks {
        let chunk_units = ((units.end - units.start) / CHUNKS_MIN).clamp(1, chunk_units_max);
        let chunks = (units.end - units.start).div_ceil(chunk_units);
        UnwrittenChunks {
            area,
            units,
            chunk_units,
            words: vec![0; chunks.div_ceil(64) as usize],
            remaining: 0,
        }
    }

    /// The chunks that contain a unit of `units`.
    fn overlapping(&self, units: &Range<u64>) -> Range<u64> {
        let start = units.start.max(self.units.start) - self.units.start;
        let end = units.end.min(self.units.end).saturating_sub(self.units.start);
        start / self.chunk_units..end.div_ceil(self.chunk_units).max(start / self.chunk_units)
    }

    fn set(&mut self, chunk: u64, is_unwritten: bool) {
        let (word, bit) = (&mut self.words[(chunk / 64) as usize], 1_u64 << (chunk % 64));
        match is_unwritten {
            true => (self.remaining, *word) = (self.remaining + u64::from(*word & bit == 0), *word | bit),
            false => (self.remaining, *word) = (self.remaining - u64::from(*word & bit != 0), *word & !bit),
        }
    }

    fn is_unwritten(&self, unit: u64) -> bool {
        let chunk = (unit - self.units.start) / self.chunk_units;
        self.words[(chunk / 64) as usize] & 1 << (chunk % 64) != 0
    }

    /// The units of the chunk of `unit`.
    fn chunk_of(&self, unit: u64) -> Range<u64> {
        let start = unit - (unit - self.units.start) % self.chunk_units;
        start..(start + self.chunk_units).min(self.units.end)
    }

    /// The first never-written chunk that begins in `range`.
    fn first_unwritten(&self, range: Range<u64>) -> Option<Range<u64>> {
        let before = range.start.max(self.units.start) - self.units.start;
        let chunks = before.div_ceil(self.chunk_units)..self.overlapping(&range).end;
        let mut chunk = chunks.start;
        while chunk < chunks.end {
            let rest = self.words[(chunk / 64) as usize] >> (chunk % 64);
            if rest == 0 {
                chunk = (chunk / 64 + 1) * 64;
                continue;
            }
            chunk += u64::from(rest.trailing_zeros());
            return (chunk < chunks.end).then(|| self.chunk_of(self.units.start + chunk * self.chunk_units));
        }
        None
    }

    /// The chunks of `units` are prepared.
    fn clear(&mut self, units: &Range<u64>) {
        self.overlapping(units).for_each(|chunk| self.set(chunk, false));
    }

    /// The chunks that end in `units` are prepared.
    fn clear_within(&mut self, units: &Range<u64>) {
        let chunks = self.overlapping(units);
        let last = if units.end >= self.units.end {
            chunks.end
        } else {
            (units.end - self.units.start) / self.chunk_units
        };
        (chunks.start..last).for_each(|chunk| self.set(chunk, false));
    }

    /// The lead of the journal whose next batch is at `unit` of the ring.
    fn journal_lead(&self, unit: u32, wanted: u64) -> Option<Lead> {
        let from = (self.units.start + u64::from(unit)).min(self.units.end);
        let (ring_units, area) = (self.units.end - self.units.start, self.area);
        if let Some(chunk) = self.first_unwritten(from..self.units.end) {
            return Some(Lead { units: chunk.start - from, wanted, area, chunk });
        }
        let chunk = self.first_unwritten(self.units.start..from)?;
        Some(Lead { units: chunk.start + ring_units - from, wanted, area, chunk })
    }

    /// The lead of a checkpoint of so many units.
    fn images_lead(&self, images_units: u64) -> Option<Lead> {
        let end = (self.units.start + images_units).min(self.units.end);
        let chunk = self.first_unwritten(self.units.start..end)?;
        let (units, wanted) = (chunk.start - self.units.start, end - self.units.start);
        Some(Lead { units, wanted, area: self.area, chunk })
    }
}

/// A partition of the allocator from which a core allocates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Front {
    partition: usize,
    /// Units behind its next allocation that may be in use before a chunk is prepared there.
    margin: u64,
}

/// How much of what is used next is prepared, and what is prepared next of it.
struct Lead {
    units: u64,
    wanted: u64,
    area: PrepareArea,
    chunk: Range<u64>,
}

impl Lead {
    /// Whether a smaller fraction of the wanted lead is there.
    fn is_less(&self, other: &Lead) -> bool {
        u128::from(self.units) * u128::from(other.wanted) < u128::from(other.units) * u128::from(self.wanted)
    }
}

/// The never-written space of a volume, and what of it is prepared next.
pub struct Preparer {
    config: PrepareConfig,
    /// Of the areas besides the records.
    chunks: Vec<UnwrittenChunks>,
    /// Of the records, by partition of the allocator.
    record_chunks: Vec<UnwrittenChunks>,
    /// Where the last step found the next allocation of each partition.
    next_units: Vec<u64>,
    /// Where the last step found the next batch.
    journal_unit: u32,
    fronts: Vec<Front>,
}

impl Preparer {
    /// The preparer of a volume whose device reports `unwritten` ranges of units as never written. `None` if none of its
    /// areas has any.
    pub fn new(
        config: PrepareConfig,
        space: &SpaceAllocator,
        unwritten: impl Iterator<Item = Range<u64>>,
    ) -> Option<Preparer> {
        let chunk_bytes = (config.ahead_bytes / CHUNKS_MIN).min(CHUNK_BYTES_MAX);
        let chunk_units = (chunk_bytes / u64::from(config.unit_bytes)).max(1);
        let chunks_of = |(area, units)| UnwrittenChunks::new(area, units, chunk_units);
        let mut chunks: Vec<UnwrittenChunks> = config.areas.iter().cloned().map(chunks_of).collect();
        let partitions = (0..space.partition_count()).map(|index| space.partition_range(index));
        let mut record_chunks: Vec<UnwrittenChunks> =
            partitions.map(|units| chunks_of((PrepareArea::Records, units))).collect();
        for range in unwritten {
            for area in chunks.iter_mut().chain(&mut record_chunks) {
                area.overlapping(&range).for_each(|chunk| area.set(chunk, true));
            }
        }
        let mut partitions: Vec<usize> =
            (0..config.cores).map(|core| space.initial_partition(core, config.cores)).collect();
        partitions.dedup();
        let fronts = partitions.into_iter().map(|partition| Front { partition, margin: 0 }).collect();
        let next_units = (0..space.partition_count()).map(|index| space.next_unit(index)).collect();
        let preparer = Preparer { config, chunks, record_chunks, next_units, journal_unit: 0, fronts };
        (!preparer.is_done()).then_some(preparer)
    }

    /// Whether no chunk is left.
    pub fn is_done(&self) -> bool {
        self.chunks.iter().chain(&self.record_chunks).all(|chunks| chunks.remaining == 0)
    }

    /// The next chunk, which counts as prepared from now on. `None` until more is used.
    pub fn next_chunk(&mut self, space: &SpaceAllocator, next_use: NextUse) -> Option<PrepareChunk> {
        self.note_use(space, next_use);
        let ahead_units = self.config.ahead_bytes / u64::from(self.config.unit_bytes);
        let fronts = self.config.cores.min(self.next_units.len()).max(self.fronts.len());
        let front_units = (ahead_units / fronts as u64).max(1);
        let mut least: Option<Lead> = None;
        let mut consider = |lead: Lead| {
            if lead.units < lead.wanted && least.as_ref().is_none_or(|least| lead.is_less(least)) {
                least = Some(lead);
            }
        };
        for &front in &self.fronts {
            self.record_lead(space, front, front_units).into_iter().for_each(&mut consider);
        }
        for chunks in &self.chunks {
            let lead = match chunks.area {
                PrepareArea::Journal { .. } => {
                    chunks.journal_lead(next_use.journal_unit, (ahead_units / JOURNAL_DIVISOR).max(1))
                }
                PrepareArea::Images { area, .. } if area == next_use.images_area => {
                    chunks.images_lead(next_use.images_units)
                }
                PrepareArea::Images { .. } | PrepareArea::Records => None,
            };
            lead.into_iter().for_each(&mut consider);
        }
        let Lead { units: lead, wanted, area, chunk: units } = least?;
        // The areas do not overlap.
        let all = self.chunks.iter_mut().chain(&mut self.record_chunks);
        all.filter(|chunks| chunks.units.contains(&units.start)).for_each(|chunks| chunks.clear(&units));
        Some(PrepareChunk { area, units, is_urgent: lead < wanted.div_ceil(URGENT_DIVISOR) })
    }

    /// The lead of a front: free units in the order of next fit, which goes on to the end of the partition, then to its
    /// start, then to the next partition.
    fn record_lead(&self, space: &SpaceAllocator, front: Front, wanted: u64) -> Option<Lead> {
        if self.record_chunks.iter().all(|chunks| chunks.remaining == 0) {
            return None;
        }
        let (mut lead, mut is_ended, mut visits) = (0, false, 0);
        let partitions = self.record_chunks.len();
        for step in 0..partitions {
            let partition = (front.partition + step) % partitions;
            let (chunks, next) = (&self.record_chunks[partition], self.next_units[partition]);
            let margin = if step == 0 { front.margin.min(wanted / 2) } else { 0 };
            for segment in [next..chunks.units.end, chunks.units.start..next] {
                let mut at = segment.start;
                while let Some(free) = space.first_free(at..segment.end) {
                    let chunk = chunks.chunk_of(free);
                    let chunk = chunk.start.max(segment.start)..chunk.end.min(segment.end);
                    if !chunks.is_unwritten(free) {
                        lead += if is_ended { 0 } else { space.count_free(free..chunk.end) };
                    } else if free >= next + margin || segment.start < next {
                        return Some(Lead { units: lead, wanted, area: chunks.area, chunk });
                    } else {
                        is_ended = true;
                    }
                    visits += 1;
                    if lead >= wanted || visits == VISITS_MAX {
                        return None;
                    }
                    at = chunk.end;
                }
            }
        }
        None
    }

    /// Finds where cores allocate, and forgets the chunks that were used before they were prepared.
    fn note_use(&mut self, space: &SpaceAllocator, next_use: NextUse) {
        let mut moved = Vec::new();
        for partition in 0..self.next_units.len() {
            let (before, now) = (self.next_units[partition], space.next_unit(partition));
            if before == now {
                continue;
            }
            self.next_units[partition] = now;
            let used = before..now.max(before);
            self.record_chunks[partition].clear_within(&used);
            moved.push(Front { partition, margin: 2 * (used.end - used.start) });
        }
        match moved.is_empty() {
            true => self.fronts.iter_mut().for_each(|front| front.margin = 0),
            false => self.fronts = moved,
        }
        let (before, now) = (self.journal_unit, next_use.journal_unit);
        self.journal_unit = now;
        for chunks in &mut self.chunks {
            if matches!(chunks.area, PrepareArea::Journal { .. }) {
                let start = chunks.units.start;
                let used = |from: u32, to: u64| start + u64::from(from)..to;
                if before <= now {
                    chunks.clear_within(&used(before, start + u64::from(now)));
                } else {
                    chunks.clear_within(&used(before, chunks.units.end));
                    chunks.clear_within(&used(0, start + u64::from(now)));
                }
            }
        }
    }
}

/// The pause after a chunk that took `took`.
pub fn pause_after(took: Nanos, is_urgent: bool) -> Nanos {
    let [urgent, otherwise] = PAUSE_FACTORS;
    let factor = if is_urgent { urgent } else { otherwise };
    let [least, longest] = PAUSE_LIMITS;
    Nanos(took.0.saturating_mul(factor)).clamp(least, longest)
}

#[cfg(test)]
#[path = "prepare_tests.rs"]
mod tests;
