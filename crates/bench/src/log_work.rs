//! What the log engine did in a workload, beside the operations themselves: images, moves of compaction, writes that waited for space.
//!
//! In: statistics of the volume before and after. Out: figures per operation. Operations of the warm-up count too. Tested below.

use octokv_engine::LogStatistics;
use serde::Serialize;

/// The work of the log engine, each figure per operation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LogWork {
    /// Writes that waited for space.
    pub waited_writes: f64,
    /// Segment images that were appended, those that compaction moved included.
    pub images: f64,
    /// Images that compaction of key logs moved.
    pub moved_images: f64,
    /// Segments that compaction of value logs visited.
    pub visited_segments: f64,
    /// Values that it moved.
    pub moved_values: f64,
    /// Those of them whose records it read together with others.
    pub values_read_together: f64,
}

impl LogWork {
    /// The work between two samples, divided by the number of operations; `None` if that is 0.
    pub(crate) fn between(before: &LogStatistics, after: &LogStatistics, operations: u64) -> Option<LogWork> {
        let of = |count: fn(&LogStatistics) -> u64| {
            count(after).saturating_sub(count(before)) as f64 / operations as f64
        };
        (operations > 0).then(|| LogWork {
            waited_writes: of(|log| log.waited_writes),
            images: of(|log| log.images),
            moved_images: of(|log| log.moved_images),
            visited_segments: of(|log| log.visited_segments),
            moved_values: of(|log| log.moved_values),
            values_read_together: of(|log| log.values_read_together),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_per_operation() {
        // A different number in each field: none may be taken for another.
        let log = |times: u64| LogStatistics {
            waited_writes: times,
            images: 2 * times,
            moved_images: 3 * times,
            visited_segments: 4 * times,
            moved_values: 5 * times,
            values_read_together: 6 * times,
            ..LogStatistics::default()
        };
        let expected = LogWork {
            waited_writes: 0.5,
            images: 1.0,
            moved_images: 1.5,
            visited_segments: 2.0,
            moved_values: 2.5,
            values_read_together: 3.0,
        };
        assert_eq!(LogWork::between(&log(100), &log(200), 200), Some(expected));
        assert_eq!(LogWork::between(&log(1), &log(2), 0), None);
    }
}
