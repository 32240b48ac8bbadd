//! A thing that does one piece of work at a time, as a calendar: a flash channel, a direction of the host's link.
//!
//! In: pieces of work, each with the time from which it can be done. Out: when it is done. A piece takes the first
//! gap that is long enough, so one that must wait for a slow die does not hold up what comes after it.
//! Invariant: the spans in `taken` are in order, do not touch, and none ended before the time last given to
//! [`Timeline::forget_before`].

use octokv_base::Nanos;
use std::collections::VecDeque;

/// When a thing is taken.
#[derive(Debug, Default)]
pub struct Timeline {
    /// From, until.
    busy: VecDeque<(Nanos, Nanos)>,
}

impl Timeline {
    /// Takes the first `span` of free time at or after `ready`. Gives when it ends.
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
                let (_, end) = self.busy.remove(at).expect("looked at above");
                self.busy[at - 1].1 = end;
            }
            (true, false) => self.busy[at - 1].1 = until,
            (false, true) => self.busy[at].0 = from,
            (false, false) => self.busy.insert(at, (from, until)),
        }
        until
    }

    /// Nothing will be asked for before `now` any more.
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
    fn work_takes_the_first_gap_that_is_long_enough() {
        let mut timeline = Timeline::default();
        // ready, span, ends
        let table = [
            (10, 5, 15),
            (100, 10, 110), // Far ahead: it leaves a gap.
            (10, 5, 20),    // Behind the first.
            (10, 80, 100),  // Fills the gap to the last nanosecond.
            (0, 10, 10),    // Before them all.
            (0, 1, 111),    // Nothing is free before the end.
            (50, 0, 50),    // No work takes no time.
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
    fn no_two_pieces_of_work_overlap_and_none_begins_early() {
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
        assert!(total > now / 3, "the line was hardly used");
    }
}
