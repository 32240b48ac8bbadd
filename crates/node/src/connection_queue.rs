//! In what order the connections of a core have their part of a turn: those who ask for little first.
//!
//! ```text
//!   little:  c d a b          all of them, while the turn has time
//!   much:    g h e f          then these, one at the least
//!            └─ each line begins with whoever had no time the last time
//! ```
//! In: connections, and whether each asks for much. Out: who is next. That those who ask for little go first costs the
//! others little, by what the word means; that one of the others always goes keeps many of the first kind from
//! holding them up for ever (as flow queues with sparse flows have it: RFC 8290, section 4.2).

/// Connections of one turn.
#[derive(Debug, Default)]
pub struct ConnectionQueue {
    light: PriorityClass,
    heavy: PriorityClass,
    /// Who is on turn asks for much; and somebody of these has had a part.
    current_is_heavy: bool,
    heavy_served: bool,
}

/// How many of those who had no time are remembered: the first of them may have nothing to do the next time.
const CARRIED_OVER_MAX: usize = 8;

#[derive(Debug, Default)]
struct PriorityClass {
    members: Vec<u32>,
    /// The next member, in this turn.
    cursor: usize,
    /// The first of those who had no time in the last one.
    carried_over: Vec<u32>,
}

impl PriorityClass {
    /// Those who had no time come first.
    fn begin(&mut self) {
        let mut positions = self
            .carried_over
            .drain(..)
            .filter_map(|first| self.members.iter().position(|&member| member == first));
        let start = positions.next().unwrap_or(0);
        drop(positions);
        self.members.rotate_left(start);
        self.cursor = 0;
    }

    fn next(&mut self) -> Option<u32> {
        let next = self.members.get(self.cursor).copied();
        self.cursor += usize::from(next.is_some());
        next
    }

    fn end(&mut self) {
        let rest = &self.members[self.cursor..];
        self.carried_over.extend_from_slice(&rest[..rest.len().min(CARRIED_OVER_MAX)]);
    }

    fn unserved(&self) -> impl Iterator<Item = u32> {
        self.members[self.cursor..].iter().copied()
    }
}

impl ConnectionQueue {
    /// A line of these, each with whether it asks for much.
    pub fn rebuild(&mut self, members: impl Iterator<Item = (u32, bool)>) {
        self.light.members.clear();
        self.heavy.members.clear();
        for (member, is_heavy) in members {
            let class = if is_heavy { &mut self.heavy } else { &mut self.light };
            class.members.push(member);
        }
        self.light.begin();
        self.heavy.begin();
        self.heavy_served = false;
    }

    /// How many are in it.
    pub fn len(&self) -> usize {
        self.light.members.len() + self.heavy.members.len()
    }

    /// Who is next, where `over` says whether the turn has had its time.
    pub fn next(&mut self, over_budget: bool) -> Option<u32> {
        self.current_is_heavy = false;
        if !over_budget && let Some(next) = self.light.next() {
            return Some(next);
        }
        self.current_is_heavy = true;
        if over_budget && self.heavy_served { None } else { self.heavy.next() }
    }

    /// Who is on turn had something to do.
    pub fn mark_served(&mut self) {
        self.heavy_served |= self.current_is_heavy;
    }

    /// Ends the line: who was not reached is remembered.
    pub fn finish(&mut self) {
        self.light.end();
        self.heavy.end();
    }

    /// Those that were not reached.
    pub fn unserved(&self) -> impl Iterator<Item = u32> {
        self.light.unserved().chain(self.heavy.unserved())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Members 0 to 4 ask for little, 5 to 9 for much; a turn has time for so many of them.
    fn serve_iteration(queue: &mut ConnectionQueue, served_max: usize) -> Vec<u32> {
        queue.rebuild((0..10).map(|member| (member, member >= 5)));
        let mut served = Vec::new();
        while let Some(member) = queue.next(served.len() >= served_max) {
            served.push(member);
            queue.mark_served();
        }
        queue.finish();
        let mut all: Vec<u32> = served.iter().copied().chain(queue.unserved()).collect();
        all.sort_unstable();
        assert_eq!(all, (0..10).collect::<Vec<u32>>(), "whoever had no turn is told of");
        served
    }

    #[test]
    fn light_connections_are_served_before_heavy_ones() {
        assert_eq!(serve_iteration(&mut ConnectionQueue::default(), 100), (0..10).collect::<Vec<u32>>());
        assert_eq!(serve_iteration(&mut ConnectionQueue::default(), 7), (0..7).collect::<Vec<u32>>());
    }

    #[test]
    fn connections_not_served_are_first_in_the_next_iteration() {
        let queue = &mut ConnectionQueue::default();
        assert_eq!(serve_iteration(queue, 7), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(serve_iteration(queue, 7), [0, 1, 2, 3, 4, 7, 8]);
        assert_eq!(serve_iteration(queue, 7), [0, 1, 2, 3, 4, 9, 5]);
        assert_eq!(serve_iteration(queue, 7), [0, 1, 2, 3, 4, 6, 7]);
    }

    #[test]
    fn many_light_connections_do_not_starve_heavy_ones() {
        let queue = &mut ConnectionQueue::default();
        assert_eq!(serve_iteration(queue, 3), [0, 1, 2, 5]);
        assert_eq!(serve_iteration(queue, 3), [3, 4, 0, 6]);
        assert_eq!(serve_iteration(queue, 3), [1, 2, 3, 7]);
        assert_eq!(serve_iteration(queue, 0), [8], "a turn without time, too");
    }

    #[test]
    fn an_idle_heavy_connection_does_not_use_up_the_heavy_slot() {
        let queue = &mut ConnectionQueue::default();
        queue.rebuild([(5, true), (6, true), (7, true), (1, false)].into_iter());
        assert_eq!((queue.next(true), queue.next(true)), (Some(5), Some(6)));
        queue.mark_served();
        assert_eq!(queue.next(true), None);
        queue.finish();
        assert_eq!(queue.unserved().collect::<Vec<u32>>(), [1, 7]);
    }

    #[test]
    fn a_removed_connection_does_not_change_the_order_of_the_others() {
        let queue = &mut ConnectionQueue::default();
        serve_iteration(queue, 6);
        queue.rebuild([(7, true), (8, true)].into_iter());
        assert_eq!(queue.next(false), Some(7));
        queue.rebuild(std::iter::empty());
        assert_eq!(queue.next(false), None);
        queue.finish();
        assert_eq!(queue.unserved().count(), 0);
    }
}
