//! The reservations of a serial resource: a flash channel, or one direction of the host's link.
//!
//! In: transfers, each with its earliest start. Out: their ends. A transfer takes the first gap that is long enough, so
//! one that waits for a slow die does not delay later transfers.
//! Invariant: the spans in `busy` are sorted and do not touch, and none ended before the last argument of
//! [`Timeline::forget_before`]. Their number is bounded by the operations in flight, since adjacent spans merge.

use octokv_base::Nanos;
use std::collections::VecDeque;

/// The busy spans of the resource.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    /// Start and end of each span.
    busy: VecDeque<(Nanos, Nanos)>,
}

impl Timeline {
    /// Reserves the first free `span` at or after `ready`, and gives its end.
    pub fn reserve(&mut self, ready: Nanos, span: Nanos) -> Nanos {
        if span == Nanos::ZERO {
            return ready;
        }
        let mut from = ready;
        let mut at = self.busy.partition_point(|&(_, until)| until < from);
        while let Some(&(start, until)) = self.busy.get(at) {
            if from + span <= start {
                break;
            }
            from = from.max(until);
            at += 1;
        }
        let until = from + span;
        let joins_last = at > 0 && self.busy[at - 1].1 == from;
        let joins_next = self.busy.get(at).is_some_and(|&(start, _)| start == until);
        match (joins_last, joins_next) {
            (true, true) => {
                let (_, end) = self.busy.remove(at).expect("there is a next span");
                self.busy[at - 1].1 = end;
            }
            (true, false) => self.busy[at - 1].1 = until,
            (false, true) => self.busy[at].0 = from,
            (false, false) => self.busy.insert(at, (from, until)),
        }
        until
    }

    /// Removes the spans that ended before `now`. REQUIRES: no later reservation is ready before `now`.
    pub fn forget_before(&mut self, now: Nanos) {
        while self.busy.front().is_some_and(|&(_, until)| until < now) {
            self.busy.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Prng;

    #[test]
    fn a_reservation_takes_the_first_gap_that_is_long_enough() {
        let mut timeline = Timeline::default();
        // ready, span, ends
        let table = [
            (10, 5, 15),
            (100, 10, 110), // Far ahead: it leaves a gap.
            (10, 5, 20),    // After the first.
            (10, 80, 100),  // Fills the gap to the last nanosecond.
            (0, 10, 10),    // Before all others.
            (0, 1, 111),    // No gap is left before the end.
            (50, 0, 50),    // An empty span ends at once.
        ];
        for (ready, span, ends) in table {
            assert_eq!(timeline.reserve(Nanos(ready), Nanos(span)), Nanos(ends), "{ready} {span}");
        }
        assert_eq!(timeline.busy, [(Nanos(0), Nanos(111))]);
        timeline.forget_before(Nanos(111));
        assert_eq!(timeline.busy.len(), 1);
        timeline.forget_before(Nanos(112));
        assert!(timeline.busy.is_empty());
    }

    #[test]
    fn no_two_reservations_overlap_and_none_begins_early() {
        let (mut timeline, mut random) = (Timeline::default(), Prng::new(5));
        let mut done: Vec<(u64, u64)> = Vec::new();
        let (mut now, mut total) = (0, 0);
        for _ in 0..2_000 {
            now += random.below(60);
            timeline.forget_before(Nanos(now));
            let (ready, span) = (now + random.below(500), 1 + random.below(60));
            let end = timeline.reserve(Nanos(ready), Nanos(span)).0;
            assert!(end >= ready + span);
            done.push((end - span, end));
            total += span;
        }
        done.sort_unstable();
        assert!(done.windows(2).all(|pair| pair[0].1 <= pair[1].0));
        assert!(total > now / 3, "the timeline was hardly used");
    }
}
