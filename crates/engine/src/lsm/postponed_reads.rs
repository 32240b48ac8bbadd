//! Tables and segments that compactions leave alone for a time, since the device failed to read them.
//!
//! ```text
//!   read ──device error──▶ postponed for 1 s ──time──▶ due ──device error──▶ postponed for twice as long, up to a minute ──▶ …
//!                                                       ├── a compaction has read it ──▶ forgotten
//!                                                       └── nothing needs it for long ──▶ forgotten
//! ```
//! Such an error may pass (a path that failed, a controller that was reset), so it costs nothing and is tried again; and it may stay, so the choice of compactions leaves
//! out what met it ([`super::compaction_choice`]), and all others go on.
//!
//! In: tables and segments that a compaction failed to read; the time, which the maintenance task sets. Without that task no pause ends. Out: the tables and segments to skip.
//! Invariant: an error that stays is met at most once per pause. Tested below.

use crate::EngineError;
use octokv_base::Nanos;
use octokv_base::map::{FxHashMap, FxHashSet};

/// The first pause.
pub const PAUSE_MIN: Nanos = Nanos::from_secs(1);
/// The longest pause.
pub const PAUSE_MAX: Nanos = Nanos::from_secs(60);
/// An entry is removed when no compaction has tried it for this long after its pause.
const FORGOTTEN_AFTER: Nanos = Nanos::from_secs(600);

/// Twice a pause, up to the longest.
pub fn next_pause(pause: Nanos) -> Nanos {
    Nanos((pause.0.saturating_mul(2)).clamp(PAUSE_MIN.0, PAUSE_MAX.0))
}

/// What a compaction reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CompactedPart {
    /// The table of a number.
    Table(u64),
    /// A value of the segment of a number.
    Segment(u32),
}

#[derive(Clone, Copy, Debug)]
struct Postponement {
    until: Nanos,
    pause: Nanos,
}

/// What the device failed to read, with the time when it may be tried again.
#[derive(Debug, Default)]
pub struct PostponedReads {
    now: Nanos,
    parts: FxHashMap<CompactedPart, Postponement>,
    last_error: Option<EngineError>,
}

impl PostponedReads {
    /// The time. Parts whose pause has ended may be tried again.
    pub fn advance(&mut self, now: Nanos) {
        self.now = self.now.max(now);
        self.parts.retain(|_, part| part.until + FORGOTTEN_AFTER > now);
    }

    /// The device failed to read a part: it is postponed, for longer each time.
    pub fn postpone(&mut self, part: CompactedPart, error: EngineError) {
        let pause = self.parts.get(&part).map_or(PAUSE_MIN, |before| next_pause(before.pause));
        self.parts.insert(part, Postponement { until: self.now + pause, pause });
        self.last_error = Some(error);
    }

    /// A compaction has read a part.
    pub fn forget(&mut self, part: CompactedPart) {
        self.parts.remove(&part);
    }

    /// All parts may be tried at once, as if none had failed.
    pub fn clear(&mut self) {
        self.parts.clear();
    }

    /// Whether nothing has failed that was not read since.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Whether a part has failed, and was not read since.
    pub fn has_failed(&self, part: CompactedPart) -> bool {
        self.parts.contains_key(&part)
    }

    /// The numbers of tables and of segments that have failed, and were not read since.
    pub fn counts(&self) -> [u64; 2] {
        let tables = self.parts.keys().filter(|part| matches!(part, CompactedPart::Table(_))).count();
        [tables, self.parts.len() - tables].map(|count| count as u64)
    }

    fn postponed(&self) -> impl Iterator<Item = (&CompactedPart, &Postponement)> {
        self.parts.iter().filter(|(_, postponement)| postponement.until > self.now)
    }

    /// The tables that are postponed.
    pub fn tables(&self) -> FxHashSet<u64> {
        let table = |(part, _): (&CompactedPart, &Postponement)| match part {
            CompactedPart::Table(id) => Some(*id),
            CompactedPart::Segment(_) => None,
        };
        self.postponed().filter_map(table).collect()
    }

    /// The segments that are postponed.
    pub fn segments(&self) -> impl Iterator<Item = u32> {
        self.postponed().filter_map(|(part, _)| match part {
            CompactedPart::Segment(id) => Some(*id),
            CompactedPart::Table(_) => None,
        })
    }

    /// The last error, while something is postponed.
    pub fn error(&self) -> Option<EngineError> {
        self.last_error.filter(|_| self.postponed().next().is_some())
    }

    /// When the next pause ends, if there is one.
    pub fn next_due(&self) -> Option<Nanos> {
        self.postponed().map(|(_, postponement)| postponement.until).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: CompactedPart = CompactedPart::Table(7);
    const SEGMENT: CompactedPart = CompactedPart::Segment(7);
    const ERROR: EngineError = EngineError::NoMemory;

    #[test]
    fn pauses_double_up_to_a_minute_while_the_error_stays() {
        let (mut reads, mut now) = (PostponedReads::default(), Nanos::from_secs(100));
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            reads.advance(now);
            assert!(reads.tables().is_empty());
            reads.postpone(TABLE, ERROR);
            assert_eq!(reads.next_due(), Some(now + Nanos::from_secs(seconds)));
            now = now + Nanos::from_secs(seconds);
            reads.advance(Nanos(now.0 - 1));
            assert_eq!(reads.tables(), FxHashSet::from_iter([7]), "{seconds}");
        }
        reads.advance(now);
        assert!(reads.has_failed(TABLE), "its pause has ended, and nothing has read it");
        assert_eq!(reads.error(), None);
        reads.forget(TABLE);
        reads.postpone(TABLE, ERROR);
        assert_eq!(reads.next_due(), Some(now + PAUSE_MIN), "as if it had never failed");
    }

    #[test]
    fn tables_and_segments_of_one_number_are_different_parts() {
        let mut reads = PostponedReads::default();
        reads.postpone(SEGMENT, ERROR);
        assert!(reads.tables().is_empty() && reads.has_failed(SEGMENT) && !reads.has_failed(TABLE));
        assert_eq!((reads.segments().collect::<Vec<_>>(), reads.error()), (vec![7], Some(ERROR)));
        reads.postpone(TABLE, ERROR);
        assert_eq!(reads.counts(), [1, 1]);
        reads.forget(SEGMENT);
        assert_eq!((reads.tables().len(), reads.segments().count(), reads.counts()), (1, 0, [1, 0]));
        reads.clear();
        assert!(reads.is_empty() && reads.next_due().is_none());
    }

    #[test]
    fn what_nothing_reads_again_is_forgotten() {
        let mut reads = PostponedReads::default();
        reads.postpone(TABLE, ERROR);
        reads.advance(PAUSE_MIN + Nanos(FORGOTTEN_AFTER.0 - 1));
        assert!(!reads.is_empty());
        reads.advance(PAUSE_MIN + FORGOTTEN_AFTER);
        assert!(reads.is_empty());
    }
}
